"""Metrics against numbers worked out by hand and exact sums."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluation.suites.text_metrics import distinct_n, kl_terms


def test_distinct_n_counts_over_all_responses():
    assert distinct_n([[1, 2, 1, 2], [1, 2]], 1) == pytest.approx(2 / 6)
    assert distinct_n([[1, 2, 1, 2], [1, 2]], 2) == pytest.approx(2 / 4)  # 12 21 12, 12
    assert distinct_n([[1], []], 2) == 0.0


def test_expected_terms_are_the_two_kl_divergences():
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(50), 2)
    forward, reverse = kl_terms(np.log(p), np.log(q))
    assert (p * forward).sum() == pytest.approx((p * np.log(p / q)).sum())
    assert (p * reverse).sum() == pytest.approx((q * np.log(q / p)).sum())


@given(st.lists(st.tuples(st.floats(-40, 0), st.floats(-40, 0)), min_size=1))
def test_no_term_is_negative_and_equal_logprobs_give_zero(pairs: list[tuple[float, float]]):
    p, q = np.array(pairs).T
    forward, reverse = kl_terms(p, q)
    assert (forward >= 0).all()
    assert (reverse >= 0).all()
    assert not any(part.any() for part in kl_terms(p, p))


def test_a_token_that_the_candidate_cannot_say_is_infinite_one_way_and_one_the_other():
    forward, reverse = kl_terms(np.array([-1.0]), np.array([-np.inf]))
    assert forward[0] == np.inf
    assert reverse[0] == 1.0
