from __future__ import annotations

from pathlib import Path

import pytest

from deploy import rollout
from deploy.rollout import RolloutRefused
from serve.policies import PolicyCorrupt, PolicyNotFound, PolicyStore, StalePointer


@pytest.fixture
def store(tmp_path: Path, model: Path) -> PolicyStore:
    """Policies 1, 2, 3 and 4, of which 1 serves."""
    store = PolicyStore(tmp_path / "policies")
    for parent in (None, 1, 2, 3):
        store.publish(model, parent=parent, lineage={}, metrics={})
    rollout.promote(store, 1, who="tests", why="first")
    return store


def judge(
    store: PolicyStore, version: int, incumbent: int, verdict: str = "pass", reasons: tuple[str, ...] = ()
) -> None:
    store.record_gate(version, {"verdict": verdict, "incumbent": incumbent, "reasons": list(reasons)})


def promote(store: PolicyStore, version: int, **more: object) -> int:
    return rollout.promote(store, version, who="tests", why="test", **more).version  # type: ignore[arg-type]


def test_a_policy_that_passed_against_the_one_that_serves_is_promoted_with_its_verdict(store: PolicyStore) -> None:
    judge(store, 2, incumbent=1)
    pointer = rollout.promote(store, 2, who="me", why="better")
    assert (pointer.version, pointer.previous, pointer.who, pointer.why) == (2, 1, "me", "better")
    assert pointer.verdict is not None
    assert pointer.verdict["verdict"] == "pass"


def test_what_was_not_evaluated_is_refused(store: PolicyStore) -> None:
    with pytest.raises(RolloutRefused, match=r"policy 2 was not evaluated: run `millrace evaluate 2`"):
        promote(store, 2)


def test_what_the_gate_refused_is_refused_with_its_reasons(store: PolicyStore) -> None:
    judge(store, 2, incumbent=1, verdict="refuse", reasons=("too few items",))
    with pytest.raises(RolloutRefused, match="too few items"):
        promote(store, 2)


def test_a_verdict_against_a_policy_that_no_longer_serves_is_not_enough(store: PolicyStore) -> None:
    judge(store, 2, incumbent=1)
    judge(store, 3, incumbent=1)
    promote(store, 2)
    with pytest.raises(RolloutRefused, match="against policy 1, but policy 2 serves"):
        promote(store, 3)
    assert store.serving().version == 2  # type: ignore[union-attr]


def test_an_override_goes_on_record(store: PolicyStore) -> None:
    rollout.promote(store, 2, who="me", why="I know better", override=True)
    last = store.history()[-1]
    assert (last.version, last.who, last.why) == (2, "me", "I know better")
    assert last.verdict is not None
    assert last.verdict["override"] is True
    assert "not evaluated" in last.verdict["objection"]


def test_an_override_that_was_not_needed_is_none(store: PolicyStore) -> None:
    judge(store, 2, incumbent=1)
    pointer = rollout.promote(store, 2, who="me", why="x", override=True)
    assert "override" not in (pointer.verdict or {})


def test_a_policy_whose_file_was_changed_is_refused(store: PolicyStore) -> None:
    judge(store, 2, incumbent=1)
    (store.get(2).path / "config.json").write_text("{}")
    with pytest.raises(PolicyCorrupt, match=r"config\.json"):
        promote(store, 2, override=True)


def test_a_pointer_that_moved_meanwhile_is_not_overwritten(store: PolicyStore) -> None:
    seen = store.serving()
    judge(store, 2, incumbent=1)
    judge(store, 3, incumbent=1)
    promote(store, 2)
    with pytest.raises(StalePointer):
        promote(store, 3, expected=seen)


def test_the_policy_that_serves_can_be_promoted_again_for_a_new_generation(store: PolicyStore) -> None:
    assert rollout.promote(store, 1, who="me", why="try again").generation == 2


def test_a_second_rollback_goes_further_back_and_not_forward_again(store: PolicyStore) -> None:
    for version in (2, 3):
        judge(store, version, incumbent=version - 1)
        promote(store, version)
    assert rollout.rollback(store, who="me", why="bad").version == 2
    assert rollout.rollback(store, who="me", why="bad too").version == 1
    with pytest.raises(RolloutRefused, match="policy 1 is the first that served"):
        rollout.rollback(store, who="me", why="all bad")
    judge(store, 4, incumbent=1)
    promote(store, 4)
    assert rollout.rollback(store, who="me", why="bad").version == 1


def test_a_rollback_can_name_its_target(store: PolicyStore) -> None:
    for version in (2, 3):
        judge(store, version, incumbent=version - 1)
        promote(store, version)
    assert rollout.rollback(store, who="me", why="x", to=1).version == 1
    with pytest.raises(RolloutRefused, match="serves already"):
        rollout.rollback(store, who="me", why="x", to=1)
    with pytest.raises(PolicyNotFound):
        rollout.rollback(store, who="me", why="x", to=9)
