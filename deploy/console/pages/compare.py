"""Compare: two answers to one prompt, unnamed, of which a person chooses the better; and the answers of policies to a
suite, by name and with their scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import duckdb

from deploy.config.root import Settings
from deploy.console.pages import rows, traffic
from deploy.console.pages.visit import Answer, Visit
from deploy.console.pages.visit import page as shown
from evaluation.results import Evaluation, load_readable
from feedback.files import newest_first

_COUNT: Final = """
SELECT count(*) FROM interactions
WHERE tenant = $tenant AND status = 'complete' AND date >= $first AND created_at >= $since
"""
_PAIR: Final = """
WITH recent AS (
    SELECT response_id, date, created_at, prompt_token_ids, response, policy_spans[1].policy_version AS policy
    FROM interactions WHERE tenant = $tenant AND status = 'complete' AND date >= $first AND created_at >= $since
    ORDER BY created_at DESC LIMIT $most
), of_policies AS (
    FROM recent QUALIFY row_number() OVER (PARTITION BY prompt_token_ids, policy ORDER BY created_at DESC) <= 4
), few AS (
    FROM of_policies QUALIFY row_number() OVER (PARTITION BY prompt_token_ids ORDER BY created_at DESC) <= 16
), chosen AS (
    SELECT least(response_id, rejected_response_id) AS one, greatest(response_id, rejected_response_id) AS other
    FROM feedback WHERE tenant = $tenant AND kind = 'preference' AND date >= $first
)
SELECT a.response_id, a.date, b.response_id, b.date
FROM few a JOIN few b ON a.prompt_token_ids = b.prompt_token_ids AND a.response_id < b.response_id
    ANTI JOIN chosen ON chosen.one = a.response_id AND chosen.other = b.response_id
WHERE a.response <> b.response AND NOT list_contains($skipped::VARCHAR[], a.response_id || '~' || b.response_id)
ORDER BY a.policy = b.policy, hash(a.response_id || b.response_id) LIMIT 1
"""
"""A pair that nobody has chosen from; those of two policies come first, else in an order that tells nothing.

Of a prompt's answers only the newest few are paired: a prompt that is asked all day has millions of pairs.
"""

_MOST: Final = 5000
SHOWN: Final = 50
_EVALUATIONS: Final = 200


@dataclass(frozen=True)
class Stored:
    """A policy's answer to an item of a suite; ``expected``: the right one, where the item has one."""

    prompt: str
    expected: str | None
    answer: str
    score: float | None


def page(settings: Settings, visit: Visit) -> Answer:
    """The page with its first pair."""
    return _shown("compare", settings, visit)


def following(settings: Settings, visit: Visit) -> Answer:
    """The next pair, as a part of the page, and whose answers the pair was of that was just ``chosen`` from."""
    return _shown("compare/next", settings, visit)


def suites(settings: Settings, visit: Visit) -> Answer:
    """The answers of two policies to the items of a suite, as evaluations have kept them; at first the newest pair's.

    Items are of any tenant: it is for admins.
    """
    evaluations, damaged = _evaluations(settings.path(settings.evaluation.folder))
    kept = stored(evaluations)
    names = list(kept)
    suite = visit.query.get("suite", "")
    suite = suite if suite in kept else next(iter(names), "")
    answers = kept.get(suite, {})
    versions = list(answers)
    wanted = [version for version in (visit.query.get("a"), visit.query.get("b")) if version in answers]
    first, second = (wanted + [one for one in versions if one not in wanted] + ["", ""])[:2]
    if not wanted:  # the older one first, as it is on a policy's page
        first, second = second, first
    both = [
        (item, answers[first][item], answers[second][item])
        for item in answers.get(first, {})
        if item in answers.get(second, {})
    ]
    both.sort(key=lambda one: -abs((one[1].score or 0) - (one[2].score or 0)))
    scored = [(a.score, b.score) for _, a, b in both if a.score is not None and b.score is not None]
    values: dict[str, Any] = {"names": names, "suite": suite, "versions": versions, "first": first, "second": second}
    values |= {"both": both[:SHOWN], "count": len(both), "scored": len(scored)}
    values["damaged"] = damaged
    values["means"] = [sum(scores) / len(scored) for scores in zip(*scored, strict=True)]
    return shown("suites", visit, here="compare", **values)


def stored(evaluations: list[Evaluation]) -> dict[str, dict[str, dict[str, Stored]]]:
    """By suite, with what scored it, the answers of each policy, newest first, by the item's id.

    Of an item that a policy was evaluated on several times, the newest answer counts. A policy is its version, with
    the beginning of its sha256 where another one had that version before.
    """
    found: dict[str, dict[str, dict[str, Stored]]] = {}
    names: dict[int, str] = {}
    for one in sorted(evaluations, key=lambda one: one.created_at, reverse=True):
        suite = f"{one.name or one.suite}, scored by {one.scorer}"
        for of, result in (("candidate", one.candidate), ("incumbent", one.incumbent)):
            known = names.setdefault(result.version, result.sha256)
            policy = f"{result.version}" if known == result.sha256 else f"{result.version} ({result.sha256[:8]})"
            answers = found.setdefault(suite, {}).setdefault(policy, {})
            for sample in one.samples:
                said, score = getattr(sample, of), getattr(sample, f"{of}_score")
                answers.setdefault(sample.id, Stored(sample.prompt, sample.answer, said, score))
    return found


def _evaluations(folder: Path) -> tuple[list[Evaluation], list[str]]:
    """The newest ``_EVALUATIONS`` there are, as ``load_readable``."""
    return load_readable(newest_first(folder.glob("*-vs-*.json"))[:_EVALUATIONS])


def _shown(template: str, settings: Settings, visit: Visit) -> Answer:
    skipped = [one for one in visit.query.get("skipped", "").split(",") if one][-200:]
    chosen = visit.query.get("chosen", "").split("~")[:2]

    def work(connection: duckdb.DuckDBPyConnection) -> tuple[list[dict[str, Any]], list[str]]:
        of = [rows.one(connection, visit.tenant, response_id) for response_id in chosen if response_id]
        policies = [", ".join(map(str, row["policies"])) for row in of if row]
        return _pair(connection, visit.tenant, skipped), policies

    pair, whose = rows.read(settings, work)
    messages = traffic.messages_of(pair[0]) if pair else []
    return shown(template, visit, here="compare", pair=pair, messages=messages, whose=whose)


def _pair(connection: duckdb.DuckDBPyConnection, tenant: str, skipped: list[str]) -> list[dict[str, Any]]:
    """Both interactions; which comes first follows from their ids, and not from their policies. None: an empty list."""
    values = {"tenant": tenant, "skipped": skipped, "most": _MOST}
    for since in rows.windows(rows.newest_sealed(connection)):
        bounds = {"tenant": tenant, "since": since, "first": since.date()}
        [(count,)] = connection.execute(_COUNT, bounds).fetchall()
        if count >= _MOST:
            break
    found = connection.execute(_PAIR, values | bounds).fetchall()
    if not found:
        return []
    [(a, a_day, b, b_day)] = found
    pair = {row["response_id"]: row for row in rows.whole(connection, tenant, [(a, a_day), (b, b_day)])}
    first, second = (a, b) if _coin(a, b) else (b, a)
    return [pair[first], pair[second]]


def _coin(a: str, b: str) -> bool:
    """A coin that falls the same way whenever this pair is shown."""
    return bool(sum((a + b).encode()) & 1)
