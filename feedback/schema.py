"""The three tables of the lake, column by column.

Every row that Millrace records is one of these. The journal writes them as Arrow, the lake keeps them as Delta
tables partitioned by ``date`` (UTC, derived by the lake from the row's own time), DuckDB reads both.
"""

from __future__ import annotations

from typing import Final, TypeVar

import pyarrow as pa

_Rows = TypeVar("_Rows", pa.Table, pa.RecordBatch)

TIMESTAMP: Final = pa.timestamp("us", tz="UTC")

POLICY_SPAN: Final = pa.struct([("start", pa.int32()), ("policy_version", pa.int64())])
"""From response token ``start`` on, until the next span, ``policy_version`` sampled."""

SAMPLING: Final = pa.struct(
    [
        ("temperature", pa.float32()),
        ("top_p", pa.float32()),
        ("top_k", pa.int32()),
        ("min_p", pa.float32()),
        ("max_tokens", pa.int32()),
        ("n", pa.int32()),
        ("seed", pa.int64()),
        ("stop", pa.list_(pa.string())),
    ]
)

TIMINGS: Final = pa.struct([("queue_ms", pa.float32()), ("first_token_ms", pa.float32()), ("total_ms", pa.float32())])

INTERACTIONS: Final = pa.schema(
    [
        pa.field("response_id", pa.string(), nullable=False),  # UUIDv7
        pa.field("request_id", pa.string(), nullable=False),
        pa.field("session_id", pa.string()),
        pa.field("user", pa.string()),
        pa.field("tenant", pa.string(), nullable=False),
        pa.field("endpoint", pa.string(), nullable=False),
        pa.field("replica", pa.string(), nullable=False),
        # Of an experiment: candidate, control or fallback; of a fleet's deployment: canary.
        pa.field("variant", pa.string()),
        pa.field("created_at", TIMESTAMP, nullable=False),
        pa.field("completed_at", TIMESTAMP, nullable=False),
        pa.field("messages", pa.string()),  # JSON text of the chat messages, if the request had them
        pa.field("prompt", pa.string()),  # the text that was tokenised; null if token ids came in
        pa.field("prompt_token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("response", pa.string(), nullable=False),
        pa.field("response_token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float32()), nullable=False),  # behaviour, nats, one a response token
        pa.field("policy_spans", pa.list_(POLICY_SPAN), nullable=False),
        pa.field("sampling", SAMPLING, nullable=False),
        pa.field("finish_reason", pa.string()),  # stop, length, abort; null on error
        pa.field("status", pa.string(), nullable=False),  # complete, redacted (changed), aborted, error, imported
        pa.field("timings", TIMINGS, nullable=False),
        pa.field("metadata", pa.map_(pa.string(), pa.string()), nullable=False),
        pa.field("experiment", pa.int64()),  # the number of the one that the request was part of
        pa.field("propensity", pa.float64()),  # the probability with which its variant was drawn
    ]
)

FEEDBACK: Final = pa.schema(
    [
        pa.field("feedback_id", pa.string(), nullable=False),
        pa.field("response_id", pa.string(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("value", pa.float64()),
        pa.field("text", pa.string()),
        pa.field("name", pa.string()),
        pa.field("rejected_response_id", pa.string()),
        pa.field("source", pa.string(), nullable=False),
        pa.field("tenant", pa.string(), nullable=False),
        pa.field("created_at", TIMESTAMP, nullable=False),
    ]
)

REWARDS: Final = pa.schema(
    [
        pa.field("response_id", pa.string(), nullable=False),
        pa.field("reward", pa.float64()),  # null: every component is missing
        pa.field("components", pa.map_(pa.string(), pa.float64()), nullable=False),
        pa.field("missing", pa.map_(pa.string(), pa.string()), nullable=False),  # component -> why it has no value
        pa.field("scorer", pa.string(), nullable=False),  # name@content hash
        pa.field("scored_at", TIMESTAMP, nullable=False),
    ]
)

TABLES: Final[dict[str, pa.Schema]] = {"interactions": INTERACTIONS, "feedback": FEEDBACK, "rewards": REWARDS}

SCHEMA_VERSION: Final = 1
"""Of these tables. A changed column needs the next one, and a step of ``feedback/lake/upgrade.py`` that leads to it."""

IMPORTED: Final = "imported"
"""The status of an interaction that no policy of ours sampled: texts of a set of others (feedback/exchange/imports.py).

It has the prompt's token ids, and neither token ids of a response nor logprobs nor policy spans.
"""

TIME_COLUMN: Final[dict[str, str]] = {
    "interactions": "created_at",
    "feedback": "created_at",
    "rewards": "scored_at",
}
"""The column that a row's ``date`` partition is derived from."""


def conform(rows: _Rows, schema: pa.Schema) -> _Rows:
    """The rows' columns, of a table or a batch, in the types and order of ``schema``; one that is missing is null."""
    columns = [
        rows.column(field.name).cast(field.type) if field.name in rows.schema.names else pa.nulls(len(rows), field.type)
        for field in schema
    ]
    return type(rows).from_arrays(columns, schema=schema)
