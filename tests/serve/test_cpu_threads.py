"""How many threads a step gets, by what steps have cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from serve.cpu_threads import Choices


def used(
    choices: Choices, now: list[float], tokens: int, cost: Callable[[int], float], steps: int = 400
) -> Counter[int]:
    """How often each number of threads was used in steps that take ``cost`` seconds with so many threads."""
    counts: Counter[int] = Counter()
    for _ in range(steps):
        threads = choices.begin(tokens)
        counts[threads] += 1
        now[0] += cost(threads)
        choices.end()
    return counts


def make(most: int, weights: int = 0, cores: int | None = None) -> tuple[Choices, list[float]]:
    now = [0.0]
    return Choices(most, weights, cores, lambda: now[0]), now


def test_a_step_that_threads_make_faster_gets_them() -> None:
    choices, now = make(4)
    assert used(choices, now, 512, lambda threads: 1 / threads).most_common(1)[0][0] == 4


def test_a_step_that_threads_make_slower_gets_one() -> None:
    choices, now = make(4, weights=1 << 40)
    assert used(choices, now, 8, lambda threads: 1 + threads).most_common(1)[0][0] == 1


def test_a_thread_that_saves_less_than_it_costs_others_is_not_used() -> None:
    choices, now = make(2)
    assert used(choices, now, 64, lambda threads: 1 if threads == 1 else 0.9).most_common(1)[0][0] == 1


def test_the_last_core_is_the_api_process_unless_it_earns_much() -> None:
    for most, all_of_them, best in ((2, 0.7, 1), (2, 0.6, 2), (8, 0.85, 7)):

        def cost(threads: int, most: int = most, all_of_them: float = all_of_them) -> float:
            return all_of_them if threads == most else (most - 1) / threads

        choices, now = make(most, cores=most)
        used(choices, now, 64, cost, steps=2000)
        assert used(choices, now, 64, cost).most_common(1)[0][0] == best


def test_kinds_of_steps_are_told_apart() -> None:
    choices, now = make(2)
    for _ in range(10):
        used(choices, now, 8, lambda threads: threads, steps=40)
        used(choices, now, 512, lambda threads: 1 / threads, steps=40)
    assert used(choices, now, 8, lambda threads: threads).most_common(1)[0][0] == 1
    assert used(choices, now, 512, lambda threads: 1 / threads).most_common(1)[0][0] == 2


def test_a_load_that_changes_is_noticed() -> None:
    choices, now = make(2)
    used(choices, now, 64, lambda threads: 1 / threads, steps=1000)
    assert used(choices, now, 64, lambda threads: threads, steps=1000).most_common(1)[0][0] == 1


def test_one_stall_changes_nothing() -> None:
    choices, now = make(2)
    used(choices, now, 64, lambda threads: 1 / threads, steps=200)
    choices.begin(64)
    now[0] += 1000
    choices.end()
    assert used(choices, now, 64, lambda threads: 1 / threads, steps=30)[2] >= 26
