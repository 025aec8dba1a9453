"""When a cycle trains a reward model: its runs are real records of a real store, and nothing is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deploy.config import root
from deploy.config.root import RecipeStage, Settings
from deploy.loop import records
from deploy.loop.cycle import _Cycle


class Trainer(_Cycle):
    """A cycle whose trainings publish this model, with a verdict, or promote it."""

    model: Path
    keep: bool

    def _train(self, stage: RecipeStage, *_: Any, **__: Any) -> dict[str, Any]:
        store = self.settings.stores().reward_models
        version = store.publish(self.model, parent=None, lineage={}, metrics={}).version
        if self.keep:
            store.promote(version, expected=store.serving(), who="test", why="test")
        self.record.stages.append(records.Stage(name=stage.label, started_at=records.now(), ok=True))
        return {"reason": f"reward model {version}: worse than a coin", "reward_model": version, "candidate": None}


def cycle(settings: Settings, model: Path, *, keep: bool, feedback: int) -> str | None:
    """Why there is nothing to reward by after a cycle."""
    turn = Trainer(settings, print)
    turn.model, turn.keep, turn.record.feedback = model, keep, feedback
    why = turn._reward_model(RecipeStage(stage="reward-model"), 1, None)
    turn._end("skipped", why)
    return why


@pytest.fixture
def marked(settings: Settings, model: Path) -> Settings:
    """A home whose reward model an erasure has marked."""
    settings = root.load(settings.snapshot(), [("cycle.recipe", "rlhf")], environment={})
    settings.path("cycles").mkdir()
    least = settings.train.reward_model.min_new_feedback
    assert cycle(settings, model, keep=True, feedback=least) is None
    settings.stores().reward_models.record_erasure(1, certainty="yes", why="erased", retrain=True)
    return settings


def test_a_marked_reward_model_is_trained_anew_once_and_not_every_cycle(marked: Settings, model: Path) -> None:
    store, least = marked.stores().reward_models, marked.train.reward_model.min_new_feedback
    why = [cycle(marked, model, keep=False, feedback=least) for _ in range(3)]
    assert store.versions() == [1, 2]
    assert why == [
        "there is no reward model yet: training's reward model 2: worse than a coin",
        *[f"there is no reward model yet: it needs {least} pieces of feedback, and has 0"] * 2,
    ]
    assert cycle(marked, model, keep=True, feedback=2 * least) is None
    assert store.versions() == [1, 2, 3]


def test_one_that_is_marked_before_it_was_kept_is_trained_anew_too(marked: Settings, model: Path) -> None:
    store, least = marked.stores().reward_models, marked.train.reward_model.min_new_feedback
    cycle(marked, model, keep=False, feedback=least)
    store.record_erasure(2, certainty="yes", why="erased", retrain=True)
    assert cycle(marked, model, keep=True, feedback=least) is None
    assert store.versions() == [1, 2, 3]
