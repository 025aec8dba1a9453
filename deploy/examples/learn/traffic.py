"""Simulated users: their requests, a policy's responses and the feedback on them, as rows of the lake.

The rows go the product's own way: captured as a server captures them, through the journal, sealed, and scored.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from deploy.examples.bench.data_plane.rows import record
from deploy.examples.learn import task
from deploy.examples.learn.task import Item
from evaluation.config import EngineConfig
from evaluation.engine import OfflineEngine, Work
from feedback.config import HumanConfig, JournalConfig, LakeConfig, RuleConfig, ScoringConfig
from feedback.events import FeedbackIn
from feedback.ingest.seal import seal
from feedback.lake.tables import Lake
from feedback.scoring.run import score
from serve.generation import interaction_rows
from serve.generation import request as generation
from serve.policies.store import Policy

RESPONSES: Final = 4
"""Responses to each prompt."""
THUMB_SHARE, WRONG_SHARE, CORRECTION_SHARE = 2 / 3, 0.1, 0.5
"""Of responses that get a thumb; of thumbs that are wrong; of wrong responses that are corrected."""

Row = dict[str, Any]


def log(folder: Path, policy: Policy, config: EngineConfig, *, reward: str, max_tokens: int) -> str:
    """Have users ask a policy their prompts, ``RESPONSES`` times each, and say what they think, into a new lake.

    All of it is scored by ``reward``, as module:function. What came of it, in words.
    """
    items = task.traffic()
    with OfflineEngine(policy.path, config) as engine:
        interactions = answer(items, policy, engine, max_tokens=max_tokens)
    feedback = list(judge(items, interactions, random.Random(0)))
    lake, journal = Lake(str(folder), LakeConfig()), folder.with_name(f"{folder.name}-journal")
    asyncio.run(record(journal, JournalConfig(), {"interactions": interactions, "feedback": feedback}))
    lake.create()
    seal(lake, journal)
    score(lake, ScoringConfig(human=HumanConfig(weight=0), rules={"task": RuleConfig(function=reward)}))
    right = sum(is_right(item, row) for item, rows in by_item(items, interactions) for row in rows)
    share = right / len(interactions)
    return f"{len(interactions)} responses, {share:.0%} of them right, {len(feedback)} feedbacks"


def answer(items: list[Item], policy: Policy, engine: OfflineEngine, *, max_tokens: int) -> list[Row]:
    """Rows of the table ``interactions``, ``RESPONSES`` an item, sampled at temperature 1 with nothing cut off."""
    from transformers import AutoTokenizer  # takes seconds to import, which only the making of a home needs

    tokenizer = AutoTokenizer.from_pretrained(policy.path)
    prompts = engine.encode([item.prompt for item in items])
    repeated = [ids for ids in prompts for _ in range(RESPONSES)]
    work = Work(sampled=[(ids, seed) for seed, ids in enumerate(repeated)])
    sampled = iter(engine.run(work, max_tokens=max_tokens).sampled)
    rows: list[Row] = []
    for item, ids in zip(items, prompts, strict=True):
        request = generation.GenerationRequest(
            request_id=f"request-{len(rows)}",
            endpoint="generate",
            replica="learn",
            tenant="default",
            prompt_token_ids=ids,
            prompt=item.prompt,
            sampling=generation.Sampling(n=RESPONSES, max_tokens=max_tokens),
        )
        responses = [
            generation.Generated(
                text=tokenizer.decode(sample.token_ids, skip_special_tokens=True),
                token_ids=sample.token_ids,
                logprobs=sample.logprobs,
                policy_spans=[(0, policy.version)],
                finish_reason=sample.finish_reason,
            )
            for sample in itertools.islice(sampled, RESPONSES)
        ]
        rows += interaction_rows.build_rows(request, generation.Generation(responses, 0.0, 0.0, 0.0))
    return rows


def judge(items: list[Item], interactions: list[Row], rng: random.Random) -> Iterator[Row]:
    """Rows of the table ``feedback``: thumbs, some of them wrong; corrections; a right one preferred to a wrong."""
    for item, rows in by_item(items, interactions):
        for row in rows:
            response, right = row["response_id"], is_right(item, row)
            if rng.random() < THUMB_SHARE:
                mistaken = rng.random() < WRONG_SHARE
                yield FeedbackIn(response_id=response, kind="thumb", value=right != mistaken).to_row("default")
            if not right and rng.random() < CORRECTION_SHARE:
                yield FeedbackIn(response_id=response, kind="correction", text=item.answer).to_row("default")
        best, worst = max(rows, key=lambda r: is_right(item, r)), min(rows, key=lambda r: is_right(item, r))
        if is_right(item, best) and not is_right(item, worst):
            better, worse = best["response_id"], worst["response_id"]
            preference = FeedbackIn(response_id=better, kind="preference", rejected_response_id=worse)
            yield preference.to_row("default")


def by_item(items: list[Item], interactions: list[Row]) -> Iterator[tuple[Item, list[Row]]]:
    """Each item with the rows of its responses."""
    for i, item in enumerate(items):
        yield item, interactions[i * RESPONSES : (i + 1) * RESPONSES]


def is_right(item: Item, row: Row) -> bool:
    return bool(row["response"] == item.answer)
