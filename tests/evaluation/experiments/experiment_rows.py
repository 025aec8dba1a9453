"""An experiment, and rows of its traffic."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from evaluation.config import ExperimentConfig, FeedbackOutcomeConfig, OutcomesConfig
from evaluation.experiments.blocks import Block, Observed, observe
from evaluation.experiments.plan import ExperimentPlan
from feedback.config import HumanConfig, KindsConfig
from feedback.lake.tables import Lake
from serve.generation.interaction_rows import BLOCK
from serve.policies.experiments import Experiment, Phase
from tests.feedback.feedback_rows import interaction, said

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
EXPERIMENT = Experiment(3, 2, 1, "seed", NOON.timestamp(), 60.0, (Phase(0, 0.5),), 1, "running", "test", "test", {})
WINDOW_S = 100.0
FEEDBACK = {"feedback": FeedbackOutcomeConfig()}


def plan_of(**changed: Any) -> ExperimentPlan:
    outcomes = OutcomesConfig(**({"feedback": None, "errors": None} | changed.pop("outcomes", FEEDBACK)))
    config = ExperimentConfig(feedback_window_seconds=WINDOW_S, outcomes=outcomes, **({"min_voices": 1} | changed))
    return ExperimentPlan.of(config, HumanConfig(), KindsConfig())


def asked(response: str, block: int, *, second: float = 1.0, **columns: Any) -> dict[str, Any]:
    """A response in a block, labelled as that was drawn."""
    turn, at = EXPERIMENT.turn(block), NOON + timedelta(seconds=60 * block + second)
    labels = {"experiment": 3, "variant": turn.variant, "propensity": turn.propensity, "created_at": at}
    labels |= {"completed_at": at, "metadata": {BLOCK: str(block)}}
    return interaction(response, **(labels | columns))


def thumb(number: int, response: str, block: int, value: float, source: str, *, second: float = 2.0) -> dict[str, Any]:
    at = NOON + timedelta(seconds=60 * block + second)
    return said(f"f{number}", response, "thumb", value=value, source=source, created_at=at)


def seen(lake: Lake, plan: ExperimentPlan, *, after_s: float = 1e6, known: Sequence[Block] = ()) -> Observed:
    journal = Path(lake.uri).parent / "journal"
    return observe(lake, journal, EXPERIMENT, plan, now=NOON.timestamp() + after_s, known=known)
