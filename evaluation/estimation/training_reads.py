"""Which logged responses a policy or a reward model may have learned from: on those an estimate would flatter it.

A policy that learned from a response that was rewarded makes it likelier, whatever it answers to others. And a reward
model predicts the rewards that it was trained on better than any other's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from evaluation.suites.held_out import HeldOut
from feedback.lake.tables import Lake, LakeError
from serve.policies.store import Policy, PolicyNotFound, PolicyStore

log = logging.getLogger(__name__)


class Logged(Protocol):
    """A response of traffic. ``prompt_columns``: what ``HeldOut`` reads."""

    @property
    def response_id(self) -> str: ...
    @property
    def created_at(self) -> datetime: ...
    def prompt_columns(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class TrainingRead:
    """What a training run read: the table of interactions at ``version``, before ``until``; not what it held out.

    ``version`` is None where it isn't known.
    """

    version: int | None
    until: datetime
    held_out: HeldOut

    @classmethod
    def of(cls, trained: Policy, tokenizer: Path) -> TrainingRead | None:
        """By the manifest of a policy or a reward model; None if it was not trained from a lake.

        ``tokenizer``: a policy's folder, by whose tokenizer prompts are texts.
        """
        version = (trained.lineage.get("lake_versions") or {}).get("interactions")
        if version is None:
            return None
        data: Mapping[str, Any] = (trained.lineage.get("train") or {}).get("data") or {}
        share, side = data.get("holdout", 0.0), data.get("holdout_side", "rest")
        held_out = HeldOut(policy=tokenizer, share=share, learned=side)
        return cls(version, datetime.fromisoformat(trained.created_at), held_out)


def reads_of_policy(store: PolicyStore, policy: Policy) -> list[TrainingRead]:
    """Those of the policy and of all that it descends from; one that is gone may have read all before its child.

    What a version of the table has and the lake still has, later versions have too: so the youngest read counts of
    those that held out the same.
    """
    reads: dict[HeldOut, TrainingRead] = {}
    tokenizer = policy.path
    while True:
        if (read := TrainingRead.of(policy, tokenizer)) is not None:
            reads.setdefault(read.held_out, read)
        if policy.parent is None:
            break
        try:
            policy = store.get(policy.parent)
        except PolicyNotFound:  # removed by hand
            unknown = TrainingRead(None, datetime.fromisoformat(policy.created_at), HeldOut(policy=tokenizer))
            reads.setdefault(unknown.held_out, unknown)
            break
    return list(reads.values())


def learned_from(lake: Lake, reads: Iterable[TrainingRead], responses: Sequence[Logged]) -> set[str]:
    """The ids of the responses that one of the reads has, or may have: where its version can't be read any more, those
    that were made before what was trained of it.
    """
    found: set[str] = set()
    for read in reads:
        rest = [
            response
            for response in responses
            if response.response_id not in found and read.held_out.reason(response.prompt_columns()) is None
        ]
        found |= _there(lake, read, rest)
    return found


def _there(lake: Lake, read: TrainingRead, responses: Sequence[Logged]) -> set[str]:
    if not responses:
        return set()
    if read.version is None:
        return _older(responses, read.until)
    wanted = pa.table({"response_id": [response.response_id for response in responses]})
    try:
        rows = lake.read(
            lambda views: (
                views.register("wanted", wanted)
                .sql("SELECT response_id FROM interactions SEMI JOIN wanted USING (response_id)")
                .fetchall()
            ),
            versions={"interactions": read.version},
            tables=("interactions",),
        )
    except LakeError as error:
        log.info("interactions can't be read at version %d: %s", read.version, error)
        return _older(responses, read.until)
    return {response_id for (response_id,) in rows}


def _older(responses: Sequence[Logged], until: datetime) -> set[str]:
    return {response.response_id for response in responses if response.created_at <= until}
