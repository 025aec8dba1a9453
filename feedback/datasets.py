"""From the lake to training data. Reading the same Delta versions twice gives the same data in the same order.

Only complete responses take part, and only sealed ones. Prompts are the same if their token ids are. Feedback may be on
imported texts too, which have no token ids and no logprobs; they are no prompts, and no rollouts.
``feedback.scoring.aggregation`` decides which feedback counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import duckdb
import pyarrow as pa

from feedback.config import HumanConfig, KindsConfig
from feedback.events import EARLIER_TURN
from feedback.lake.tables import Lake
from feedback.schema import IMPORTED, INTERACTIONS, TIMESTAMP, conform
from feedback.scoring.aggregation import TIE, make_pairs, resolve
from feedback.scoring.sources.human import votes_sql

_T = TypeVar("_T")

_BATCH_ROWS: Final = 2048

_PROMPTS: Final = """
WITH complete AS (
    SELECT prompt_token_ids, prompt, messages, metadata, response_id, created_at
    FROM interactions
    WHERE status = 'complete' AND len(prompt_token_ids) > 0 AND {where}
), recent AS (
    SELECT prompt_token_ids, max(created_at) AS requested_at
    FROM complete
    GROUP BY prompt_token_ids
    ORDER BY requested_at DESC, prompt_token_ids
    LIMIT {limit}
)
SELECT prompt, messages, prompt_token_ids, metadata
FROM complete JOIN recent USING (prompt_token_ids)
QUALIFY row_number() OVER (PARTITION BY prompt_token_ids ORDER BY created_at DESC, response_id DESC) = 1
ORDER BY requested_at DESC, prompt_token_ids
"""

_LOGGED: Final = (
    "response_id",
    "prompt_token_ids",
    "response_token_ids",
    "logprobs",
    "policy_spans",
    "prompt",
    "messages",
    "response",
    "metadata",
    "created_at",
    "sampling",
    "finish_reason",
)

_ROLLOUTS: Final = f"""
SELECT {", ".join(_LOGGED)}, reward
FROM interactions JOIN current_rewards USING (response_id)
WHERE status = 'complete' AND reward IS NOT NULL
ORDER BY created_at, response_id
"""


STALE: Final = "of a policy too far from the parent"
UNKNOWN_POLICY: Final = "of an unknown policy"
TOO_LONG: Final = "longer than the context"
"""Why ``logged_prompts`` leaves a response out."""

_UNFIT: Final = f"""
CASE
    WHEN $staleness IS NOT NULL AND (
        coalesce(len(policy_spans), 0) = 0
        OR len(list_filter(policy_spans, lambda span: span.policy_version IS NULL)) > 0
    ) THEN '{UNKNOWN_POLICY}'
    WHEN list_max(list_transform(policy_spans, lambda span: abs(span.policy_version - $parent))) > $staleness
    THEN '{STALE}'
    WHEN len(prompt_token_ids) + len(response_token_ids) > $longest THEN '{TOO_LONG}'
END
"""
_LEARNABLE: Final = "status = 'complete' AND reward IS NOT NULL AND len(response_token_ids) > 0"
_LOGGED_PROMPTS: Final = f"""
SELECT response_id, created_at, session_id, prompt, messages, prompt_token_ids, sampling, metadata,
       reward::DOUBLE AS reward
FROM interactions {{but}} JOIN current_rewards USING (response_id)
WHERE {_LEARNABLE} AND {_UNFIT} IS NULL
"""
_LEFT_OUT: Final = f"""
SELECT {_UNFIT} AS reason, count(*) FROM interactions {{but}} JOIN current_rewards USING (response_id)
WHERE {_LEARNABLE} AND reason IS NOT NULL GROUP BY ALL
"""
_OF_SESSIONS: Final = """
CREATE TEMP TABLE of_sessions AS
SELECT response_id FROM interactions
WHERE status = 'complete' AND session_id IS NOT NULL
QUALIFY count(*) OVER (PARTITION BY tenant, "user", session_id) > 1
"""
_TURNS: Final = f"""
SELECT response_id, created_at, tenant, "user", session_id, prompt, messages, prompt_token_ids, response,
       response_token_ids, sampling, metadata, reward::DOUBLE AS reward, {_UNFIT} AS unfit
FROM interactions SEMI JOIN of_sessions USING (response_id) LEFT JOIN current_rewards USING (response_id)
WHERE status = 'complete' AND len(prompt_token_ids) > 0 AND len(response_token_ids) > 0
ORDER BY tenant, "user", session_id, created_at, response_id
"""
_BY_ID: Final = "SELECT {columns}, place FROM interactions JOIN wanted USING (response_id) WHERE status = 'complete'"


def _sampled(row: str, column: str) -> str:
    """A column of what a policy sampled; null where the response is imported."""
    return f"if({row}.status = '{IMPORTED}', NULL, {row}.{column})"


_PREFERENCE_PAIRS: Final = f"""
SELECT kind, feedback_id, pairs.tenant, chosen_id AS chosen_response_id, rejected_id AS rejected_response_id,
       r.prompt, r.messages, r.prompt_token_ids,
       coalesce(text, c.response) AS chosen, {_sampled("c", "response_token_ids")} AS chosen_token_ids,
       {_sampled("c", "logprobs")} AS chosen_logprobs,
       r.response AS rejected, {_sampled("r", "response_token_ids")} AS rejected_token_ids,
       {_sampled("r", "logprobs")} AS rejected_logprobs,
       r.status = '{IMPORTED}' OR coalesce(c.status = '{IMPORTED}', false) AS imported, pairs.created_at
FROM pairs
JOIN interactions r ON r.tenant = pairs.tenant AND r.response_id = rejected_id
LEFT JOIN interactions c ON c.tenant = pairs.tenant AND c.response_id = chosen_id
ORDER BY pairs.created_at, kind, rejected_id, chosen_id, feedback_id
"""

_THUMBS: Final = f"""
SELECT response_id, tenant, prompt, messages, prompt_token_ids, response,
       {_sampled("i", "response_token_ids")} AS response_token_ids, {_sampled("i", "logprobs")} AS logprobs,
       up > down AS desirable, up, down, i.status = '{IMPORTED}' AS imported, voted_at AS created_at
FROM thumbs JOIN interactions i USING (tenant, response_id)
WHERE up <> down
ORDER BY voted_at, response_id
"""

_VOTES: Final = f"""
SELECT response_id, tenant, prompt, messages, prompt_token_ids, response,
       {_sampled("i", "response_token_ids")} AS response_token_ids, human AS vote, weight,
       i.status = '{IMPORTED}' AS imported, created_at
FROM interactions i JOIN ({{votes}}) USING (tenant, response_id)
WHERE i.status IN ('complete', '{IMPORTED}') AND len(prompt_token_ids) > 0
ORDER BY created_at, response_id
"""

_DEMONSTRATIONS: Final = f"""
SELECT feedback_id, c.response_id, c.tenant, prompt, messages, prompt_token_ids, c.text, c.source,
       i.status = '{IMPORTED}' AS imported, c.created_at
FROM corrections c JOIN interactions i USING (tenant, response_id)
ORDER BY c.created_at, c.feedback_id
"""

ROLLOUTS: Final = pa.schema(
    [*(INTERACTIONS.field(name) for name in _LOGGED), pa.field("reward", pa.float64(), nullable=False)]
)
"""The columns of ``rollouts``."""

_TEXT: Final = pa.string()
_TOKENS: Final = pa.list_(pa.int32())
_LOGPROBS: Final = pa.list_(pa.float32())
_PROMPT: Final = [
    pa.field("prompt", _TEXT),  # the text that was tokenised; null if token ids came in
    pa.field("messages", _TEXT),  # JSON text of the chat messages, if the request had them
    pa.field("prompt_token_ids", _TOKENS, nullable=False),
]

PAIRS: Final = pa.schema(
    [
        pa.field("kind", _TEXT, nullable=False),  # preference, correction, thumbs: what the pair was made of
        pa.field("feedback_id", _TEXT),  # null for thumbs, where it is many
        pa.field("tenant", _TEXT, nullable=False),
        pa.field("chosen_response_id", _TEXT),  # null for a correction, as are the next tokens and logprobs
        pa.field("rejected_response_id", _TEXT, nullable=False),
        *_PROMPT,
        pa.field("chosen", _TEXT, nullable=False),
        pa.field("chosen_token_ids", _TOKENS),
        pa.field("chosen_logprobs", _LOGPROBS),  # behaviour, nats, one per token
        pa.field("rejected", _TEXT, nullable=False),
        pa.field("rejected_token_ids", _TOKENS),  # null for what was imported, as are all tokens and logprobs of it
        pa.field("rejected_logprobs", _LOGPROBS),
        pa.field("imported", pa.bool_(), nullable=False),  # either response
        pa.field("created_at", TIMESTAMP, nullable=False),  # of the last feedback that it comes from
    ]
)
"""The columns of ``preference_pairs``."""

THUMBS: Final = pa.schema(
    [
        pa.field("response_id", _TEXT, nullable=False),
        pa.field("tenant", _TEXT, nullable=False),
        *_PROMPT,
        pa.field("response", _TEXT, nullable=False),
        pa.field("response_token_ids", _TOKENS),  # null for what was imported, as are the logprobs
        pa.field("logprobs", _LOGPROBS),  # behaviour, nats, one per token
        pa.field("desirable", pa.bool_(), nullable=False),
        pa.field("up", pa.int32(), nullable=False),  # sources
        pa.field("down", pa.int32(), nullable=False),
        pa.field("imported", pa.bool_(), nullable=False),
        pa.field("created_at", TIMESTAMP, nullable=False),  # of the last vote
    ]
)
"""The columns of ``thumbs``."""

VOTES: Final = pa.schema(
    [
        pa.field("response_id", _TEXT, nullable=False),
        pa.field("tenant", _TEXT, nullable=False),
        *_PROMPT,
        pa.field("response", _TEXT, nullable=False),
        pa.field("response_token_ids", _TOKENS),  # null for what was imported
        pa.field("vote", pa.float64(), nullable=False),  # from 0 (bad) to 1 (good), as the component human
        pa.field("weight", pa.float64(), nullable=False),  # the mean of the sources' weights
        pa.field("imported", pa.bool_(), nullable=False),
        pa.field("created_at", TIMESTAMP, nullable=False),  # of the response
    ]
)
"""The columns of ``votes``."""

DEMONSTRATIONS: Final = pa.schema(
    [
        pa.field("feedback_id", _TEXT, nullable=False),
        pa.field("response_id", _TEXT, nullable=False),  # the response that was corrected
        pa.field("tenant", _TEXT, nullable=False),
        *_PROMPT,
        pa.field("text", _TEXT, nullable=False),  # what somebody wrote in its place
        pa.field("source", _TEXT, nullable=False),
        pa.field("imported", pa.bool_(), nullable=False),
        pa.field("created_at", TIMESTAMP, nullable=False),
    ]
)
"""The columns of ``demonstrations``."""


@dataclass(frozen=True)
class Dataset:
    """Training data, the Delta versions that give it again, and how much was left out, by reason."""

    table: pa.Table
    versions: dict[str, int]
    left_out: dict[str, int]


@dataclass(frozen=True)
class Prompt:
    """A distinct prompt. Text and metadata are those of its last request."""

    prompt: str | None
    messages: str | None
    prompt_token_ids: list[int]
    metadata: dict[str, str] = field(default_factory=dict)


def prompts(
    lake: Lake,
    *,
    versions: Mapping[str, int] | None = None,
    limit: int | None = None,
    where: str = "true",
    parameters: Sequence[Any] = (),
) -> list[Prompt]:
    """Distinct prompts that traffic brought, the one requested last first; equal means equal token ids.

    ``limit`` is the length of the list. ``where``: SQL condition of the interactions that count, with its
    ``parameters``. Raises ValueError if the limit is below 1.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit ({limit}) must be at least 1")
    query = _PROMPTS.format(limit="ALL" if limit is None else limit, where=where)
    table, _ = _read(
        lake,
        versions,
        ("interactions",),
        lambda connection: connection.sql(query, params=list(parameters)).to_arrow_table(),
    )
    return [Prompt(**row | {"metadata": dict(row["metadata"] or ())}) for row in table.to_pylist()]


def redacted(lake: Lake, *, versions: Mapping[str, int] | None = None) -> int:
    """How many responses are left out of all datasets because they, or their prompts, were redacted."""
    query = "SELECT count(*) FROM interactions WHERE status = 'redacted'"
    [[count]], _ = _read(lake, versions, ("interactions",), lambda connection: connection.sql(query).fetchall())
    return int(count)


def count_given(lake: Lake, *, versions: Mapping[str, int] | None = None) -> int:
    """How many feedbacks were given: one on a session counts once, however many responses that has."""
    query = f"SELECT count(*) FROM feedback WHERE feedback_id NOT LIKE '{EARLIER_TURN}'"
    [[count]], _ = _read(lake, versions, ("feedback",), lambda connection: connection.sql(query).fetchall())
    return int(count)


def count_on_policy(lake: Lake, policy_version: int, *, versions: Mapping[str, int] | None = None) -> int:
    """Of the feedbacks given, how many are on responses whose last token this policy sampled."""
    query = f"""
        SELECT count(*) FROM feedback
        SEMI JOIN (
            FROM interactions SELECT tenant, response_id WHERE policy_spans[-1].policy_version = {int(policy_version)}
        ) USING (tenant, response_id)
        WHERE feedback_id NOT LIKE '{EARLIER_TURN}'
    """
    tables = ("interactions", "feedback")
    [[count]], _ = _read(lake, versions, tables, lambda connection: connection.sql(query).fetchall())
    return int(count)


def rollouts(lake: Lake, *, versions: Mapping[str, int] | None = None) -> pa.Table:
    """Logged responses that have a reward, oldest first, with the columns of ``ROLLOUTS``."""
    table, _ = _read(
        lake, versions, ("interactions", "rewards"), lambda connection: _table(connection, _ROLLOUTS, ROLLOUTS)
    )
    return table


def logged_prompts(
    lake: Lake,
    take: Callable[[Iterable[pa.RecordBatch]], _T],
    *,
    versions: Mapping[str, int],
    parent: int | None = None,
    max_staleness: int | None = None,
    longest: int | None = None,
    sessions: bool = True,
) -> tuple[_T, dict[str, int]]:
    """What ``take`` makes of the logged responses with a reward, and how many others were left out, by reason.

    It gets them in batches and in any order, without their tokens: response_id, created_at, session_id, prompt,
    messages, prompt_token_ids, sampling, metadata, reward.

    Args:
        parent: of a response's policies the one furthest from it may be ``max_staleness`` versions away.
        longest: tokens that prompt and response may have together.
        sessions: False: without those that ``logged_turns`` gives.
    """
    bounds = _bounds(parent, max_staleness, longest)
    but = "" if sessions else "ANTI JOIN of_sessions USING (response_id)"

    def read(connection: duckdb.DuckDBPyConnection) -> tuple[_T, dict[str, int]]:
        # Hash the rewards and stream past them: by its estimates DuckDB would hash the responses, all that are read.
        connection.execute("SET disabled_optimizers = 'build_side_probe_side'")
        if not sessions:
            connection.execute(_OF_SESSIONS)
        left_out = dict(connection.execute(_LEFT_OUT.format(but=but), bounds).fetchall())
        found = connection.sql(_LOGGED_PROMPTS.format(but=but), params=bounds)
        return take(found.to_arrow_reader(_BATCH_ROWS)), left_out

    return _read(lake, versions, ("interactions", "rewards"), read)[0]


def logged_turns(
    lake: Lake,
    take: Callable[[Iterable[pa.RecordBatch]], _T],
    *,
    versions: Mapping[str, int],
    parent: int | None = None,
    max_staleness: int | None = None,
    longest: int | None = None,
) -> _T:
    """What ``take`` makes of the complete responses of sessions that have several, whether they have a reward or not.

    It gets them in batches, session by session and in the order of time: response_id, created_at, tenant, user,
    session_id, prompt, messages, prompt_token_ids, response, response_token_ids, sampling, metadata, reward, and in
    ``unfit`` why ``logged_prompts`` would leave one out. A session is of one tenant and one user.
    """
    bounds = _bounds(parent, max_staleness, longest)

    def read(connection: duckdb.DuckDBPyConnection) -> _T:
        connection.execute("SET disabled_optimizers = 'build_side_probe_side'")
        connection.execute(_OF_SESSIONS)
        return take(connection.sql(_TURNS, params=bounds).to_arrow_reader(_BATCH_ROWS))

    return _read(lake, versions, ("interactions", "rewards"), read)[0]


def _bounds(parent: int | None, max_staleness: int | None, longest: int | None) -> dict[str, int | None]:
    """The parameters of ``_UNFIT``."""
    return {"parent": parent, "staleness": None if parent is None else max_staleness, "longest": longest}


def logged_responses(
    lake: Lake,
    ids: pa.Array,
    columns: Sequence[str],
    take: Callable[[Iterable[pa.RecordBatch]], _T],
    *,
    versions: Mapping[str, int],
) -> _T:
    """What ``take`` makes of these columns of the complete responses with these ids, in batches and in any order.

    ``ids``: none twice. The column ``place`` is where a row's id is among them.
    """

    def read(connection: duckdb.DuckDBPyConnection) -> _T:
        connection.execute("SET disabled_optimizers = 'build_side_probe_side'")  # hash the ids, not the responses
        connection.register("wanted", pa.table({"response_id": ids, "place": pa.array(range(len(ids)), pa.int64())}))
        return take(connection.sql(_BY_ID.format(columns=", ".join(columns))).to_arrow_reader(_BATCH_ROWS))

    return _read(lake, versions, ("interactions",), read)[0]


def preference_pairs(
    lake: Lake, *, versions: Mapping[str, int] | None = None, max_thumb_pairs_per_prompt: int = 8
) -> Dataset:
    """Pairs of a better and a worse response to the same prompt, oldest first, with the columns of ``PAIRS``.

    From explicit preferences, one pair for two responses (left out if their prompts differ: such a pair teaches which
    prompt is better); from corrections, the correction against the response; and from responses voted up against ones
    voted down on the same prompt of the same tenant, the newest first, at most ``max_thumb_pairs_per_prompt`` of them.
    ``left_out`` counts feedback that counts for nothing, and pairs. Raises ValueError if the cap is negative.
    """
    cap = max_thumb_pairs_per_prompt
    if cap < 0:
        raise ValueError(f"max_thumb_pairs_per_prompt ({cap}) must be at least 0")

    def read(connection: duckdb.DuckDBPyConnection) -> tuple[pa.Table, dict[str, int]]:
        left_out = resolve(connection, ("preference", "correction", "thumb")) | make_pairs(connection, cap)
        return _table(connection, _PREFERENCE_PAIRS, PAIRS), left_out

    return _dataset(lake, versions, read)


def thumbs(lake: Lake, *, versions: Mapping[str, int] | None = None) -> Dataset:
    """Responses that most of their voters found desirable, or not, by their last vote, with the columns of ``THUMBS``.

    ``left_out`` counts votes that count for nothing, and responses with as many for as against.
    """

    def read(connection: duckdb.DuckDBPyConnection) -> tuple[pa.Table, dict[str, int]]:
        left_out = resolve(connection, ("thumb",))
        [[ties]] = connection.execute("SELECT count(*) FROM thumbs WHERE up = down").fetchall()
        return _table(connection, _THUMBS, THUMBS), left_out | {TIE: ties}

    return _dataset(lake, versions, read)


def votes(lake: Lake, human: HumanConfig, kinds: KindsConfig, *, versions: Mapping[str, int] | None = None) -> Dataset:
    """Responses and what people's votes on each come to, as in the component human, with the columns of ``VOTES``."""
    query = _VOTES.format(votes=votes_sql("feedback", human, kinds, weighed=True))
    return _dataset(lake, versions, lambda connection: (_table(connection, query, VOTES), {}))


def demonstrations(lake: Lake, *, versions: Mapping[str, int] | None = None) -> Dataset:
    """What people wrote in place of a response, with its prompt, oldest first, with the columns of ``DEMONSTRATIONS``.

    Of the corrections of one response by one source the last counts; the same text from several stands once.
    """

    def read(connection: duckdb.DuckDBPyConnection) -> tuple[pa.Table, dict[str, int]]:
        left_out = resolve(connection, ("correction",))
        return _table(connection, _DEMONSTRATIONS, DEMONSTRATIONS), left_out

    return _dataset(lake, versions, read)


def _dataset(
    lake: Lake,
    versions: Mapping[str, int] | None,
    read: Callable[[duckdb.DuckDBPyConnection], tuple[pa.Table, dict[str, int]]],
) -> Dataset:
    (table, left_out), read_at = _read(lake, versions, ("interactions", "feedback"), read)
    return Dataset(table, read_at, left_out)


def _read(
    lake: Lake,
    versions: Mapping[str, int] | None,
    tables: Iterable[str],
    work: Callable[[duckdb.DuckDBPyConnection], _T],
) -> tuple[_T, dict[str, int]]:
    """(what ``work`` returns, the versions it has read): the latest of each table that ``versions`` lacks."""

    def read(connection: duckdb.DuckDBPyConnection) -> tuple[_T, dict[str, int]]:
        [[read_at]] = connection.execute("SELECT getvariable('versions')").fetchall()
        return work(connection), read_at

    return lake.read(read, versions=versions, tables=tables)


def _table(connection: duckdb.DuckDBPyConnection, query: str, schema: pa.Schema) -> pa.Table:
    return conform(connection.sql(query).to_arrow_table(), schema)
