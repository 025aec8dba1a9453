"""What a cycle's recipe says of its training run that is not known before the cycle has scored.

The recipe `auto` becomes another one here, by how much feedback of which kind there is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from deploy.config.root import RecipeStage, Settings
from deploy.loop.preflight import reward_of
from evaluation.suites.held_out import HeldOut
from feedback.datasets import count_given
from feedback.events import EARLIER_TURN
from feedback.schema import IMPORTED
from train.config.training import TrainConfig
from train.run.resume_settings import started

_LEARNT_BY: Final = {"preference": "dpo", "thumb": "kto", "correction": "sft"}
"""By kind of feedback, the algorithm that learns from it; of kinds that there is as much of, the first."""

ANY: Final = "judged"
"""In the counts: responses that have feedback of any kind."""

_KIND_OF: Final = {algorithm: kind for kind, algorithm in _LEARNT_BY.items()}

_JUDGED: Final = f"""
SELECT kind, prompt, messages, prompt_token_ids, count(DISTINCT (tenant, response_id)) AS responses
FROM (
    FROM feedback SELECT tenant, response_id, kind WHERE kind <> 'comment' AND feedback_id NOT LIKE '{EARLIER_TURN}'
    UNION ALL FROM feedback SELECT tenant, response_id, '{ANY}' WHERE kind <> 'comment'
      AND feedback_id NOT LIKE '{EARLIER_TURN}'
) JOIN (FROM interactions WHERE status IN ('complete', '{IMPORTED}')) USING (tenant, response_id)
GROUP BY kind, prompt, messages, prompt_token_ids
"""


def stages(settings: Settings, run: Path | None = None) -> list[RecipeStage]:
    """What the cycle trains, in order; with the recipe ``offline``, by which algorithm.


    It is the one that the settings name, if that learns from feedback; else the one for the kind of feedback that most
    responses have. ``run``: the folder of one that is to go on, which keeps the algorithm that it began with.
    """
    if settings.cycle.recipe != "offline" or settings.train.algorithm.is_offline:
        return settings.cycle.stages
    start = {} if run is None else started(run)
    name = str(start["config"]["algorithm"]["name"]) if start else ""
    algorithm = name if name in _KIND_OF else _most(judged(settings))
    return [RecipeStage(stage="train", set={"algorithm": {"name": algorithm}})]


@dataclass(frozen=True)
class Choice:
    """What `auto` is in one cycle. ``settings``: with that recipe; None where there is too little to learn from."""

    recipe: str | None
    why: str
    settings: Settings | None


def choose(settings: Settings) -> Choice:
    """The recipe that `auto` stands for now.

    rlhf, if there is a reward model, or enough feedback to train one. Else what else rewards responses, if anything
    does. Else offline, if one kind of feedback is enough for a run.
    """
    train, scoring, counts = settings.train, settings.feedback.scoring, judged(settings)
    by_count = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    found = ", ".join(f"{count} {kind}" for kind, count in by_count if kind != ANY) or "none"
    if train.algorithm.is_offline:
        return _chosen(settings, "offline", f"train.algorithm.name={train.algorithm.name} learns from feedback")
    model, needed = train.reward_model, _needed(train.reward_model.min_items, train.reward_model.held_out_share)
    people = scoring.human.weight > 0 and train.reward is None and train.reward_weights.get("human") != 0
    if people and settings.resolved().feedback.scoring.human.model is not None:
        return _chosen(settings, "rlhf", "there is a reward model")
    said = count_given(settings.lake())
    if people and counts[ANY] >= needed and said >= model.min_new_feedback:
        return _chosen(settings, "rlhf", f"{counts[ANY]} judged responses are enough for a reward model ({found})")
    if reward_of(settings) is not None:
        rules = train.reward is not None or any(rule.weight for rule in scoring.rules.values())
        judged_by = scoring.judge is not None and scoring.judge.weight * train.reward_weights.get("judge", 1.0)
        recipe = "rlvr" if rules else "rlaif" if judged_by else None
        return _chosen(settings, recipe, "what else rewards responses, as there is no reward model of people's yet")
    algorithm = _most(counts)
    least = _needed(train.data.min_prompts, train.data.held_out_share)
    if counts[_KIND_OF[algorithm]] >= least:
        why = f"{algorithm} on {counts[_KIND_OF[algorithm]]} of a kind, as there is no reward model yet ({found})"
        return _chosen(settings, "offline", why, algorithm)
    why = (
        f"too little feedback to learn from: {found}. {least} thumbs, preferences or corrections are needed, or "
        f"{max(needed, model.min_new_feedback)} judged responses of any kind for a reward model"
    )
    return Choice(None, why, None)


def judged(settings: Settings) -> Counter[str]:
    """How many responses have feedback, by its kind, and of any (``ANY``).

    Those to prompts of a suite, and of the held-out slice, don't count: nothing is learned from them.
    """
    counts: Counter[str] = Counter()
    data, store = settings.training().data, settings.policy_store()
    pointer = store.serving()
    assert pointer is not None, "a cycle has a policy that serves"
    held_out = HeldOut.load(data.exclude_suites, store.get(pointer.version).path, data.holdout)
    with settings.lake().connect() as connection:
        for row in connection.sql(_JUDGED).to_arrow_table().to_pylist():
            if held_out.reason(row) is None:
                counts[row["kind"]] += row["responses"]
    return counts


def _most(counts: Mapping[str, int]) -> str:
    """The offline algorithm for the kind of feedback that most responses have."""
    return _LEARNT_BY[max(_LEARNT_BY, key=lambda kind: counts.get(kind, 0))]


def _needed(items: int, held_out_share: float) -> int:
    """How many items there must be for so many to be left when a share is held out."""
    return round(items / (1 - held_out_share))


def _chosen(settings: Settings, recipe: str | None, why: str, algorithm: str | None = None) -> Choice:
    """The settings with a recipe, and with an algorithm that takes what it doesn't read back to its defaults."""
    values: dict[str, Any] = settings.train.model_dump()
    if algorithm is not None:
        sampled = ("prompts", "traffic_share", "traffic_weight", "pass_rate")
        data = {name: value for name, value in values["data"].items() if name not in sampled}
        sizes = {name: values["rollout"][name] for name in ("max_tokens", "max_model_len")}
        values |= {"algorithm": {"name": algorithm}, "data": data, "rollout": sizes, "epochs": 1}
    try:
        train = TrainConfig.model_validate(values)
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        return Choice(None, f"{recipe} ({why}) does not go with the other settings: {reason}", None)
    cycle = settings.cycle.model_copy(update={"recipe": recipe})
    return Choice(recipe, why, settings.model_copy(update={"train": train, "cycle": cycle}))
