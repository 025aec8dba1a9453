"""By what an experiment is decided: settled when it starts, and kept with it, whatever the settings say later."""

from __future__ import annotations

from typing import Any, Final, Self

from pydantic import BaseModel, ConfigDict, Field

from evaluation.config import ExperimentConfig, OutcomeName
from evaluation.statistics import experiment as statistics
from feedback.config import HumanConfig, KindsConfig
from serve.policies.experiments import Unit

_SETTLED: Final = {"bounds", "role", "margin", "rollback_margin", "predicted_by"}


class Outcome(BaseModel):
    """One outcome, in its own units; see ``evaluation.statistics.experiment.Outcome``.

    ``predicted_by``: the component of the reward that scores every response, from 0 to 1.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: OutcomeName
    bounds: tuple[float, float]
    role: str
    margin: float
    rollback_margin: float
    predicted_by: str | None = None

    @property
    def for_statistics(self) -> statistics.Outcome:
        return statistics.Outcome(
            name=self.name,
            bounds=self.bounds,
            higher_is_better=self.name in ("feedback", "reward"),
            role="guardrail" if self.role == "guardrail" else "success",
            margin=self.margin,
            rollback_margin=self.rollback_margin,
            predicted=self.predicted_by is not None,
        )


class ExperimentPlan(BaseModel):
    """Levels, outcomes and times of an experiment; the times in seconds. ``before_s``: what went before it and counts
    as covariate; ``session_s``: how long after a response without a further request its session has ended."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    alpha_commit: float = Field(gt=0, le=0.5)
    alpha_rollback: float = Field(gt=0, le=0.5)
    alpha_checks: float = Field(gt=0, le=0.5)
    response_margin: float = Field(ge=0, lt=1)
    min_voices: int = Field(ge=1)
    window_s: float = Field(ge=0)
    watch_s: float = Field(ge=0)
    watch_share: float = Field(gt=0, lt=1)
    max_s: float = Field(gt=0)
    before_s: float = Field(default=0.0, ge=0)
    session_s: float = Field(default=0.0, ge=0)
    outcomes: tuple[Outcome, ...]
    human: HumanConfig
    kinds: KindsConfig

    @classmethod
    def of(cls, config: ExperimentConfig, human: HumanConfig, kinds: KindsConfig, *, unit: Unit = "block") -> Self:
        """As the settings have it now; ``human`` and ``kinds`` say what a person's feedback is worth.

        A user is one voice, mostly, so ``min_voices`` is of blocks alone.
        """
        outcomes = tuple(
            Outcome(name=name, **outcome.model_dump(include=_SETTLED))
            for name, outcome in config.outcomes.compared.items()
        )
        return cls(
            alpha_commit=config.alpha_commit,
            alpha_rollback=config.alpha_rollback,
            alpha_checks=config.alpha_checks,
            response_margin=config.response_margin,
            min_voices=config.min_voices if unit == "block" else 1,
            window_s=config.feedback_window_seconds,
            watch_s=config.watch_seconds,
            watch_share=config.watch_share,
            max_s=config.max_seconds,
            before_s=config.before_seconds,
            session_s=0.0 if config.outcomes.session_end is None else config.outcomes.session_end.after_seconds,
            outcomes=outcomes,
            human=human.model_copy(update={"model": None}),  # votes alone
            kinds=kinds,
        )

    def to_json(self) -> dict[str, Any]:
        """As records keep it."""
        return self.model_dump(mode="json")

    @property
    def predicted_by(self) -> str | None:
        """The component of the reward that feedback is corrected by, if any."""
        return next((outcome.predicted_by for outcome in self.outcomes if outcome.predicted_by is not None), None)

    @property
    def for_statistics(self) -> statistics.Plan:
        return statistics.Plan(
            alpha_commit=self.alpha_commit,
            alpha_rollback=self.alpha_rollback,
            alpha_checks=self.alpha_checks,
            response_margin=self.response_margin,
        )
