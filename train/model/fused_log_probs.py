"""Log-probabilities and entropies from hidden states, tile by tile over the vocabulary: the logits are never whole.

A tile of logits is a few MiB, so on a CPU the exponentials run in cache. The forward pass keeps a running logsumexp and
the backward pass makes each tile again. The tiles of one slice of the vocabulary are gathered before its part of the
weight's gradient is taken, so that every element of that gradient comes from one matrix product, rounded once, as it
would with whole logits; the hidden states' gradient adds up over slices in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from train.batch.prompt_rows import take_rows
from train.model.hf_io import own_slice
from train.model.tensor_parallel import local

TILE = {"cpu": (1024, 1024), "cuda": (4096, 8192)}
"""Tokens and vocabulary entries of one tile, by device type."""


@dataclass(frozen=True)
class LogitTransform:
    """What a model does to its logits after the head: ``cap · tanh(scale · x / cap)``, or ``scale · x`` without cap."""

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        scaled = logits * self.scale
        return scaled if self.cap is None else self.cap * torch.tanh(scaled / self.cap)


IDENTITY = LogitTransform()


@dataclass(frozen=True)
class VocabularySlice:
    """A rank's slice of the vocabulary's entries, which begins at ``first``; the ranks of ``group`` have them all."""

    group: ProcessGroup
    first: int

    @classmethod
    def of(cls, weight: Tensor) -> VocabularySlice | None:
        """That of the output layer's weight under tensor parallelism; None of one that is whole."""
        if not isinstance(weight, DTensor):
            return None
        return cls(weight.device_mesh.get_group(), own_slice(weight)[0].start)

    def over_all(self, peaks: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Of this slice's → of all entries: the largest logit of each token, and its target's logit and the sums of
        exp(z - peak) and exp(z - peak)·(z - peak), [K] and [3, K]. Two all-reduces; logits stay where they are."""
        highest = peaks.clone()
        torch.distributed.all_reduce(highest, torch.distributed.ReduceOp.MAX, group=self.group)
        chosen, sum_exp, sum_exp_z = sums
        fell = peaks - highest
        shrink = fell.exp()
        total = torch.stack([chosen, shrink * sum_exp, shrink * (sum_exp_z + fell * sum_exp)])
        torch.distributed.all_reduce(total, group=self.group)
        return highest, total


def log_probs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperatures: Tensor,
    transform: LogitTransform = IDENTITY,
    tile: tuple[int, int] | None = None,
    shared: VocabularySlice | None = None,
) -> tuple[Tensor, Tensor]:
    """The log-probability of each target, and the entropy of the distribution that it is taken from; differentiable.

    The logits are those of ``functional.linear(hidden, weight, bias)`` in its dtype; all else is float32, or float64
    if that is.

    Args:
        hidden, weight, bias: [K, H], [V, H] and [V], in the compute dtype.
        targets: int64 [K].
        temperatures: float32 [K]; the transformed logits are divided by them.
        transform: what the model does to its logits.
        tile: tokens and vocabulary entries of a tile; by default those of the device.
        shared: if ``weight`` and ``bias`` are a slice of the vocabulary's entries, which, and who has the others: all
            of them call with the same of everything else, and get the same.

    Returns:
        (log_probs, entropy): float32 [K], nats.
    """
    tile = tile or TILE.get(hidden.device.type, TILE["cuda"])
    return _TiledHead.apply(hidden, weight, bias, targets, temperatures, transform, tile, shared)


class _TiledHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperatures: Tensor,
        transform: LogitTransform,
        tile: tuple[int, int],
        shared: VocabularySlice | None,
    ) -> tuple[Tensor, Tensor]:
        exact = torch.promote_types(hidden.dtype, torch.float32)
        log_normalisers, log_probs, entropies = (hidden.new_empty(len(hidden), dtype=exact) for _ in range(3))
        first = 0 if shared is None else shared.first
        peaks, sums = torch.empty_like(log_probs), log_probs.new_empty(3, len(hidden))
        for tokens in _slices(len(hidden), tile[0]):
            # With z the logits and peak the largest so far: the sums of exp(z - peak) and of exp(z - peak)·(z - peak).
            chosen, sum_exp, sum_exp_z = (torch.zeros_like(log_probs[tokens]) for _ in range(3))
            peak = torch.full_like(chosen, torch.finfo(exact).min)
            for entries in _slices(len(weight), tile[1]):
                z = _tile(hidden, weight, bias, temperatures, transform, tokens, entries)
                inside, place = _places(targets[tokens] - first, entries)
                chosen = torch.where(inside, z.gather(1, place)[:, 0], chosen)
                higher = torch.maximum(peak, z.amax(1))
                fell, peak = peak - higher, higher
                shrink = fell.exp()
                z.sub_(peak[:, None])
                e = z.exp()
                sum_exp_z = shrink * (sum_exp_z + fell * sum_exp)
                sum_exp = shrink * sum_exp + e.sum(1)
                sum_exp_z += e.mul_(z).sum(1)
            peaks[tokens], sums[:, tokens] = peak, torch.stack([chosen, sum_exp, sum_exp_z])
        if shared is not None:
            peaks, sums = shared.over_all(peaks, sums)
        chosen, sum_exp, sum_exp_z = sums
        log_sum = sum_exp.log()
        log_normalisers = peaks + log_sum
        log_probs, entropies = chosen - log_normalisers, log_sum - sum_exp_z / sum_exp
        ctx.shared = shared
        ctx.save_for_backward(hidden, weight, bias, targets, temperatures, log_normalisers, entropies)
        ctx.transform, ctx.tile = transform, tile
        ctx.set_materialize_grads(False)
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Any, ...]:
        """With p the probabilities and h the entropy: ∂log p_y/∂z = 1[y] − p, and ∂h/∂z = −p (log p + h)."""
        hidden, weight, bias, targets, temperatures, log_normalisers, entropies = ctx.saved_tensors
        transform: LogitTransform = ctx.transform
        shared: VocabularySlice | None = ctx.shared
        first = 0 if shared is None else shared.first
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(entropies)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros(hidden.shape, dtype=entropies.dtype, device=hidden.device) if wants_hidden else None
        grad_weight = torch.empty_like(weight) if wants_weight else None
        grad_bias = torch.empty_like(bias) if wants_bias else None
        for entries in _slices(len(weight), ctx.tile[1]):
            gradient = hidden.new_empty(len(hidden), entries.stop - entries.start)
            for tokens in _slices(len(hidden), ctx.tile[0]):
                z = _tile(hidden, weight, bias, temperatures, transform, tokens, entries)
                through = None
                if transform.cap is not None:
                    through = 1 - (z * (temperatures[tokens, None] / transform.cap)).square_()
                z.sub_(log_normalisers[tokens, None])
                if grad_entropy is None:
                    d = z.exp_().mul_(-grad_log_probs[tokens, None])
                else:
                    slope = (z + entropies[tokens, None]).mul_(-grad_entropy[tokens, None])
                    d = z.exp_().mul_(slope.sub_(grad_log_probs[tokens, None]))
                inside, place = _places(targets[tokens] - first, entries)
                d.scatter_add_(1, place, (grad_log_probs[tokens] * inside)[:, None])
                if through is not None:
                    d.mul_(through)
                gradient[tokens] = d.mul_((transform.scale / temperatures[tokens])[:, None])
            if grad_hidden is not None:
                grad_hidden += gradient @ weight[entries]
            if grad_weight is not None:
                torch.mm(gradient.t(), hidden, out=grad_weight[entries])
            if grad_bias is not None:
                grad_bias[entries] = gradient.sum(0, dtype=entropies.dtype)
        if grad_hidden is not None and shared is not None:
            torch.distributed.all_reduce(grad_hidden, group=shared.group)
        return grad_hidden if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, grad_bias, *[None] * 5


def _slices(length: int, size: int) -> Iterator[slice]:
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def _tile(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperatures: Tensor,
    transform: LogitTransform,
    tokens: slice,
    entries: slice,
) -> Tensor:
    """float32 [tokens, entries]: transformed logits over the temperature; the caller may write to it."""
    x = functional.linear(hidden[tokens], weight[entries], None if bias is None else bias[entries])
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if transform.cap is not None:
        return x.mul_(transform.scale / transform.cap).tanh_().mul_((transform.cap / temperatures[tokens])[:, None])
    return x.mul_((transform.scale / temperatures[tokens])[:, None])


def _places(targets: Tensor, entries: slice) -> tuple[Tensor, Tensor]:
    """bool [k]: is the target in this slice of the vocabulary? int64 [k, 1]: where (anywhere, if it is not)."""
    inside = (targets >= entries.start) & (targets < entries.stop)
    return inside, (targets - entries.start).clamp(0, entries.stop - entries.start - 1)[:, None]


# ------------------------------------------------------------------------------------- in a Hugging Face causal LM


@contextmanager
def scored_by_head(model: nn.Module, positions: Tensor, targets: Tensor, temperatures: Tensor) -> Iterator[None]:
    """Within, ``model(…).logits`` is float32 [K, 2]: the log-probability of each target, and the entropy there.

    The head returns known values for logits; from what the model turns them into follows what it does to logits after
    the head: nothing, scale (Cohere, Granite) or cap them (Gemma). The log-probabilities take the place of those values
    before FSDP2 sees the model's output, while the head's weight is whole. A head that is not a plain ``nn.Linear``
    (one with LoRA) is called on a slice of the tokens at a time, and again in the backward pass.

    Args:
        model: the module that is called; with FSDP2, the root, which must hold the head's weight itself.
        positions: int64 [K], places in the flat sequence whose hidden states are scored.
        targets: int64 [K], the token that follows each.
        temperatures: float32 [K].

    Raises:
        ValueError: by the call, if the model does not score by its output embeddings, or does something else to logits.
    """
    head: nn.Module | None = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"{type(model).__name__} has no output embeddings to take log-probabilities from")
    plain = head.forward
    seen: list[Tensor] = []

    def keep_hidden(hidden: Tensor) -> Tensor:
        seen.append(hidden.flatten(0, -2))
        return torch.tensor(_PROBES, device=hidden.device)[None, :, None]

    def score(_: nn.Module, __: Any, output: Any) -> Any:
        if len(seen) != 1:
            raise ValueError(f"{type(model).__name__} called its output embeddings {len(seen)} times; once is expected")
        transform = transform_of(output.logits, type(model).__name__)
        hidden = take_rows(seen.pop(), positions)
        if type(head) is nn.Linear:
            shared = VocabularySlice.of(head.weight)
            weight, bias = local(head.weight), None if head.bias is None else local(head.bias)
            scores = log_probs_and_entropy(hidden, weight, bias, targets, temperatures, transform, shared=shared)
        else:
            scores = _by_calls(plain, hidden, targets, temperatures, transform)
        output.logits = torch.stack(scores, dim=-1)
        return output

    hook = model.register_forward_hook(score, prepend=True)
    head.forward = keep_hidden
    try:
        yield
    finally:
        del head.forward
        hook.remove()


_PROBES = (0.0, 1e-3, -1e-3, 0.5, -0.5, 3.0, -3.0, 40.0, -40.0, 1e6, -1e6)


def transform_of(probed: Tensor, name: str) -> LogitTransform:
    """The transform that takes ``_PROBES`` to the logits that the model returned for them.

    Raises:
        ValueError: no scale and soft cap do.
    """
    values = torch.tensor(_PROBES, dtype=torch.float64)
    observed = probed.detach().double().cpu().flatten()
    if observed.shape == values.shape:
        scale = float(observed[1] / values[1])
        limit = float(observed[-2])
        for guess in (IDENTITY, LogitTransform(scale), LogitTransform(scale, limit)):
            if torch.allclose(guess(values), observed, rtol=1e-4, atol=1e-9):
                return guess
    raise ValueError(
        f"{name} does something to its logits that is neither a scale nor a soft cap: it turned "
        f"{values.tolist()} into {observed.tolist()}; its log-probabilities cannot be taken tile by tile"
    )


def _by_calls(
    head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, temperatures: Tensor, transform: LogitTransform
) -> tuple[Tensor, Tensor]:
    """As ``log_probs_and_entropy``, by whole rows of logits from the head itself, for a few tokens at a time."""

    def rows(hidden: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
        distribution = torch.log_softmax(transform(head(hidden).float()) / temperatures[:, None], dim=-1)
        entropy = -(distribution.exp() * distribution).sum(-1)
        return distribution.gather(1, targets[:, None])[:, 0], entropy

    parts = [
        checkpoint(rows, hidden[s], targets[s], temperatures[s], use_reentrant=False)
        for s in (list(_slices(len(hidden), _TOKENS_A_CALL)) or [slice(0, 0)])
    ]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


_TOKENS_A_CALL = 256
