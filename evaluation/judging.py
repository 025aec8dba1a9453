"""Scores of answers that nobody has the right ones to: by a judge, by a reward model, or by comparing two answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from evaluation.config import JUDGING, EvaluationConfig
from feedback.config import ClassifierConfig, HumanConfig, JudgeConfig, ModelConfig, ScoringConfig
from feedback.scoring.scorer import Source, load_rollout_sources, scorer_name

Scores = NDArray[np.float64]

_MOST_REASONS: Final = 5
_MOST_QUOTED: Final = 160


class JudgingError(RuntimeError):
    """Answers can't be judged as the settings say; the text says why."""


@dataclass(frozen=True)
class TrainingReward:
    """What training optimises: a number or None per row of a scorer's batch. Raises RuntimeError if it can't be had.

    ``unavailable``: why none can ever be had, such as a function that can't be loaded.
    """

    name: str
    rewards: Callable[[pa.Table], Sequence[float | None]]
    unavailable: str | None = None


@dataclass(frozen=True)
class Sources:
    """What of the other settings scores answers: the judge of scoring, and a reward model.

    ``version``: the reward model's in its store, None of one that is not from there; ``agreement``: with what people
    said that it did not learn from. ``none_yet``: why there is none. ``note``: what readers of the scores should know.
    ``holdout``: with another scorer than ``reward_model``, the reward model of feedback on held-out prompts, which the
    candidate is compared by beside it; ``no_holdout``: why there is none.
    """

    judge: JudgeConfig | None = None
    reward_model: ClassifierConfig | None = None
    version: int | None = None
    agreement: dict[str, float] | None = None
    none_yet: str | None = None
    note: str | None = None
    holdout: ClassifierConfig | None = None
    no_holdout: str | None = None


@dataclass(frozen=True)
class Judged:
    """Scores [items] of both policies' answers, NaN where there is none.

    ``missing``: why, by how often. ``verdicts`` [items, 2], where two answers are compared: for the candidate's as the
    first answer and as the second, from 0 to 1; NaN where the texts are equal or a verdict is missing.
    """

    candidate: Scores
    incumbent: Scores
    missing: dict[str, int] = field(default_factory=dict)
    verdicts: Scores | None = None

    @property
    def consistency(self) -> float | None:
        """The share of pairs that were judged alike in both orders; None if no pair was."""
        if self.verdicts is None:
            return None
        twice = self.verdicts[~np.isnan(self.verdicts).any(axis=1)]
        return float((twice[:, 0] == twice[:, 1]).mean()) if len(twice) else None

    def take(self, at: Sequence[int]) -> Judged:
        """The scores of some items."""
        verdicts = None if self.verdicts is None else self.verdicts[at]
        return replace(self, candidate=self.candidate[at], incumbent=self.incumbent[at], verdicts=verdicts)


class Judging:
    """The scorer ``judge``, ``reward_model`` or ``pairwise`` of an evaluation.

    ``name`` identifies all that decides its scores; ``details`` says it in words.
    """

    def __init__(self, config: EvaluationConfig, sources: Sources) -> None:
        """Raises JudgingError for want of a judge or a reward model, and what a source raises that can't be loaded."""
        self.kind = cast(Literal["judge", "reward_model", "pairwise"], config.scorer)
        assert self.kind in JUDGING
        judge, model = sources.judge, sources.reward_model
        if self.kind == "reward_model":
            if model is None:
                why = sources.none_yet or "there is none"
                raise JudgingError(f"evaluation.scorer=reward_model: there is no reward model to score by ({why})")
            self.source = reward_model_source(model)
            self.details: dict[str, Any] = {"model": model.name, "version": sources.version}
            self.details |= {"agreement": sources.agreement} if sources.agreement else {}
            self.name = scorer_name([self.source])
            return
        if judge is None:
            raise JudgingError(f"evaluation.scorer={self.kind}: feedback.scoring.judge is not set")
        judge = judge.model_copy(update={"weight": 1.0})
        shown = ("url", "model", "temperature")
        self.details = {name: getattr(judge, name) for name in shown} | ({"note": sources.note} if sources.note else {})
        if self.kind == "judge":
            self.source = _source(ScoringConfig(human=_NO_VOTES, judge=judge), self.kind)
            self.details |= {name: getattr(judge, name) for name in ("rubric", "low", "high")}
            self.name = scorer_name([self.source])
        else:
            from feedback.scoring.sources.comparison import Comparison

            self.comparison = Comparison(judge, config.comparison)
            self.details |= {"comparison": self.comparison.template}
            self.name = scorer_name([Source(self.kind, 1.0, self.comparison.identity)])

    def __call__(self, candidate: pa.Table, incumbent: pa.Table) -> Judged:
        """Score the answers of two policies to the same items.

        Args:
            candidate: the columns that a scorer sees; so has ``incumbent``.

        Raises:
            feedback.scoring.sources.reward_model.RewardModelError, JudgeCacheError: the source can't be used at all.
        """
        n = len(candidate)
        if self.kind == "pairwise":
            values, reasons, orders = self.comparison.in_both_orders(candidate, incumbent)
            scores = as_scores(values)
            return Judged(scores, 1 - scores, _counted(reasons), np.stack([as_scores(of) for of in orders], axis=1))
        assert self.source.by_row is not None
        values, reasons = self.source.by_row(pa.concat_tables([candidate, incumbent]))
        scores = as_scores(values)
        return Judged(scores[:n], scores[n:], _counted(reasons))

    @property
    def alone(self) -> Callable[[pa.Table], Scores] | None:
        """Scores answers by themselves; None where two are compared."""
        by_row = None if self.kind == "pairwise" else self.source.by_row
        return None if by_row is None else lambda batch: as_scores(by_row(batch)[0])


_NO_VOTES: Final = HumanConfig(weight=0.0)


def reward_model_source(model: ClassifierConfig) -> Source:
    """A reward model by itself. Raises RewardModelError if its files aren't there and can't be fetched."""
    alone = ModelConfig(**model.model_dump() | {"weight": 1.0})
    return _source(ScoringConfig(human=_NO_VOTES, model=alone), "reward_model")


def _source(config: ScoringConfig, name: str) -> Source:
    (source,) = load_rollout_sources(config)
    return replace(source, name=name)


def as_scores(values: Sequence[float | None]) -> Scores:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _counted(reasons: Sequence[str | None]) -> dict[str, int]:
    counted = Counter(" ".join(why.split())[:_MOST_QUOTED] for why in reasons if why)
    return dict(counted.most_common(_MOST_REASONS))
