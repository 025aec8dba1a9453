"""Responses, or episodes, to sample, and the seed of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from train.checkpoint.random_state import seed_of


@dataclass(frozen=True)
class Request:
    """``key``: names it on its engine. ``prompt``: token ids, or with an environment all that there is of the prompt.

    ``seed``: of the sample, and of what an environment draws; None: the engine's own.
    """

    key: str
    prompt: Any
    seed: int | None
    greedy: bool = False


def requests_of(
    name: str,
    prompts: Sequence[Any],
    numbers: Iterable[int],
    *,
    n: int,
    greedy: bool,
    seed: int | None,
    episodes: bool,
) -> list[Request]:
    """``n`` requests for each prompt and, behind all of them, if asked for, a greedy one for each.

    Args:
        name: what their keys begin with.
        numbers: of the prompts, among those that ``seed`` is of: by them equal weights give equal samples, whichever
            engine has which prompt.
    """

    def request(prompt: Any, number: int, index: int) -> Request:
        own = None
        if seed is not None:
            own = seed_of(seed, number, index) if episodes else seed_of(seed, number) + index
        return Request(f"{name}-{number}-{index}", prompt, own, index == n)

    numbered = list(zip(prompts, numbers, strict=True))
    sampled = [request(prompt, number, index) for prompt, number in numbered for index in range(n)]
    return sampled + [request(prompt, number, n) for prompt, number in numbered if greedy]
