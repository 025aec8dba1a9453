"""Which responses a policy or a reward model may have learned from, by the lineage that its manifest names."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from evaluation.estimation.logged_responses import LoggedResponse, read_logged
from evaluation.estimation.training_reads import TrainingRead, learned_from, reads_of_policy
from evaluation.suites.held_out import position
from feedback.config import LakeConfig
from feedback.lake.tables import Lake
from serve.policies.store import Policy, PolicyStore
from tests.evaluation.conftest import write_policy
from tests.feedback.feedback_rows import NOON, interaction, put, reward

SHARE = 0.5
IDS = [f"{day}{i}" for day in "ab" for i in range(8)]
SLICE = {one for one in IDS if position(f"question {one}") < SHARE}


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """Two days of traffic, a0 to a7 and b0 to b7, in one version of the table each."""
    lake = Lake(str(tmp_path_factory.mktemp("lake")), LakeConfig())
    lake.create()
    for day, letter in enumerate("ab"):
        rows = [
            interaction(one, prompt=f"question {one}", created_at=NOON + timedelta(days=day))
            for one in IDS
            if one.startswith(letter)
        ]
        put(lake, "interactions", rows)
        put(lake, "rewards", [reward(row["response_id"], 1.0) for row in rows])
    return lake


@pytest.fixture(scope="module")
def responses(lake: Lake) -> Sequence[LoggedResponse]:
    found = read_logged(lake, 1, limit=100).responses
    assert {response.response_id for response in found} == set(IDS)
    return found


@pytest.fixture(scope="module")
def seed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seed")
    write_policy(folder, 1)
    return folder


@pytest.fixture
def store(tmp_path: Path, seed: Path) -> PolicyStore:
    store = PolicyStore(tmp_path / "policies")
    store.publish(seed, parent=None, lineage={}, metrics={})
    return store


def trained(store: PolicyStore, seed: Path, parent: int, version: int, **data: Any) -> Policy:
    lineage = {"lake_versions": {"interactions": version}, "train": {"data": data}}
    return store.publish(seed, parent=parent, lineage=lineage, metrics={})


def day(letter: str) -> set[str]:
    return {one for one in IDS if one.startswith(letter)}


def test_a_policy_of_no_lake_has_learned_from_nothing(lake: Lake, responses: Any, store: PolicyStore):
    assert reads_of_policy(store, store.get(1)) == []
    assert learned_from(lake, [], responses) == set()


def test_what_was_in_the_lake_when_a_policy_or_one_before_it_was_trained_may_be_learned_from(
    lake: Lake, responses: Any, store: PolicyStore, seed: Path
):
    first = trained(store, seed, 1, 1)
    assert learned_from(lake, reads_of_policy(store, first), responses) == day("a")
    child = store.publish(seed, parent=first.version, lineage={}, metrics={})
    assert learned_from(lake, reads_of_policy(store, child), responses) == day("a")
    later = trained(store, seed, child.version, 2)
    assert learned_from(lake, reads_of_policy(store, later), responses) == set(IDS)
    assert learned_from(lake, reads_of_policy(store, store.get(1)), responses) == set()


def test_held_out_prompts_are_learned_from_by_evaluations_reward_model_alone(
    lake: Lake, responses: Any, store: PolicyStore, seed: Path
):
    assert 0 < len(SLICE) < len(IDS)
    policy = trained(store, seed, 1, 2, holdout=SHARE)
    assert learned_from(lake, reads_of_policy(store, policy), responses) == set(IDS) - SLICE
    model = trained(store, seed, 1, 2, holdout=SHARE, holdout_side="slice")
    read = TrainingRead.of(model, store.get(1).path)
    assert read is not None
    assert learned_from(lake, [read], responses) == SLICE
    without = trained(store, seed, policy.version, 1)  # then the slice of day a is no longer held out
    assert learned_from(lake, reads_of_policy(store, without), responses) == (set(IDS) - SLICE) | day("a")


def test_where_a_version_can_not_be_read_any_more_all_that_is_older_than_the_policy_counts(
    lake: Lake, responses: Any, store: PolicyStore, seed: Path
):
    policy = trained(store, seed, 1, 99)
    assert learned_from(lake, reads_of_policy(store, policy), responses) == set(IDS)
    between = replace(policy, created_at=(NOON + timedelta(hours=12)).isoformat())
    assert learned_from(lake, reads_of_policy(store, between), responses) == day("a")


def test_an_ancestor_that_was_removed_may_have_learned_from_all_before_its_child(
    store: PolicyStore, lake: Lake, responses: Any, seed: Path
):
    first = store.publish(seed, parent=1, lineage={}, metrics={})
    child = replace(trained(store, seed, first.version, 1, holdout=SHARE), created_at=NOON.isoformat())
    assert learned_from(lake, reads_of_policy(store, child), responses) == day("a") - SLICE
    shutil.rmtree(first.path)
    assert learned_from(lake, reads_of_policy(store, child), responses) == day("a")
