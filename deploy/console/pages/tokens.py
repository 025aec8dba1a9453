"""A response's tokens as people read them: their text, how likely each was, and which policy sampled it."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from serve.policies.store import PolicyError, PolicyStore

LIKELY: Final = (0.9, 0.5, 0.2, 0.05)
"""From these probabilities down, a token is of the next class of colour, 0 to 4."""


@dataclass(frozen=True)
class Token:
    """``unlikely``: its class of colour; ``turn``: which of the response's policies, from 0, sampled it."""

    text: str
    probability: float | None
    unlikely: int
    policy: int | None
    turn: int


def tokens_of(row: Mapping[str, Any], store: PolicyStore) -> list[Token] | None:
    """The tokens of an interaction; None if its policies' tokenizer can't be read any more."""
    spans = row["policy_spans"]
    tokenizer = _tokenizer_of(store, [span["policy_version"] for span in spans])
    if tokenizer is None:
        return None
    starts = [span["start"] for span in spans]
    stream, found, waiting = DecodeStream(skip_special_tokens=False), [], 0
    for i, token_id in enumerate(row["response_token_ids"]):
        text = stream.step(tokenizer, token_id)
        waiting += 1
        if text is None and i + 1 < len(row["response_token_ids"]):  # a character that goes on in the next
            continue
        first = i + 1 - waiting
        logprobs = row["logprobs"][first : i + 1]
        probability = math.exp(sum(logprobs)) if logprobs else None
        turn = max(0, bisect_right(starts, first) - 1)
        policy = spans[turn]["policy_version"] if spans else None
        unlikely = 0 if probability is None else sum(probability < bound for bound in LIKELY)
        found.append(Token(text or "\N{REPLACEMENT CHARACTER}", probability, unlikely, policy, turn))
        waiting = 0
    return found


def _tokenizer_of(store: PolicyStore, versions: list[int]) -> Tokenizer | None:
    """Of the first of these policies that still has one; all of a response have the same."""
    for version in versions:
        try:
            file = store.get(version).path / "tokenizer.json"
        except PolicyError:
            continue
        if file.is_file():
            return _tokenizer(file)
    return None


@lru_cache(4)
def _tokenizer(file: Path) -> Tokenizer:
    return Tokenizer.from_file(str(file))
