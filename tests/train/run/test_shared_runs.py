"""Runs in an object store, on a real S3-compatible server (moto's): one machine goes on with what another has begun.

A machine is a folder of runs of its own, with the same address.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import boto3
import pytest
from job_home import SFT_CONFIG, job_context, make_home, results_of, run_jobs

from feedback.config import LakeConfig
from feedback.lake.tables import Lake
from feedback.maintenance.erasure import Target, erase
from feedback.settings_base import IN_CLEAR
from serve.config import PolicyStoreConfig
from serve.policies.folder import StoreUnreachable
from serve.policies.open_store import open_store
from serve.policies.store import PolicyStore
from tests.feedback.feedback_rows import interaction, put, said
from tests.object_store import serving
from train.checkpoint.folders import CheckpointError, begin_aside, checkpoints, make_whole, prune, step_of
from train.config.sections import RunStoreConfig
from train.config.training import TrainConfig
from train.context import JobContext, RunStart
from train.run.recovery.resume import keep_start, last_whole, only_run
from train.run.recovery.run_store import RunStore, RunTaken
from train.run.recovery.unfinished import Stores, forget_erased_in_store, give_up
from train.run.shared_run import SharedRun, shared_run, with_shared

SPAWN = multiprocessing.get_context("spawn")
QUICK = {"timeout": "1s", "connect_timeout": "1s"}

_numbers = itertools.count()

Machine = Callable[[str], JobContext]


@pytest.fixture(scope="module")
def options() -> Iterator[dict[str, str]]:
    """Storage options of a server that holds an empty bucket."""
    with serving() as found:
        yield found


@pytest.fixture
def config(options: dict[str, str]) -> RunStoreConfig:
    return RunStoreConfig(uri=f"s3://bucket/runs{next(_numbers)}", storage_options=options, lease_s=60)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A run as a machine of this name has it."""
    return lambda name: JobContext.model_validate(job_context(tmp_path / name, "run"))


@contextmanager
def at_work(config: RunStoreConfig, there: JobContext) -> Iterator[SharedRun]:
    with only_run(there), shared_run(config, there) as run:
        assert run is not None
        yield run


def begin(there: JobContext, run_id: str = "one") -> None:
    start = RunStart(
        id=run_id, parent=1, parent_sha256="", lake_versions={"interactions": 0}, reward=None, config={"steps": 4}
    )
    keep_start(there, start)


def save(there: JobContext, step: int, content: bytes = b"weights") -> Path:
    folder = there.folder / "checkpoints"
    aside = begin_aside(folder, step, json.dumps({"step": step}))
    (aside / "actor").mkdir()
    (aside / "actor" / "__0_0.distcp").write_bytes(content + str(step).encode())
    (there.folder / "metrics.jsonl").write_text("{}\n" * step)
    return make_whole(folder, step)


def steps_in(config: RunStoreConfig) -> list[int]:
    found = RunStore(config).read("run")
    return [] if found is None else [step_of(Path(name)) for name in found.manifest.checkpoints]


def run_out(config: RunStoreConfig) -> None:
    """Have the claim on the run be one that was not renewed in time."""
    store = RunStore(config)
    found = store.read("run")
    assert found is not None
    assert found.manifest.claim is not None
    gone = found.manifest.claim.model_copy(update={"until": datetime.now(UTC) - timedelta(seconds=1)})
    store.replace(found, claim=gone)


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 180
    while not what():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.05)


def objects(config: RunStoreConfig) -> list[str]:
    return sorted(RunStore(config).objects.names("objects/"))


def bucket(config: RunStoreConfig) -> Any:
    keys = {"aws_access_key_id": "key", "aws_secret_access_key": "secret", "region_name": "us-east-1"}
    return boto3.client("s3", endpoint_url=config.store_options["aws_endpoint_url"], **keys)


def test_another_machine_gets_the_newest_checkpoint_and_the_records_of_a_run(
    config: RunStoreConfig, machine: Machine
) -> None:
    a, b = machine("a"), machine("b")
    with at_work(config, a) as run:
        begin(a)
        for step in (2, 4, 6):
            save(a, step)
            prune(a.folder / "checkpoints", 2)
            run.upload_soon()
            wait_for(lambda step=step: step in steps_in(config))  # type: ignore[misc]
        (a.folder / "job.json").write_text("it has credentials")
    assert steps_in(config) == [6, 4]
    assert len(objects(config)) == 2 * 3 + 2, "what the older manifests named is gone"
    with at_work(config, b):
        newest = last_whole(b)
        assert newest is not None
        assert (newest / "actor" / "__0_0.distcp").read_bytes() == b"weights6"
        names = {path.name for path in b.folder.iterdir()}
        assert {"start.json", "metrics.jsonl"} <= names
        assert "job.json" not in names
        assert (b.folder / "metrics.jsonl").read_text() == "{}\n" * 6
        fetched = [b.folder / "start.json", *(path for path in newest.rglob("*") if path.is_file())]
        assert {oct(path.stat().st_mode & 0o777) for path in fetched} == {"0o600"}, "they have texts of users"
    assert steps_in(config) == [6]


def test_of_two_machines_that_claim_a_run_at_once_one_gets_it_and_the_other_one_is_told_who(
    config: RunStoreConfig, machine: Machine
) -> None:
    begun, errors = threading.Barrier(2), list[str]()

    def claim(name: str) -> None:
        begun.wait(120)
        try:
            with at_work(config, machine(name)):
                begun.wait(180)
        except RunTaken as error:
            errors.append(str(error))
            begun.wait(180)

    threads = [threading.Thread(target=claim, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    [error] = errors
    assert f"pid {os.getpid()} on {socket.gethostname()} is at work on run run until 2" in error


def test_a_claim_that_was_not_renewed_may_be_taken_and_who_has_lost_it_overwrites_nothing(
    config: RunStoreConfig, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = machine("a"), machine("b")
    with only_run(a), shared_run(config, a) as late:
        assert late is not None
        begin(a)
        save(a, 2)
        late.upload_soon()
        wait_for(lambda: steps_in(config) == [2])
        run_out(config)
        with at_work(config, b) as run:
            save(b, 4, b"b's")
            run.upload_soon()
            wait_for(lambda: steps_in(config) == [4, 2])
            save(a, 6, b"a's")
            late.upload_soon()
            wait_for(lambda: late._lost is not None)
            with pytest.raises(RunTaken, match=r"lost its claim: pid \d+ on .* is at work on run run"):
                late.check()
            with pytest.raises(RunTaken):
                late.renew()
            run.check()
            assert steps_in(config) == [4, 2]
    assert steps_in(config) == [4, 2]
    assert "nothing more is uploaded: this machine has lost its claim" in capsys.readouterr().out
    names = {name.split("/")[-2] for name in objects(config)}
    with at_work(config, a):  # what it had uploaded in vain is swept
        assert len(objects(config)) == 2 * 3 + 2, names


def _upload_and_die(config: RunStoreConfig, there: JobContext, when: str) -> None:
    with at_work(config, there) as run:
        begin(there)
        save(there, 2)
        run._upload()
        save(there, 4)
        upload = run._store.objects.upload

        def die(files: Any) -> None:
            upload(dict(list(files.items())[: 2 if when == "uploading" else None]))
            os.kill(os.getpid(), signal.SIGKILL)

        run._store.objects.upload = die  # type: ignore[method-assign]
        run._upload()


@pytest.mark.parametrize("when", ["uploading", "uploaded"])
def test_an_upload_that_is_killed_leaves_the_checkpoint_before_and_what_it_left_is_swept(
    config: RunStoreConfig, machine: Machine, when: str
) -> None:
    child = SPAWN.Process(target=_upload_and_die, args=(config, machine("a"), when))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert steps_in(config) == [2]
    before = objects(config)
    b = machine("b")
    with pytest.raises(RunTaken, match=f"pid {child.pid} on "), at_work(config, b):
        pass
    if when == "uploaded":  # of its own machine no claim is waited for: the folder's lock says that it is dead
        with at_work(config, machine("a")):
            assert [step_of(path) for path in checkpoints(machine("a").folder / "checkpoints")] == [4, 2]
        assert steps_in(config) == [4, 2]
        return
    run_out(config)
    with at_work(config, b):
        newest = last_whole(b)
        assert newest is not None
        assert step_of(newest) == 2
        assert len(objects(config)) == 3 + 2 < len(before)


def test_a_damaged_object_is_found_by_its_hash_and_an_older_checkpoint_is_taken(
    config: RunStoreConfig, machine: Machine
) -> None:
    a, b, c = machine("a"), machine("b"), machine("c")
    with at_work(config, a):
        begin(a)
        save(a, 2)
        save(a, 4)
    prefix = (config.uri or "").removeprefix("s3://bucket/")

    def damage(step: int) -> None:
        name = next(name for name in objects(config) if f"step-{step:08d}/actor" in name)
        bucket(config).put_object(Bucket="bucket", Key=f"{prefix}/{name}", Body=b"WEIGHTS" + str(step).encode())

    damage(4)
    with only_run(b):
        found = RunStore(config).read("run")
        assert found is not None
        assert RunStore(config).fetch_checkpoint(found.manifest, b.folder / "checkpoints", 0) == 2
    assert [path.name for path in (b.folder / "checkpoints").iterdir()] == ["step-00000002"]
    damage(2)
    refused = pytest.raises(CheckpointError, match=r"every checkpoint in s3://.* is damaged .* has sha256 ")
    with refused, at_work(config, c):
        pass
    assert checkpoints(c.folder / "checkpoints") == []


def test_a_manifest_that_names_a_file_out_of_the_run_is_refused(config: RunStoreConfig, machine: Machine) -> None:
    a = machine("a")
    with at_work(config, a):
        begin(a)
        save(a, 2)
    store = RunStore(config)
    found = store.read("run")
    assert found is not None
    [one, *_] = found.manifest.files.values()
    for name in ("../../x", "checkpoints/step-00000002/../../../x", "checkpoints/step-00000002/../x", "job.json", "/x"):
        store.replace(found, files={name: one})
        with pytest.raises(CheckpointError, match=r"run\.json can't be used .* is no file of a run"):
            store.read("run")
        found = store.replace(found_again(config, found), files=found.manifest.files)


def found_again(config: RunStoreConfig, before: Any) -> Any:
    """The version of the manifest that is there now."""
    store = RunStore(config)
    there = store.objects.read("runs/run.json", 1 << 20)
    assert there is not None
    return type(before)(before.manifest, there.version)


def test_the_further_of_two_copies_of_a_run_is_gone_on_with_and_another_run_of_its_name_is_refused(
    config: RunStoreConfig, machine: Machine
) -> None:
    a, b = machine("a"), machine("b")
    with at_work(config, a):
        begin(a)
        save(a, 2)
    with at_work(config, b):
        save(b, 4)
    save(a, 6, b"never uploaded")
    with at_work(config, a):
        assert [step_of(path) for path in checkpoints(a.folder / "checkpoints")] == [6, 2]
    shutil.rmtree(b.folder)
    begin_at = machine("b")
    begin_at.folder.mkdir(parents=True)
    begin(begin_at, "another")
    save(begin_at, 2)
    refused = pytest.raises(CheckpointError, match=r"has run another, and the store has another one of this name, one")
    with refused, at_work(config, begin_at):
        pass
    assert steps_in(config) == [6, 2]


def test_a_store_that_is_down_or_silent_or_has_no_such_bucket_is_named_within_a_bound(
    options: dict[str, str], machine: Machine, tmp_path: Path
) -> None:
    with socket.socket() as silent, socket.socket() as unused:  # it accepts, and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen(64)
        unused.bind(("127.0.0.1", 0))
        addresses = {name: f"http://127.0.0.1:{one.getsockname()[1]}" for name, one in (("s", silent), ("u", unused))}
        places = [("bucket", addresses["s"]), ("bucket", addresses["u"]), ("nothing", options["aws_endpoint_url"])]
        began = time.monotonic()

        def opened(what: Callable[[dict[str, str], str], Any], setting: str, errors: list[str]) -> None:
            for name, address in places:
                with pytest.raises(StoreUnreachable) as error:
                    what({**options, **QUICK, "aws_endpoint_url": address}, f"s3://{name}/x")
                errors.append(str(error.value))
                assert f"Look at {setting} and the network" in errors[-1]

        def run(given: dict[str, str], uri: str) -> None:
            with at_work(RunStoreConfig(uri=uri, storage_options=given), machine(f"m{next(_numbers)}")):
                pass

        def policies(given: dict[str, str], uri: str) -> None:
            config = PolicyStoreConfig(uri=uri, storage_options=given)
            open_store(tmp_path / f"p{next(_numbers)}", config).serving()

        errors: dict[str, list[str]] = {"train.run_store": [], "serve.policy_store": []}
        calls = [(run, "train.run_store"), (policies, "serve.policy_store")]
        threads = [threading.Thread(target=opened, args=(what, of, errors[of])) for what, of in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert [len(found) for found in errors.values()] == [3, 3]
        assert time.monotonic() - began < 120, "a bound, and no measure"


def test_a_store_that_goes_down_costs_the_upload_and_not_the_run(
    machine: Machine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.run.shared_run._PAUSE_S", 0.01)
    a = machine("a")
    with only_run(a):
        with serving() as options:
            config = RunStoreConfig(uri="s3://bucket/runs", storage_options={**options, **QUICK})
            run = SharedRun(RunStore(config), config, a)
            begin(a)
        save(a, 2)
        run.upload_soon()
        wait_for(lambda: run.failed == 1)
        run.check()
        run.renew()
        run.close()
    printed = capsys.readouterr().out
    assert "run: AN UPLOAD FAILED 3 times (1 in this run, see failed_uploads.log): the store of runs s3://" in printed
    assert len((a.folder / "failed_uploads.log").read_text().splitlines()) == run.failed == 2
    assert "whether this machine still has the run could not be asked" in printed
    assert last_whole(a) is not None


def test_runs_of_the_store_are_listed_pruned_and_forgotten_when_rows_are_erased(
    config: RunStoreConfig, machine: Machine, tmp_path: Path
) -> None:
    a, b = machine("a"), machine("b")
    lake = Lake(str(tmp_path / "lake"), LakeConfig())
    lake.create()
    put(lake, "interactions", [interaction("1", user="ann")])
    versions = lake.versions()
    with at_work(config, a):
        start = RunStart(
            id="one",
            parent=1,
            parent_sha256="",
            lake_versions=versions,
            reward=None,
            config={"algorithm": {"name": "sft"}},
        )
        keep_start(a, start)
        save(a, 2)
        b.runs.mkdir(parents=True)
        [listed], how = with_shared(RunStore(config), b.runs)
        assert (listed.name, listed.state) == ("run", "at work")
        assert how == {"run": f"at work: pid {os.getpid()} on {socket.gethostname()}"}
    [listed], how = with_shared(RunStore(config), b.runs)
    assert (listed.state, listed.bytes > 0, how["run"]) == ("unfinished", True, "1 checkpoints")
    stores = Stores(PolicyStore(tmp_path / "policies"), PolicyStore(tmp_path / "reward_models"))
    assert forget_erased_in_store(lake, RunStore(config), stores) == []
    erase(lake, tmp_path / "journal", Target(user="ann"))
    assert forget_erased_in_store(lake, RunStore(config), stores) == ["run"]
    assert objects(config) == []
    shutil.rmtree(a.folder)
    with at_work(config, a):
        begin(a, "two")
        save(a, 2)
        assert give_up([b.folder], RunStore(config)) == [], "somebody is at work on it"
    assert give_up([b.folder], RunStore(config)) == ["run"]
    assert [Path(name).name for name in objects(config)] == ["metrics.jsonl", "start.json"]


def test_objects_that_were_not_removed_and_a_run_of_unknown_rows_go_at_the_next_maintenance(
    config: RunStoreConfig, machine: Machine, tmp_path: Path
) -> None:
    lake = Lake(str(tmp_path / "lake"), LakeConfig())
    lake.create()
    stores = Stores(PolicyStore(tmp_path / "policies"), PolicyStore(tmp_path / "reward_models"))
    with at_work(config, machine("a")) as run:
        begin(machine("a"))
        save(machine("a"), 2)
        run._upload()
        stray = f"objects/run/{'0' * 32}/checkpoints/step-00000004/driver.json"
        run._store.objects.upload({stray: machine("a").folder / "start.json"})
        assert forget_erased_in_store(lake, RunStore(config), stores) == []
        assert stray in objects(config), "its machine is at work on it"
    assert forget_erased_in_store(lake, RunStore(config), stores) == []
    assert stray not in objects(config)
    assert steps_in(config) == [2]
    found = RunStore(config).read("run")
    assert found is not None
    key = f"{(config.uri or '').removeprefix('s3://bucket/')}/{found.manifest.object_of('start.json')}"
    bucket(config).put_object(Bucket="bucket", Key=key, Body=b"{}")
    unreachable = RunStore(config)

    def down(_: object) -> None:
        raise StoreUnreachable

    unreachable.objects.delete = down  # type: ignore[method-assign]
    with pytest.raises(StoreUnreachable):
        forget_erased_in_store(lake, unreachable, stores)
    assert objects(config) != []
    assert forget_erased_in_store(lake, RunStore(config), stores) == []
    assert objects(config) == []


def test_a_download_that_is_cut_off_has_left_what_an_erasure_finds_the_run_by(
    config: RunStoreConfig, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = machine("a"), machine("b")
    with at_work(config, a):
        begin(a)
        save(a, 2)
    download = RunStore._download

    def cut_off(self: RunStore, files: dict[str, tuple[Path, int, str]]) -> None:
        if any("checkpoints" in name for name in files):
            raise StoreUnreachable
        download(self, files)

    monkeypatch.setattr(RunStore, "_download", cut_off)
    with pytest.raises(StoreUnreachable), at_work(config, b):
        pass
    assert (b.folder / "start.json").exists()


def test_what_has_ended_here_is_not_overwritten_where_its_last_upload_failed(
    config: RunStoreConfig, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.run.shared_run._PAUSE_S", 0.01)
    a = machine("a")
    with at_work(config, a) as run:
        begin(a)
        save(a, 2)
        run._upload()
        save(a, 4)
        (a.folder / "result.json").write_text("{}")
        shutil.rmtree(a.folder / "checkpoints")
        monkeypatch.setattr(run, "_upload", lambda: 1 / 0)
    with_shared(RunStore(config), a.runs)
    assert (a.folder / "metrics.jsonl").read_text() == "{}\n" * 4
    with at_work(config, a):
        assert checkpoints(a.folder / "checkpoints") == []
    assert steps_in(config) == []


def test_the_result_of_another_machines_attempt_is_no_result_of_this_ones(
    config: RunStoreConfig, machine: Machine
) -> None:
    a, b = machine("a"), machine("b")
    with at_work(config, a) as run:
        begin(a)
        save(a, 2)
        (a.folder / "result.json").write_text("{}")
        run._upload()
    with at_work(config, b):
        assert [step_of(path) for path in checkpoints(b.folder / "checkpoints")] == [2]
        assert not (b.folder / "result.json").exists()


def test_a_claim_that_has_run_out_and_can_t_be_renewed_publishes_nothing(
    config: RunStoreConfig, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.run.shared_run._LAST_S", 0.0)
    monkeypatch.setattr("train.run.shared_run._PAUSE_S", 0.01)
    with only_run(machine("a")):
        run = SharedRun(RunStore(config), config, machine("a"))

        def down(*_: object, **__: object) -> None:
            raise StoreUnreachable("no answer")

        with monkeypatch.context() as patched:
            patched.setattr(RunStore, "replace", down)
            run.renew()
            patched.setattr("train.run.recovery.run_store.Claim.live", False)
            with pytest.raises(CheckpointError, match=r"claim on run run has run out, .* no answer"):
                run.renew()
        run.renew()
        run.close(60)


def test_a_run_that_is_stopped_does_not_wait_for_an_upload_under_way(
    config: RunStoreConfig, machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("train.run.shared_run._STOPPED_S", 0.0)
    monkeypatch.setattr("train.run.shared_run.skip_teardown", print)
    answers = threading.Event()
    with suppress(KeyboardInterrupt), at_work(config, machine("a")) as run:
        begin(machine("a"))
        monkeypatch.setattr(run, "_upload", lambda: answers.wait(180))
        raise KeyboardInterrupt
    assert "its last upload takes longer than 0 s, and is left" in capsys.readouterr().out
    answers.set()
    run._threads[1].join(60)
    with at_work(config, machine("b")):  # the thread has given the claim back
        pass


# ------------------------------------------------------------------------------------------------ a whole run

DYING = """
import os, signal, time
from pathlib import Path
from train.observe.hooks import Hook

class Dying(Hook):
    def on_step(self, step, metrics):
        home = self.run.folder.parent.parent
        if step == 2 and (home / "dies").exists():
            from train.run.recovery.run_store import RunStore
            store = RunStore(self.run.config.run_store)
            deadline = time.monotonic() + 180
            while not store.read(self.run.name).manifest.checkpoints and time.monotonic() < deadline:
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
"""
CONFIG: dict[str, Any] = SFT_CONFIG | {"hooks": ["dying:Dying"]}


@pytest.mark.long
def test_a_run_whose_machine_is_lost_goes_on_elsewhere_to_the_weights_of_one_that_was_left_alone(
    config: RunStoreConfig, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    make_home(base)
    lake = Lake(str(base / "lake"), LakeConfig())
    of = {"prompt": "odds ab>", "response": "ij", "response_token_ids": [10, 11, 1], "logprobs": [-2.0] * 3}
    put(lake, "interactions", [interaction(f"x{i}", prompt_token_ids=[30 + i, 20], **of) for i in range(12)])
    put(lake, "feedback", [said(f"c{i}", f"x{i}", "correction", text="op", source="critic") for i in range(12)])
    policies = PolicyStoreConfig(uri=f"{config.uri}-policies", storage_options=config.storage_options)
    shared = open_store(tmp_path / "a" / "policies", policies)
    first = shared.publish(base / "seed", parent=None, lineage={}, metrics={})
    shared.promote(first.version, who="test", why="test", expected=None)
    job = {
        "config": TrainConfig.model_validate({**CONFIG, "run_store": config}).model_dump(mode="json", context=IN_CLEAR)
    }

    def run(home: Path, name: str) -> list[dict[str, Any]]:
        home.mkdir(exist_ok=True)
        (home / "dying.py").write_text(DYING)
        store = policies.model_dump(mode="json", context=IN_CLEAR)
        context = job_context(home, name, policy_store=store, lake_uri=str(base / "lake"))
        return results_of(run_jobs(home, [{**job, "context": context}]))

    a, b = tmp_path / "a", tmp_path / "b"
    [whole] = run(a, "whole")
    (a / "dies").touch()
    with pytest.raises(AssertionError, match="workers up after"):
        run(a, "run")
    assert steps_in(config) == [2]
    shutil.rmtree(a)
    with pytest.raises(AssertionError, match=r"pid \d+ on .* is at work on run run"):
        run(b, "run")
    run_out(config)
    [broken] = run(b, "run")
    there = open_store(b / "policies", policies)
    files = [there.verify(made["candidate"]).path / "model.safetensors" for made in (whole, broken)]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert len((b / "runs" / "run" / "metrics.jsonl").read_text().splitlines()) == 4
    assert (b / "runs" / "whole" / "result.json").exists(), "what the lost machine finished is on record here"
    listed, how = with_shared(RunStore(config), tmp_path / "c")
    assert [(one.name, one.result.candidate if one.result else None) for one in listed] == [
        ("whole", whole["candidate"]),
        ("run", broken["candidate"]),
    ]
    assert set(how.values()) == {"0 checkpoints"}
