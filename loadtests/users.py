"""Simulated users: they send requests, judge the answers, and keep their own account of what the server acknowledged.

A black box test over HTTP, run by locust::

    locust -f loadtests/users.py --headless --host http://127.0.0.1:8000 --users 4 --stop-timeout 60 \
        --prompts prompts.jsonl --account account.jsonl

``--prompts``: one JSON object a line, {"prompt", "answer"}. ``--account``: one line a request, written when its answer
has arrived whole; what is in there was acknowledged. Give ``--stop-timeout``, so that no user is stopped between an
answer and its entry in the account.
"""

from __future__ import annotations

import json
import random
import time
from argparse import ArgumentParser
from pathlib import Path
from typing import Any, TextIO

from locust import HttpUser, events, task
from locust.env import Environment


@events.init_command_line_parser.add_listener
def add_options(parser: ArgumentParser, **_: Any) -> None:
    parser.add_argument("--prompts", required=True, help="JSONL file of prompts with their right answers")
    parser.add_argument("--account", required=True, help="JSONL file to which each acknowledged request is added")
    parser.add_argument("--pace", type=float, default=0.5, help="seconds from one question of a user to the next")
    parser.add_argument("--max-tokens", type=int, default=12, help="longest answer, in tokens")
    parser.add_argument("--feedback-share", type=float, default=2 / 3, help="share of the answers that get a thumb")
    parser.add_argument("--choice-share", type=float, default=0.1, help="share of the questions with two answers")
    parser.add_argument("--wrong-share", type=float, default=0.1, help="share of the judgements that are wrong")
    parser.add_argument("--questions", type=int, default=0, help="after so many another user comes; 0: all stay")
    parser.add_argument("--random-seed", type=int, default=0, help="seed of prompts and judgements")


class Account:
    """What the server acknowledged, one line a request."""

    def __init__(self, path: Path) -> None:
        self.file: TextIO = path.open("a", encoding="utf-8")

    def note(self, **entry: Any) -> None:
        self.file.write(json.dumps({"at": time.time(), **entry}) + "\n")
        self.file.flush()


@events.init.add_listener
def read_prompts(environment: Environment, **_: Any) -> None:
    options = environment.parsed_options
    lines = Path(options.prompts).read_text(encoding="utf-8").splitlines()
    environment.prompts = [json.loads(line) for line in lines if line.strip()]
    if not environment.prompts:
        raise SystemExit(f"--prompts {options.prompts} holds no prompts")
    environment.account = Account(Path(options.account))
    environment.random = random.Random(options.random_seed)


class Person(HttpUser):
    """Asks a question, waits for the answer, gives a thumb to about two in three, and is wrong one time in ten.

    One question in ten has two answers, of which the user says which is the better one if one alone is right.
    """

    def wait_time(self) -> float:
        return self.environment.random.uniform(0.5, 1.5) * self.environment.parsed_options.pace

    def on_start(self) -> None:
        self.name, self.asked = f"user-{self.environment.random.randrange(10**9)}", 0

    @task
    def ask(self) -> None:
        environment, options = self.environment, self.environment.parsed_options
        if options.questions and self.asked == options.questions:
            self.on_start()
        self.asked += 1
        item = environment.random.choice(environment.prompts)
        n = 2 if environment.random.random() < options.choice_share else 1
        body = {"prompt": item["prompt"], "max_tokens": options.max_tokens, "user": self.name, "n": n}
        answer = self.post("generate", "/generate", body, expected=200)
        if answer is None:
            return
        right = {each["response_id"]: each["text"] == item["answer"] for each in answer["responses"]}
        mistaken = environment.random.random() < options.wrong_share
        if n == 2:
            if len(set(right.values())) == 2:
                better, worse = sorted(right, key=lambda one: right[one] == mistaken)
                choice = {"response_id": better, "kind": "preference", "rejected_response_id": worse}
                self.post("feedback", "/feedback", {**choice, "source": self.name}, expected=201)
        elif environment.random.random() < options.feedback_share:
            [(response_id, correct)] = right.items()
            thumb = {"response_id": response_id, "kind": "thumb", "value": int(correct != mistaken)}
            self.post("feedback", "/feedback", {**thumb, "source": self.name}, expected=201)

    def post(self, kind: str, path: str, body: dict[str, Any], *, expected: int) -> dict[str, Any] | None:
        """Send, and enter what came of it in the account; the answer, or None if the request failed."""
        started = time.monotonic()
        with self.client.post(path, json=body, name=path, timeout=60, catch_response=True) as reply:
            milliseconds = (time.monotonic() - started) * 1000
            if reply.status_code != expected:
                reply.failure(f"{reply.status_code}: {reply.text!r} {reply.error or ''}")
                self.environment.account.note(
                    kind=kind,
                    ok=False,
                    ms=milliseconds,
                    code=reply.status_code,
                    error=f"{reply.text} {reply.error or ''}",
                )
                return None
            answer: dict[str, Any] = reply.json()
            reply.success()
        if kind == "generate":
            ids = [r["response_id"] for r in answer["responses"]]
            tokens = answer["usage"]["completion_tokens"]
            self.environment.account.note(
                kind=kind, ok=True, ms=milliseconds, ids=ids, policy_version=answer["policy_version"], tokens=tokens
            )
        else:
            self.environment.account.note(kind=kind, ok=True, ms=milliseconds, ids=[answer["feedback_id"]])
        return answer
