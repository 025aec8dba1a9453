"""A run from its beginning to what it leaves.

``resume`` (a run begins, continues, or was finished) with ``resume_settings``, ``checkpoints`` (as it goes),
``publish`` (a policy), ``reward_model`` (a reward model), ``unfinished`` (runs that were killed) with ``retention``
(what those keep), ``erasures`` (rows that were erased while it trained).
"""
