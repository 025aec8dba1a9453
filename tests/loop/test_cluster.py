"""A fleet and a training on a Ray cluster of two machines, of which one is killed: ``make test-cluster``.

Not part of ``make test``: it needs root, for the machines' networks, and minutes of a processor.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from job_home import job_context, make_home

from feedback.config import LakeConfig
from feedback.lake.tables import Lake
from loadtests.tiny_model import make_model_folder
from serve.policies.store import PolicyStore
from tests.loop.ray_nodes import HEAD, WORKER, Node, can_make_networks, two_nodes
from tests.serve.conftest import SERVER
from train.checkpoint.folders import checkpoints
from train.config.training import TrainConfig
from train.context import JobContext, JobResult
from train.controller.heartbeat import driver_step
from train.launch import run_job
from train.run.recovery.restarts import read_restarts
from train.run.recovery.resume import checkpoints_of

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(3000),
    pytest.mark.skipif(not can_make_networks(), reason="needs root and iproute2, to make networks"),
]
PATIENCE_S = 600
PORT = 8000
REPLICAS = {"replica-0", "replica-1"}
TRAIN: dict[str, Any] = {
    "ranks": 2,
    "placement": {"pools": {"all": {"strategy": "SPREAD"}}},
    "ray_address": f"http://{HEAD}:8265",
    "dtype": "float32",
    "steps": 6,
    "micro_batch_tokens": 64,
    "optimizer": {"learning_rate": 3e-3, "warmup_steps": 3},
    "rollout": {"max_tokens": 24, "max_model_len": 64, "kv_cache_bytes": 16 * 2**20},
    "data": {"prompts_per_step": 4, "min_prompts": 4},
    "algorithm": {"name": "grpo", "group_size": 4},
    "checkpoint": {"every_steps": 1},
    "start_timeout_s": 400,
    "step_timeout_s": 60,
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("cluster")
    make_home(root)
    return root


@pytest.fixture(scope="module")
def nodes(home: Path) -> Iterator[tuple[Node, Node]]:
    with two_nodes([str(home)]) as started, pytest.MonkeyPatch.context() as patch:
        for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):  # the job API's client is in this process
            patch.setenv(name, started[0].environment[name])
        yield started


def ready(address: str) -> set[str]:
    """The replicas that a node's proxy knows as ready."""
    try:
        return set(httpx.get(f"http://{address}:{PORT}/ready", timeout=10).json().get("replicas", ()))
    except (httpx.HTTPError, ValueError):
        return set()


def wait_until(condition: Any, log: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert process.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(0.5)


@pytest.fixture
def fleet(nodes: tuple[Node, Node], tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A replica on each node, and the process that deployed them, on the head."""
    store = PolicyStore(tmp_path / "policies")
    store.publish(make_model_folder(tmp_path / "model", 1), parent=None, lineage={}, metrics={})
    store.promote(1, expected=None, who="test", why="first")
    settings = {
        "serve": {
            "host": "0.0.0.0",
            "port": PORT,
            "auth": "off",
            "allowed_hosts": [HEAD, WORKER],
            "policies": str(store.root),
            "replicas": str(tmp_path / "replicas"),
            "keys": str(tmp_path / "keys.json"),
            "audit": str(tmp_path / "audit.jsonl"),
            "engine": {"kv_cache_bytes": 64 << 20, "threads": 1},
            # Each node has room for one.
            "fleet": {"replicas": 2, "num_cpus": 1.5, "ray_address": f"{HEAD}:6379", "health_check_period_s": 2},
        },
        "feedback": {
            "journal": {"folder": str(tmp_path / "journal"), "segment_seconds": 1},
            "lake": {"uri": str(tmp_path / "lake"), "seal_seconds": 1},
        },
    }
    log = tmp_path / "serve.log"
    process = nodes[0].popen([sys.executable, SERVER, json.dumps(settings)], log)
    try:
        wait_until(lambda: ready(HEAD) == REPLICAS and ready(WORKER) == REPLICAS, log, process)
        yield process, log
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(120)
        finally:
            process.kill()


def test_a_fleet_over_two_nodes_serves_on_when_one_dies_and_fills_it_again_when_it_is_back(
    nodes: tuple[Node, Node], fleet: tuple[subprocess.Popen[bytes], Path], tmp_path: Path
) -> None:
    _, worker = nodes
    process, log = fleet
    stop, died = threading.Event(), threading.Event()
    outcomes: list[tuple[bool, int]] = []  # (whether it began after the death was known, status)

    def ask() -> None:
        with httpx.Client(base_url=f"http://{HEAD}:{PORT}", timeout=120) as client:
            while not stop.is_set():
                late = died.is_set()
                answer = client.post("/generate", json={"prompt": "hello", "max_tokens": 16, "user": "all"})
                outcomes.append((late, answer.status_code))

    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(ask) for _ in range(4)]
        try:
            wait_until(lambda: {row["replica"] for row in rows(tmp_path)} == REPLICAS, log, process)
            worker.kill()
            wait_until(lambda: len(ready(HEAD)) == 1, log, process)
            died.set()
            wait_until(lambda: sum(late for late, _ in outcomes) >= 40, log, process)
        finally:
            stop.set()
        for client in clients:
            client.result()
    print("statuses:", Counter(outcomes))
    failed = [late for late, status in outcomes if status != 200]
    assert {status for _, status in outcomes} <= {200, 503}
    assert not any(failed)  # none that began when the fleet knew
    worker.start()
    wait_until(lambda: ready(HEAD) == REPLICAS and ready(WORKER) == REPLICAS, log, process)
    answer = httpx.post(f"http://{WORKER}:{PORT}/generate", json={"prompt": "hello", "max_tokens": 4}, timeout=120)
    assert answer.status_code == 200


def rows(home: Path) -> list[dict[str, Any]]:
    with Lake(str(home / "lake"), LakeConfig()).connect(home / "journal") as connection:
        return connection.sql("SELECT replica, status FROM interactions").to_arrow_table().to_pylist()


NODES = """
from ray.util import placement_group_table
from train.observe.hooks import Hook

class Nodes(Hook):
    def on_step(self, step, metrics):
        placed = [group for group in placement_group_table().values() if group["state"] == "CREATED"]
        nodes = sorted({node for group in placed for node in group["bundles_to_node_id"].values()})
        with (self.run.folder / "nodes").open("a") as file:
            print(step, *nodes, file=file)
"""


def test_two_nodes_train_to_the_weights_of_one(nodes: tuple[Node, Node], home: Path) -> None:
    """Ten steps of two ranks: on a node each, and both on one."""
    (home / "nodes_hook.py").write_text(NODES)
    weights, used = {}, {}
    for strategy in ("STRICT_SPREAD", "STRICT_PACK"):
        settings = {"steps": 10, "hooks": ["nodes_hook:Nodes"], "placement": {"pools": {"all": {"strategy": strategy}}}}
        others = {"reward": "users_code:reward", "parent": 1, "python_path": [str(home)]}
        context = JobContext.model_validate(job_context(home, strategy.lower(), **others))
        result = run_job(TrainConfig.model_validate({**TRAIN, **settings}), context)
        assert result.steps == 10
        weights[strategy] = (home / "policies" / f"v{result.candidate or 0:06d}" / "model.safetensors").read_bytes()
        used[strategy] = [len(line.split()) - 1 for line in (context.folder / "nodes").read_text().splitlines()]
        assert not read_restarts(context.folder)
    assert used == {"STRICT_SPREAD": [2] * 10, "STRICT_PACK": [1] * 10}
    assert weights["STRICT_SPREAD"] == weights["STRICT_PACK"]
    assert weights["STRICT_PACK"] != (home / "seed" / "model.safetensors").read_bytes()


MOMENTS: dict[str, Callable[[JobContext], bool]] = {
    "sampling": lambda run: driver_step(run.folder) == 3,
    "learning": lambda run: checkpoints_of(run).exists() and bool(checkpoints(checkpoints_of(run))),
    "publishing": lambda run: (run.folder / "candidate").exists(),
}


def test_a_training_on_two_nodes_of_which_one_dies_goes_on_by_itself_to_the_same_weights_or_on_fewer_ranks(
    nodes: tuple[Node, Node], home: Path
) -> None:
    _, worker = nodes

    def context(run: str) -> JobContext:
        others = {"reward": "users_code:reward", "parent": 1, "python_path": [str(home)]}
        return JobContext.model_validate(job_context(home, run, **others))

    def broken(
        run: str, meanwhile: Callable[[], None] = lambda: None, moment: str = "learning", **settings: Any
    ) -> JobResult:
        """The result of a run whose second node dies at a moment."""
        config = TrainConfig.model_validate({**TRAIN, **settings})
        with ThreadPoolExecutor(1) as pool:
            result: Future[JobResult] = pool.submit(run_job, config, context(run))
            while not MOMENTS[moment](context(run)):
                assert not result.done(), result.exception()
                time.sleep(0.01)
            worker.kill()
            meanwhile()
            return result.result(PATIENCE_S)

    whole = run_job(TrainConfig.model_validate(TRAIN), context("whole"))
    before = PolicyStore(home / "policies").versions()
    for moment in MOMENTS:
        again = broken(moment, worker.start, moment)
        folders = [home / "policies" / f"v{run.candidate or 0:06d}" for run in (whole, again)]
        assert folders[0] != folders[1]
        first, second = ((folder / "model.safetensors").read_bytes() for folder in folders)
        assert first == second, moment
        restarts = [(one.kind, one.ranks) for one in read_restarts(context(moment).folder)]
        # The driver is on the head, and may have all that it publishes by then.
        assert restarts == [("lost", 2)] or (moment == "publishing" and not restarts)
    assert len(PolicyStore(home / "policies").versions()) == len(before) + len(MOMENTS)
    # A rank on each of two nodes is one rank where there is one node.
    apart = {"pools": {"all": {"strategy": "STRICT_SPREAD"}}}
    fewer = broken("fewer", placement=apart, restarts={"wait_s": 5})
    worker.start()
    assert fewer.candidate is not None
    assert [(one.kind, one.ranks) for one in read_restarts(context("fewer").folder)] == [("lost", 1)]
