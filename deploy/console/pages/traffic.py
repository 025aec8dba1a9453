"""Traffic: a search over what was answered, and one interaction with all that is known of it."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import urlencode

from deploy.config.root import Settings
from deploy.console.pages import rows
from deploy.console.pages.rows import PAGE, Search
from deploy.console.pages.tokens import tokens_of
from deploy.console.pages.visit import Answer, NotThere, Visit
from deploy.console.pages.visit import page as shown
from evaluation.suites.held_out import HeldOut
from feedback.lake.tables import Lake
from serve.policies.store import PolicyError, PolicyNotFound, PolicyStore

log = logging.getLogger(__name__)

_LARGEST: Final = 2**63 - 1  # of the lake's whole numbers


def page(settings: Settings, visit: Visit) -> Answer:
    """The newest interactions that fit the query; a part of the page where htmx asks for one."""
    try:
        search, wrong = _search(visit.query), None
    except ValueError as error:
        search, wrong = Search(), str(error)
    found = rows.read(settings, lambda connection: rows.found(connection, visit.tenant, search))
    more = None
    if len(found) > PAGE:
        last = found[PAGE - 1]
        kept = {name: value for name, value in visit.query.items() if value and name not in ("before", "part")}
        more = urlencode(kept | {"before": f"{last['created_at'].isoformat()}~{last['response_id']}"})
    for row in found:
        row["asked"] = messages_of(row)[-1]["content"] if row["messages"] else row["prompt"] or ""
    template = "traffic/rows" if visit.query.get("part") == "rows" else "traffic"
    return shown(template, visit, here="traffic", found=found[:PAGE], more=more, wrong=wrong, query=visit.query)


def one(settings: Settings, visit: Visit) -> Answer:
    """One interaction; with ``part`` = tokens, only those."""
    response_id, store = visit.path["response_id"], settings.policy_store()
    row = rows.read(settings, lambda connection: rows.one(connection, visit.tenant, response_id))
    if row is None:
        raise NotThere(f"There is no response {response_id[:100]} of {visit.tenant}.")
    values: dict[str, Any] = {"row": row, "tokens": tokens_of(row, store)}
    if visit.query.get("part") == "tokens":
        return shown("traffic/tokens", visit, **values)
    values |= {"messages": messages_of(row), "held_out": held_out(settings, row)}
    values["learned"] = learned(settings.lake(), store, row)
    return shown("interaction", visit, here="traffic", **values)


def messages_of(row: Mapping[str, Any]) -> list[dict[str, str]]:
    """The chat that was answered; a plain prompt is what a user said."""
    if row["messages"]:
        chat = json.loads(row["messages"])
        return [{"role": str(one.get("role")), "content": _text(one.get("content"))} for one in chat]
    prompt = f"{row['prompt_tokens']} token ids" if row["prompt"] is None else row["prompt"]
    return [{"role": "prompt", "content": prompt}]


def _text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def held_out(settings: Settings, row: Mapping[str, Any]) -> float | None:
    """The share of prompts that is held out, if this one is of it, so that nothing is trained on it; else None."""
    share = max(settings.evaluation.holdout, settings.train.data.holdout)
    if row["prompt"] is None and not row["messages"]:  # token ids, which only a tokenizer could tell
        return None
    return share if HeldOut(share=share).in_slice(row) else None


def learned(
    lake: Lake, store: PolicyStore, row: Mapping[str, Any], *, feedback: str | None = None
) -> list[dict[str, Any]]:
    """The policies that learned from this response's prompt and read the lake with the response in it, rising.

    ``feedback``: the id of one that was given on the response; then only those that read it too.
    ``known``: False where a policy's manifest does not say from which prompts it learned, so that it may have.
    """
    from feedback.maintenance.erasure import was_visible

    wanted = {"interactions": row["response_id"]} | ({} if feedback is None else {"feedback": feedback})
    keys = set[str]() if row["prompt"] is None else HeldOut().keys(row)
    found, visible = list[dict[str, Any]](), False
    for version in store.versions():
        try:
            policy = store.get(version)
            versions = policy.lineage.get("lake_versions") or {}
            if not wanted.keys() <= versions.keys() or datetime.fromisoformat(policy.created_at) < row["created_at"]:
                continue
        except PolicyNotFound:  # its run has just withdrawn it
            continue
        try:
            prompts = store.own_prompts(policy)
        except PolicyError as error:  # damaged, or not to be had now
            log.warning("what policy %d learned from is not known: %s", version, error)
            prompts = None
        visible = visible or all(  # later reads have it too
            was_visible(lake, table, {one}, versions[table]) for table, one in wanted.items()
        )
        if visible and (prompts is None or not keys or not keys.isdisjoint(prompts)):
            found.append({"version": version, "known": prompts is not None and bool(keys)})
    return found


def _search(query: Mapping[str, str]) -> Search:
    """Raises ValueError that names the field."""

    def number(name: str, kind: type[int] | type[float]) -> Any:
        if not (text := query.get(name, "").strip()):
            return None
        try:
            value = kind(text)
            if isinstance(value, int) and abs(value) > _LARGEST:
                raise ValueError
            return value
        except ValueError:
            raise ValueError(f"{name.replace('_', ' ')}: {text[:50]!r} is no number") from None

    at, _, response_id = query.get("before", "").partition("~")
    try:
        found = datetime.fromisoformat(at) if at else None
        # In UTC, as the days are by which rows lie in the lake.
        before = None if found is None else (found.replace(tzinfo=found.tzinfo or UTC).astimezone(UTC), response_id)
    except (ValueError, OverflowError):
        raise ValueError(f"before: {at[:50]!r} is no time") from None
    text = {name: query.get(name, "").strip() or None for name in ("text", "user", "session", "feedback", "period")}
    return Search(
        **text,
        policy=number("policy", int),
        reward_below=number("reward_below", float),
        reward_above=number("reward_above", float),
        before=before,
    )
