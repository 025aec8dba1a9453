"""Policies in an object store, as machines without a shared disk have them, on a real S3-compatible server (moto's).

A machine is a folder of its own for the copy, with the same address.
"""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3
import httpx
import pytest

from loadtests.tiny_model import make_model_folder
from serve.config import PolicyStoreConfig, RetentionConfig
from serve.policies.experiments import Experiment, ExperimentRunning, Phase
from serve.policies.folder import StoreUnreachable
from serve.policies.object_store import Conflict, ObjectStore
from serve.policies.open_store import open_store
from serve.policies.retention import Kept
from serve.policies.shared import SharedPolicyStore
from serve.policies.shared_records import RECORDS, unreferenced
from serve.policies.store import MERGED, PolicyCorrupt, PolicyError, PolicyPruned, PolicyStore, StalePointer
from serve.policies.whole_policies import whole
from serve.swap.verification import verify
from tests.object_store import serving
from tests.serve.adapter_policies import make_adapter
from tests.serve.conftest import start_server, stop_server
from tests.serve.policies.test_store import publish, write_model

LAST = RetentionConfig(keep_last=1, served_days=0)
SPAWN = multiprocessing.get_context("spawn")

_numbers = itertools.count()

Machine = Callable[[str], SharedPolicyStore]


@pytest.fixture(scope="module")
def options() -> Iterator[dict[str, str]]:
    """Storage options of a server that holds an empty bucket."""
    with serving() as found:
        yield found


@pytest.fixture
def config(options: dict[str, str]) -> PolicyStoreConfig:
    return PolicyStoreConfig(uri=f"s3://bucket/policies{next(_numbers)}", storage_options=options)


@pytest.fixture
def machine(config: PolicyStoreConfig, tmp_path: Path) -> Machine:
    """The store as a machine of this name has it; called again, as another process there has it."""
    return lambda name: on(config, tmp_path / name)


def on(config: PolicyStoreConfig, home: Path) -> SharedPolicyStore:
    store = open_store(home / "policies", config)
    assert isinstance(store, SharedPolicyStore)
    return store


def objects(config: PolicyStoreConfig) -> list[str]:
    return sorted(ObjectStore(config.uri or "", config.store_options).names("objects/"))


def records(config: PolicyStoreConfig) -> dict[str, str]:
    found = ObjectStore(config.uri or "", config.store_options).read(RECORDS, 1 << 20)
    assert found is not None
    return dict(json.loads(gzip.decompress(found.content))["records"])


def bucket(config: PolicyStoreConfig) -> Any:
    given = config.store_options
    keys = {"aws_access_key_id": "key", "aws_secret_access_key": "secret", "region_name": "us-east-1"}
    return boto3.client("s3", endpoint_url=given["aws_endpoint_url"], **keys)


def weights_of(config: PolicyStoreConfig) -> list[str]:
    return [name for name in objects(config) if name.endswith(".safetensors")]


def experiment(store: PolicyStore, number: int, candidate: int, control: int) -> Experiment:
    pointer = store.serving()
    return Experiment(
        number,
        candidate,
        control,
        "seed",
        time.time(),
        60.0,
        (Phase(0, 0.5),),
        pointer.generation if pointer else 0,
        "running",
        "t",
        "t",
        {},
    )


def test_without_an_address_a_store_is_a_folder_and_obstore_is_not_loaded(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from serve.config import ServeConfig\n"
        "from serve.policies.open_store import open_store\n"
        f"store = open_store(Path({str(tmp_path)!r}), ServeConfig().policy_store)\n"
        "assert store.serving() is None and 'obstore' not in sys.modules and type(store).__name__ == 'PolicyStore'"
    )
    process = SPAWN.Process(target=exec, args=(code,))
    process.start()
    process.join(60)
    assert process.exitcode == 0


def test_what_one_machine_publishes_and_promotes_another_one_reads_and_verifies(machine: Machine) -> None:
    a, b = machine("a"), machine("b")
    learned = a.publish(write_model, parent=None, lineage={"x": 1}, metrics={"m": 2.0}, learned_prompts=["p"]).version
    child = a.publish(write_model, parent=learned, lineage={}, metrics={}, learned_prompts=["q"]).version
    a.record_gate(child, {"verdict": "pass"})
    a.pin(learned, who="me", why="good")
    a.promote(child, expected=None, who="me", why="first")
    assert (b.versions(), b.serving()) == ([learned, child], a.serving())
    policy = b.get(child)
    assert (policy.gate, policy.parent, b.get(learned).pinned) == ({"verdict": "pass"}, learned, a.get(learned).pinned)
    assert b.learned_prompts(child) == (frozenset({"q"}), ())
    assert not policy.weight_files[0].exists(), "weights are downloaded when they are needed"
    assert (policy.path / "tokenizer.json").exists(), "what serves has its tokenizer at once"
    assert b.verify(child).weight_files[0].read_bytes() == a.get(child).weight_files[0].read_bytes()
    assert not b.get(learned).weight_files[0].exists()
    with b.hold(learned) as held:
        assert held.weight_files[0].exists()
    b.unpin(learned)
    time.sleep(1.1)  # what was looked at is taken for new for a second
    assert a.get(learned).pinned is None
    assert a.history() == b.history()


def test_an_adapter_brings_the_weights_that_it_is_of_to_another_machine(machine: Machine, tmp_path: Path) -> None:
    a, b = machine("a"), machine("b")
    base = a.publish(make_model_folder(tmp_path / "base", 1), parent=None, lineage={}, metrics={})
    made = make_adapter(base, tmp_path / "adapter", seed=1)
    adapter = a.publish(made, parent=base.version, lineage={}, metrics={}, base=base)
    with b.hold(adapter.version) as held:
        assert held.base == adapter.base
        assert b.get(base.version).weight_files[0].exists()
        assert whole(held).files == whole(adapter).files
        assert a.prune(base.version, "test", dict) is None, "this machine holds it, and keeps its copy"
    with pytest.raises(PolicyError, match=f"policy {adapter.version} is an adapter of policy {base.version}"):
        a.withdraw(base.version)
    a.withdraw(adapter.version)
    b._next_look = 0.0
    assert b.versions() == [base.version]
    for store in (a, b):
        assert [path.name for path in (store.root / MERGED).iterdir()] == [".lock"]


def _publish(config: PolicyStoreConfig, home: Path, count: int) -> None:
    for _ in range(count):
        publish(on(config, home))


@pytest.mark.long
def test_processes_of_three_machines_that_publish_at_once_take_each_version_once(
    machine: Machine, config: PolicyStoreConfig, tmp_path: Path
) -> None:
    children = [SPAWN.Process(target=_publish, args=(config, tmp_path / str(n // 2), 3)) for n in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
        assert child.exitcode == 0
    store = machine("c")
    assert store.versions() == list(range(1, 13))
    for version in store.versions():
        store.verify(version)
    assert not [name for name in records(config) if name.startswith("uploads/")]
    assert unreferenced(objects(config), records(config)) == []


def test_moves_of_the_pointer_from_several_machines_are_each_made_once_and_all_in_the_history(machine: Machine) -> None:
    stores = [machine(str(number)) for number in range(4)]
    for _ in range(2):
        publish(stores[0])
    stores[0].promote(1, expected=None, who="t", why="first")

    def move(store: PolicyStore) -> None:
        done = 0
        while done < 5:
            try:
                pointer = store.serving()
                assert pointer is not None
                store.promote(3 - pointer.version, expected=pointer, who=str(id(store)), why="t")
                done += 1
            except StalePointer:
                store._next_look = 0.0  # look again now

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(move, stores))
    history = machine("other").history()
    assert [move.generation for move in history] == list(range(1, 22))
    assert all(move.version == 3 - before.version for before, move in itertools.pairwise(history))
    assert all(sum(move.who == str(id(store)) for move in history) == 5 for store in stores)


def test_many_changes_of_different_records_at_once_are_all_there(machine: Machine) -> None:
    stores = [machine(str(number)) for number in range(4)]
    version = publish(stores[0])

    def mark(number: int) -> None:
        stores[number % 4].record_erasure(version, certainty="yes", why="t", erasure=str(number))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(mark, range(12)))
    found = machine("other").get(version).erasures
    assert sorted(int(one["erasure"]) for one in found) == list(range(12))


def test_of_a_withdrawal_and_a_promotion_on_two_machines_one_is_refused(machine: Machine) -> None:
    a, b = machine("a"), machine("b")
    publish(a)
    a.promote(1, expected=None, who="t", why="t")
    seen = set()
    for round_ in range(6):
        version = publish(a)
        serves = a.serving()
        barrier = threading.Barrier(2)
        results = race(
            barrier,
            lambda: b.promote(version, expected=serves, who="t", why="t"),  # noqa: B023
            lambda: a.withdraw(version),  # noqa: B023
        )
        outcome = tuple(type(result).__name__ for result in results)
        assert outcome in {("Pointer", "PolicyError"), ("PolicyNotFound", "NoneType")}, (round_, results)
        seen.add(outcome)
        fresh = machine(f"fresh{round_}")
        pointer = fresh.serving()
        assert pointer is not None
        fresh.verify(pointer.version)
        a._next_look = 0.0


def test_of_a_prune_and_a_promotion_on_two_machines_the_pointer_never_names_what_is_gone(
    machine: Machine, config: PolicyStoreConfig
) -> None:
    a, b = machine("a"), machine("b")
    for number in range(7):
        a.record_gate(publish(a, float(number)), {"verdict": "fail"})
    a.promote(7, expected=None, who="t", why="t")
    for version in range(1, 7):
        serves = a.serving()
        kept = Kept(a, LAST)
        results = race(
            threading.Barrier(2),
            lambda: b.promote(version, expected=serves, who="t", why="t"),  # noqa: B023
            lambda: a.prune(version, "retention", kept.reasons),  # noqa: B023
        )
        promoted = not isinstance(results[0], Exception)
        assert promoted or isinstance(results[0], PolicyPruned), results
        assert (results[1] is None) != promoted, results
        fresh = machine(f"fresh{version}")
        pointer = fresh.serving()
        assert pointer is not None
        fresh.verify(pointer.version)
        a._next_look = 0.0


def race(barrier: threading.Barrier, *calls: Callable[[], Any]) -> list[Any]:
    """What calls at the same moment return, or raise."""

    def one(call: Callable[[], Any]) -> Any:
        barrier.wait(120)
        try:
            return call()
        except PolicyError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(one, calls))


def test_a_prune_removes_weights_from_the_store_and_from_every_machine_but_not_from_who_holds_them(
    machine: Machine, config: PolicyStoreConfig
) -> None:
    a, b, c = machine("a"), machine("b"), machine("c")
    for number in range(3):
        a.record_gate(publish(a, float(number)), {"verdict": "fail"})
    a.promote(3, expected=None, who="t", why="t")
    a.promote(2, expected=3, who="t", why="t")
    b.verify(1)
    with c.hold(1) as held:
        assert [policy.version for policy in Kept(a, LAST).prune()[0]] == [1]
        assert len(weights_of(config)) == 2
        for store in (b, c):
            store._next_look = 0.0
            store.versions()
        assert not b.get(1).weight_files[0].exists()
        assert held.weight_files[0].exists()
        with pytest.raises(PolicyPruned), c.hold(1):
            pass
    assert not machine("c").get(1).weight_files[0].exists()
    with pytest.raises(PolicyPruned):
        b.promote(1, expected=2, who="t", why="t")


def test_weights_that_somebody_on_the_machine_holds_are_not_pruned_from_there(machine: Machine) -> None:
    a = machine("a")
    for number in range(2):
        a.record_gate(publish(a, float(number)), {"verdict": "fail"})
    with machine("a").hold(1):
        assert a.prune(1, "retention", dict) == "in use"
    assert a.prune(1, "retention", dict) is None


def test_an_experiment_keeps_its_policies_from_other_machines_and_there_is_one_at_a_time(machine: Machine) -> None:
    a, b = machine("a"), machine("b")
    for number in range(3):
        publish(a, float(number))
    a.promote(1, expected=None, who="t", why="t")
    a.experiments.begin(experiment(a, 1, 2, 1))
    with pytest.raises(ExperimentRunning):
        b.experiments.begin(experiment(b, 2, 3, 1))
    with pytest.raises(PolicyError, match="experiment 1"):
        b.withdraw(2)
    b.experiments.stop(1, who="t", why="enough")
    a._next_look = 0.0
    found = a.experiments.get(1)
    assert (found.state, (found.end or {})["why"]) == ("stopping", "enough")


def _publish_and_die(config: PolicyStoreConfig, home: Path, when: str) -> None:
    store = on(config, home)
    upload, change = store.objects.upload, store.change

    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def one_file(files: dict[str, Path]) -> None:
        upload(dict([next(iter(files.items()))]))
        die()

    def taken(*of: Any) -> Any:
        found = change(*of)
        return die() if isinstance(found, int) and not isinstance(found, bool) else found

    if when == "uploading":
        store.objects.upload = one_file
    elif when == "uploaded":
        store.objects.upload = lambda files: (upload(files), die())
    else:
        store.change = taken
    publish(store)


@pytest.mark.parametrize("when", ["uploading", "uploaded", "taken"])
def test_a_publish_that_is_killed_leaves_nothing_that_a_reader_sees_and_the_next_one_cleans_up(
    machine: Machine, config: PolicyStoreConfig, tmp_path: Path, when: str
) -> None:
    publish(machine("a"))
    child = SPAWN.Process(target=_publish_and_die, args=(config, tmp_path / "a", when))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    done = [1, 2] if when == "taken" else [1]
    before = len(objects(config))
    b = machine("b")
    assert b.versions() == done
    for version in done:
        b.verify(version)
    publish(b)
    assert len(objects(config)) > before, "an upload on another machine may be alive"
    a = machine("a")
    assert publish(a) == len(done) + 2
    assert [name for name in records(config) if name.startswith("uploads/")] == []
    assert unreferenced(objects(config), records(config)) == []
    assert len(weights_of(config)) == len(a.versions())
    assert not [path.name for path in a.root.iterdir() if path.name.startswith((".publishing-", ".changing-"))]


def test_an_upload_that_was_struck_as_left_over_takes_no_version(machine: Machine, config: PolicyStoreConfig) -> None:
    a, b = machine("a"), machine("b")
    publish(a)
    upload = a.objects.upload

    def slow(files: dict[str, Path]) -> None:
        upload(files)

        def a_day_ago(store: PolicyStore) -> None:
            for path in store.root.glob("uploads/*.json"):
                mark = json.loads(path.read_bytes()) | {"at": "2020-01-01T00:00:00+00:00"}
                path.write_text(json.dumps(mark))

        b.change(a_day_ago)
        publish(b)

    a.objects.upload = slow
    with pytest.raises(PolicyError, match="more than a day"):
        publish(a)
    fresh = machine("c")
    assert fresh.versions() == [1, 2]
    assert unreferenced(objects(config), records(config)) == []
    for version in (1, 2):
        fresh.verify(version)


@pytest.mark.parametrize("damage", ["folder", "records", "weights", "manifest"])
def test_a_copy_that_is_torn_or_gone_is_what_the_store_has_again(machine: Machine, damage: str) -> None:
    a = machine("a")
    publish(a)
    a.promote(1, expected=None, who="t", why="t")
    folder = a.get(1).path
    if damage == "folder":
        shutil.rmtree(a.root)
    elif damage == "records":
        (a.root / "serving.json").write_text("{")
        (a.root / "history.jsonl").unlink()
    elif damage == "manifest":
        (folder / "policy.json").write_bytes(b"")
    else:
        (folder / "model.safetensors").write_bytes(b"x" * (folder / "model.safetensors").stat().st_size)
    again = machine("a")
    pointer = again.serving()
    assert pointer is not None
    assert (pointer.version, len(again.history())) == (1, 1)
    assert again.verify(1).version == 1


def test_an_object_that_was_changed_is_found_by_its_hash_and_nothing_of_it_is_in_the_copy(
    machine: Machine, config: PolicyStoreConfig
) -> None:
    publish(machine("a"))
    [name] = weights_of(config)
    key = f"{(config.uri or '').removeprefix('s3://bucket/')}/{name}"
    body = bucket(config).get_object(Bucket="bucket", Key=key)["Body"].read()
    for content in (body[:-1] + b"!", body[:-8]):
        bucket(config).put_object(Bucket="bucket", Key=key, Body=content)
        b = machine("b")
        with pytest.raises(PolicyCorrupt, match=r"sha256|bytes"), b.hold(1):
            pass
        assert not b.get(1).weight_files[0].exists()
    bucket(config).put_object(Bucket="bucket", Key=key, Body=body)
    assert machine("b").verify(1).version == 1
    bucket(config).delete_object(Bucket="bucket", Key=key)
    with pytest.raises(PolicyCorrupt, match="is gone"), machine("c").hold(1):
        pass


def test_a_download_goes_on_where_a_killed_one_ended_and_begins_anew_on_what_was_torn(
    machine: Machine, config: PolicyStoreConfig
) -> None:
    a = machine("a")
    publish(a)
    content = a.get(1).weight_files[0].read_bytes()
    for name, there in (("b", content[:100]), ("c", b"?" * 100)):
        store = machine(name)
        store.versions()
        aside = store.root / ".fetching" / "v000001"
        aside.mkdir(parents=True)
        (aside / "model.safetensors").write_bytes(there)
        assert store.verify(1).weight_files[0].read_bytes() == content
        assert not aside.exists()


def test_a_write_whose_answer_was_lost_is_done_once(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    a = machine("a")
    publish(a)
    write = a.objects.write_if
    lost: list[type[PolicyError]] = [StoreUnreachable, Conflict]

    def losing(*of: Any) -> Any:
        found = write(*of)
        if lost:
            raise lost.pop()("the answer was lost")
        return found

    a.objects.write_if = losing
    a.promote(1, expected=None, who="t", why="first")
    a.promote(1, expected=1, who="t", why="second")
    assert [move.why for move in machine("b").history()] == ["first", "second"]


def test_a_store_that_is_down_is_read_from_the_copy_and_what_would_change_it_says_so(tmp_path: Path) -> None:
    with serving() as options:
        config = PolicyStoreConfig(uri="s3://bucket/down", storage_options=options)
        a = on(config, tmp_path / "a")
        publish(a)
        a.promote(1, expected=None, who="t", why="t")
    for store in (a, on(config, tmp_path / "a")):
        store._next_look = 0.0
        pointer = store.serving()
        assert pointer is not None
        assert pointer.version == 1
        assert store.verify(1).version == 1
        assert 0 < store.age < 600
        with pytest.raises(StoreUnreachable, match=r"s3://bucket/down.*millrace doctor"):
            store.promote(1, expected=1, who="t", why="t")
        with pytest.raises(StoreUnreachable):
            publish(store)
    assert [path.name for path in a.root.glob(".publishing-*")] == []
    with pytest.raises(StoreUnreachable):
        on(config, tmp_path / "b").serving()


def test_a_folder_with_policies_of_its_own_or_of_another_store_is_left_alone(
    config: PolicyStoreConfig, tmp_path: Path
) -> None:
    own = PolicyStore(tmp_path / "own" / "policies")
    publish(own)
    with pytest.raises(PolicyError, match="policies of its own"):
        on(config, tmp_path / "own").serving()
    own.verify(1)
    copy = on(config, tmp_path / "copy")
    publish(copy)
    other = config.model_copy(update={"uri": f"{config.uri}-other"})
    with pytest.raises(PolicyError, match="is a copy of"):
        on(other, tmp_path / "copy").serving()
    bucket(config).delete_object(Bucket="bucket", Key=f"{(config.uri or '').removeprefix('s3://bucket/')}/{RECORDS}")
    with pytest.raises(PolicyError, match="is gone"):
        on(config, tmp_path / "copy").serving()
    assert PolicyStore(copy.root).verify(1).version == 1


def test_a_store_that_keeps_to_conditions_is_found_fit_and_keys_are_in_no_message(
    config: PolicyStoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = ObjectStore(config.uri or "", config.store_options)
    found.try_out()
    assert found.names("") == []
    write = found.write_if
    monkeypatch.setattr(found, "write_if", lambda name, content, before: write(name, content, found.version(name)))
    with pytest.raises(PolicyError, match="against If-None-Match"):
        found.try_out()


def test_a_server_swaps_to_a_policy_from_another_machine_and_serves_on_without_the_store(
    tmp_path: Path, model_folders: list[Path]
) -> None:
    homes = [tmp_path / "server", tmp_path / "trainer"]
    for home in homes:
        home.mkdir()
    with serving() as options:
        config = PolicyStoreConfig(uri="s3://bucket/fleet", storage_options=options)
        trainer = on(config, homes[1])
        trainer.publish(model_folders[0], parent=None, lineage={}, metrics={})
        trainer.promote(1, expected=None, who="t", why="first")
        shared = {"uri": config.uri, "storage_options": options}
        server = start_server(homes[0], on(config, homes[0]), policy_store=shared)
        try:
            trainer.publish(model_folders[1], parent=1, lineage={}, metrics={})
            policy = server.settle(trainer.promote(2, expected=1, who="t", why="better"), timeout=120)
            assert (policy["version"], policy["failed"]) == (2, None)
            trainer._next_look = 0.0
            assert trainer.served() == {1, 2}
        except BaseException:
            server.process.kill()
            raise
    try:  # the store is down
        answer = httpx.post(f"{server.url}/generate", json={"prompt": "on", "max_tokens": 4}, timeout=60).json()
        assert answer["responses"][0]["policy_spans"][0]["policy_version"] == 2
        deadline = time.monotonic() + 180
        while "could not be reached" not in server.log.read_text() and time.monotonic() < deadline:
            time.sleep(0.2)
        assert "could not be reached" in server.log.read_text()
        assert "millrace_policy_store_age_seconds" in httpx.get(f"{server.url}/metrics", timeout=60).text
        assert httpx.get(f"{server.url}/ready", timeout=60).status_code == 200
    finally:
        code = stop_server(server)
    assert code == 0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("../../planted.json", "{}"),
        ("v000001/../../policy.json", "{}"),
        ("/tmp/planted.json", "{}"),
        ("v000001/model.safetensors", "x"),
        ("serving.json", 5),
        (".last_version", "x"),
        ("uploads/../x.json", "{}"),
        ("v000001/policy.json", "[]"),
        ("v000001/policy.json", {"files": {"../../planted": None}}),
        ("v000001/policy.json", {"files": {"/etc/planted": None}}),
        ("v000001/policy.json", {"files": {"policy.json": None}}),
        ("v000001/policy.json", {"files": {"model.bin": None}}),
        ("v000001/policy.json", {"files": {".": None}}),
        ("v000001/policy.json", {"objects": "../../other"}),
        ("v000001/policy.json", {"objects": ""}),
    ],
)
def test_records_by_which_a_file_would_lie_elsewhere_are_refused_and_the_copy_stays(
    machine: Machine, config: PolicyStoreConfig, name: str, text: Any
) -> None:
    a = machine("a")
    publish(a)
    a.promote(1, expected=None, who="t", why="t")
    found = records(config)
    if isinstance(text, dict):
        manifest = json.loads(found[name])
        of = manifest["files"]["config.json"]
        text = json.dumps(manifest | {key: dict.fromkeys(v, of) if key == "files" else v for key, v in text.items()})
    content = json.dumps({"format": 1, "writes": [], "records": found | {name: text}}).encode()
    key = f"{(config.uri or '').removeprefix('s3://bucket/')}/{RECORDS}"
    bucket(config).put_object(Bucket="bucket", Key=key, Body=gzip.compress(content))
    before = sorted(a.root.parent.rglob("*"))
    for store in (machine("a"), machine("b")):
        with pytest.raises(PolicyError, match=r"records\.json\.gz can't be used"):
            store.serving()
    with pytest.raises(PolicyError):
        publish(a)
    left = [path for path in a.root.parent.rglob("*") if path not in before]
    assert [path for path in left if "policies" not in path.parts] == []
    assert PolicyStore(a.root).verify(1).version == 1


def test_a_store_that_was_rolled_back_is_served_with_the_files_that_it_names_now(machine: Machine) -> None:
    a, b = machine("a"), machine("b")
    publish(a, 1.0)
    b.verify(1)
    old = b.objects.read(RECORDS, 1 << 20)
    assert old is not None
    a.withdraw(1)
    state = a._records.read()
    numbered = {name: text for name, text in state.records.items() if name != ".last_version"}
    assert a._records.replace(state, numbered) is not None
    c = machine("c")  # a machine that has not seen the first policy 1
    assert publish(c, 2.0) == 1
    b = machine("b")
    with b.hold(1) as held:
        assert held.weight_files[0].read_bytes() == c.get(1).weight_files[0].read_bytes()


def test_no_version_is_taken_twice_where_older_records_were_restored(
    machine: Machine, config: PolicyStoreConfig
) -> None:
    """The bucket's versioning brings them back; rows of traffic name the version that was lost."""
    store, objects_of = machine("a"), ObjectStore(config.uri or "", config.store_options)
    publish(store)
    older = objects_of.read(RECORDS, 1 << 20)
    assert older is not None
    assert publish(store) == 2
    objects_of.write_if(RECORDS, older.content, objects_of.version(RECORDS))
    assert machine("a").versions() == [1]
    assert publish(machine("a")) == 3
    assert publish(machine("b")) == 4


def test_policies_whose_records_are_gone_are_nobodys_to_remove(machine: Machine, config: PolicyStoreConfig) -> None:
    publish(machine("a"))
    files = objects(config)
    bucket(config).delete_object(Bucket="bucket", Key=f"{(config.uri or '').partition('bucket/')[2]}/{RECORDS}")
    for name in ("a", "b"):
        with pytest.raises(PolicyError, match="is gone, and"):
            publish(machine(name))
    assert objects(config) == files


def test_what_is_damaged_in_a_servers_copy_is_fetched_anew_before_the_policy_is_refused(machine: Machine) -> None:
    publish(machine("a"))
    b = machine("b")
    path = b.verify(1).weight_files[0]
    path.write_bytes(b"x" * path.stat().st_size)
    found = asyncio.run(verify(b, 1, check_finite=True, timeout_s=60))
    assert found[path.name]["sha256"] == b.get(1).files[path.name]["sha256"]


def test_a_stray_object_keeps_nobody_from_publishing_and_a_missing_bucket_is_named(
    machine: Machine, config: PolicyStoreConfig, tmp_path: Path
) -> None:
    key = f"{(config.uri or '').removeprefix('s3://bucket/')}/objects//stray"
    bucket(config).put_object(Bucket="bucket", Key=key, Body=b"")
    assert publish(machine("a")) == 1
    elsewhere = config.model_copy(update={"uri": "s3://nobody/policies"})
    for call in (SharedPolicyStore.serving, publish):
        with pytest.raises(StoreUnreachable, match=r"s3://nobody/policies.*NoSuchBucket"):
            call(on(elsewhere, tmp_path / "c"))


def test_options_of_the_connection_are_taken_and_no_secret_is_in_a_message(
    config: PolicyStoreConfig, tmp_path: Path
) -> None:
    secret = "ThisIsVerySecret"
    options = {**config.store_options, "aws_secret_access_key": secret, "timeout": "9s", "aws_unheard_of": secret}
    broken = PolicyStoreConfig(uri=config.uri, storage_options=options)
    with pytest.raises(StoreUnreachable, match="aws_unheard_of") as refused:
        on(broken, tmp_path / "a")
    options.pop("aws_unheard_of")
    down = PolicyStoreConfig(
        uri=config.uri, storage_options=options | {"aws_endpoint_url": f"http://u:{secret}@127.0.0.1:9"}
    )
    with pytest.raises(StoreUnreachable, match=r"s3://bucket/policies") as unreachable:
        on(down, tmp_path / "a").serving()
    shown = f"{refused.value!r}{unreachable.value!r}{down!r}{down.model_dump_json()}"
    assert secret not in shown
