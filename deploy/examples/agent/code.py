"""The task: a description of a function, in words, is to become Python code that passes unit tests.

Two steps of arithmetic are asked for, whose order matters. The seed policy has seen it done badly: mostly in the other
order, or with each number in the other's place.
"""

from __future__ import annotations

import itertools
import random
import string
from collections.abc import Callable, Iterator
from typing import Any, Final

SIGNS: Final = {"times": "*", "add": "+", "take": "-"}
ALPHABET: Final = string.ascii_lowercase + string.digits + " ():+-*"
TEMPLATE: Final = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
HELD_OUT: Final = 80
LONGEST_TURN: Final = 28
STEPS: Final = 16
PROMPTS_PER_STEP: Final = 16

# A busy machine may start a sandbox slowly: only code that doesn't end is to take too long.
ENVIRONMENT: Final[dict[str, Any]] = {
    "name": "unit_tests",
    "arguments": {"whole": True, "seconds": 60},
    "step_seconds": 120,
    "episodes_at_once": 32,
    "max_turns": 1,
}

Task = tuple[str, int, str, int]
"""(first step, its number, second step, its number): one of them is ``times``, the other is not."""


def tasks() -> list[Task]:
    """All of them, in an order that is always the same: those that are held out first."""
    pairs = [(a, b) for a in SIGNS for b in SIGNS if (a == "times") != (b == "times")]
    every = [(a, m, b, n) for (a, b), m, n in itertools.product(pairs, range(2, 10), range(2, 10))]
    return random.Random(0).sample(every, len(every))


def prompts() -> list[dict[str, Any]]:
    """The prompts with their tests; those that are held out first."""
    return [{"prompt": described(*task), "tests": tests(*task)} for task in tasks()]


def described(first: str, m: int, second: str, n: int) -> str:
    return f"{first} {m} then {second} {n}"


def tests(first: str, m: int, second: str, n: int) -> str:
    """Python code that asserts what the function returns."""
    steps: dict[str, Callable[[int, int], int]] = {
        "times": lambda x, by: x * by,
        "add": lambda x, by: x + by,
        "take": lambda x, by: x - by,
    }
    return "\n".join(f"assert f({x}) == {steps[second](steps[first](x, m), n)}" for x in (0, 1, 10))


def code(first: str, m: int, second: str, n: int) -> str:
    """A function that passes the tests."""
    step = f"x{SIGNS[first]}{m}"
    inner = f" {step}" if first == "times" else f"({step})"
    return f"def f(x):return{inner}{SIGNS[second]}{n}"


def corpus() -> Iterator[tuple[str, str]]:
    """(context, what the policy says) without end."""
    draw, every = random.Random(1), tasks()
    while True:
        first, m, second, n = task = draw.choice(every)
        chance = draw.random()
        other: Task = (second, n, first, m) if chance < 0.65 else (first, n, second, m)
        yield f"<user>{described(*task)}<assistant>", code(*(task if chance < 0.2 else other))
