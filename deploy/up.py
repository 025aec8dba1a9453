"""``millrace up``: the server and the scheduler, watched together, started and stopped in order.

With a model it makes the home first, and opens the loop as far as the settings let it.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable

from deploy import devices, initialise, memory_check
from deploy.config.root import ConfigError, Settings
from deploy.loop import preflight
from deploy.loop.cycle import LOCK_WAIT_S
from deploy.loop.records import LOOP_OFF, RUNNING
from deploy.loop.schedule import trigger
from deploy.loop.wait_for_serving import ask_server
from deploy.supervise.children import Child, start
from feedback.files import locked, replace_file
from serve.middleware.connections import bind

_POLL_S = 0.2


class UpFailed(RuntimeError):
    """The product can't run or stopped running; the text says which process and why, ``exit_code`` is the process's."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def up(
    settings: Settings,
    *,
    schedule: bool | None = None,
    list_switches: bool = False,
    say: Callable[[str, str], None],
    ready: Callable[[], None] | None = None,
) -> None:
    """Run the server, and the scheduler with it, until a signal raises or one of them ends.

    schedule: False: serve alone. None: where no cycle can work, say why and look at experiments all the same. True:
    raise ConfigError there.
    list_switches: say what of the loop is on and off, and how to change it.
    say: gets (process, line) for each line that a process writes; its whole output is in ``up.logs`` too.
    ready: called once everything runs.
    Raises UpFailed when a process ends by itself; nothing is restarted in silence. However this ends, the scheduler
    is stopped first and then the server, so that no cycle promotes into a server that is going.
    """
    if settings.policy_store().serving() is None:
        raise UpFailed(f"no policy serves in {settings.home}: name a model, `millrace up NAME_OR_FOLDER`")
    lock = settings.path(".up.lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    with locked(lock, LOCK_WAIT_S, busy=UpFailed(f"another `millrace up` runs in {settings.home}")):
        _require_free_port(settings)
        assignment = devices.required(settings)
        memory_check.require_server(settings, None, lambda _: None)  # the server itself prints what is no error
        if assignment is not None:
            say("up", f"devices: {assignment}")
        if list_switches:
            for line in switches(settings):
                say("up", line)
        off = "" if schedule is False else _why_off(settings, required=bool(schedule), say=say)
        children: list[Child] = []
        replace_file(settings.path(LOOP_OFF), off.encode())
        replace_file(settings.path(RUNNING), str(settings.snapshot()).encode())
        try:
            server = _start("serve", settings, say)
            children.append(server)
            wait_until_ready(server, settings)
            say("up", f"serving on {settings.server_url}; the console is {settings.server_url}/console/")
            if schedule is not False:  # an experiment that a person starts is watched, whether cycles work or not
                children.append(_start("schedule", settings, say, *(["--no-cycles"] if off else [])))
            if ready:
                ready()
            _watch(children, say)
        finally:
            for child in reversed(children):
                if child.poll() is None:
                    say("up", f"stopping {child.name}")
                    child.stop()


def _require_free_port(settings: Settings) -> None:
    """Raises UpFailed: else another program's answer would be taken for the server's."""
    try:
        bind(settings.serve.host, settings.serve.port).close()
    except OSError as error:
        taken = "another program has it; stop that, or choose another port: --serve.port N"
        raise UpFailed(
            f"{error.strerror}: {taken}" if error.errno == errno.EADDRINUSE else str(error.strerror)
        ) from None


def _why_off(settings: Settings, *, required: bool, say: Callable[[str, str], None]) -> str:
    """Why no cycle can work; empty if one can. Raises ConfigError if the loop is required."""
    try:
        preflight.check(settings)
        trigger(settings.schedule)
        if refused := memory_check.refused_training(settings):
            raise ConfigError("\n".join(refused))
    except ConfigError as error:
        if required:
            raise
        for line in str(error).splitlines():
            say("up", f"loop: off, mend this and start `millrace up` again: {line}")
        return str(error)
    return ""


def switches(settings: Settings) -> list[str]:
    """What of the loop is on and off, one line each, with how to change it."""
    store, scoring, evaluation = settings.policy_store(), settings.feedback.scoring, settings.evaluation
    pointer, judge, suite = store.serving(), scoring.judge, settings.path(settings.evaluation.suite)
    schedule = settings.schedule
    due = f"by cron {schedule.cron!r}" if schedule.cron else f"every {schedule.interval_seconds:g} s"
    found = [f"learning: cycle.recipe is {settings.cycle.recipe or 'not set'}; a cycle {due}"]
    if suite.is_file():
        found.append(f"gate: {suite}, scored by {evaluation.scorer}")
    elif evaluation.holdout:
        share = f"{evaluation.holdout:.0%} of the prompts are never trained on"
        found.append(f"gate: a suite drawn from traffic ({share}), scored by {evaluation.scorer}")
    else:
        found.append(f"gate: off; write held-out prompts to {suite} (evaluation.suite), or set evaluation.holdout")
    if not any(rule.weight for rule in scoring.rules.values()):
        found.append("rules: off; set feedback.scoring.rules, to your own Python function for one")
    if judge is None or not judge.weight:
        found.append("judge: off; set feedback.scoring.judge.url, .model and .rubric")
    if pointer and not initialise.has_chat_template(store.get(pointer.version).path):
        found.append(
            "chat: off, the model has no chat template: /generate with a prompt and /v1/completions work, messages get "
            "400; to switch it on, make a home from the model with a chat_template in tokenizer_config.json"
        )
    if not settings.path(settings.serve.keys).is_file():
        found.append("keys: off, so that only this machine is served; `millrace keys create`, and set serve.host")
    return found


def _start(name: str, settings: Settings, say: Callable[[str, str], None], *options: str) -> Child:
    grace = settings.up.stop_grace_s
    return start(settings, name, [name, *options], log=f"{name}.log", grace=grace, follow=lambda line: say(name, line))


def wait_until_ready(server: Child, settings: Settings) -> None:
    """Return when the settings' server answers. Raises UpFailed if it ends, or after ``up.ready_timeout_s``."""
    import httpx

    deadline = time.monotonic() + settings.up.ready_timeout_s
    last = "it does not answer"
    while time.monotonic() < deadline:
        if (code := server.poll()) is not None:
            raise UpFailed(server.ended(code), code or 1)
        try:
            answer = ask_server(settings, "/ready", timeout_s=2.0)
            if answer.status_code == 200:
                return
            last = f"it answers {answer.status_code}: {answer.text[:300]}"
        except httpx.HTTPError as error:
            last = f"it does not answer ({type(error).__name__})"
        time.sleep(_POLL_S)
    waited = f"up.ready_timeout_s={settings.up.ready_timeout_s:g} s"
    raise UpFailed(f"the server is not ready after {waited}: {last} (log: {server.log})")


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
