"""From FSDP shards to vLLM's weights, in the processes that hold both.

A plan says, once, which rank sends which slice of which tensor to whom: from FSDP2's placements (sources.py) and from
what vLLM's own loaders ask for (asking.py), by pure arithmetic on shapes (plan.py). Each step then executes it, in
buckets (exchange.py, writing.py), and compares checksums (checks.py). ``gather`` is the way without a plan.
"""

from train.weight_sync.errors import ReshardError
from train.weight_sync.gather import gather
from train.weight_sync.sync import HandOver, hand_over

__all__ = ["HandOver", "ReshardError", "gather", "hand_over"]
