"""The reader's child: requests come as lines of JSON, answers go out as such.

A request has ``page`` (a name in ``PAGES``), ``path``, ``query`` and ``form`` (texts by name), ``viewer`` (who
looks: tenant, name, scopes, token, address) and ``file`` (where a download is written). An answer has ``status``,
``type``, ``body``, and ``location`` if it leads on.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import os
import resource
import secrets
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Final

from deploy.config import root
from deploy.config.root import Settings
from deploy.console.pages import compare, data, keys, labels, now, playground, policies, traffic
from deploy.console.pages.visit import Answer, NotThere, Visit, page_of_error
from feedback.processes.exit import end_process
from serve.observability.audit import AuditLog
from serve.reading.reader import LINE_BYTES

log = logging.getLogger(__name__)

_NICENESS: Final = 10  # the server goes first
_MEMORY_BYTES: Final = 4 << 30
PAGES: Final[dict[str, Callable[[Settings, Visit], Answer]]] = {
    "now": now.page,
    "now_live": now.live,
    "policies": policies.page,
    "policy": policies.one,
    "policy_traffic": policies.traffic,
    "promote": policies.promote,
    "rollback": policies.rollback,
    "playground": playground.page,
    "judged": playground.judged,
    "traffic": traffic.page,
    "interaction": traffic.one,
    "compare": compare.page,
    "compare_next": compare.following,
    "compare_suites": compare.suites,
    "keys": keys.page,
    "create_key": keys.create,
    "scope_key": keys.scope,
    "revoke_key": keys.revoke,
    "labels": labels.page,
    "labels_next": labels.following,
    "labels_agreement": labels.agreement,
    "data": data.page,
    "query": data.run,
    "export": data.export,
    "save_query": data.save,
    "delete_query": data.delete,
}


def main() -> None:
    """Answer until the pipe ends."""
    file, seconds = Path(sys.argv[1]), float(sys.argv[2])
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
    answers, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr  # what code prints is no answer
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = root.load(file, environment={})
    gc.freeze()
    serve(settings, seconds, sys.stdin, answers)


def serve(settings: Settings, seconds: float, requests: IO[str], answers: IO[str]) -> None:
    """Answer line by line; a request that takes longer than ``seconds`` ends the process, whoever waits for it."""
    answers.write("ready\n")
    answers.flush()
    for line in requests:
        signal.alarm(int(seconds) + 5)
        request = json.loads(line)
        text = json.dumps(respond(settings, request).__dict__)
        if len(text) >= LINE_BYTES:
            reason = f"This page has more than the {LINE_BYTES >> 20} MiB that are shown at once."
            text = json.dumps(page_of_error(413, reason, _visit(request)).__dict__)
        signal.alarm(0)
        answers.write(text + "\n")
        answers.flush()


def respond(settings: Settings, request: dict[str, Any]) -> Answer:
    """The answer, an error's page if that is what comes of it."""
    visit, make = _visit(request), PAGES[request["page"]]
    try:
        return make(settings, visit) if visit.form is None else _act(settings, request["page"], make, visit)
    except NotThere as error:
        return page_of_error(404, str(error), visit)
    except Exception:
        number = secrets.token_hex(4)  # what the error says may be more than the visitor may see
        log.exception("error %s: the page %s can't be made", number, request["page"])
        return page_of_error(500, f"This page can't be made. The server's log says why, as error {number}.", visit)


def _visit(request: dict[str, Any]) -> Visit:
    return Visit(**{name: request[name] for name in ("path", "query", "form", "viewer", "file") if name in request})


def _act(settings: Settings, name: str, act: Callable[[Settings, Visit], Answer], visit: Visit) -> Answer:
    """Do what a form asks for, on record."""
    subject = {key: value for key, value in (visit.form or {}).items() if value} | visit.path
    if "sql" in subject:  # it may name people, whom an erasure could not take out of the log
        subject["sql"] = f"sha256 {hashlib.sha256(subject['sql'].encode(errors='replace')).hexdigest()}"
    who, address = f"{visit.viewer['name']} of {visit.tenant}", visit.viewer["address"]
    log = AuditLog(settings.path(settings.serve.audit))
    with log.entry(f"console.{name}", subject, who=who, origin=address) as outcome:
        answer = act(settings, visit)
        if answer.status >= 400:
            outcome.refused(answer.refused or f"answered with {answer.status}")
        return answer


if __name__ == "__main__":
    main()
    end_process(0)
