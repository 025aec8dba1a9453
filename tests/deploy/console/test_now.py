"""The page Now of a home in the middle of things, read without a server."""

from __future__ import annotations

import json
import math
from datetime import timedelta
from typing import Any

import pytest

from deploy.config.root import Settings
from deploy.console import worker
from deploy.console.pages import now
from deploy.loop import records
from deploy.loop.records import CycleRecord, Stage
from feedback.files import locked
from serve.policies.experiments import Experiments
from tests.deploy.display.test_live_report import begin, blocks

VIEWER = {"tenant": "t", "name": "n", "scopes": ["read"], "token": "x", "keys": True}


def live(settings: Settings) -> dict[str, Any]:
    request = {"page": "now_live", "path": {}, "query": {}, "form": None, "viewer": VIEWER}
    found: dict[str, Any] = json.loads(worker.respond(settings, request).body)
    return found


def test_a_cycle_that_trains_shows_its_stages_and_the_curves_so_far(home_with_policy: Settings) -> None:
    settings, began = home_with_policy, records.now() - timedelta(seconds=90)
    stages = [Stage(name="score", started_at=began, seconds=2.5, ok=True), Stage(name="train", started_at=began)]
    folder = settings.path(settings.cycle.folder)
    folder.mkdir()
    records.write(settings, CycleRecord(number=1, started_at=began, stages=stages))
    run = settings.path(settings.train.runs) / "cycle-000001"
    run.mkdir(parents=True)
    rows = [{"step": 0, "reward": 0.25, "kl_ref": math.nan}, {"step": 1, "reward": 0.5, "kl_ref": 0.125}]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows) + '{"step": 2, "rew')
    with locked(folder / ".lock", 5):
        found = live(settings)
    shown = [(stage["name"], stage["state"]) for stage in now._stages(settings)]
    assert shown == [("score", "done"), ("train", "running"), ("evaluate", "ahead"), ("promote", "ahead")]
    assert "cycle 1, begun" in found["parts"]["loop"]
    assert "2.5 s" in found["parts"]["loop"]
    curves = {curve["title"]: (curve["x"], curve["y"]) for curve in found["charts"]["training"]}
    assert curves == {"Reward": ([0, 1], [0.25, 0.5]), "KL to the reference, nats": ([1], [0.125])}
    assert found["run"] == "cycle-000001"


def test_a_cycle_that_died_is_what_is_wrong_with_what_to_do(home_with_policy: Settings) -> None:
    settings = home_with_policy
    settings.path(settings.cycle.folder).mkdir()
    records.write(settings, CycleRecord(number=1, started_at=records.now()))
    assert "cycle 1 died" in live(settings)["parts"]["problems"]
    assert "the next cycle closes it" in live(settings)["parts"]["problems"]


def test_an_experiment_shows_the_confidence_sequence_of_each_outcome(home_with_policy: Settings) -> None:
    store = Experiments(home_with_policy.policy_store().root)
    blocks(store, lambda candidate, _: 0.9 if candidate else 0.5)
    begin(store)
    found = live(home_with_policy)
    assert "Experiment 1" in found["parts"]["experiment"]
    feedback, errors = found["charts"]["experiment"]
    assert (feedback["title"], errors["title"], errors["bar"]) == ("feedback", "errors, no difference seen yet", 0.05)
    assert errors["y"][-1] == 0.0  # nobody has seen an error
    assert feedback["x"][-1] == 120
    assert feedback["low"][-1] < feedback["y"][-1] < feedback["high"][-1]
    assert feedback["y"][-1] == pytest.approx(0.4)
    assert feedback["low"][-1] > 0


def test_a_home_without_a_policy_says_so(settings: Settings) -> None:
    parts = live(settings)["parts"]
    assert "Nothing serves" in parts["serving"]
    assert "no policy serves" in parts["problems"]
