"""`make bench-plan` in one configuration: what is predicted of real workers is near what they take."""

from __future__ import annotations

import pytest

from deploy.examples.bench.training.plan import CASES, run_cases


@pytest.mark.long
def test_a_rank_takes_the_memory_that_is_predicted() -> None:
    model, ranks, settings = CASES[0]
    (case,) = run_cases([(model, ranks, settings)])
    assert case["memory"] > 100 * 2**20
    assert abs(case["memory_error"]) < 0.15
