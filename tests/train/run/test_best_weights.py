"""Which weights are the best of a run's steps, and which have to stay for one that goes on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from serve.policies.folder import WrittenFile, sha256_file
from train.checkpoint.folders import CheckpointError
from train.config.training import TrainConfig
from train.run.best_weights import Best, BestWeights, best_of


def history(*rewards: float | None) -> list[dict[str, float]]:
    return [{"loss": 1.0} if reward is None else {"held_out/reward": reward} for reward in rewards]


def written(run: Path, steps: Sequence[int]) -> None:
    for step in steps:
        (run / "best" / f"step-{step:08d}" / "candidate").mkdir(parents=True)


def names(run: Path) -> list[str]:
    return sorted(os.listdir(run / "best"))


def test_the_best_is_the_first_with_the_highest_reward(tmp_path: Path) -> None:
    written(tmp_path, [2, 4])
    assert best_of(tmp_path, history(None, 0.5, None, 0.5)) == Best(2, 0.5, tmp_path / "best" / "step-00000002")
    assert best_of(tmp_path, history(None)) is None


def test_another_step_is_never_taken_for_the_best_whose_weights_are_gone(tmp_path: Path) -> None:
    written(tmp_path, [2])
    with pytest.raises(CheckpointError, match=r"step 3 was the best .*reward 0\.900.* Set train\.keep to last"):
        best_of(tmp_path, history(None, 0.5, 0.9))


class Actor:
    """All that is called of the group in training; what real ones export is tested by runs."""

    def export(self, folder: Path) -> dict[str, WrittenFile]:
        path = folder / "model.safetensors"
        path.write_bytes(b"weights")
        return {path.name: WrittenFile.of(path.stat(), sha256_file(path))}


def test_weights_stay_while_a_run_that_goes_on_from_a_checkpoint_may_need_them(tmp_path: Path) -> None:
    config = TrainConfig.model_validate({"evaluate_suite": "s.jsonl", "keep": "best"})
    best = BestWeights(config, tmp_path, Actor())  # type: ignore[arg-type]
    seen, done = [], history(0.1, 0.7, 0.6, 0.9)
    for step in range(1, 5):
        best.look(done[:step])
        seen.append(names(tmp_path))
    first, second, fourth = (f"step-{step:08d}" for step in (1, 2, 4))
    assert seen == [[first], [first, second], [first, second], [first, second, fourth]]
    for checkpoint in (1, 3):  # the one after step 3 is still being written when that after step 1 is whole
        (tmp_path / "checkpoints" / f"step-{checkpoint:08d}").mkdir(parents=True)
        best.prune(done)
        assert names(tmp_path) == [first, second, fourth]
    (tmp_path / "checkpoints" / "step-00000001").rename(tmp_path / "gone")
    best.prune(done)
    assert names(tmp_path) == [second, fourth]


def test_the_best_is_put_in_the_runs_folder_as_the_files_that_were_hashed(tmp_path: Path) -> None:
    config = TrainConfig.model_validate({"evaluate_suite": "s.jsonl", "keep": "best"})
    BestWeights(config, tmp_path, Actor()).look(history(0.5))  # type: ignore[arg-type]
    best = best_of(tmp_path, history(0.5))
    assert best is not None
    [(name, written)] = best.restore(tmp_path).items()
    assert written.is_at(tmp_path / "candidate" / name)
    assert sorted(os.listdir(tmp_path)) == ["best", "candidate"]
    assert best.restore(tmp_path) == {name: written}, "as after a publishing that was killed"
    assert written.is_at(tmp_path / "candidate" / name)


def test_by_default_nothing_is_written(tmp_path: Path) -> None:
    best = BestWeights(TrainConfig(), tmp_path, Actor())  # type: ignore[arg-type]
    best.look(history(0.5))
    best.prune(history(0.5))
    assert not (tmp_path / "best").exists()
