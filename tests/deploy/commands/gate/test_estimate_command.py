"""`millrace estimate`, on traffic that a real engine answered, and the one line for each thing that can't be."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploy import cli
from deploy.commands.gate.estimate import _baseline
from deploy.config import root
from deploy.config.root import Settings
from evaluation.estimation.estimate import Baseline
from evaluation.estimation.logged_responses import read_logged
from feedback.lake.tables import Lake
from tests.evaluation.estimation.served_traffic import BY_USER, record, serve, value
from tests.feedback.feedback_rows import interaction, put, reward

N = 240
LEFT_OUT = 7  # of the same answers, said to be sampled with top-p


def run(settings: Settings, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    engine = ["--evaluation.engine.kv_cache_bytes", str(2**23)]
    capsys.readouterr()
    code = cli.run(["estimate", "--home", str(settings.home), *engine, *arguments])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


@pytest.fixture
def lake(home_with_policy: Settings) -> Lake:
    lake = home_with_policy.lake()
    lake.create()
    return lake


def fill(lake: Lake, n: int = 3, *, rewarded: float | None = 0.5, **columns: Any) -> None:
    """Some interactions of policy 1."""
    put(lake, "interactions", [interaction(f"r{i}", user=f"user {i}", **columns) for i in range(n)])
    put(lake, "rewards", [reward(f"r{i}", rewarded) for i in range(n)])


def test_a_policy_on_its_own_traffic_earns_what_was_logged_for_people_and_as_json(
    home_with_policy: Settings, lake: Lake, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = serve(home_with_policy.policy_store().get(1), N)
    for row in rows[:LEFT_OUT]:
        row["sampling"]["top_p"] = 0.9
    record(lake, rows)
    code, out, err = run(home_with_policy, capsys, "1", "--json")
    assert code == 0, err
    found = json.loads(out)
    by_user: dict[str, list[float]] = {}
    for row in rows[LEFT_OUT:]:
        by_user.setdefault(row["user"], []).append(value(row["response"]))
    mean = np.mean([np.mean(values) for values in by_user.values()])
    assert (found["verdict"], found["considered"], found["responses"]) == ("estimated", N, N - LEFT_OUT)
    assert found["left_out"] == {"sampled with top_p": LEFT_OUT}
    assert found["clustered_by"] == {"user": len(by_user)} == {"user": (N - LEFT_OUT + 1) // BY_USER}
    assert found["numbers"]["ess"] == pytest.approx(len(by_user), abs=0.01)
    for name in ("ips", "snips", "estimate", "logged"):
        assert found["numbers"][name]["value"] == pytest.approx(mean, abs=1e-4), name
    assert found["numbers"]["doubly_robust"] is None
    assert found["no_baseline"].startswith("there is no reward model")

    code, out, err = run(home_with_policy, capsys, "1", "--incumbent", "1", "--samples", "0")
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0] == "policy 1 on traffic that policy 1 answered: 233 of 240 responses used, of 117 users"
    assert lines[1] == "left out: 7 sampled with top_p"
    assert next(line for line in lines if line.startswith("SNIPS")).split()[1] == f"{mean:.3f}"
    assert "none: --samples is 0" in out
    assert lines[-2].startswith("effective sample size 117.0 of 117; weights average 1.000, the heaviest has 0.9%")
    assert lines[-1] == "estimated"
    home = home_with_policy.home
    assert not list(home.rglob("estimate*"))  # nothing is kept, and no verdict is on record
    assert home_with_policy.policy_store().get(1).gate is None


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["9"], 1, "error: there is no policy 9 in"),
        (["1", "--incumbent", "9"], 1, "error: there is no policy 9 in"),
        (["1", "--bounds", "1", "0"], 2, "1 is not below 0"),
        (["1", "--limit", "0"], 2, "0 is not in the range"),
        (["1", "--since", "yesterday"], 2, "'yesterday' does not match"),
        (["newest"], 2, "'newest' is not a valid integer"),
        ([], 2, "Missing argument 'CANDIDATE'"),
    ],
)
def test_what_is_not_there_or_can_not_be_meant_is_an_error(
    arguments: list[str], code: int, words: str, home_with_policy: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    found, out, err = run(home_with_policy, capsys, *arguments)
    assert (found, out, words in err) == (code, "", True), err
    assert sum(line.startswith("error:") for line in err.splitlines()) <= 1


def test_no_lake_is_an_error_and_none_is_made(
    home_with_policy: Settings, lake: Lake, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(lake.uri)
    code, _, err = run(home_with_policy, capsys, "1")
    assert (code, "error: there is no lake at" in err) == (1, True), err
    assert not Path(lake.uri).exists()


def test_without_a_serving_policy_the_one_that_answered_must_be_named(
    settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(settings, capsys, "1")
    assert (code, "no policy serves: name the one whose responses to use" in err) == (2, True), err


@pytest.mark.parametrize(
    ("columns", "rewarded", "words"),
    [
        ({}, None, "can't tell: none of 3 responses of traffic has a reward: run `millrace score`"),
        ({}, 0.5, "can't tell: 3 of 3 responses of traffic can be used, of 3 users, sessions or requests"),
        ({"logprobs": None}, 0.5, "left out: 3 without the logprobs of their tokens"),
        ({"policy_spans": [{"start": 0, "policy_version": 7}]}, 0.5, "left out: 3 of policy 7"),
        ({"sampling": {"temperature": 0.0, "max_tokens": 8, "n": 1, "stop": []}}, 0.5, "left out: 3 greedy"),
    ],
)
def test_what_is_too_little_to_tell_ends_with_3_and_says_what_there_is(
    columns: dict[str, Any],
    rewarded: float | None,
    words: str,
    home_with_policy: Settings,
    lake: Lake,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fill(lake, rewarded=rewarded, **columns)
    code, out, err = run(home_with_policy, capsys, "1")
    assert (code, words in out) == (3, True), out + err


def test_no_traffic_can_not_tell(home_with_policy: Settings, lake: Lake, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(home_with_policy, capsys, "1")
    assert (code, out.splitlines()[-1]) == (3, "can't tell: there is no traffic"), err


def test_a_reward_out_of_bounds_is_an_error_that_names_it(
    home_with_policy: Settings, lake: Lake, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(lake, rewarded=-1.0)
    code, out, err = run(home_with_policy, capsys, "1")
    assert (code, out) == (1, "")
    assert "has the reward -1, outside [0, 1]: say what rewards lie between, with --bounds LOW HIGH" in err
    assert run(home_with_policy, capsys, "1", "--bounds", "-1", "1")[0] == 3


def test_what_the_candidate_was_trained_on_is_left_out_and_counted(
    home_with_policy: Settings, lake: Lake, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(lake)
    lineage = {"lake_versions": lake.versions(), "train": {"data": {}}}
    home_with_policy.policy_store().publish(model, parent=1, lineage=lineage, metrics={})
    code, out, err = run(home_with_policy, capsys, "2")
    assert (code, "left out: 3 that policy 2 may have learned from" in out) == (3, True), out + err


def test_the_baseline_is_the_first_reward_model_that_has_not_learned_from_the_responses(
    home_with_policy: Settings, lake: Lake, model: Path
) -> None:
    fill(lake)
    stores, policy, traffic = (
        home_with_policy.stores(),
        home_with_policy.policy_store().get(1),
        read_logged(lake, 1, limit=9),
    )
    assert str(_baseline(home_with_policy, lake, policy, traffic)).startswith("there is no reward model")
    before = {"lake_versions": {"interactions": 0}, "train": {"data": {}}}
    after = {"lake_versions": lake.versions(), "train": {"data": {}}}
    stores.reward_models.publish(model, parent=None, lineage=after, metrics={})
    stores.reward_models.promote(1, expected=None, who="test", why="test")
    why = "training's reward model 1 may have learned from 3 of the responses"
    assert _baseline(home_with_policy, lake, policy, traffic) == why
    stores.evaluation_reward_models.publish(model, parent=None, lineage=before, metrics={})
    stores.evaluation_reward_models.promote(1, expected=None, who="test", why="test")
    found = _baseline(home_with_policy, lake, policy, traffic)
    assert isinstance(found, Baseline)
    folder = str(stores.evaluation_reward_models.get(1).path)
    assert (found.name, found.model.name) == ("evaluation's reward model 1", folder)
    own = root.load(None, [("home", str(home_with_policy.home)), ("feedback.scoring.model.name", str(model))], {})
    found = _baseline(own, lake, policy, traffic)
    assert isinstance(found, Baseline)
    assert (found.name, found.model.name) == (f"the reward model {model}", str(model))
