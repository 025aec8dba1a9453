"""How well a reward model tells right answers from wrong ones, on prompts that no training saw."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from deploy.learn.task import TASK_SEED, held_out, wrong
from evaluation.results import Interval
from evaluation.statistics import paired_bootstrap
from feedback.config import ModelConfig
from feedback.rewards.model import RewardModel


def measure(folder: Path) -> tuple[float, float, Interval]:
    """(share told apart by a head that is zero, as training begins with: half; by the model; the difference).

    The model scores as it does in scoring. Raises RewardModelError if it can't.
    """
    items, rng = held_out(), random.Random(TASK_SEED)
    prompts = [item.prompt for item in items]
    model = RewardModel(ModelConfig(name=str(folder), activation="none", device="cpu"))
    chosen = scores(model, prompts, [item.answer for item in items])
    rejected = scores(model, prompts, [wrong(item, rng) for item in items])
    after = (chosen > rejected) + 0.5 * (chosen == rejected)
    before = np.full(len(items), 0.5)
    value, low, high = paired_bootstrap(after, before, confidence=0.95, resamples=2000, seed=0)
    return 0.5, float(after.mean()), Interval(value=value, low=low, high=high)


def scores(model: RewardModel, prompts: list[str], responses: list[str]) -> NDArray[np.float64]:
    """float64 [n]. Raises ValueError for a response that the model has no score for."""
    nothing = pa.nulls(len(prompts), pa.string())
    values, reasons = model.by_row(pa.table({"prompt": prompts, "messages": nothing, "response": responses}))
    if missing := [reason for reason in reasons if reason is not None]:
        raise ValueError(f"the reward model scores {len(missing)} of {len(prompts)} responses not: {missing[0]}")
    return np.array(values, dtype=np.float64)
