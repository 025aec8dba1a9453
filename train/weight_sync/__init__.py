"""From FSDP shards to vLLM's weights, in the processes that hold both, or from one pool to another.

Read ``sync`` (plan once; then, at each step, execute and compare). Planning: ``fsdp_shards`` (what FSDP2 has put
where), ``loader_tracing`` (what vLLM's own loaders read, and where they put it), ``slices`` (boxes of tensors),
``plan`` (which rank sends which slice of which tensor to whom, by pure arithmetic on shapes). Executing: ``exchange``
(buckets, by all-to-all), ``vllm_writer`` (writes slices into the live model), ``checksums`` (proof that generation has
the weights that training has), ``transfer`` (the process groups of one pool or of two that share no process).

``gather`` (the way without a plan: every tensor whole); ``adapters`` (adapters alone, beside the engine's own weights).
"""
