"""Several API processes in front of one real engine: what one answers, all of them would."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from pydantic import ValidationError

from loadtests.event_lines import lines_of
from loadtests.tiny_model import make_model_folder
from serve.config import ServeConfig
from serve.middleware.api_keys import create_key, revoke_key, set_scopes
from serve.policies.experiments import Experiment, Experiments, Phase
from serve.policies.store import PolicyStore
from tests.serve import conftest
from tests.serve.conftest import LiveServer, reference_logprobs, start_server, stop_server
from tests.serve.experiment_records import experiment_record
from tests.trees import left_of

FIRST, FURTHER = 0, 1
PROMPT = "to be or not to be, that is the question: whether it is nobler in the mind to suffer"  # of several KV blocks


def with_policies(home: Path, model_folders: list[Path], **serve: Any) -> LiveServer:
    store = PolicyStore(home / "policies")
    if store.serving() is None:
        for number, folder in enumerate(model_folders):
            store.publish(folder, parent=number or None, lineage={"test": True}, metrics={})
        store.promote(1, expected=None, who="test", why="first")
    return start_server(home, store, api_processes=2, **serve)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, model_folders: list[Path]) -> Iterator[LiveServer]:
    server = with_policies(tmp_path_factory.mktemp("two"), model_folders)
    yield server
    assert stop_server(server) == 0, server.log.read_text()[-4000:]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., LiveServer]]:
    """Start a server in this test's own home; what still runs when the test ends is killed."""
    started: list[LiveServer] = []

    def start(model_folders: list[Path], **serve: Any) -> LiveServer:
        started.append(with_policies(tmp_path, model_folders, forked=False, **serve))  # they look at processes
        return started[-1]

    yield start
    for server in started:
        server.process.kill()
        server.process.wait(180)


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A policy with a long context."""
    return [make_model_folder(tmp_path_factory.mktemp("roomy") / "m", 1, context=16384)]


def api_processes(server: LiveServer) -> list[psutil.Process]:
    """Those that listen on its port, the first one first."""
    port = int(server.url.rpartition(":")[2])
    root = psutil.Process(server.process.pid)

    def listens(one: psutil.Process) -> bool:
        with suppress(psutil.NoSuchProcess):  # it has died meanwhile
            return any(c.status == "LISTEN" and c.laddr.port == port for c in one.net_connections())
        return False

    return [one for one in (root, *root.children(recursive=True)) if listens(one)]


async def both_listen(server: LiveServer) -> list[psutil.Process]:
    """The first one does when the server is ready, the other one in a moment."""
    deadline = time.monotonic() + 180
    while len(processes := api_processes(server)) < 2:
        assert time.monotonic() < deadline, server.log.read_text()[-3000:]
        await asyncio.sleep(0.05)
    return processes


async def clients_of(server: LiveServer, stack: AsyncExitStack) -> list[httpx.AsyncClient]:
    """A client of each process, by one connection that stays."""
    processes = await both_listen(server)
    found: dict[int, httpx.AsyncClient] = {}
    while len(found) < len(processes):
        limits = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=600)
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits))
        answer = await client.get("/health")
        _, port = answer.extensions["network_stream"].get_extra_info("client_addr")[:2]
        (pid,) = [
            one.pid for one in processes if any(c.raddr and c.raddr.port == port for c in one.net_connections("tcp"))
        ]
        found.setdefault(pid, client)
    return [found[one.pid] for one in processes]


@pytest.fixture
async def clients(two: LiveServer) -> AsyncIterator[list[httpx.AsyncClient]]:
    async with AsyncExitStack() as stack:
        yield await clients_of(two, stack)


async def begun(stack: AsyncExitStack, client: httpx.AsyncClient, user: str, tokens: int) -> AsyncIterator[str]:
    """The lines of a stream of so many tokens, whose start is on disk."""
    body = {"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "stream": True, "user": user}
    answer = await stack.enter_async_context(client.stream("POST", "/v1/completions", json=body))
    assert answer.status_code == 200
    lines = lines_of(answer)
    await anext(lines)
    return lines


def refusals(metrics: str) -> float:
    """Requests that were answered 503, by a Prometheus text."""
    found = re.search(r'^millrace_requests_total\{code="503",route="/generate"\} (\S+)', metrics, re.MULTILINE)
    return float(found[1]) if found else 0.0


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]


async def all_forms(client: httpx.AsyncClient, user: str) -> list[str]:
    """Ids of a response of each route, plain and streamed."""
    generate: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 8, "user": user}
    plain = await client.post("/generate", json=generate)
    stream = await client.post("/generate", json=generate | {"stream": True})
    several = await client.post("/generate", json=generate | {"n": 2})
    stopped = await client.post("/generate", json=generate | {"stop": ["zz"]})
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "user": user}
    v1 = await client.post("/v1/chat/completions", json=chat)
    v1_stream = await client.post("/v1/chat/completions", json=chat | {"stream": True})
    answers = (plain, stream, several, stopped, v1, v1_stream)
    assert {answer.status_code for answer in answers} == {200}, [answer.text for answer in answers]
    return [
        *(response["response_id"] for answer in (plain, several, stopped) for response in answer.json()["responses"]),
        events(stream.text)[-1]["responses"][0]["response_id"],
        v1.json()["id"].removeprefix("chatcmpl-"),
        events(v1_stream.text)[0]["id"].removeprefix("chatcmpl-"),
    ]


@pytest.mark.parametrize("which", [FIRST, FURTHER])
async def test_each_answers_both_apis_plain_and_streamed_and_records_what_it_answered(
    two: LiveServer, clients: list[httpx.AsyncClient], which: int
) -> None:
    ids = await all_forms(clients[which], f"forms {which}")
    rows = {row["response_id"]: row for row in two.rows("interactions", f"\"user\" = 'forms {which}'")}
    assert sorted(rows) == sorted(ids)
    for row in rows.values():
        assert (row["status"], row["replica"]) == ("complete", "replica-0")
        expected = reference_logprobs(two.store.get(1).path, row["prompt_token_ids"], row["response_token_ids"])
        assert row["logprobs"] == pytest.approx(expected, abs=1e-4)
    models = (await clients[which].get("/v1/models")).json()
    assert [model["id"] for model in models["data"]] == ["millrace"]
    refused = await clients[which].post("/generate", json={"prompt": "a", "max_tokens": "many"})
    assert refused.status_code == 422


async def test_each_has_a_journal_of_its_own_and_one_sealer_moves_all_to_the_lake(two: LiveServer) -> None:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        log = "".join(path.read_text() for path in (two.home / "lake/interactions/_delta_log").glob("*.json"))
        if set(re.findall(r'"journal\.(replica-0(?:-api-1)?)\.', log)) == {"replica-0", "replica-0-api-1"}:
            return
        await asyncio.sleep(0.2)
    raise AssertionError(log[-3000:])


async def test_feedback_is_known_to_all_whichever_took_it(two: LiveServer, clients: list[httpx.AsyncClient]) -> None:
    generate = {"prompt": "abc", "max_tokens": 4, "session_id": "both"}
    response_id = (await clients[FURTHER].post("/generate", json=generate)).json()["responses"][0]["response_id"]
    body = {"kind": "thumb", "value": 1, "response_id": response_id, "feedback_id": "said-once"}
    statuses = [(await clients[which].post("/feedback", json=body)).status_code for which in (FIRST, FURTHER, FURTHER)]
    assert statuses == [201, 200, 200]
    other = await asyncio.gather(*(client.post("/feedback", json=body | {"value": 0}) for client in clients))
    assert [answer.status_code for answer in other] == [409, 409]
    # At once at both: one of them is the one that is recorded.
    body["feedback_id"] = "said-at-once"
    at_once = await asyncio.gather(*(clients[i % 2].post("/feedback", json=body) for i in range(2)))
    assert sorted(answer.status_code for answer in at_once) == [200, 201]
    session = {"kind": "thumb", "value": 1, "session_id": "both", "feedback_id": "of-the-session"}
    said = [(await client.post("/feedback", json=session)).status_code for client in reversed(clients)]
    assert said == [201, 200]
    rows = two.rows("feedback", "feedback_id in ('said-once', 'said-at-once')")
    assert sorted(row["feedback_id"] for row in rows) == ["said-at-once", "said-once"]


async def test_what_is_asked_of_the_server_has_one_answer(two: LiveServer, clients: list[httpx.AsyncClient]) -> None:
    counted = re.compile(r'^millrace_requests_total\{code="200",route="/generate"\} (\S+)', re.MULTILINE)
    before = [float(counted.search((await client.get("/metrics")).text)[1]) for client in clients]  # type: ignore[index]
    for client in clients:
        await client.post("/generate", json={"prompt": "abc", "max_tokens": 2})
    texts = [(await client.get("/metrics")).text for client in clients]
    after = [float(counted.search(text)[1]) for text in texts]  # type: ignore[index]
    assert before[0] == before[1]
    assert after == [before[0] + 2] * 2
    for text in texts:
        assert "\nmillrace_policy_version 1.0\n" in text
        assert "\nmillrace_journal_healthy 1.0\n" in text
        assert text.count("\nmillrace_response_tokens_total ") == 1
    for path in ("/policy", "/health", "/ready", "/openapi.json"):
        first, further = [await client.get(path) for client in clients]
        assert (first.status_code, first.content) == (further.status_code, further.content) == (200, first.content)
    missing = await clients[FURTHER].get("/nowhere")
    assert (missing.status_code, missing.json()["detail"]) == (404, "there is no /nowhere")


async def test_swaps_under_load_fail_nobody_in_either_and_every_token_is_the_policys_it_says(
    two: LiveServer, clients: list[httpx.AsyncClient]
) -> None:
    stop = asyncio.Event()
    answers: list[list[dict[str, Any]]] = [[], []]

    async def ask(which: int, stream: bool) -> None:
        async with AsyncExitStack() as stack:
            client = (await clients_of(two, stack))[which]
            while not stop.is_set():
                body = {"prompt": PROMPT, "max_tokens": 48, "user": f"swapping {which}", "stream": stream}
                response = await client.post("/generate", json=body)
                assert response.status_code == 200, response.text
                answers[which].append(events(response.text)[-1] if stream else response.json())

    asking = [asyncio.create_task(ask(which, stream)) for which in (FIRST, FURTHER) for stream in (False, True) * 3]
    for version in (2, 3, 2, 1, 2, 1):
        await asyncio.sleep(0.4)
        policy = await asyncio.to_thread(two.settle, two.promote(version))
        assert (policy["version"], policy["failed"]) == (version, None)
        # From now on nobody is answered by another one.
        for client in clients:
            fresh = (await client.post("/generate", json={"prompt": PROMPT, "max_tokens": 4})).json()
            assert [span["policy_version"] for span in fresh["responses"][0]["policy_spans"]] == [version]
    stop.set()
    await asyncio.gather(*asking)

    for which in (FIRST, FURTHER):
        rows = {row["response_id"]: row for row in two.rows("interactions", f"\"user\" = 'swapping {which}'")}
        assert len(rows) == len(answers[which])
        for answer in answers[which]:
            (response,) = answer["responses"]
            row = rows[response["response_id"]]
            assert row["status"] == "complete"
            assert row["policy_spans"] == response["policy_spans"]
            assert answer["policy_version"] == response["policy_spans"][-1]["policy_version"]
        crossed = [row for row in rows.values() if len(row["policy_spans"]) > 1]
        whole = [row for row in rows.values() if len(row["policy_spans"]) == 1]
        assert crossed
        assert {row["policy_spans"][0]["policy_version"] for row in whole} == {1, 2, 3}
        for row in crossed + whole[:60]:
            first = row["policy_spans"][0]["policy_version"]
            end = row["policy_spans"][1]["start"] if row in crossed else len(row["response_token_ids"])
            expected = reference_logprobs(two.store.get(first).path, row["prompt_token_ids"], row["response_token_ids"])
            assert row["logprobs"][:end] == pytest.approx(expected[:end], abs=1e-4)


async def test_an_experiments_blocks_are_labelled_as_they_were_drawn_by_each(
    two: LiveServer, clients: list[httpx.AsyncClient]
) -> None:
    pointer = two.store.serving()
    assert pointer is not None
    served = {"control": pointer.version, "generation": pointer.generation}
    changed: dict[str, Any] = {"number": 1, "seed": "seed 1", "block_s": 0.5, "phases": (Phase(0, 0.5), Phase(40, 0.8))}
    experiment = experiment_record(**served | changed)
    experiments = Experiments(two.store.root)
    experiments.begin(experiment)

    async def ask(client: httpx.AsyncClient, which: int) -> None:
        changes: list[int] = []
        async with asyncio.timeout(300):
            while len(changes) < 5:
                body = {"prompt": PROMPT, "max_tokens": 4, "user": f"blocks {which}"}
                answer = await client.post("/generate", json=body)
                assert answer.status_code == 200, answer.text
                if (version := answer.json()["policy_version"]) not in changes[-1:]:
                    changes.append(version)

    await asyncio.gather(*(ask(client, which) for which, client in enumerate(clients)))
    experiments.stop(1, who="test", why="the end")
    experiments.change(1, lambda one: Experiment(**{**vars(one), "state": "ended"}))
    for which in (FIRST, FURTHER):
        rows = [
            row
            for row in two.rows("interactions", f"\"user\" = 'blocks {which}'")
            if row["experiment"] is not None and len(row["policy_spans"]) == 1
        ]
        versions = {"candidate": experiment.candidate, "control": experiment.control}
        assert {row["variant"] for row in rows} == set(versions)
        for row in rows:
            assert row["policy_spans"][0]["policy_version"] == versions[row["variant"]]


async def count_answers(
    clients: list[httpx.AsyncClient],
    body: dict[str, Any],
    headers: dict[str, str],
    each: int,
    per_minute: int,
    path: str = "/generate",
) -> list[int]:
    """The status codes of 20 requests to each in turn, of which 10 may be answered at once, each taking so much."""
    began = time.monotonic()
    codes = [(await clients[i % 2].post(path, json=body, headers=headers)).status_code for i in range(20)]
    earned = (time.monotonic() - began) * per_minute / 60 / each
    assert set(codes) == {200, 429}
    assert per_minute // each <= codes.count(200) <= per_minute // each + earned + 1
    return codes


async def test_keys_and_what_they_may_use_hold_over_both_together(
    two: LiveServer, clients: list[httpx.AsyncClient]
) -> None:
    """The last of this server's tests: from here on it needs keys."""
    path = two.home / "keys.json"
    _, secret = create_key(path, name="all", tenant="t", scopes=["generate", "feedback", "read", "admin"])
    _, slow_secret = create_key(path, name="slow", tenant="t", scopes=["generate"], requests_per_minute=10)
    _, short_secret = create_key(path, name="short", tenant="t", scopes=["generate"], tokens_per_minute=530)
    everything, slow, short = ({"Authorization": f"Bearer {one}"} for one in (secret, slow_secret, short_secret))
    body = {"prompt": "abc", "max_tokens": 4}

    async def until_refused(headers: dict[str, str] | None = None) -> list[httpx.Response]:
        """What each process answers once it has read the keys."""
        async with asyncio.timeout(120):
            while True:
                answers = [await client.post("/generate", json=body, headers=headers) for client in clients]
                if all(answer.status_code == 401 for answer in answers):
                    return answers
                await asyncio.sleep(0.1)

    await until_refused()
    for client in clients:
        assert (await client.get("/policy")).status_code == 401
        assert (await client.get("/policy", headers=everything)).status_code == 200
    codes = await count_answers(clients, body, slow, each=1, per_minute=10)
    # 3 of 53 tokens are the prompt's.
    whole = {"prompt": [5, 6, 7], "max_tokens": 50, "ignore_eos": True}
    await count_answers(clients, whole, short, each=53, per_minute=530, path="/v1/completions")
    set_scopes(path, "slow", ["feedback"])
    async with asyncio.timeout(120):  # neither process lets it generate any more
        for client in clients:
            while (answer := await client.post("/generate", json=body, headers=slow)).status_code != 403:
                assert answer.status_code in (200, 429)
                codes.append(answer.status_code)
                await asyncio.sleep(0.1)
    revoke_key(path, "short")
    assert ["revoked" in answer.text for answer in await until_refused(short)] == [True] * 2
    metrics = (await clients[FURTHER].get("/metrics", headers=everything)).text
    limited = re.findall(r"^millrace_rate_limited_total\{.*limit=\"requests\".*\} (\S+)", metrics, re.MULTILINE)
    assert [float(count) for count in limited] == [codes.count(429)]


@pytest.mark.parametrize("how", [pytest.param(signal.SIGKILL, marks=pytest.mark.long), signal.SIGSTOP])
async def test_one_that_dies_or_hangs_is_replaced_and_loses_nothing_and_the_bound_on_requests_holds_over_all(
    start: Callable[..., LiveServer], roomy: list[Path], tmp_path: Path, how: signal.Signals
) -> None:
    server = start(roomy, limits={"concurrent_requests": 4}, drain_timeout_s=120, api_process_timeout_s=5)
    _, further = await both_listen(server)
    acknowledged: list[str] = []
    async with AsyncExitStack() as stack, asyncio.timeout(300):
        # Two long streams at each, all that may be at work.
        spare = await clients_of(server, stack)
        streams = [
            (which, await begun(stack, client, f"long {which}", 2500))
            for _ in range(2)
            for which, client in enumerate(await clients_of(server, stack))
        ]
        for client in spare:
            refused = await client.post("/generate", json={"prompt": "a", "max_tokens": 2})
            assert (refused.status_code, refused.json()["detail"]) == (503, "4 requests are at work already")
        before = (await spare[FIRST].get("/metrics")).text
        assert "\nmillrace_engine_in_flight 4.0\n" in before
        assert refusals(before) == 2
        done = (await spare[FURTHER].get("/health")).status_code
        # However quick the machine, its streams are at work when it is found dead: the engine stands still until then.
        engine = server.engine()
        engine.suspend()
        try:
            further.send_signal(how)
            while "API process 1 ended with code -9" not in server.log.read_text():
                await asyncio.sleep(0.05)
        finally:
            engine.resume()
        for which, lines in streams:
            with suppress(httpx.HTTPError):
                text = "\n".join([line async for line in lines])
                if which == FIRST:
                    acknowledged.append(events(text)[-1]["id"].removeprefix("cmpl-"))
    assert done == 200
    assert len(acknowledged) == 2  # those of the other one were finished
    processes = await both_listen(server)
    assert not further.is_running()
    assert further not in processes
    assert ("API process 1 does not answer, and is killed" in server.log.read_text()) == (how == signal.SIGSTOP)
    assert "API process 1 ended with code -9; another one is started in its place" in server.log.read_text()
    assert "2 requests of API process 1 were ended in the engine" in server.log.read_text()
    async with AsyncExitStack() as stack:
        # As many as before, two of them at the new one, whose requests are the policy's that serves.
        spare = await clients_of(server, stack)
        again = [
            (which, await begun(stack, client, f"again {which}", 1500))
            for _ in range(2)
            for which, client in enumerate(await clients_of(server, stack))
        ]
        for client in spare:
            refused = await client.post("/generate", json={"prompt": "a", "max_tokens": 2})
            assert (refused.status_code, refused.json()["detail"]) == (503, "4 requests are at work already")
        assert refusals((await spare[FURTHER].get("/metrics")).text) == 4, "what the dead one counted stays"
        for _, lines in again:
            text = "\n".join([line async for line in lines])
            acknowledged.append(events(text)[-1]["id"].removeprefix("cmpl-"))
    below = psutil.Process(server.process.pid).children(recursive=True)
    assert stop_server(server) == 0, server.log.read_text()[-3000:]
    assert not left_of(below, 60)
    rows = server.rows("interactions")
    assert sorted(row["response_id"] for row in rows if row["status"] == "complete") == sorted(acknowledged)
    assert sorted(row["user"] for row in rows if row["status"] == "complete") == [
        *["again 0"] * 2,
        *["again 1"] * 2,
        *["long 0"] * 2,
    ]
    assert [row["status"] for row in rows if row["user"] == "long 1"] == ["aborted"] * 2
    assert {span["policy_version"] for row in rows for span in row["policy_spans"]} == {1}
    assert not [path for path in (tmp_path / "journal").iterdir() if path.suffix == ".open"]


async def test_when_the_engine_dies_requests_at_both_end_with_an_error_and_so_does_the_server(
    start: Callable[..., LiveServer], roomy: list[Path]
) -> None:
    server = start(roomy, drain_timeout_s=120)
    (engine,) = [one for one in psutil.Process(server.process.pid).children() if "engine" in one.name().lower()]
    async with AsyncExitStack() as stack:
        streams = [await begun(stack, client, "cut off", 4000) for client in await clients_of(server, stack)]
        engine.kill()
        texts = ["\n".join([line async for line in lines]) for lines in streams]
    assert ["the engine's process has died" in text for text in texts] == [True, True], [text[-500:] for text in texts]
    assert await asyncio.to_thread(server.process.wait, 60) != 0  # long before the drain would be over
    assert [(row["user"], row["status"]) for row in server.rows("interactions")] == [("cut off", "error")] * 2


async def test_a_stop_finishes_what_both_have_and_cuts_off_what_takes_longer_than_the_drain(
    start: Callable[..., LiveServer], roomy: list[Path]
) -> None:
    server = start(roomy, drain_timeout_s=5, limits={"max_tokens": 16384})
    async with AsyncExitStack() as stack:
        streams = [
            await begun(stack, client, user, tokens)
            for user, tokens in (("long", 16000), ("short", 200))
            for client in await clients_of(server, stack)
        ]
        os.kill(server.process.pid, signal.SIGTERM)
        texts = ["\n".join([line async for line in lines]) for lines in streams]
    assert await asyncio.to_thread(server.process.wait, 60) == 0, server.log.read_text()[-3000:]
    assert ["the server is stopping; the response was cut off" in text for text in texts] == [True, True, False, False]
    assert [text.rstrip().endswith("[DONE]") for text in texts[2:]] == [True, True]
    rows = server.rows("interactions")
    assert sorted((row["user"], row["status"]) for row in rows) == [
        *[("long", "aborted")] * 2,
        *[("short", "complete")] * 2,
    ]
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health", timeout=60)


@pytest.mark.long
async def test_where_nothing_may_be_forked_they_are_interpreters_and_all_end_with_the_first_one(
    start: Callable[..., LiveServer], model_folders: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As on a GPU. Here a thread keeps the server from forking."""
    thread = "import threading, time\nthreading.Thread(target=time.sleep, args=(9999,), daemon=True).start()\n"
    program = tmp_path / "with_a_thread.py"
    program.write_text(conftest.SERVER.read_text().replace("import json\n", f"import json\n{thread}", 1))
    monkeypatch.setattr(conftest, "SERVER", program)
    server = start(model_folders)
    processes = psutil.Process(server.process.pid).children(recursive=True)
    _, further = await both_listen(server)
    assert "spawn_main" in " ".join(further.cmdline())
    async with AsyncExitStack() as stack:
        for which, client in enumerate(await clients_of(server, stack)):
            await all_forms(client, f"forms {which}")
        lines = await begun(stack, (await clients_of(server, stack))[FURTHER], "killed", 100)
        server.process.kill()
        with pytest.raises(httpx.HTTPError):
            [line async for line in lines]
    server.process.wait(180)
    assert not left_of(processes, 60)
    again = start(model_folders)  # which recovers both journals
    assert stop_server(again) == 0
    rows = again.rows("interactions")
    assert sorted(row["status"] for row in rows if row["user"] == "killed") == ["aborted"]
    assert len([row for row in rows if row["status"] == "complete"]) == 14


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"fleet": {"replicas": 2}}, "fleet has 2 replicas"),
        ({"engine": {"extra": {"data_parallel_size": 2}}}, "engine.extra.data_parallel_size"),
        ({"replica_name": "r" * 58}, "at most 57 characters"),
        ({"api_processes": 65}, "less than or equal to 64"),
    ],
)
def test_what_can_t_be_together_is_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(named)):
        ServeConfig(**{"api_processes": 2} | settings)


@pytest.mark.long
async def test_one_whose_journal_has_failed_is_replaced_also_when_the_policy_of_the_start_has_been_removed(
    start: Callable[..., LiveServer], model_folders: list[Path]
) -> None:
    server = start(model_folders)
    _, further = await both_listen(server)
    await asyncio.to_thread(server.settle, server.promote(2))
    shutil.rmtree(server.store.get(1).path)
    async with AsyncExitStack() as stack:
        client = (await clients_of(server, stack))[FURTHER]
        body = {"prompt": "abc", "max_tokens": 4, "user": "before"}
        before = (await client.post("/generate", json=body)).json()["responses"][0]["response_id"]
        size = max(file.stat().st_size for file in (server.home / "journal").rglob("*") if file.is_file())
        further.rlimit(psutil.RLIMIT_FSIZE, (size, size))  # the disk takes no more of it
        codes = set()
        while further.is_running() and len(codes) < 10_000:
            with suppress(httpx.HTTPError):
                answer = await client.post("/generate", json={"prompt": PROMPT, "max_tokens": 48})
                codes.add(answer.status_code)
            await asyncio.sleep(0.05)
    assert codes <= {200, 503}
    processes = await both_listen(server)
    assert further not in processes
    assert re.search("API process 1 ended with code .*; another one is started in its place", server.log.read_text())
    async with AsyncExitStack() as stack:
        for client in await clients_of(server, stack):
            answer = await client.post("/generate", json={"prompt": "abc", "max_tokens": 4, "user": "after"})
            assert answer.status_code == 200, answer.text
            assert answer.json()["policy_version"] == 2
    assert stop_server(server) == 0, server.log.read_text()[-3000:]
    rows = server.rows("interactions", "\"user\" in ('before', 'after')")
    assert [row["response_id"] for row in rows if row["user"] == "before"] == [before]
    assert len(rows) == 3


@pytest.mark.long
async def test_one_that_takes_a_place_while_the_server_stops_holds_nobody_up(
    start: Callable[..., LiveServer], roomy: list[Path]
) -> None:
    server = start(roomy, drain_timeout_s=300)
    _, further = await both_listen(server)
    root = psutil.Process(server.process.pid)
    async with AsyncExitStack() as stack:
        # At work until the new one has attached itself, which takes longer than to start to stop.
        lines = await begun(stack, (await clients_of(server, stack))[FIRST], "last", 4000)
        further.kill()
        while "another one is started in its place" not in server.log.read_text():
            await asyncio.sleep(0.05)
        below = root.children(recursive=True)
        server.process.send_signal(signal.SIGTERM)
        text = "\n".join([line async for line in lines])
    ended = time.monotonic()
    assert await asyncio.to_thread(server.process.wait, 180) == 0, server.log.read_text()[-3000:]
    assert time.monotonic() - ended < 20
    assert not left_of(below, 60)
    (row,) = server.rows("interactions", "\"user\" = 'last'")
    assert (row["status"], row["response_id"]) == ("complete", events(text)[-1]["id"].removeprefix("cmpl-"))


@pytest.mark.long
async def test_an_engine_that_dies_while_the_server_stops_ends_the_requests_of_both_and_no_row_is_lost(
    start: Callable[..., LiveServer], roomy: list[Path]
) -> None:
    server = start(roomy, drain_timeout_s=300)
    await both_listen(server)
    below = psutil.Process(server.process.pid).children(recursive=True)
    engine = server.engine()
    async with AsyncExitStack() as stack:
        clients = await clients_of(server, stack)
        streams = [await begun(stack, client, "cut", 4000) for client in clients]
        body = {"prompt": PROMPT, "max_tokens": 4000, "ignore_eos": True, "user": "cut"}
        plain = await clients_of(server, stack)
        asked = [asyncio.create_task(client.post("/v1/completions", json=body)) for client in plain]
        await asyncio.sleep(1.0)  # they are at work
        server.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.5)
        engine.kill()
        began = time.monotonic()
        for lines in streams:
            with suppress(httpx.HTTPError):
                _ = [line async for line in lines]
        answers = await asyncio.gather(*asked, return_exceptions=True)
    await asyncio.to_thread(server.process.wait, 180)
    assert time.monotonic() - began < 60
    assert not left_of(below, 60)
    assert all(isinstance(one, httpx.HTTPError) or one.status_code >= 500 for one in answers), answers
    rows = server.rows("interactions", "\"user\" = 'cut'")
    assert len(rows) == 4
    assert {row["status"] for row in rows} == {"error"}
