"""The ledger's shadows recomputed: whose requests counted, and what the pairs show."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict, ValidationError

from evaluation.decisions.history import Party
from evaluation.decisions.ledger import Entry, Ledger, LedgerDamaged
from evaluation.shadow.comparison import Comparison, Pair, ShadowPlan, compare
from evaluation.shadow.requests import is_drawn
from evaluation.statistics.betting import OutOfBounds


class ShadowRuling(BaseModel):
    """The body of a shadow's entry: what the pairs that are kept as evidence show of a candidate, and by what plan."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    candidate: Party
    incumbent: Party
    plan: ShadowPlan
    scorer: str
    comparison: Comparison
    evidence: str


def verify(ledger: Ledger) -> list[str]:
    """Recompute the ledger's shadows, from the pairs that were kept. Names each entry that is wrong.

    What was drawn must be of the declared share, no user or session may count twice, and the same must follow from the
    pairs, bit for bit. For a ledger whose chain is in order (``evaluation.decisions.verification``).
    """
    problems = []
    for entry in ledger.entries():
        if entry.kind == "shadow":
            try:
                problems += [f"entry {entry.number}: {why}" for why in _of_entry(ledger, entry)]
            except (LedgerDamaged, OutOfBounds, ValueError) as error:
                problems.append(f"entry {entry.number}: {error}")
    return problems


def shadow_ruling(entry: Entry) -> ShadowRuling:
    """What an entry says of a shadow. Raises LedgerDamaged if it says nothing of any."""
    try:
        return ShadowRuling.model_validate(entry.body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise LedgerDamaged(f"entry {entry.number} is no shadow: {where}: {first['msg']}") from error


def pairs_of(ledger: Ledger, found: ShadowRuling) -> list[Pair]:
    """The pairs that a shadow's entry rests on. Raises LedgerDamaged."""
    evidence = ledger.evidence(found.evidence)
    try:
        return [Pair.model_validate(pair) for pair in evidence["pairs"]]
    except (KeyError, TypeError, ValidationError) as error:
        raise LedgerDamaged(f"evidence {found.evidence[:12]}… holds no pairs of a shadow") from error


def _of_entry(ledger: Ledger, entry: Entry) -> Iterator[str]:
    found = shadow_ruling(entry)
    pairs = pairs_of(ledger, found)
    if len({pair.unit for pair in pairs}) < len(pairs):
        yield "a user or session counts twice in it"
    if other := next((pair for pair in pairs if not is_drawn(pair.draw, found.plan.share)), None):
        yield f"request {other.draw} was not drawn, of a share of {found.plan.share:g}"
    if (recomputed := compare(found.plan, pairs)) != found.comparison:
        yield f"it says {found.comparison.decision}, and its evidence gives {recomputed.decision}: {recomputed.reasons}"
