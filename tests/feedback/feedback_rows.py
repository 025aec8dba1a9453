"""Rows to test with."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa

from feedback.events import FeedbackIn
from feedback.journal.codec import to_batch
from feedback.journal.recovery import load_all
from feedback.journal.writer import Journal
from feedback.lake.tables import Lake
from feedback.schema import TABLES

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


def append(journal: Journal, table: str, row: dict[str, Any]) -> None:
    """Append a row, and return when it is durable, also where an event loop runs already."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: asyncio.run(journal.append(table, row))).result()


def interaction(response_id: str, **columns: Any) -> dict[str, Any]:
    return {
        "response_id": response_id,
        "request_id": f"request-of-{response_id}",
        "tenant": "default",
        "endpoint": "generate",
        "replica": "replica-0",
        "created_at": NOON,
        "completed_at": NOON,
        "prompt": "two and two",
        "prompt_token_ids": [2, 4, 2],
        "response": "four",
        "response_token_ids": [4, 0],
        "logprobs": [-0.25, -0.5],
        "policy_spans": [{"start": 0, "policy_version": 1}],
        "sampling": {"temperature": 1.0, "max_tokens": 8, "n": 1, "stop": []},
        "finish_reason": "stop",
        "status": "complete",
        "timings": {"queue_ms": 0.5, "first_token_ms": 3.0, "total_ms": 9.0},
        "metadata": {"answer": "four"},
    } | columns


def thumb(response_id: str, value: float, **columns: Any) -> dict[str, Any]:
    fields = {key: columns.pop(key) for key in ("feedback_id", "source") if key in columns}
    return FeedbackIn(response_id=response_id, kind="thumb", value=value, **fields).to_row("default") | columns


def said(feedback_id: str, response_id: str, kind: str, *, minute: int = 0, **columns: Any) -> dict[str, Any]:
    """A row of feedback, by its columns."""
    return {
        "feedback_id": feedback_id,
        "response_id": response_id,
        "kind": kind,
        "source": "ann",
        "tenant": "default",
        "created_at": NOON + timedelta(minutes=minute),
    } | columns


def reward(response_id: str, value: float | None, *, minute: int = 0, **columns: Any) -> dict[str, Any]:
    """A row of rewards, by its columns."""
    return {
        "response_id": response_id,
        "reward": value,
        "components": {} if value is None else {"human": value},
        "missing": {"human": "no vote"} if value is None else {},
        "scorer": "human@0",
        "scored_at": NOON + timedelta(minutes=minute),
    } | columns


def table_of(table: str, rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_batches([to_batch(rows, TABLES[table])])


def rows(folder: Path, table: str) -> pa.Table:
    """All rows of ``table`` in a journal, in the order in which they were written."""
    return pa.concat_tables([TABLES[table].empty_table(), *(found for _, found in load_all(folder, [table]))])


def put(lake: Lake, table: str, rows: list[dict[str, Any]]) -> None:
    lake.append(table, table_of(table, rows))
