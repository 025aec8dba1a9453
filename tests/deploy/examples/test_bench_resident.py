"""What the bench of resident workers says of memory: the slope's interval, and the bar."""

from __future__ import annotations

import pytest

from deploy.examples.bench.training.resident import Growth


def test_a_slope_and_its_interval_are_those_of_least_squares() -> None:
    """Five points by hand: slope 6/10, squared residuals 1.6 in all, of 3 degrees; t(3) at 97.5 % is 3.182."""
    found = Growth.of([102.0, 104.0, 103.0, 104.0, 105.0])
    assert found.mib_each == pytest.approx(0.6)
    assert found.first_mib == pytest.approx(102.4)
    assert found.high - found.mib_each == pytest.approx(3.18245 * (1.6 / 3 / 10) ** 0.5, rel=1e-4)
    assert found.mib_each - found.low == pytest.approx(found.high - found.mib_each)


def test_growth_is_from_the_first_of_the_cycles_to_the_last_over_the_first() -> None:
    found = Growth.of([1000.0 + 2 * number for number in range(40)])
    assert found.over_all(found.mib_each) == pytest.approx(78 / 1000)
    assert found.verdict == "missed"


def test_memory_that_stays_meets_the_bar_and_a_few_noisy_cycles_leave_it_open() -> None:
    assert Growth.of([1000.0 + number % 2 for number in range(40)]).verdict == "met"
    assert Growth.of([1000.0, 1100.0, 990.0, 1080.0]).verdict == "undecided"
    assert Growth.of([1000.0] * 40).figures()["bar"] == {"bar": "growth at most 0.02", "verdict": "met"}
