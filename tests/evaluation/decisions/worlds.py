"""Observations of worlds whose truth is known, and races over them through what production calls."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from evaluation.config import EvaluationConfig
from evaluation.decisions import gate
from evaluation.decisions.gate import State
from evaluation.decisions.history import Declaration, History, Intent, Party, Ruling, hypothesis
from evaluation.decisions.judgement import standings
from evaluation.decisions.ledger import FIRST, Entry, Ledger, canonical
from evaluation.decisions.observations import Look, Observation
from evaluation.decisions.plan import Compared, Plan, declared, plan

SCORER = "exact_match@1"
COMPARED = Compared("proxy@1", "holdout@1")


def config(**of_gate: Any) -> EvaluationConfig:
    return EvaluationConfig.model_validate({"gate": {"metric": "reward", **of_gate}})


def seen(name: str, candidate: float | None, incumbent: float | None, **more: Any) -> Observation:
    """An item that both policies answer alike in all but their rewards."""
    alike = {"length": (5, 5), "truncated": (0, 0), "distinct": (1, 1), "repeated": (0, 0)}
    fields = {"item": name, "prompt": name, "candidate": candidate, "incumbent": incumbent, **alike, **more}
    return Observation(**fields)


def items(
    n: int, gain: float, differing: float = 0.3, *, seed: int = 0, name: str = "i", **more: Any
) -> tuple[Observation, ...]:
    """Right and wrong answers whose rate of being right differs by ``gain``; a share of the items differs."""
    drawn = np.random.default_rng(seed).choice(
        [-1, 0, 1], n, p=[(differing - gain) / 2, 1 - differing, (differing + gain) / 2]
    )
    pairs = {-1: (0.0, 1.0), 0: (1.0, 1.0), 1: (1.0, 0.0)}
    return tuple(seen(f"{name}{i}", *pairs[int(of)], **more) for i, of in enumerate(drawn))


def compared(
    n: int, *, better: float, longer: float, ratio: float, spread: float = 0.5, seed: int = 3, name: str = "i"
) -> tuple[Observation, ...]:
    """Pairs that a judge compared in both orders, with log odds for the candidate and for the longer answer."""
    rng = np.random.default_rng(seed)
    theirs = np.round(rng.lognormal(3.4, spread, n))
    ours = np.round(theirs * ratio * rng.lognormal(0, 0.3, n)) if spread else np.round(theirs * ratio)
    odds = better + longer * np.sign(ours - theirs)
    verdicts = (rng.random((2, n)) < 1 / (1 + np.exp(-odds))).astype(float).T
    return tuple(
        seen(f"{name}{i}", mean, 1 - mean, length=(ours[i], theirs[i]), verdicts=(first, second))
        for i, (first, second) in enumerate(verdicts.tolist())
        for mean in [(first + second) / 2]
    )


def in_looks(observations: tuple[Observation, ...], size: int = 50) -> list[Look]:
    return [Look(fresh=observations[at : at + size]) for at in range(0, len(observations), size)]


def planned(settings: EvaluationConfig | None = None, level: float = 0.02, **more: Any) -> Plan:
    about: dict[str, Any] = {"fresh_segments": {}, "fresh": 1000, "decided": 0, "scorer": SCORER, **more}
    return plan(settings or config(), level=level, **about)


def raced(of: Plan, observations: tuple[Observation, ...]) -> tuple[State, str, tuple[str, ...]]:
    """(state, verdict, reasons) after as many looks as it takes."""
    state, decision, _ = gate.replay(of, in_looks(observations))
    return state, decision.verdict, decision.reasons


def judged(
    ledger: Ledger,
    candidate: int,
    observations: tuple[Observation, ...],
    *,
    incumbent: int = 1,
    shas: tuple[str, str] | None = None,
    settings: EvaluationConfig | None = None,
    killed: bool = False,
    **more: Any,
) -> Entry:
    """A verdict on record, as an evaluation leaves it; policies' hashes are made of their versions, if there are none.

    Looks go on until the verdict is final, and the items behind it stay fresh. ``killed``: before the verdict, which
    leaves the intents, of which the last is returned.
    """
    history = History.of(ledger.entries())
    names = shas or (f"sha-{candidate}", f"sha-{incumbent}")
    parties = Party(version=candidate, sha256=names[0]), Party(version=incumbent, sha256=names[1])
    settings = settings or config()
    last = history.last(parties[0].sha256, parties[1].sha256)
    budget = declared(settings.gate)
    level = history.level(budget, hypothesis(*(party.sha256 for party in parties)))
    of = last[1].plan if last else planned(settings, level, **more)
    state = State()
    if last:
        for _, before in history.races[last[1].hypothesis]:
            looks_before = [Look.model_validate(look) for look in ledger.evidence(before.evidence)["looks"]]
            state, _, _ = gate.replay(of, looks_before, state)
    looks = in_looks(observations)
    state, decision, taken = gate.replay(of, looks, state)
    looks = looks[:taken]
    about: dict[str, Any] = {"candidate": parties[0], "incumbent": parties[1], "plan": of, "suite": "s.jsonl"}
    about["suite_sha256"] = "1" * 64
    if not last and history.budget != budget:
        body = Declaration(rule=budget.rule, alpha=budget.alpha, horizon=budget.horizon)
        ledger.append("budget", body.model_dump(), who="tests")
    for look in looks:
        prompts = tuple(dict.fromkeys(one.prompt for one in look.fresh))
        ids = {"fresh": tuple(one.item for one in look.fresh), "regression": tuple(one.item for one in look.regression)}
        meant = Intent(**about, **ids, prompts=prompts, answers={}, content="2" * 64)
        entry = ledger.append("intent", meant.model_dump(mode="json"), who="tests")
    if killed:
        return entry
    found = Ruling(
        **about,
        evidence=ledger.keep({"looks": [look.model_dump(mode="json") for look in looks]}),
        prompts=tuple(dict.fromkeys(one.prompt for look in looks for one in look.fresh)),
        verdict=decision.verdict,
        reasons=decision.reasons,
        items=state.items,
        missing=state.missing,
        difference=float(state.gains.mean()) if len(state.gains) else None,
        e_value=decision.e_value,
        standings=standings(decision.standings),
    )
    return ledger.append("verdict", found.model_dump(mode="json"), who="tests")


def rewrite(ledger: Ledger, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """Change entries, and make all hashes and the head anew, as somebody can who knows the format and has no key."""
    entries = [entry.model_dump() for entry in ledger.entries()]
    change(entries)
    previous, lines = FIRST, []
    for number, entry in enumerate(entries, start=1):
        forged = Entry(**{**entry, "number": number, "previous": previous, "sha256": ""})
        previous = forged.digest()
        lines.append(canonical(forged.model_copy(update={"sha256": previous}).model_dump()) + b"\n")
    ledger.file.write_bytes(b"".join(lines))
    head = json.loads((ledger.folder / "head.json").read_bytes()) | {"number": len(entries), "sha256": previous}
    (ledger.folder / "head.json").write_text(json.dumps(head))
