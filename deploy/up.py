"""``millrace up``: the server and the scheduler, watched together, started and stopped in order."""

from __future__ import annotations

import time
from collections.abc import Callable

from deploy.config.root import Settings
from deploy.loop import preflight
from deploy.loop.schedule import trigger
from deploy.supervise.children import Child, start
from feedback.files import locked

_POLL_S = 0.2


class UpFailed(RuntimeError):
    """The product can't run or stopped running; the text says which process and why, ``exit_code`` is the process's."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def up(
    settings: Settings,
    *,
    schedule: bool = True,
    say: Callable[[str, str], None],
    ready: Callable[[], None] | None = None,
) -> None:
    """Run the server, and the scheduler with it unless ``schedule`` is off, until a signal raises or one of them ends.

    say: gets (process, line) for each line that a process writes; its whole output is in ``up.logs`` too.
    ready: called once everything runs.
    Raises UpFailed when a process ends by itself; nothing is restarted in silence. However this ends, the scheduler
    is stopped first and then the server, so that no cycle promotes into a server that is going.
    """
    if settings.policy_store().serving() is None:
        raise UpFailed(f"no policy serves in {settings.home}: run `millrace init --model NAME_OR_FOLDER` first")
    if schedule:
        preflight.check(settings)
        trigger(settings.schedule)
    lock = settings.path(".up.lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    with locked(lock, 0.0, busy=UpFailed(f"another `millrace up` runs in {settings.home}")):
        children: list[Child] = []
        try:
            server = _start("serve", settings, say)
            children.append(server)
            _wait_until_ready(server, settings)
            say("up", f"serving on {settings.server_url}")
            if schedule:
                children.append(_start("schedule", settings, say))
            if ready:
                ready()
            _watch(children, say)
        finally:
            for child in reversed(children):
                if child.poll() is None:
                    say("up", f"stopping {child.name}")
                    child.stop()


def _start(name: str, settings: Settings, say: Callable[[str, str], None]) -> Child:
    grace = settings.up.stop_grace_s
    return start(settings, name, [name], log=f"{name}.log", grace=grace, follow=lambda line: say(name, line))


def _wait_until_ready(server: Child, settings: Settings) -> None:
    import httpx

    deadline = time.monotonic() + settings.up.ready_timeout_s
    last = "it does not answer"
    while time.monotonic() < deadline:
        if (code := server.poll()) is not None:
            raise UpFailed(server.ended(code), code or 1)
        try:
            answer = httpx.get(f"{settings.server_url}/ready", timeout=2.0)
            if answer.status_code == 200:
                return
            last = f"it answers {answer.status_code}: {answer.text[:300]}"
        except httpx.HTTPError as error:
            last = f"it does not answer ({type(error).__name__})"
        time.sleep(_POLL_S)
    raise UpFailed(
        f"the server is not ready after up.ready_timeout_s={settings.up.ready_timeout_s:g} s: {last}\n{server.tail()}"
    )


def _watch(children: list[Child], say: Callable[[str, str], None]) -> None:
    running = list(children)
    while True:
        for child in list(running):
            code = child.poll()
            if code == 0 and child.name == "schedule":
                say("up", "the schedule has come to its end; serving goes on")
                running.remove(child)
            elif code is not None:
                raise UpFailed(child.ended(code), code or 1)
        time.sleep(_POLL_S)
