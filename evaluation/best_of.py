"""Best-of-n: what the incumbent reaches without training, by choosing among several responses.

A candidate that is no better than that may be worth less than it cost. The responses are chosen by what training
optimises, and scored as all others are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from evaluation.config import JUDGING, EvaluationConfig
from evaluation.judging import TrainingReward
from evaluation.results import BestOf, BestOfPoint, Interval
from evaluation.statistics import intervals
from evaluation.statistics.intervals import Floats
from evaluation.suites.suite import Suite


def sampled(suite: Suite, table: pa.Table, n: int) -> tuple[Suite, pa.Table]:
    """The first n responses that a policy sampled to each item, one a row, and the suite with each item n times."""
    responses = [sample for of_item in table.column("samples").to_pylist() for sample in of_item[:n]]
    columns = {
        "response": pa.array([sample["text"] for sample in responses], pa.string()),
        "response_token_ids": pa.array([sample["token_ids"] for sample in responses], pa.list_(pa.int32())),
    }
    return replace(suite, items=tuple(item for item in suite.items for _ in range(n))), pa.table(columns)


def estimate(
    rewards: Sequence[float | None], scores: Floats, config: EvaluationConfig, training_reward: TrainingReward
) -> tuple[BestOf | None, str | None]:
    """The estimates from rewards and scores [items * n], item by item; or None and why."""
    n = config.best_of
    proxy = np.array(rewards, dtype=np.float64).reshape(-1, n)
    truth = scores.reshape(-1, n)
    there = np.isfinite(proxy).all(axis=1) & np.isfinite(truth).all(axis=1)
    if not there.any():
        return None, f"no item has a reward by {training_reward.name} and a score for all {n} responses"

    def interval(values: Floats, k: int) -> Interval:
        expected = intervals.best_of(proxy[there], values[there], k)
        confidence, resamples, seed = config.gate.confidence, config.resamples, config.seed
        return Interval.of(intervals.bootstrap_mean(expected, confidence=confidence, resamples=resamples, seed=seed))

    points = tuple(
        BestOfPoint(
            k=k,
            reward=interval(truth, k),
            accuracy=None if config.scorer in JUDGING else interval((truth == 1).astype(np.float64), k),
            kl_bound=intervals.best_of_kl(k),
        )
        for k in sorted({n, *(2**i for i in range(n.bit_length()))})
    )
    return BestOf(
        by=training_reward.name, n=n, items=int(there.sum()), missing=int((~there).sum()), points=points
    ), None
