"""The reward that training optimises beside one that it did not see, on the same answers.

The first, the *proxy*, is what rewards training's rollouts. The second, the *holdout*, is a reward model of feedback on
held-out prompts alone. A policy that rises by the proxy and falls by the holdout has learned to please the proxy (Gao
et al. 2022, arXiv 2210.10760).
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pyarrow as pa

from evaluation.config import EvaluationConfig
from evaluation.evaluate import Rate, Scoring, scorer_batch
from evaluation.judging import Scores, Sources, TrainingReward, as_scores, reward_model_source
from evaluation.suites.suite import Suite
from feedback.scoring.scorer import scorer_name


class ComparedRewards:
    """Both rewards of answers, or ``missing``: why nothing can be compared by the holdout.

    ``proxy`` and ``holdout`` identify all that decides them; None where there is none. Without the proxy, as training's
    reward can't be had, the holdout decides all the same: only what the proxy did meanwhile is not known.
    ``is_scorer``: the holdout is what the gate scores by, so that its scores are there already. ``bounds``: between
    which the holdout lies.
    """

    def __init__(
        self, config: EvaluationConfig, sources: Sources, scoring: Scoring, training_reward: TrainingReward | None
    ) -> None:
        """Raises RewardModelError if the holdout's files aren't there."""
        self.is_scorer = config.scorer == "reward_model"
        self.bounds = config.gate.reward_bounds if self.is_scorer else (0.0, 1.0)
        self.missing: str | None = None
        self.whys: Counter[str] = Counter()
        self._training_reward = training_reward
        self.proxy = None if training_reward is None or training_reward.unavailable else training_reward.name
        self.holdout: str | None = None
        self._rate: Rate | None = None
        if self.is_scorer:
            self.holdout, self._rate = scoring.name, scoring.rate
        elif sources.holdout is not None:
            source = reward_model_source(sources.holdout)
            assert source.by_row is not None
            by_row = source.by_row
            self.holdout = scorer_name([source])
            self._rate = lambda suite, table: as_scores(by_row(scorer_batch(suite, table))[0])
        if training_reward is None:
            self.missing = "nothing rewards training's responses"
        elif self.holdout is None:
            self.missing = f"there is no reward model of held-out feedback ({sources.no_holdout or 'none is named'})"

    def of_proxy(self, suite: Suite, table: pa.Table) -> Scores:
        """The proxy's rewards of a policy's answers [items]; NaN where it has none, and all of them if it fails."""
        assert self._training_reward is not None
        if self.proxy is None:
            return np.full(len(table), np.nan)
        try:
            values = as_scores(self._training_reward.rewards(scorer_batch(suite, table)))
        except RuntimeError as error:
            self.whys[str(error)] += len(table)
            return np.full(len(table), np.nan)
        return np.where(np.isfinite(values), values, np.nan)

    def of_holdout(self, suite: Suite, table: pa.Table) -> Scores:
        """The holdout's rewards of a policy's answers [items]; NaN where it has none. Raises what it raises."""
        assert self._rate is not None
        return self._rate(suite, table)
