"""The folders of checkpoints, random states, and what the driver makes of saves that fail."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from train.checkpoint.dcp import Saved
from train.checkpoint.folders import (
    CheckpointError,
    begin_aside,
    checkpoints,
    make_whole,
    name_of,
    prune,
    remove_unfinished,
    require_room,
    torn,
)
from train.checkpoint.random_state import random_state, seed_all, seed_of, set_random_state
from train.config.sections import CheckpointConfig
from train.context import JobContext, RunStart
from train.controller.worker_group import WorkerGroup
from train.run.checkpoints import Checkpoints
from train.run.recovery.resume import Progress


def test_pruning_removes_no_newer_one_and_what_is_half_written_or_half_removed_goes(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        (tmp_path / name_of(step)).mkdir()
    for rubbish in (".step-00000004.new", ".step-00000000.old"):
        (tmp_path / rubbish).mkdir()
    prune(tmp_path, 2)
    assert [path.name for path in checkpoints(tmp_path)] == [name_of(3), name_of(2)]
    assert remove_unfinished(tmp_path) == [".step-00000000.old", ".step-00000004.new"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [name_of(2), name_of(3)]


def test_too_small_a_disk_is_told_with_both_sizes_and_what_would_do(tmp_path: Path) -> None:
    require_room(tmp_path, 1.0)
    with pytest.raises(CheckpointError, match=r"needs 1099511627776 MiB, .* MiB left: .*train\.checkpoint\.keep"):
        require_room(tmp_path, 2.0**60)


def test_a_checkpoint_of_another_format_is_not_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin_aside(tmp_path, 1, "{}")
    whole = make_whole(tmp_path, 1)
    assert torn(whole) is None
    monkeypatch.setattr("train.checkpoint.folders.FORMAT", 3)
    assert torn(whole) == "whole.json is of format 2, this version reads format 3"


def test_random_states_come_back_through_json() -> None:
    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    seed_all(3)
    kept = json.dumps(random_state())
    first = draw()
    assert draw() != first
    set_random_state(json.loads(kept))
    assert draw() == first


def test_seeds_of_different_names_differ() -> None:
    seeds = {seed_of(run, step, prompt) for run in range(3) for step in range(30) for prompt in range(30)}
    assert len(seeds) == 2700
    assert max(seeds) < 2**62


class Group:
    """Stands for a group in training: its saves end as told, None being well, one for each time that it is asked."""

    def __init__(self, *errors: str | None) -> None:
        self.errors = list(errors)
        self.saves: list[int] = []

    def save_checkpoint(self, folder: Path, *, step: int) -> None:
        assert json.loads((folder.parent / "driver.json").read_text())["step"] == step
        folder.mkdir()
        (folder / "shard").write_text(str(step))
        self.saves.append(step)

    def saved(self, wait: bool) -> list[Saved]:
        return [Saved(self.saves.pop(0), self.errors.pop(0))] if self.saves and self.errors else []


def checkpoints_of(folder: Path, heard: list[int], *groups: Group, **config: Any) -> Checkpoints:
    """The checkpoints of a run; its parts are called by letters."""
    context = JobContext(run="r", runs=folder, policies=Path("p"), reward_models=Path("m"), lake_uri="l", reward="m:f")
    (folder / "r" / "checkpoints").mkdir(parents=True, exist_ok=True)
    parts = cast(dict[str, WorkerGroup], dict(zip("ab", groups, strict=False)))
    return Checkpoints(CheckpointConfig.model_validate(config), context, parts, lambda step, _: heard.append(step))


def progress(step: int) -> Progress:
    start = RunStart(id="i", parent=1, parent_sha256="", lake_versions={}, reward="m:f", config={})
    return Progress(start=start, step=step, data="", history=[], random={}, dataflow=None)


def test_a_failed_save_is_told_and_a_second_in_a_row_ends_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heard: list[int] = []
    all_ = checkpoints_of(tmp_path, heard, Group("disk full", None, "disk full", "disk gone"), every_steps=1)
    all_.save(progress(1))
    all_.collect()
    assert "the checkpoint after step 1 failed, the run goes on: a: disk full" in capsys.readouterr().out
    assert list((tmp_path / "r" / "checkpoints").iterdir()) == [], "what failed is not left"
    all_.save(progress(2))
    all_.collect()
    assert heard == [2]
    all_.save(progress(3))
    all_.collect()
    all_.save(progress(4))
    with pytest.raises(
        CheckpointError, match="no checkpoint could be saved, after step 3: a: disk full; after step 4: a: disk g"
    ):
        all_.collect()


def test_a_checkpoint_is_there_only_when_all_its_parts_are_written(tmp_path: Path) -> None:
    heard: list[int] = []
    slow = Group()
    all_ = checkpoints_of(tmp_path, heard, Group(None, None), slow, every_steps=1)
    all_.save(progress(1))
    all_.collect()
    all_.save(progress(2))
    all_.collect()
    assert checkpoints(tmp_path / "r" / "checkpoints") == []
    slow.errors = ["disk full", None]
    all_.collect()
    assert checkpoints(tmp_path / "r" / "checkpoints") == []
    all_.collect()
    [whole] = checkpoints(tmp_path / "r" / "checkpoints")
    assert heard == [2]
    assert torn(whole) is None
    assert [(whole / part / "shard").read_text() for part in "ab"] == ["2", "2"]


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    all_ = checkpoints_of(tmp_path, [], Group(None, None, None), every_steps=1, keep=2, asynchronous=False)
    for step in (1, 2, 3):
        all_.save(progress(step))
    assert sorted(path.name for path in (tmp_path / "r" / "checkpoints").iterdir()) == [name_of(2), name_of(3)]


def test_a_place_that_can_not_be_written_to_is_a_failed_save(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    all_ = checkpoints_of(tmp_path, [], Group(), every_steps=1)
    (tmp_path / "r" / "checkpoints").rmdir()
    (tmp_path / "r" / "checkpoints").touch()
    all_.save(progress(1))
    assert "the checkpoint after step 1 failed, the run goes on: NotADirectoryError" in capsys.readouterr().out


def test_checkpoints_are_due_every_so_many_steps_or_never(tmp_path: Path) -> None:
    every, never = (checkpoints_of(tmp_path, [], Group(), every_steps=n) for n in (3, None))
    assert [s for s in range(1, 10) if every.due(s)] == [3, 6, 9]
    assert not any(never.due(s) for s in range(1, 10))


def test_a_synchronous_save_is_heard_of_before_the_next_step(tmp_path: Path) -> None:
    heard: list[int] = []
    checkpoints_of(tmp_path, heard, Group(None), asynchronous=False).save(progress(1))
    assert heard == [1]
