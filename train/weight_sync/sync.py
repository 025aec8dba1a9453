"""Weights of a step into the engine: plan once, execute, compare."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from train.weight_sync.checksums import Comparison, sample
from train.weight_sync.exchange import Exchange
from train.weight_sync.fsdp_shards import placed, shards
from train.weight_sync.plan import Needed, make_plan
from train.weight_sync.slices import Box, Held
from train.weight_sync.transfer import Group, OwnPool

if TYPE_CHECKING:
    from train.weight_sync.loader_tracing import Need
    from train.weight_sync.vllm_writer import LiveWeights

BUCKET_BYTES = 64 * 2**20
CHECKED_TENSORS = 4

_HELD: Final = TypeAdapter(dict[str, Held])
_NEEDS: Final = TypeAdapter(tuple[str | None, dict[str, tuple[Box, ...]]])
"""Of what ranks tell each other, which may be in different pools: an engine's type, and boxes by tensor."""


class WeightSync:
    """From one model in training to the engines, by a plan. Every rank makes one, and runs it.

    A rank has the model, or an engine, or both: pools are separate, or one. Each slice goes from a rank that holds it
    straight to each rank that needs it, once, also where several engines need it. What an engine receives is the same
    when they pass slices on, and it is what a step waits for unless more ranks generate than train; to pass them on
    would take a second hop and buffers for it, and one engine's failure would keep the others from their weights.
    """

    def __init__(
        self,
        model: nn.Module | None,
        llm: Any | None,
        group: Group | None = None,
        *,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Trace the loaders, and plan.

        Args:
            model: this rank's shards of it; None where the rank only generates.
            llm: vLLM's ``LLM`` over the ranks that generate, in this process; None where the rank only trains.
            group: those that train, from rank 0 on, and those that generate; by default the ranks of this pool, which
                do both.
            bucket_bytes: extra memory that a run may take. Half of it holds what one exchange sends and receives,
                half what the next one does; a row of every shard of a tensor is the least that one can hold.

        Raises:
            ReshardError: a loader of vLLM does more than copy; ``gather`` needs no plan.
        """
        self._model, self._group = model, group or OwnPool()
        self.held: dict[str, Held] = {} if model is None else placed(model)
        if model is None or llm is None:
            own_text = _HELD.dump_json(self.held if self._group.rank == 0 else {})
            self.held = _HELD.validate_json(self._group.gather_bytes(own_text)[0])
        self._vllm_config: Any = None
        self._target: LiveWeights | None = None
        self._needs: dict[str, list[Need]] = {}
        if llm is not None:
            self._trace(llm)
        own = {name: tuple(n.box for n in needs) for name, needs in self._needs.items()}
        self.dtype, self.needed = gather_needs(self._group, self._dtype_of_engine, own)
        self.plan = make_plan(
            self._group.rank,
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
            RuntimeError: (of torch.distributed) another rank has gone, or does not come in time.
        """
        names = sample(list(self.held), checked_tensors, self._turn)
        self._turn += 1
        comparison = Comparison(names, self.plan, self._group, self._needs, self._target, self.dtype)
        with self._engines_config():
            Exchange(self.plan, self._group, self._shards(), self._target, self._needs, self.dtype, comparison).run()
        comparison.require_equal()
        return names

    def _trace(self, llm: Any) -> None:
        from train.weight_sync.loader_tracing import trace_loaders
        from train.weight_sync.vllm_writer import LiveWeights

        worker = llm.collective_rpc(_itself)[0]
        self._vllm_config, engine = worker.vllm_config, worker.get_model()
        shapes = {name: place.shape for name, place in self.held.items()}
        with self._engines_config():
            trace = trace_loaders(engine, shapes, self._vllm_config.model_config.dtype)
        self._target = LiveWeights(engine, self._vllm_config.model_config, trace)
        for need in trace.needs:
            self._needs.setdefault(need.tensor, []).append(need)

    @property
    def _dtype_of_engine(self) -> torch.dtype | None:
        return None if self._vllm_config is None else self._vllm_config.model_config.dtype

    def _engines_config(self) -> AbstractContextManager[Any]:
        if self._vllm_config is None:
            return nullcontext()
        from vllm.config import set_current_vllm_config

        return set_current_vllm_config(self._vllm_config)

    def _shards(self) -> Iterator[tuple[str, Tensor]]:
        if self._model is not None:
            return shards(self._model)
        return ((name, torch.empty(0)) for name in self.held)


def gather_needs(
    group: Group, dtype: torch.dtype | None, boxes: dict[str, tuple[Box, ...]]
) -> tuple[torch.dtype, Needed]:
    """The engines' type and what every rank needs, from what this one does; ``dtype``: None where it has no engine."""
    name = None if dtype is None else str(dtype).removeprefix("torch.")
    every = [_NEEDS.validate_json(text) for text in group.gather_bytes(_NEEDS.dump_json((name, boxes)))]
    kinds: list[dict[str, tuple[Box, ...]]] = []
    for _, needed in every:
        if needed not in kinds:
            kinds.append(needed)
    names = [name for name, _ in every if name is not None]
    return getattr(torch, names[0]), Needed(tuple(kinds), tuple(kinds.index(needed) for _, needed in every))


def _itself(worker: Any) -> Any:
    return worker
