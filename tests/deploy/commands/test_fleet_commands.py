"""How a number of replicas is set, and what a cycle makes of a fleet's answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from deploy.commands.service import _with_replicas
from deploy.config import root
from deploy.config.root import ConfigError, Settings
from deploy.loop import promotion, wait_for_serving
from deploy.loop.wait_for_serving import NotServed
from evaluation.decisions.ledger import Ledger
from serve.policies.store import PolicyStore


@pytest.fixture
def store(settings: Settings, model: Path) -> PolicyStore:
    """Policies 1 and 2, of which 1 serves."""
    store = PolicyStore(settings.path(settings.serve.policies))
    for parent in (None, 1):
        store.publish(model, parent=parent, lineage={}, metrics={})
    promotion.promote(store, Ledger(store.root.parent / "decisions"), 1, who="tests", why="first")
    return store


@pytest.fixture
def answers(settings: Settings) -> Iterator[list[dict[str, Any]]]:
    """What ``GET /policy`` of the configured server says: one of these after the other, the last one for ever."""
    answers: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(answers.pop(0) if len(answers) > 1 else answers[0]).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", settings.serve.port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield answers
    server.shutdown()
    server.server_close()


def answer(version: int, generation: int, phase: str, failed: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"version": version, "generation": generation, "phase": phase, "failed": failed, "replica": "replica-1"}


def test_a_policy_is_promoted_when_the_whole_fleet_is_there(
    settings: Settings, store: PolicyStore, answers: list[dict[str, Any]]
) -> None:
    answers += [answer(1, 1, phase) for phase in ("settled", "preparing", "canary", "committing")]
    answers.append(answer(2, 2, "settled"))
    pointer = promotion.promote(store, Ledger(store.root.parent / "decisions"), 2, who="tests", why="x", override=True)
    assert wait_for_serving.wait_until_served(settings, store, pointer)["seconds"] >= 4 * 0.25


def test_a_rollout_that_was_undone_is_a_failure_that_says_where_the_pointer_is(
    settings: Settings, store: PolicyStore, answers: list[dict[str, Any]]
) -> None:
    pointer = promotion.promote(store, Ledger(store.root.parent / "decisions"), 2, who="tests", why="x", override=True)
    failed = {"version": 2, "generation": 2, "error": "replica-1: not enough memory"}
    store.promote(1, expected=2, who="fleet", why="undone")
    answers += [answer(1, 1, "undoing", failed), answer(1, 3, "settled", failed)]
    with pytest.raises(NotServed, match=r"replica-1: not enough memory; the pointer is at 1"):
        wait_for_serving.wait_until_served(settings, store, pointer)
    history = store.history()
    assert [(move.version, move.who) for move in history] == [(1, "tests"), (2, "tests"), (1, "fleet")]


def test_a_pointer_that_the_server_could_not_move_goes_back_to_what_has_served(
    settings: Settings, store: PolicyStore, answers: list[dict[str, Any]]
) -> None:
    first = store.serving()
    assert first is not None
    store.record_outcome(first, served=True, by="replica-0")
    store.publish(store.get(1).path, parent=1, lineage={}, metrics={})
    promotion.promote(
        store, Ledger(store.root.parent / "decisions"), 2, who="tests", why="named while no server ran", override=True
    )
    pointer = promotion.promote(store, Ledger(store.root.parent / "decisions"), 3, who="tests", why="x", override=True)
    answers.append(answer(1, 1, "settled", {"version": 3, "generation": 3, "error": "not enough memory"}))
    with pytest.raises(NotServed, match=r"not enough memory; the pointer is back at 1"):
        wait_for_serving.wait_until_served(settings, store, pointer)
    assert store.served() == {1}


def test_a_canary_that_is_held_is_waited_for_and_reported_once(
    settings: Settings, store: PolicyStore, answers: list[dict[str, Any]]
) -> None:
    pointer = promotion.promote(store, Ledger(store.root.parent / "decisions"), 2, who="tests", why="x", override=True)
    fleet = settings.serve.fleet.model_copy(update={"canary_seconds": 1, "canary_hold_seconds": 99})
    settings = settings.model_copy(
        update={
            "serve": settings.serve.model_copy(update={"fleet": fleet}),
            "cycle": settings.cycle.model_copy(update={"swap_timeout_s": 0.5}),  # the canary has its own time beside
        }
    )
    held = answer(1, 1, "canary") | {"rollout": {"held": True}}
    answers += [answer(1, 1, "canary"), *[held] * 5, answer(2, 2, "settled")]
    lines: list[str] = []
    assert wait_for_serving.wait_until_served(settings, store, pointer, say=lines.append)["seconds"] > 0.5
    assert len(lines) == 1
    assert "held for up to serve.fleet.canary_hold_seconds=99 s" in lines[0]


def test_replicas_on_the_command_line_are_the_settings() -> None:
    settings = root.load(None, [("serve.fleet.canary_seconds", "7")], {})
    assert settings.serve.fleet.is_one
    fleet = _with_replicas(settings, 2).serve.fleet
    assert (fleet.replicas, fleet.canary_seconds, fleet.is_one) == (2, 7, False)
    several = root.load(None, [("serve.api_processes", "2")], {})
    assert _with_replicas(several, 1).serve.api_processes == 2
    with pytest.raises(ConfigError, match=r"--replicas 2: api_processes=2 are for one server"):
        _with_replicas(several, 2)
    assert _with_replicas(settings, None) is settings


def test_replicas_out_of_bounds_are_refused_with_the_bounds() -> None:
    settings = root.load(None, [("serve.fleet.max_replicas", "3")], {})
    with pytest.raises(ConfigError, match="replicas=4 is not between min_replicas=4 and max_replicas=3"):
        _with_replicas(settings, 4)
