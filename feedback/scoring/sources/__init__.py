"""The sources of a reward, one file each; each gives a component between 0 and 1, or a reason why it is missing.

``human`` (feedback), ``rules`` (functions and SQL) with ``builtin`` (ready-made ones), ``reward_model`` (a
sequence-classification model), ``judge`` (a model behind an OpenAI-compatible API) with ``judge_cache`` (its scores so
far) and ``openai_api`` (how such an API is asked). ``comparison`` (a judge of two answers to a prompt) is no source:
evaluation uses it.
"""
