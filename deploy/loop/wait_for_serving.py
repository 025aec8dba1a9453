"""Whether the running server, or fleet, follows the pointer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from deploy.config.root import Settings
from deploy.loop import promotion
from serve.policies.store import Pointer, PolicyStore, StalePointer

if TYPE_CHECKING:
    import httpx

SERVER_TIMEOUT_S = 5.0


class NotServed(RuntimeError):
    """The server does not serve the policy that the pointer names; the text says why."""


def ask_server(
    settings: Settings, path: str, *, headers: dict[str, str] | None = None, timeout_s: float = SERVER_TIMEOUT_S
) -> httpx.Response:
    """What the configured server answers to a GET. Raises httpx.HTTPError if it does not.

    It is this machine's and speaks plain HTTP: no proxy of the environment is asked, and no certificates are read,
    which would take 20 ms of processor time a request.
    """
    import httpx

    return httpx.get(f"{settings.server_url}{path}", headers=headers, timeout=timeout_s, trust_env=False, verify=False)


def server_policy(settings: Settings) -> dict[str, Any] | None:
    """The answer of ``GET /policy`` of the configured server; None if there is none, or it is another home's."""
    import httpx

    try:
        answer = ask_server(settings, "/policy", headers=settings.server_headers)
        answer.raise_for_status()
        body = answer.json()
    except (httpx.HTTPError, ValueError):
        return None
    if not isinstance(body, dict) or is_of_another(body, settings.policy_store()):
        return None
    return body


def is_of_another(policy: dict[str, Any], store: PolicyStore) -> bool:
    """Whether an answer of ``GET /policy`` is of a server that serves from another store."""
    own = store.identity()
    return own is not None and policy.get("store") not in (None, own)


def wait_until_served(
    settings: Settings, store: PolicyStore, pointer: Pointer, *, say: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Wait until the server, or the whole fleet, serves the pointer's policy; {seconds, replica}.

    A server that reports that it could not load it keeps the old policy; then the pointer goes back too, so that a
    restart doesn't try the same again. Raises NotServed for that and when cycle.swap_timeout_s has passed, which a
    fleet's canary has its own time beside. ``say``: gets a line when that takes longer for want of requests.
    """
    started = time.monotonic()
    fleet, most_s, held = settings.serve.fleet, settings.cycle.swap_timeout_s, False
    asleep_s = 0.0
    while (looked := time.monotonic()) < started + most_s + asleep_s:
        answer = server_policy(settings) or {}
        if answer.get("phase") is not None:  # by its own report: it may be a fleet where this configuration has none
            most_s = settings.cycle.swap_timeout_s + fleet.longest_canary_s
        if not held and (answer.get("rollout") or {}).get("held"):
            held = True
            say(
                f"the canary of policy {pointer.version} has answered too few requests yet: it is held for up to "
                f"serve.fleet.canary_hold_seconds={fleet.canary_hold_seconds:g} s"
            )
        if (
            answer.get("version") == pointer.version
            and answer.get("generation", pointer.generation) >= pointer.generation
        ):
            return {"seconds": time.monotonic() - started, "replica": answer.get("replica")}
        failed = answer.get("failed")
        undoing = answer.get("phase") == "undoing"  # a fleet that goes back, and then moves the pointer itself
        if isinstance(failed, dict) and failed.get("generation") == pointer.generation and not undoing:
            why = f"the server could not load policy {pointer.version}: {failed.get('error') or failed}"
            raise NotServed(f"{why}; {_back(store, pointer, why)}")
        time.sleep(0.25)
        if (answer.get("sleep") or {}).get("state", "awake") != "awake":  # others have its devices: nobody swaps
            asleep_s += time.monotonic() - looked
    raise NotServed(
        f"the server at {settings.server_url} does not serve policy {pointer.version} after {most_s:g} s "
        f"(cycle.swap_timeout_s={settings.cycle.swap_timeout_s:g} s, and a fleet's canary)"
    )


def _back(store: PolicyStore, refused: Pointer, why: str) -> str:
    """Where the pointer is, after it went back if the server has not seen to that itself."""
    current = store.serving()
    if current is not None and current.generation == refused.generation:
        store.record_outcome(refused, served=False, by="cycle")
        try:
            return f"the pointer is back at {promotion.rollback(store, who='cycle', why=why, expected=refused).version}"
        except (promotion.PromotionRefused, StalePointer) as error:
            return str(error)
    return f"the pointer is at {current.version if current else None}"
