"""Policies: all of them as a line of descent, and one: why it serves or does not, what changed, how it did."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

import duckdb

from deploy.config.differences import Difference, defaults, differences, of_snapshot
from deploy.config.root import ConfigError, Settings
from deploy.console.pages import rows
from deploy.console.pages.visit import Answer, NotThere, Visit
from deploy.console.pages.visit import page as shown
from deploy.display.fates import fates
from deploy.loop import promotion
from evaluation.decisions.history import History
from evaluation.decisions.ledger import LedgerError
from evaluation.results import Evaluation, Sample, load_readable
from feedback.lake.tables import Lake, LakeError
from serve.policies.store import Policy, PolicyError, PolicyNotFound, PolicyStore

log = logging.getLogger(__name__)

_SAMPLES: Final = 8
_OF_ALL: Final = ("train.", "feedback.scoring.", "feedback.kinds.", "evaluation.", "cycle.")
"""Settings by which policies are made and judged; those of the server's operation are for admins."""
_BUCKETS: Final = 48
_REWARDS: Final = """
WITH answered AS (
    SELECT response_id, epoch(created_at) AS moment FROM interactions
    WHERE tenant = $tenant AND len(policy_spans) = 1 AND policy_spans[1].policy_version = $version AND date >= $since
), rewarded AS (
    SELECT response_id, arg_max(reward, scored_at) AS reward FROM rewards SEMI JOIN answered USING (response_id)
    WHERE date >= $since GROUP BY response_id
), bounds AS (SELECT min(moment) AS start, greatest(1, max(moment) - min(moment)) / $buckets AS width FROM answered)
SELECT start + (least($buckets - 1, floor((moment - start) / width)) + 0.5) * width AS middle,
    avg(reward), count(reward), count(*)
FROM answered CROSS JOIN bounds LEFT JOIN rewarded USING (response_id)
GROUP BY 1 ORDER BY 1
"""
"""Of a policy's responses, over time: the mean reward, how many have one, how many there are."""


def page(settings: Settings, visit: Visit) -> Answer:
    """All policies, newest first."""
    store = settings.policy_store()
    pointer, served = store.serving(), _served(store)
    verdicts = _verdicts(settings)
    listed = [
        {
            "policy": policy,
            "serves": pointer is not None and pointer.version == policy.version,
            "served": policy.version in served,
            "verdict": verdicts.get(policy.sha256, [None])[-1],
        }
        for policy in reversed(_policies(store))
    ]
    moves = list(reversed(fates(store.history(), store.outcomes())))[:30]
    return shown("policies", visit, here="policies", listed=listed, moves=moves)


def one(settings: Settings, visit: Visit, *, said: str | None = None, refused: str | None = None) -> Answer:
    """One policy; ``said`` and ``refused``: what a promotion or a rollback just came to."""
    store = settings.policy_store()
    policy = _policy(store, visit)
    version, pointer = policy.version, store.serving()
    parent = _parent(store, policy)
    evaluation, damaged = _evaluation(settings.path(settings.evaluation.folder), policy)
    values: dict[str, Any] = {
        "policy": policy,
        "pointer": pointer,
        "serves": pointer is not None and pointer.version == version,
        "has_served": version in _served(store),
        "children": [one.version for one in _policies(store) if one.parent == version],
        "verdicts": list(reversed(_verdicts(settings).get(policy.sha256, []))),
        "moves": [move for move in reversed(fates(store.history(), store.outcomes())) if move.version == version],
        "changes": _changes(settings, parent, policy, visit),
        "parent": parent,
        "evaluation": evaluation,
        "damaged": damaged,
        "samples": _telling(evaluation.samples) if evaluation and visit.may("admin") else [],  # of all tenants
        "said": said,
        "refused": refused,
    }
    return shown("policy", visit, here="policies", code=409 if refused else 200, **values)


def traffic(settings: Settings, visit: Visit) -> Answer:
    """A part of the page of one policy: how it did in the tenant's traffic, and how much data its training read.

    It takes longer than the rest.
    """
    store, uri = settings.policy_store(), settings.feedback.lake.uri
    policy = _policy(store, visit)
    charts, tables = list[dict[str, Any]](), list[dict[str, Any]]()
    if "://" in uri or settings.path(uri).is_dir():  # a server makes the lake
        charts = rows.read(settings, lambda connection: _charts(connection, visit.tenant, policy))
        tables = _tables_read(settings.lake(), _parent(store, policy), policy)
    return shown("policies/traffic", visit, policy=policy, charts=charts, tables=tables)


def promote(settings: Settings, visit: Visit) -> Answer:
    """Point the servers at the policy, as ``millrace promote`` does, in the viewer's name."""
    return _move(settings, visit, back=False)


def rollback(settings: Settings, visit: Visit) -> Answer:
    """Roll back to the policy, as ``millrace rollback --to`` does, in the viewer's name."""
    return _move(settings, visit, back=True)


def _move(settings: Settings, visit: Visit, *, back: bool) -> Answer:
    form, version = visit.form or {}, int(visit.path["version"])
    why, override = form.get("why", "").strip(), form.get("override") == "yes"
    if not why:
        return one(settings, visit, refused="A reason is needed: it goes on record with your name.")
    store, ledger = settings.policy_store(), settings.ledger()
    who = f"{visit.viewer['name']} (console)"
    try:
        if back:
            promotion.rollback(store, to=version, who=who, why=why, override=override)
        else:
            promotion.promote(store, ledger, version, who=who, why=why, override=override)
        promotion.record_moves(store, ledger)
    except (promotion.PromotionRefused, PolicyError, LedgerError) as error:
        return one(settings, visit, refused=str(error))
    return one(settings, visit, said=f"The pointer names policy {version}; the servers follow within seconds.")


def _policy(store: PolicyStore, visit: Visit) -> Policy:
    """The policy that the page is about. Raises NotThere."""
    version = int(visit.path["version"])
    try:
        return store.get(version)
    except PolicyNotFound as error:
        raise NotThere(f"There is no policy {version}.") from error


def _parent(store: PolicyStore, policy: Policy) -> Policy | None:
    try:
        return None if policy.parent is None else store.get(policy.parent)
    except PolicyNotFound:
        return None


def _policies(store: PolicyStore) -> list[Policy]:
    found = []
    for version in store.versions():
        try:
            found.append(store.get(version))
        except PolicyNotFound:  # its run has just withdrawn it
            continue
    return found


def _served(store: PolicyStore) -> set[int]:
    try:
        return store.served()
    except PolicyError:  # the record is damaged: what it says no more is not shown
        return set()


def _verdicts(settings: Settings) -> dict[str, list[dict[str, Any]]]:
    """The ledger's verdicts by their candidate's sha256, oldest first."""
    found: dict[str, list[dict[str, Any]]] = {}
    for race in History.of(settings.ledger().entries()).races.values():
        entry, ruling = race[-1]
        shown = {
            "verdict": ruling.verdict,
            "incumbent": ruling.incumbent.version,
            "difference": ruling.difference,
            "items": ruling.items,
            "e_value": ruling.e_value,
            "level": ruling.plan.level,
            "metric": ruling.plan.metric,
            "reasons": ruling.reasons,
            "entry": entry.number,
            "at": entry.at,
            "who": entry.who,
        }
        found.setdefault(ruling.candidate.sha256, []).append(shown)
    return found


def _evaluation(folder: Path, policy: Policy) -> tuple[Evaluation | None, list[str]]:
    """The newest evaluation of this very policy as a candidate, on the suite that decides; and the damaged files."""
    found, damaged = load_readable(folder.glob(f"*{policy.version}-vs-*.json"))
    own = [one for one in found if one.candidate.sha256 == policy.sha256 and one.role == "success"]
    return max(own, key=lambda one: one.created_at, default=None), damaged


def _telling(samples: tuple[Sample, ...]) -> list[Sample]:
    """Those whose score changed most, then the others."""
    return sorted(samples, key=lambda one: -abs((one.candidate_score or 0) - (one.incumbent_score or 0)))[:_SAMPLES]


@dataclass(frozen=True)
class _Changes:
    """``parent``: None if the settings are compared with the defaults; ``unknown``: why the others' are not known."""

    differences: list[Difference]
    parent: int | None
    unknown: str | None = None


def _changes(settings: Settings, parent: Policy | None, policy: Policy, visit: Visit) -> _Changes | None:
    """Which settings changed since the policy's parent was trained, as far as the viewer may see them.

    Where the parent was not trained, against the defaults; None for a policy that was not trained itself.
    """
    own, above = policy.lineage, {} if parent is None else parent.lineage
    if not own.get("train"):
        return None
    version = parent.version if parent is not None and above.get("train") else None
    try:
        after = of_snapshot(settings, own.get("config"))
        before = defaults() if version is None else of_snapshot(settings, above.get("config"))
        unknown = None
    except ConfigError as error:
        after, before, unknown = {}, {} if version else {"train": defaults()["train"]}, str(error)
    if version is not None:  # with what a recipe and the data settled, which no snapshot has
        before = {**before, "train": above["train"]}
    if version is not None or unknown is not None:
        after = {**after, "train": own["train"]}
    found = [one for one in differences(before, after) if visit.may("admin") or one.key.startswith(_OF_ALL)]
    return _Changes(found, version, unknown)


def _tables_read(lake: Lake, parent: Policy | None, policy: Policy) -> list[dict[str, Any]]:
    """Of each table that the training read: its version and rows then, and how many more than at the parent's."""

    def count(table: str, version: Any) -> int | None:
        try:
            return None if type(version) is not int else lake.table(table, version, readable=False).count()
        except LakeError as error:  # the log does not reach back so far
            log.info("the rows of %s at version %s are not known: %s", table, version, error)
            return None

    before = ({} if parent is None else parent.lineage.get("lake_versions")) or {}
    found = []
    for table, version in (policy.lineage.get("lake_versions") or {}).items():
        rows, had = count(table, version), count(table, before.get(table))
        more = None if rows is None or had is None else rows - had
        found.append({"table": table, "version": version, "rows": rows, "more": more})
    return found


def _charts(connection: duckdb.DuckDBPyConnection, tenant: str, policy: Policy) -> list[dict[str, Any]]:
    """Charts of the tenant's traffic with this policy: mean reward and number of responses over time."""
    since = datetime.fromisoformat(policy.created_at).date() - timedelta(days=1)  # clocks of machines differ
    values = {"tenant": tenant, "version": policy.version, "since": since, "buckets": _BUCKETS}
    points = connection.execute(_REWARDS, values).fetchall()
    rewarded = [(at, round(mean, 4)) for at, mean, count, _ in points if count]
    counted = [(at, total) for at, *_, total in points]
    return [
        {"title": title, "x": [at for at, _ in line], "y": [value for _, value in line], "time": True}
        for title, line in (("Mean reward", rewarded), ("Responses", counted))
        if line
    ]
