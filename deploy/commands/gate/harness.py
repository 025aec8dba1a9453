"""What `millrace evaluate --harness` does: a server, a harness in its own environment, and what is kept of it."""

from __future__ import annotations

import json
import re
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from deploy.config.root import ConfigError, Settings
from deploy.display.tables import print_table
from deploy.loop.wait_for_serving import ask_server, server_policy
from deploy.server_sleep import asleep
from deploy.supervise.children import Child, no_leftovers, start
from deploy.up import wait_until_ready
from evaluation.harness.inspect import Inspect
from evaluation.harness.lm_eval import LmEval
from evaluation.harness.results import COLUMNS, HarnessFailed, HarnessResult, load_all
from evaluation.harness.run import Endpoint, Harness, HarnessRequest, interpreter, version_of
from feedback.processes.signals import stop_on_signals
from serve.middleware.api_keys import create_key, read_keys, revoke_key

if TYPE_CHECKING:
    from serve.policies.store import Policy

HARNESSES: Final[dict[str, Harness]] = {"lm-eval": LmEval(), "inspect": Inspect()}
DECIDES_NOTHING: Final = "to watch: it decides nothing; `millrace evaluate` without --harness does"

_PROGRESS_S: Final = 10.0
_KEY_TIMEOUT_S: Final = 15.0
_CALL_TIMEOUT_S: Final = 10.0
_GRACE_S: Final = 10.0
_CONTROL: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x1f\x7f]")


def run(
    settings: Settings, name: str, request: HarnessRequest, version: int | None, *, endpoint: bool
) -> HarnessResult:
    """Run a harness on a policy, and keep and print what it found.

    version: the policy; by default the newest, or with ``endpoint`` the one that serves. ``endpoint``: ask the running
    server with a key of scope evaluate, in place of a server of that policy alone.
    Raises ConfigError, HarnessFailed, PolicyError, UpFailed.
    """
    harness, config = HARNESSES[name], settings.resolved().evaluation.harness
    try:
        harness.check(request)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    setting = name.replace("-", "_")
    python = interpreter(harness, getattr(config, setting), f"evaluation.harness.{setting}")
    harness_version = version_of(harness, python)
    store = settings.policy_store()
    live = Live.of(settings, version) if endpoint else None
    if live is not None:
        version = live.version
    elif version is None:
        newest = store.latest()
        if newest is None:
            raise click.UsageError(f"there is no policy in {store.root}: make a home first (millrace init)")
        version = newest.version
    with no_leftovers(), stop_on_signals(), store.hold(version):
        policy = store.verify(version)
        folder = _new_folder(settings, policy, name, request)
        asked = endpoint_server(settings, policy, live, config.timeout_s) if live else own_server(settings, policy)
        with asked as server:
            at = server.endpoint
            click.echo(f"{name} {harness_version} on policy {version}, at {at.url}; its files: {folder}")
            began, created_at = time.monotonic(), datetime.now(UTC).isoformat()
            command = [str(python), *harness.command(request, at, folder)]
            run_harness(name, command, harness.environment(at), folder / "output.log", config.timeout_s, server.check)
            seconds = time.monotonic() - began
        result = HarnessResult(
            version=version,
            sha256=policy.sha256,
            server="endpoint" if endpoint else "own",
            harness=name,
            harness_version=harness_version,
            tasks=request.tasks,
            limit=request.limit,
            model_args=request.model_args,
            arguments=request.arguments,
            metrics=harness.metrics(folder),
            created_at=created_at,
            seconds=round(seconds, 1),
        )
        result.save(folder)
    print_table(COLUMNS, result.lines(), "")
    click.echo(DECIDES_NOTHING)
    return result


def show(settings: Settings, *, as_json: bool) -> None:
    """Print what is kept of all runs."""
    found = load_all(settings.resolved().evaluation.harness_folder)
    if as_json:
        click.echo(json.dumps([{"folder": str(folder), **result.model_dump(mode="json")} for folder, result in found]))
        return
    rows = [row for _, result in found for row in result.lines()]
    print_table(COLUMNS, rows, f"no harness has run in {settings.home}: millrace evaluate --harness lm-eval --tasks …")
    if rows:
        click.echo(DECIDES_NOTHING)


@dataclass(frozen=True)
class Server:
    """Where a harness asks. ``check`` raises HarnessFailed if the policy does not answer there alone any more."""

    endpoint: Endpoint
    check: Callable[[], None]


def run_harness(
    name: str,
    command: list[str],
    variables: dict[str, str],
    log: Path,
    timeout_s: float,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Run it to its end, and print its last line from time to time; all that it prints goes to ``log``.

    check: called from time to time. Raises HarnessFailed.
    """
    # Its own packages alone: not ours, which a checkout puts on the path of our children.
    whole = ["env", "-u", "PYTHONPATH", *command]
    with Child(name, whole, log=log, grace=_GRACE_S, environment=variables) as child:
        deadline, shown = time.monotonic() + timeout_s, ""
        while (code := _code_within(child, min(_PROGRESS_S, deadline - time.monotonic()))) is None:
            check()  # Inspect asks a server that has gone for ever
            if time.monotonic() >= deadline:
                raise HarnessFailed(
                    f"{name} took longer than evaluation.harness.timeout_s={timeout_s:g} s and was stopped; its "
                    f"output: {log}"
                )
            if (line := _CONTROL.sub("", child.tail(1)).strip()) not in ("", shown):
                shown = line
                click.echo(f"{name}: {line}")
        check()
        if code != 0:
            raise HarnessFailed(child.ended(code))


def _code_within(child: Child, seconds: float) -> int | None:
    """The exit code, None if it still runs by then."""
    try:
        return child.wait(max(0.0, seconds))
    except TimeoutError:
        return None


@contextmanager
def own_server(settings: Settings, policy: Policy) -> Iterator[Server]:
    """A server of one policy on loopback, for whoever has its only key. It records nothing."""
    with tempfile.TemporaryDirectory(prefix="millrace-evaluate-") as folder:
        keys = Path(folder) / "keys.json"
        _, secret = _create_key(keys, settings, "harness", None)
        own = {"host": "127.0.0.1", "port": _free_port(), "keys": str(keys), "auth": "keys"}
        changed = settings.model_copy(update={"serve": settings.serve.model_copy(update=own)})
        options = [f"--serve.{name}={value}" for name, value in own.items()]
        click.echo(f"starting a server of policy {policy.version}")
        with (
            asleep(settings, "evaluate", say=click.echo),
            start(
                settings,
                "serve",
                ["serve", "--policy", str(policy.version), *options],
                log="evaluate-serve.log",
                grace=settings.up.stop_grace_s,
                follow=lambda line: None,
            ) as server,
        ):

            def check() -> None:
                if (code := server.poll()) is not None:
                    raise HarnessFailed(server.ended(code))

            wait_until_ready(server, changed)
            yield Server(_described(changed, secret, policy), check)


@contextmanager
def endpoint_server(settings: Settings, policy: Policy, live: Live, timeout_s: float) -> Iterator[Server]:
    """The running server, with a key that is never recorded, for as long as it is needed."""
    keys = settings.path(settings.serve.keys)
    if settings.serve.auth == "off" or not read_keys(keys) or _status(settings, None) != 401:
        raise ConfigError(
            f"{settings.server_url} asks for no key, so it would record what a harness sends as traffic: make a key "
            "first (`millrace keys create`, after which every client needs one), or leave --endpoint out"
        )
    expires = datetime.now(UTC) + timedelta(seconds=timeout_s + 600)
    key_id, secret = _create_key(keys, settings, f"harness-{secrets.token_hex(4)}", expires)
    try:
        deadline = time.monotonic() + _KEY_TIMEOUT_S
        while (status := _status(settings, secret)) != 200:
            if time.monotonic() > deadline:
                raise HarnessFailed(f"{settings.server_url} does not take the new key: it answers {status}")
            time.sleep(0.2)
        yield Server(_described(settings, secret, policy), lambda: live.require_unchanged(settings))
        live.require_unchanged(settings, answers=True)
    finally:
        revoke_key(keys, key_id)


@dataclass(frozen=True)
class Live:
    """What the running server serves, and by which move of the pointer."""

    version: int
    generation: int

    @classmethod
    def of(cls, settings: Settings, version: int | None) -> Live:
        """Raises ConfigError where it does not serve one policy, and ``version`` if that is given."""
        answer = server_policy(settings)
        if answer is None:
            raise ConfigError(f"no server of this home answers at {settings.server_url}: leave --endpoint out")
        live = cls.alone(answer)
        if live is None:
            raise ConfigError(f"{settings.server_url} serves two policies at the moment: leave --endpoint out")
        if version not in (None, live.version):
            raise ConfigError(
                f"policy {live.version} serves at {settings.server_url}, not {version}: leave --endpoint out"
            )
        return live

    @classmethod
    def alone(cls, answer: dict[str, Any]) -> Live | None:
        """None while an experiment or a deployment has two policies serve."""
        several = answer.get("experiment") or answer.get("rollout")
        return None if several else cls(answer["version"], answer["generation"])

    def require_unchanged(self, settings: Settings, *, answers: bool = False) -> None:
        """Raises HarnessFailed if another policy answers too, or did. ``answers``: or if the server does not."""
        answer = server_policy(settings)
        if answer is None and not answers:
            return  # it is busy, or the harness says more of it
        if answer is None or self.alone(answer) != self:
            why = "does not answer any more" if answer is None else "has had its pointer moved, or serves two policies"
            raise HarnessFailed(
                f"{settings.server_url} {why}: what the harness found need not be of policy {self.version} alone, and "
                "doesn't count"
            )


def _create_key(path: Path, settings: Settings, name: str, expires: datetime | None) -> tuple[str, str]:
    """(id, secret) of a key that generates without limits and is never recorded."""
    key, secret = create_key(
        path,
        name=name,
        tenant=settings.serve.tenant,
        scopes=["evaluate"],
        expires_at=expires,
        requests_per_minute="unlimited",
        tokens_per_minute="unlimited",
    )
    return key.id, secret


def _described(settings: Settings, secret: str, policy: Policy) -> Endpoint:
    headers = {"Authorization": f"Bearer {secret}"}
    answer = ask_server(settings, "/v1/models", headers=headers, timeout_s=_CALL_TIMEOUT_S)
    answer.raise_for_status()
    [model] = answer.json()["data"]
    return Endpoint(settings.server_url, secret, model["id"], model["max_model_len"], policy.path)


def _status(settings: Settings, secret: str | None) -> int | None:
    """What the server answers with this key, or without one; None if it does not."""
    import httpx

    headers = {"Authorization": f"Bearer {secret}"} if secret else {}
    try:
        return ask_server(settings, "/v1/models", headers=headers, timeout_s=_CALL_TIMEOUT_S).status_code
    except httpx.HTTPError:
        return None


def _new_folder(settings: Settings, policy: Policy, name: str, request: HarnessRequest) -> Path:
    tasks = re.sub(r"[^A-Za-z0-9_.-]+", "-", "-".join(request.tasks))[:80].strip("-.")
    at = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    folder = (
        settings.resolved().evaluation.harness_folder / f"v{policy.version}-{policy.sha256[:12]}-{name}-{tasks}-{at}"
    )
    folder.mkdir(parents=True)
    return folder


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
