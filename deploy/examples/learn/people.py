"""Trials whose reward is a model of what people said: of thumbs alone, or of choices between two responses alone.

No rule comes near it: the simulated users know the task's, and one thumb in ten is wrong. What is measured in the end
is the truth, on prompts that no training saw.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from deploy.examples.learn import plans, trial
from deploy.examples.learn.home import Home
from deploy.examples.learn.trial import Outcome
from feedback.config import ClassifierConfig, HumanConfig, LakeConfig, ScoringConfig
from feedback.lake.tables import Lake


def outcomes(home: Home, name: str, *, steps: int | None, seed: int, **how: Any) -> dict[str, Outcome]:
    """Those of the reward model, and of the policy that learns from what it says. ``how``: as of ``trial.run``."""
    kind, model = plans.PEOPLE[name], f"{name}_reward_model"
    lake = str(lake_of(home, kind))

    def settings(algorithm: str) -> dict[str, Any]:
        return plans.settings(algorithm, plans.PLANS[algorithm], steps=steps, seed=seed)

    before = home.reward_models.latest()
    found = {model: trial.run(home, model, settings("reward_model"), lake_uri=lake, reward=None, **how)}
    trained = home.reward_models.latest()
    if trained is None or trained == before:
        return found | {name: Outcome(reason=f"there is no reward model: {found[model].reason}")}
    human = HumanConfig(model=ClassifierConfig(name=str(trained.path), device="cpu"))
    reward = ScoringConfig(human=human)
    return found | {name: trial.run(home, name, settings("grpo"), lake_uri=lake, reward=reward, **how)}


def lake_of(home: Home, kind: str) -> Path:
    """A lake with the traffic of the home's, and of its feedback one kind alone."""
    folder = home.work / f"lake-{kind}"
    whole, part = Lake(str(home.lake), LakeConfig()), Lake(str(folder), LakeConfig())
    part.create()
    for table in ("interactions", "feedback"):
        rows = whole.table(table).to_pyarrow_table().drop_columns("date")
        part.append(table, rows if table == "interactions" else rows.filter(pc.equal(rows["kind"], kind)))
    return folder
