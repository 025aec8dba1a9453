"""Kill a real server again and again while clients use it, and count what was lost.

    python -m loadtests.crash --kills 200

Clients ask and judge over HTTP and keep their own account: what was acknowledged, what was refused. Meanwhile processes
of the server (the API's, vLLM's, the sealer's) are killed with SIGKILL, one at a random moment, also while it starts;
whatever does not go on by itself is started again. In the end the account is compared with the lake, id by id. The last
line printed is one JSON object; the exit code is 1 if anything was lost, doubled, or recorded though it was refused.

A black box: it speaks HTTP and the command line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import httpx
import psutil

from loadtests.tiny_model import make_model_folder

MILLRACE = [str(Path(sys.executable).with_name("millrace"))]
SIGNS = {"sealer": "feedback.sealer", "warden": "warden", "engine": "EngineCore", "api": " serve "}
BAD = (
    "lost_responses",
    "lost_feedback",
    "doubled_responses",
    "doubled_feedback",
    "recorded_though_refused",
    "left_running",
)

READY_TIMEOUT_S = 180
END_TIMEOUT_S = 30
STARTING_SHARE = 0.15
"""Of the kills, those that hit a server before it is ready."""


@dataclass
class Account:
    """What clients were told. A request whose answer never came stands in none of these."""

    responses: dict[str, str] = field(default_factory=dict)  # response id -> the client's mark of its request
    feedback: dict[str, str] = field(default_factory=dict)  # feedback id -> the response that it is about
    refused_requests: set[str] = field(default_factory=set)  # marks
    refused_feedback: set[str] = field(default_factory=set)
    codes: Counter[str] = field(default_factory=Counter)


class Client:
    """Asks, judges some answers, one at a time or in batches, and repeats itself now and then."""

    def __init__(self, http: httpx.AsyncClient, account: Account, chance: random.Random) -> None:
        self.http = http
        self.account = account
        self.chance = chance
        self.mine: list[str] = []

    async def run(self) -> None:
        while True:
            try:
                if self.mine and self.chance.random() < 0.5:
                    await self.judge()
                else:
                    await self.ask()
            except httpx.HTTPError as error:  # no answer: nobody knows what became of it
                self.account.codes[type(error).__name__] += 1
                await asyncio.sleep(0.05)

    async def ask(self) -> None:
        mark = uuid.uuid4().hex
        body = {
            "prompt": f"question {mark}",
            "max_tokens": self.chance.randint(1, 40),
            "n": self.chance.choice((1, 1, 1, 3)),
            "metadata": {"mark": mark},
        }
        if self.chance.random() < 0.3:
            return await self.ask_for_a_stream(mark, body | {"stream": True})
        answer = await self.http.post("/generate", json=body)
        self.account.codes[f"generate {answer.status_code}"] += 1
        self.told(mark, answer.json() if answer.status_code == 200 else None)

    async def ask_for_a_stream(self, mark: str, body: dict[str, Any]) -> None:
        async with self.http.stream("POST", "/generate", json=body) as answer:
            name = ""
            async for line in answer.aiter_lines():
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: ") and name in ("done", "error"):
                    try:
                        body = json.loads(line.removeprefix("data: "))
                    except ValueError:  # cut off in its middle: nobody was told anything
                        self.account.codes["stream cut"] += 1
                        return
                    self.account.codes[f"stream {name}"] += 1
                    self.told(mark, body if name == "done" else None)
                elif name == "delta" and self.chance.random() < 0.02:
                    self.account.codes["stream left"] += 1
                    return
            if answer.status_code != 200:
                self.account.codes[f"stream {answer.status_code}"] += 1
                self.told(mark, None)

    def told(self, mark: str, body: dict[str, Any] | None) -> None:
        """Note the answer to a request, or that it was refused."""
        if body is None:
            self.account.refused_requests.add(mark)
        for response in body["responses"] if body else ():
            self.account.responses[response["response_id"]] = mark
            self.mine.append(response["response_id"])

    async def judge(self) -> None:
        size = self.chance.choice((1, 1, 1, 20))
        items = [self.thumb() for _ in range(size)]
        for _ in range(self.chance.choice((1, 1, 2))):  # the second time as a client that is not sure repeats itself
            if size == 1:
                answer = await self.http.post("/feedback", json=items[0])
                self.note(items[0], answer.status_code)
            else:
                answer = await self.http.post("/feedback/batch", json={"feedback": items})
                self.account.codes[f"batch {answer.status_code}"] += 1
                results = answer.json()["results"] if answer.status_code == 200 else [{}] * size
                for item, result in zip(items, results, strict=True):
                    self.note(item, result.get("status", answer.status_code))

    def thumb(self) -> dict[str, Any]:
        response = self.chance.choice(self.mine[-50:])
        return {"response_id": response, "kind": "thumb", "value": 1, "feedback_id": uuid.uuid4().hex}

    def note(self, item: dict[str, Any], code: int) -> None:
        self.account.codes[f"feedback {code}"] += 1
        if code in (200, 201):
            self.account.feedback[item["feedback_id"]] = item["response_id"]
            self.account.refused_feedback.discard(item["feedback_id"])
        elif item["feedback_id"] not in self.account.feedback:
            self.account.refused_feedback.add(item["feedback_id"])


class Server:
    """`millrace serve` as a process, and everything that it starts."""

    def __init__(self, home: Path, port: int) -> None:
        self.home = home
        self.url = f"http://127.0.0.1:{port}"
        self.options = ["--home", str(home), "--serve.port", str(port), "--serve.engine.threads", "1"]
        self.options += ["--serve.engine.kv_cache_bytes", str(64 << 20), "--feedback.lake.seal_seconds", "1"]
        self.options += ["--feedback.journal.segment_seconds", "0.5"]
        self.log: TextIO = (home.parent / "server.log").open("a")
        self.process: subprocess.Popen[bytes] | None = None
        self.family: list[psutil.Process] = []
        self.starts = 0
        self.orphans: Counter[str] = Counter()
        """What had to be killed because it outlived a killed parent."""

    def start(self) -> None:
        self.process = subprocess.Popen(
            [*MILLRACE, "serve", *self.options], stdout=self.log, stderr=self.log, start_new_session=True
        )
        self.starts += 1

    def processes(self) -> list[psutil.Process]:
        """The server and its living descendants."""
        assert self.process is not None
        try:
            top = psutil.Process(self.process.pid)
            found = [top, *top.children(recursive=True)]
        except psutil.NoSuchProcess:
            found = []
        known = {process.pid for process in found}
        self.family = [*found, *(old for old in self.family if old.pid not in known and old.is_running())]
        return [process for process in found if process.status() != psutil.STATUS_ZOMBIE]

    async def wait_until_ready(self, http: httpx.AsyncClient) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            assert self.process is not None
            if self.process.poll() is not None:
                raise SystemExit(f"the server ended with {self.process.returncode}: {tail(self.home.parent)}")
            try:
                if (await http.get("/ready", timeout=5)).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            await asyncio.sleep(0.1)
        raise SystemExit(f"the server is not ready after {READY_TIMEOUT_S} s: {tail(self.home.parent)}")

    async def end(self) -> list[str]:
        """Wait until nothing of the server is left; the names of what had to be killed for that."""
        assert self.process is not None
        deadline = time.monotonic() + END_TIMEOUT_S
        while time.monotonic() < deadline:
            self.process.poll()
            alive = [process for process in [*self.processes(), *self.family] if lives(process)]
            if not alive:
                return []
            await asyncio.sleep(0.05)
        left = []
        for process in alive:
            left.append(kind(process))
            process.kill()
        self.process.wait(10)
        return left


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kind(process: psutil.Process) -> str:
    """Which part of the server a process is."""
    try:
        words = " ".join([process.name(), *process.cmdline()])
    except psutil.Error:
        return "gone"
    return next((part for part, sign in SIGNS.items() if sign in words), "other")


async def kill_one(server: Server, http: httpx.AsyncClient, chance: random.Random) -> str:
    """Let clients work for a while, kill one process at random, and have a server again or none at all."""
    if chance.random() < STARTING_SHARE:
        await asyncio.sleep(chance.uniform(0, 8))
    else:
        await server.wait_until_ready(http)
        await asyncio.sleep(chance.uniform(0, 3))
    candidates = [process for process in server.processes() if kind(process) != "other"] or server.processes()
    if not candidates:
        raise SystemExit(f"the server ended by itself: {tail(server.home.parent)}")
    victim = chance.choice(candidates)
    part = kind(victim)
    victim.kill()
    if part != "sealer":  # the API process starts another one of these
        # vLLM's process, orphaned before it knew its parent, goes by itself after minutes only; `millrace up` ends it.
        server.orphans.update(await server.end())
        server.start()
    return part


async def crash(kills: int, home: Path, clients: int, seed: int) -> dict[str, Any]:
    chance = random.Random(seed)
    account = Account()
    started = time.monotonic()
    server = Server(home, free_port())
    run("init", "--model", str(make_model_folder(home.parent / "model", 1)), "--home", str(home), "--no-write-config")
    killed: Counter[str] = Counter()
    limits = httpx.Limits(max_connections=clients + 4)
    async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as http:
        server.start()
        tasks = [asyncio.create_task(Client(http, account, random.Random(seed + i)).run()) for i in range(clients)]
        try:
            for number in range(1, kills + 1):
                killed[await kill_one(server, http, chance)] += 1
                failed = next((task for task in tasks if task.done()), None)
                if failed is not None:
                    failed.result()
                say(f"kill {number} of {kills}: {dict(killed)}, {len(account.responses)} responses acknowledged")
            await server.wait_until_ready(http)
            await asyncio.sleep(1)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert server.process is not None
            server.process.send_signal(signal.SIGTERM)
            left = await server.end()
    return compare(account, home) | {
        "kills": kills,
        "killed": dict(killed),
        "starts": server.starts,
        "orphans": dict(server.orphans),
        "left_running": len(left),
        "answers": dict(sorted(account.codes.items())),
        "seconds": round(time.monotonic() - started, 1),
    }


def compare(account: Account, home: Path) -> dict[str, Any]:
    """The clients' account against the sealed lake, id by id."""
    interactions = query(home, "SELECT response_id, status, metadata['mark'] AS mark FROM interactions")
    feedback = query(home, "SELECT feedback_id, response_id FROM feedback")
    responses = Counter(row["response_id"] for row in interactions)
    complete = {row["response_id"]: row["mark"] for row in interactions if row["status"] == "complete"}
    marks = set(complete.values())
    thumbs = Counter(row["feedback_id"] for row in feedback)
    about = {row["feedback_id"]: row["response_id"] for row in feedback}
    return {
        "acknowledged_responses": len(account.responses),
        "acknowledged_feedback": len(account.feedback),
        "responses_in_lake": len(interactions),
        "feedback_in_lake": len(feedback),
        "lost_responses": sum(complete.get(one) != mark for one, mark in account.responses.items()),
        "lost_feedback": sum(about.get(one) != response for one, response in account.feedback.items()),
        "doubled_responses": sum(count > 1 for count in responses.values()),
        "doubled_feedback": sum(count > 1 for count in thumbs.values()),
        "recorded_though_refused": len(account.refused_requests & marks)
        + sum(one in thumbs for one in account.refused_feedback),
        "refused_requests": len(account.refused_requests),
        "refused_feedback": len(account.refused_feedback),
    }


def run(*arguments: str) -> str:
    done = subprocess.run([*MILLRACE, *arguments], capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != 0:
        raise SystemExit(f"millrace {' '.join(arguments)} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def query(home: Path, sql: str) -> list[dict[str, Any]]:
    """Rows of the sealed lake."""
    text = run("lake", "sql", sql, "--sealed-only", "--format", "jsonl", "--home", str(home))
    return [json.loads(line) for line in text.splitlines()]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tail(folder: Path) -> str:
    return (folder / "server.log").read_text()[-2000:]


def say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="processes to kill, one after the other")
    parser.add_argument("--clients", type=int, default=8, help="clients at a time")
    parser.add_argument("--seed", type=int, default=1, help="of which process is killed, and when")
    parser.add_argument("--folder", type=Path, default=Path("runs/crash"), help="a folder of its own; emptied first")
    options = parser.parse_args()
    if options.kills < 1 or options.clients < 1:
        parser.error("--kills and --clients must be at least 1")
    shutil.rmtree(options.folder, ignore_errors=True)
    folder = options.folder.absolute()
    folder.mkdir(parents=True)
    os.environ["PYTHONUNBUFFERED"] = "1"
    result = asyncio.run(crash(options.kills, folder / "home", options.clients, options.seed))
    print(json.dumps(result))
    sys.exit(any(result[name] for name in BAD))


if __name__ == "__main__":
    main()
