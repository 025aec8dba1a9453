"""Prompts of one's own (``train.data.prompts``): read from files, and tokenised as the server would."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from evaluation.suites.suite import Suite
from feedback.datasets import Prompt
from feedback.exchange import record_files, trl
from feedback.exchange.record_files import Record, RecordError
from feedback.tokenizers import load_tokenizer
from feedback.trusted_code import trusted
from serve.generation.tokenizer import Text
from train.config.sections import PromptSource

TOO_LONG: Final = "too long"
DUPLICATE: Final = "duplicates"
FOREIGN_TOKENS: Final = "tokens that the model does not have"
NO_TEMPLATE: Final = "that the chat template fails on"


@dataclass(frozen=True)
class OwnPrompts:
    """The prompts of one file or folder. ``left_out``: its other rows, by reason. ``sha256``: of its files."""

    path: Path
    sha256: str
    rows: int
    weight: float
    prompts: list[Prompt]
    left_out: dict[str, int]

    def __str__(self) -> str:
        out = ", ".join(f"{count} {reason}" for reason, count in self.left_out.items())
        return f"{len(self.prompts)} prompts of {self.path.name}" + (f" ({out})" if out else "")

    def lineage(self) -> dict[str, Any]:
        """What a policy's lineage says of it."""
        of = {"path": str(self.path), "sha256": self.sha256, "rows": self.rows, "weight": self.weight}
        return of | {"prompts": len(self.prompts), "left_out": self.left_out}


def read_all(
    sources: Sequence[PromptSource], policy: Path, longest: int, unfit: Callable[[Prompt], str | None]
) -> list[OwnPrompts]:
    """The prompts of each source, in order; of two with the same token ids the first stands.

    Args:
        policy: the folder whose tokenizer and chat template it is.
        longest: tokens that a prompt may have.
        unfit: why another reason leaves a prompt out; None if none does.

    Raises:
        RecordError: a file can't be read, or a line or row of it is broken; it is named.
    """
    from transformers import AutoConfig

    tokenizer = load_tokenizer(policy)
    model = AutoConfig.from_pretrained(policy, trust_remote_code=trusted(policy))
    text, seen, found = Text(tokenizer), set[tuple[int, ...]](), []
    vocabulary = model.get_text_config().vocab_size
    for source in sources:
        prompts: list[Prompt] = []
        left_out: Counter[str] = Counter()
        rows = 0
        for record in record_files.read(source.path, source.split):
            rows += 1
            try:
                prompt = _prompt(source, record, text)
            except trl.UnfitError as error:
                left_out[str(error)] += 1
                continue
            ids = tuple(prompt.prompt_token_ids)
            if ids in seen:
                left_out[DUPLICATE] += 1
            elif len(ids) > longest:
                left_out[TOO_LONG] += 1
            elif max(ids) >= vocabulary:
                left_out[FOREIGN_TOKENS] += 1
            elif reason := unfit(prompt):
                left_out[reason] += 1
            else:
                prompts.append(prompt)
            seen.add(ids)
        sha256 = record_files.sha256(source.path, source.split)
        counts = dict(sorted(left_out.items()))
        found.append(OwnPrompts(source.path, sha256, rows, source.weight, prompts, counts))
    return found


def of_suite(suite: Suite, policy: Path, longest: int) -> list[Prompt]:
    """The prompts of a suite's items, in order; an item's answer is the metadata that a scorer compares with.

    Raises:
        ValueError: an item has more than ``longest`` tokens, or is one that the tokenizer or chat template fails on.
    """
    text, found = Text(load_tokenizer(policy)), []
    for item in suite.items:
        where = f"train.evaluate_suite={suite.path}, line {suite.lines[item.id]}"
        try:
            rendered, messages, token_ids = text.prompt(item.text_or_messages)
        except Exception as error:  # a template is a program, which may raise anything
            raise ValueError(f"{where}: the chat template fails on item {item.id}: {error}") from error
        if not 0 < len(token_ids) <= longest:
            raise ValueError(f"{where}: item {item.id} has {len(token_ids)} tokens, and a prompt from 1 to {longest}")
        found.append(Prompt(rendered, messages, token_ids, item.scorer_metadata()))
    return found


def hashes(sources: Sequence[PromptSource]) -> dict[str, str]:
    """The sha256 of each source, by its name. Raises RecordError."""
    return {source.name: record_files.sha256(source.path, source.split) for source in sources}


def _prompt(source: PromptSource, record: Record, text: Text) -> Prompt:
    prompt = trl.prompt_of(record, source.prompt)
    if source.as_user_message and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, str) and not text.has_chat_template:
        raise RecordError(
            f"{record.where}: column {source.prompt!r} is chat messages, and the policy's tokenizer has no chat "
            "template; give prompts as text, without as_user_message"
        )
    try:
        rendered, messages, token_ids = text.prompt(prompt)
    except Exception as error:  # a template is a program, which may raise anything
        raise trl.UnfitError(NO_TEMPLATE) from error
    if not token_ids:
        raise trl.UnfitError(trl.EMPTY)
    metadata = {key: _text(record[column]) for key, column in source.metadata.items() if record[column] is not None}
    return Prompt(rendered, messages, token_ids, metadata)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
