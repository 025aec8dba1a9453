"""Generation by transformers on a sharded model: each step is a forward pass of FSDP2, as in training.

A pass is a collective. So all ranks make as many batches, and as many steps in each: a batch goes on until every rank's
responses have ended, and a rank that has none left takes part with a row that does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

_ROWS_A_DRAW = 32
"""Whose distributions are added up in float64 at once."""


@dataclass(frozen=True)
class Sampling:
    """What responses are drawn from: logits over ``temperature``, of the ``top_k`` likeliest tokens (0: all) those
    likeliest ones that have ``top_p`` of the probability."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    @property
    def warpers(self) -> list[LogitsProcessor]:
        """In the order in which vLLM applies them."""
        return [
            *([TemperatureLogitsWarper(self.temperature)] if self.temperature != 1 else []),
            *([TopKLogitsWarper(self.top_k)] if self.top_k else []),
            *([TopPLogitsWarper(self.top_p)] if self.top_p < 1 else []),
        ]


@dataclass(frozen=True)
class Generated:
    """A response: its tokens, their logprobs in what they were drawn from, and whether a stop token ended it."""

    token_ids: list[int]
    log_probs: list[float]
    stopped: bool


def generate(
    model: nn.Module,
    prompts: Sequence[list[int]],
    seeds: Sequence[int] | None,
    sampling: Sampling,
    stop: frozenset[int],
    rows_at: Callable[[int], int],
) -> list[Generated]:
    """A response to each prompt (token ids); every rank must call it, with the same of all but prompts and seeds.

    Behind it the model is sharded, as before, and in eval mode.

    Args:
        model: a causal LM of transformers, as ``train.model.fsdp.build`` makes it.
        seeds: one a prompt, of 63 bits: equal weights, prompts and seeds give equal responses, whatever is beside them.
            None: the likeliest tokens, and ``sampling``'s ``max_tokens`` alone counts.
        stop: tokens that end a response; they are part of it.
        rows_at: how many sequences of a length, in tokens, may be in the KV cache at once.

    Raises:
        FloatingPointError: a logprob is not finite.
    """
    model.eval()
    # What the policy's generation_config.json would change in the distribution is left out, as in vLLM's engine.
    model.generation_config = GenerationConfig()
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    found: dict[int, Generated] = {}
    for batch in _batches([len(prompts[i]) for i in order], sampling.max_tokens, rows_at):
        rows = order[batch]
        drawn = None if seeds is None else [seeds[i] for i in rows]
        found.update(zip(rows, _generate(model, [prompts[i] for i in rows], drawn, sampling, stop), strict=True))
    if isinstance(model, FSDPModule):
        model.reshard()
    return [found[i] for i in range(len(prompts))]


def _batches(lengths: list[int], max_tokens: int, rows_at: Callable[[int], int]) -> Iterator[slice]:
    """Of sequences in the order of their lengths, those that are generated at once; as many on every rank."""
    slices, first = [], 0
    while first < len(lengths):
        last = first + 1
        while last < len(lengths) and last - first < rows_at(lengths[last] + max_tokens):
            last += 1
        slices.append(slice(first, last))
        first = last
    count = torch.tensor(len(slices))
    torch.distributed.all_reduce(count, torch.distributed.ReduceOp.MAX)
    yield from slices
    yield from [slice(0, 0)] * (int(count) - len(slices))


def _generate(
    model: Any, prompts: list[list[int]], seeds: list[int] | None, sampling: Sampling, stop: frozenset[int]
) -> list[Generated]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = prompts or [[0]]  # one that doesn't count
    longest = max(map(len, rows))
    tokens = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
    draw = Draw(seeds if prompts else None, sampling.max_tokens, device)
    model.generate(
        tokens,
        attention_mask=mask,
        generation_config=GenerationConfig(max_new_tokens=sampling.max_tokens, do_sample=False),
        logits_processor=LogitsProcessorList([*([] if seeds is None else sampling.warpers), draw]),
        stopping_criteria=StoppingCriteriaList([AllStopped(stop, len(rows), device, counts=bool(prompts))]),
        synced_gpus=False,  # it lets a rank that is done go on with inputs that don't grow; AllStopped has none be done
    )
    return draw.responses(stop)[: len(prompts)]


class Draw(LogitsProcessor):
    """Draws a token for each row, by a seed of its own, leaves no other to choose, and keeps it with its logprob."""

    def __init__(self, seeds: Sequence[int] | None, max_tokens: int, device: torch.device) -> None:
        self.tokens: list[Tensor] = []
        self.log_probs: list[Tensor] = []
        self.uniform: Tensor | None = None
        if seeds is not None:
            generators = (torch.Generator().manual_seed(seed) for seed in seeds)  # of the CPU: alike on all devices
            numbers = [torch.rand(max_tokens, generator=generator, dtype=torch.float64) for generator in generators]
            self.uniform = torch.stack(numbers).to(device)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """float32 [rows, V]: 0 for the tokens that are drawn, and -inf."""
        log_probs = scores.log_softmax(-1)
        tokens = log_probs.argmax(-1)
        if self.uniform is not None:
            tokens = drawn(log_probs, self.uniform[:, len(self.tokens)])
        self.tokens.append(tokens)
        self.log_probs.append(log_probs.gather(1, tokens[:, None])[:, 0])
        return torch.full_like(scores, -torch.inf).scatter(1, tokens[:, None], 0.0)

    def responses(self, stop: frozenset[int]) -> list[Generated]:
        """Of each row, up to the first token that stops it. Raises FloatingPointError."""
        found = []
        both = (torch.stack(of, dim=1).tolist() for of in (self.tokens, self.log_probs))
        for tokens, log_probs in zip(*both, strict=True):
            last = next((i for i, token in enumerate(tokens) if token in stop), None)
            until = None if last is None else last + 1
            if not torch.tensor(log_probs[:until]).isfinite().all():
                raise FloatingPointError(f"generation gave logprobs that are not finite: {log_probs[:until]}")
            found.append(Generated(tokens[:until], log_probs[:until], last is not None))
        return found


def drawn(log_probs: Tensor, uniform: Tensor) -> Tensor:
    """int64 [rows]: the token at which the distribution function of each row passes its number in [0, 1).

    Args:
        log_probs: [rows, V], nats; -inf is never drawn.
        uniform: float64 [rows].
    """
    tokens, last = [], log_probs.shape[-1] - 1  # NaN passes no number
    for part, numbers in zip(log_probs.split(_ROWS_A_DRAW), uniform.split(_ROWS_A_DRAW), strict=True):
        total = part.double().exp().cumsum(-1)
        tokens.append(torch.searchsorted(total, numbers[:, None] * total[:, -1:], right=True)[:, 0].clamp(max=last))
    return torch.cat(tokens)


class AllStopped(StoppingCriteria):
    """Ends a batch on all ranks at once, when each of them has met a stop token in every row; until then none does."""

    def __init__(self, stop: frozenset[int], rows: int, device: torch.device, *, counts: bool) -> None:
        self.stop = torch.tensor(sorted(stop), device=device, dtype=torch.int64)
        self.running = torch.full((rows,), counts, device=device)

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.running &= ~torch.isin(input_ids[:, -1], self.stop)
        running = self.running.any().int().cpu()
        torch.distributed.all_reduce(running, torch.distributed.ReduceOp.MAX)
        return torch.full_like(self.running, not running)
