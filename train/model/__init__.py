"""A model in training.

Read ``fsdp`` (build, shard, run) with ``mesh`` (which ranks shard the weights, which replicate them),
``shard_dimensions`` (on which dimension each weight is sharded) and ``hf_io`` (a Hugging Face folder into shards, and
the names it has for them) with ``stored_parts`` (parameters that are stored in several tensors, as experts are). Then
``attention`` (over a packed batch, sequence by sequence), ``ulysses`` (sequence parallelism) and ``tensor_parallel``
(ranks share layers); ``fused_log_probs`` (log-probabilities and entropies, the logits never whole); ``generation``
(responses, by transformers); ``lora`` (low-rank adapters); ``low_precision`` (products in fp8, frozen weights of 4
bits); ``scalar_head`` (one output: critics and reward models).
"""
