"""Runs side by side, from what runs leave in their folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deploy.display.runs import runs
from train.config.training import TrainConfig
from train.context import JobResult


def run(folder: Path, name: str, config: TrainConfig, file: str = "start.json", **result: Any) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / file).write_text(json.dumps({"config": config.model_dump(mode="json")}))
    if result:
        common = {"run": name, "parent": 1, "steps": 2, "reason": None, "metrics": {}, "seconds": 30.0}
        of = JobResult(**common | result)
        (folder / name / "result.json").write_text(of.model_dump_json())


def test_a_run_has_what_it_was_trained_by_and_what_it_reached(tmp_path: Path) -> None:
    settings = TrainConfig.model_validate({
        "algorithm": {"name": "dapo", "group_size": 4},
        "optimizer": {"learning_rate": 3e-5},
        "data": {"prompts_per_step": 16},
    })  # fmt: skip
    run(tmp_path, "cycle-000001", settings, candidate=2)
    steps = [{"reward": float(i), "responses": 64.0, "kl_ref": 0.1 * i, "seconds": 1.0} for i in range(12)]
    steps[-1]["kl_ref_at_end"] = 1.5
    (row,) = runs(tmp_path, {"cycle-000001": steps})
    assert (row.algorithm, row.optimizer, row.learning_rate, row.batch) == ("dapo", "AdamW", 3e-5, "16 × 4")
    assert (row.reward_first, row.reward_last, row.max_kl) == (2.0, 9.0, 1.5)
    assert (row.candidate, row.seconds, row.steps) == (2, 30.0, 12)


def test_the_first_and_the_last_steps_of_a_short_run_are_not_the_same_ones(tmp_path: Path) -> None:
    run(tmp_path, "short", TrainConfig())
    (row,) = runs(tmp_path, {"short": [{"reward": 0.0}, {"reward": 1.0}, {"reward": 0.5}]})
    assert (row.reward_first, row.reward_last) == (0.0, 0.5)


def test_a_run_of_feedback_has_no_responses_in_its_batch_and_its_own_kl(tmp_path: Path) -> None:
    run(tmp_path, "kto", TrainConfig.model_validate({"algorithm": {"name": "kto"}, "data": {"prompts_per_step": 8}}))
    (row,) = runs(tmp_path, {"kto": [{"reward": 0.5, "responses": 0.0, "k2_ref": 0.2, "seconds": 2.0}]})
    assert (row.batch, row.max_kl, row.seconds) == ("8", 0.2, 2.0)


def test_runs_that_have_just_begun_or_were_given_up_are_there_too(tmp_path: Path) -> None:
    run(tmp_path, "begun", TrainConfig(), file="job.json")
    run(tmp_path, "stopped", TrainConfig(), candidate=None, reason="KL rose to 3", stopped=True)
    (tmp_path / "other").mkdir()
    rows = {row.run: row for row in runs(tmp_path, {})}
    assert sorted(rows) == ["begun", "stopped"]
    assert (rows["begun"].reward_first, rows["begun"].max_kl, rows["begun"].seconds) == (None, None, None)
    assert rows["stopped"].reason == "KL rose to 3"


def test_a_run_of_which_only_its_metrics_are_left_has_those(tmp_path: Path) -> None:
    (row,) = runs(tmp_path, {"old": [{"reward": 0.25, "kl_ref": float("nan")}]})
    assert (row.algorithm, row.batch, row.reward_last, row.max_kl) == (None, None, 0.25, None)


def test_no_folder_of_runs_is_no_runs(tmp_path: Path) -> None:
    assert runs(tmp_path / "none", {}) == []
