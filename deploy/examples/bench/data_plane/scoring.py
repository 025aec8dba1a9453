"""Scoring under load: its rate, and whether it stays flat as history grows."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from feedback.config import FeedbackConfig, LakeConfig
from feedback.lake.tables import Lake
from feedback.schema import TABLES, conform
from feedback.scoring.run import score

_SAMPLES = 3  # of the rate of scoring the whole history
_COMMIT_ROWS = 250_000
_TOKENS = (6, 2)
_THUMBED = 3  # one response in three has a thumb
_START = datetime(2026, 1, 1, tzinfo=UTC)

# Ids as UUIDv7 has them: they grow with time, and no two have the same random part.
_ID = "printf('%08x-%04x-7%03x-8123-%012x', i // 65536, i & 65535, i & 4095, hash(i) >> 16)"
_INTERACTIONS = """
SELECT {id} AS response_id, {id} AS request_id, NULL::VARCHAR AS session_id, 'user-' || i % 1000 AS user,
       'default' AS tenant, '/generate' AS endpoint, 'replica-0' AS replica, NULL::VARCHAR AS variant,
       TIMESTAMPTZ '{at}' + to_microseconds(i * 1000) AS created_at,
       TIMESTAMPTZ '{at}' + to_microseconds(i * 1000 + 500) AS completed_at,
       NULL::VARCHAR AS messages, i % 90 || ' + ' || i % 7 || ' =' AS prompt,
       [CASE k WHEN 0 THEN i // 4 % 5000 WHEN 1 THEN i // 20000 ELSE 11 + k END
        FOR k IN range({prompt_tokens})]::INTEGER[] AS prompt_token_ids,
       (i % 90 + i % 7 + i % 2)::VARCHAR AS response,
       [21 + (k + i) % 1000 FOR k IN range({response_tokens})]::INTEGER[] AS response_token_ids,
       [-0.25 * (1 + (k + i) % 7) FOR k IN range({response_tokens})]::FLOAT[] AS logprobs,
       [{{'start': 0::INTEGER, 'policy_version': 1::BIGINT}}] AS policy_spans,
       {{'temperature': 1::FLOAT, 'top_p': 1::FLOAT, 'top_k': 0::INTEGER, 'min_p': 0::FLOAT,
         'max_tokens': 8::INTEGER, 'n': 1::INTEGER, 'seed': NULL::BIGINT, 'stop': []::VARCHAR[]}} AS sampling,
       'stop' AS finish_reason, 'complete' AS status,
       {{'queue_ms': 1::FLOAT, 'first_token_ms': 2::FLOAT, 'total_ms': 3::FLOAT}} AS timings,
       MAP {{'answer': (i % 90 + i % 7)::VARCHAR}} AS metadata
FROM range({low}, {high}) AS numbers(i)
"""
_FEEDBACK = """
SELECT 'f-' || i AS feedback_id, {id} AS response_id, 'thumb' AS kind, (i % 2)::DOUBLE AS value,
       NULL::VARCHAR AS text, NULL::VARCHAR AS name, NULL::VARCHAR AS rejected_response_id, 'user' AS source,
       'default' AS tenant, TIMESTAMPTZ '{at}' + to_microseconds(i * 1000 + 900) AS created_at
FROM range({low}, {high}) AS numbers(i) WHERE i % {thumbed} = 0
"""


def scoring(
    folder: Path, config: FeedbackConfig, *, history: int, small: int, fresh: int, turns: int
) -> dict[str, Any]:
    """Score a history at once, then what is new beside it and beside a ``small`` one, in turns; the seconds.

    ``new``: ``fresh`` rows; ``late``: thumbs alone, on a hundred responses from all over the history. Each is measured
    on a fresh copy of the history, so that neither grows with the turns. ``scoring_rows_per_s``: of the history, scored
    in several copies of it.
    """

    def scoring_of(lake: Lake, rows: int) -> float:
        started = time.perf_counter()
        scored = score(lake, config.scoring, config.kinds).scored
        elapsed = time.perf_counter() - started
        if scored != rows:
            raise AssertionError(f"{scored} responses were scored, not {rows}")
        return elapsed

    sizes, rates = {"large": history, "small": small}, list[float]()
    for name, size in sizes.items():
        lake = Lake(str(folder / name), config.lake)
        lake.create()
        fill(lake, 0, size)
    for _ in range(_SAMPLES - 1):
        with _copy(folder / "large", config.lake) as lake:
            rates.append(history / scoring_of(lake, history))
    rates.append(history / scoring_of(Lake(str(folder / "large"), config.lake), history))
    scoring_of(Lake(str(folder / "small"), config.lake), small)
    seconds: dict[str, list[float]] = {f"{name} {kind}": [] for kind in ("new", "late") for name in sizes}
    for turn in range(turns):
        for kind in ("new", "late"):
            for name in sizes if turn % 2 == 0 else reversed(sizes):
                with _copy(folder / name, config.lake) as lake:
                    if kind == "new":
                        fill(lake, sizes[name], sizes[name] + fresh)
                    rows = fresh if kind == "new" else _late(lake, sizes[name], turn)
                    seconds[f"{name} {kind}"].append(scoring_of(lake, rows))
    return {
        "history": history,
        "scoring_rows_per_s": rates,
        "fresh_rows": fresh,
        "seconds": seconds,
        "memory_limit": config.scoring.memory_limit,
    }


@contextmanager
def _copy(folder: Path, config: LakeConfig) -> Iterator[Lake]:
    """A lake of the same files, by hard links: no file of a lake is ever written again, only replaced."""
    copy = folder.with_name(f"{folder.name}-copy")
    shutil.copytree(folder, copy, copy_function=os.link)
    try:
        yield Lake(str(copy), config)
    finally:
        shutil.rmtree(copy)


def fill(lake: Lake, low: int, high: int, *, tokens: tuple[int, int] = _TOKENS) -> None:
    """Append rows ``low`` to ``high`` of the traffic, in commits of a compacted file's size.

    ``tokens``: of each prompt and of each response. Four responses each have one prompt.
    """
    rows = max(1, _COMMIT_ROWS * sum(_TOKENS) // sum(tokens))
    for at in range(low, high, rows):
        end = min(high, at + rows)
        for table, sql in (("interactions", _INTERACTIONS), ("feedback", _FEEDBACK)):
            lake.append(table, _rows(table, sql, at, end, tokens))


def _late(lake: Lake, history: int, turn: int) -> int:
    """Thumbs on a hundred old responses that had none."""
    wanted = {at - at % _THUMBED + 1 for at in range(turn, history - _THUMBED, max(1, history // 100))}
    chosen = f"i IN ({', '.join(map(str, sorted(wanted)))})"
    table = _rows("feedback", _FEEDBACK.replace("i % {thumbed} = 0", chosen), 0, history)
    at = TABLES["feedback"].get_field_index("feedback_id")
    ids = pa.array([f"late-{turn}-{number}" for number in range(table.num_rows)])
    lake.append("feedback", table.set_column(at, TABLES["feedback"].field(at), ids))
    return table.num_rows


def _rows(table: str, sql: str, low: int, high: int, tokens: tuple[int, int] = _TOKENS) -> pa.Table:
    at = _START.isoformat(sep=" ", timespec="seconds")
    values = {"id": _ID, "at": at, "low": low, "high": high, "thumbed": _THUMBED}
    values |= dict(zip(("prompt_tokens", "response_tokens"), tokens, strict=True))
    with duckdb.connect() as connection:
        rows = connection.sql(sql.format(**values)).to_arrow_table()
    return conform(rows, TABLES[table])
