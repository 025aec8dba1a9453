"""A run from its beginning to what it leaves.

``recovery`` (a run begins, goes on after it was ended, or was finished; runs in an object store), ``checkpoints`` (when
to save, and what is still being written), ``devices`` (what its ranks compute on, before they are there),
``best_weights`` (those of the step that was the best on held-out prompts), ``publish`` (the trained policy, into the
store), ``reward_model`` (a trained reward model, and whether it is to reward) with ``calibration`` (its scores as log
odds), ``retention`` (which runs keep their checkpoints), ``record`` (all that a run's folder tells), ``shared_run`` (a
run at work on machines without a shared disk, that others may go on with).
"""
