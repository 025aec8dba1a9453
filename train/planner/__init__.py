"""What a model takes on a machine, before anything is started: memory by role and phase, bytes moved, a step's seconds.

Plain arithmetic, without torch, but where a model is looked at or a processor measured. Read ``plan`` (a step's phases,
and the settings that suit), ``memory`` (a rank's bytes), ``step_time`` (seconds, and bytes moved) and ``machine``
(devices and their rates) over ``sizes`` (the numbers that they compute with); ``model_shape`` (parameters, and what a
pass keeps, from a config.json), ``reward_models`` (by their files) and ``cpu_rates`` (this machine's) make those
numbers. ``engine_memory`` (of a rollout
engine, for the engine itself too). ``check`` (whether what is about to start fits), ``assignment`` (which devices
serve, train and evaluate) and ``defaults`` (what a run does where its settings leave that open) ask them.
"""
