"""Sends events to webhooks, from a thread of the scheduler that nothing waits for.

Each webhook has a position in what happened (``home/webhooks/NAME.json``), so that a restart sends what is missing, and
a slow receiver holds up no other. What can't be delivered is tried a bounded number of times, put on record
(``NAME.failed.jsonl``) and left. An event may come twice, if the process dies between the delivery and its record:
its ``id`` is then the same.

Requests go to the addresses that the settings name and to no other: redirects aren't followed, and neither proxies nor
passwords of the environment are used.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import httpx

from deploy.config.root import Settings, WebhookConfig
from deploy.notify.events import Event, Position, end, since
from feedback.files import append_file, make_folder, replace_file
from serve.policies.records import now

log = logging.getLogger(__name__)

FOLDER: Final = "webhooks"
FAILED: Final = ".failed.jsonl"
SIGNATURE: Final = "X-Millrace-Signature"
TIMESTAMP: Final = "X-Millrace-Timestamp"
_POLL_S: Final = 2.0
_FIRST_WAIT_S: Final = 1.0
_LONGEST_WAIT_S: Final = 60.0
_STOP_S: Final = 5.0
_TEXT: Final = 1000
_AGAIN: Final = frozenset({408, 425, 429})


class Undelivered(Exception):
    """An attempt failed. ``again``: whether another one may succeed."""

    def __init__(self, why: str, *, again: bool) -> None:
        super().__init__(why)
        self.again = again


@contextmanager
def notifying(settings: Settings, *, first_wait_s: float = _FIRST_WAIT_S, poll_s: float = _POLL_S) -> Iterator[None]:
    """Send events within, if ``schedule.webhooks`` has any. ``first_wait_s``: before the second attempt."""
    hooks = settings.schedule.webhooks
    if not hooks:
        yield
        return
    logging.getLogger("httpx").setLevel(logging.WARNING)  # else it logs each address, and Slack's is a secret
    loop = asyncio.new_event_loop()
    senders = [_Sender(settings, name, hook, first_wait_s, poll_s) for name, hook in hooks.items()]
    task = loop.create_task(_all(senders))

    def run() -> None:
        with closing(loop), suppress(asyncio.CancelledError):
            loop.run_until_complete(task)

    thread = threading.Thread(target=run, name="webhooks", daemon=True)
    thread.start()
    try:
        yield
    finally:
        with suppress(RuntimeError):  # it has ended
            loop.call_soon_threadsafe(task.cancel)
        thread.join(_STOP_S)


async def _all(senders: list[_Sender]) -> None:
    await asyncio.gather(*(sender.run() for sender in senders))


class _Sender:
    """One webhook's events, in order."""

    def __init__(self, settings: Settings, name: str, hook: WebhookConfig, first_wait_s: float, poll_s: float) -> None:
        self._settings = settings
        self._name = name
        self._hook = hook
        self._first_wait_s = first_wait_s
        self._poll_s = poll_s
        folder = settings.path(FOLDER)
        self._file = folder / f"{name}.json"
        self._failed = folder / f"{name}{FAILED}"
        self._position: Position | None = None  # what is told, also while a full disk does not take it

    async def run(self) -> None:
        """Until it is cancelled. What goes wrong with the records is in the log, once, and tried again."""
        wrong: str | None = None
        while True:
            try:
                await self._turn()
                wrong = None
            except Exception as error:  # noqa: BLE001  the loop goes on without it
                if str(error) != wrong:
                    log.error("webhook %s: %s: %s; tried again", self._name, type(error).__name__, error)
                wrong = str(error)
            await asyncio.sleep(self._poll_s)

    async def _turn(self) -> None:
        """Send what has happened since the last turn. A webhook that is new begins with what happens from now on."""
        if self._position is None:
            if not self._file.exists():
                return self._keep(await asyncio.to_thread(end, self._settings))
            self._position = Position(**json.loads(self._file.read_bytes()))
        before = self._position
        for position, event in await asyncio.to_thread(lambda: list(since(self._settings, before))):
            if event is not None and event.event in self._hook.events:
                await self._deliver(event)
            self._keep(position)

    def _keep(self, position: Position) -> None:
        self._position = position
        make_folder(self._file.parent)
        replace_file(self._file, json.dumps(asdict(position)).encode())

    async def _deliver(self, event: Event) -> None:
        """Return when it is delivered, or given up, which is on record then."""
        body = json.dumps(payload(self._hook, event, str(self._settings.home)), ensure_ascii=False).encode()
        wait = self._first_wait_s
        for attempt in range(1, self._hook.attempts + 1):
            try:
                return await post(self._hook, body)
            except Undelivered as error:
                if attempt < self._hook.attempts and error.again:
                    await asyncio.sleep(wait)
                    wait = min(2 * wait, _LONGEST_WAIT_S)
                    continue
                record = {"at": now(), "id": event.id, "event": event.event, "attempts": attempt, "error": str(error)}
                append_file(self._failed, json.dumps(record).encode() + b"\n")
                log.error("webhook %s was not told of %s: %s (attempts: %d)", self._name, event.id, error, attempt)
                return


async def post(hook: WebhookConfig, body: bytes) -> None:
    """Send one request, within the webhook's timeout. Raises Undelivered, which does not show the address."""
    try:
        async with (
            asyncio.timeout(hook.timeout_s),
            httpx.AsyncClient(follow_redirects=False, trust_env=False, timeout=hook.timeout_s) as client,
            client.stream("POST", hook.url.get_secret_value(), content=body, headers=headers(hook, body)) as answer,
        ):
            status = answer.status_code  # what else it says isn't read
    except (TimeoutError, httpx.TimeoutException):
        raise Undelivered(f"no answer within {hook.timeout_s:g} s", again=True) from None
    except httpx.TransportError as error:
        raise Undelivered(type(error).__name__, again=True) from error
    if status >= 300:
        redirected = ": redirects are not followed" if status < 400 else ""
        raise Undelivered(f"it answered {status}{redirected}", again=status >= 500 or status in _AGAIN)


def headers(hook: WebhookConfig, body: bytes) -> dict[str, str]:
    """Of a request: signed, if the environment has a secret."""
    found = {"Content-Type": "application/json", "User-Agent": "millrace"}
    secret = os.environ.get(hook.secret_variable, "")
    if secret:
        at = str(int(time.time()))
        found |= {TIMESTAMP: at, SIGNATURE: f"sha256={signature(secret.encode(), at, body)}"}
    return found


def signature(secret: bytes, at: str, body: bytes) -> str:
    """HMAC-SHA256 of the timestamp, a dot and the body, in hexadecimal digits."""
    return hmac.new(secret, at.encode() + b"." + body, hashlib.sha256).hexdigest()


def payload(hook: WebhookConfig, event: Event, home: str) -> dict[str, Any]:
    """The body in the webhook's form."""
    if hook.form == "generic":
        return event.body(home)
    text = f"{event.text}{f': {event.reason}' if event.reason else ''} ({home})"[:_TEXT]
    return {"text": text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")}


def failures(settings: Settings) -> dict[str, int]:
    """How many events each webhook was not told of."""
    files = {name: settings.path(FOLDER) / f"{name}{FAILED}" for name in settings.schedule.webhooks}
    return {name: _lines(file) for name, file in files.items()}


def _lines(file: Path) -> int:
    try:
        return file.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0
