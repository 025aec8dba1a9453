"""The SPMD workers, one class each.

``actor``, ``critic``, ``reference``, ``reward``, ``rollout`` (vLLM), ``scorer`` (a reward model in training);
``model_worker`` is what actor, critic and scorer share; ``disaggregated``: generation on a pool of its own.
"""
