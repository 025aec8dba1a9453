"""Texts without what must not be kept: the functions of ``feedback.capture.redact``, applied before the journal.

They run in a process of their own. A regular expression that never ends holds the interpreter, so that no thread could
stop it; the process that takes too long is killed, and the next text starts another. A row any of
whose texts changed keeps no token ids and no logprobs: they would say what was taken out, and nothing untrue is to be
learned from. If it was complete, its status is ``redacted``.
"""

from __future__ import annotations

import importlib
import itertools
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

from feedback.config import CaptureConfig
from feedback.processes.signals import stop_signals_blocked
from feedback.sampling_parameters import RESERVED, SAMPLING_KEY
from feedback.user_code import search_path

log = logging.getLogger(__name__)

REDACTED: Final = "redacted"
"""The status of a complete response any of whose texts were changed."""

_START_TIMEOUT_S: Final = 60.0
_READ_BYTES: Final = 1 << 16

Redact = Callable[[str], str]
Decode = Callable[[list[int]], str]

WITHOUT_RESPONSE: Final[dict[str, Any]] = {"response": "", "response_token_ids": [], "logprobs": []}
"""Columns of a row that keeps nothing of its response."""
_WITHOUT_TEXT: Final = WITHOUT_RESPONSE | {"prompt": None, "messages": None, "prompt_token_ids": [], "metadata": []}


class RedactionError(RuntimeError):
    """A redact function can't be loaded, failed, or took too long. No text is in the message."""


class Redactor:
    """The functions of the settings, in a process of their own. Its methods block, and take one text at a time."""

    def __init__(self, config: CaptureConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._pipe: socket.socket | None = None

    def start(self) -> None:
        """Load the functions. Raises RedactionError if one can't be, or no process can be started."""
        with self._lock:
            self._started()

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def texts(self, texts: Iterable[str]) -> dict[str, str]:
        """Each text -> what is kept of it. Raises RedactionError."""
        different = [text for text in dict.fromkeys(texts) if text]
        if not different:
            return {"": ""}
        with self._lock:
            answer = self._ask(self._started(), different, self._config.redact_timeout_s)
            if answer is None:
                self._end()
                limit = f"{self._config.redact_timeout_s:g} s (feedback.capture.redact_timeout_s)"
                raise RedactionError(f"the redact functions took longer than {limit}, or their process died")
        if "error" in answer:
            raise RedactionError(answer["error"])
        return {"": "", **dict(zip(different, answer["texts"], strict=True))}

    def interactions(self, rows: list[dict[str, Any]], decode: Decode) -> list[dict[str, Any]]:
        """The rows as they are to be recorded. ``decode``: token ids to text. Raises RedactionError.

        User, session, tenant and ids stay, so that erasure finds the row; so do the names of metadata.
        """
        decoded = {
            ids: decode(list(ids))
            for row in rows
            for ids in (tuple(row["response_token_ids"]), () if row["prompt"] else tuple(row["prompt_token_ids"]))
        }
        found: dict[str, None] = dict.fromkeys(decoded.values())
        for row in rows:
            _map_row(row, lambda text: found.setdefault(text) or text)
        kept = self.texts(found)
        return [_without_tokens(row, changed, kept, decoded) for row in rows for changed in [_map_row(row, kept.get)]]

    def feedback(self, row: dict[str, Any]) -> dict[str, Any]:
        """A feedback row as it is to be recorded. Raises RedactionError.

        A correction that changed becomes a comment: nothing is learned from a text that nobody wrote.
        """
        if row["text"] is None:
            return row
        text = self.texts([row["text"]])[row["text"]]
        if text == row["text"]:
            return row
        return row | {"text": text, "kind": "comment" if row["kind"] == "correction" else row["kind"]}

    def _started(self) -> socket.socket:
        """The pipe to the process, which is started if there is none."""
        if self._pipe is not None and self._child is not None and self._child.poll() is None:
            return self._pipe
        self._end()
        try:
            self._pipe, of_child = socket.socketpair()
            with of_child, stop_signals_blocked():
                self._child = subprocess.Popen(
                    [sys.executable, "-P", "-m", "feedback.redaction"],
                    stdin=of_child.fileno(),
                    stdout=of_child.fileno(),
                    env=os.environ | search_path(),
                    start_new_session=True,
                )
        except OSError as error:
            self._end()
            raise RedactionError(f"the redact functions' process could not be started: {error.strerror}") from error
        task = {"functions": self._config.redact, "timeout_s": self._config.redact_timeout_s}
        answer = self._ask(self._pipe, task, _START_TIMEOUT_S)
        if answer is None or "error" in answer:
            self._end()
            reason = f"could not be loaded in {_START_TIMEOUT_S:g} s, or ended the process"
            raise RedactionError((answer or {}).get("error", f"feedback.capture.redact: the functions {reason}"))
        return self._pipe

    def _ask(self, pipe: socket.socket, message: Any, limit_s: float) -> Any:
        """The child's answer; None if it has died, or has not answered in time."""
        deadline = time.monotonic() + limit_s
        line = bytearray()
        try:
            pipe.settimeout(limit_s)
            pipe.sendall(json.dumps(message).encode() + b"\n")
            while not line.endswith(b"\n"):
                pipe.settimeout(max(0.0, deadline - time.monotonic()))
                part = pipe.recv(_READ_BYTES)
                if not part:
                    return None
                line += part
        except OSError:  # TimeoutError is one
            return None
        return json.loads(line)

    def _end(self) -> None:
        child, self._child = self._child, None
        pipe, self._pipe = self._pipe, None
        if child is not None:
            child.kill()
            child.wait()
        if pipe is not None:
            pipe.close()


def withheld(row: dict[str, Any]) -> dict[str, Any]:
    """A row of which no text is kept, since it could not be redacted."""
    sampling = row["sampling"] | {"stop": []}
    return row | _WITHOUT_TEXT | {"sampling": sampling, "status": "error", "finish_reason": None}


def _without_tokens(
    row: dict[str, Any], changed: dict[str, Any], kept: dict[str, str], decoded: dict[tuple[int, ...], str]
) -> dict[str, Any]:
    """A changed row, less what would tell what was changed, or teach it; the row itself if nothing was."""
    texts = [decoded[tuple(row["response_token_ids"])]]  # also what a stop text has cut off
    texts += [] if row["prompt"] else [decoded[tuple(row["prompt_token_ids"])]]
    if changed == {name: row[name] for name in changed} and all(kept[text] == text for text in texts):
        return row
    status = REDACTED if row["status"] == "complete" else row["status"]
    tokens: dict[str, Any] = {"prompt_token_ids": [], "response_token_ids": [], "logprobs": []}
    return row | changed | tokens | {"status": status}


def _map_row(row: dict[str, Any], of: Callable[[str], Any]) -> dict[str, Any]:
    """The columns that hold texts, each text replaced."""
    return {
        "prompt": row["prompt"] and of(row["prompt"]),
        "messages": row["messages"] and _map_json(row["messages"], of),
        "response": row["response"] and of(row["response"]),
        "sampling": row["sampling"] | {"stop": [of(text) for text in row["sampling"]["stop"]]},
        "metadata": [
            (name, _map_json(text, of) if name == SAMPLING_KEY else text if name.startswith(RESERVED) else of(text))
            for name, text in row["metadata"]
        ],
    }


def _map_json(text: str, of: Callable[[str], Any]) -> str:
    """A JSON text with every text and number in it replaced; the same if none changes."""
    value = json.loads(text)
    mapped = _map_value(value, of)
    return text if mapped == value else json.dumps(mapped, ensure_ascii=False)


def _map_value(value: Any, of: Callable[[str], Any]) -> Any:
    if isinstance(value, str):
        return of(value)
    if isinstance(value, list):
        return [_map_value(item, of) for item in value]
    if isinstance(value, dict):
        return {of(name): _map_value(item, of) for name, item in value.items()}
    if isinstance(value, int | float) and not isinstance(value, bool):
        shown = str(value)
        return value if of(shown) == shown else of(shown)
    return value


# ------------------------------------------------------------------------------------------------- ready functions

# Each begins where the text before it can't belong to the match, and backs out of nothing it has taken: linear in time.
_EMAIL: Final = re.compile(r"(?<![\w.%+'-])[\w.%+'-]++@[\w-]++(?:\.[\w-]++)*")
_PHONES: Final = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?<![\w+])(?:\+|00)[ ()./-]{0,2}\d(?:[ ()./-]{0,3}\d){6,14}(?!\d)",  # +49 (0)30 123456
        r"(?<![\w+])(?:1[ .-]?)?(?:\(\d{3}\) ?|\d{3}[ .-])\d{3}[ .-]\d{4}(?!\d)",  # (555) 123-4567
        r"(?<![\w.,])\(?0\d{1,4}\)?(?:[ /-]\d{2,8}){1,4}(?!\d)",  # 030 123456, 01 23 45 67 89
        r"(?<![\w.,])0\d{8,11}(?!\d)",  # 0301234567
    )
)
_DIGITS: Final = re.compile(r"\d++(?:[ -]\d++)*+")
_LEAST_PHONE, _LEAST_CARD, _MOST_CARD = 7, 13, 19  # digits


def email(text: str) -> str:
    """E-mail addresses become ``[email]``."""
    return _EMAIL.sub("[email]", text)


def phone(text: str) -> str:
    """What is written as phone numbers are, with a country code, an area code or groups, becomes ``[phone]``."""

    def replaced(found: re.Match[str]) -> str:
        return "[phone]" if sum(c.isdigit() for c in found[0]) >= _LEAST_PHONE else found[0]

    for pattern in _PHONES:
        text = pattern.sub(replaced, text)
    return text


def card(text: str) -> str:
    """Card numbers become ``[card]``: 13 to 19 digits, with single spaces or hyphens, whose checksum is right."""
    return _DIGITS.sub(lambda found: _without_cards(found[0]), text)


def _without_cards(run: str) -> str:
    """Digits and separators; a card's number begins and ends where a group does. Linear in time."""
    if len(run) < _LEAST_CARD:
        return run
    groups = [(found.start(), found.end()) for found in re.finditer(r"\d+", run)]
    ends = list(itertools.accumulate((end - start for start, end in groups), initial=0))  # digits before each group
    sums = _checksums([int(character) for character in run if character.isdigit()])
    kept, position, first, other = [], 0, 0, 1
    while first < len(groups):
        start, last = ends[first], None
        while other < len(groups) and ends[other] - start < _LEAST_CARD:
            other += 1
        for end in range(other, len(ends)):
            if ends[end] - start > _MOST_CARD:
                break
            of_last = sums[(ends[end] - 1) % 2]
            if ends[end] - start >= _LEAST_CARD and (of_last[ends[end]] - of_last[start]) % 10 == 0:
                last = end
        if last is None:
            first += 1
            continue
        kept += [run[position : groups[first][0]], "[card]"]
        position, first = groups[last - 1][1], last
    return "".join([*kept, run[position:]])


def _checksums(digits: list[int]) -> tuple[list[int], list[int]]:
    """For numbers that end at an even, or an odd, place: the sums of all digits before each place, as the checksum of
    such a number adds them (ISO/IEC 7812-1, annex B), every second one doubled. One is right if its sum ends in 0.
    """
    doubled = [sum(divmod(2 * digit, 10)) for digit in digits]
    even = (digits[i] if i % 2 == 0 else doubled[i] for i in range(len(digits)))
    odd = (digits[i] if i % 2 else doubled[i] for i in range(len(digits)))
    return list(itertools.accumulate(even, initial=0)), list(itertools.accumulate(odd, initial=0))


READY: Final[dict[str, Redact]] = {"email": email, "phone": phone, "card": card}


# ------------------------------------------------------------------------------------------------------ the process


def main() -> None:
    """The child: which functions, then texts, each as a line of JSON, until the pipe ends."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a function prints goes to the log
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # for when the parent is gone, which kills what takes too long
    task = json.loads(sys.stdin.readline())
    signal.setitimer(signal.ITIMER_REAL, _START_TIMEOUT_S)
    functions: list[tuple[str, Redact]] = []
    answer: dict[str, Any] = {}
    try:
        functions = [(name, _load(name)) for name in task["functions"]]
    except RedactionError as error:
        answer = {"error": str(error)}
    while True:
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(json.dumps(answer).encode() + b"\n")
        if not (line := sys.stdin.readline()):
            return
        signal.setitimer(signal.ITIMER_REAL, task["timeout_s"])
        try:
            answer = {"texts": [_applied(functions, text) for text in json.loads(line)]}
        except RedactionError as error:
            answer = {"error": str(error)}


def _load(name: str) -> Redact:
    if name in READY:
        return READY[name]
    module, _, attribute = name.partition(":")
    try:
        function: Redact = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a module may raise anything
        raise RedactionError(f"feedback.capture.redact: {name}: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise RedactionError(f"feedback.capture.redact: {name} is no function")
    return function


def _applied(functions: list[tuple[str, Redact]], text: str) -> str:
    for name, function in functions:
        try:
            text = function(text)
            text.encode()
        except Exception as error:  # noqa: BLE001  whose message may hold the text
            raise RedactionError(f"the redact function {name} failed: {type(error).__name__}") from None
    return text


if __name__ == "__main__":
    main()
