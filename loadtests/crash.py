"""Kill real servers and commands again and again while clients use them, and count what was lost.

    python -m loadtests.crash --kills 200

Two servers, as two machines would run them: each has a home and a journal of its own, both have one lake and one
policy store. Clients ask and judge over HTTP at either, and keep their own account: what was acknowledged, what was
refused. An operator erases users, maintains the lake, scores and promotes, one command after the other.

Meanwhile processes of the servers (the API's, vLLM's, the sealer's) are killed with SIGKILL, one at a random moment,
also while it starts; what does not go on by itself is started again. More than half of the operator's commands are
killed too. In the end the accounts are compared with the lake, id by id, and with the history of the pointer. The last
line printed is one JSON object; the exit code is 1 if anything in ``BAD`` is not 0.

A black box: it speaks HTTP and the command line, and reads the files of the lake and the pointer as they lie there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import httpx
import psutil
import pyarrow.parquet as pq

from loadtests.event_lines import lines_of
from loadtests.server import MILLRACE, free_port, run
from loadtests.tiny_model import make_model_folder

SIGNS = {"sealer": "feedback.ingest.sealer_process", "subreaper": "subreaper", "engine": "EngineCore", "api": " serve "}
BAD = (
    "lost_responses",
    "lost_feedback",
    "doubled_responses",
    "doubled_feedback",
    "recorded_though_refused",
    "left_running",
    "not_erased",
    "half_erased",
    "erased_but_in_files",
    "missing_rewards",
    "doubled_rewards",
    "wrong_rewards",
    "rewards_of_nothing",
    "scored_again",
    "lost_promotions",
    "doubled_promotions",
    "moved_by_nobody",
    "pointer_not_whole",
    "not_followed",
    "commands_with_a_bug",
)
"""What must be 0."""

COMMANDS = ("score", "promote", "erase", "maintain")
TRACES = {
    "score": "lake/rewards/_delta_log",
    "promote": "policies",
    "erase": "lake/_erasures",
    "maintain": "lake/feedback/_delta_log",
}
"""Where in the home a command leaves its first trace."""

COMMAND_KILLED_SHARE = 0.6
AT_A_TRACE_SHARE = 0.6
"""Of the commands killed, those that are hit soon after their first trace; the others are at any moment."""
COMMAND_TIMEOUT_S = 240
OPEN_USERS = 6

READY_TIMEOUT_S = 600
END_TIMEOUT_S = 30
STOP_TIMEOUT_S = 120
"""For two servers at once that seal what they have, at the end of the test."""
STARTING_SHARE = 0.15
"""Of the kills, those that hit a server before it is ready."""


@dataclass
class Account:
    """What the server answered clients. A request whose answer never came stands in none of these."""

    responses: dict[str, str] = field(default_factory=dict)  # response id -> the client's mark of its request
    users: dict[str, str] = field(default_factory=dict)  # response id -> the user of the request
    items: dict[str, dict[str, Any]] = field(default_factory=dict)  # the items, by feedback id
    again: set[str] = field(default_factory=set)  # feedback ids sent once more after they had been erased
    feedback: dict[str, str] = field(default_factory=dict)  # feedback id -> the response that it is about
    refused_requests: set[str] = field(default_factory=set)  # marks
    refused_feedback: set[str] = field(default_factory=set)
    codes: Counter[str] = field(default_factory=Counter)


class Users:
    """The users of requests. One to be erased is closed first: no client sends anything for them any more."""

    def __init__(self) -> None:
        self.open = [self._new() for _ in range(OPEN_USERS)]
        self._at_work: Counter[str] = Counter()

    @contextmanager
    def at_work(self, user: str) -> Iterator[None]:
        self._at_work[user] += 1
        try:
            yield
        finally:
            self._at_work[user] -= 1

    async def close(self) -> str:
        """The one who is open longest, when no request of theirs is under way."""
        user = self.open.pop(0)
        self.open.append(self._new())
        while self._at_work[user]:
            await asyncio.sleep(0.05)
        return user

    def _new(self) -> str:
        return f"u{uuid.uuid4().hex}"


class Client:
    """Sends requests, judges some answers, one at a time or in batches, and repeats some, at either server."""

    def __init__(
        self, https: list[httpx.AsyncClient], account: Account, users: Users, chance: random.Random, pause: float
    ) -> None:
        self.https, self.pause = https, pause
        self.http = https[0]
        self.account = account
        self.users = users
        self.chance = chance
        self.mine: dict[str, list[str]] = {}  # response ids by user

    async def run(self) -> None:
        while True:
            self.http = self.chance.choice(self.https)
            user = self.chance.choice(self.users.open)
            with self.users.at_work(user):
                try:
                    if self.mine.get(user) and self.chance.random() < 0.5:
                        await self.judge(user)
                    else:
                        await self.generate(user)
                except httpx.HTTPError as error:  # no answer: nobody knows what became of it
                    self.account.codes[type(error).__name__] += 1
                    await asyncio.sleep(0.2)
            await asyncio.sleep(self.chance.uniform(0, 2 * self.pause))

    async def generate(self, user: str) -> None:
        mark = uuid.uuid4().hex
        body = {
            "prompt": f"question {mark} of {user}",
            "user": user,
            "max_tokens": self.chance.randint(1, 40),
            "n": self.chance.choice((1, 1, 1, 3)),
            "metadata": {"mark": mark},
        }
        if self.chance.random() < 0.3:
            return await self.ask_for_a_stream(user, mark, body | {"stream": True})
        answer = await self.http.post("/generate", json=body)
        self.account.codes[f"generate {answer.status_code}"] += 1
        self.enter(user, mark, answer.json() if answer.status_code == 200 else None)

    async def ask_for_a_stream(self, user: str, mark: str, body: dict[str, Any]) -> None:
        async with self.http.stream("POST", "/generate", json=body) as answer:
            name = ""
            async for line in lines_of(answer):
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: ") and name in ("done", "error"):
                    try:
                        body = json.loads(line.removeprefix("data: "))
                    except ValueError:  # cut off in its middle: nothing was acknowledged
                        self.account.codes["stream cut"] += 1
                        return
                    self.account.codes[f"stream {name}"] += 1
                    self.enter(user, mark, body if name == "done" else None)
                elif name == "delta" and self.chance.random() < 0.02:
                    self.account.codes["stream left"] += 1
                    return
            if answer.status_code != 200:
                self.account.codes[f"stream {answer.status_code}"] += 1
                self.enter(user, mark, None)

    def enter(self, user: str, mark: str, body: dict[str, Any] | None) -> None:
        """Note the answer to a request, or that it was refused."""
        if body is None:
            self.account.refused_requests.add(mark)
        for response in body["responses"] if body else ():
            self.account.responses[response["response_id"]] = mark
            self.account.users[response["response_id"]] = user
            self.mine.setdefault(user, []).append(response["response_id"])

    async def judge(self, user: str) -> None:
        size = self.chance.choice((1, 1, 1, 20))
        items = [self.rating(user) for _ in range(size)]
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

    def rating(self, user: str) -> dict[str, Any]:
        return rating(self.chance.choice(self.mine[user][-50:]), user, self.chance.uniform(1, 5))

    def note(self, item: dict[str, Any], code: int) -> None:
        self.account.codes[f"feedback {code}"] += 1
        if code in (200, 201):
            self.account.feedback[item["feedback_id"]] = item["response_id"]
            self.account.items[item["feedback_id"]] = item
            self.account.refused_feedback.discard(item["feedback_id"])
        elif item["feedback_id"] not in self.account.feedback:
            self.account.refused_feedback.add(item["feedback_id"])


def rating(response_id: str, user: str, stars: float) -> dict[str, Any]:
    """A vote of a source of its own, with a remark that names the user whom an erasure of it names.

    No two are alike, so that each changes the reward.
    """
    feedback_id = uuid.uuid4().hex
    item = {"response_id": response_id, "kind": "rating", "value": stars, "text": f"a remark for {user}"}
    return item | {"feedback_id": feedback_id, "source": feedback_id}


class Server:
    """`millrace serve` as a process, and everything that it starts."""

    def __init__(self, home: Path, shared: Path, name: str) -> None:
        """``shared``: the home that has the lake and the policies."""
        self.home = home
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.options = ["--home", str(home), "--serve.port", str(port), "--serve.engine.threads", "1"]
        self.options += ["--feedback.lake.uri", str(shared / "lake"), "--serve.policies", str(shared / "policies")]
        self.options += ["--feedback.lake.erasure_key", str(shared / "erasure.key"), "--serve.replica_name", name]
        self.options += ["--serve.engine.kv_cache_bytes", str(64 << 20), "--feedback.lake.seal_seconds", "1"]
        self.options += ["--feedback.journal.segment_seconds", "0.5"]
        home.mkdir(parents=True, exist_ok=True)
        self.log: TextIO = (home / "server.log").open("a")
        self.process: subprocess.Popen[bytes] | None = None
        self.family: list[psutil.Process] = []
        self.starts = 0
        self.orphans: Counter[str] = Counter()
        """What had to be killed because it outlived a killed parent."""

    def start(self) -> None:
        self.process = subprocess.Popen(
            [MILLRACE, "serve", *self.options], stdout=self.log, stderr=self.log, start_new_session=True
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
        return [process for process in found if lives(process)]

    async def wait_until_ready(self, http: httpx.AsyncClient) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            assert self.process is not None
            if self.process.poll() is not None:
                raise SystemExit(f"the server ended with {self.process.returncode}: {tail(self.home)}")
            try:
                if (await http.get("/ready", timeout=5)).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            await asyncio.sleep(0.1)
        raise SystemExit(f"the server is not ready after {READY_TIMEOUT_S} s: {tail(self.home)}")

    async def end(self, timeout_s: float = END_TIMEOUT_S) -> list[str]:
        """Wait until nothing of the server is left; the names of what had to be killed for that."""
        assert self.process is not None
        deadline = time.monotonic() + timeout_s
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
        raise SystemExit(f"the server ended by itself: {tail(server.home)}")
    victim = chance.choice(candidates)
    part = kind(victim)
    victim.kill()
    if part != "sealer":  # the API process starts another one of these
        # vLLM's process, orphaned before it knew its parent, goes by itself after minutes only; `millrace up` ends it.
        server.orphans.update(await server.end())
        server.start()
    return part


class Operator:
    """Scores, promotes, erases and maintains, one after the other, and is killed in most of it."""

    def __init__(self, home: Path, users: Users, chance: random.Random) -> None:
        self.home = home
        self.users = users
        self.chance = chance
        self.killed: Counter[str] = Counter()
        self.done: Counter[str] = Counter()
        self.failed: dict[str, str] = {}  # a command -> its last output
        self.bugs = 0  # commands that ended with a traceback, or not at all
        self.erased: set[str] = set()  # users: acknowledged
        self.maybe_erased: set[str] = set()  # users whose erasure was killed or failed, and not repeated
        self.promoted: set[str] = set()  # reasons: acknowledged
        self.maybe_promoted: set[str] = set()
        self.torn_pointers = 0
        self._seconds = dict.fromkeys(COMMANDS, 6.0)  # that each took when it was last left alone

    async def run(self) -> None:
        while True:
            for command in self.chance.sample(COMMANDS, len(COMMANDS)):
                await getattr(self, command)()

    async def score(self) -> None:
        await self._run("score", "score")

    async def maintain(self) -> None:
        await self._run("maintain", "lake", "maintain")

    async def erase(self) -> None:
        repeated = sorted(self.maybe_erased) if self.chance.random() < 0.5 else []
        user = repeated[0] if repeated else await self.users.close()
        self.maybe_erased.add(user)
        if await self._run("erase", "lake", "erase", "--user", user, "--yes"):
            self.maybe_erased.remove(user)
            self.erased.add(user)

    async def promote(self) -> None:
        why = f"crash {uuid.uuid4().hex}"
        version = 1 if self.pointer()["version"] == 2 else 2
        self.maybe_promoted.add(why)
        if await self._run("promote", "promote", str(version), "--override", "--why", why, "--no-wait"):
            self.maybe_promoted.remove(why)
            self.promoted.add(why)

    def pointer(self) -> dict[str, Any]:
        """What should serve, as the file says it at any moment."""
        try:
            found: dict[str, Any] = json.loads((self.home / "policies" / "serving.json").read_text())
        except (OSError, ValueError):
            self.torn_pointers += 1
            return {"version": 1}
        return found

    async def _run(self, name: str, *arguments: str) -> bool:
        """Whether it reported success."""
        started = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            MILLRACE, *arguments, "--home", str(self.home), start_new_session=True,
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        output = asyncio.create_task(process.communicate())
        kill = self.chance.random() < COMMAND_KILLED_SHARE
        try:
            if kill and self.chance.random() < AT_A_TRACE_SHARE:
                await self._trace(self.home / TRACES[name], output)
                patience = self.chance.uniform(0, 0.3)
            else:
                patience = self.chance.uniform(0.4, 1.1) * self._seconds[name] if kill else COMMAND_TIMEOUT_S
            ended = bool((await asyncio.wait({output}, timeout=patience))[0]) or not _kill_group(process.pid)
            await output
            if not ended:
                self.killed[name] += kill
                if not kill:
                    self.bugs += 1
                    self.failed[name] = f"did not end within {COMMAND_TIMEOUT_S} s"
                return False
        except asyncio.CancelledError:
            _kill_group(process.pid)
            await output
            raise
        self._seconds[name] = time.monotonic() - started
        if process.returncode == 0:
            self.done[name] += 1
            return True
        _, errors = output.result()
        text = errors.decode(errors="replace")
        self.bugs += "Traceback" in text
        self.failed[name] = text.strip()[-2000:]
        return False

    async def _trace(self, folder: Path, ended: asyncio.Task[Any]) -> None:
        """Return when something in the folder has changed, or the command has ended."""
        before = state_of(folder)
        deadline = time.monotonic() + COMMAND_TIMEOUT_S
        while not ended.done() and state_of(folder) == before and time.monotonic() < deadline:
            await asyncio.sleep(0.005)


def state_of(folder: Path) -> set[tuple[str, int]]:
    """The files of a folder, and when they were written."""
    try:
        return {(entry.name, entry.stat().st_mtime_ns) for entry in os.scandir(folder)}
    except FileNotFoundError:  # the folder, or a file meanwhile
        return set()


async def crash(kills: int, folder: Path, clients: int, seed: int, pause: float = 0.0) -> dict[str, Any]:
    chance = random.Random(seed)
    account, users = Account(), Users()
    started = time.monotonic()
    home = folder / "home"
    two_policies(folder, home)
    servers = [Server(home, home, "machine-1"), Server(folder / "home-2", home, "machine-2")]
    operator = Operator(home, users, random.Random(seed))
    killed: Counter[str] = Counter()
    limits = httpx.Limits(max_connections=clients + 4)
    async with AsyncExitStack() as stack:
        https = [
            await stack.enter_async_context(httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits))
            for server in servers
        ]
        left: list[str] = []
        tasks: list[asyncio.Task[None]] = []
        try:
            for server in servers:
                server.start()
            for server, http in zip(servers, https, strict=True):
                await server.wait_until_ready(http)
            work = asyncio.create_task(operator.run())
            people = [Client(https, account, users, random.Random(seed + i), pause) for i in range(clients)]
            tasks += [work, *(asyncio.create_task(person.run()) for person in people)]
            while (
                2 * killed.total() < kills
                or 2 * operator.killed.total() < kills
                or not all(operator.killed[name] and operator.done[name] for name in COMMANDS)
            ):
                if 2 * killed.total() < kills:
                    one = chance.randrange(len(servers))
                    killed[await kill_one(servers[one], https[one], chance)] += 1
                else:  # the commands take longer
                    await asyncio.sleep(1.0)
                for task in tasks:
                    if task.done():
                        task.result()
                say(
                    f"killed {dict(killed)}, of commands {dict(operator.killed)}, finished {dict(operator.done)}, "
                    f"{len(account.responses)} responses acknowledged"
                )
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            for server, http in zip(servers, https, strict=True):
                await server.wait_until_ready(http)
            await asyncio.sleep(1)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(3)  # servers learn of an erasure by looking
            await say_again(account, operator.erased, https)
            not_followed = [not await follows(http, operator.pointer()["version"]) for http in https]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for server in servers:
                assert server.process is not None
                server.process.send_signal(signal.SIGTERM)
            for server in servers:
                left += await server.end(STOP_TIMEOUT_S)
    run("lake", "maintain", "--home", str(home))  # finishes what was killed
    run("score", "--home", str(home))
    return (
        compare(account, home, operator)
        | compare_rewards(home)
        | compare_erasures(account, [server.home for server in servers], operator)
        | compare_promotions(home, operator)
        | {
            "kills": killed.total() + operator.killed.total(),
            "killed": dict(killed),
            "killed_commands": dict(operator.killed),
            "finished_commands": dict(operator.done),
            "failed_commands": operator.failed,
            "commands_with_a_bug": operator.bugs,
            "starts": sum(server.starts for server in servers),
            "orphans": dict(sum((server.orphans for server in servers), Counter())),
            "left_running": len(left),
            "left": left,
            "not_followed": sum(not_followed),
            "answers": dict(sorted(account.codes.items())),
            "seconds": round(time.monotonic() - started, 1),
        }
    )


def _kill_group(leader: int) -> bool:
    """Kill a command and what it started; whether it was still there."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def two_policies(folder: Path, home: Path) -> None:
    """A home with two policies of one architecture; the first serves."""
    for number in (1, 2):
        model, own = make_model_folder(folder / f"model-{number}", number), home if number == 1 else folder / "other"
        run("init", "--model", str(model), "--home", str(own), "--no-write-config")
    second = home / "policies" / "v000002"
    shutil.copytree(folder / "other" / "policies" / "v000001", second)
    manifest = json.loads((second / "policy.json").read_text())
    (second / "policy.json").write_text(json.dumps(manifest | {"version": 2, "parent": 1}))


async def say_again(account: Account, erased: set[str], https: list[httpx.AsyncClient]) -> None:
    """Send feedback that was erased once more, as it was: what is acknowledged must be recorded."""
    feedback = [one for one, response in account.feedback.items() if account.users[response] in erased]
    for number, feedback_id in enumerate(feedback[:40]):
        answer = await https[number % len(https)].post("/feedback", json=account.items[feedback_id])
        account.codes[f"feedback again {answer.status_code}"] += 1
        if answer.status_code in (200, 201):
            account.again.add(feedback_id)


async def follows(http: httpx.AsyncClient, version: int) -> bool:
    """Whether the server serves the policy that the pointer names, in the end."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        if (await http.get("/policy")).json()["version"] == version:
            return True
        await asyncio.sleep(0.2)
    return False


def compare_rewards(home: Path) -> dict[str, Any]:
    """Each complete response has the reward that its votes make, and no state of them has two: they would be equal."""
    again = home.parent / "scored-again.json"
    run("score", "--json-out", str(again), "--home", str(home))
    following = "*, lag(reward) OVER before AS former, row_number() OVER before AS number FROM rewards"
    repeated = "number > 1 AND reward IS NOT DISTINCT FROM former"
    last = (
        f"SELECT response_id, last(reward ORDER BY scored_at) AS reward, bool_or({repeated}) AS repeated FROM (SELECT "
        f"{following} WINDOW before AS (PARTITION BY response_id ORDER BY scored_at)) GROUP BY 1"
    )
    votes = "SELECT response_id, avg((value - 1) / 4) AS vote FROM feedback WHERE kind = 'rating' GROUP BY 1"
    [found] = query(
        home,
        f"""SELECT
            count(*) FILTER (i.response_id IS NOT NULL AND r.response_id IS NULL) AS missing_rewards,
            count(*) FILTER (r.repeated) AS doubled_rewards,
            count(*) FILTER (i.response_id IS NOT NULL AND r.response_id IS NOT NULL
                             AND (abs(r.reward - v.vote) < 1e-9 OR (r.reward IS NULL AND v.vote IS NULL)) IS NOT TRUE)
                AS wrong_rewards,
            count(*) FILTER (i.response_id IS NULL) AS rewards_of_nothing,
            count(r.response_id) AS rewarded
        FROM (SELECT response_id FROM interactions WHERE status = 'complete') AS i
        FULL JOIN ({last}) AS r USING (response_id) LEFT JOIN ({votes}) AS v USING (response_id)""",
    )
    return found | {"scored_again": json.loads(again.read_text())["scored"]}


def compare_erasures(account: Account, homes: list[Path], operator: Operator) -> dict[str, Any]:
    """Who was erased is in no table and no file, and who may have been is there whole or not at all."""
    interactions = query(homes[0], 'SELECT "user", response_id FROM interactions')
    feedback = query(homes[0], "SELECT feedback_id, response_id, text FROM feedback")
    left: Counter[str] = Counter(row["user"] for row in interactions)
    left.update(row["text"].split()[-1] for row in feedback if row["feedback_id"] not in account.again)
    there = {row["response_id"] for row in interactions}
    half = 0
    for user in operator.maybe_erased:
        lost = any(account.users[one] == user and one not in there for one in account.responses)
        half += lost and left[user] > 0
    gone = {user for user in operator.maybe_erased if not left[user]} | operator.erased
    return {
        "erased_users": len(operator.erased),
        "erasures_that_a_kill_left_to_maintenance": len(gone - operator.erased),
        "not_erased": sum(left[user] > 0 for user in operator.erased),
        "half_erased": half,
        "erased_but_in_files": len(users_in_files(homes, account) & gone),
    }


def users_in_files(homes: list[Path], account: Account) -> set[str]:
    """Everybody whom any file of the lake or a journal names, also files that no version of a table needs."""
    found = set()
    for file in (homes[0] / "lake").rglob("*.parquet"):
        if "_delta_log" in file.parts:
            continue
        columns = set(pq.read_schema(file).names)
        if "user" in columns:
            found |= set(pq.read_table(file, columns=["user"])["user"].to_pylist())
        elif "text" in columns:
            rows = pq.read_table(file, columns=["feedback_id", "text"]).to_pylist()
            found |= {row["text"].split()[-1] for row in rows if row["feedback_id"] not in account.again}
    logs = list((homes[0] / "lake").rglob("*.json"))
    logs += [file for home in homes for file in (home / "journal").rglob("*") if file.is_file()]
    # The log quotes the texts of feedback that was sent again.
    quoted = {account.users[account.feedback[one]] for one in account.again}
    for file in logs:
        found |= {name.decode() for name in re.findall(rb"u[0-9a-f]{32}", file.read_bytes())} - quoted
    return found


def compare_promotions(home: Path, operator: Operator) -> dict[str, Any]:
    """Each promotion that was acknowledged is in the history once, and nothing else moved the pointer."""
    history = json.loads(run("history", "--json", "--home", str(home)))
    moves = Counter(move["why"] for move in history[1:])  # the first is that of `init`
    pointer = operator.pointer()
    generations = [move["generation"] for move in history]
    return {
        "promotions": len(operator.promoted),
        "promotions_killed_and_done": sum(moves[why] for why in operator.maybe_promoted),
        "lost_promotions": sum(moves[why] == 0 for why in operator.promoted),
        "doubled_promotions": sum(count > 1 for count in moves.values()),
        "moved_by_nobody": len(moves.keys() - operator.promoted - operator.maybe_promoted),
        "pointer_not_whole": operator.torn_pointers
        + (pointer != {name: history[-1].get(name) for name in pointer})
        + (generations != list(range(generations[0], generations[0] + len(generations)))),
    }


def compare(account: Account, home: Path, operator: Operator) -> dict[str, Any]:
    """The clients' account against the sealed lake, id by id, without what an erasure has taken."""
    interactions = query(home, "SELECT response_id, status, metadata['mark'] AS mark FROM interactions")
    feedback = query(home, "SELECT feedback_id, response_id FROM feedback")
    responses = Counter(row["response_id"] for row in interactions)
    complete = {row["response_id"]: row["mark"] for row in interactions if row["status"] == "complete"}
    marks = set(complete.values())
    thumbs = Counter(row["feedback_id"] for row in feedback)
    about = {row["feedback_id"]: row["response_id"] for row in feedback}
    # Whose erasure was killed may be there whole; that half of it is not is for compare_erasures to find.
    gone = operator.erased | operator.maybe_erased
    kept = {one: mark for one, mark in account.responses.items() if account.users[one] not in gone}
    noted = {one: of for one, of in account.feedback.items() if account.users[of] not in gone or one in account.again}
    return {
        "acknowledged_responses": len(account.responses),
        "acknowledged_responses_not_erased": len(kept),
        "acknowledged_feedback": len(account.feedback),
        "responses_in_lake": len(interactions),
        "feedback_in_lake": len(feedback),
        "lost_responses": sum(complete.get(one) != mark for one, mark in kept.items()),
        "lost_feedback": sum(about.get(one) != response for one, response in noted.items()),
        "erased_feedback_said_again": len(account.again),
        "doubled_responses": sum(count > 1 for count in responses.values()),
        "doubled_feedback": sum(count > 1 for count in thumbs.values()),
        "recorded_though_refused": len(account.refused_requests & marks)
        + sum(one in thumbs for one in account.refused_feedback),
        "refused_requests": len(account.refused_requests),
        "refused_feedback": len(account.refused_feedback),
    }


def query(home: Path, sql: str) -> list[dict[str, Any]]:
    """Rows of the sealed lake."""
    text = run("lake", "sql", sql, "--sealed-only", "--format", "jsonl", "--home", str(home))
    return [json.loads(line) for line in text.splitlines()]


def tail(home: Path) -> str:
    return (home / "server.log").read_text()[-2000:]


def say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="processes to kill, half of them commands")
    parser.add_argument("--clients", type=int, default=8, help="clients at a time")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between a client's requests, on average")
    parser.add_argument("--seed", type=int, default=1, help="of which process is killed, and when")
    parser.add_argument("--folder", type=Path, default=Path("runs/crash"), help="a folder of its own; emptied first")
    options = parser.parse_args()
    if options.kills < 1 or options.clients < 1 or options.pause < 0:
        parser.error("--kills and --clients must be at least 1, and --pause 0 or more")
    shutil.rmtree(options.folder, ignore_errors=True)
    folder = options.folder.absolute()
    folder.mkdir(parents=True)
    os.environ["PYTHONUNBUFFERED"] = "1"
    result = asyncio.run(crash(options.kills, folder, options.clients, options.seed, options.pause))
    print(json.dumps(result))
    sys.exit(any(result[name] for name in BAD))


if __name__ == "__main__":
    main()
