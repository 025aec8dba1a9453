"""Send a real server what its docs allow, in all combinations, and hold its answers against them.

Each request is sent twice, whole and streamed, and where it must be answered alike, whole once more. Answers are
checked by themselves, against each other, and against the rows in the lake (``loadtests.valid_answers``). What fails is
shrunk for as long as it fails in the same way.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import pyarrow.parquet as parquet

from loadtests.crash import run
from loadtests.valid_answers import Answer, Fault, by_choice, differences, faults, read, read_stream
from loadtests.valid_requests import GENERATE, Case, draw

BATCH: Final = 250
CLIENTS: Final = 16
TIMEOUT_S: Final = 60.0
MOST_SHRUNK: Final = 12  # different faults that are shrunk
MOST_ROUNDS: Final = 25
MODES: Final = ("whole", "stream", "again")

_COLUMNS: Final = (
    'request_id, response_id, status, finish_reason, response, response_token_ids, prompt_token_ids, logprobs, "user", '
    "session_id, metadata, messages, sampling, policy_spans, endpoint"
)

Probe = Callable[[Sequence[Case]], list[list[Fault]]]
"""What is wrong with the answers to each of some requests."""


@dataclass
class Outcome:
    """What came of the cases."""

    cases: int = 0
    requests: int = 0
    refused: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    smallest: list[dict[str, str]] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """For the last line."""
        return {
            "cases": self.cases,
            "requests": self.requests,
            "refused_as_stated": self.refused,
            "faults": dict(self.kinds.most_common()),
            "smallest": self.smallest,
        }


class Prober:
    """Sends requests, reads what the server recorded, and reports faults."""

    def __init__(self, url: str, home: Path, model: Path) -> None:
        from tokenizers import Tokenizer

        self.url = url
        self.home = home
        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.requests = 0
        self.refused = 0
        self._batches = itertools.count()

    def probe(self, cases: Sequence[Case]) -> list[list[Fault]]:
        """What is wrong with the answers to each of ``cases``."""
        batch = f"valid-{next(self._batches)}"
        answers = asyncio.run(self._ask(cases, batch))
        rows = self._rows(batch)
        return [
            list(self._faults(case, {mode: answers.get((number, mode)) for mode in MODES}, rows, f"{batch}-{number}"))
            for number, case in enumerate(cases)
        ]

    def _faults(
        self, case: Case, answers: dict[str, Answer | Fault | None], rows: dict[str, list[dict[str, Any]]], name: str
    ) -> Iterator[Fault]:
        alike = []
        for mode, answer in answers.items():
            recorded = rows.get(f"{name}-{mode}", [])
            if isinstance(answer, Fault):
                yield answer
            elif answer is not None:
                found = list(faults(case, mode, answer, recorded, self.tokenizer))
                yield from (Fault(f"{fault.kind} [{_form(mode)}]", fault.detail) for fault in found)
                self.refused += not found and answer.status != 200
                if not found and answer.status == 200:
                    chosen = by_choice(answer, recorded)
                    alike.append((mode, [chosen[index] for index in sorted(chosen)]))
        if case.repeats and len(alike) > 1:
            for mode, recorded in alike[1:]:
                for fault in differences(case, alike[0][1], recorded):
                    yield Fault(f"{fault.kind} [{_form(mode)}]", fault.detail)

    async def _ask(self, cases: Sequence[Case], batch: str) -> dict[tuple[int, str], Answer | Fault]:
        answers: dict[tuple[int, str], Answer | Fault] = {}
        waiting = iter(
            [
                (number, mode, case)
                for number, case in enumerate(cases)
                for mode in MODES
                if mode != "again" or case.repeats
            ]
        )
        limits = httpx.Limits(max_connections=CLIENTS)
        async with httpx.AsyncClient(base_url=self.url, timeout=TIMEOUT_S, limits=limits) as http:

            async def client() -> None:
                for number, mode, case in waiting:
                    answers[number, mode] = await self._answer(http, case, mode, f"{batch}-{number}-{mode}")

            await asyncio.gather(*(client() for _ in range(CLIENTS)))
        return answers

    async def _answer(self, http: httpx.AsyncClient, case: Case, mode: str, request_id: str) -> Answer | Fault:
        self.requests += 1
        body = case.body
        if mode == "stream":
            body = body | {"stream": True}
            if case.path != GENERATE:
                body["stream_options"] = {"include_usage": True}
        try:
            got = await http.post(case.path, json=body, headers={"X-Request-Id": request_id})
        except httpx.HTTPError as error:
            return Fault(f"{type(error).__name__} [{_form(mode)}]", str(error))
        try:
            return (
                read_stream(case, got.status_code, got.text)
                if mode == "stream"
                else read(case, got.status_code, got.json())
            )
        except (ValueError, KeyError, TypeError) as error:
            return Fault(f"form of the answer: {type(error).__name__} [{_form(mode)}]", f"{error}: {got.text[:500]}")

    def _rows(self, batch: str) -> dict[str, list[dict[str, Any]]]:
        """The recorded rows by the id of their request."""
        out = self.home.parent / "rows.parquet"
        out.unlink(missing_ok=True)
        query = f"SELECT {_COLUMNS} FROM interactions WHERE request_id LIKE '{batch}-%'"
        run("lake", "sql", query, "--home", str(self.home), "--format", "parquet", "--out", str(out))
        rows: dict[str, list[dict[str, Any]]] = {}
        for row in parquet.read_table(out).to_pylist():
            rows.setdefault(row["request_id"], []).append(row)
        return rows


def _form(mode: str) -> str:
    return "stream" if mode == "stream" else "whole"


def fuzz(prober: Prober, cases: int, seed: int, say: Callable[[str], None]) -> Outcome:
    """Send ``cases`` requests that are valid, each in all its forms; every kind of fault that shows is shrunk."""
    chance, outcome = random.Random(seed), Outcome()
    first: dict[str, Case] = {}
    causes: set[str] = set()
    while outcome.cases < cases:
        drawn = [draw(chance) for _ in range(min(BATCH, cases - outcome.cases))]
        for case, found in zip(drawn, prober.probe(drawn), strict=True):
            for kind, fault in {fault.kind: fault for fault in found}.items():
                outcome.kinds[kind] += 1
                cause = kind.rpartition(" [")[0]  # whole or streamed, it is one
                if cause not in causes:
                    causes.add(cause)
                    first[kind] = case
                    say(f"{kind}: {fault.detail[:1000]}\n    {str(case)[:2000]}")
        outcome.cases += len(drawn)
        say(f"{outcome.cases} valid requests: {dict(outcome.kinds)}")
    for kind, case in list(first.items())[:MOST_SHRUNK]:
        small, detail = shrink(prober.probe, case, kind)
        outcome.smallest.append({"fault": kind, "detail": detail[:1000], "request": str(small)[:2000]})
        say(f"smallest of {kind}: {detail[:1000]}\n    {str(small)[:2000]}")
    outcome.requests, outcome.refused = prober.requests, prober.refused
    return outcome


def shrink(probe: Probe, case: Case, kind: str) -> tuple[Case, str]:
    """The smallest request that was found with the same fault, and its description."""
    detail = _detail(probe([case])[0], kind)
    if detail is None:
        return case, "did not show again"
    for _ in range(MOST_ROUNDS):
        simpler = list(simplifications(case))
        details = [_detail(found, kind) for found in probe(simpler)]
        smaller = next(((at, text) for at, text in enumerate(details) if text is not None), None)
        if smaller is None:
            break
        case, detail = simpler[smaller[0]], smaller[1]
    return case, detail


def _detail(found: Iterable[Fault], kind: str) -> str | None:
    return next((fault.detail for fault in found if fault.kind == kind), None)


def simplifications(case: Case) -> Iterator[Case]:
    """Requests that are a step simpler, the largest steps first."""
    plain: dict[str, Any] = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "prompt_token_ids": [5]}
    optional = [name for name in case.body if name not in plain]
    for half in (optional[: len(optional) // 2], optional[len(optional) // 2 :]):
        if len(half) > 1:
            yield Case(case.path, {name: value for name, value in case.body.items() if name not in half})
    for name in optional:
        yield Case(case.path, {key: value for key, value in case.body.items() if key != name})
    for name, value in case.body.items():
        if name in plain and value != plain[name]:
            yield case.but(**{name: plain[name]})
        for simpler in _simpler(value):
            yield case.but(**{name: simpler})


def _simpler(value: Any) -> Iterator[Any]:
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, int | float):
        yield from (simple for simple in (0, 1, 2, 5) if abs(simple) < abs(value))
    elif isinstance(value, str):
        if len(value) > 1:
            yield from (value[: len(value) // 2], value[len(value) // 2 :])
    elif isinstance(value, list) and len(value) > 1:
        yield from (value[: len(value) // 2], value[len(value) // 2 :], value[1:], value[:-1])
    elif isinstance(value, list) and value:
        yield from ([simpler] for simpler in _simpler(value[0]))
    elif isinstance(value, dict) and value:
        items = list(value.items())
        if len(items) > 1:
            yield from (dict(items[: len(items) // 2]), dict(items[len(items) // 2 :]))
