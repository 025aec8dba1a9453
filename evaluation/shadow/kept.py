"""What a shadow keeps, in a folder outside the lake: no reader of traffic can take it for traffic.

    evaluations/shadows/<pair of policies>/
        began.json        when it began, by which policies, and by what plan with each scorer
        responses.jsonl   the candidate's responses, one a line, by the id of the response that people got
        pairs-<scorer>.jsonl  what was measured of both responses, by this scorer: numbers and hashes, no texts
        result.json       what it shows

A candidate's response is there no longer than the request that it answers: what an erasure or the retention has taken
from the lake, ``forget_gone`` takes from here. An erasure calls it behind the rows, and the lake's maintenance does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, TypeVar

from pydantic import BaseModel, ConfigDict

from evaluation.decisions.history import Party
from evaluation.shadow.comparison import Comparison, Pair, ShadowPlan
from evaluation.shadow.requests import Drawn, still_there
from feedback.files import TEMPORARY, locked, make_folder, replace_file
from feedback.lake.tables import Lake

FOLDER: Final = "shadows"
"""Below ``evaluation.folder``."""

_LOCK_WAIT_S: Final = 0.5
_FILES_WAIT_S: Final = 60.0
_RESPONSES: Final = "responses.jsonl"

Record = TypeVar("Record", bound=BaseModel)


class ShadowError(RuntimeError):
    """A shadow can't go on; the text says why and what to do."""


class ShadowBusy(ShadowError):
    """Another process shadows the same two policies."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h


class Response(BaseModel):
    """The candidate's response to a request that was drawn. ``left_out``: why it has no text and the least reward."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    response_id: str
    unit: str
    draw: str
    response: str
    response_token_ids: list[int]
    finish_reason: str
    left_out: str | None = None

    @classmethod
    def of(cls, drawn: Drawn, text: str, token_ids: Sequence[int], finish_reason: str) -> Response:
        return cls(
            response_id=drawn.response_id,
            unit=drawn.unit,
            draw=drawn.draw,
            response=text,
            response_token_ids=list(token_ids),
            finish_reason=finish_reason,
        )

    def without_text(self, why: str) -> Response:
        """The same without what it says."""
        return self.model_copy(update={"response": "", "response_token_ids": [], "left_out": why})


class Result(BaseModel):
    """What a shadow shows at a moment. ``considered`` responses of traffic, of which ``drawn`` were drawn, and
    ``left_out`` of these, by reason; ``unscored``: why responses of either policy have no reward, by how often.
    ``ended``: why it ended; None while it goes on, or if it was killed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    candidate: Party
    incumbent: Party
    began: str
    at: str
    plan: ShadowPlan
    comparison: Comparison
    considered: int
    drawn: int
    left_out: dict[str, int]
    scorer: str
    unscored: dict[str, int]
    ended: str | None = None


class Kept:
    """The folder of one shadow: of a candidate against an incumbent, by the hashes of both."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def alone(self) -> AbstractContextManager[None]:
        """Held by the process that shadows. Raises ShadowBusy."""
        make_folder(self.folder)
        busy = ShadowBusy(f"another process is at work in {self.folder}: try again later")
        return locked(self.folder / ".lock", _LOCK_WAIT_S, busy=busy)

    def began(self, candidate: Party, incumbent: Party) -> datetime:
        """When the shadow began: now, if it has not yet."""
        path = self.folder / "began.json"
        if not path.exists():
            parties = {"candidate": candidate.model_dump(), "incumbent": incumbent.model_dump()}
            replace_file(path, json.dumps({"at": datetime.now(UTC).isoformat(), **parties}).encode())
        return datetime.fromisoformat(json.loads(path.read_bytes())["at"])

    def settle(self, scorer: str, plan: ShadowPlan) -> ShadowPlan:
        """The plan of all runs with a scorer: the first one's, from when anything was measured by it.

        The share is that of the first run that had the candidate answer anything, with any scorer. Another plan would
        count the same pairs by other bounds, and spend alpha anew. For who is ``alone``, after ``began``.
        """
        path = self.folder / "began.json"
        began = json.loads(path.read_bytes())
        plans = {name: ShadowPlan.model_validate(of) for name, of in began.get("plans", {}).items()}
        if not plans and (before := self.result()) is not None:  # of a run that kept no plan
            plans = {before.scorer: before.plan}
        if not self.responses() and not any(self.folder.glob(_pairs("*"))):
            plans = {}
        if plans:
            plan = plan.model_copy(update={"share": next(iter(plans.values())).share})
        settled = plans[scorer] if scorer in plans and self.pairs(scorer) else plan
        kept = {name: of.model_dump(mode="json") for name, of in (plans | {scorer: settled}).items()}
        if kept != began.get("plans"):
            replace_file(path, json.dumps(began | {"plans": kept}).encode())
        return settled

    def responses(self) -> list[Response]:
        """All that there are, in the order in which they were sampled."""
        return _read(self.folder / _RESPONSES, Response)

    def add_responses(self, lake: Lake, found: Iterable[Response]) -> int:
        """Keep responses, durable on return, but for those whose requests are gone meanwhile; how many these were.

        An erasure forgets behind the rows that it takes: so either the rows are gone for this call, or what it writes
        is there for the erasure. Raises LakeError.
        """
        new = list(found)
        with self._files():
            there = still_there(lake, [one.response_id for one in new])
            self._write(_RESPONSES, [*self.responses(), *(one for one in new if one.response_id in there)])
        return sum(one.response_id not in there for one in new)

    def forget_gone(self, lake: Lake) -> int:
        """Remove the responses whose requests are in the lake no longer, and what a killed write has left of any; how
        many of the first there were. Raises LakeError."""
        with self._files():
            for left in self.folder.glob(f".{_RESPONSES}.*{TEMPORARY}"):
                left.unlink(missing_ok=True)
            before = self.responses()
            there = still_there(lake, [one.response_id for one in before])
            kept = [one for one in before if one.response_id in there]
            if len(kept) < len(before):
                self._write(_RESPONSES, kept)
        return len(before) - len(kept)

    def pairs(self, scorer: str) -> list[Pair]:
        """All that were measured with a scorer, in order. Another one scores all responses that are there anew."""
        return _read(self.folder / _pairs(scorer), Pair)

    def add_pairs(self, scorer: str, found: Iterable[Pair]) -> None:
        """Keep what was measured, durable on return. For who is ``alone``."""
        self._write(_pairs(scorer), [*self.pairs(scorer), *found])

    def result(self) -> Result | None:
        """What it shows, as it was when somebody last looked; None before that."""
        try:
            return Result.model_validate_json((self.folder / "result.json").read_bytes())
        except FileNotFoundError:
            return None

    def put_result(self, result: Result) -> None:
        replace_file(self.folder / "result.json", result.model_dump_json(indent=2).encode() + b"\n")

    def _write(self, name: str, records: Iterable[BaseModel]) -> None:
        lines = "".join(f"{record.model_dump_json()}\n" for record in records)
        replace_file(self.folder / name, lines.encode(), private=True)

    @contextmanager
    def _files(self) -> Iterator[None]:
        with locked(self.folder / ".files", _FILES_WAIT_S):
            yield


def shadows(folder: Path) -> list[Kept]:
    """Those of a folder, oldest first."""
    began = {path.parent: json.loads(path.read_bytes())["at"] for path in folder.glob("*/began.json")}
    return [Kept(path) for path in sorted(began, key=lambda path: str(began[path]))]


def forget_gone(lake: Lake, folder: Path, say: Callable[[str], None] = lambda _: None) -> int:
    """Have every shadow of a folder forget the requests that are in the lake no longer. Raises LakeError."""
    gone = sum(kept.forget_gone(lake) for kept in shadows(folder))
    if gone:
        say(f"removed {gone} responses of shadows to requests that are gone")
    return gone


def _pairs(scorer: str) -> str:
    return f"pairs-{scorer.rpartition('@')[2]}.jsonl"


def _read(path: Path, record: type[Record]) -> list[Record]:
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    return [record.model_validate_json(line) for line in lines]
