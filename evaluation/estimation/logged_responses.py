"""Responses of traffic that importance weighting can use, and why others are left out.

One can be used whose behaviour logprobs are those of the whole softmax: sampled by one known policy, not greedily, with
nothing cut off or penalised. A response that was not to be stored is in no table, and is not counted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final, Literal

from feedback.lake.erasure_registry import meant_by_pending, needed_columns
from feedback.lake.tables import Lake
from feedback.sampling_parameters import STOP_TOKEN_IDS, altered_by, other_parameters
from feedback.schema import IMPORTED

UNREWARDED: Final = "without a reward"
BEING_ERASED: Final = "being erased"
NO_TOKENS: Final = "without tokens"
NO_LOGPROBS: Final = "without the logprobs of their tokens"
GREEDY: Final = "greedy"
UNKNOWN_POLICY: Final = "of an unknown policy"
SEVERAL_POLICIES: Final = "of several policies in one response"
TOO_LONG: Final = "longer than the candidate's context"

_STATUS: Final = {
    IMPORTED: "imported",
    "redacted": "redacted",
    "aborted": "cut off: the client left, or the server stopped",
    "error": "that failed",
}
"""Why a response of that status is left out."""

_COLUMNS: Final = (
    *("response_id", "request_id", "session_id", "user", "tenant", "created_at", "status", "prompt", "messages"),
    *("prompt_token_ids", "response", "response_token_ids", "logprobs", "policy_spans", "sampling", "metadata"),
)
_NEWEST: Final = f"""
SELECT {", ".join(dict.fromkeys((*_COLUMNS, *needed_columns("interactions"))))}, reward
FROM interactions LEFT JOIN current_rewards USING (response_id)
WHERE ? IS NULL OR created_at >= ?
ORDER BY created_at DESC, response_id DESC
LIMIT ?
"""
_OF_PROMPT: Final = ("prompt", "messages", "prompt_token_ids")
_AS_LOGGED: Final = ("response_id", "created_at", *_OF_PROMPT, "response", "response_token_ids")
_BATCH_ROWS: Final = 1000  # as Python lists a row takes many times its size in Arrow

ClusterKind = Literal["user", "session", "request"]


@dataclass(frozen=True)
class LoggedResponse:
    """One response that can be used. ``log_prob``: of the whole response by its behaviour policy, in nats.

    ``sampling``: vLLM's parameters by which another response to the prompt is sampled as this one was. ``cluster``
    names the user within a tenant, else the session, else the request. ``messages`` is JSON.
    """

    response_id: str
    created_at: datetime
    cluster: tuple[ClusterKind, str, str]
    prompt: str | None
    messages: str | None
    prompt_token_ids: list[int]
    response: str
    response_token_ids: list[int]
    log_prob: float
    sampling: Mapping[str, Any]
    reward: float

    @property
    def temperature(self) -> float:
        """At which it was sampled, above 0."""
        return float(self.sampling["temperature"])

    def prompt_columns(self) -> dict[str, Any]:
        """What ``HeldOut`` reads."""
        return {name: getattr(self, name) for name in _OF_PROMPT}


@dataclass(frozen=True)
class LoggedTraffic:
    """The newest responses of traffic: those that can be used, newest first, and how many others, by reason.

    ``considered``: all of them. ``rewarded``: those with a reward, usable or not. ``versions``: the lake's, at which
    they were read.
    """

    responses: tuple[LoggedResponse, ...]
    left_out: dict[str, int]
    considered: int
    rewarded: int
    versions: dict[str, int]

    def without(self, ids: Collection[str], reason: str) -> LoggedTraffic:
        """The same with some usable responses left out for that reason."""
        kept = tuple(response for response in self.responses if response.response_id not in ids)
        if not (lost := len(self.responses) - len(kept)):
            return self
        return replace(self, responses=kept, left_out=self.left_out | {reason: self.left_out.get(reason, 0) + lost})


def read_logged(lake: Lake, policy: int, *, since: datetime | None = None, limit: int) -> LoggedTraffic:
    """The responses that a policy sampled, of the newest ``limit`` of all sealed traffic, and not older than ``since``.

    Raises LakeError if there is no lake, ValueError if the limit is below 1.
    """
    if limit < 1:
        raise ValueError(f"limit ({limit}) must be at least 1")
    rows, versions = lake.read(
        lambda views: (
            views.sql(_NEWEST, params=[since, since, limit]).to_arrow_table(),
            views.sql("SELECT getvariable('versions')").fetchall()[0][0],
        ),
        tables=("interactions", "rewards"),
    )
    rows = rows.append_column("erased", meant_by_pending(lake, "interactions", rows))
    found: list[LoggedResponse] = []
    left_out: Counter[str] = Counter()
    for batch in rows.to_batches(max_chunksize=_BATCH_ROWS):
        for row in batch.to_pylist():
            if reason := next(_reasons(row, policy), None):
                left_out[reason] += 1
            else:
                found.append(_response(row))
    return LoggedTraffic(
        responses=tuple(found),
        left_out=dict(left_out.most_common()),
        considered=rows.num_rows,
        rewarded=rows.num_rows - rows.column("reward").null_count,
        versions=dict(versions),
    )


def _reasons(row: Mapping[str, Any], policy: int) -> Iterator[str]:
    """Why a row can't be used, the reason that counts first; none if it can. ``policy``: whose responses can."""
    yield from not_answered_by(row, policy)
    altered = altered_by(row["sampling"], row["metadata"])
    if "temperature" in altered:
        yield GREEDY
    if altered:
        yield f"sampled with {' and '.join(altered)}"
    log_probs = row["logprobs"] or []
    if len(log_probs) != len(row["response_token_ids"]) or not math.isfinite(math.fsum(log_probs)):
        yield NO_LOGPROBS
    if row["reward"] is None:
        yield UNREWARDED


def not_answered_by(row: Mapping[str, Any], policy: int) -> Iterator[str]:
    """Why a row is not a whole response that this policy alone has sampled, the reason that counts first.

    ``row``: token ids may be their numbers; ``erased``: whether an erasure that has not gone through means it.
    """
    if row["status"] != "complete":
        yield _STATUS.get(row["status"], f"of status {row['status']}")
    if row["erased"]:
        yield BEING_ERASED
    if not row["response_token_ids"] or not row["prompt_token_ids"]:
        yield NO_TOKENS
    policies = {span["policy_version"] for span in row["policy_spans"] or ()}
    if not policies or None in policies:
        yield UNKNOWN_POLICY
    if len(policies) > 1:
        yield SEVERAL_POLICIES
    if policies != {policy}:
        yield f"of policy {', '.join(map(str, policies))}"


def _response(row: Mapping[str, Any]) -> LoggedResponse:
    sampling = row["sampling"]
    stop_token_ids = other_parameters(row["metadata"]).get(STOP_TOKEN_IDS)
    return LoggedResponse(
        **{name: row[name] for name in _AS_LOGGED},
        cluster=_cluster(row),
        log_prob=math.fsum(row["logprobs"]),
        sampling={
            "temperature": sampling["temperature"],
            "max_tokens": sampling["max_tokens"],
            "stop": sampling["stop"] or None,
            "stop_token_ids": stop_token_ids,
        },
        reward=row["reward"],
    )


def _cluster(row: Mapping[str, Any]) -> tuple[ClusterKind, str, str]:
    if row["user"]:
        return "user", row["tenant"], row["user"]
    if row["session_id"]:
        return "session", row["tenant"], row["session_id"]
    return "request", row["tenant"], row["request_id"]
