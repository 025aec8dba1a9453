"""Promotion and rollback: moving the serving pointer, with the gate's verdict or a person's name on record."""

from __future__ import annotations

import os
import pwd
import socket

from serve.policies import Pointer, PolicyStore


class RolloutRefused(RuntimeError):
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
    already: it gets a new generation, at which a replica that failed to load it tries again. ``override`` promotes
    without a passing verdict; who and why stay in the pointer's history, marked as an override. ``expected`` is the
    pointer on which the decision was taken; the current one if not given.

    Raises RolloutRefused (no passing verdict), serve.policies.PolicyNotFound, PolicyCorrupt (a file differs from the
    manifest) and StalePointer (somebody moved the pointer meanwhile).
    """
    policy = store.verify(version)
    pointer = expected or store.serving()
    verdict = dict(policy.gate) if policy.gate else None
    if pointer is not None and pointer.version != version:
        objection = _objection(version, verdict, pointer.version)
        if objection and not override:
            raise RolloutRefused(f"{objection}; or promote it on your own account: --override --why '...'")
        if objection:
            verdict = {**(verdict or {}), "override": True, "objection": objection}
    return store.promote(version, expected=pointer.version if pointer else None, who=who, why=why, verdict=verdict)


def rollback(store: PolicyStore, *, who: str, why: str, to: int | None = None) -> Pointer:
    """Point back at the policy that served before, or at ``to``.

    A second rollback goes further back, not forward again to what the first one left.
    Raises RolloutRefused if there is nothing to go back to, and what PolicyStore.verify and promote raise.
    """
    pointer = store.serving()
    if pointer is None:
        raise RolloutRefused(f"nothing serves in {store.root}: there is nothing to roll back")
    target = to if to is not None else _before(store.history())
    if target is None:
        raise RolloutRefused(f"policy {pointer.version} is the first that served: there is nothing to go back to")
    if target == pointer.version:
        raise RolloutRefused(f"policy {target} serves already")
    store.verify(target)
    return store.promote(target, expected=pointer.version, who=who, why=why, verdict={"rollback_from": pointer.version})


def person() -> str:
    """user@host of whoever runs this process, for the record."""
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
        said = "; ".join(map(str, reasons)) if isinstance(reasons, (list, tuple)) and reasons else "no reason given"
        return f"policy {version} did not pass the gate ({said})"
    if verdict.get("incumbent") != incumbent:
        return (
            f"policy {version} passed the gate against policy {verdict.get('incumbent')}, "
            f"but policy {incumbent} serves: {evaluate}"
        )
    return None


def _before(history: list[Pointer]) -> int | None:
    """What served before the current policy, as a person would say: what was rolled back no longer counts."""
    served: list[int] = []
    for pointer in history:
        if "rollback_from" in (pointer.verdict or {}) and pointer.version in served:
            while served[-1] != pointer.version:
                served.pop()
        elif not served or served[-1] != pointer.version:
            served.append(pointer.version)
    return served[-2] if len(served) > 1 else None
