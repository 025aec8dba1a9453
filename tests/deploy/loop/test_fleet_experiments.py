"""Experiments on the users of a real fleet: rolled back, committed, watched, kept, and refused where it can't be."""

from __future__ import annotations

import asyncio
import itertools
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from deploy.commands.gate.experiment import describe
from deploy.config import root
from deploy.config.root import Settings
from deploy.loop.promotion import ExperimentRefused
from loadtests.server import free_port
from tests.deploy.loop.test_experiments import ledger_of, look_until, perturbed, rows_of, start, wrong_with

ASKERS = 6
SERVERS: list[subprocess.Popen[bytes]] = []


class Traffic:
    """Users who come, ask twice, give thumbs by the policy that answered, and go; ``likes``: the chance of a thumb up.

    The chance is by policy.
    """

    def __init__(self, url: str, name: str, likes: dict[int, float]) -> None:
        self.url, self.name, self.likes = url, name, likes
        self.answered: list[str] = []
        self.failed: list[str] = []
        self._numbers = itertools.count()

    def __enter__(self) -> Traffic:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._come()))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)
        assert self.failed[:1] == []

    async def _come(self) -> None:
        async with httpx.AsyncClient(base_url=self.url, timeout=60) as client:
            await asyncio.gather(*(self._ask(client) for _ in range(ASKERS)))

    async def _ask(self, client: httpx.AsyncClient) -> None:
        while not self._stop.is_set():
            user = f"{self.name}-{next(self._numbers)}"
            taste = random.Random(user)
            for _ in range(2):
                answer = await client.post("/generate", json={"prompt": "1+1=", "max_tokens": 4, "user": user})
                if answer.status_code != 200:
                    self.failed.append(answer.text)
                    continue
                [response] = answer.json()["responses"]
                self.answered.append(response["response_id"])
                up = taste.random() < self.likes[response["policy_spans"][0]["policy_version"]]
                thumb = {"response_id": response["response_id"], "kind": "thumb", "value": int(up)}
                said = await client.post("/feedback", json=thumb)
                if said.status_code != 201:
                    self.failed.append(said.text)


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """A home with three policies of which 1 serves, and its fleet of two replicas, which runs."""
    from deploy import initialise

    home = tmp_path_factory.mktemp("fleet experiments") / "home"
    home.mkdir()
    settings = root.load(
        None,
        [
            ("home", str(home)),
            ("serve.port", str(free_port())),
            ("serve.swap.poll_seconds", "0.1"),
            ("serve.engine.kv_cache_bytes", str(64 << 20)),
            ("serve.engine.threads", "1"),
            ("serve.fleet.replicas", "2"),
            ("serve.fleet.num_cpus", "0.5"),
            ("evaluation.experiment.block_seconds", "1"),
            ("evaluation.experiment.feedback_window_seconds", "1"),
            ("evaluation.experiment.phases", '[{"share": 0.5}]'),
            ("evaluation.experiment.watch_seconds", "15"),
            ("evaluation.experiment.watch_share", "0.5"),
            ("evaluation.experiment.outcomes.errors.margin", "0.3"),
            ("evaluation.experiment.outcomes.errors.role", "guardrail"),
            ("evaluation.experiment.outcomes.feedback.role", "success"),
        ],
        environment={},
    )
    initialise.initialise(settings, str(model), revision=None, who="tests")
    store = settings.policy_store()
    for _ in range(2):
        store.publish(perturbed(store.get(1).path), parent=1, lineage={}, metrics={})
    command = [sys.executable, "-m", "deploy.cli", "--config", str(settings.snapshot()), "serve"]
    with (home / "serve.log").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    SERVERS.append(process)
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(httpx.HTTPError, KeyError, ValueError):
            if len(httpx.get(f"{settings.server_url}/ready", timeout=60).json()["replicas"]) == 2:
                break
        time.sleep(0.2)
    else:
        process.kill()
        pytest.fail((home / "serve.log").read_text()[-3000:])
    yield settings
    process.terminate()
    assert process.wait(120) == 0, (home / "serve.log").read_text()[-3000:]


def serves_alone(settings: Settings, version: int) -> None:
    """Wait until both replicas serve it."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        policy = httpx.get(f"{settings.server_url}/policy", timeout=60).json()
        if [one["version"] for one in policy["replicas"].values()] == [version] * 2 and policy["experiment"] is None:
            return
        time.sleep(0.1)
    raise TimeoutError(policy)


@pytest.mark.timeout(900)
@pytest.mark.long
def test_what_harms_users_goes_back_by_itself_and_nobody_loses_a_request(served: Settings) -> None:
    with Traffic(served.server_url, "harm", {1: 0.9, 2: 0.2}) as traffic:
        experiment = start(served, 2)
        assert experiment.unit == "user"
        ended = look_until(served, lambda one: one.state == "ended", within_s=400)
        serves_alone(served, 1)
    assert ended.end is not None
    assert ended.end["decision"] == "roll back"
    assert rows_of(served, traffic.answered) == len(traffic.answered)
    assert any("users of the candidate" in line for line in describe(ended))
    assert [body["event"] for body in ledger_of(served, experiment.number)] == ["start", "end"]
    assert wrong_with(served) == []
    pointer = served.policy_store().serving()
    assert pointer is not None
    assert pointer.version == 1


@pytest.mark.timeout(900)
@pytest.mark.long
def test_what_users_like_better_is_committed_without_a_canary_watched_and_kept(served: Settings) -> None:
    with Traffic(served.server_url, "good", {1: 0.2, 3: 0.9}) as traffic:
        experiment = start(served, 3)
        committed = look_until(served, lambda one: one.state != "running", within_s=400)
        assert committed.state == "committed"
        assert committed.watched_from == committed.phases[-1].from_block
        ended = look_until(served, lambda one: one.state == "ended", within_s=400)
        serves_alone(served, 3)
    assert ended.end is not None
    assert ended.end["decision"] == "kept"
    watched = [block for block in committed_users(served, experiment.number) if block >= (ended.watched_from or 0)]
    assert watched
    assert [body["event"] for body in ledger_of(served, experiment.number)] == ["start", "commit", "end"]
    assert rows_of(served, traffic.answered) == len(traffic.answered)
    assert wrong_with(served) == []


def committed_users(settings: Settings, number: int) -> list[int]:
    """The blocks in which the users came that the last entry rests on."""
    from deploy.loop.experiments import blocks_file, blocks_seen
    from serve.policies.experiments import Experiments

    return [user.block for user in blocks_seen(blocks_file(Experiments(settings.policy_store().root), number))]


@pytest.mark.timeout(900)
def test_a_fleet_of_which_one_replica_is_left_is_refused(served: Settings) -> None:
    """The last test of this fleet: one replica is killed, and until another one is ready nothing can be shared."""
    processes = psutil.Process(SERVERS[-1].pid).children(recursive=True)
    victim = next(process for process in processes if "ray::ServeReplica" in " ".join(process.cmdline()))
    victim.kill()
    deadline = time.monotonic() + 180
    while ready_replicas(served) != 1:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with pytest.raises(ExperimentRefused, match="the fleet has 1 replica that is ready"):
        start(served, 2)


def ready_replicas(settings: Settings) -> int:
    answer = httpx.get(f"{settings.server_url}/policy", timeout=60)
    if answer.status_code != 200:
        return 0
    return [one["state"] for one in answer.json()["replicas"].values()].count("ready")
