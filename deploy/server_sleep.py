"""Has this home's server sleep while a command has its devices, by a lease that is renewed until the command ends."""

from __future__ import annotations

import gc
import os
import platform
import secrets
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from deploy import devices
from deploy.config.root import Settings
from deploy.loop.wait_for_serving import SERVER_TIMEOUT_S, ask_server, is_of_another
from train.planner.assignment import Role

if TYPE_CHECKING:
    import httpx

_RENEWALS: Final = 4
"""In the time of a lease, so that three may fail."""


class ServerAwake(RuntimeError):
    """The server, which has the devices, does not sleep; the text says why not, and what to do."""


@contextmanager
def asleep(settings: Settings, role: Role, *, say: Callable[[str], None]) -> Iterator[None]:
    """Within, the home's server sleeps, if there is one and the role has its devices in turns with it.

    However the block ends, it wakes: because this process tells it, or because this process does not any more.
    Raises ServerAwake before the block.
    """
    found = devices.assigned(settings)
    if found is None or role not in found.waits_for or not _serves_here(settings):
        yield
        return
    host = platform.node()[:100]
    lease = _Lease(settings, f"{role} of process {os.getpid()} on {host}, {secrets.token_hex(3)}")
    say(f"waiting until the server sleeps, whose devices {role} has meanwhile")
    lease.begin()
    say("the server sleeps")
    try:
        yield
    finally:
        give_back_memory()  # before the server takes it again
        lease.end(say)


def give_back_memory() -> None:
    """Give this process's unused memory of devices back, of which torch keeps all that a model had."""
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


def _serves_here(settings: Settings) -> bool:
    """Whether a server answers where the settings have one, and is not known to be another home's.

    Raises ServerAwake if it does not say so in time.
    """
    import httpx

    try:
        if ask_server(settings, "/health").status_code != 200:
            return False
        policy = ask_server(settings, "/policy", headers=settings.server_headers).json()
    except (httpx.ConnectError, ValueError):
        return False
    except httpx.HTTPError as error:
        raise ServerAwake(f"{settings.server_url} does not say whether it serves: {error!r}; ask again") from error
    return isinstance(policy, dict) and not is_of_another(policy, settings.policy_store())


class _Lease:
    def __init__(self, settings: Settings, holder: str) -> None:
        self._settings, self._holder = settings, holder
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="server sleeps", daemon=True)

    def begin(self) -> None:
        """Return when the server sleeps. Raises ServerAwake."""
        import httpx

        serve = self._settings.serve
        # A swap that is under way ends first, and then requests do.
        longest = serve.swap.prepare_timeout_s + serve.sleep.drain_timeout_s + serve.sleep.timeout_s + SERVER_TIMEOUT_S
        try:
            answer = self._tell("/server/sleep", longest)
        except httpx.HTTPError as error:
            self._let_go()
            raise ServerAwake(f"{self._settings.server_url} does not say that it sleeps: {error}") from error
        except BaseException:
            self._let_go()
            raise
        if answer.status_code != 200:
            raise ServerAwake(f"the server at {self._settings.server_url} does not sleep: {_detail(answer)}")
        self._thread.start()

    def end(self, say: Callable[[str], None]) -> None:
        """Have it wake, and return when it has."""
        self._ended.set()
        self._thread.join(SERVER_TIMEOUT_S)
        if why := self._let_go():
            say(f"the server could not be woken ({why}): it wakes by itself within devices.lease_s")
        else:
            say("the server is awake")

    def _let_go(self) -> str | None:
        """Why it could not be told; None if it was."""
        import httpx

        serve = self._settings.serve
        try:
            answer = self._tell("/server/wake", serve.sleep.timeout_s + serve.sleep.drain_timeout_s + SERVER_TIMEOUT_S)
        except httpx.HTTPError as error:
            return str(error) or type(error).__name__
        return None if answer.status_code == 200 else _detail(answer)

    def _renew(self) -> None:
        """What fails is tried again; a server that has woken meanwhile sleeps again."""
        import httpx

        while not self._ended.wait(self._settings.devices.lease_s / _RENEWALS):
            try:
                self._tell("/server/sleep", self._settings.devices.lease_s)
            except httpx.HTTPError:
                continue

    def _tell(self, path: str, timeout_s: float) -> httpx.Response:
        import httpx

        body: dict[str, Any] = {"holder": self._holder}
        if path == "/server/sleep":
            body |= {"lease_s": self._settings.devices.lease_s, "why": "devices in turns"}
        return httpx.post(
            f"{self._settings.server_url}{path}",
            json=body,
            headers=self._settings.server_headers,
            timeout=timeout_s,
            trust_env=False,
            verify=False,
        )


def _detail(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return f"it answers {answer.status_code}"
