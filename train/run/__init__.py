"""A run from its beginning to what it leaves.

``resume`` (a run begins, continues, or was finished) with ``resume_settings`` (which settings must then be the same),
``failure`` (why an attempt failed, and whether another one may not), ``restarts`` (those of a run, on record),
``checkpoints`` (when to save, and what is still being written), ``best_weights`` (those of the step that was the best
on held-out prompts), ``publish`` (the trained policy, into the store),
``reward_model`` (a trained reward model, and whether it is to reward) with ``calibration`` (its scores as log odds),
``erasures`` (rows that were erased while it trained), ``unfinished`` (runs at work or killed, and what goes with an
erasure), ``retention`` (which runs keep their checkpoints), ``record`` (all that a run's folder tells). Machines
without a shared disk: ``run_store`` (runs in an object store), ``shared_run`` (one at work, that others may go on
with).
"""
