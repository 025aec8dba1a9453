"""Settings of training. Imports no torch, so that they are checked before anything is loaded.

``training`` (all of them, and which work together) with ``sections`` (optimizer, FSDP, LoRA, rollout, data,
checkpoint), ``algorithms`` (what an algorithm does: clipping, KL, corrections, critic) and ``placement`` (which workers
share processes); ``fp8`` (what is multiplied in fp8, and where that can be had); ``environment`` (what answers in
rollouts of several turns, and its limits); ``context_length`` (how many tokens a prompt and its response may have,
needed before a cycle begins).
"""
