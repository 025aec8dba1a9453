"""An erasure that comes while a run trains reaches what the run makes: nothing is published, or it says so.

Real jobs, one after the other; a hook of theirs erases a user, between two steps or in the moment after publishing.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from job_home import SFT_CONFIG, job_context, make_home, results_of, run_jobs

from feedback.config import LakeConfig
from feedback.lake.tables import Lake
from feedback.maintenance.erasure import Target, erase
from serve.policies.store import Policy, PolicyError, PolicyNotFound, PolicyStore
from tests.feedback.feedback_rows import interaction, put, said
from tests.paths import ROOT
from train.config.training import TrainConfig
from train.context import JobContext
from train.run.recovery.resume import begin, keep_start, only_run
from train.run.recovery.unfinished import Stores, forget_erased, unfinished_runs

HERE = ROOT / "tests" / "train"
USERS = ("ann", "bob", "cyd", "dan")
HOOKS = """
import train.job
from feedback.config import LakeConfig
from feedback.maintenance.erasure import Target, erase
from feedback.lake.tables import Lake
from tests.feedback.feedback_rows import interaction, put
from train.observe.hooks import Hook

USERS = {"between-steps": "ann", "after-publishing": "bob", "marked": "cyd", "reward-model": "dan", "later": "eve"}


class Erasing(Hook):
    def erase(self):
        home = self.run.folder.parent.parent
        marker = self.run.folder / "erased"
        if not marker.exists():
            marker.touch()
            lake = Lake(str(home / "lake"), LakeConfig())
            if self.run.name == "later":
                put(lake, "interactions", [interaction("eve's", user="eve")])
            print(erase(lake, home / "journal", Target(user=USERS[self.run.name])), flush=True)


class BetweenSteps(Erasing):
    def on_step(self, step, metrics):
        if step == 2:
            self.erase()


class AfterPublishing(Erasing):
    def on_start(self):
        publish = train.job.publish

        def published(*arguments):
            train.job.publish = publish
            policy = publish(*arguments)
            self.erase()
            return policy

        train.job.publish = published
"""
REWARD_MODEL = {"name": "reward_model"}
BETWEEN = {"hooks": ["erasing_hooks:BetweenSteps"]}
JOBS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("between-steps", BETWEEN),
    ("between-steps", BETWEEN),
    ("after-publishing", {"hooks": ["erasing_hooks:AfterPublishing"]}),
    ("marked", {**BETWEEN, "erased_rows": "mark"}),
    ("reward-model", {**BETWEEN, "algorithm": REWARD_MODEL}),
    ("later", BETWEEN),
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("home")
    make_home(root)
    (root / "erasing_hooks.py").write_text(HOOKS)
    fill(Lake(str(root / "lake"), LakeConfig()))
    return root


def fill(lake: Lake) -> None:
    """Responses of several users, each corrected by somebody."""
    rows, feedback = [], []
    for user in (*USERS, "others", "more", "many"):
        for i in range(4):
            sampled = {"response_token_ids": [10, 11, 1], "logprobs": [-2.0] * 3, "response": "ij"}
            asked = {"prompt": "odds ab>", "prompt_token_ids": [30 + i, 20]}
            rows.append(interaction(f"{user}-{i}", user=user, **asked, **sampled))
            feedback.append(said(f"c-{user}-{i}", f"{user}-{i}", "correction", text="op", source="critic"))
        put(lake, "interactions", rows)  # a file each
        rows.clear()
    put(lake, "feedback", feedback)


@pytest.fixture(scope="module")
def results(home: Path) -> list[dict[str, Any]]:
    """What came of the jobs, one after the other in one process."""
    jobs = [{"config": {**SFT_CONFIG, **config}, "context": context(home, name)} for name, config in JOBS]
    printed = run_jobs(home, jobs)
    print(printed)
    return results_of(printed)


def context(home: Path, name: str) -> dict[str, Any]:
    return job_context(home, name, parent=1)


def policy_of(home: Path, result: dict[str, Any]) -> Policy:
    return PolicyStore(home / "policies").get(result["candidate"])


def test_a_run_whose_rows_were_erased_publishes_nothing_and_keeps_nothing(
    home: Path, results: list[dict[str, Any]]
) -> None:
    refused = results[0]
    assert (refused["candidate"], refused["stopped"]) == (None, False)
    assert refused["steps"] in (3, 4), "erasures are looked for once a second, and before anything is published"
    assert "rows that it had read were erased meanwhile (4 interactions, 4 feedback)" in refused["reason"]


def test_the_same_name_again_begins_anew_without_them(home: Path, results: list[dict[str, Any]]) -> None:
    policy = policy_of(home, results[1])
    assert policy.lineage["data"].startswith("24 items to learn from")
    learned, unknown = PolicyStore(home / "policies").learned_prompts(policy.version)
    assert (len(learned) > 0, unknown) == (True, ()), "what it has learned from is published with it"
    assert (policy.erasures, "erased_rows" in policy.lineage) == ((), False)


def test_an_erasure_in_the_moment_after_publishing_withdraws_the_policy(
    home: Path, results: list[dict[str, Any]]
) -> None:
    assert results[2]["candidate"] is None
    assert "rows that it had read were erased meanwhile" in results[2]["reason"]
    store = PolicyStore(home / "policies")
    runs = [store.get(version).lineage.get("run") for version in store.versions()]
    assert runs == [None, "between-steps", "marked", "later"]


def test_where_it_is_to_be_marked_the_manifest_and_the_record_say_so(home: Path, results: list[dict[str, Any]]) -> None:
    policy = policy_of(home, results[3])
    assert policy.lineage["erased_rows"] == {"interactions": 4, "feedback": 4}
    [erasure] = policy.erasures
    assert (erasure["certainty"], erasure["why"]) == ("yes", "erased while it was trained: 4 interactions, 4 feedback")
    PolicyStore(home / "policies").verify(policy.version)


def test_no_reward_model_is_left_of_such_a_run(home: Path, results: list[dict[str, Any]]) -> None:
    assert (results[4]["reward_model"], results[4]["candidate"]) == (None, None)
    assert PolicyStore(home / "reward_models").versions() == []


def test_an_erasure_of_what_came_after_it_had_read_is_nothing_to_a_run(
    home: Path, results: list[dict[str, Any]]
) -> None:
    policy = policy_of(home, results[5])
    assert (policy.erasures, "erased_rows" in policy.lineage) == ((), False)


def test_none_of_them_leaves_a_checkpoint(home: Path, results: list[dict[str, Any]]) -> None:
    assert list((home / "runs").glob("*/checkpoints/*")) == []
    assert sorted(path.parent.name for path in (home / "runs").glob("*/start.json")) == [
        "between-steps",
        "later",
        "marked",
    ]


# ------------------------------------------------------------------------------------------------------ killed runs


@pytest.fixture
def killed(home: Path, tmp_path: Path) -> tuple[JobContext, Lake]:
    """A run that was killed after a checkpoint, and the lake that it had read."""
    lake = Lake(str(tmp_path / "lake"), LakeConfig())
    lake.create()
    fill(lake)
    changes = {"runs": tmp_path / "runs", "lake_uri": lake.uri}
    there = JobContext.model_validate({**context(home, "killed"), **changes})
    with only_run(there):
        begun = begin(TrainConfig.model_validate(SFT_CONFIG), there, stores_of(there), lake)
        keep_start(there, begun.start)
    for name in ("checkpoints/step-00000002", "checkpoints/.step-00000004.new", "candidate"):
        (there.folder / name).mkdir(parents=True)
        (there.folder / name / "driver.json").write_text("what ann asked")
    return there, lake


def test_what_a_killed_run_has_kept_goes_with_the_rows(killed: tuple[JobContext, Lake]) -> None:
    there, lake = killed
    assert forget_erased(lake, there.runs, stores_of(there)) == []
    [run] = unfinished_runs(there.runs)
    assert (run.name, run.holder, run.lake_versions) == ("killed", None, lake.versions())
    erase(lake, there.runs.parent / "journal", Target(user="nobody"))
    assert forget_erased(lake, there.runs, stores_of(there)) == []
    erase(lake, there.runs.parent / "journal", Target(user="ann"))
    with only_run(there):
        [run] = unfinished_runs(there.runs)
        assert str(run.holder).startswith(f"pid {os.getpid()} on ")
        assert forget_erased(lake, there.runs, stores_of(there)) == [], "somebody is at work on it"
    assert forget_erased(lake, there.runs, stores_of(there)) == ["killed"]
    assert [path for path in there.folder.rglob("*") if path.is_file() and path.name != ".lock"] == []
    assert unfinished_runs(there.runs) == []


def test_a_killed_run_whose_rows_were_erased_begins_anew(killed: tuple[JobContext, Lake]) -> None:
    there, lake = killed
    erase(lake, there.runs.parent / "journal", Target(user="ann"))
    for name in ("checkpoints/step-00000002", "checkpoints/.step-00000004.new", "candidate"):
        assert (there.folder / name).exists()
    (there.folder / "checkpoints" / "step-00000002" / "whole.json").write_text('{"format": 2, "files": {}}')
    start = json.loads((there.folder / "start.json").read_text())
    progress = {"start": start, "step": 2, "data": "", "history": [], "random": {}, "dataflow": None}
    (there.folder / "checkpoints" / "step-00000002" / "driver.json").write_text(json.dumps(progress))
    with only_run(there):
        begun = begin(TrainConfig.model_validate(SFT_CONFIG), there, stores_of(there), lake)
    assert (begun.checkpoint, begun.progress) == (None, None)
    assert begun.start.lake_versions == lake.versions() != start["lake_versions"]
    assert list(there.folder.glob("checkpoints/*")) == []


KINDS = ("policy", "reward model")


def published_and_killed(tmp_path: Path, home: Path, kind: str) -> tuple[JobContext, TrainConfig, Lake]:
    """A run that was killed when it had published; an erasure had ended meanwhile, and saw nothing of it."""
    lake, store = Lake(str(tmp_path / "lake"), LakeConfig()), PolicyStore(tmp_path / "policies")
    lake.create()
    fill(lake)
    store.publish(home / "seed", parent=None, lineage={}, metrics={})
    folders = {"runs": tmp_path / "runs", "policies": store.root, "reward_models": tmp_path / "reward_models"}
    there = JobContext.model_validate({**context(home, "published"), **folders, "lake_uri": lake.uri})
    config = TrainConfig.model_validate(SFT_CONFIG if kind == "policy" else {**SFT_CONFIG, "algorithm": REWARD_MODEL})
    with only_run(there):
        start = begin(config, there, stores_of(there), lake).start
        keep_start(there, start)
    erase(lake, tmp_path / "journal", Target(user="ann"))
    lineage = {"run_id": start.id, "lake_versions": start.lake_versions}
    metrics = {"last": {}, "steps": 4, "why": "the first one"}
    parent = 1 if kind == "policy" else None
    stores_of(there).of(config.algorithm.name).publish(home / "seed", parent=parent, lineage=lineage, metrics=metrics)
    return there, config, lake


def stores_of(there: JobContext) -> Stores:
    return Stores(PolicyStore(there.policies), PolicyStore(there.reward_models))


def published(there: JobContext, kind: str) -> list[Policy]:
    """What the run has published and is still there."""
    store = PolicyStore(there.policies if kind == "policy" else there.reward_models)
    return [store.get(version) for version in store.versions() if kind != "policy" or version > 1]


def marks(there: JobContext, kind: str) -> list[str]:
    """Why what the run had published is on record as reached by erasures."""
    return [record["why"] for one in published(there, kind) for record in one.erasures]


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_killed_run_had_published_of_erased_rows_is_withdrawn_when_it_is_taken_up(
    home: Path, tmp_path: Path, kind: str
) -> None:
    there, config, lake = published_and_killed(tmp_path, home, kind)
    with only_run(there):
        begun = begin(config, there, stores_of(there), lake)
    assert (begun.finished, begun.start.lake_versions) == (None, lake.versions())
    assert published(there, kind) == []
    assert PolicyStore(there.policies).versions() == [1]


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_killed_run_had_published_of_erased_rows_says_so_when_it_is_taken_up_and_is_to_be_marked(
    home: Path, tmp_path: Path, kind: str
) -> None:
    there, config, lake = published_and_killed(tmp_path, home, kind)
    config = config.model_copy(update={"erased_rows": "mark"})
    start = json.loads((there.folder / "start.json").read_text())
    (there.folder / "start.json").write_text(json.dumps(start | {"config": config.model_dump(mode="json")}))
    for _ in range(2):  # killed once more before it was handed on
        with only_run(there):
            assert begin(config, there, stores_of(there), lake).finished is not None
    assert marks(there, kind) == ["erased while it was trained: 4 interactions, 4 feedback"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_killed_run_had_published_of_erased_rows_is_marked_when_the_run_is_forgotten(
    home: Path, tmp_path: Path, kind: str
) -> None:
    there, _, lake = published_and_killed(tmp_path, home, kind)
    assert forget_erased(lake, there.runs, stores_of(there)) == ["published"]
    assert marks(there, kind) == ["rows that it had read were erased before its run had ended"]
    assert forget_erased(lake, there.runs, stores_of(there)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_handed_on_before_an_erasure_is_given_again(home: Path, tmp_path: Path, kind: str) -> None:
    there, config, lake = published_and_killed(tmp_path, home, kind)
    (there.folder / "checkpoints").rmdir()  # what a run does last
    with only_run(there):
        begun = begin(config, there, stores_of(there), lake)
    assert begun.finished is not None
    assert (begun.finished.candidate, marks(there, kind)) == (2 if kind == "policy" else None, [])


def test_the_files_of_a_run_that_may_hold_texts_are_its_users_alone(killed: tuple[JobContext, Lake]) -> None:
    assert stat.S_IMODE((killed[0].folder / "start.json").stat().st_mode) == 0o600


def test_a_policy_that_serves_is_not_withdrawn(home: Path, results: list[dict[str, Any]], tmp_path: Path) -> None:
    store = PolicyStore(tmp_path / "policies")
    store.publish(home / "seed", parent=None, lineage={}, metrics={})
    second = store.publish(home / "seed", parent=1, lineage={}, metrics={}).version
    store.promote(second, expected=None, who="test", why="test")
    with pytest.raises(PolicyError, match="policy 2 serves"):
        store.withdraw(second)
    store.withdraw(1)
    with pytest.raises(PolicyNotFound):
        store.get(1)
    assert store.publish(home / "seed", parent=2, lineage={}, metrics={}).version == 3
    assert sorted(path.name for path in store.root.glob(".publishing-*")) == []
