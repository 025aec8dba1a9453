from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deploy.loop import promotion
from deploy.loop.promotion import PromotionRefused
from serve.policies.store import Pointer, PolicyCorrupt, PolicyNotFound, PolicyStore, StalePointer, record_erasure


@pytest.fixture
def store(tmp_path: Path, model: Path) -> PolicyStore:
    """Policies 1, 2, 3 and 4, of which 1 serves, in a server that is up."""
    store = PolicyStore(tmp_path / "policies")
    for parent in (None, 1, 2, 3):
        store.publish(model, parent=parent, lineage={}, metrics={})
    promotion.promote(store, 1, who="tests", why="first")
    follow(store)
    return store


def pointer_of(store: PolicyStore) -> Pointer:
    pointer = store.serving()
    assert pointer is not None
    return pointer


def follow(store: PolicyStore) -> None:
    """A server serves what the pointer names."""
    store.record_outcome(pointer_of(store), served=True, by="replica-0")


def refuse(store: PolicyStore) -> None:
    """A server refuses what the pointer names, and goes on with what it served before."""
    pointer = pointer_of(store)
    assert pointer.previous is not None
    store.move_back(pointer, pointer.previous, who="replica-0", why="it can't be loaded")
    follow(store)


def judge(
    store: PolicyStore, version: int, incumbent: int, verdict: str = "pass", reasons: tuple[str, ...] = ()
) -> None:
    store.record_gate(version, {"verdict": verdict, "incumbent": incumbent, "reasons": list(reasons)})


def promote(store: PolicyStore, version: int, **more: object) -> int:
    return promotion.promote(store, version, who="tests", why="test", **more).version  # type: ignore[arg-type]


def test_a_policy_that_passed_against_the_one_that_serves_is_promoted_with_its_verdict(store: PolicyStore) -> None:
    judge(store, 2, incumbent=1)
    pointer = promotion.promote(store, 2, who="me", why="better")
    assert (pointer.version, pointer.previous, pointer.who, pointer.why) == (2, 1, "me", "better")
    assert pointer.verdict is not None
    assert pointer.verdict["verdict"] == "pass"


def test_what_was_not_evaluated_is_refused(store: PolicyStore) -> None:
    with pytest.raises(PromotionRefused, match=r"policy 2 was not evaluated: run `millrace evaluate 2`"):
        promote(store, 2)


def test_what_the_gate_refused_is_refused_with_its_reasons(store: PolicyStore) -> None:
    judge(store, 2, incumbent=1, verdict="refuse", reasons=("too few items",))
    with pytest.raises(PromotionRefused, match="too few items"):
        promote(store, 2)


def test_a_verdict_against_a_policy_that_no_longer_serves_is_not_enough(store: PolicyStore) -> None:
    judge(store, 2, incumbent=1)
    judge(store, 3, incumbent=1)
    promote(store, 2)
    with pytest.raises(PromotionRefused, match="against policy 1, but policy 2 serves"):
        promote(store, 3)
    assert store.serving().version == 2  # type: ignore[union-attr]


def test_an_override_goes_on_record(store: PolicyStore) -> None:
    promotion.promote(store, 2, who="me", why="I know better", override=True)
    last = store.history()[-1]
    assert (last.version, last.who, last.why) == (2, "me", "I know better")
    assert last.verdict is not None
    assert last.verdict["override"] is True
    assert "not evaluated" in last.verdict["objection"]


def test_an_override_that_was_not_needed_is_none(store: PolicyStore) -> None:
    judge(store, 2, incumbent=1)
    pointer = promotion.promote(store, 2, who="me", why="x", override=True)
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
    assert promotion.promote(store, 1, who="me", why="try again").generation == 2


def test_a_second_rollback_goes_further_back_and_not_forward_again(store: PolicyStore) -> None:
    for version in (2, 3):
        judge(store, version, incumbent=version - 1)
        promote(store, version)
        follow(store)
    assert promotion.rollback(store, who="me", why="bad").version == 2
    assert promotion.rollback(store, who="me", why="bad too").version == 1
    with pytest.raises(PromotionRefused, match="policy 1 is the first that served"):
        promotion.rollback(store, who="me", why="all bad")
    judge(store, 4, incumbent=1)
    promote(store, 4)
    assert promotion.rollback(store, who="me", why="bad").version == 1


def test_a_rollback_can_name_its_target(store: PolicyStore) -> None:
    for version in (2, 3):
        judge(store, version, incumbent=version - 1)
        promote(store, version)
        follow(store)
    assert promotion.rollback(store, who="me", why="x", to=1).version == 1
    with pytest.raises(PromotionRefused, match="serves already"):
        promotion.rollback(store, who="me", why="x", to=1)
    with pytest.raises(PolicyNotFound):
        promotion.rollback(store, who="me", why="x", to=9)


def test_what_has_not_served_is_no_rollbacks_target_without_an_override(store: PolicyStore) -> None:
    judge(store, 2, incumbent=1, verdict="refuse", reasons=("it is worse",))
    with pytest.raises(PromotionRefused, match=r"policy 2 has not served.*rollback --to 2 --override --why"):
        promotion.rollback(store, who="me", why="x", to=2)
    assert pointer_of(store).version == 1


def test_a_policy_that_the_server_refused_has_not_served(store: PolicyStore) -> None:
    judge(store, 2, incumbent=1)
    promote(store, 2)
    refuse(store)
    with pytest.raises(PromotionRefused, match="policy 2 has not served"):
        promotion.rollback(store, who="me", why="x", to=2)


def test_a_policy_that_one_of_two_servers_refused_has_not_served(store: PolicyStore) -> None:
    judge(store, 2, incumbent=1)
    promote(store, 2)
    follow(store)
    refuse(store)
    assert store.served() == {1}


def test_a_policy_that_was_named_while_no_server_ran_has_not_served(store: PolicyStore) -> None:
    for version in (2, 3):
        judge(store, version, incumbent=version - 1)
        promote(store, version)
    assert promotion.rollback(store, who="me", why="bad").version == 1
    with pytest.raises(PromotionRefused, match="policy 2 has not served"):
        promotion.rollback(store, who="me", why="x", to=2)


def test_a_rollback_to_what_has_not_served_is_an_override_on_record(store: PolicyStore) -> None:
    pointer = promotion.rollback(store, who="me", why="I know better", to=3, override=True)
    assert (pointer.version, pointer.why) == (3, "I know better")
    assert pointer.verdict == {"rollback_from": 1, "override": True, "objection": "policy 3 has not served"}


def test_a_rollback_to_what_has_served_needs_no_override_and_is_none(store: PolicyStore) -> None:
    judge(store, 2, incumbent=1)
    promote(store, 2)
    follow(store)
    assert promotion.rollback(store, who="me", why="x", to=1, override=True).verdict == {"rollback_from": 2}


@pytest.mark.parametrize("why", ["", "  \n"])
def test_an_override_without_a_reason_is_refused(store: PolicyStore, why: str) -> None:
    with pytest.raises(PromotionRefused, match="an override needs a reason"):
        promotion.rollback(store, who="me", why=why, to=2, override=True)
    with pytest.raises(PromotionRefused, match="an override needs a reason"):
        promotion.promote(store, 2, who="me", why=why, override=True)
    assert pointer_of(store).version == 1


def test_a_server_takes_back_no_later_move_to_the_policy_that_it_refused(store: PolicyStore) -> None:
    refused = promotion.promote(store, 2, who="me", why="x", override=True)
    promotion.promote(store, 2, who="me", why="there is more memory now", override=True)
    with pytest.raises(StalePointer, match="has moved since it named policy 2"):
        store.move_back(refused, 1, who="replica-0", why="not enough memory")
    assert pointer_of(store).version == 2


def test_a_rollback_undoes_the_move_that_was_meant_and_no_other(store: PolicyStore) -> None:
    meant = promotion.promote(store, 2, who="me", why="x", override=True)
    promotion.promote(store, 3, who="you", why="y", override=True)
    with pytest.raises(StalePointer):
        promotion.rollback(store, who="me", why="z", expected=meant)
    assert pointer_of(store).version == 3


def test_a_verdict_that_changes_while_the_files_are_verified_is_the_one_that_counts(
    store: PolicyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge(store, 2, incumbent=1)
    verify = store.verify

    def judged_meanwhile(version: int) -> Any:
        policy = verify(version)
        judge(store, 2, incumbent=1, verdict="refuse", reasons=("it is worse",))
        return policy

    monkeypatch.setattr(store, "verify", judged_meanwhile)
    with pytest.raises(PromotionRefused, match="it is worse"):
        promote(store, 2)


def test_in_a_store_without_outcomes_what_no_server_took_back_has_served(store: PolicyStore) -> None:
    """As stores were before outcomes were kept."""
    moves = [
        {"version": 1, "who": "me@here", "verdict": None},
        {"version": 2, "who": "cycle", "verdict": {"verdict": "pass", "incumbent": 1}},
        {"version": 3, "who": "cycle", "verdict": {"verdict": "pass", "incumbent": 2}},
        {"version": 2, "who": "replica-0", "verdict": {"rollback_from": 3}},
        {"version": 1, "who": "me@here", "verdict": {"rollback_from": 2}},
    ]
    lines = [
        json.dumps(move | {"previous": None, "at": "2026-01-01T00:00:00+00:00", "why": "", "generation": number})
        for number, move in enumerate(moves, start=1)
    ]
    (store.root / "outcomes.jsonl").unlink()
    (store.root / "history.jsonl").write_text("".join(line + "\n" for line in lines))
    (store.root / "serving.json").write_text(lines[-1])
    assert store.served() == {1, 2}
    with pytest.raises(PromotionRefused, match="policy 3 has not served"):
        promotion.rollback(store, who="me", why="x", to=3)
    promotion.promote(store, 4, who="me", why="x", override=True)  # from here on, outcomes are kept
    assert store.served() == {1, 2}
    assert [pointer.generation for pointer in store.history()] == [1, 2, 3, 4, 5, 6]


def test_outcomes_that_a_crash_tore_are_read_and_repaired(store: PolicyStore) -> None:
    file = store.root / "outcomes.jsonl"
    promotion.promote(store, 2, who="me", why="x", override=True)
    follow(store)
    file.write_bytes(file.read_bytes()[:-20])
    assert store.served() == {1}
    follow(store)
    assert store.served() == {1, 2}
    assert len([json.loads(line) for line in file.read_text().splitlines()]) == 2


def damage_outcomes(store: PolicyStore) -> str:
    """Put a line that is no outcome between good ones; what errors call it."""
    file = store.root / "outcomes.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*lines[:1], "{}garbage\n", *lines[1:]]))
    return f"{file}, line 2 is no outcome"


def test_a_damaged_record_of_what_has_served_keeps_only_rollbacks_and_tells_what_to_do(store: PolicyStore) -> None:
    promotion.promote(store, 2, who="me", why="x", override=True)
    follow(store)
    where = damage_outcomes(store)
    for to in (None, 1):
        with pytest.raises(PromotionRefused) as refused:
            promotion.rollback(store, who="me", why="x", to=to)
        assert where in str(refused.value)
        assert "remove that line" in str(refused.value)
        assert "--override --why" in str(refused.value)
    judge(store, 3, incumbent=2)
    assert promote(store, 3) == 3
    refuse(store)
    assert pointer_of(store).version == 2
    back = promotion.rollback(store, who="me", why="it must be", to=1, override=True)
    assert back.verdict is not None
    assert where in back.verdict["objection"]


def test_what_is_reported_while_the_record_of_what_has_served_is_damaged_is_known_when_it_is_mended(
    store: PolicyStore,
) -> None:
    damage_outcomes(store)
    for version in (2, 3):
        promotion.promote(store, version, who="me", why="x", override=True)
        follow(store)
    promotion.promote(store, 4, who="me", why="x", override=True)
    refuse(store)
    file = store.root / "outcomes.jsonl"
    file.write_text(file.read_text().replace("{}garbage\n", ""))
    assert store.served() == {1, 2, 3}
    with pytest.raises(PromotionRefused, match="policy 4 has not served"):
        promotion.rollback(store, who="me", why="x", to=4)


def test_an_outcome_is_reported_once_behind_a_damaged_record_also(store: PolicyStore) -> None:
    damage_outcomes(store)
    pointer = promotion.promote(store, 2, who="me", why="x", override=True)
    for _ in range(3):
        store.record_outcome(pointer, served=True, by="replica-0")
    lines = (store.root / "outcomes.jsonl").read_text().splitlines()
    assert sum(f'"generation": {pointer.generation},' in line for line in lines) == 1


def test_an_erasure_of_a_folder_that_was_removed_meanwhile_makes_nothing_in_its_place(tmp_path: Path) -> None:
    folder = tmp_path / "reward_model"
    with pytest.raises(FileNotFoundError):
        record_erasure(folder, certainty="yes", why="x")
    assert not folder.exists()


def test_what_an_erasure_has_reached_is_promoted_by_an_override_only(store: PolicyStore) -> None:
    judge(store, 2, incumbent=1)
    judge(store, 3, incumbent=1)
    store.record_erasure(2, certainty="yes", why="erased", retrain=True)
    with pytest.raises(PromotionRefused, match=r"^policy 2 is marked for retraining: .*; to override: "):
        promote(store, 2)
    with pytest.raises(PromotionRefused, match=r"^policy 3 descends from one that is marked .* starts from policy 1"):
        promote(store, 3)
    assert promote(store, 3, override=True) == 3
    assert pointer_of(store).verdict["objection"].startswith("policy 3 descends from")  # type: ignore[index]


def test_where_every_policy_is_marked_what_was_trained_from_one_of_them_since_is_promoted(store: PolicyStore) -> None:
    for version in (1, 2):
        store.record_erasure(version, certainty="yes", why="erased", retrain=True)
    judge(store, 3, incumbent=1)
    assert promote(store, 3) == 3
