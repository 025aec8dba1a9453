"""The SPMD workers, one class each, and which groups of them a job has (``role_groups``).

``actor``, ``critic``, ``reference``, ``reward``, ``rollout`` (vLLM), ``scorer`` (a reward model in training);
``model_worker`` is what actor, critic and scorer share; ``disaggregated``: generation on a pool of its own.
"""
