"""Simulated users of a server: they ask, read, judge, and keep their own account of what the server acknowledged.

A black box over HTTP, run by locust; its web page, at http://localhost:8089, starts it and shows how it goes::

    locust -f loadtests/locustfile.py --host http://127.0.0.1:8000
    locust -f loadtests/locustfile.py --host http://127.0.0.1:8000 --headless --users 64 --run-time 5m --shape ramp \
        --stop-timeout 60 SessionUser

Name the classes of users to have only those; ``make loadtest`` runs one of them and says what the server holds. A key
is taken from the environment, ``KEY``. Times to the first token of streams are entries of their own.

``--account``: one JSON line per request, written when its answer has arrived whole; what is in there was acknowledged.
Give ``--stop-timeout``, so that no user is stopped between an answer and its entry in the account.
"""

from __future__ import annotations

import json
import math
import os
import random
import time
import uuid
from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TextIO

from locust import FastHttpUser, LoadTestShape, events, task
from locust.contrib.fasthttp import FAILURE_EXCEPTIONS
from locust.env import Environment

GENERATE: Final = "/generate"
CHAT: Final = "/v1/chat/completions"
KEY: Final = os.environ.get("KEY")
SHAPES: Final = ("steady", "ramp", "spike", "soak")
RAMP_STEPS: Final = 8
SPIKE: Final = 4
"""How many times as many users as before and after it."""
BURST: Final = 0.1
"""Share of a soak in which users don't wait, so that what the largest batches need is allocated then."""
DEFAULT_SECONDS: Final = 300
ANSWER_TIMEOUT_S: Final = 60.0
LONGEST_SESSION: Final = 5
WORDS: Final = (
    "the",
    "river",
    "mill",
    "turns",
    "a",
    "wheel",
    "and",
    "grain",
    "goes",
    "in",
    "while",
    "flour",
    "comes",
    "out",
)


@events.init_command_line_parser.add_listener
def add_options(parser: ArgumentParser, **_: Any) -> None:
    parser.add_argument("--shape", choices=SHAPES, default="steady", help="how the number of users goes over time")
    parser.add_argument("--prompts", default="", help="JSONL file of {prompt, answer}; without it, prompts are drawn")
    parser.add_argument("--account", default="", help="JSONL file to which each request is added")
    parser.add_argument("--pace", type=float, default=1.0, help="seconds from an answer to the user's next request")
    parser.add_argument("--max-tokens", type=int, default=32, help="longest answer, in tokens")
    parser.add_argument("--model", default="millrace", help="the model's name in requests to /v1")
    parser.add_argument("--feedback-share", type=float, default=2 / 3, help="share of the answers that get a thumb")
    parser.add_argument("--choice-share", type=float, default=0.1, help="share of the questions with two answers")
    parser.add_argument("--wrong-share", type=float, default=0.1, help="share of the judgements that are wrong")
    parser.add_argument("--questions", type=int, default=0, help="after so many another user comes; 0: all stay")
    parser.add_argument("--random-seed", type=int, default=0, help="seed of prompts and judgements")


def users_at(shape: str, users: int, seconds: float, at: float) -> int | None:
    """How many of ``users`` there are ``at`` seconds from the start of a run of ``seconds``; None: it is over.

    steady and soak have all of them at once, ramp an eighth more in each eighth of the time, and spike a quarter of
    them but for the third fifth of the time.
    """
    if at >= seconds:
        return None
    if shape == "ramp":
        return math.ceil(users * math.floor(RAMP_STEPS * at / seconds + 1) / RAMP_STEPS)
    if shape == "spike" and not 0.4 <= at / seconds < 0.6:
        return math.ceil(users / SPIKE)
    return users


class Shape(LoadTestShape):
    """``--shape``, with ``--users`` as the most users and ``--run-time``; steady alone may go on without end."""

    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        assert self.runner is not None
        options = self.runner.environment.parsed_options
        seconds = options.run_time or (math.inf if options.shape == "steady" else DEFAULT_SECONDS)
        users = users_at(options.shape, options.num_users or 1, seconds, self.get_run_time())
        if users is None:
            return None
        return users, options.spawn_rate if options.shape in ("steady", "soak") and options.spawn_rate else users


class Account:
    """What the server acknowledged, one line per request; no file, no account."""

    def __init__(self, path: str) -> None:
        self.file: TextIO | None = Path(path).open("a", encoding="utf-8") if path else None  # noqa: SIM115

    def note(self, **entry: Any) -> None:
        if self.file:
            self.file.write(json.dumps({"at": time.time(), **entry}) + "\n")
            self.file.flush()


@events.init.add_listener
def prepare(environment: Environment, **_: Any) -> None:
    options = environment.parsed_options
    if options.headless and options.shape == "steady":
        environment.shape_class = None  # which locust does itself: with a shape, SIGTERM would cut users off
    environment.prompts = []
    if options.prompts:
        lines = Path(options.prompts).read_text(encoding="utf-8").splitlines()
        environment.prompts = [json.loads(line) for line in lines if line.strip()]
        if not environment.prompts:
            raise SystemExit(f"--prompts {options.prompts} holds no prompts")
    environment.account = Account(options.account)
    environment.random = random.Random(options.random_seed)


class Failed(Exception):
    """Why a request failed, in words that are the same for the same cause, so that locust counts them together."""


@dataclass
class Answer:
    """What a user gets: ``text`` of the first response, and the ids of all; ``texts`` of plain ones."""

    ids: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    policy_version: int | None = None
    tokens: int = 0


class Visitor(FastHttpUser):
    """What all users can do."""

    abstract = True
    network_timeout = ANSWER_TIMEOUT_S
    connection_timeout = 10.0
    default_headers = {"X-API-Key": KEY} if KEY else None

    def wait_time(self) -> float:
        options, shape = self.environment.parsed_options, self.environment.shape_class
        if options.shape == "soak" and shape and shape.get_run_time() < BURST * (options.run_time or DEFAULT_SECONDS):
            return 0.0
        return self.environment.random.uniform(0.5, 1.5) * self.environment.parsed_options.pace

    def on_start(self) -> None:
        self.name = f"user-{self.environment.random.randrange(10**9)}"

    def draw(self) -> dict[str, Any]:
        """A prompt, with its right answer if it is known."""
        chance = self.environment.random
        if self.environment.prompts:
            return chance.choice(self.environment.prompts)
        return {"prompt": " ".join(chance.choices(WORDS, k=chance.randint(4, 16)))}

    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.draw()["prompt"]}]

    def ask(self, path: str, *, stream: bool = False, **body: Any) -> Answer | None:
        """Ask for a response, and read it to its end; None if that failed."""
        body = {"max_tokens": self.environment.parsed_options.max_tokens, "user": self.name, **body}
        if path == CHAT:
            body["model"] = self.environment.parsed_options.model
        if stream:
            body["stream"] = True
        if stream and path == CHAT:
            body["stream_options"] = {"include_usage": True}
        return self.send("generate", path, body, stream=stream)

    def thumb(self, value: int, **on: str) -> None:
        """``on``: response_id or session_id."""
        self.send("feedback", "/feedback", {"kind": "thumb", "value": value, "source": self.name, **on})

    def send(self, kind: str, path: str, body: dict[str, Any], *, stream: bool = False) -> Answer | None:
        """Send, and enter what came of it in locust's figures and in the account."""
        name = f"{path} (stream)" if stream else path
        users = self.environment.runner.target_user_count
        started, first, status, answer = time.monotonic(), None, 0, None
        with self.client.post(path, json=body, name=name, stream=stream, catch_response=True) as reply:
            status = reply.status_code
            try:
                if status != (201 if kind == "feedback" else 200):
                    raise Failed(_named(status, reply))
                if stream:
                    answer = Answer()
                    for text in read_stream(reply.stream, answer):
                        if text and first is None:
                            first = (time.monotonic() - started) * 1000
                        answer.texts[0] += text
                else:
                    answer = read(kind, reply.json())
                error = None
                reply.success()
            except (Failed, *FAILURE_EXCEPTIONS, ValueError, LookupError, TypeError) as failure:
                known = isinstance(failure, Failed)
                error, answer = failure if known else Failed(f"{type(failure).__name__}: {failure}"), None
                reply.failure(error)
            milliseconds = (time.monotonic() - started) * 1000
            reply.request_meta["response_time"] = milliseconds  # locust's own ends with a stream's head
        entry = {"kind": kind, "route": name, "ok": error is None, "ms": milliseconds, "users": users}
        if first is not None:
            entry["first_ms"] = first
            self.environment.events.request.fire(
                request_type="SSE",
                name=f"{path} (first token)",
                response_time=first,
                response_length=0,
                exception=None,
                context={},
            )
        if answer is None:
            self.environment.account.note(**entry, code=status, error=str(error))
            return None
        entry["ids"] = answer.ids
        if kind == "generate":
            entry |= {"policy_version": answer.policy_version, "tokens": answer.tokens}
        self.environment.account.note(**entry)
        return answer


def _named(status: int, reply: Any) -> str:
    """An error by its status and the server's title or type; without details, which differ from case to case."""
    if not status:
        cause = reply.error
        return f"no answer within {ANSWER_TIMEOUT_S:g} s" if isinstance(cause, TimeoutError) else f"no answer: {cause}"
    try:
        problem = json.loads(reply.content or b"{}")
        detail = problem.get("detail") or problem.get("title") or problem["error"]["message"]
    except (ValueError, LookupError, TypeError, AttributeError, *FAILURE_EXCEPTIONS):
        return str(status)
    return f"{status} {''.join('#' if c.isdigit() else c for c in detail)[:120]}"


def read(kind: str, body: dict[str, Any]) -> Answer:
    """A plain answer of any route."""
    if kind == "feedback":
        return Answer([body["feedback_id"]])
    tokens = body["usage"]["completion_tokens"]
    if "responses" in body:
        ids = [one["response_id"] for one in body["responses"]]
        return Answer(ids, [one["text"] for one in body["responses"]], body["policy_version"], tokens)
    return Answer([body["id"]], [one["message"]["content"] or "" for one in body["choices"]], None, tokens)


def read_stream(lines: Any, answer: Answer) -> Iterator[str]:
    """The texts of a stream as they come, its ids into ``answer``. Raises Failed if it has no regular end."""
    answer.texts, event, ended = [""], "", False
    while line := lines.readline(b"\n"):
        name, _, data = bytes(line).decode().strip().partition(": ")
        if name == "event":
            event = data
        if name != "data":
            continue
        if data == "[DONE]":
            ended = True  # and on to the end of the body, so that the connection can be used again
            continue
        body = json.loads(data)
        if event == "error" or "error" in body:
            raise Failed(f"the stream ended with an error: {body.get('title') or body['error']['message']}")
        if event == "done":
            whole = read("generate", body)
            answer.ids, answer.policy_version, answer.tokens = whole.ids, whole.policy_version, whole.tokens
            ended = True
        elif event == "delta":
            yield body["text"]
        else:
            answer.ids = [body["id"]]
            answer.tokens = (body.get("usage") or {"completion_tokens": 0})["completion_tokens"]
            yield from (choice["delta"].get("content") or "" for choice in body["choices"])
    if not ended:
        raise Failed("the stream broke off")


class GenerateUser(Visitor):
    """Asks /generate."""

    @task
    def generate(self) -> None:
        self.ask(GENERATE, messages=self.messages())


class ChatUser(Visitor):
    """Asks OpenAI's API, plain."""

    @task
    def chat(self) -> None:
        self.ask(CHAT, messages=self.messages())


class StreamUser(Visitor):
    """Asks OpenAI's API, and reads the answer as it comes."""

    @task
    def stream(self) -> None:
        self.ask(CHAT, stream=True, messages=self.messages())


class FeedbackUser(Visitor):
    """Asks a question, waits for the answer, gives a thumb to about two in three, and is wrong one time in ten.

    One question in ten has two answers, of which the user says which is the better one if one alone is right. Where
    nobody knows the right answer, an answer is right by chance.
    """

    def on_start(self) -> None:
        super().on_start()
        self.asked = 0

    @task
    def judge(self) -> None:
        environment, options = self.environment, self.environment.parsed_options
        if options.questions and self.asked == options.questions:
            self.on_start()
        self.asked += 1
        item = self.draw()
        n = 2 if environment.random.random() < options.choice_share else 1
        answer = self.ask(GENERATE, prompt=item["prompt"], n=n)
        if answer is None:
            return
        right = {
            one: text == item["answer"] if "answer" in item else environment.random.random() < 0.5
            for one, text in zip(answer.ids, answer.texts, strict=True)
        }
        mistaken = environment.random.random() < options.wrong_share
        if n == 2:
            if len(set(right.values())) == 2:
                better, worse = sorted(right, key=lambda one: right[one] == mistaken)
                choice = {"response_id": better, "kind": "preference", "rejected_response_id": worse}
                self.send("feedback", "/feedback", {**choice, "source": self.name})
        elif environment.random.random() < options.feedback_share:
            [(response_id, correct)] = right.items()
            self.thumb(int(correct != mistaken), response_id=response_id)


class SessionUser(Visitor):
    """Chats: up to five turns under one session id, by either API, most of them streamed, with thumbs on some answers
    and now and then one on the whole session."""

    @task
    def talk(self) -> None:
        chance, share = self.environment.random, self.environment.parsed_options.feedback_share
        path, session = chance.choice([GENERATE, CHAT]), str(uuid.UUID(int=chance.getrandbits(128)))
        history: list[dict[str, str]] = []
        turns = chance.randint(1, LONGEST_SESSION)
        for turn in range(turns):
            history += self.messages()
            answer = self.ask(path, stream=chance.random() < 0.7, messages=history, session_id=session)
            if answer is None:
                return
            history.append({"role": "assistant", "content": answer.texts[0]})
            if chance.random() < share:
                self.thumb(chance.randrange(2), response_id=answer.ids[0])
            if turn + 1 < turns:
                self.wait()
        if chance.random() < share / 4:
            self.thumb(chance.randrange(2), session_id=session)
