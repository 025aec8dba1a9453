"""Krippendorff's alpha, against the numbers of his own paper."""

from __future__ import annotations

import numpy as np
import pytest

from evaluation.statistics.agreement import krippendorff_alpha

FOUR = ("123321412   ", "1233224125 3", " 3332342251 ", "12332441251 ")
"""Of four observers the values of twelve units, a space where one gave none."""


def alpha(observers: tuple[str, ...]) -> float | None:
    values = sorted({value for row in observers for value in row} - {" "})
    units = [[column.count(value) for value in values] for column in zip(*observers, strict=True)]
    return krippendorff_alpha(np.array(units), np.ones(len(units), np.int64))


def test_it_is_what_krippendorff_computes_by_hand() -> None:
    assert alpha(("0100000010", "1110010000")) == pytest.approx(0.095, abs=5e-4)  # section B
    assert alpha(FOUR) == pytest.approx(0.743, abs=5e-4)  # section C


def test_perfect_agreement_is_one_and_repeats_count_as_units() -> None:
    assert alpha(("0110", "0110")) == 1
    once = krippendorff_alpha(np.array([[2, 0], [2, 0], [1, 1], [0, 3], [1, 0]]), np.ones(5, np.int64))
    assert krippendorff_alpha(np.array([[2, 0], [1, 1], [0, 3]]), np.array([2, 1, 1])) == once


def test_nothing_is_said_of_one_value_or_of_things_that_one_person_judged() -> None:
    assert krippendorff_alpha(np.array([[2, 0], [3, 0]]), np.array([5, 5])) is None
    assert krippendorff_alpha(np.array([[1, 0], [0, 1]]), np.array([5, 5])) is None
    assert krippendorff_alpha(np.zeros((0, 2), np.int64), np.zeros(0, np.int64)) is None
