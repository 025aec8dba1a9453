"""Which policies lose their weights, and that nothing that is needed, or half gone, is among the whole ones."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from serve.config import RetentionConfig
from serve.policies.retention import Kept, retraining_parent
from serve.policies.store import PolicyNotFound, PolicyPruned, PolicyStore, StalePointer
from tests.serve.policies.test_store import publish

LAST = RetentionConfig(keep_last=1, served_days=0)


def filled(store: PolicyStore, count: int, *, verdict: str | None = "fail") -> None:
    """Policies 1 to ``count``, each the child of the one before, with this verdict."""
    for number in range(1, count + 1):
        version = publish(store, float(number), parent=number - 1 or None)
        if verdict is not None:
            store.record_gate(version, {"verdict": verdict})


def whole(store: PolicyStore) -> list[int]:
    """The policies that have their weights, which all of them then have whole."""
    found = [version for version in store.versions() if store.get(version).pruned is None]
    for version in found:
        store.verify(version)
    return found


def serve(store: PolicyStore, *versions: int) -> None:
    for version in versions:
        pointer = store.serving()
        store.promote(version, expected=pointer.version if pointer else None, who="t", why="t")


def dated(store: PolicyStore, days_ago: list[float]) -> None:
    """Have the moves of the pointer have been made so long ago."""
    moves = [json.loads(line) for line in (store.root / "history.jsonl").read_text().splitlines()]
    for move, days in zip(moves, days_ago, strict=True):
        move["at"] = (datetime.now(UTC) - timedelta(days=days)).isoformat(timespec="milliseconds")
    (store.root / "history.jsonl").write_text("".join(json.dumps(move) + "\n" for move in moves))


def test_by_default_all_weights_stay(store: PolicyStore) -> None:
    filled(store, 3)
    assert Kept(store, RetentionConfig()).prune() == ([], {})
    assert whole(store) == [1, 2, 3]


def test_weights_go_and_the_manifest_lineage_config_and_tokenizer_stay(store: PolicyStore) -> None:
    filled(store, 3)
    before = store.get(1)
    removed, left = Kept(store, LAST).prune()
    assert ([policy.version for policy in removed], left) == ([1, 2], {})
    after = store.get(1)
    assert (after.lineage, after.metrics, after.files, after.sha256) == (
        before.lineage,
        before.metrics,
        before.files,
        before.sha256,
    )
    assert {path.name for path in after.path.iterdir()} == {
        "policy.json",
        "gate.json",
        "pruned.json",
        "config.json",
        "tokenizer.json",
    }
    assert store.get(2).parent == 1
    assert whole(store) == [3]
    assert Kept(store, LAST).prune() == ([], {})  # once


def test_what_serves_served_before_it_or_lately_is_pinned_or_waits_is_kept_and_why(store: PolicyStore) -> None:
    filled(store, 7)
    serve(store, 1, 2, 3, 5)
    dated(store, [40, 20, 12, 2])
    store.pin(4, who="t", why="for the report")
    publish(store, 8.0, parent=5)  # no verdict yet
    store.record_gate(6, {"verdict": "pass"})
    for number in (9, 10):
        store.record_gate(publish(store, float(number), parent=5), {"verdict": "fail"})
    assert Kept(store, RetentionConfig(keep_last=1, served_days=15), lambda: {7: "the parent of run r"}).reasons() == {
        2: "it served in the last 15 days",  # until 12 days ago
        3: "it served before what serves now",
        4: "pinned: for the report",
        5: "it serves",
        6: "a candidate",
        7: "the parent of run r",
        8: "a candidate",
        10: "one of the last 1",
    }
    Kept(store, RetentionConfig(keep_last=1, served_days=10), lambda: {7: "the parent of run r"}).prune()
    assert whole(store) == [3, 4, 5, 6, 7, 8, 10]
    store.unpin(4)
    Kept(store, LAST).prune()
    assert whole(store) == [3, 5, 6, 8, 10]


def test_the_last_ancestor_that_no_mark_reaches_is_kept_and_trained_from(store: PolicyStore) -> None:
    filled(store, 5)
    serve(store, 5)
    mark = {"certainty": "yes", "why": "w", "erasure": "e"}
    store.record_erasure(5, **mark)  # without a mark
    assert retraining_parent(store, 5) == store.get(5)
    store.record_erasure(3, **{**mark, "erasure": "f"}, retrain=True)
    clean = retraining_parent(store, 5)  # 4 and 5 descend from 3
    assert clean is not None
    assert clean.version == 2
    Kept(store, LAST).prune()
    assert whole(store) == [2, 5]
    store.record_erasure(1, **mark, retrain=True)
    assert retraining_parent(store, 5) is None
    assert [store.get(version).marked for version in (1, 2, 3, 4, 5)] == [True, False, True, False, False]


def test_something_that_no_erasure_can_mark_is_kept_however_often_the_rest_was_pruned(store: PolicyStore) -> None:
    publish(store)
    for version in range(2, 7):
        lineage = {"lake_versions": {"interactions": version}}
        store.publish(store.get(1).path, parent=version - 1, lineage=lineage, metrics={})
        store.record_gate(version, {"verdict": "fail"})
        serve(store, version)
        Kept(store, LAST).prune()
    assert whole(store) == [1, 5, 6]
    assert Kept(store, LAST).reasons()[1] == "no erasure can mark it"
    for version in range(2, 7):  # all that was trained on anybody's rows
        store.record_erasure(version, certainty="possibly", why="w", retrain=True)
    Kept(store, LAST).prune()
    parent = retraining_parent(store, 6)
    assert parent is not None
    assert (parent.version, whole(store)) == (1, [1, 5, 6])


def test_while_a_marked_policy_serves_training_goes_on_from_what_is_better_than_its_own_parent(
    store: PolicyStore,
) -> None:
    """All were refused against policy 3, and all but 6 were then judged against what they were trained from."""
    filled(store, 3)
    serve(store, 3)
    store.record_erasure(3, certainty="yes", why="w", retrain=True)

    def trained(parent: int, verdict: str, against: int) -> tuple[int, int]:
        version = publish(store, float(store.versions()[-1]), parent=parent)
        store.record_gate(version, {"verdict": verdict, "incumbent": against})
        next_parent = retraining_parent(store, 3)
        assert next_parent is not None
        return version, next_parent.version

    assert trained(2, "fail", 2) == (4, 2)
    assert trained(2, "pass", 2) == (5, 5)
    assert trained(5, "fail", 3) == (6, 5)
    assert trained(2, "pass", 2) == (7, 5)  # better than 2, and not known to be better than 5
    assert trained(5, "pass", 5) == (8, 8)
    Kept(store, LAST).prune()
    assert retraining_parent(store, 3) == store.get(8)
    store.record_erasure(8, certainty="yes", why="w", retrain=True)
    assert retraining_parent(store, 3) == store.get(5)
    store.record_erasure(5, certainty="yes", why="w", retrain=True)
    assert retraining_parent(store, 3) == store.get(7)


def test_of_a_recipe_of_several_stages_the_last_policy_is_what_to_go_on_from_and_the_others_are_no_candidates(
    store: PolicyStore,
) -> None:
    filled(store, 3)
    serve(store, 3)
    stages = [publish(store, float(parent), parent=parent) for parent in (3, 4)]
    assert Kept(store, LAST).reasons().keys() == {3, 5}, "4 is a stage of 5"
    store.record_gate(5, {"verdict": "fail", "incumbent": 3})
    store.record_erasure(3, certainty="yes", why="w", retrain=True)
    again = [publish(store, float(parent), parent=parent) for parent in (2, 6)]
    store.record_gate(7, {"verdict": "pass", "incumbent": 2})
    assert (stages, again) == ([4, 5], [6, 7])
    assert retraining_parent(store, 3) == store.get(7)
    store.record_erasure(6, certainty="yes", why="w", retrain=True)
    assert retraining_parent(store, 3) == store.get(2)


def test_what_a_fleet_is_moved_to_is_kept(store: PolicyStore) -> None:
    filled(store, 4)
    serve(store, 4)
    record = {
        "serving": {"version": 1, "previous": None},
        "rollout": {"to": {"version": 3, "previous": 1}},
        "stopping": False,
    }
    (store.root / "fleet.json").write_text(json.dumps(record))
    Kept(store, LAST).prune()
    assert whole(store) == [1, 3, 4]


def test_a_policy_without_weights_is_refused_in_one_line_by_all_that_would_use_them(store: PolicyStore) -> None:
    filled(store, 2)
    serve(store, 2)
    Kept(store, LAST).prune()

    def held() -> None:
        with store.hold(1):
            pass

    for use in (
        lambda: store.verify(1),
        lambda: store.promote(1, expected=2, who="t", why="t"),
        lambda: store.pin(1, who="t", why="t"),
        held,
    ):
        with pytest.raises(PolicyPruned, match=r"^policy 1: its weights were removed at 2.* \(retention\); .*policies"):
            use()
    pointer = store.serving()
    assert pointer is not None
    assert pointer.version == 2
    with pytest.raises(PolicyNotFound):
        store.pin(9, who="t", why="t")


def test_a_policy_that_somebody_holds_is_left_until_it_is_let_go(store: PolicyStore) -> None:
    filled(store, 2)
    with store.hold(1), store.hold(1):
        removed, left = Kept(store, LAST).prune()
        assert (removed, left) == ([], {1: "in use"})
        store.verify(1)
    assert [policy.version for policy in Kept(store, LAST).prune()[0]] == [1]


def _prune_and_die(root: Path, files: int) -> None:
    """Prune policy 1, and be killed behind the removal of this many files."""
    import os

    unlink, gone = Path.unlink, 0

    def dying(path: Path, missing_ok: bool = False) -> None:
        nonlocal gone
        if path.suffix == ".safetensors":
            if gone == files:
                os._exit(9)
            gone += 1
        unlink(path, missing_ok)

    Path.unlink = dying  # type: ignore[method-assign]
    PolicyStore(root).prune(1, "retention", dict)
    os._exit(0)


@pytest.mark.parametrize("files", [0, 1])
def test_a_prune_that_is_killed_leaves_nothing_that_could_be_taken_for_whole_and_is_finished(
    store: PolicyStore, files: int
) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    from tests.serve.policies.test_store import write_model

    def write(folder: Path) -> None:
        write_model(folder)
        save_file({"b": np.ones(3, np.float32)}, folder / "more.safetensors")

    store.publish(write, parent=None, lineage={}, metrics={})
    store.record_gate(1, {"verdict": "fail"})
    filled(store, 1)
    child = multiprocessing.get_context("spawn").Process(target=_prune_and_die, args=(store.root, files))
    child.start()
    child.join(60)
    assert child.exitcode == 9
    assert sum(path.exists() for path in store.get(1).weight_files) == 2 - files
    with pytest.raises(PolicyPruned):
        store.verify(1)
    with pytest.raises(PolicyPruned):
        store.promote(1, expected=None, who="t", why="t")
    assert [policy.version for policy in Kept(store, LAST).prune()[0]] == [1]
    assert not any(path.exists() for path in store.get(1).weight_files)


def test_of_a_promotion_and_a_prune_at_once_the_pointer_never_names_what_is_gone(store: PolicyStore) -> None:
    """Each round one thread promotes what another one prunes; whichever is second sees the other."""
    filled(store, 12)
    serve(store, 12)
    outcomes = set()
    for version in range(1, 11):
        barrier = threading.Barrier(2)
        results: dict[str, Any] = {}

        def promote(
            version: int = version, barrier: threading.Barrier = barrier, results: dict[str, Any] = results
        ) -> None:
            barrier.wait()
            pointer = store.serving()
            assert pointer is not None
            try:
                results["promoted"] = store.promote(version, expected=pointer, who="t", why="t")
            except (PolicyPruned, StalePointer) as error:
                results["promoted"] = error

        thread = threading.Thread(target=promote)
        thread.start()
        barrier.wait()
        results["pruned"] = store.prune(version, "t", lambda: Kept(store, LAST).reasons())
        thread.join()
        serving = store.serving()
        assert serving is not None
        store.verify(serving.version)
        promoted = not isinstance(results["promoted"], Exception)
        assert promoted == (results["pruned"] is not None)
        outcomes.add(promoted)
    assert outcomes  # which of the two came first is nobody's promise


def test_an_ancestor_whose_folder_was_removed_ends_the_line_and_no_cycle(store: PolicyStore) -> None:
    filled(store, 3)
    serve(store, 3)
    shutil.rmtree(store.get(1).path)
    clean = retraining_parent(store, 3)
    assert clean is not None
    assert clean.version == 3
    assert sorted(Kept(store, LAST).reasons()) == [3]
    store.record_erasure(3, certainty="yes", why="w", retrain=True)
    clean = retraining_parent(store, 3)
    assert clean is not None
    assert clean.version == 2
    with pytest.raises(PolicyNotFound):
        retraining_parent(store, 1)


def test_a_candidate_that_is_undecided_waits_and_a_refused_one_does_not(store: PolicyStore) -> None:
    filled(store, 3)
    serve(store, 1, 3)
    for number, verdict in ((4, "undecided"), (5, "refuse"), (6, "fail")):
        store.record_gate(publish(store, float(number), parent=3), {"verdict": verdict})
    assert Kept(store, LAST).reasons().get(4) == "a candidate"
    assert 5 not in Kept(store, LAST).reasons()
