"""Makes a better policy: algorithms, hybrid engine, the Ray job.

Read ``job`` (a training run from beginning to end), then ``dataflows`` (what a step does), ``algorithms`` over
``objectives`` (pure functions), ``workers`` (the computation) over ``controller`` (how they are called) and ``model``
(FSDP2), and ``weight_sync`` (from training to generation). ``launch`` starts a job; ``run`` and ``checkpoint`` keep it.
"""
