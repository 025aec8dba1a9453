"""The item bank: which items of a suite are fresh, and in which order they decide.

An item decides once. Its prompt is what counts, in whichever suite it stands: what has decided is no longer fresh when
a suite is drawn again. The order is that of a hash, which says nothing of how hard an item is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence

from evaluation.decisions.observations import names_of, voices
from evaluation.suites.held_out import prompt_key
from evaluation.suites.suite import Item

Voice = tuple[Item, ...]
"""Items that depend on each other, and count as one."""


def fresh(items: Sequence[Item], used: Collection[str]) -> list[Voice]:
    """The voices of which no prompt is in ``used``, in the order in which they are to be looked at."""
    return [voice for voice in _voices(items, "fresh") if not any(prompt_key(item) in used for item in voice)]


def decided(items: Sequence[Item], used: Collection[str], candidate: str) -> list[Voice]:
    """The voices all of whose prompts have decided before: the regression suite, in an order of the candidate's own."""
    return [voice for voice in _voices(items, candidate) if all(prompt_key(item) in used for item in voice)]


def unlearned(voices: Iterable[Voice], learned: Collection[str]) -> tuple[list[Voice], list[str]]:
    """The voices of which no prompt is in ``learned``, in their order, and the ids of the items of all others."""
    fit, refused = list[Voice](), list[str]()
    for voice in voices:
        if any(prompt_key(item) in learned for item in voice):
            refused += [item.id for item in voice]
        else:
            fit.append(voice)
    return fit, refused


def take(voices: Sequence[Voice], items: int) -> list[Voice]:
    """The first voices, until there are as many items; the last voice stays whole."""
    taken, count = list[Voice](), 0
    for voice in voices:
        if count >= items:
            break
        taken.append(voice)
        count += len(voice)
    return taken


def _voices(items: Sequence[Item], salt: str) -> list[Voice]:
    keys = [prompt_key(item) for item in items]
    numbers = voices(list(zip(keys, items, strict=True)), lambda one: names_of(one[0], one[1].cluster))
    members: dict[int, list[int]] = {}
    for i, number in enumerate(numbers):
        members.setdefault(number, []).append(i)

    def place(of: Sequence[int]) -> bytes:
        return hashlib.sha256("\0".join([salt, *sorted({keys[i] for i in of})]).encode()).digest()

    return [tuple(items[i] for i in of) for of in sorted(members.values(), key=place)]
