"""How well a reward model orders right and wrong answers, on prompts that no training saw."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from deploy.examples.learn.task import TASK_SEED, held_out, wrong
from evaluation.results import Interval
from evaluation.statistics.intervals import paired_bootstrap
from feedback.config import ModelConfig
from feedback.scoring.sources.reward_model import RewardModel


def measure(trained: Path, policy: Path) -> tuple[float, float, Interval]:
    """(share of pairs ordered rightly by the model that training began with, by the trained one, the difference).

    Both score as a model does in scoring. The one that training began with, ``policy`` with a head, is written beside
    ``trained``.
    """
    before, after = separated(untrained(trained, policy)), separated(trained)
    return float(before.mean()), float(after.mean()), interval(after, before)


def interval(a: NDArray[np.float64], b: NDArray[np.float64]) -> Interval:
    """Mean of ``a - b`` with its 95 % interval over items."""
    return Interval.of(paired_bootstrap(a, b, confidence=0.95, resamples=2000, seed=0))


def separated(folder: Path) -> NDArray[np.float64]:
    """float64 [items]: 1 where the right answer has the higher score, 0 where it has the lower, a half if it is one."""
    items, rng = held_out(), random.Random(TASK_SEED)
    prompts = [item.prompt for item in items]
    model = RewardModel(ModelConfig(name=str(folder), activation="none", device="cpu"))
    chosen = scores(model, prompts, [item.answer for item in items])
    rejected = scores(model, prompts, [wrong(item, rng) for item in items])
    return (np.sign(chosen - rejected) + 1) / 2


def untrained(trained: Path, policy: Path) -> Path:
    """A folder beside ``trained`` with the model that it was before training: the policy's body, a head of zeros."""
    folder = trained.with_name(f"{trained.name}_untrained")
    config = AutoConfig.from_pretrained(trained)
    model, loaded = AutoModelForSequenceClassification.from_pretrained(policy, config=config, output_loading_info=True)
    for name in loaded["missing_keys"]:  # the head: a policy has none
        model.get_parameter(name).data.zero_()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(trained).save_pretrained(folder)
    return folder


def scores(model: RewardModel, prompts: list[str], responses: list[str]) -> NDArray[np.float64]:
    """float64 [n]. Raises ValueError for a response that the model has no score for."""
    nothing = pa.nulls(len(prompts), pa.string())
    values, reasons = model.by_row(pa.table({"prompt": prompts, "messages": nothing, "response": responses}))
    if missing := [reason for reason in reasons if reason is not None]:
        raise ValueError(f"the reward model scores {len(missing)} of {len(prompts)} responses not: {missing[0]}")
    return np.array(values, dtype=np.float64)
