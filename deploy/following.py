"""Whether the running server, or fleet, follows the pointer."""

from __future__ import annotations

import time
from typing import Any

from deploy import rollout
from deploy.config import Settings
from serve.policies import Pointer, PolicyStore

SERVER_TIMEOUT_S = 5.0


class NotServed(RuntimeError):
    """The server does not serve the policy that the pointer names; the text says why."""


def server_policy(settings: Settings) -> dict[str, Any] | None:
    """What ``GET /policy`` of the configured server says; None if nobody answers there."""
    import httpx

    try:
        answer = httpx.get(f"{settings.server_url}/policy", headers=settings.server_headers, timeout=SERVER_TIMEOUT_S)
        answer.raise_for_status()
        body = answer.json()
    except (httpx.HTTPError, ValueError):
        return None
    return body if isinstance(body, dict) else None


def wait_until_served(settings: Settings, store: PolicyStore, pointer: Pointer) -> dict[str, Any]:
    """Wait until the server, or the whole fleet, serves the pointer's policy; {seconds, replica}.

    A server that reports that it could not load it keeps the old policy; then the pointer goes back too, so that a
    restart doesn't try the same again. Raises NotServed for that and when cycle.swap_timeout_s has passed, which a
    fleet's canary has its own time beside.
    """
    started = time.monotonic()
    fleet = settings.serve.fleet
    deadline = started + settings.cycle.swap_timeout_s + (0 if fleet.is_one else fleet.canary_seconds)
    while time.monotonic() < deadline:
        answer = server_policy(settings) or {}
        if (
            answer.get("version") == pointer.version
            and answer.get("generation", pointer.generation) >= pointer.generation
        ):
            return {"seconds": time.monotonic() - started, "replica": answer.get("replica")}
        failed = answer.get("failed")
        undoing = answer.get("phase") == "undoing"  # a fleet that goes back, and then moves the pointer itself
        if isinstance(failed, dict) and failed.get("generation") == pointer.generation and not undoing:
            why = f"the server could not load policy {pointer.version}: {failed.get('error') or failed}"
            current = store.serving()
            if current is not None and current.generation != pointer.generation:
                why += f"; the pointer is at {current.version}"
            elif pointer.previous is not None and pointer.previous != pointer.version:
                rollout.rollback(store, who="cycle", why=why, to=pointer.previous)
                why += f"; the pointer is back at {pointer.previous}"
            raise NotServed(why)
        time.sleep(0.25)
    raise NotServed(
        f"the server at {settings.server_url} does not serve policy {pointer.version} after "
        f"cycle.swap_timeout_s={settings.cycle.swap_timeout_s:g} s"
    )
