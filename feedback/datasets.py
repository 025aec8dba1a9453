"""From the lake to training data. Reading the same Delta versions twice gives the same data in the same order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa

from feedback.lake import Lake
from feedback.schema import INTERACTIONS

_PROMPTS: Final = """
WITH complete AS (
    SELECT prompt_token_ids, prompt, messages, metadata, request_id, response_id, created_at
    FROM interactions
    WHERE status = 'complete' AND len(prompt_token_ids) > 0
), asked AS (
    SELECT prompt_token_ids, count(DISTINCT request_id) AS asked, max(created_at) AS asked_at
    FROM complete
    GROUP BY prompt_token_ids
    ORDER BY asked_at DESC, prompt_token_ids
    LIMIT {limit}
)
SELECT prompt, messages, prompt_token_ids, metadata, asked
FROM complete JOIN asked USING (prompt_token_ids)
QUALIFY row_number() OVER (PARTITION BY prompt_token_ids ORDER BY created_at DESC, response_id DESC) = 1
ORDER BY asked_at DESC, prompt_token_ids
"""

_ROLLOUTS: Final = """
SELECT i.response_id, i.prompt_token_ids, i.response_token_ids, i.logprobs, i.policy_spans, r.reward,
       i.prompt, i.response, i.metadata, i.created_at, i.sampling
FROM interactions i JOIN current_rewards r USING (response_id)
WHERE i.status = 'complete' AND r.reward IS NOT NULL AND {condition}
ORDER BY i.created_at, i.response_id
"""

_LOGGED: Final = (
    "response_id",
    "prompt_token_ids",
    "response_token_ids",
    "logprobs",
    "policy_spans",
    "prompt",
    "response",
    "metadata",
    "created_at",
    "sampling",
)
ROLLOUTS: Final = pa.schema(
    [*(INTERACTIONS.field(name) for name in _LOGGED[:5]), pa.field("reward", pa.float64(), nullable=False)]
    + [INTERACTIONS.field(name) for name in _LOGGED[5:]]
)
"""The columns of ``rollouts``."""


@dataclass(frozen=True)
class Prompt:
    """A distinct prompt. Text and metadata are those of the last time it was asked, ``asked`` counts its requests."""

    prompt: str | None
    messages: str | None
    prompt_token_ids: list[int]
    metadata: dict[str, str] = field(default_factory=dict)
    asked: int = 1


def prompts(
    lake: Lake, *, versions: Mapping[str, int] | None = None, limit: int | None = None, max_per_prompt: int = 1
) -> list[Prompt]:
    """Prompts that traffic brought, the one asked most recently first; equal means equal token ids.

    With ``max_per_prompt`` above 1 a prompt stands there as often as it was asked, up to that number, so that training
    sees the traffic's own frequencies. ``limit`` is the length of the list. Raises ValueError if either is below 1.
    """
    if max_per_prompt < 1 or (limit is not None and limit < 1):
        raise ValueError(f"limit ({limit}) and max_per_prompt ({max_per_prompt}) must be at least 1")
    with lake.connect(versions=versions) as connection:
        rows = connection.sql(_PROMPTS.format(limit="ALL" if limit is None else limit)).to_arrow_table().to_pylist()
    found: list[Prompt] = []
    for row in rows:
        prompt = Prompt(
            row["prompt"], row["messages"], row["prompt_token_ids"], dict(row["metadata"] or ()), row["asked"]
        )
        found += [prompt] * min(prompt.asked, max_per_prompt)
        if limit is not None and len(found) >= limit:
            return found[:limit]
    return found


def rollouts(lake: Lake, *, versions: Mapping[str, int] | None = None, policy_version: int | None = None) -> pa.Table:
    """Logged responses that have a reward, oldest first, with the columns of ``ROLLOUTS``.

    ``policy_version`` keeps those that this policy alone sampled, from the first token to the last.
    """
    condition = "true"
    if policy_version is not None:
        condition = (
            "len(i.policy_spans) > 0 AND "
            f"len(list_filter(i.policy_spans, lambda span : span.policy_version <> {int(policy_version)})) = 0"
        )
    with lake.connect(versions=versions) as connection:
        rows = connection.sql(_ROLLOUTS.format(condition=condition)).to_arrow_table()
    return pa.Table.from_arrays([rows.column(f.name).cast(f.type) for f in ROLLOUTS], schema=ROLLOUTS)
