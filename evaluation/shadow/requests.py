"""Which requests of traffic a candidate answers a copy of, and why others can't be answered again.

A hash of the response's id draws: nobody chooses, and whoever draws again draws the same. Of each user, or else of each
session, one request counts: requests of one person depend on each other, and tests are of independent ones. What was
not to be stored is in no table.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from evaluation.estimation.logged_responses import TOO_LONG, not_answered_by
from evaluation.estimation.training_reads import TrainingRead, learned_from
from evaluation.suites.held_out import HeldOut
from feedback.lake.erasure_registry import meant_by_pending, needed_columns
from feedback.lake.tables import Lake
from feedback.sampling_parameters import SAMPLING_KEY, other_parameters
from feedback.schema import INTERACTIONS
from serve.policies.experiments import unit_of

LEARNED: Final = "that the candidate may have learned from"
ANOTHER: Final = "of a user or session of which another one counts"
MEDIA: Final = "with images, audio or video, which token ids don't hold"

_MEDIA: Final = r'"(image|image_url|input_audio|audio|audio_url|video|video_url|file)"\s*:'
"""A key of a part of a message: within a text, quotation marks are escaped."""
_DIGITS: Final = 16  # of a draw, that are compared with the share
_REPEATED: Final = (
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "stop_token_ids", "logit_bias"),
    *("allowed_token_ids", "bad_words", "structured_outputs"),
)
"""Recorded parameters beyond the column ``sampling`` by which a response can be sampled again."""

_COLUMNS: Final = ("response_id", "request_id", "session_id", "user", "tenant", "created_at", "status")
_DRAWN: Final = f"""
SELECT {", ".join(dict.fromkeys((*_COLUMNS, *needed_columns("interactions"))))}, policy_spans, sampling,
    len(prompt_token_ids) AS prompt_token_ids, len(response_token_ids) AS response_token_ids,
    element_at(metadata, '{SAMPLING_KEY}')[1] AS other,
    regexp_matches(coalesce(messages, ''), '{_MEDIA}') AS media,
    substr(sha256(? || response_id), 1, {_DIGITS}) < ? AS drawn
FROM interactions
WHERE created_at >= ?
"""
_OF_REQUEST: Final = (
    *("response_id", "created_at", "prompt", "messages", "prompt_token_ids", "response", "response_token_ids"),
    *("sampling", "metadata", "finish_reason", "status"),
)
_BY_ID: Final = f"""
SELECT {", ".join(dict.fromkeys((*_OF_REQUEST, *needed_columns("interactions"))))}
FROM interactions SEMI JOIN wanted USING (response_id)
WHERE status = 'complete'
"""


@dataclass(frozen=True)
class Drawn:
    """A request that was drawn. ``unit`` and ``draw``: 32 hexadecimal digits each, others in every shadow."""

    response_id: str
    unit: str
    draw: str
    created_at: datetime

    def prompt_columns(self) -> dict[str, Any]:
        """None: held out or not, what was there when the candidate was trained is left out."""
        return {}


@dataclass(frozen=True)
class Draw:
    """What was drawn and waits to be answered, oldest first.

    ``considered`` responses of traffic are as young as the shadow takes them, ``taken`` of them were drawn, and
    ``left_out`` of these, by reason.
    """

    waiting: tuple[Drawn, ...]
    considered: int
    taken: int
    left_out: dict[str, int]


def draw_requests(
    lake: Lake,
    *,
    seed: str,
    policy: int,
    share: float,
    since: datetime,
    longest: int | None,
    reads: Sequence[TrainingRead],
    answered: Collection[str],
    units: Collection[str],
) -> Draw:
    """The requests of sealed traffic that a candidate is to answer.

    Args:
        seed: of the draw; a larger share draws the same and more.
        policy: whose responses are compared with the candidate's.
        longest: tokens of a prompt and max_tokens together, None: any.
        reads: what the candidate's training has read.
        answered: ids of responses that were drawn before.
        units: those of which a request counts already.

    Raises:
        feedback.lake.tables.LakeError.
    """
    rows, considered = lake.read(lambda views: _read(views, seed, share, since), tables=("interactions",))
    rows = rows.append_column("erased", meant_by_pending(lake, "interactions", rows))
    left_out: Counter[str] = Counter()
    found: list[Drawn] = []
    for row in rows.to_pylist():
        if row["response_id"] in answered:
            continue
        if reason := next(_reasons(row, policy, longest), None):
            left_out[reason] += 1
        else:
            found.append(_drawn(row, seed))
    learned = learned_from(lake, [replace(read, held_out=HeldOut()) for read in reads], found)
    left_out[LEARNED] += len(learned)
    fresh = [one for one in found if one.response_id not in learned]
    by_unit: dict[str, Drawn] = {}
    for one in sorted(fresh, key=lambda one: one.draw):
        if one.unit not in units:
            by_unit.setdefault(one.unit, one)
    left_out[ANOTHER] += len(fresh) - len(by_unit)
    waiting = sorted(by_unit.values(), key=lambda one: (one.created_at, one.response_id))
    return Draw(tuple(waiting), considered, rows.num_rows, dict((+left_out).most_common()))


def read_requests(lake: Lake, ids: Collection[str]) -> pa.Table:
    """The rows of these responses that are there, whole, and that no erasure means. Raises LakeError."""
    wanted = pa.table({"response_id": pa.array(sorted(ids), pa.string())})
    rows: pa.Table = lake.read(
        lambda views: views.register("wanted", wanted).sql(_BY_ID).to_arrow_table(), tables=("interactions",)
    )
    return rows.filter(pc.invert(meant_by_pending(lake, "interactions", rows)))


def still_there(lake: Lake, ids: Collection[str]) -> set[str]:
    """Those of the responses whose rows are there, and that no erasure means. Raises LakeError."""
    return set(read_requests(lake, ids).column("response_id").to_pylist()) if ids else set()


def sampling_of(row: Mapping[str, Any], draw: str) -> dict[str, Any]:
    """vLLM's parameters by which another response is sampled as this row's was, by the request's seed or the draw's."""
    sampling, other = row["sampling"], other_parameters(row["metadata"])
    if "logit_bias" in other:
        other["logit_bias"] = {int(token): bias for token, bias in other["logit_bias"].items()}
    return {
        "temperature": sampling["temperature"],
        "top_p": 1.0 if sampling["top_p"] is None else sampling["top_p"],
        "top_k": sampling["top_k"] or 0,
        "min_p": sampling["min_p"] or 0.0,
        "max_tokens": sampling["max_tokens"] or None,
        "stop": sampling["stop"] or None,
        "seed": int(draw[:8], 16) if sampling["seed"] is None else sampling["seed"],
        **other,
    }


def _read(views: Any, seed: str, share: float, since: datetime) -> tuple[pa.Table, int]:
    below = "g" if share >= 1 else f"{int(share * 2**64):016x}"  # 'g' is above every digit
    rows = views.sql(_DRAWN, params=[seed, below, since])
    considered = int(rows.aggregate("count(*)").fetchall()[0][0])
    return rows.filter("drawn").to_arrow_table(), considered


def _reasons(row: Mapping[str, Any], policy: int, longest: int | None) -> Iterator[str]:
    """Why a request can't be answered again, the reason that counts first; none if it can."""
    yield from not_answered_by(row, policy)
    if row["media"]:
        yield MEDIA
    if unknown := sorted(json.loads(row["other"] or "{}").keys() - set(_REPEATED)):
        yield f"sampled with {' and '.join(unknown)}, which can't be repeated"
    if longest is not None and row["prompt_token_ids"] + (row["sampling"]["max_tokens"] or 1) > longest:
        yield TOO_LONG


def _drawn(row: Mapping[str, Any], seed: str) -> Drawn:
    unit = unit_of(row["tenant"], user=row["user"], session=row["session_id"], request=row["request_id"])
    return Drawn(row["response_id"], _hash(seed, unit), _hash(seed, row["response_id"]), row["created_at"])


def _hash(seed: str, name: str) -> str:
    return hashlib.sha256(f"{seed}{name}".encode()).hexdigest()[:32]


def is_drawn(draw: str, share: float) -> bool:
    """Whether a draw is of a share of traffic."""
    return share >= 1 or int(draw[:_DIGITS], 16) < int(share * 2**64)


assert set(_OF_REQUEST) <= set(INTERACTIONS.names)
