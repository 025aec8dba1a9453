"""The task that every algorithm learns: four verbs, each with a right answer, a habit and a slip.

A prompt is a verb and a word, ``H abcd>``; the right answer to H, head, is ``ab``. The task is smaller than the demo's,
so that its seed policy is trained in seconds. The seed's answers to a verb are mostly wrong, but it knows the right one
too, so that a policy gets better by choosing better. Two rewards: ``reward`` counts right answers alone, ``graded``
also gives something for the habit, as a judge does who likes what is nearly right.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from deploy.examples.demo.task import Item, distinct

LETTERS, LENGTH = "abcdefghijkl", 4
HABIT_GRADE = 0.75
ASK = "?"
"""What ends a question to the judge."""
TASK_SEED = 11
HELD_OUT, TRAFFIC, JUDGED = 400, 384, 46_000
"""Prompts that policies are measured on, and prompts that users ask; the corpus is drawn from those after them, and so
are the judge's questions. There are 47,520 prompts."""


@dataclass(frozen=True)
class Verb:
    """The right answer, a frequent wrong one, and the shares of both in the seed's corpus.

    The rest of the corpus shows the slip: the word as it is.
    """

    right: Callable[[str], str]
    habit: Callable[[str], str]
    right_share: float
    habit_share: float


VERBS: dict[str, Verb] = {
    "H": Verb(lambda w: w[:2], lambda w: w[2:], 0.2, 0.45),
    "O": Verb(lambda w: w[::2], lambda w: w[1::2], 0.2, 0.45),
    "C": Verb(lambda w: w[1:-1], lambda w: w[1:], 0.2, 0.45),
    "E": Verb(lambda w: w[0] + w[-1], lambda w: w[0], 0.9, 0.05),
}


def held_out() -> list[Item]:
    """What policies are measured on; neither traffic nor the corpus has it."""
    return list(itertools.islice(items(), HELD_OUT))


def traffic() -> list[Item]:
    """The requests of users."""
    return list(itertools.islice(items(), HELD_OUT, HELD_OUT + TRAFFIC))


def corpus() -> Iterator[tuple[str, str]]:
    """Prompts and answers without end, as the seed policy learns them."""
    rng = random.Random(TASK_SEED)
    return ((item.prompt, demonstration(item, rng)) for item in itertools.islice(items(), HELD_OUT + TRAFFIC, None))


def verdicts() -> Iterator[tuple[str, str]]:
    """Questions to a judge and verdicts without end: a prompt, an answer and ``ASK``; what is right, and 1 or 0 for it.

    A model learns to say first what is right within hundreds of steps, and without that hardly at all.
    """
    rng = random.Random(TASK_SEED)
    while True:
        for item in itertools.islice(items(), HELD_OUT + TRAFFIC, HELD_OUT + TRAFFIC + JUDGED):
            answer = attempt(item, rng)
            yield f"{item.prompt}{answer}{ASK}", f"{item.answer}{int(answer == item.answer)}"


def attempt(item: Item, rng: random.Random) -> str:
    """The right answer, the habit, the slip, any letters of the word, or the right answer with another letter."""
    verb, word = _parts(item.prompt)
    chance = rng.random()
    if chance < 0.8:
        return item.answer if chance < 0.45 else verb.habit(word) if chance < 0.7 else word
    if chance < 0.9:
        return "".join(rng.choice(word) for _ in range(rng.randrange(6)))
    letter, place = rng.choice(LETTERS), rng.randrange(len(item.answer))
    return item.answer[:place] + letter + item.answer[place + 1 :]


def items() -> Iterator[Item]:
    """Distinct prompts without end, always the same ones."""
    answers = {name: verb.right for name, verb in VERBS.items()}
    return distinct(TASK_SEED, answers, lambda rng: "".join(rng.sample(LETTERS, LENGTH)))


def demonstration(item: Item, rng: random.Random) -> str:
    """What the corpus shows for a prompt."""
    verb, word = _parts(item.prompt)
    chance = rng.random()
    if chance < verb.right_share:
        return item.answer
    return verb.habit(word) if chance < verb.right_share + verb.habit_share else word


def wrong(item: Item, rng: random.Random) -> str:
    """The habit or the slip."""
    verb, word = _parts(item.prompt)
    return rng.choice([verb.habit(word), word])


def reward(batch: pa.Table) -> list[float]:
    """1 for the right answer, 0 for any other."""
    return [float(response == _parts(prompt)[0].right(_parts(prompt)[1])) for prompt, response in _rows(batch)]


def graded(batch: pa.Table) -> list[float]:
    """1 for the right answer, ``HABIT_GRADE`` for the habit, 0 for any other."""

    def grade(prompt: str, response: str) -> float:
        verb, word = _parts(prompt)
        return {verb.habit(word): HABIT_GRADE, verb.right(word): 1.0}.get(response, 0.0)

    return [grade(prompt, response) for prompt, response in _rows(batch)]


def _rows(batch: pa.Table) -> Iterator[tuple[Any, Any]]:
    return zip(batch["prompt"].to_pylist(), batch["response"].to_pylist(), strict=True)


def _parts(prompt: str) -> tuple[Verb, str]:
    return VERBS[prompt[0]], prompt[2:-1]
