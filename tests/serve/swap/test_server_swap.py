"""Swaps in the running server, under load, and its end."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from loadtests.event_lines import lines_of
from serve.policies import probe
from serve.policies.store import PolicyStore
from tests.serve.conftest import SERVER, LiveServer, reference_logprobs, start_server, stop_server


async def keep_asking(client: httpx.AsyncClient, name: str, stop: asyncio.Event) -> list[dict[str, Any]]:
    answers = []
    while not stop.is_set():
        response = await client.post("/generate", json={"prompt": name, "max_tokens": 60, "user": "swapping"})
        assert response.status_code == 200, response.text
        answers.append(response.json())
    return answers


async def test_a_server_with_room_for_a_second_set_of_weights_says_so(client: httpx.AsyncClient) -> None:
    way = (await client.get("/policy")).json()["swap"]
    assert way["in_place"] is False
    assert way["reason"].endswith("which the engine leaves free")
    assert "millrace_swap_in_place 0.0" in (await client.get("/metrics")).text


async def test_swaps_under_load_fail_nobody_and_every_token_is_the_policys_it_says(
    client: httpx.AsyncClient, server: LiveServer
) -> None:
    stop = asyncio.Event()
    askers = [asyncio.create_task(keep_asking(client, f"asker {i}", stop)) for i in range(16)]
    for version in (2, 3, 2, 1):
        await asyncio.sleep(0.4)
        policy = await asyncio.to_thread(server.settle, server.promote(version))
        assert (policy["version"], policy["failed"]) == (version, None)
    stop.set()
    answers = [answer for answers in await asyncio.gather(*askers) for answer in answers]

    rows = {row["response_id"]: row for row in server.rows("interactions", "\"user\" = 'swapping'")}
    assert len(rows) == len(answers)
    crossed = [row for row in rows.values() if len(row["policy_spans"]) > 1]
    assert crossed
    for answer in answers:
        (response,) = answer["responses"]
        row = rows[response["response_id"]]
        assert row["status"] == "complete"
        assert row["policy_spans"] == response["policy_spans"]
        assert answer["policy_version"] == response["policy_spans"][-1]["policy_version"]
        assert response["finish_reason"] == "stop" or len(row["response_token_ids"]) == 60
    whole = [row for row in rows.values() if len(row["policy_spans"]) == 1]
    for row in (crossed + whole)[:40]:
        # A response that went on under another policy did so on the KV cache of the first: serve.swap.recompute is off.
        first = row["policy_spans"][0]["policy_version"]
        end = row["policy_spans"][1]["start"] if row in crossed else len(row["response_token_ids"])
        expected = reference_logprobs(server.store.get(first).path, row["prompt_token_ids"], row["response_token_ids"])
        assert row["logprobs"][:end] == pytest.approx(expected[:end], abs=1e-4)

    swaps = [json.loads(line) for line in (server.home / "replicas/replica-0.jsonl").read_text().splitlines()][-4:]
    assert [(swap["from"], swap["to"], swap["ok"]) for swap in swaps] == [
        (1, 2, True),
        (2, 3, True),
        (3, 2, True),
        (2, 1, True),
    ]
    assert all(0 < swap["hold_ms"] < swap["prepare_ms"] for swap in swaps)
    assert any(swap["in_flight"] for swap in swaps)
    assert swaps == (await client.get("/policy")).json()["swaps"][-4:]


async def test_a_damaged_policy_is_refused_once_and_the_old_one_serves_on(
    client: httpx.AsyncClient, server: LiveServer, model_folders: list[Path]
) -> None:
    damaged = server.store.publish(model_folders[1], parent=1, lineage={}, metrics={})
    weights = damaged.path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"evil")
    serving = (await client.get("/policy")).json()["version"]
    policy = await asyncio.to_thread(server.settle, server.promote(damaged.version))
    assert policy["version"] == serving
    assert policy["failed"]["version"] == damaged.version
    assert "model.safetensors" in policy["failed"]["error"]
    pointer = server.store.serving()
    assert pointer is not None
    assert (pointer.version, pointer.who) == (serving, "replica-0"), "the next start must not try it again"
    assert f"policy {damaged.version} was refused" in pointer.why
    assert serving in server.store.served()
    assert damaged.version not in server.store.served()
    response = await client.post("/generate", json={"prompt": "still there?", "max_tokens": 4})
    assert response.json()["policy_version"] == serving
    assert (await client.get("/ready")).status_code == 200
    swaps = (server.home / "replicas/replica-0.jsonl").read_text().splitlines()
    await asyncio.sleep(0.3)
    assert (server.home / "replicas/replica-0.jsonl").read_text().splitlines() == swaps  # not tried again
    last = json.loads(swaps[-1])
    assert (last["ok"], last["hold_ms"]) == (False, 0)
    back = await asyncio.to_thread(server.settle, server.promote(serving))
    assert (back["version"], back["failed"]) == (serving, None)


async def test_what_a_server_serves_keeps_its_weights_wherever_the_pointer_has_gone_since(
    client: httpx.AsyncClient, server: LiveServer, model_folders: list[Path]
) -> None:
    before = (await client.get("/policy")).json()["version"]
    policy = server.store.publish(model_folders[1], parent=1, lineage={}, metrics={})
    assert (await asyncio.to_thread(server.settle, server.promote(policy.version)))["version"] == policy.version
    assert server.store.prune(policy.version, "retention", dict) == "in use"  # as if nothing else kept it
    assert (await asyncio.to_thread(server.settle, server.promote(before)))["version"] == before
    assert server.store.prune(before, "retention", dict) == "in use"
    assert server.store.prune(policy.version, "retention", dict) is None


def unlink(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def configure(key: str, value: object, file: str = "config.json") -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(config | {key: value}))

    return edit


def another_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}=")


def weigh(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors")

    return edit


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (None, unlink, "model.safetensors is missing"),
        (configure("rms_norm_eps", 0.5), None, "rms_norm_eps"),
        (another_template, None, "chat_template.jinja differs"),
        (configure("eos_token_id", [1, 9], "generation_config.json"), None, "generation_config.json has eos_token_id"),
        (weigh(lambda w: w.update({NORM: torch.ones(63)})), None, "shape [63]"),
        (weigh(lambda w: w.update({NORM: w[NORM].bfloat16()})), None, "is BF16"),
        (weigh(lambda w: w.pop(NORM)), None, "lacks the tensor"),
        (weigh(lambda w: w.update(extra=torch.ones(1))), None, "surplus tensor"),
        (weigh(lambda w: w[NORM].fill_(float("nan"))), None, "NaN"),
        (weigh(lambda w: w[NORM].fill_(float("-inf"))), None, "infinity"),
    ],
)
async def test_what_can_t_be_served_is_refused_by_name_and_the_old_policy_is_untouched(
    client: httpx.AsyncClient,
    server: LiveServer,
    model_folders: list[Path],
    tmp_path: Path,
    before: Callable[[Path], None] | None,
    after: Callable[[Path], None] | None,
    says: str,
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folders[1], folder)
    if before:
        before(folder)
    bad = server.store.publish(folder, parent=1, lineage={}, metrics={})
    if after:
        after(bad.path)
    serving = (await client.get("/policy")).json()["version"]
    work = asyncio.create_task(client.post("/generate", json={"prompt": "through it", "max_tokens": 200}))
    policy = await asyncio.to_thread(server.settle, server.promote(bad.version))
    assert policy["version"] == serving
    assert says in policy["failed"]["error"]
    assert policy["swaps"][-1]["hold_ms"] == 0
    answer = (await work).json()
    assert {span["policy_version"] for span in answer["responses"][0]["policy_spans"]} == {serving}
    back = await asyncio.to_thread(server.settle, server.promote(serving))
    assert (back["version"], back["failed"]) == (serving, None)


@pytest.mark.long
def test_killed_at_any_time_the_next_start_serves_what_the_pointer_names_and_nothing_is_left(
    tmp_path: Path, model_folders: list[Path]
) -> None:
    store = PolicyStore(tmp_path / "policies")
    for folder in model_folders:
        store.publish(folder, parent=None, lineage={}, metrics={}, probe=probe.measure)
    store.promote(1, expected=None, who="test", why="first")
    one = start_server(tmp_path, store, forked=False)
    try:
        one.promote(2)
        time.sleep(0.1)  # about when the weights are verified
        family = descendants(one.process.pid)
        one.process.kill()
        one.process.wait(120)
        assert left_of(family) == []
        two = start_server(tmp_path, store, forked=False)
        assert httpx.get(f"{two.url}/policy", timeout=60).json()["version"] == 2
        two.promote(3)
        time.sleep(0.2)
        engines = [one for one in descendants(two.process.pid) if "EngineCore" in psutil.Process(one).name()]
        assert engines
        for engine in engines:
            os.kill(engine, signal.SIGKILL)
        assert two.process.wait(120) != 0
    finally:
        one.process.kill()
    three = start_server(tmp_path, store, forked=False)
    assert httpx.get(f"{three.url}/policy", timeout=60).json()["version"] == 3
    assert stop_server(three) == 0


def test_a_server_without_a_policy_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="promote one first"):
        start_server(tmp_path, PolicyStore(tmp_path / "policies"), forked=False)
    assert f'Traceback (most recent call last):\n  File "{SERVER}"' in (tmp_path / "server.log").read_text()


@pytest.mark.parametrize("where", [8, -1], ids=["vLLM fails at it too", "vLLM would serve it"])
def test_a_server_whose_policy_is_damaged_does_not_start_and_names_the_file(
    where: int, tmp_path: Path, model_folders: list[Path]
) -> None:
    store = PolicyStore(tmp_path / "policies")
    damaged = store.publish(model_folders[0], parent=None, lineage={}, metrics={}).weight_files[0]
    content = bytearray(damaged.read_bytes())
    content[where] ^= 0xFF
    damaged.chmod(0o600)
    damaged.write_bytes(content)
    store.promote(1, expected=None, who="test", why="first")
    with pytest.raises(RuntimeError, match="its manifest says"):
        start_server(tmp_path, store, forked=False)
    said = (tmp_path / "server.log").read_text()
    assert f"PolicyCorrupt: policy 1: {damaged.name} has sha256" in said
    assert "the engine runs after" not in said
    assert left_of([one.pid for one in psutil.process_iter() if started_in(tmp_path, one)]) == []


@pytest.mark.long
def test_killed_while_vllm_starts_it_leaves_no_process(tmp_path: Path, model_folders: list[Path]) -> None:
    store = PolicyStore(tmp_path / "policies")
    store.publish(model_folders[0], parent=None, lineage={}, metrics={})
    store.promote(1, expected=None, who="test", why="first")

    def start() -> None:
        with pytest.raises(RuntimeError, match="did not get ready"):
            start_server(tmp_path, store, forked=False)

    starting = threading.Thread(target=start)
    starting.start()
    deadline = time.monotonic() + 300
    spawned: list[int] = []
    while not spawned and time.monotonic() < deadline:  # vLLM's engine, at the very beginning of its life
        time.sleep(0.02)
        spawned = [one for one in descendants(os.getpid()) if "millrace engine" in command_of(one)]
    assert spawned
    server = psutil.Process(spawned[0]).parent()
    assert server is not None
    family = descendants(server.pid)
    server.kill()
    assert left_of(family) == []
    starting.join(120)


def test_its_engine_is_the_process_that_it_forked(server: LiveServer) -> None:
    engines = [one for one in descendants(server.process.pid) if "EngineCore" in psutil.Process(one).name()]
    assert len(engines) == 1
    assert "MILLRACE_PARENT" not in psutil.Process(engines[0]).environ()  # which a new interpreter is given


async def test_the_end_finishes_requests_seals_every_row_and_leaves_no_process(
    client: httpx.AsyncClient, server: LiveServer
) -> None:
    """The last test of the session's server: it stops it."""
    children = descendants(server.process.pid)
    assert children
    body = {"prompt": "the end", "max_tokens": 240, "n": 4, "user": "last"}
    at_work = [asyncio.create_task(client.post("/generate", json=body)) for _ in range(3)]
    async with client.stream("POST", "/generate", json=body | {"stream": True}) as streamed:
        lines = lines_of(streamed)
        first = await anext(lines)  # by now the server has all of them
        stopping = asyncio.create_task(asyncio.to_thread(stop_server, server))
        read = [first, *[line async for line in lines]]
    answers = [await task for task in at_work]
    assert await stopping == 0, server.log.read_text()[-3000:]
    assert [answer.status_code for answer in answers] == [200] * 3
    data = next(after for line, after in itertools.pairwise(read) if line == "event: done")
    ended = json.loads(data.removeprefix("data: "))
    assert not left_of(children)  # multiprocessing's resource tracker sees that its parent is gone, and goes
    assert not list((server.home / "journal").glob("interactions*"))  # all of it is sealed
    recorded = {row["response_id"] for row in server.rows("interactions", "\"user\" = 'last'")}
    bodies = [ended, *(answer.json() for answer in answers)]
    assert recorded == {response["response_id"] for body in bodies for response in body["responses"]}
    assert "Traceback" not in server.log.read_text()


def left_of(processes: list[int], within: float = 60) -> list[int]:
    """Those of the processes that still run after a while."""
    deadline = time.monotonic() + within
    while (left := [process for process in processes if is_running(process)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def started_in(home: Path, process: psutil.Process) -> bool:
    """Whether it has the home in its environment, as the server and all below it do."""
    try:
        return str(home) in process.environ().values()
    except psutil.Error:
        return False


def command_of(process: int) -> str:
    try:
        return " ".join(psutil.Process(process).cmdline())
    except psutil.NoSuchProcess:
        return ""


def is_running(process: int) -> bool:
    """Whether it is there and no zombie: one whose parent is gone may wait for whoever adopted it to reap it."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def descendants(process: int) -> list[int]:
    found = []
    for child in Path(f"/proc/{process}/task/{process}/children").parent.parent.glob("*/children"):
        for pid in map(int, child.read_text().split()):
            found += [pid, *descendants(pid)]
    return found


def test_a_server_without_room_for_a_second_set_of_weights_decides_so_when_it_starts(
    tmp_path: Path, model_folders: list[Path]
) -> None:
    store = PolicyStore(tmp_path / "policies")
    for folder in model_folders[:2]:
        store.publish(folder, parent=None, lineage={}, metrics={}, probe=probe.measure)
    store.promote(1, expected=None, who="test", why="first")
    server = start_server(tmp_path, store, swap={"poll_seconds": 0.05, "spare_bytes": 1 << 50})  # more than there is
    try:
        way = httpx.get(f"{server.url}/policy").json()["swap"]
        assert way["in_place"] is True
        assert way["reason"].startswith("a second set of weights takes 1048576.")
        assert "millrace_swap_in_place 1.0" in httpx.get(f"{server.url}/metrics").text
        said = "swaps load weights in place, and requests wait for the load: a second set of weights takes 1048576."
        assert said in server.log.read_text()
        done = server.settle(server.promote(2))
        assert (done["version"], done["failed"]) == (2, None)
        assert done["swaps"][-1]["in_place"] is True
    finally:
        stop_server(server)
