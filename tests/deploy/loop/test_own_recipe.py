"""A recipe of one's own stages, by real trainings: one finds nothing, one is killed, the next cycle goes on with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.config import root
from deploy.config.root import Settings
from deploy.loop import records
from deploy.loop.cycle import run_cycle
from evaluation.results import Evaluation
from tests.feedback.feedback_rows import interaction, put, said

RECIPE = """
- {stage: train, name: votes, set: {algorithm: {name: kto}}}
- {stage: train, name: sft, set: {algorithm: {name: sft}, steps: 1}}
- {stage: train, set: {algorithm: {name: dpo}, steps: 3, checkpoint: {every_steps: 1}}}
"""

DIES = """
import os, signal
from pathlib import Path
from train.observe.hooks import Hook

class Dies(Hook):
    def on_checkpoint(self, steps, folder):
        if Path("die").exists() and self.run.config.algorithm.name == "dpo":
            Path("die").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def home(home_with_policy: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """A home with preferences and corrections, and no thumb, whose training of pairs dies once there is a ``die``."""
    (tmp_path / "dies.py").write_text(DIES)
    monkeypatch.syspath_prepend(tmp_path)
    options = {
        "cycle.recipe": RECIPE,
        "train.dtype": "float32",
        "train.hooks": '["dies:Dies"]',
        "train.restarts.attempts": "0",  # the next cycle is to go on
        "train.data.prompts_per_step": "4",
        "train.data.min_prompts": "4",
        "evaluation.max_tokens": "4",
        "evaluation.kl_samples": "0",
        "evaluation.best_of": "2",
        "evaluation.gate.max_items": "60",  # then it is refused, if it has not passed
    }
    settings = root.load(home_with_policy.snapshot(), list(options.items()), {})
    lake = settings.lake()
    lake.create()
    rows = []
    for i in range(10):
        prompt = {"prompt": f"{i}+2=", "prompt_token_ids": [28 + i, 39, 30, 40]}
        for name, token in ((f"r{i}", 31), (f"r{i}-other", 32)):
            rows.append(interaction(name, response=str(token - 28), response_token_ids=[token, 1], **prompt))
    put(lake, "interactions", rows)
    put(lake, "feedback", [said(f"p{i}", f"r{i}", "preference", rejected_response_id=f"r{i}-other") for i in range(10)])
    put(lake, "feedback", [said(f"c{i}", f"r{i}", "correction", text=str(i + 2)) for i in range(10)])
    return settings


@pytest.mark.long
def test_a_recipe_that_was_killed_in_its_last_stage_goes_on_there_and_trains_nothing_twice(
    home: Settings, tmp_path: Path, nothing_left: Callable[[], list[str]]
) -> None:
    (tmp_path / "die").touch()
    record = run_cycle(home)
    assert (record.status, record.candidate) == ("failed", 2), record.reason
    assert [(stage.name, stage.ok, stage.killed) for stage in record.stages] == [
        ("score", True, False),
        ("train-votes", True, False),
        ("train-sft", True, False),
        ("train", False, True),
    ]
    votes, sft = (stage.result or {} for stage in record.stages[1:3])
    assert (votes["candidate"], sft["candidate"], sft["parent"]) == (None, 2, 1)

    printed: list[str] = []
    again = run_cycle(home, say=printed.append)
    assert (again.status, again.candidate) in [("refused", 3), ("promoted", 3)], again.reason
    assert [stage.run for stage in again.stages if stage.run] == [
        "cycle-000001-train-votes",
        "cycle-000001-train-sft",
        "cycle-000001",
    ]
    assert "cycle 2: train-votes has published nothing, policy 1 stays: " in "\n".join(printed)
    assert any("goes on after step" in line for line in printed)
    store = home.policy_store()
    assert [store.get(version).parent for version in store.versions()] == [None, 1, 2]
    assert sorted(path.name for path in home.path("logs").glob("cycle-000002-train*")) == ["cycle-000002-train.log"]
    assert [one.number for one in records.load_all(home)] == [1, 2]
    best = Evaluation.load(home.path("evaluations") / "3-vs-1.json").best_of  # by the reward of the home's rule
    assert best is not None
    assert (best.by.partition("@")[0], best.n, best.items) == ("exact", 2, 60)
    assert any(line.startswith("policy 1, best of 2 by exact@") for line in printed)
    assert nothing_left() == []
