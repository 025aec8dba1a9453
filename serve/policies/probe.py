"""Is what serves what was trained? Logprobs after fixed prompts, compared with the numbers in a policy's manifest.

Publishing a policy calls ``measure`` for the numbers: by transformers, in float32, from the very folder that
is published, so that neither vLLM nor the trainer's memory has a part in them. Where memory has no room for all of it,
its modules read their weights one after the other (``train.export.piecewise``). The server asks its engine for the same
logprobs after each swap. Weights that stayed behind, a layer or a head, are the commonest fault of swaps, and a silent
one.

The engine rounds otherwise than transformers, so ``judge`` leaves a tolerance: on the root mean square of the
differences in nats. In float32 vLLM's logprobs were seen within 1e-4 of transformers'; in bfloat16, whose weights and
activations have eight bits, within 0.04 for a 25M-parameter model, and more the deeper it is. An update that moves the
logprobs by less than the tolerance is judged by another rule too: the engine must have come nearer to the policy's
numbers than it was before the swap.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil

from feedback.trusted_code import trusted
from serve.policies.folder import safetensors_header

if TYPE_CHECKING:
    from torch import nn

_PROMPTS: Final = 4
_PROMPT_TOKENS: Final = 12
_LIKELIEST: Final = 16  # whose logprobs are compared: vLLM returns up to 20

TOLERANCE: Final = {"float32": 0.005, "float16": 0.1, "bfloat16": 0.15}
"""Root mean square difference, in nats, by the engine's dtype."""
_WIDEST: Final = 0.15
_NOISE: Final = {"float32": 0.0005, "float16": 0.02, "bfloat16": 0.05}  # two runs of one policy may differ by this


@dataclass(frozen=True)
class Numbers:
    """``prompts``: token ids; ``tokens``: after each prompt, which next tokens; ``logprobs``: theirs, in nats."""

    prompts: list[list[int]]
    tokens: list[list[int]]
    logprobs: list[list[float]]

    @classmethod
    def of(cls, manifest: dict[str, Any] | None) -> Numbers | str:
        """What a manifest holds under "probe", or why there is nothing to compare with."""
        if manifest is None:
            return "the policy's manifest has no numbers"
        if reason := manifest.get("skipped"):
            return f"no numbers were worked out: {reason}"
        return cls(manifest["prompts"], manifest["tokens"], manifest["logprobs"])


@dataclass(frozen=True)
class Verdict:
    """``difference``: root mean square, in nats; ``objection``: what is wrong, None if nothing is."""

    difference: float
    objection: str | None


class Unreadable(RuntimeError):
    """A model's weights can't be read piece by piece; the text says why."""


def measure(
    folder: Path, model_class: Any = None, piecewise: Callable[[Path, Any], nn.Module] | None = None
) -> dict[str, Any]:
    """A policy's numbers, for ``PolicyStore.publish``; ``{"skipped": reason}`` if memory has no room for them.

    Weights in float32 take half of the memory that is available, at most.

    Args:
        model_class: a user's own; by default that of the policy's config.
        piecewise: makes of folder and class a model whose modules each have their weights only while they compute,
            where there is no room for all of them; raises Unreadable.
    """
    headers = map(safetensors_header, folder.glob("*.safetensors"))
    needed = 4 * sum(math.prod(entry["shape"]) for header in headers for entry in header.values())
    available = psutil.virtual_memory().available
    why = f"in float32 the weights take {needed >> 20} MiB, {available >> 20} MiB are available"
    if needed <= available // 2:
        model = _whole_model(folder, model_class)
    elif piecewise is None:
        return {"skipped": why}
    else:
        try:
            model = piecewise(folder, model_class)
        except Unreadable as error:
            return {"skipped": f"{why}, and they can't be read piece by piece: {error}"}
        largest = 4 * max(parameter.numel() for parameter in model.parameters())
        if 2 * largest > available // 2:  # it is converted from what is stored
            return {"skipped": f"{why}, and the largest alone takes {largest >> 20} MiB"}
    import torch

    prompts = fixed_prompts(model.config.get_text_config().vocab_size)
    with torch.inference_mode():
        logprobs = torch.log_softmax(model(torch.tensor(prompts)).logits[:, -1].float(), dim=-1)
    likeliest = logprobs.topk(min(_LIKELIEST, logprobs.shape[-1]))
    if not likeliest.values.isfinite().all():
        return {"skipped": "its logprobs are not finite"}
    return {
        "prompts": prompts,
        "tokens": likeliest.indices.tolist(),
        "logprobs": [[round(value, 7) for value in row] for row in likeliest.values.tolist()],
    }


def _whole_model(folder: Path, model_class: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    if model_class is None:
        trust = trusted(folder)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=trust).eval()
    return model_class.from_pretrained(folder, dtype=torch.float32).eval()


def fixed_prompts(vocabulary: int) -> list[list[int]]:
    """Token ids spread over the vocabulary, the same for all policies of one vocabulary."""
    state, prompts = 20_241_121, []
    for _ in range(_PROMPTS):
        prompt = []
        for _ in range(_PROMPT_TOKENS):
            state = (1_103_515_245 * state + 12_345) % 2**31  # ANSI C's generator
            prompt.append((state >> 8) % vocabulary)
        prompts.append(prompt)
    return prompts


def judge(numbers: Numbers, before: list[list[float]] | None, served: list[list[float]], dtype: str) -> Verdict:
    """Compare what the engine gives with a policy's numbers; ``before``: what it gave for the same before the swap."""
    difference = _difference(numbers.logprobs, served)
    tolerance, noise = TOLERANCE.get(dtype, _WIDEST), _NOISE.get(dtype, _WIDEST / 3)
    if not difference <= tolerance:  # a NaN is not
        return Verdict(
            difference, f"logprobs are {difference:.4g} nats off the manifest's numbers, {tolerance:g} is allowed"
        )
    if before is not None:
        distance = _difference(numbers.logprobs, before)
        if distance > 2 * noise and difference > distance / 2:
            return Verdict(
                difference,
                f"logprobs are {difference:.4g} nats off the manifest's numbers, about as far as the policy before "
                f"({distance:.4g}): weights stayed behind",
            )
    return Verdict(difference, None)


def _difference(one: list[list[float]], other: list[list[float]]) -> float:
    squares = [(a - b) ** 2 for row, others in zip(one, other, strict=True) for a, b in zip(row, others, strict=True)]
    return math.sqrt(sum(squares) / len(squares))
