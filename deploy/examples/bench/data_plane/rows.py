"""Rows to measure with, and how they come into a journal."""

from __future__ import annotations

import asyncio
import random
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from feedback.config import JournalConfig
from feedback.ids import uuid7
from feedback.journal.codec import to_batch
from feedback.journal.writer import Journal
from feedback.schema import TABLES

_VOCABULARY = 150_000
_WORDS = 20_000


def interactions(count: int, *, tokens: int = 200, seed: int = 0) -> list[dict[str, Any]]:
    """Interactions with ``tokens`` prompt tokens, as many response tokens with logprobs, texts as long as English."""
    chance, numbers = random.Random(seed), np.random.default_rng(seed)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    words = ["".join(chance.choices(letters, k=chance.randint(2, 8))) for _ in range(_WORDS)]

    def text() -> str:
        return " ".join(chance.choices(words, k=tokens * 3 // 4))  # three words are about four tokens

    def token_ids() -> list[int]:
        return [int(token) for token in numbers.integers(_VOCABULARY, size=tokens)]

    now = datetime.now(UTC)
    return [
        {
            "response_id": uuid7(),
            "request_id": uuid7(),
            "session_id": f"session-{chance.randrange(1000)}",
            "user": f"user-{chance.randrange(1000)}",
            "tenant": "default",
            "endpoint": "/generate",
            "replica": "replica-0",
            "created_at": now,
            "completed_at": now,
            "prompt": text(),
            "prompt_token_ids": token_ids(),
            "response": text(),
            "response_token_ids": token_ids(),
            "logprobs": -numbers.exponential(size=tokens).astype(np.float32),  # as the engine hands them over
            "policy_spans": [{"start": 0, "policy_version": 1}],
            "sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": tokens, "n": 1},
            "finish_reason": "length",
            "status": "complete",
            "timings": {"queue_ms": 1.0, "first_token_ms": 20.0, "total_ms": 900.0},
            "metadata": [("answer", "42")],
        }
        for _ in range(count)
    ]


async def record(folder: Path, config: JournalConfig, tables: dict[str, list[dict[str, Any]]]) -> None:
    """Through a journal: every row is on disk when this returns, and the segments are closed."""
    journal = Journal(folder, config, "examples")
    journal.open()
    try:
        for name, rows in tables.items():
            for at in range(0, len(rows), 512):
                await asyncio.gather(*(journal.append(name, row) for row in rows[at : at + 512]))
    finally:
        await asyncio.to_thread(journal.close)


def table(name: str, rows: list[dict[str, Any]]) -> pa.Table:
    """Rows as an Arrow table of the lake's schema."""
    return pa.Table.from_batches([to_batch(rows, TABLES[name])])
