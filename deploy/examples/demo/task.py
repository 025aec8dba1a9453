"""The demo's task: six small requests with checkable answers, and the habit that spoils half of them.

A prompt is a verb and a word, ``tail gdab>``; the right answer is a function of the two. The corpus that the seed
policy is trained on is messy, as a team's first corpus is: for three verbs most demonstrations show a habit that users
don't want (leaving the word as it is, say). So the seed answers about half of all prompts, and knows more than it
shows.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pyarrow as pa


@dataclass(frozen=True)
class Verb:
    """One kind of request: the right answer, the unwanted habit, and how often the corpus shows the habit."""

    answer: Callable[[str], str]
    habit: Callable[[str], str]
    habit_share: float


VERBS: dict[str, Verb] = {
    "odds": Verb(lambda w: w[::2], lambda w: w, 0.65),
    "core": Verb(lambda w: w[1:-1], lambda w: w[1:], 0.65),
    "tail": Verb(lambda w: w[1:], lambda w: w, 0.65),
    "upper": Verb(str.upper, lambda w: w, 0.1),
    "twice": Verb(lambda w: w + w, lambda w: w, 0.1),
    "ends": Verb(lambda w: w[0] + w[-1], lambda w: w[0], 0.1),
}
ALPHABET = string.ascii_lowercase + string.ascii_uppercase + " >"


@dataclass(frozen=True)
class Item:
    """A prompt and its one right answer."""

    prompt: str
    answer: str


def items(seed: int) -> Iterator[Item]:
    """Distinct prompts without end, the same ones for the same seed."""
    answers = {name: verb.answer for name, verb in VERBS.items()}
    return distinct(seed, answers, lambda rng: "".join(rng.sample(string.ascii_lowercase, rng.randint(3, 4))))


def distinct(
    seed: int, answers: dict[str, Callable[[str], str]], make_word: Callable[[random.Random], str]
) -> Iterator[Item]:
    """The same for any verbs, by name, with what answers each."""
    rng = random.Random(seed)
    seen: set[str] = set()
    while True:
        verb = rng.choice(list(answers))
        word = make_word(rng)
        prompt = f"{verb} {word}>"
        if prompt not in seen:
            seen.add(prompt)
            yield Item(prompt, answers[verb](word))


def demonstration(item: Item, rng: random.Random) -> str:
    """What the messy corpus shows for a prompt: the right answer, or the habit."""
    verb, word = item.prompt.rstrip(">").split(" ")
    return VERBS[verb].habit(word) if rng.random() < VERBS[verb].habit_share else item.answer


def reward(batch: pa.Table) -> list[float | None]:
    """The demo's rule reward: 1 for the right answer, 0 for any other, None where the prompt is not of this task."""

    def score(prompt: str | None, response: str | None) -> float | None:
        verb, _, word = (prompt or "").rstrip(">").partition(" ")
        return float(response == VERBS[verb].answer(word)) if verb in VERBS and word else None

    return [score(p, r) for p, r in zip(batch["prompt"].to_pylist(), batch["response"].to_pylist(), strict=True)]
