"""What came of all trials: counted from two sides, what the users noted and what the lake holds, and the bars."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from scipy.stats import binom

from deploy.config.root import Settings
from deploy.examples.demo.summary import both_sides
from deploy.examples.live.trial import Trial, verify
from serve.generation.interaction_rows import BLOCK, DRAW
from serve.policies.experiments import FALLBACK, unit_of

_SURE: Final = 0.99
MUST_BE_0: Final = (
    *("failed_requests", "interactions_lost", "interactions_not_acknowledged", "feedback_lost"),
    *("feedback_not_acknowledged", "wrong_labels", "wrong_versions", "wrong_sources", "mislabelled"),
)


def most_errors(experiments: int, alpha: float) -> int:
    """How many errors of a chance of ``alpha`` each are exceeded in one of a hundred such sets of experiments."""
    return int(binom.ppf(_SURE, experiments, alpha))


def figures(
    settings: Settings,
    account: list[dict[str, Any]],
    prompts: Path,
    equal: Sequence[Trial],
    harmful: Sequence[tuple[float, Trial]],
) -> dict[str, Any]:
    """All figures of the last line. ``equal``: trials of copies; ``harmful``: (strength of the noise, trial)."""
    right = right_shares(settings, prompts)
    config = settings.evaluation.experiment
    commits = sum("commit" in trial.events for trial in equal)
    rollbacks = sum(trial.decision == "roll back" for trial in equal)
    trials = [*equal, *(trial for _, trial in harmful)]
    return {
        "a_a": {
            "experiments": len(equal),
            "false_commits": commits,
            "most_false_commits": most_errors(len(equal), config.alpha_commit),
            "false_rollbacks": rollbacks,
            "most_false_rollbacks": most_errors(len(equal), config.alpha_rollback),
            "units": statistics.median(trial.units for trial in equal) if equal else 0,
        },
        "harm": [
            {
                "noise": strength,
                "right": [round(right.get(version, 0.0), 3) for version in (trial.control, trial.candidate)],
                "decision": trial.decision,
                "units": trial.units,
                "shown_after": trial.shown_after,
                "feedbacks": feedbacks(account, trial),
                "seconds": round(trial.ended_at - trial.started_at, 1),
                "looks_killed": trial.killed,
            }
            for strength, trial in harmful
        ],
        **both_sides(settings, account),
        **labels(settings, account),
        "mislabelled": sum(trial.mislabelled for trial in trials),
        "wrong": [f"experiment {trial.number}: {what}" for trial in trials for what in trial.wrong] + verify(settings),
    }


def problems(found: dict[str, Any], trials: Sequence[Trial]) -> list[str]:
    """The promises that these figures break, each in a sentence."""
    a_a = found["a_a"]
    wrong = [*found["wrong"]]
    for what in ("commits", "rollbacks"):
        if (count := a_a[f"false_{what}"]) > (most := a_a[f"most_false_{what}"]):
            wrong.append(
                f"{count} false {what} in {a_a['experiments']} experiments without a difference, {most} at most"
            )
    wrong += [f"{found[name]} {name.replace('_', ' ')}" for name in MUST_BE_0 if found[name]]
    wrong += [
        f"noise of {one['noise']:g} was not rolled back, but {one['decision']}"
        for one in found["harm"]
        if one["decision"] != "roll back"
    ]
    for trial in trials:
        if (trial.events.count("start"), trial.events.count("end")) != (1, 1):
            wrong.append(f"experiment {trial.number} has the entries {', '.join(trial.events)}")
    return wrong


def feedbacks(account: list[dict[str, Any]], trial: Trial) -> int:
    """How many were acknowledged from its start until the control served alone again."""
    return sum(
        entry["ok"] and entry["kind"] == "feedback" and trial.started_at <= entry["at"] <= trial.ended_at
        for entry in account
    )


def labels(settings: Settings, account: list[dict[str, Any]]) -> dict[str, int]:
    """Rows whose label, policy or source is not what follows from the draw and from what the users were told.

    ``unlabelled``: rows that waited while the policies were exchanged; ``fallbacks``: those answered outside the draw.
    """
    experiments = settings.policy_store().experiments
    known = {number: experiments.get(number) for number in experiments.numbers()}
    found = Counter[str]()
    last_version: dict[str, int] = {}
    with settings.lake().connect() as connection:
        rows = connection.execute(
            f"""
            SELECT response_id, experiment, variant, propensity, element_at(metadata, '{BLOCK}')[1],
                   element_at(metadata, '{DRAW}')[1], policy_spans[1].policy_version, policy_spans[-1].policy_version,
                   tenant, "user", session_id, request_id, epoch(created_at)
            FROM interactions
            """
        ).fetchall()
        [(found["wrong_sources"],)] = connection.execute(
            'SELECT count(*) FROM feedback JOIN interactions USING (response_id) WHERE source IS DISTINCT FROM "user"'
        ).fetchall()
    for response, number, variant, propensity, block, draw, first, last, tenant, user, session, request, at in rows:
        last_version[response] = last
        if variant == FALLBACK:
            found["fallbacks"] += 1
        elif number is None:
            found["unlabelled"] += block is not None or draw is not None
        elif draw is None:
            turn = known[number].turn(int(block))
            found["wrong_labels"] += (variant, propensity, first) != (turn.variant, turn.propensity, turn.version)
        else:
            due = known[number].assign(unit_of(tenant, user=user, session=session, request=request), at)
            label = (due.draw, due.variant, due.propensity, due.version)
            found["wrong_labels"] += (draw, variant, propensity, first) != label
        found["labelled"] += number is not None and variant != FALLBACK
    for entry in account:
        if entry["ok"] and entry["kind"] == "generate":
            newest = max(last_version.get(response, 0) for response in entry["ids"])
            found["wrong_versions"] += newest != entry["policy_version"]
    names = ("labelled", "unlabelled", "fallbacks", "wrong_labels", "wrong_versions", "wrong_sources")
    return {name: int(found[name]) for name in names}


def right_shares(settings: Settings, prompts: Path) -> dict[int, float]:
    """The share of right answers of each policy, by the known truth."""
    answers = {row["prompt"]: row["answer"] for row in map(json.loads, prompts.read_text().splitlines())}
    with settings.lake().connect() as connection:
        rows = connection.execute(
            "SELECT policy_spans[1].policy_version, prompt, response FROM interactions WHERE status = 'complete'"
        ).fetchall()
    asked, right = Counter[int](), Counter[int]()
    for version, prompt, response in rows:
        asked[version] += 1
        right[version] += response == answers[prompt]
    return {version: right[version] / count for version, count in asked.items()}
