"""A suite drawn from traffic: prompts of the held-out slice, which no policy learns from (``held_out``)."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import ValidationError

from evaluation.suites.held_out import HeldOut, prompt_key
from evaluation.suites.suite import Item, SuiteError, drawn_id
from feedback.lake.erasure_registry import meant_by_pending, needed_columns
from feedback.lake.tables import Lake
from feedback.tokenizers import load_tokenizer
from serve.generation.tokenizer import Text

NEWEST: Final = 50_000
"""Distinct prompts of traffic, the newest, that are looked at."""

TOO_LONG: Final = "too long"
UNWRITABLE: Final = "that neither text nor messages give again"

_OWN_KEYS: Final = "millrace:"
_COLUMNS: Final = ("prompt", "messages", "prompt_token_ids", "metadata")
_PROMPTS: Final = f"""
SELECT {", ".join(dict.fromkeys((*_COLUMNS, *needed_columns("interactions"))))}
FROM interactions
WHERE status = 'complete' AND len(prompt_token_ids) > 0
QUALIFY row_number() OVER (PARTITION BY prompt_token_ids ORDER BY created_at DESC, response_id DESC) = 1
ORDER BY created_at DESC, response_id DESC
LIMIT {NEWEST}
"""


class TooFewPrompts(SuiteError):
    """There are not enough prompts for a suite; the text has both numbers."""


@dataclass(frozen=True)
class Drawn:
    """``available``: prompts of the slice that could be items. ``left_out``: others of the slice, by reason."""

    items: tuple[Item, ...]
    available: int
    left_out: dict[str, int]

    def content(self) -> bytes:
        """As a suite's file has it."""
        dumps = (item.model_dump(exclude_none=True, exclude_defaults=True) for item in self.items)
        return "".join(json.dumps(dump) + "\n" for dump in dumps).encode()


def sample(
    lake: Lake,
    policy: Path,
    share: float,
    *,
    items: int,
    least: int,
    longest: int | None,
    seed: int,
    beside: Sequence[Item] = (),
    used: Collection[str] = (),
) -> Drawn:
    """Draw prompts of the held-out slice at random, one of each conversation: turns of one are no independent items.

    What was redacted, imported, or is being erased is no prompt.

    Args:
        policy: the folder whose tokenizer and chat template the prompts are for.
        share: ``evaluation.holdout``.
        items: how many to draw, or all that there are.
        least: how many there must be.
        longest: tokens that a prompt may have.
        seed: another one draws others, of the same prompts.
        beside: items that there are already; none of their conversations is drawn.
        used: prompts that have decided on a candidate, by ``held_out.prompt_key``; none is drawn again.

    Raises:
        TooFewPrompts, feedback.lake.tables.LakeError.
    """
    rows: pa.Table = lake.read(lambda views: views.sql(_PROMPTS).to_arrow_table(), tables=("interactions",))
    rows = rows.filter(pc.invert(meant_by_pending(lake, "interactions", rows))).select(_COLUMNS)
    held_out, text = (
        HeldOut(policy=policy, share=share),
        Text(load_tokenizer(policy)),
    )
    left_out: Counter[str] = Counter()
    conversations: dict[str, list[Item]] = defaultdict(list)
    ids, taken = {item.id for item in beside}, {held_out.opening(item.as_row()) for item in beside}
    for row in rows.to_pylist():
        if not held_out.in_slice(row):
            continue
        item = _item(row, text)
        if item is None or (longest is not None and len(row["prompt_token_ids"]) > longest):
            left_out[UNWRITABLE if item is None else TOO_LONG] += 1
        elif item.id in ids or prompt_key(item) in used:
            continue
        elif (opening := held_out.opening(row)) not in taken:
            conversations[opening].append(item)
    available, out = len(conversations), dict(sorted(left_out.items()))
    if available < least:
        without = f" ({', '.join(f'{count} {why}' for why, count in out.items())} left out)" if out else ""
        more, needed = ("more ", f"{least} are added at once") if beside else ("", f"a suite needs {least}")
        raise TooFewPrompts(
            f"{available} {more}conversations of traffic are of the held-out slice (evaluation.holdout={share:g} of "
            f"{rows.num_rows} prompts), and {needed}{without}"
        )
    order = random.Random(seed)
    chosen = order.sample(sorted(conversations), min(items, available))
    return Drawn(tuple(order.choice(conversations[opening]) for opening in chosen), available, out)


def _item(row: Mapping[str, Any], text: Text) -> Item | None:
    """The item that gives the row's prompt, token by token; None if none does."""
    token_ids = row["prompt_token_ids"]
    forms: list[str | list[dict[str, Any]]] = [] if row["messages"] is None else [json.loads(row["messages"])]
    forms.append(text.decode(token_ids) if row["prompt"] is None else row["prompt"])
    metadata = {key: value for key, value in row["metadata"] or () if not key.startswith(_OWN_KEYS)}
    for form in forms:
        if _token_ids(form, text) == token_ids:
            of = {"prompt": form} if isinstance(form, str) else {"messages": form}
            with suppress(ValidationError):  # half a character, which no file holds
                return Item.model_validate({"id": drawn_id(form), "metadata": metadata} | of)
    return None


def _token_ids(form: str | list[dict[str, Any]], text: Text) -> list[int] | None:
    try:
        return text.prompt(form)[2]
    except Exception:  # noqa: BLE001  a template is a program, which may raise anything
        return None
