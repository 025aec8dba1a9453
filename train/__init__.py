"""Makes a better policy: algorithms, hybrid engine, the Ray job.

Read ``launch`` (where a job runs: a Ray of its own, resident workers, a cluster, torchrun) with ``supervisor``
(attempts at it, one after the other) and ``cluster_job`` (as a job of Ray's), ``resident`` (the driver that stays
between cycles), ``job`` (a training run from beginning to end) and ``context`` (its input and result), then
``dataflows`` (what a step does), ``data`` (what it learns from, and what rewards it), ``environments`` (what answers
the policy in rollouts of several turns), ``rollouts`` (responses that go on over several steps), ``batch`` (packed
tokens), ``algorithms`` (one small file each) over ``objectives`` (pure functions: advantages, losses, KL), ``workers``
(the computation, on each rank) over ``controller`` (how they are called) and ``model`` (FSDP2, attention, LoRA) with
``own_model`` (a class of the user's own, changes to the config) and ``optimizers`` (from gradients to steps), and
``weight_sync`` (from training to generation), ``export`` (from training to a folder) and ``host_memory`` (what waits
there while a device generates).

``run`` (how a run begins, continues and publishes), ``checkpoint`` (the files that a killed run continues from),
``observe`` (progress, health, trackers, hooks), ``config`` (settings of training), ``import_object`` (imports what a
setting names as ``module:name``), ``planner`` (what a model takes on a machine, before anything is started).
"""
