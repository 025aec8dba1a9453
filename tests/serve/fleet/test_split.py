"""Which replicas of a fleet serve an experiment's candidate: steps of the planner, and each replica's part."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from serve.config import FleetConfig
from serve.fleet.planner import NOTHING, Step, next_step
from serve.fleet.reports import Report
from serve.fleet.state import FleetState, Instant, Split, part_of
from serve.policies.experiments import Experiment, Phase
from serve.policies.store import Pointer
from tests.serve.experiment_records import experiment_record

NOW = Instant(1000.0, "boot", 1.7e9)
CONFIG = FleetConfig(replicas=4)
EXPERIMENT = experiment_record(number=5, started_at=NOW.wall, phases=(Phase(0, 0.01), Phase(10, 0.5)), unit="user")


def pointer(version: int, generation: int, verdict: dict[str, Any] | None = None) -> Pointer:
    return Pointer(version, None, "", "test", "test", verdict, generation)


def ready(*names: str) -> list[Report]:
    return [Report(name, f"life of {name}", "ready", version=1, generation=1) for name in names]


def step(
    state: FleetState,
    *names: str,
    to: Pointer | None = None,
    experiment: Experiment | None = EXPERIMENT,
    seconds: float = 0.0,
) -> Step:
    now = replace(NOW, wall=NOW.wall + seconds)
    return next_step(state, to or pointer(1, 1), ready(*names), {1}, CONFIG, now, experiment)


SETTLED = FleetState(serving=pointer(1, 1))
NAMES = ("r-0", "r-1", "r-2", "r-3")
SPLIT = replace(SETTLED, split=Split(5, ("r-3",)))


def split_of(found: Step) -> Split | None:
    assert found.state is not None
    return found.state.split


def test_the_candidate_gets_its_share_of_the_replicas_phase_by_phase() -> None:
    assert split_of(step(SETTLED, *NAMES)) == Split(5, ("r-3",))
    assert step(SPLIT, *NAMES) == NOTHING
    assert split_of(step(SPLIT, *NAMES, seconds=600)) == Split(5, ("r-2", "r-3"))


def test_a_replica_that_dies_gives_its_part_to_another_and_the_last_two_are_waited_for() -> None:
    assert split_of(step(SPLIT, "r-0", "r-1", "r-2")) == Split(5, ("r-2",))
    assert step(SPLIT, "r-0") == NOTHING  # until there is a second one again
    assert step(SETTLED, "r-0") == NOTHING
    assert step(SPLIT, "r-0", "r-3") == NOTHING


@pytest.mark.parametrize("experiment", [None, replace(EXPERIMENT, unit="block")])
def test_what_draws_for_no_users_has_no_replicas(experiment: Experiment | None) -> None:
    assert split_of(step(SPLIT, *NAMES, experiment=experiment)) is None
    assert step(SETTLED, *NAMES, experiment=experiment) == NOTHING


def test_another_experiment_begins_anew() -> None:
    before = replace(SETTLED, split=Split(4, ("r-0",)))
    assert split_of(step(before, *NAMES)) == Split(5, ("r-3",))


@pytest.mark.parametrize(
    "verdict", [{"verdict": "pass", "experiment": 5}, {"rollback_from": 2, "experiment": 5, "reason": "harm"}]
)
def test_a_move_that_the_experiment_came_to_needs_no_deployment(verdict: dict[str, Any]) -> None:
    moved = pointer(2, 2, verdict)
    found = step(SPLIT, *NAMES, to=moved, experiment=None).state
    assert found is not None
    assert (found.serving, found.deployment) == (moved, None)


@pytest.mark.parametrize("verdict", [None, {"verdict": "pass", "experiment": 4}])
def test_any_other_move_is_deployed_and_ends_the_split(verdict: dict[str, Any] | None) -> None:
    found = step(SPLIT, *NAMES, to=pointer(3, 2, verdict), experiment=None).state
    assert found is not None
    assert found.deployment is not None
    assert (found.deployment.phase, found.split) == ("preparing", None)


def test_a_replicas_part_follows_from_the_two_records_and_its_name() -> None:
    mine, other = part_of(SPLIT, EXPERIMENT, "r-3"), part_of(SPLIT, EXPERIMENT, "r-9")
    assert mine is not None
    assert other is not None
    assert (mine.variant, mine.version, other.variant, other.version) == ("candidate", 2, "control", 1)
    assert not mine.drawn
    assert part_of(SETTLED, EXPERIMENT, "r-3") is None
    assert part_of(SPLIT, None, "r-3") is None
    assert part_of(SPLIT, replace(EXPERIMENT, number=6), "r-3") is None
