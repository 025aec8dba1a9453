"""The task of ``make bench-learn``: eight verbs of unequal difficulty, each with a right answer and wrong ones.

A prompt is a verb and a word of eight letters, ``T abcdefgh>``. The policy to start from (``loadtests.word_policy``)
has seen right answers and wrong ones: of a verb's demonstrations between 90 % and 8 % are right. So it knows all of the
right answers, and its greedy ones are right for the easy verbs alone, as a pretrained model's are on a benchmark that
it solves in part. This file stands alone: it is read by both sides, and as a module of a home.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

LETTERS: Final = "abcdefghijklmnop"
LENGTH: Final = 8
MAX_TOKENS: Final = 8
"""Of the longest answer, the end and one more."""
TASK_SEED: Final = 5
HELD_OUT: Final = 256
"""Prompts that accuracy is measured on."""
TRAINED_ON: Final = 128
"""Prompts of training, which come after them; the corpus is drawn from those that follow."""


@dataclass(frozen=True)
class Verb:
    """The right answer, the usual wrong one, and the share of right ones in the corpus."""

    right: Callable[[str], str]
    habit: Callable[[str], str]
    share: float


VERBS: Final[dict[str, Verb]] = {
    "F": Verb(lambda w: w[:4], lambda w: w[4:], 0.9),
    "L": Verb(lambda w: w[4:], lambda w: w[:4], 0.9),
    "O": Verb(lambda w: w[::2], lambda w: w[1::2], 0.9),
    "M": Verb(lambda w: w[2:-2], lambda w: w[2:], 0.25),
    "N": Verb(lambda w: w[1:-1], lambda w: w[1:], 0.25),
    "T": Verb(lambda w: w[1::2], lambda w: w[::2], 0.25),
    "B": Verb(lambda w: w[3:], lambda w: w[:3], 0.08),
    "A": Verb(lambda w: w[:5], lambda w: w[:6], 0.08),
}


def held_out() -> list[str]:
    """The prompts that accuracy is measured on."""
    return list(itertools.islice(prompts(), HELD_OUT))


def trained_on() -> list[str]:
    """The prompts that responses are sampled to in training."""
    return list(itertools.islice(prompts(), HELD_OUT, HELD_OUT + TRAINED_ON))


def corpus() -> Iterator[tuple[str, str]]:
    """Prompts and answers without end, always the same ones, of prompts that are in neither of the two."""
    order = random.Random(TASK_SEED)
    for prompt in itertools.islice(prompts(), HELD_OUT + TRAINED_ON, None):
        verb, word = parts(prompt)
        yield prompt, (verb.right if order.random() < verb.share else verb.habit)(word)


def prompts() -> Iterator[str]:
    """Distinct prompts without end, always the same ones, of each verb in turn."""
    order, seen = random.Random(TASK_SEED), set[str]()
    for name in itertools.cycle(VERBS):
        prompt = f"{name} {''.join(order.sample(LETTERS, LENGTH))}>"
        if prompt not in seen:
            seen.add(prompt)
            yield prompt


def parts(prompt: str) -> tuple[Verb, str]:
    return VERBS[prompt[0]], prompt[2:-1]


def is_right(prompt: str, response: str) -> bool:
    verb, word = parts(prompt)
    return response == verb.right(word)


def reward(rows: Any) -> list[float]:
    """Of each response of a table with the columns prompt and response: 1 if it is right, 0 if not."""
    pairs = zip(rows.column("prompt").to_pylist(), rows.column("response").to_pylist(), strict=True)
    return [float(is_right(prompt, response)) for prompt, response in pairs]
