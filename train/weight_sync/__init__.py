"""From FSDP shards to vLLM's weights, in the processes that hold both.

A plan says, once, which rank sends which slice of which tensor to whom: from FSDP2's placements (``fsdp_shards``) and
from what vLLM's own loaders ask for (``loader_tracing``), by pure arithmetic on shapes (``plan``, ``slices``). Each
step then executes it (``sync``) in buckets (``exchange``, ``vllm_writer``), and compares ``checksums``. ``gather`` is
the way without a plan; ``transfer`` is for pools that share no process.
"""
