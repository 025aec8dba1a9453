"""A cycle of another machine, whose run is in an object store (moto's), is gone on with here."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from deploy import cli
from deploy.config import root
from deploy.config.root import Settings
from deploy.loop import records
from deploy.loop.cycle import CycleBusy, run_cycle
from deploy.loop.recovery.killed_runs import unfinished_training
from deploy.loop.recovery.other_machines import take_over
from evaluation.suites.suite import Suite
from serve.policies.folder import StoreUnreachable
from serve.policies.object_store import ObjectStore
from tests.object_store import serving
from train.checkpoint.folders import begin_aside, make_whole
from train.context import JobContext, RunStart
from train.run.recovery.resume import keep_start, only_run
from train.run.recovery.run_store import Claim
from train.run.shared_run import shared_run


@pytest.fixture(scope="module")
def options() -> Iterator[dict[str, str]]:
    with serving() as found:
        yield found


@pytest.fixture
def settings(home_with_policy: Settings, options: dict[str, str], request: pytest.FixtureRequest) -> Settings:
    uri = f"s3://bucket/{request.node.name}"
    stored = [("train.run_store.uri", uri), ("train.run_store.storage_options", json.dumps(options))]
    home_with_policy.path(home_with_policy.cycle.folder).mkdir()
    return root.load(home_with_policy.snapshot(), stored, {})


def trained_elsewhere(
    settings: Settings,
    home: Path,
    name: str,
    at_work: Callable[[], None] = lambda: None,
    checkpoint: bool = True,
    publish: bool = False,
) -> None:
    """A run of another machine, which is at work on it while ``at_work`` is called, and then renews its claim, as it
    does before it publishes, if it is to ``publish``.
    """
    there = JobContext(
        run=name, runs=home / "runs", policies=home, reward_models=home, lake_uri=str(home / "lake"), parent=1
    )
    with only_run(there), shared_run(settings.train.run_store, there) as run:
        assert run is not None
        training = settings.training()
        suites = {str(suite): Suite.load(suite).sha256 for suite in training.data.exclude_suites}
        settings.lake().create()
        versions = settings.lake().versions()
        fields = {
            "parent_sha256": "",
            "lake_versions": versions,
            "reward": None,
            "config": training.model_dump(mode="json"),
        }
        keep_start(there, RunStart(id=name, parent=1, suites=suites, **fields))
        if checkpoint:
            begin_aside(there.folder / "checkpoints", 10, "{}")
            make_whole(there.folder / "checkpoints", 10)
        run.upload_soon()
        at_work()
        if publish:
            run.renew()


def test_a_run_that_another_machine_has_left_is_what_the_next_cycle_goes_on_with(
    settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained_elsewhere(settings, tmp_path / "a", "cycle-000007")
    said: list[str] = []
    assert take_over(settings, said.append) is None
    assert said == ["cycle 7: it trained on another machine, which is at work on it no more"]
    assert records.next_number(settings) == 8
    [record] = records.load_all(settings)
    assert (record.rewards, record.feedback) == (0, 0), "what it had learned from is not new to the next"
    found, left = unfinished_training(settings, 8, 1, 1)
    assert found is not None, left
    assert [stage.run for stage in found.stages] == ["cycle-000007"]
    assert take_over(settings, said.append) is None
    assert len(said) == 1
    assert cli.run(["--config", str(settings.snapshot()), "runs"]) == 0
    assert re.search(r"cycle-000007 .* unfinished .* 1 checkpoints", capsys.readouterr().out)


def test_a_cycle_that_trained_elsewhere_and_left_no_checkpoint_has_its_number(
    settings: Settings, tmp_path: Path
) -> None:
    trained_elsewhere(settings, tmp_path / "a", "cycle-000003", checkpoint=False)
    take_over(settings, print)
    [record] = records.load_all(settings)
    assert (record.number, record.status, record.run) == (3, "skipped", None)
    assert unfinished_training(settings, 4, 1, 1) == (None, {})


def test_no_cycle_begins_while_another_machine_is_at_work_on_a_later_one(settings: Settings, tmp_path: Path) -> None:
    def at_work() -> None:
        with pytest.raises(CycleBusy, match=r"pid \d+ on .* is at work on run cycle-000002 until"):
            run_cycle(settings)
        assert [record.number for record in records.load_all(settings)] == []
        records.write(settings, records.CycleRecord(number=2, started_at=records.now(), run="cycle-000002"))
        assert "is at work on run cycle-000002" in (take_over(settings, print) or ""), "its host had another name"
        shutil.copy(tmp_path / "a" / "runs" / ".copy", settings.path(settings.train.runs))
        assert take_over(settings, print) is None, "it is this machine, whose lock tells"

    trained_elsewhere(settings, tmp_path / "a", "cycle-000002", at_work)


def test_a_take_over_that_was_killed_or_cut_off_is_done_again(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained_elsewhere(settings, tmp_path / "a", "cycle-000007")

    def failing(error: type[BaseException]) -> Callable[..., None]:
        def fail(*_: object) -> None:
            raise error

        return fail

    with monkeypatch.context() as patched:
        patched.setattr(ObjectStore, "download", failing(StoreUnreachable))
        with pytest.raises(StoreUnreachable):
            take_over(settings, print)
    with monkeypatch.context() as patched:
        patched.setattr("deploy.loop.recovery.other_machines.write", failing(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            take_over(settings, print)
    assert take_over(settings, print) is None
    found, left = unfinished_training(settings, 8, 1, 1)
    assert found is not None, left


def test_the_claim_of_a_machine_that_is_gone_is_broken_by_command_and_of_one_at_work_is_not(
    settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = root.load(settings.snapshot(), [("train.run_store.lease_s", "3")], {})
    run = "cycle-000007"

    def release(*arguments: str) -> tuple[int, str]:
        status = cli.run(["--config", str(settings.snapshot()), "runs", "release", *arguments])
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    def at_work() -> None:
        assert release("cycle-000008", "--yes")[0] != 0
        status, text = release(run)  # nobody says yes
        assert (status != 0, "Break this claim?" in text) == (True, True)
        status, text = release(run, "--yes")
        assert (status != 0, f"is at work on run {run} until" in text) == (True, True), text
        assert f"is at work on run {run}" in (take_over(settings, print) or "")

    trained_elsewhere(settings, tmp_path / "a", run, at_work, publish=True)
    store, ahead = settings.run_store(), datetime.now(UTC) + timedelta(days=1)  # by the clock of the one that is gone
    assert store is not None
    found = store.read(run)
    assert found is not None
    claim = Claim(holder="pid 1 on gone", token="t", copy_id="c", until=ahead + timedelta(seconds=3))
    left = found.manifest.model_copy(update={"claim": claim, "at": ahead, "write": "w"})
    store.objects.write_if(f"runs/{run}.json", left.model_dump_json().encode(), found.version)
    assert f"pid 1 on gone is at work on run {run}" in (take_over(settings, print) or "")
    status, text = release(run, "--yes")
    assert (status, re.search(r"the claim of pid 1 on gone, until .* is broken", text) is not None) == (0, True), text
    assert release(run, "--yes") == (0, f"run {run}: no machine has a claim on it\n")
    assert take_over(settings, print) is None, "it is gone on with"


def test_what_is_pruned_while_the_store_is_away_is_of_this_machine(
    settings: Settings, options: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = [("train.run_store.storage_options", json.dumps(options | {"aws_endpoint_url": "http://127.0.0.1:9"}))]
    away = root.load(settings.snapshot(), nowhere, {})
    assert cli.run(["--config", str(away.snapshot()), "runs", "prune"]) == 0
    printed = capsys.readouterr()
    assert "warning: the runs of this machine alone" in printed.err
    assert "removed the checkpoints of runs: none" in printed.out
