"""Trackers and hooks: named in the config, called at their moments, and named when they fail."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from train.config.training import TrainConfig
from train.context import JobResult
from train.observe.hooks import HookError, RunInfo, load_function
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
    return Watchers(RunInfo("r", folder, 1, len(history), 5, config), history)


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
