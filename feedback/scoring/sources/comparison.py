"""A judge that compares two answers to a prompt: the settings, requests, retries and cache of ``judge``.

A judge favours an answer for where it stands (Zheng et al. 2023, "Judging LLM-as-a-judge", arXiv 2306.05685, sec. 3.3),
so each pair is asked in both orders.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

import pyarrow as pa

from feedback.config import COMPARED, JudgeConfig
from feedback.scoring.sources.judge import Judge, prompt_text
from feedback.scoring.sources.openai_api import NoAnswer
from feedback.scoring.sources.rules import Reasons, Values

QUESTION: Final = """\
Two answers to the same request are below. Which of them helps better: is right, does what is wanted, and is clear? \
Neither their order nor their length says anything.

Request:
{prompt}

Answer A:
{first}

Answer B:
{second}"""

_SCORES: Final = {"A": 0.0, "TIE": 0.5, "B": 1.0}


class Comparison(Judge):
    """Compares answers. Verdicts are kept as those of ``Judge``, by the question and what asks it."""

    def __init__(self, config: JudgeConfig, template: str | None = None) -> None:
        """``template``: the question, with {prompt}, {first} and {second}; ``QUESTION`` if None.

        Raises JudgeCacheError.
        """
        super().__init__(config.model_copy(update={"low": 0.0, "high": 1.0}), once=True)
        self.template = template or QUESTION
        self.identity = ["comparison", config.model, self.template, config.temperature, config.extra]

    def in_both_orders(self, rows: pa.Table, others: pa.Table) -> tuple[Values, Reasons, tuple[Values, Values]]:
        """Of answers to the same prompts, how much better those of ``rows`` are than those of ``others``.

        Args:
            rows: with columns prompt, messages and response; so has ``others``.

        Returns:
            Values from 0 to 1, the mean of both orders, 0.5 without asking where the texts are equal; why there is
            none; and what was said of those of ``rows`` as the first and as the second answer, None where the texts are
            equal or a verdict is missing.
        """
        pairs = list(zip(rows.to_pylist(), others.to_pylist(), strict=True))
        asked = [i for i, (one, other) in enumerate(pairs) if one["response"] != other["response"]]
        questions = [
            {"prompt": pairs[i][0]["prompt"], "messages": pairs[i][0]["messages"]}
            | {"first": pairs[i][order]["response"], "second": pairs[i][1 - order]["response"]}
            for order in (1, 0)
            for i in asked
        ]
        values: Values = [0.5] * len(pairs)
        reasons: Reasons = [None] * len(pairs)
        verdicts, whys = self.by_row(_table(questions))
        as_first: Values = [None] * len(pairs)
        as_second: Values = [None] * len(pairs)
        for n, i in enumerate(asked):
            second, other = verdicts[n], verdicts[n + len(asked)]
            if second is None or other is None:
                values[i], reasons[i] = None, whys[n] or whys[n + len(asked)]
            else:
                as_first[i], as_second[i] = 1 - other, second
                values[i] = (second + 1 - other) / 2
        return values, reasons, (as_first, as_second)

    def _question(self, row: Mapping[str, Any]) -> str:
        def text(found: re.Match[str]) -> str:
            return prompt_text(row) if found[1] == "prompt" else str(row[found[1]])

        return COMPARED.sub(text, self.template)

    def _form(self) -> tuple[str, dict[str, Any]]:
        words = 'Say which is better, as JSON: {"better": "A"}, {"better": "B"}, or, if neither is, {"better": "tie"}'
        return words, {"better": {"type": "string", "enum": ["A", "B", "tie"]}}

    def _verdict(self, content: str) -> float:
        verdict = parse_verdict(content)
        if verdict is None:
            raise NoAnswer(f"no verdict in the judge's answer {self._api.quoted(content)!r}")
        return verdict


def parse_verdict(content: str) -> float | None:
    """0 if the first answer is better, 1 if the second is, 0.5 for a tie; None if the judge says none of these.

    That of the last JSON object, else of the last "[[A]]", else of an answer that is nothing but A, B or tie.
    """
    for text in reversed(re.findall(r"\{[^{}]*\}", content)):
        try:
            said = json.loads(text).get("better")
        except (ValueError, RecursionError):
            continue
        if isinstance(said, str) and said.strip().upper() in _SCORES:
            return _SCORES[said.strip().upper()]
    named = re.findall(r"\[\[(A|B|tie)\]\]", content, re.IGNORECASE)
    return _SCORES.get((named[-1] if named else content).strip(" \n.\"'").upper())


def _table(questions: list[dict[str, Any]]) -> pa.Table:
    names = ("prompt", "messages", "first", "second")
    return pa.table({name: pa.array([row[name] for row in questions], pa.string()) for name in names})
