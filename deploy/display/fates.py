"""What became of each move of the serving pointer: it serves, was replaced, rolled back, or refused by a server."""

from __future__ import annotations

from collections.abc import Sequence

from evaluation.report.rows import Fate, MoveRow
from serve.policies.pointer import Outcome, Pointer


def fates(history: Sequence[Pointer], outcomes: Sequence[Outcome]) -> list[MoveRow]:
    """A row for each move, oldest first. Of several servers, one that refuses a policy is enough."""
    served: dict[int, bool] = {}
    for outcome in outcomes:
        served[outcome.generation] = served.get(outcome.generation, True) and outcome.served
    following = [*history[1:], None]
    return [_row(move, after, served.get(move.generation)) for move, after in zip(history, following, strict=False)]


def _row(move: Pointer, after: Pointer | None, served: bool | None) -> MoveRow:
    verdict = move.verdict or {}
    return MoveRow(
        at=move.at,
        version=move.version,
        previous=move.previous,
        who=move.who,
        why=move.why,
        back="rollback_from" in verdict,
        override=bool(verdict.get("override")),
        objection=verdict.get("objection"),
        experiment=verdict.get("experiment"),
        served=served,
        fate=_fate(move, after, served),
        after=None if after is None else after.version,
        then=None if after is None else f"{after.who}: {after.why}",
    )


def _fate(move: Pointer, after: Pointer | None, served: bool | None) -> Fate:
    if served is False:
        return "refused by the server"
    if after is None:
        return "serves" if served else "not served yet"
    if (after.verdict or {}).get("rollback_from") == move.version:
        return "rolled back"
    if after.version == move.version:
        return "tried again"
    return "replaced" if served else "never served"
