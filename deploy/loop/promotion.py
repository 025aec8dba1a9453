"""Promotion and rollback: moving the serving pointer, with the gate's verdict or a person's name on record.

What decides is the ledger. Every move of the pointer is put into it too, whoever made it: by ``record_moves``, behind
the move, so that one that was killed in between, or a server's own move back, gets there with the next.
"""

from __future__ import annotations

import os
import pwd
import socket
from collections.abc import Iterable
from typing import Any

from evaluation.decisions.ledger import MOVES, Entry, Kind, Ledger, LedgerError
from serve.policies.retention import in_marked_line, retraining_parent
from serve.policies.store import Pointer, PolicyError, PolicyStore, RecordDamaged


class PromotionRefused(RuntimeError):
    """The pointer was not moved; the text says why and what to do."""


class ExperimentRefused(RuntimeError):
    """No experiment was started; the text says why and what to do."""


def promote(
    store: PolicyStore,
    ledger: Ledger,
    version: int,
    *,
    who: str,
    why: str,
    override: bool = False,
    expected: Pointer | None = None,
) -> Pointer:
    """Point the servers at ``version``, which must have passed the gate against the policy that serves.

    That is so if the ledger has a passing verdict on these two policies, by the hashes of their files, and the one by
    which the policy that serves was promoted.

    The first policy of a store needs no verdict: there is nothing to compare it with. Neither does the one that the
    pointer names, as long as it is not on record that it serves: it gets a new generation, at which a replica that
    failed to load it tries again. Once it serves there is nothing to move, but by ``override``. What an erasure has
    reached is not promoted while there is a policy to train from that it has spared. ``override`` promotes all the
    same; who and why stay in the pointer's history, marked as an override. ``expected`` is the pointer on which the
    decision was taken, by default the current one.

    Raises PromotionRefused (it serves already, no passing verdict, another ledger, marked for retraining, or an
    override without a reason), serve.policies.store.PolicyNotFound, PolicyCorrupt (a file differs from the manifest)
    and StalePointer (the pointer was moved meanwhile).
    """
    store.verify(version)
    # Read after the verification, which takes a while: the verdict, and what serves, may be others by then.
    pointer, verdict = expected or store.serving(), None
    if pointer is not None and pointer.version != version:
        verdict, objection = verdict_on(store, ledger, version, pointer.version, override=override)
        objections = (objection, _lost_verdict(ledger, pointer), erased_from(store, version))
        if objection := "; ".join(filter(None, objections)):
            verdict = _overridden(verdict, objection, f"millrace promote {version}", override=override, why=why)
    elif pointer is not None and not override and _serves(store, pointer):
        raise PromotionRefused(
            f"policy {version} serves already, since {pointer.at[:19]}: nothing was moved; to have servers that could "
            f"not load it try again: millrace promote {version} --override --why '...'"
        )
    return store.promote(version, expected=pointer.version if pointer else None, who=who, why=why, verdict=verdict)


def _serves(store: PolicyStore, pointer: Pointer) -> bool:
    """Whether servers have said that they serve what the pointer names, and none that it can't."""
    try:
        said = [one.served for one in store.outcomes() if one.generation == pointer.generation]
    except RecordDamaged:
        return False
    return bool(said) and all(said)


def rollback(
    store: PolicyStore,
    *,
    who: str,
    why: str,
    to: int | None = None,
    override: bool = False,
    expected: Pointer | None = None,
) -> Pointer:
    """Point back at the policy that served before, or at ``to``.

    A policy that has not served, also one that the servers refused, is rolled back to by ``override`` only, as it would
    be promoted. So is any if the record of what has served is damaged. A second rollback goes further back, not forward
    again to what the first one left. ``expected``: the move that is to be undone, by default the last one.

    Raises PromotionRefused if there is nothing to go back to or that can't be known, and what ``promote`` raises.
    """
    pointer = expected or store.serving()
    if pointer is None:
        raise PromotionRefused(f"nothing serves in {store.root}: there is nothing to roll back")
    target, served, damage = to, set[int](), None
    try:
        served = store.served()
    except RecordDamaged as error:
        damage = str(error)
    if target is None:
        if damage is not None:
            raise PromotionRefused(f"{damage}; or name the policy yourself: --to VERSION --override --why '...'")
        before = [version for version in _before(store.history()) if version in served]
        if not before:
            raise PromotionRefused(
                f"policy {pointer.version} is the first that served: there is nothing to go back to; to one that has "
                "not served: --to VERSION --override --why '...'"
            )
        target = before[-1]
    if target == pointer.version:
        raise PromotionRefused(f"policy {target} serves already")
    store.verify(target)
    verdict: dict[str, object] = {"rollback_from": pointer.version}
    if target not in served:
        command = f"millrace rollback --to {target}"
        objection = damage or f"policy {target} has not served"
        verdict = _overridden(verdict, objection, command, override=override, why=why)
    return store.promote(target, expected=pointer, who=who, why=why, verdict=verdict)


def _overridden(
    verdict: dict[str, object] | None, objection: str, command: str, *, override: bool, why: str
) -> dict[str, object]:
    """The verdict of an override. Raises PromotionRefused if it is none, or has no reason."""
    if not override:
        raise PromotionRefused(f"{objection}; to override: {command} --override --why '...'")
    if not why.strip():
        raise PromotionRefused(f"{objection}, and an override needs a reason, which is recorded: --why '...'")
    return {**(verdict or {}), "override": True, "objection": objection}


def person() -> str:
    """user@host of this process, for the record."""
    try:
        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container's user without an entry
        name = f"uid{os.getuid()}"
    return f"{name}@{socket.gethostname()}"


def record_moves(store: PolicyStore, ledger: Ledger) -> list[Entry]:
    """Put the moves of the pointer that are not in the ledger yet into it, in order; the entries.

    Raises LedgerError: the pointer stays where it is.
    """
    try:
        known = {_move(entry) for entry in ledger.entries() if entry.kind in MOVES}
        moves = [pointer for pointer in store.history() if (pointer.generation, pointer.at) not in known]
        return [_record(store, ledger, pointer) for pointer in moves]
    except LedgerError as error:
        pointer = store.serving()
        serves = "" if pointer is None else f"the pointer names policy {pointer.version}, and "
        raise LedgerError(f"{serves}the ledger can't take that up: {error}") from error


def missing_from(ledger: Ledger, store: PolicyStore) -> list[str]:
    """What policies and moves of the pointer refer to, and what the ledger doesn't have: each in a sentence."""
    entries = {entry.sha256: entry for entry in ledger.entries()}
    claims: list[tuple[str, dict[str, Any], str | None]] = []
    for version in store.versions():
        policy = store.get(version)
        claims.append((f"the verdict on policy {version}", dict(policy.gate or {}), policy.sha256))
    for pointer in store.history():
        claims.append((f"the verdict of move {pointer.generation} of the pointer", dict(pointer.verdict or {}), None))
    found = []
    for what, verdict, sha256 in claims:
        if (named := verdict.get("entry_sha256")) is None:
            continue
        entry = entries.get(named)
        if entry is None:
            found.append(f"{what} is entry {verdict.get('entry')}, which the ledger does not have")
        elif entry.body.get("verdict") != verdict.get("verdict"):
            found.append(f"{what} is {verdict.get('verdict')}, and entry {entry.number} says {entry.body['verdict']}")
        elif sha256 is not None and entry.body["candidate"]["sha256"] != sha256:
            found.append(f"{what} is entry {entry.number}, which is on other files")
    return found


def learned_items(ledger: Ledger, store: PolicyStore) -> list[str]:
    """Looks at items that their candidates have learned from, as far as that is known: each in a sentence.

    Raises PolicyCorrupt if the list of what a policy has learned from is not the one that was published.
    """
    looks = [entry for entry in ledger.entries() if entry.kind in ("intent", "verdict")]
    judged = {entry.body["candidate"]["sha256"] for entry in looks}
    versions = {sha256: version for version in store.versions() if (sha256 := store.get(version).sha256) in judged}
    learned = {sha256: store.learned_prompts(version)[0] for sha256, version in versions.items()}
    found = []
    for entry in looks:
        sha256 = entry.body["candidate"]["sha256"]
        if again := learned.get(sha256, frozenset()).intersection(entry.body["prompts"]):
            found.append(
                f"entry {entry.number} is on {len(again)} prompts that policy {versions[sha256]} has learned from"
            )
    return found


def _record(store: PolicyStore, ledger: Ledger, pointer: Pointer) -> Entry:
    verdict = dict(pointer.verdict or {})
    kind: Kind = "rollback" if "rollback_from" in verdict else "promotion"
    body = {
        "version": pointer.version,
        "sha256": _sha256(store, pointer.version),
        "previous": pointer.previous,
        "previous_sha256": _sha256(store, pointer.previous),
        "generation": pointer.generation,
        "at": pointer.at,
        "why": pointer.why,
        "override": bool(verdict.get("override")),
        "objection": verdict.get("objection"),
        "verdict_entry": verdict.get("entry"),
    }
    move = (pointer.generation, pointer.at)

    def recorded(entries: list[Entry]) -> str | None:
        known = any(_move(entry) == move for entry in entries if entry.kind in MOVES)
        return f"move {pointer.generation} of the pointer is there already" if known else None

    try:
        return ledger.append(kind, body, who=pointer.who, unless=recorded)
    except LedgerError:
        there = [entry for entry in ledger.entries() if entry.kind in MOVES and _move(entry) == move]
        if not there:
            raise
        return there[0]  # another process was faster


def _move(entry: Entry) -> tuple[int, str]:
    """What tells a move of the pointer from all others; a new home counts from 1 again."""
    return entry.body["generation"], entry.body["at"]


def _sha256(store: PolicyStore, version: int | None) -> str | None:
    """Of a policy's files; None if its manifest is gone."""
    try:
        return None if version is None else store.get(version).sha256
    except PolicyError:
        return None


def verdict_on(
    store: PolicyStore, ledger: Ledger, version: int, incumbent: int, *, override: bool
) -> tuple[dict[str, object] | None, str | None]:
    """The ledger's verdict on a candidate, as the pointer's history keeps it; and why it doesn't let it serve.

    An experiment that it has harmed since is such a reason too, and so is a shadow that shows harm. A ledger that can't
    be read is an objection to override, and raised where nobody does.
    """
    from evaluation.decisions.history import History, hypothesis

    evaluate = f"run `millrace evaluate {version}`"
    try:
        history = History.of(ledger.entries())
    except LedgerError as error:
        if not override:
            raise
        return None, str(error)
    sha256 = store.get(version).sha256
    races = [race[-1] for race in history.races.values() if race[-1][1].candidate.sha256 == sha256]
    if not races:
        return None, f"policy {version} was not evaluated: {evaluate}"
    asked = hypothesis(sha256, str(_sha256(store, incumbent)))
    against = [race for race in races if race[1].hypothesis == asked]
    entry, found = max(against or races, key=lambda race: race[0].number)
    verdict: dict[str, object] = {
        "verdict": found.verdict,
        "reasons": list(found.reasons),
        "candidate": version,
        "incumbent": found.incumbent.version,
        "difference": found.difference,
        "items": found.items,
        "e_value": found.e_value,
        "level": found.plan.level,
        "entry": entry.number,
        "entry_sha256": entry.sha256,
    }
    reasons = "; ".join(found.reasons) or "no reason"
    if found.verdict == "undecided":
        return verdict, f"policy {version} is undecided ({reasons}): {evaluate}"
    if found.verdict != "pass":
        return verdict, f"policy {version} did not pass the gate ({reasons})"
    if not against:
        return verdict, (
            f"policy {version} passed the gate against policy {found.incumbent.version}, "
            f"but policy {incumbent} serves: {evaluate}"
        )
    for tried in (other.body for other in history.others if other.kind == "experiment"):
        pair = hypothesis(tried["candidate"]["sha256"], tried["control"]["sha256"])
        if pair == asked and tried.get("decision") in ("roll back", "failed"):
            why = f"experiment {tried['number']} came to: {tried['decision']}: {tried['why']}"
            return verdict, f"policy {version} passed the gate, and {why}"
    if harm := shadow_objection(store, history.others, version, incumbent):
        return verdict, f"policy {version} passed the gate, and {harm}"
    return verdict, None


def shadow_objection(store: PolicyStore, entries: Iterable[Entry], version: int, incumbent: int) -> str | None:
    """What harm a shadow has shown of a candidate beside an incumbent, by these entries of the ledger; None if none."""
    return harm_of_shadow(entries, store.get(version).sha256, str(_sha256(store, incumbent)))


def harm_of_shadow(entries: Iterable[Entry], candidate: str, incumbent: str) -> str | None:
    """The same by the sha256 of both policies."""
    from evaluation.decisions.history import shadow_harm

    for entry in entries:
        if entry.kind == "shadow" and (harm := shadow_harm(entry, candidate, incumbent)):
            return f"its shadow (entry {entry.number}) did harm: {harm}"
    return None


def _lost_verdict(ledger: Ledger, pointer: Pointer) -> str | None:
    """Why a ledger is not the one by which what serves was promoted; None if it is, or none was needed.

    In another one, or in one of which lines were removed, levels would be given again that were given before.
    """
    verdict = pointer.verdict or {}
    if (named := verdict.get("entry_sha256")) is None:
        return None
    try:
        if any(entry.sha256 == named for entry in ledger.entries()):
            return None
    except LedgerError:
        return None  # which is an objection already
    return (
        f"policy {pointer.version} serves by entry {verdict.get('entry')} of a ledger, which {ledger.file} does not "
        "have: restore evaluation.decisions"
    )


def erased_from(store: PolicyStore, version: int) -> str | None:
    """Why an erasure doesn't let it serve; None if it does, or if there is no policy to train from that it has spared.

    Training then goes on from what serves, and what that brings has learned from fewer of the erased rows.
    """
    if store.get(version).marked:
        return f"policy {version} is marked for retraining: an erasure has reached it"
    if in_marked_line(store, version) and (clean := retraining_parent(store, version)) is not None:
        return (
            f"policy {version} descends from one that is marked for retraining; training starts from policy "
            f"{clean.version}, which is not"
        )
    return None


def _before(history: list[Pointer]) -> list[int]:
    """What the pointer named before the current policy, oldest first; what was rolled back no longer counts."""
    named: list[int] = []
    for pointer in history:
        if "rollback_from" in (pointer.verdict or {}) and pointer.version in named:
            while named[-1] != pointer.version:
                named.pop()
        elif not named or named[-1] != pointer.version:
            named.append(pointer.version)
    return [version for version in named[:-1] if version != named[-1]]
