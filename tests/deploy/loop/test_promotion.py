from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from deploy.loop import promotion
from deploy.loop.promotion import PromotionRefused
from evaluation.decisions.ledger import Entry, Ledger, LedgerDamaged, LedgerError
from evaluation.decisions.verification import verify
from serve.policies.store import Pointer, PolicyCorrupt, PolicyNotFound, PolicyStore, StalePointer, record_erasure
from tests.evaluation.decisions.worlds import items, judged


@pytest.fixture
def store(tmp_path: Path, model: Path) -> PolicyStore:
    """Policies 1, 2, 3 and 4, of which 1 serves, in a server that is up."""
    store = PolicyStore(tmp_path / "policies")
    for number, parent in enumerate((None, 1, 2, 3)):
        other = shutil.copytree(model, tmp_path / f"model-{number}")
        (other / "generation_config.json").write_text(json.dumps({"number": number}))
        store.publish(other, parent=parent, lineage={}, metrics={})
    promotion.promote(store, ledger_of(store), 1, who="tests", why="first")
    follow(store)
    return store


def ledger_of(store: PolicyStore) -> Ledger:
    return Ledger(store.root.parent / "decisions")


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


def judge(store: PolicyStore, version: int, incumbent: int, gain: float = 0.3, n: int = 500) -> Entry:
    """Put a verdict on a candidate on record; n items, on which it is right so much more often."""
    shas = store.get(version).sha256, store.get(incumbent).sha256
    observed = items(n, gain=gain, differing=0.4, name=f"{version}-{incumbent}-{n}-")
    return judged(ledger_of(store), version, observed, incumbent=incumbent, shas=shas)


def promote(store: PolicyStore, version: int, **more: object) -> int:
    pointer = promotion.promote(store, ledger_of(store), version, who="tests", why="test", **more)  # type: ignore[arg-type]
    return pointer.version


def test_a_policy_that_passed_against_the_one_that_serves_is_promoted_with_its_verdict(store: PolicyStore) -> None:
    judge(store, 2, incumbent=1)
    pointer = promotion.promote(store, ledger_of(store), 2, who="me", why="better")
    assert (pointer.version, pointer.previous, pointer.who, pointer.why) == (2, 1, "me", "better")
    assert pointer.verdict is not None
    assert pointer.verdict["verdict"] == "pass"


def test_what_was_not_evaluated_is_refused(store: PolicyStore) -> None:
    with pytest.raises(PromotionRefused, match=r"policy 2 was not evaluated: run `millrace evaluate 2`"):
        promote(store, 2)


def test_what_the_gate_refused_is_refused_with_its_reasons(store: PolicyStore) -> None:
    judge(store, 2, incumbent=1, gain=-0.3)
    with pytest.raises(PromotionRefused, match=r"policy 2 did not pass the gate \(reward is -0.*no worthwhile gain\)"):
        promote(store, 2)


def test_what_is_undecided_is_refused_and_says_what_goes_on_with_it(store: PolicyStore) -> None:
    judge(store, 2, incumbent=1, gain=0.0, n=50)
    with pytest.raises(PromotionRefused, match=r"policy 2 is undecided \(.*\): run `millrace evaluate 2`"):
        promote(store, 2)


def test_a_verdict_that_no_ledger_has_promotes_nobody(store: PolicyStore) -> None:
    """What a policy's own folder says of it is a copy."""
    store.record_gate(2, {"verdict": "pass", "incumbent": 1, "entry": 1, "entry_sha256": "0" * 64})
    with pytest.raises(PromotionRefused, match="policy 2 was not evaluated"):
        promote(store, 2)
    missing = promotion.missing_from(ledger_of(store), store)
    assert missing == ["the verdict on policy 2 is entry 1, which the ledger does not have"]


def test_a_verdict_is_on_files_and_not_on_a_version_s_number(store: PolicyStore, tmp_path: Path, model: Path) -> None:
    """As in a home that was made anew beside its old ledger, and counts from 1 again."""
    judge(store, 2, incumbent=1)
    shutil.rmtree(store.root)
    again = PolicyStore(store.root)
    for number in (7, 8):
        other = shutil.copytree(model, tmp_path / f"model-{number}")
        (other / "generation_config.json").write_text(json.dumps({"number": number}))
        again.publish(other, parent=None, lineage={}, metrics={})
    promotion.promote(again, ledger_of(again), 1, who="me", why="first")
    with pytest.raises(PromotionRefused, match="policy 2 was not evaluated"):
        promote(again, 2)


def test_every_move_of_the_pointer_gets_into_the_ledger_once_whoever_made_it(store: PolicyStore) -> None:
    ledger = ledger_of(store)
    judge(store, 2, incumbent=1)
    promote(store, 2)
    refuse(store)
    promotion.promote(store, ledger, 3, who="me", why="I know better", override=True)
    follow(store)
    promotion.rollback(store, who="me", why="I did not")
    recorded = promotion.record_moves(store, ledger)
    assert promotion.record_moves(store, Ledger(ledger.folder)) == []
    moves = [(entry.kind, entry.body["version"], entry.who, entry.body["override"]) for entry in recorded]
    assert moves == [
        ("promotion", 1, "tests", False),
        ("promotion", 2, "tests", False),
        ("rollback", 1, "replica-0", False),
        ("promotion", 3, "me", True),
        ("rollback", 1, "me", False),
    ]
    verdict = next(entry.number for entry in ledger.entries() if entry.kind == "verdict")
    assert recorded[1].body["verdict_entry"] == verdict
    assert recorded[3].body["why"] == "I know better"
    assert verify(Ledger(ledger.folder)).problems == ()
    assert promotion.missing_from(ledger, store) == []


def test_a_look_at_items_that_the_candidate_has_learned_from_is_found(store: PolicyStore, tmp_path: Path) -> None:
    (tmp_path / "model-1" / "generation_config.json").write_text(json.dumps({"number": 9}))
    learned = {"5-1-500-3", "5-1-500-4", "2-1-500-0"}
    source = tmp_path / "model-1"
    assert store.publish(source, parent=1, lineage={}, metrics={}, learned_prompts=learned).version == 5
    judge(store, 2, incumbent=1)
    assert promotion.learned_items(ledger_of(store), store) == []
    judge(store, 5, incumbent=1)
    first, *_, verdict = promotion.learned_items(ledger_of(store), store)
    assert first.endswith("is on 2 prompts that policy 5 has learned from")
    assert verdict.endswith("is on 2 prompts that policy 5 has learned from")


def test_a_pass_in_another_ledger_than_the_one_by_which_the_serving_policy_was_promoted_is_not_enough(
    store: PolicyStore,
) -> None:
    """One whose lines were all removed, head and all, is such a one too: it would give all levels again."""
    judge(store, 2, incumbent=1)
    promote(store, 2)
    follow(store)
    shutil.rmtree(ledger_of(store).folder)
    judge(store, 3, incumbent=2)
    with pytest.raises(
        PromotionRefused, match=r"policy 2 serves by entry \d+ of a ledger, which \S+ does not have: res"
    ):
        promote(store, 3)
    pointer = promotion.promote(store, ledger_of(store), 3, who="me", why="the disk was lost", override=True)
    assert "restore evaluation.decisions" in (pointer.verdict or {})["objection"]
    follow(store)
    judge(store, 4, incumbent=3)
    assert promote(store, 4) == 4, "from here on it is the ledger"


def test_a_pointer_that_was_moved_past_the_gate_is_found(store: PolicyStore) -> None:
    ledger = ledger_of(store)
    judge(store, 3, incumbent=1, gain=-0.3)
    store.promote(2, expected=1, who="somebody", why="by hand")
    promotion.record_moves(store, ledger)
    (problem,) = verify(ledger).problems
    assert problem.endswith("policy 2 was promoted without a passing verdict against policy 1")


def test_a_damaged_ledger_promotes_by_override_only_and_a_rollback_works(store: PolicyStore) -> None:
    ledger = ledger_of(store)
    judge(store, 2, incumbent=1)
    promote(store, 2)
    follow(store)
    ledger.file.write_text(ledger.file.read_text().replace("reward", "Reward", 1))
    judge_again = Ledger(ledger.folder)
    with pytest.raises(LedgerDamaged, match="line 2 was changed"):
        promotion.promote(store, judge_again, 3, who="me", why="x")
    assert promotion.rollback(store, who="me", why="bad").version == 1
    pointer = promotion.promote(store, judge_again, 3, who="me", why="it must be", override=True)
    assert "line 2 was changed" in (pointer.verdict or {})["objection"]
    with pytest.raises(LedgerError, match=r"the pointer names policy 3, and the ledger can't take that up: .*line 2"):
        promotion.record_moves(store, judge_again)


def test_a_verdict_against_a_policy_that_no_longer_serves_is_not_enough(store: PolicyStore) -> None:
    judge(store, 2, incumbent=1)
    judge(store, 3, incumbent=1)
    promote(store, 2)
    with pytest.raises(PromotionRefused, match="against policy 1, but policy 2 serves"):
        promote(store, 3)
    assert store.serving().version == 2  # type: ignore[union-attr]


def test_an_override_goes_on_record(store: PolicyStore) -> None:
    promotion.promote(store, ledger_of(store), 2, who="me", why="I know better", override=True)
    last = store.history()[-1]
    assert (last.version, last.who, last.why) == (2, "me", "I know better")
    assert last.verdict is not None
    assert last.verdict["override"] is True
    assert "not evaluated" in last.verdict["objection"]


def test_an_override_that_was_not_needed_is_none(store: PolicyStore) -> None:
    judge(store, 2, incumbent=1)
    pointer = promotion.promote(store, ledger_of(store), 2, who="me", why="x", override=True)
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


def test_what_serves_already_is_not_moved_again_but_by_an_override_with_which_servers_try_again(
    store: PolicyStore,
) -> None:
    with pytest.raises(PromotionRefused, match=r"policy 1 serves already, since 20.*nothing was moved; .* --override"):
        promote(store, 1)
    assert len(store.history()) == 1
    assert promotion.promote(store, ledger_of(store), 1, who="me", why="try again", override=True).generation == 2


def test_a_policy_that_no_server_has_said_to_serve_yet_is_promoted_again_for_a_new_generation(
    store: PolicyStore,
) -> None:
    judge(store, 2, incumbent=1)
    promote(store, 2)
    assert promotion.promote(store, ledger_of(store), 2, who="me", why="try again").generation == 3
    store.record_outcome(pointer_of(store), served=True, by="replica-0")
    store.record_outcome(pointer_of(store), served=False, by="replica-1")
    assert promotion.promote(store, ledger_of(store), 2, who="me", why="once more").generation == 4


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
    judge(store, 2, incumbent=1, gain=-0.3)
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
        promotion.promote(store, ledger_of(store), 2, who="me", why=why, override=True)
    assert pointer_of(store).version == 1


def test_a_server_takes_back_no_later_move_to_the_policy_that_it_refused(store: PolicyStore) -> None:
    refused = promotion.promote(store, ledger_of(store), 2, who="me", why="x", override=True)
    promotion.promote(store, ledger_of(store), 2, who="me", why="there is more memory now", override=True)
    with pytest.raises(StalePointer, match="has moved since it named policy 2"):
        store.move_back(refused, 1, who="replica-0", why="not enough memory")
    assert pointer_of(store).version == 2


def test_a_rollback_undoes_the_move_that_was_meant_and_no_other(store: PolicyStore) -> None:
    meant = promotion.promote(store, ledger_of(store), 2, who="me", why="x", override=True)
    promotion.promote(store, ledger_of(store), 3, who="you", why="y", override=True)
    with pytest.raises(StalePointer):
        promotion.rollback(store, who="me", why="z", expected=meant)
    assert pointer_of(store).version == 3


def test_a_verdict_that_comes_while_the_files_are_verified_counts(
    store: PolicyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify_files = store.verify

    def judged_meanwhile(version: int) -> Any:
        policy = verify_files(version)
        judge(store, 2, incumbent=1, gain=-0.3)
        return policy

    monkeypatch.setattr(store, "verify", judged_meanwhile)
    with pytest.raises(PromotionRefused, match="did not pass the gate"):
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
    promotion.promote(store, ledger_of(store), 4, who="me", why="x", override=True)  # from here on, outcomes are kept
    assert store.served() == {1, 2}
    assert [pointer.generation for pointer in store.history()] == [1, 2, 3, 4, 5, 6]


def test_outcomes_that_a_crash_tore_are_read_and_repaired(store: PolicyStore) -> None:
    file = store.root / "outcomes.jsonl"
    promotion.promote(store, ledger_of(store), 2, who="me", why="x", override=True)
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
    promotion.promote(store, ledger_of(store), 2, who="me", why="x", override=True)
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
        promotion.promote(store, ledger_of(store), version, who="me", why="x", override=True)
        follow(store)
    promotion.promote(store, ledger_of(store), 4, who="me", why="x", override=True)
    refuse(store)
    file = store.root / "outcomes.jsonl"
    file.write_text(file.read_text().replace("{}garbage\n", ""))
    assert store.served() == {1, 2, 3}
    with pytest.raises(PromotionRefused, match="policy 4 has not served"):
        promotion.rollback(store, who="me", why="x", to=4)


def test_an_outcome_is_reported_once_behind_a_damaged_record_also(store: PolicyStore) -> None:
    damage_outcomes(store)
    pointer = promotion.promote(store, ledger_of(store), 2, who="me", why="x", override=True)
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
