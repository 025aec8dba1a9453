"""Promotion and rollback: moving the serving pointer, with the gate's verdict or a person's name on record."""

from __future__ import annotations

import os
import pwd
import socket

from serve.policies.retention import in_marked_line, retraining_parent
from serve.policies.store import Pointer, PolicyStore, RecordDamaged


class PromotionRefused(RuntimeError):
    """The pointer was not moved; the text says why and what to do."""


def promote(
    store: PolicyStore,
    version: int,
    *,
    who: str,
    why: str,
    override: bool = False,
    expected: Pointer | None = None,
) -> Pointer:
    """Point the servers at ``version``, which must have passed the gate against the policy that serves.

    The first policy of a store needs no verdict: there is nothing to compare it with. Neither does the one that serves
    already: it gets a new generation, at which a replica that failed to load it tries again. What an erasure has
    reached is not promoted while there is a policy to train from that it has spared. ``override`` promotes all the
    same; who and why stay in the pointer's history, marked as an override. ``expected`` is the pointer on which the
    decision was taken, by default the current one.

    Raises PromotionRefused (no passing verdict, marked for retraining, or an override without a reason),
    serve.policies.store.PolicyNotFound, PolicyCorrupt (a file differs from the manifest) and StalePointer (the pointer
    was moved meanwhile).
    """
    store.verify(version)
    # Read after the verification, which takes a while: the verdict, and what serves, may be others by then.
    gate, pointer = store.get(version).gate, expected or store.serving()
    verdict = dict(gate) if gate else None
    if pointer is not None and pointer.version != version:
        objections = (_objection(version, verdict, pointer.version), _erased_from(store, version))
        if objection := "; ".join(filter(None, objections)):
            verdict = _overridden(verdict, objection, f"millrace promote {version}", override=override, why=why)
    return store.promote(version, expected=pointer.version if pointer else None, who=who, why=why, verdict=verdict)


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


def _objection(version: int, verdict: dict[str, object] | None, incumbent: int) -> str | None:
    """Why the verdict doesn't let ``version`` replace ``incumbent``; None if it does."""
    evaluate = f"run `millrace evaluate {version}`"
    if verdict is None:
        return f"policy {version} was not evaluated: {evaluate}"
    if verdict.get("verdict") != "pass":
        reasons = verdict.get("reasons")
        why = "; ".join(map(str, reasons)) if isinstance(reasons, (list, tuple)) and reasons else "no reason"
        return f"policy {version} did not pass the gate ({why})"
    if verdict.get("incumbent") != incumbent:
        return (
            f"policy {version} passed the gate against policy {verdict.get('incumbent')}, "
            f"but policy {incumbent} serves: {evaluate}"
        )
    return None


def _erased_from(store: PolicyStore, version: int) -> str | None:
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
