"""The proof that decisions keep their promises, played short: its command, and that a world can fail."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

from deploy.examples.simulate import __main__ as simulate
from deploy.examples.simulate import gate
from deploy.examples.simulate.world import Outcome


def run(*arguments):
    result = CliRunner().invoke(simulate.main, arguments)
    return result, json.loads(result.stdout.splitlines()[-1]) if result.exit_code in (0, 1) else None


def test_a_world_has_a_line_and_its_figure_in_the_last_one():
    result, figures = run("--worlds", "power_3_points", "--histories", "40")
    assert result.exit_code == 0
    assert figures == {"power_3_points": pytest.approx(0.93, abs=0.05)}
    assert result.stdout.startswith("power_3_points: promoted at level 5e-05: ")


def test_the_same_seed_gives_the_same_figures(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gate, "CYCLES", 3)
    outcomes = [gate.null("skewed", gate.skewed, 2, seed) for seed in (1, 1)]
    assert outcomes[0] == outcomes[1]
    assert outcomes[0].figures == {"null.skewed": 0.0, "null_e_lond.skewed": 0.0}


def test_worlds_that_are_played_at_once_have_the_figures_of_one_after_the_other():
    arguments = ["--worlds", "harm_median_feedbacks.15,off_policy", "--histories", "4", "--processes"]
    (together, figures), (_, same) = run(*arguments, "2"), run(*arguments, "1")
    assert figures == same
    assert [line.split(":")[0] for line in together.stdout.splitlines()[:2]] == arguments[1].split(",")


def test_a_world_that_is_no_null_is_caught(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gate, "CYCLES", 3)
    outcome = gate.null("lucky", lambda rng, candidates: rng.random((candidates, 300)), 2, 0)
    assert outcome.figures["null.lucky"] == 1.0
    assert not outcome.kept


def test_a_missed_bar_is_the_exit_code(monkeypatch: pytest.MonkeyPatch):
    worlds = {
        "a.one": lambda *_: Outcome({"a.one": 0.5}, False, "half"),
        "b": lambda *_: Outcome({"b": 1}, True, "all"),
    }
    monkeypatch.setattr(simulate, "WORLDS", worlds)
    result, figures = run("--histories", "1", "--worlds", "a,b", "--processes", "1")
    assert result.exit_code == 1
    assert figures == {"a": {"one": 0.5}, "b": 1}
    assert "half MISSED" in result.stdout
    assert run("--worlds", "b")[0].exit_code == 0


def test_an_unknown_world_is_refused_with_those_that_there_are():
    result, _ = run("--worlds", "nul")
    assert result.exit_code == 2
    assert "nul is none of honest_refused" in result.output


@pytest.mark.parametrize(
    ("draw", "tolerance"), [(gate.binary, 0.002), (gate.graded, 0.002), (gate.skewed, 0.001), (gate.clustered, 0.005)]
)
def test_the_worlds_without_improvement_have_none(draw, tolerance):
    drawn = draw(np.random.default_rng(0), 300)
    assert drawn.min() >= -1
    assert drawn.max() <= 1
    assert drawn.mean() == pytest.approx(0, abs=tolerance)


def test_what_only_seems_to_be_better_is_refused_and_an_honest_gain_is_not():
    result, figures = run("--worlds", "honest_refused,hacks_refused", "--histories", "5")
    assert result.exit_code == 0, result.stdout
    assert figures == {"honest_refused": 0.0, "hacks_refused": 1.0}
