"""Trackers and hooks: named in the config, called at their moments, and named when they fail."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from feedback.datasets import Prompt
from loadtests.server import free_port
from train.batch.packed import Sample
from train.config.training import TrainConfig
from train.context import JobResult
from train.observe.hooks import Answer, HookError, RunInfo, load_function
from train.observe.trackers import Watchers

USERS_CODE = """
from train.observe.hooks import Hook
from train.observe.trackers import Tracker

heard = []

class Keeper(Tracker):
    def log(self, step, metrics):
        heard.append(("log", step, metrics["reward"]))

    def close(self):
        heard.append(("close",))

class Listener(Hook):
    def on_start(self):
        heard.append(("start", self.run.name, self.run.first_step, self.run.steps))

    def on_step(self, step, metrics):
        heard.append(("step", step))

    def on_checkpoint(self, steps, folder):
        heard.append(("checkpoint", steps, folder.name))

    def on_end(self, result, error):
        heard.append(("end", result and result.candidate, error and str(error)))

class Measures(Hook):
    found = {}

    def on_evaluation(self, step, answers):
        short = sum(len(answer.response.text) < 3 for answer in answers)
        return type(self).found | {"share_short": short / len(answers)}

class Breaks(Hook):
    def on_step(self, step, metrics):
        raise KeyError("no such number")

class BreaksAtTheEnd(Hook):
    def on_end(self, result, error):
        raise OSError("the mail server is away")

def no_hook(run):
    return 3

number = 4
"""


@pytest.fixture
def heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    name = f"users_code_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(USERS_CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = __import__(name)
    module.NAME = name
    return [module.heard, name]


def watchers(
    folder: Path, *, hooks: Sequence[str] = (), trackers: Sequence[str] = (), history: Sequence[dict[str, float]] = ()
) -> Watchers:
    config = TrainConfig.model_validate({"hooks": list(hooks), "trackers": list(trackers)})
    return Watchers(RunInfo("r", folder, 1, len(history), 5, config, tuple(history)))


def test_trackers_and_hooks_are_called_in_order_with_what_they_need(tmp_path: Path, heard: list[Any]) -> None:
    calls, name = heard
    result = JobResult(run="r", candidate=7, parent=1, steps=5, reason=None, metrics={}, seconds=1.0)
    with watchers(tmp_path, hooks=[f"{name}:Listener"], trackers=[f"{name}:Keeper"]) as all_:
        all_.start()
        all_.step(0, {"reward": 0.5})
        all_.checkpoint(1, tmp_path / "step-1")
        all_.end(result)
    assert calls == [
        ("start", "r", 0, 5),
        ("log", 0, 0.5),
        ("step", 0),
        ("checkpoint", 1, "step-1"),
        ("close",),
        ("end", 7, None),
    ]


def test_a_hook_measures_answers_and_what_is_no_metric_is_refused(tmp_path: Path, heard: list[Any]) -> None:
    _, name = heard
    answers = [
        Answer(Prompt("p", None, [1]), Sample([2], text, [-1.0], "stop"), reward)
        for text, reward in (("ab", 1.0), ("abcd", None))
    ]
    hook = sys.modules[name].Measures
    with watchers(tmp_path, hooks=[f"{name}:Listener", f"{name}:Measures"]) as all_:
        assert all_.evaluation(3, answers) == {"share_short": 0.5}
        for found, message in (
            ({"reward": 1.0}, "can't be called 'reward'"),
            ({3: 1.0}, "can't be called 3"),
            ({"mine": float("nan")}, "'mine' is nan"),
            ({"mine": "much"}, "'mine' is 'much'"),
        ):
            hook.found = found
            with pytest.raises(HookError, match=rf"'{name}:Measures' failed in on_evaluation, step 3: .*{message}"):
                all_.evaluation(3, answers)


def test_a_hook_that_fails_is_named_with_its_moment_and_the_others_hear_the_end(
    tmp_path: Path, heard: list[Any]
) -> None:
    calls, name = heard
    message = rf"train\.hooks: '{name}:Breaks' failed in on_step, step 3: KeyError: 'no such number'"
    with (
        pytest.raises(HookError, match=message),
        watchers(tmp_path, hooks=[f"{name}:Breaks", f"{name}:Listener"]) as all_,
    ):
        all_.step(3, {"reward": 0.5})
    assert calls[-1][:2] == ("end", None)
    assert "no such number" in calls[-1][2]


def test_a_hook_that_fails_at_the_end_does_not_hide_why_the_run_failed(tmp_path: Path, heard: list[Any]) -> None:
    _, name = heard
    hooks = [f"{name}:BreaksAtTheEnd"]
    with pytest.raises(ValueError, match="the run's own") as raised, watchers(tmp_path, hooks=hooks):
        raise ValueError("the run's own")
    assert raised.value.__notes__ == [
        f"train.hooks: '{name}:BreaksAtTheEnd' failed in on_end: OSError: the mail server is away"
    ]
    with pytest.raises(HookError, match="BreaksAtTheEnd"), watchers(tmp_path, hooks=[f"{name}:BreaksAtTheEnd"]):
        pass


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("no_colon", "'no_colon' names no function; write 'module:function'"),
        ("no_such_module_at_all:f", "the module can't be imported: No module named 'no_such_module_at_all'"),
        ("json:no_such", "the module json has no 'no_such'"),
        ("json:__name__", "'json:__name__' is a str, not a function or class"),
    ],
)
def test_what_can_not_be_loaded_is_refused_with_the_setting(tmp_path: Path, given: str, message: str) -> None:
    with pytest.raises(HookError, match=f"train.trackers=.*{message}"):
        load_function("train.trackers", given)
    with pytest.raises(HookError, match=f"train.hooks=.*{message}"):
        watchers(tmp_path, hooks=[given])


def test_a_function_that_gives_no_hook_is_refused(tmp_path: Path, heard: list[Any]) -> None:
    _, name = heard
    with pytest.raises(HookError, match=rf"'{name}:no_hook' returned a int, not a train\.observe\.hooks\.Hook"):
        watchers(tmp_path, hooks=[f"{name}:no_hook"])


def test_a_tracker_that_can_not_begin_leaves_none_before_it_open(tmp_path: Path, heard: list[Any]) -> None:
    calls, module = heard
    with pytest.raises(HookError, match="returned a int"):
        watchers(tmp_path, trackers=[f"{module}:Keeper", f"{module}:no_hook"])
    assert calls == [("close",)]


def test_a_run_that_goes_on_writes_no_step_twice(tmp_path: Path) -> None:
    with watchers(tmp_path) as first:
        for step in range(4):
            first.step(step, {"reward": float(step)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')  # the kill cut a line
    with watchers(tmp_path, history=[{"reward": 0.0}, {"reward": 1.0}]) as second:
        for step in (2, 3, 4):
            second.step(step, {"reward": 10.0 * step})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["reward"]) for line in lines] == [(0, 0), (1, 1), (2, 20), (3, 30), (4, 40)]
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(e.step, e.value) for e in board.Scalars("train/reward")] == [(0, 0), (1, 1), (2, 20), (3, 30), (4, 40)]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_ready_tracker_without_its_package_is_refused_with_the_command_that_installs_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # as where it is not installed
    monkeypatch.setitem(sys.modules, f"{name}.entities", None)
    message = rf"train\.trackers: '{name}' failed in its constructor: ImportError: .*pip install 'millrace\[{name}\]'"
    with pytest.raises(HookError, match=message):
        watchers(tmp_path, trackers=[name])


def log_with_a_kill(folder: Path, tracker: str) -> None:
    """Four steps; a run from before that was killed after the third, and goes on from the second."""
    folder.mkdir(parents=True)
    first = watchers(folder, trackers=[tracker])
    for step in range(3):
        first.step(step, {"reward": float(step), "of/./mine@2": 2.0})
    second = watchers(folder, trackers=[tracker], history=[{"reward": 0.0}, {"reward": 1.0}])
    for step in (2, 3):
        second.step(step, {"reward": 10.0 * step})
    with pytest.raises(ValueError, match="the run's own"), second:
        raise ValueError("the run's own")


def in_log(data: bytes) -> Iterator[bytes]:
    """The records of W&B's file: LevelDB's log format, behind a header of seven bytes."""
    at, parts, block = 7, b"", 2**15
    while at + 7 <= len(data):
        if block - at % block < 7:  # too little for another record's header
            at += block - at % block
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last of its parts
            yield parts
            parts = b""


def test_wandb_keeps_a_run_offline_with_every_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the package wandb is not installed: pip install 'millrace[wandb]'")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.delenv("WANDB_MODE", raising=False)
    log_with_a_kill(tmp_path / "r", "wandb")
    files = list((tmp_path / "r" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2
    both = [[Record.FromString(data) for data in in_log(file.read_bytes())] for file in files]
    [records] = [records for records in both if any(record.HasField("exit") for record in records)]
    rows = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    assert [(row["_step"], row["train/reward"]) for row in rows] == [(0, 0), (1, 1), (2, 20), (3, 30)]
    [run] = [record.run for record in records if record.HasField("run")][:1]
    assert (run.display_name, run.run_group, run.project) == ("r", "r", "millrace")
    [end] = [record.exit for record in records if record.HasField("exit")]
    assert end.exit_code == 1


def test_mlflow_keeps_every_step_once_and_says_which_run_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_mlflow()
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    log_with_a_kill(tmp_path / "o'brien" / "r", "mlflow")
    uri = f"sqlite:///{tmp_path}/o'brien/mlflow.db"
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    experiment = client.get_experiment_by_name("millrace")
    failed, killed = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time DESC"])
    assert (killed.info.status, failed.info.status, failed.info.run_name) == ("KILLED", "FAILED", "r")
    history = client.get_metric_history(failed.info.run_id, "train/reward")
    assert [(m.step, m.value) for m in history] == [(0, 0), (1, 1), (2, 20), (3, 30)]
    assert failed.data.params["train.steps"] == "20"
    assert killed.data.metrics["train/of/_/mine_2"] == 2.0


def test_an_mlflow_server_that_is_gone_ends_a_run_soon_and_its_password_is_in_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_mlflow()
    for name in ("USERNAME", "PASSWORD"):  # which the tracker sets
        monkeypatch.setenv(f"MLFLOW_TRACKING_{name}", "x")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:hunter2@127.0.0.1:{free_port()}")
    with pytest.raises(HookError, match="Connection refused") as failed:
        watchers(tmp_path, trackers=["mlflow"])
    assert "hunter2" not in str(failed.value)


def need_mlflow() -> None:
    for name in ("mlflow", "sqlalchemy", "alembic"):
        pytest.importorskip(name, reason=f"the package {name} is not installed: pip install 'millrace[mlflow]'")
