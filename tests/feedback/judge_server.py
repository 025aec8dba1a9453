"""A small real HTTP server that answers as an OpenAI-compatible API does, or as a script says."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Asked:
    """One request: what was asked, the whole body, its headers, and when it came (monotonic seconds)."""

    text: str
    body: dict[str, Any]
    headers: dict[str, str]
    at: float


@dataclass
class Answer:
    """What the server does: waits, then answers a status with a body, or drops the connection."""

    status: int = 200
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    wait: float = 0.0
    drop: bool = False


def says(content: str | None) -> Answer:
    return Answer(body={"choices": [{"message": {"content": content}, "finish_reason": "stop"}]})


Script = Callable[[Asked, int], Answer]
"""What to answer to a request, and which attempt on the same text it is, counted from 1."""


@dataclass
class JudgeServer:
    url: str
    asked: list[Asked] = field(default_factory=list)
    most_at_once: int = 0

    def about(self, word: str) -> list[Asked]:
        return [request for request in self.asked if word in request.text]


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # a client that has given up
            super().handle_error(request, client_address)


@contextmanager
def judge_server(script: Script) -> Iterator[JudgeServer]:
    lock = threading.Lock()
    at_once = 0

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            nonlocal at_once
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            request = Asked(body["messages"][-1]["content"], body, dict(self.headers), time.monotonic())
            with lock:
                at_once += 1
                server.most_at_once = max(server.most_at_once, at_once)
                server.asked.append(request)
                answer = script(request, sum(request.text == other.text for other in server.asked))
            try:
                time.sleep(answer.wait)
                with lock:
                    at_once -= 1  # before the answer goes out, after which the client may ask the next
                self._answer(answer)
            except OSError:  # the client has given up
                self.close_connection = True

        def _answer(self, answer: Answer) -> None:
            if answer.drop:
                self.close_connection = True
                return
            body = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
            self.send_response(answer.status)
            for name, value in {**answer.headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    http = _Server(("127.0.0.1", 0), Handler)
    server = JudgeServer(f"http://127.0.0.1:{http.server_address[1]}/v1")
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join(120)
