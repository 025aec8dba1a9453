"""Weights of a step into the engine: plan once, execute, compare."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from train.weight_sync.checksums import Comparison, sample
from train.weight_sync.exchange import Exchange
from train.weight_sync.fsdp_shards import placed, shards
from train.weight_sync.plan import Needed, make_plan
from train.weight_sync.slices import Box

if TYPE_CHECKING:
    from train.weight_sync.loader_tracing import Need

BUCKET_BYTES = 64 * 2**20
CHECKED_TENSORS = 4


class WeightSync:
    """From one model in training to the engine in the same processes, by a plan. Every rank makes one, and runs it."""

    def __init__(self, model: nn.Module, llm: Any, *, bucket_bytes: int = BUCKET_BYTES) -> None:
        """Trace the loaders, and plan.

        Args:
            llm: vLLM's ``LLM`` over the same ranks, in this process.
            bucket_bytes: extra memory that a run may take. Half of it holds what one exchange sends and receives,
                half what the next one does; a row of every shard of a tensor is the least that one can hold.

        Raises:
            ReshardError: a loader of vLLM does more than copy; ``gather`` needs no plan.
        """
        from vllm.config import set_current_vllm_config

        from train.weight_sync.loader_tracing import trace_loaders
        from train.weight_sync.vllm_writer import LiveWeights

        worker = llm.collective_rpc(_itself)[0]
        self._vllm_config, engine = worker.vllm_config, worker.get_model()
        self.dtype: torch.dtype = self._vllm_config.model_config.dtype
        self._model, self.held = model, placed(model)
        shapes = {name: place.shape for name, place in self.held.items()}
        with set_current_vllm_config(self._vllm_config):
            trace = trace_loaders(engine, shapes, self.dtype)
        self._target = LiveWeights(engine, self._vllm_config.model_config, trace)
        self._needs: dict[str, list[Need]] = {}
        for need in trace.needs:
            self._needs.setdefault(need.tensor, []).append(need)
        self.needed = gather_needs({name: tuple(n.box for n in needs) for name, needs in self._needs.items()})
        self.plan = make_plan(
            torch.distributed.get_rank(),
            self.held,
            self.needed,
            exchange_elements=bucket_bytes // 2 // self.dtype.itemsize,
        )
        self._turn = 0

    @torch.no_grad()
    def run(self, *, checked_tensors: int = CHECKED_TENSORS) -> list[str]:
        """Load the weights as they are, and compare checksums of some tensors; returns their names.

        Raises:
            ReshardError: a tensor does not arrive as it is in training.
        """
        from vllm.config import set_current_vllm_config

        names = sample(list(self.held), checked_tensors, self._turn)
        self._turn += 1
        comparison = Comparison(names, self.plan, self._needs, self._target, self.dtype)
        with set_current_vllm_config(self._vllm_config):
            Exchange(self.plan, shards(self._model), self._target, self._needs, self.dtype, comparison).run()
        comparison.require_equal()
        return names


def gather_needs(boxes: dict[str, tuple[Box, ...]]) -> Needed:
    """What every rank needs, from what this one does."""
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, boxes)
    kinds: list[Any] = []
    for needed in every:
        if needed not in kinds:
            kinds.append(needed)
    return Needed(tuple(kinds), tuple(kinds.index(needed) for needed in every))


def _itself(worker: Any) -> Any:
    return worker
