"""The policy store."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from serve.policies.folder import PolicyInvalid, WrittenFile, safetensors_header, sha256_file
from serve.policies.store import (
    PolicyCorrupt,
    PolicyError,
    PolicyNotFound,
    PolicyStore,
    StalePointer,
    record_erasure,
)
from tests.paths import ROOT


def write_model(folder: Path, value: float = 1.0) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    (folder / "tokenizer.json").write_text("{}")
    save_file({"a": np.full((3, 2), value, np.float32)}, folder / "model.safetensors")


def publish(store: PolicyStore, value: float = 1.0, parent: int | None = None) -> int:
    return store.publish(
        lambda folder: write_model(folder, value), parent=parent, lineage={"rows": 3}, metrics={"loss": 0.5}
    ).version


def test_a_published_policy_reads_back_with_its_manifest(store: PolicyStore) -> None:
    version = publish(store)
    second = store.get(publish(store, 2.0, parent=version))
    assert (second.version, second.parent, second.lineage, second.metrics) == (2, 1, {"rows": 3}, {"loss": 0.5})
    assert set(second.files) == {"config.json", "tokenizer.json", "model.safetensors"}
    assert [path.name for path in second.weight_files] == ["model.safetensors"]
    assert store.versions() == [1, 2]
    latest = store.latest()
    assert latest is not None
    assert latest.version == 2
    assert latest.sha256 != store.get(1).sha256
    assert store.verify(2).version == 2


def test_a_file_that_was_hashed_while_it_was_written_is_not_read_again_until_it_serves(
    store: PolicyStore, tmp_path: Path
) -> None:
    source = tmp_path / "candidate"
    write_model(source)
    weights = source / "model.safetensors"
    untrue = WrittenFile.of(weights.stat(), "f" * 64)  # only who reads the file can know

    def published(copy: Callable[[str, str], object]) -> int:
        return store.publish(
            lambda aside: shutil.copytree(source, aside, dirs_exist_ok=True, copy_function=copy),
            parent=None,
            lineage={},
            metrics={},
            written={weights.name: untrue},
        ).version

    linked, copied = published(os.link), published(shutil.copy2)
    assert store.get(linked).files[weights.name]["sha256"] == "f" * 64
    with pytest.raises(PolicyCorrupt, match=r"model\.safetensors has sha256 .*, its manifest says ffffffffffff"):
        store.verify(linked)
    assert store.get(copied).files[weights.name]["sha256"] == sha256_file(weights), "another file has its own hash"
    weights.write_bytes(weights.read_bytes())
    rewritten = published(os.link)
    assert store.get(rewritten).files[weights.name]["sha256"] == sha256_file(weights), "nor does one written to since"
    assert store.verify(rewritten).version == rewritten


def test_what_a_policy_and_its_ancestors_learned_from_is_known_and_what_is_not_is_named(store: PolicyStore) -> None:
    def learning(parent: int, prompts: set[str] | None) -> int:
        source = store.get(parent).path  # a copy of its folder does not bring what the parent learned
        return store.publish(source, parent=parent, lineage={}, metrics={}, learned_prompts=prompts).version

    first = publish(store)
    second = learning(first, {"a", "b"})
    third = learning(second, {"c"})
    assert store.learned_prompts(first) == (frozenset(), ())
    assert store.learned_prompts(third) == ({"a", "b", "c"}, ())
    assert store.get(third).learned == {"sha256": (store.get(third).learned or {})["sha256"], "prompts": 1}
    assert store.get(third).sha256 == store.get(first).sha256, "it is no part of the policy"
    assert store.verify(third).version == third
    fourth = learning(third, None)
    assert store.learned_prompts(learning(fourth, {"d"})) == ({"a", "b", "c", "d"}, (fourth,))
    (store.get(second).path / "learned.json").write_text("[]")
    with pytest.raises(PolicyCorrupt, match=r"policy 2: learned\.json is not the one that was published"):
        store.learned_prompts(third)
    (store.get(second).path / "learned.json").unlink()
    with pytest.raises(PolicyCorrupt, match=r"policy 2: learned\.json can't be read: No such file"):
        store.learned_prompts(third)


def test_same_content_has_the_same_hash_whatever_its_version(store: PolicyStore) -> None:
    assert store.get(publish(store)).sha256 == store.get(publish(store)).sha256


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is not JSON"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no *.safetensors"),
        (lambda folder: (folder / "extra.bin").write_bytes(b"x"), "extra.bin"),
        (lambda folder: (folder / "optimizer.pt").write_bytes(b"x"), "optimizer.pt"),
        (lambda folder: os.truncate(folder / "model.safetensors", 60), "model.safetensors"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 64), "not a whole safetensors"),
        (lambda folder: (folder / "link").symlink_to("/etc/passwd"), "symbolic link"),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text(
                '{"weight_map": {"b": "model.safetensors"}}'
            ),
            "holds b",
        ),
    ],
)
def test_a_folder_that_is_no_policy_is_refused_and_leaves_nothing(
    store: PolicyStore, spoil: Callable[[Path], None], says: str
) -> None:
    def write(folder: Path) -> None:
        write_model(folder)
        spoil(folder)

    with pytest.raises(PolicyInvalid, match=says.replace("*", r"\*")):
        store.publish(write, parent=None, lineage={}, metrics={})
    assert store.versions() == []
    assert not list(store.root.glob(".publishing-*"))


def test_copying_a_folder_leaves_out_pickles_beside_safetensors(store: PolicyStore, tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_model(source)
    (source / "pytorch_model.bin").write_bytes(b"pickle")
    (source / ".cache").write_bytes(b"")
    assert "pytorch_model.bin" not in store.publish(source, parent=None, lineage={}, metrics={}).files
    (source / "model.safetensors").unlink()
    with pytest.raises(PolicyInvalid, match="convert"):
        store.publish(source, parent=None, lineage={}, metrics={})


def test_a_copied_policy_folder_does_not_bring_its_manifest_and_verdict(store: PolicyStore) -> None:
    store.publish(write_model, parent=None, lineage={"of": 1}, metrics={})
    first = store.record_gate(1, {"verdict": "pass"})

    def write(folder: Path) -> None:
        for path in first.path.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())

    second = store.publish(write, parent=1, lineage={"of": 2}, metrics={})
    assert (second.version, second.gate, second.lineage) == (2, None, {"of": 2})
    assert store.verify(2).files == first.files


def test_an_unknown_parent_and_a_metric_that_is_not_json_are_refused(store: PolicyStore) -> None:
    with pytest.raises(PolicyNotFound, match="no policy 9"):
        publish(store, parent=9)
    with pytest.raises(ValueError, match=r"metrics.*loss"):
        store.publish(write_model, parent=None, lineage={}, metrics={"loss": float("nan")})


def test_a_version_is_never_used_twice_even_when_the_newest_is_gone(store: PolicyStore) -> None:
    publish(store)
    newest = store.get(publish(store))
    for path in newest.path.iterdir():
        path.unlink()
    newest.path.rmdir()
    assert publish(store) == 3


def test_publishing_at_the_same_time_gives_each_its_own_version(store: PolicyStore) -> None:
    threads = [threading.Thread(target=publish, args=(store, float(i))) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.versions() == list(range(1, 9))
    assert len({store.verify(version).sha256 for version in store.versions()}) == 8


def test_what_a_killed_publisher_left_is_cleared_and_a_living_ones_is_not(store: PolicyStore) -> None:
    store.root.mkdir(parents=True)
    (store.root / ".publishing-dead").mkdir()

    def write(folder: Path) -> None:
        write_model(folder)
        publish(store)  # another publisher meanwhile
        assert (folder / "config.json").exists()

    store.publish(write, parent=None, lineage={}, metrics={})
    assert store.versions() == [1, 2]
    assert not list(store.root.glob(".publishing-*"))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda folder: (folder / "config.json").write_text('{"model_type": "llama"}'), "config.json"),
        (lambda folder: os.truncate(folder / "model.safetensors", 60), "model.safetensors has 60 bytes"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json is missing"),
        (lambda folder: (folder / "more.safetensors").write_bytes(b""), "more.safetensors is not in its manifest"),
        (lambda folder: (folder / "policy.json").write_text("{"), "not JSON"),
        (lambda folder: (folder / "policy.json").write_text("{}"), "lacks"),
    ],
)
def test_a_damaged_policy_is_found_and_the_file_named(
    store: PolicyStore, spoil: Callable[[Path], None], says: str
) -> None:
    version = publish(store)
    spoil(store.get(version).path)
    with pytest.raises(PolicyCorrupt, match=says):
        store.verify(version)


def test_one_flipped_bit_is_found(store: PolicyStore) -> None:
    path = store.get(publish(store)).path / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(PolicyCorrupt, match=r"model\.safetensors has sha256"):
        store.verify(1)


def test_the_gates_verdict_comes_later_and_is_not_hashed(store: PolicyStore) -> None:
    version = publish(store)
    assert store.get(version).gate is None
    assert store.record_gate(version, {"verdict": "pass"}).gate == {"verdict": "pass"}
    assert store.verify(version).gate == {"verdict": "pass"}


def test_every_erasure_of_many_at_once_is_on_record(store: PolicyStore, tmp_path: Path) -> None:
    version, reward_model = publish(store), tmp_path / "reward_model"
    reward_model.mkdir()
    failed: list[Exception] = []

    def record(by: int) -> None:
        try:
            for i in range(20):
                store.record_erasure(version, certainty="yes", why=f"{by}-{i}")
                record_erasure(reward_model, certainty="yes", why=f"{by}-{i}")
                store.record_gate(version, {"by": by})
        except (OSError, ValueError, PolicyError) as error:
            failed.append(error)

    threads = [threading.Thread(target=record, args=(by,)) for by in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    everything = {f"{by}-{i}" for by in range(3) for i in range(20)}
    assert {record["why"] for record in store.get(version).erasures} == everything
    kept = json.loads((reward_model / "erasures.json").read_text())["erasures"]
    assert (len(kept), {record["why"] for record in kept}) == (60, everything)
    store.verify(version)


def test_an_erasure_that_is_reported_again_is_on_record_once(store: PolicyStore) -> None:
    version = publish(store)
    for erasure in ("first", "first", "second"):
        store.record_erasure(version, certainty="yes", why="test", erasure=erasure)
    assert [record["erasure"] for record in store.get(version).erasures] == ["first", "second"]


def test_the_pointer_moves_only_from_where_it_is_expected(store: PolicyStore) -> None:
    first, second = publish(store), publish(store)
    assert store.serving() is None
    assert store.promote(first, expected=None, who="a", why="init").generation == 1
    with pytest.raises(StalePointer, match="at 1, not at None"):
        store.promote(second, expected=None, who="b", why="race")
    pointer = store.promote(second, expected=first, who="b", why="better", verdict={"verdict": "pass"})
    assert (pointer.version, pointer.previous, pointer.generation) == (second, first, 2)
    assert pointer.verdict == {"verdict": "pass"}
    again = store.promote(second, expected=second, who="b", why="retry")
    assert (again.version, again.previous, again.generation) == (second, first, 3)
    with pytest.raises(PolicyNotFound):
        store.promote(77, expected=second, who="b", why="typo")
    assert store.serving() == again
    assert [p.generation for p in store.history()] == [1, 2, 3]


def test_of_many_promotions_at_once_exactly_one_wins_each_round(store: PolicyStore) -> None:
    versions = [publish(store) for _ in range(4)]
    store.promote(versions[0], expected=None, who="t", why="t")
    outcomes: list[bool] = []

    def promote(version: int) -> None:
        try:
            store.promote(version, expected=versions[0], who="t", why="t")
            outcomes.append(True)
        except StalePointer:
            outcomes.append(False)

    threads = [threading.Thread(target=promote, args=(version,)) for version in versions[1:]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == [False, False, True]


def test_a_crash_between_pointer_and_history_loses_no_history(store: PolicyStore) -> None:
    first, second = publish(store), publish(store)
    store.promote(first, expected=None, who="t", why="one")
    store.promote(second, expected=first, who="t", why="two")
    history = store.root / "history.jsonl"
    history.write_bytes(history.read_bytes()[:-20])  # torn in the middle of the last line
    assert [p.why for p in store.history()] == ["one", "two"]
    store.promote(first, expected=second, who="t", why="back")
    assert [p.why for p in store.history()] == ["one", "two", "back"]
    assert len([json.loads(line) for line in history.read_text().splitlines()]) == 3
    history.write_text("rubbish\n" + history.read_text())
    with pytest.raises(PolicyError, match="line 1"):
        store.history()


def test_the_header_of_a_safetensors_file_is_read_without_torch(tmp_path: Path) -> None:
    write_model(tmp_path / "m")
    header = safetensors_header(tmp_path / "m" / "model.safetensors")
    assert header["a"]["shape"] == [3, 2]
    assert header["a"]["dtype"] == "F32"


def test_the_store_imports_without_torch_and_vllm() -> None:
    code = "import sys; sys.modules['torch'] = sys.modules['vllm'] = None; import serve.policies, serve.config"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


def test_a_run_publishes_one_policy_whoever_goes_on_with_it(store: PolicyStore) -> None:
    first = store.publish(write_model, parent=None, lineage={"run_id": "one"}, metrics={})
    with pytest.raises(PolicyError, match=f"run one has published policy {first.version}"):
        store.publish(write_model, parent=None, lineage={"run_id": "one"}, metrics={})
    assert store.publish(write_model, parent=first.version, lineage={"run_id": "two"}, metrics={}).version == 2
    assert store.versions() == [1, 2]
    assert not list(store.root.glob(".*new*"))
