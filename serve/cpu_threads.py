"""How many threads a step of a CPU engine is worth: tried out, while it serves.

Waking a thread for a small step costs more than it saves, and where the API process has work to do, the thread that
comes late to a step holds all the others. Both depend on the model, the machine and the load, so they are not reckoned
but measured: steps of about the same number of tokens are timed, and now and then one of them gets half as many or
twice as many threads as the others.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

_BYTES_A_THREAD: Final = 800_000_000
"""Weights times tokens that make a first guess: a thread for each of these."""
_EARNS: Final = 1.15
"""Twice as many threads have to be this much faster: what they don't take is there for others."""
_LAST_CORE_EARNS: Final = 1.3
"""A thread on every core has to be this much faster besides: the API process would have none of its own."""
_ROUND: Final = 40
"""Steps after which the neighbours have been tried once each."""
_FEWER: Final = frozenset((8, 9))
_MORE: Final = frozenset((28, 29))
_WEIGHT: Final = 0.1
"""Of the last step in the mean."""
_OUTLIER: Final = 3.0
"""Times the mean: more than that is something else that happened."""


class Threads:
    """Sets the number of threads of this process's PyTorch before each step; no more than it has at first."""

    def __init__(self, vllm_config: Any) -> None:
        on_cpu = vllm_config.device_config.device_type == "cpu"
        here = vllm_config.parallel_config.world_size == 1  # else the workers are processes of their own
        folder = Path(vllm_config.model_config.model)
        weights = sum(path.stat().st_size for path in folder.glob("*.safetensors")) if on_cpu and here else 0
        self._most = torch.get_num_threads() if weights else 1
        self._set = self._most
        self._choices = Choices(self._most, weights, len(os.sched_getaffinity(0)) if on_cpu else None)

    def fit(self, tokens: int) -> None:
        """To be called before a step of so many tokens."""
        if self._most == 1:
            return
        count = self._choices.begin(tokens)
        if count != self._set:
            # Not torch.set_num_threads, in whose place vLLM's CPU worker puts a function that does nothing.
            torch._C.set_num_threads(count)
            self._set = count

    def done(self) -> None:
        """To be called after it."""
        if self._most > 1:
            self._choices.end()


class Choices:
    """Which number of threads steps have done best with, by the power of two below their tokens."""

    def __init__(
        self, most: int, weights: int, cores: int | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """``weights``: bytes that each token goes through; ``cores``: of the machine; ``clock``: seconds."""
        counts = {most, *(1 << power for power in range(most.bit_length()))}
        if most > 1 and most == cores:
            counts.add(most - 1)
        self._counts = sorted(counts)
        self._prices = [_EARNS ** math.log2(n) * (_LAST_CORE_EARNS if n == cores else 1.0) for n in self._counts]
        self._weights = weights
        self._clock = clock
        self._kinds: dict[int, _Kind] = {}
        self._now: tuple[_Kind, int, int, float] | None = None  # what is under way: kind, tokens, place, begin
        self._last = -1

    def begin(self, tokens: int) -> int:
        """Threads for a step of so many tokens, which begins."""
        kind = self._kinds.get(tokens.bit_length())
        if kind is None:
            worth = max(1, math.ceil(tokens * self._weights / _BYTES_A_THREAD))
            guess = max(place for place, count in enumerate(self._counts) if count <= max(1, worth))
            kind = self._kinds[tokens.bit_length()] = _Kind(self._prices, guess)
        place = kind.next_place()
        self._now = (kind, tokens, place, self._clock())
        return self._counts[place]

    def end(self) -> None:
        """The step has ended."""
        if self._now is None:
            return
        kind, tokens, place, began = self._now
        if place == self._last and tokens:  # the first step after a change pays for the change
            kind.learn(place, (self._clock() - began) / tokens)
        self._last, self._now = place, None


class _Kind:
    """Steps of about the same number of tokens."""

    def __init__(self, prices: list[float], best: int) -> None:
        self.best = best
        self._means: list[float | None] = [None] * len(prices)
        self._prices = prices
        self._step = 0

    def next_place(self) -> int:
        self._step = (self._step + 1) % _ROUND
        if self._step in _FEWER and self.best > 0:
            return self.best - 1
        if self._step in _MORE and self.best + 1 < len(self._means):
            return self.best + 1
        return self.best

    def learn(self, place: int, seconds: float) -> None:
        """``seconds``: a token's share of a step."""
        mean = self._means[place]
        self._means[place] = seconds if mean is None else mean + _WEIGHT * (min(seconds, _OUTLIER * mean) - mean)
        known = [(mean * self._prices[place], place) for place, mean in enumerate(self._means) if mean is not None]
        self.best = min(known)[1]
