"""A model in training: ``fsdp`` (build, shard, run, export) with ``mesh``, ``shard_dimensions`` and ``hf_io``;
``attention`` with ``attention_calls`` and ``ulysses`` (sequence parallelism); ``fused_log_probs``; ``lora``;
``scalar_head``.
"""
