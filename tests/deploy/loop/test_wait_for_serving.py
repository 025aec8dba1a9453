"""What is asked of a home's own server."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from deploy.config import root
from deploy.config.root import Settings
from deploy.loop.wait_for_serving import server_policy


class Server(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"version": 7}).encode())

    def log_message(self, *_: object) -> None:
        pass


def test_this_machines_server_is_asked_past_a_proxy_of_the_environment(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with HTTPServer(("127.0.0.1", 0), Server) as server:
        Thread(target=server.handle_request, daemon=True).start()
        here = root.load(settings.snapshot(), [("serve.port", str(server.server_port))], {})
        assert server_policy(here) == {"version": 7}
