"""The lake's feedback as sets for other trainers: ``datasets`` loads them unchanged, and TRL trains on them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import pyarrow as pa

from feedback import datasets
from feedback.exchange import ExportForm, Style, trl
from feedback.lake.tables import Lake
from feedback.sampling_parameters import RESERVED

NO_MESSAGES: Final = "with a prompt that is no chat messages"
NO_TEXT: Final = "with a prompt of token ids alone"
OTHER_TIME: Final = "of another time"
OTHER_TENANT: Final = "of another tenant"
OTHER_POLICY: Final = "not sampled by that policy alone"

_OF_POLICY: Final = "list_distinct([span.policy_version FOR span IN policy_spans]) = [?::BIGINT]"


@dataclass(frozen=True)
class Filter:
    """Which rows: ``since`` <= time < ``until``, of the feedback (prompts: of the request). None: any."""

    since: datetime | None = None
    until: datetime | None = None
    policy: int | None = None
    tenant: str | None = None


@dataclass(frozen=True)
class Exported:
    """A set. ``conversational``: its prompts are messages. ``left_out``: what is not in it, by reason."""

    table: pa.Table
    conversational: bool
    left_out: dict[str, int]
    versions: dict[str, int]


def export(lake: Lake, form: ExportForm, only: Filter, style: Style = "auto") -> Exported:
    """The lake's rows in a format, oldest first; prompts the last one first.

    Args:
        style: whether prompts are chat messages, or the text that was tokenised; auto: messages if any prompt has them.

    Raises:
        feedback.lake.tables.LakeError: it can't be read.
    """
    versions = lake.versions()
    left_out: Counter[str] = Counter()
    rows = _prompts(lake, versions, only) if form == "prompts" else _feedback(lake, versions, form, only, left_out)
    conversational = style == "messages" or (style == "auto" and any(row["messages"] for row in rows))
    columns: dict[str, pa.DataType | None] = {"prompt": None, **_COLUMNS[form]}
    if form == "prompts":
        columns |= {name: pa.string() for name in sorted({name for row in rows for name in row["metadata"]})}
    written = []
    for row in rows:
        try:
            written.append({"prompt": _prompt(row, conversational), **_WRITERS[form](row, conversational)})
        except trl.UnfitError as error:
            left_out[str(error)] += 1
    table = pa.Table.from_pylist(written, schema=trl.schema(columns, conversational=conversational))
    return Exported(table, conversational, {why: n for why, n in sorted(left_out.items()) if n}, versions)


def _prompts(lake: Lake, versions: Mapping[str, int], only: Filter) -> list[dict[str, Any]]:
    conditions = {
        "created_at >= ?::TIMESTAMPTZ": only.since,
        "created_at < ?::TIMESTAMPTZ": only.until,
        "tenant = ?": only.tenant,
        _OF_POLICY: only.policy,
    }
    wanted = {condition: value for condition, value in conditions.items() if value is not None}
    where = " AND ".join(wanted) or "true"
    found = datasets.prompts(lake, versions=versions, where=where, parameters=list(wanted.values()))
    return [
        {
            "prompt": of.prompt,
            "messages": of.messages,
            "metadata": {
                f"metadata.{name}" if name == "prompt" else name: value
                for name, value in of.metadata.items()
                if not name.startswith(RESERVED)
            },
        }
        for of in found
    ]


def _feedback(
    lake: Lake, versions: Mapping[str, int], form: ExportForm, only: Filter, left_out: Counter[str]
) -> list[dict[str, Any]]:
    found = _DATASETS[form](lake, versions=versions)
    left_out.update(found.left_out)
    sampled = None if only.policy is None else _responses_of(lake, versions, only.policy)
    rows = []
    for row in found.table.to_pylist():
        ids = {row[name] for name in ("response_id", "chosen_response_id", "rejected_response_id") if row.get(name)}
        if (only.since and row["created_at"] < only.since) or (only.until and row["created_at"] >= only.until):
            left_out[OTHER_TIME] += 1
        elif only.tenant is not None and row["tenant"] != only.tenant:
            left_out[OTHER_TENANT] += 1
        elif sampled is not None and not ids <= sampled:
            left_out[OTHER_POLICY] += 1
        else:
            rows.append(row)
    return rows


def _responses_of(lake: Lake, versions: Mapping[str, int], policy: int) -> set[str]:
    query = f"SELECT response_id FROM interactions WHERE {_OF_POLICY}"
    read = {"interactions": versions["interactions"]}
    found = lake.read(lambda views: views.execute(query, [policy]).fetchall(), versions=read, tables=read)
    return {response_id for (response_id,) in found}


def _prompt(row: Mapping[str, Any], conversational: bool) -> trl.Prompt:
    if not conversational:
        if row["prompt"] is None:
            raise trl.UnfitError(NO_TEXT)
        return str(row["prompt"])
    if row["messages"] is None:
        raise trl.UnfitError(NO_MESSAGES)
    return [trl.text_message(message) for message in json.loads(row["messages"])]


# ------------------------------------------------------------------------------------------------- by format

_DATASETS: Final[dict[str, Callable[..., datasets.Dataset]]] = {
    "trl-preference": datasets.preference_pairs,
    "trl-kto": datasets.thumbs,
    "trl-sft": datasets.demonstrations,
}

_COLUMNS: Final[dict[ExportForm, dict[str, pa.DataType | None]]] = {
    "trl-preference": {"chosen": None, "rejected": None},
    "trl-kto": {"completion": None, "label": pa.bool_()},
    "trl-sft": {"completion": None},
    "prompts": {},
}


def _completions(**columns: str) -> Callable[[Mapping[str, Any], bool], dict[str, Any]]:
    """Columns of completions, each by the dataset's column that has its text."""

    def write(row: Mapping[str, Any], conversational: bool) -> dict[str, Any]:
        if not all(row[column] for column in columns.values()):
            raise trl.UnfitError(trl.EMPTY)
        return {name: trl.completion(row[of], conversational=conversational) for name, of in columns.items()}

    return write


_kto_completion: Final = _completions(completion="response")

_WRITERS: Final[dict[ExportForm, Callable[[Mapping[str, Any], bool], dict[str, Any]]]] = {
    "trl-preference": _completions(chosen="chosen", rejected="rejected"),
    "trl-kto": lambda row, chat: {**_kto_completion(row, chat), "label": row["desirable"]},
    "trl-sft": _completions(completion="text"),
    "prompts": lambda row, _: dict(row["metadata"]),
}
