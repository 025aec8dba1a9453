"""What the bench of learning makes of its runs: the way to the target, the budget, and ratios with intervals."""

from __future__ import annotations

import json
import math
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from loadtests import bench_learn, words
from loadtests.bench_learn import Point, Reached, figures, ratio_of_means, reached, read_curve

CURVE = [Point(64, 1.0, None), Point(128, 2.0, 0.5), Point(192, 3.0, None), Point(256, 4.5, 0.8), Point(320, 6.0, 0.7)]


def test_a_run_takes_what_it_had_sampled_when_it_was_first_measured_to_be_there() -> None:
    assert reached(CURVE, target=0.8, budget=1000) == Reached(256, 4.5, censored=False)
    assert reached(CURVE, target=0.5, budget=1000) == Reached(128, 2.0, censored=False)


def test_a_run_that_is_not_there_yet_has_taken_nothing() -> None:
    assert reached(CURVE[:3], target=0.8, budget=1000) is None
    assert reached([], target=0.8, budget=1000) is None


def test_a_run_that_is_not_there_by_its_budget_counts_with_the_budget_and_its_seconds_so_far() -> None:
    assert reached(CURVE, target=0.9, budget=300) == Reached(300, 6.0, censored=True)
    assert reached(CURVE, target=0.8, budget=255) == Reached(255, 4.5, censored=True)
    assert reached(CURVE, target=0.8, budget=256) == Reached(256, 4.5, censored=False)


def test_an_accuracy_before_the_first_step_counts_with_no_samples() -> None:
    assert reached([Point(0, 0.0, 0.9)], target=0.8, budget=100) == Reached(0, 0.0, censored=False)


def test_the_ratio_is_of_geometric_means() -> None:
    assert ratio_of_means([100, 400], [400, 1600]).value == pytest.approx(200 / 800)
    assert ratio_of_means([100, 400, 800], [300]).value == pytest.approx((100 * 400 * 800) ** (1 / 3) / 300)


def test_the_interval_of_two_values_a_side_is_between_their_extreme_ratios() -> None:
    """Each of 16 draws is as likely, so that the extreme ones, 1/16 each, are the percentiles 2.5 and 97.5."""
    found = ratio_of_means([1.0, 2.0], [4.0, 16.0])
    assert (found.low, found.high) == (pytest.approx(1 / 16), pytest.approx(2 / 4))
    assert found.low < found.value < found.high


def test_equal_values_have_an_interval_without_width_and_one_value_an_open_one() -> None:
    found = ratio_of_means([3.0] * 5, [6.0] * 5)
    assert (found.low, found.value, found.high) == (pytest.approx(0.5),) * 3
    assert ratio_of_means([3.0], [6.0]).interval() == [0.0, None]


def test_the_interval_of_a_bootstrap_is_that_of_the_normal_distribution_where_values_are_many() -> None:
    ours = [math.exp(math.sin(i) + 1) for i in range(400)]  # the sines' variance is 1/2
    found = ratio_of_means(ours, [1.0] * 400)
    half = 1.96 * math.sqrt(0.5 / 400)
    assert math.log(found.high / found.value) == pytest.approx(half, rel=0.1)
    assert math.log(found.value / found.low) == pytest.approx(half, rel=0.1)


def test_each_figure_is_of_the_settings_that_are_best_for_it_and_censored_runs_are_counted() -> None:
    chosen = {
        "millrace": {"samples": {"rate": 1}, "seconds": {"rate": 1}},
        "trl": {"samples": {"rate": 2}, "seconds": {"rate": 3}},
    }

    def run(side: str, rate: int, samples: int, seconds: float, *, censored: bool = False) -> dict[str, Any]:
        of = {"samples": samples, "seconds": seconds, "seconds_with_start": seconds + 10.0, "censored": censored}
        return {"side": side, "settings": {"rate": rate}, **of}

    runs = [run("millrace", 1, 100, 10.0), run("millrace", 1, 110, 10.0)]
    runs += [run("trl", 2, 200, 999.0), run("trl", 2, 300, 999.0, censored=True)]
    runs += [run("trl", 3, 999, 12.0), run("trl", 3, 999, 40.0)]
    found = figures(runs, chosen)
    assert found["samples_over_trl"] == pytest.approx(math.sqrt(100 * 110 / 200 / 300), abs=1e-3)
    assert found["samples_interval"] == pytest.approx([100 / 300, 110 / 200], abs=1e-3)
    assert found["seconds_over_trl"] == pytest.approx(10 / math.sqrt(12 * 40), abs=1e-3)
    assert found["seconds_with_start_over_trl"] == pytest.approx(20 / math.sqrt(22 * 50), abs=1e-3)
    assert found["bars"]["samples_over_trl"]["judged"] == "met"
    assert found["bars"]["seconds_over_trl"]["judged"] == "undecided"
    assert found["censored"]["samples"] == {"millrace": 0, "trl": 1}
    assert found["censored"]["seconds"] == {"millrace": 0, "trl": 0}
    json.dumps(found, allow_nan=False)


def searched(rate: int, seed: int, samples: int, seconds: float, *, censored: bool = False) -> dict[str, Any]:
    return {"settings": {"rate": rate}, "seed": seed, "samples": samples, "seconds": seconds, "censored": censored}


def test_the_search_goes_on_with_the_best_few_for_either_figure_that_got_there() -> None:
    runs = [searched(rate, 100, 100 * rate, 10.0 / rate, censored=rate == 1) for rate in range(1, 6)]
    assert bench_learn.finalists(runs, "samples") == [{"rate": 2}, {"rate": 3}, {"rate": 4}]
    assert bench_learn.finalists(runs, "seconds") == [{"rate": 5}, {"rate": 4}, {"rate": 3}]


def test_settings_are_chosen_by_the_geometric_mean_over_the_seeds_of_the_search() -> None:
    first = [
        searched(1, 100, 50, 9.0),
        searched(2, 100, 100, 2.0),
        searched(3, 100, 300, 1.0),
        searched(4, 100, 60, 1.0),
    ]
    second = [searched(2, 101, 400, 2.0), searched(3, 101, 100, 3.0), searched(4, 101, 60, 1.0, censored=True)]
    assert bench_learn.best_settings(first + second, "samples") == {"rate": 3}  # 300 * 100 < 100 * 400
    assert bench_learn.best_settings(first + second, "seconds") == {"rate": 3}
    assert bench_learn.best_settings(first, "samples") == {"rate": 1}


def test_a_search_whose_settings_all_failed_with_some_seed_chooses_none() -> None:
    with pytest.raises(SystemExit, match="no settings got to 80%"):
        bench_learn.best_settings([searched(1, 100, 50, 1.0), searched(1, 101, 50, 1.0, censored=True)], "samples")


def test_settings_that_are_best_for_both_figures_are_run_once() -> None:
    assert bench_learn.distinct([{"rate": 1}, {"rate": 1}]) == [{"rate": 1}]
    assert bench_learn.distinct([{"rate": 2}, {"rate": 1}]) == [{"rate": 2}, {"rate": 1}]


def test_a_line_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "curve.jsonl"
    assert read_curve(file) == (None, [])
    file.write_text('{"time": 5.0}\n{"samples": 64, "seconds": 1.5, "accuracy": null}\n{"samples": 128, "sec')
    assert read_curve(file) == (5.0, [Point(64, 1.5, None)])


def test_both_sides_search_grids_of_one_size_that_hold_what_was_chosen() -> None:
    grids = {side: bench_learn.combinations(grid) for side, grid in bench_learn.GRIDS.items()}
    assert len(grids["millrace"]) == len(grids["trl"])
    assert all(of in grid for side, grid in grids.items() for of in bench_learn.CHOSEN[side].values())


def test_prompts_of_training_held_out_ones_and_the_corpus_share_none() -> None:
    held_out, trained_on = words.held_out(), words.trained_on()
    shown = [prompt for prompt, _ in islice(words.corpus(), 2000)]
    assert len({*held_out, *trained_on, *shown}) == words.HELD_OUT + words.TRAINED_ON + 2000
    assert {prompt[0] for prompt in held_out} == {prompt[0] for prompt in trained_on} == {*words.VERBS}


def test_only_the_right_answer_is_right() -> None:
    assert words.is_right("N abcdefgh>", "bcdefg")
    assert not words.is_right("N abcdefgh>", "bcdefgh")
    word = words.LETTERS[: words.LENGTH]
    assert all(len(verb.right(word)) < words.MAX_TOKENS for verb in words.VERBS.values())
