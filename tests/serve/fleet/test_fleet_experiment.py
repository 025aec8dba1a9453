"""An experiment in a fleet of two real replicas: who gets which policy, through a death, an end and a restart."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from serve.generation.interaction_rows import DRAW
from serve.policies.experiments import FALLBACK, Experiment, Experiments, Phase, unit_of
from serve.policies.store import PolicyStore
from tests.serve.conftest import LiveServer, start_server, stop_server
from tests.serve.experiment_records import experiment_record

pytestmark = pytest.mark.long

PATIENCE_S = 300
BLOCK_S = 2.0
USERS = 24


def start(home: Path, store: PolicyStore) -> LiveServer:
    live = start_server(
        home,
        store,
        fleet={"replicas": 2, "num_cpus": 0.5, "canary_seconds": 4, "health_check_period_s": 2},
        swap={"poll_seconds": 0.2},
    )
    deadline = time.monotonic() + PATIENCE_S
    while len(httpx.get(f"{live.url}/ready", timeout=60).json()["replicas"]) < 2:
        assert time.monotonic() < deadline, live.log.read_text()[-3000:]
        time.sleep(0.2)
    return live


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, model_folders: list[Path]) -> Iterator[LiveServer]:
    """Two replicas; policy 1 serves at first, 2 and 3 are there. A test that restarts it changes it in place."""
    home = tmp_path_factory.mktemp("fleet experiment")
    store = PolicyStore(home / "policies")
    for number, folder in enumerate(model_folders):
        store.publish(folder, parent=number or None, lineage={}, metrics={})
    store.promote(1, expected=None, who="test", why="first")
    live = start(home, store)
    yield live
    stop_server(live)


async def test_without_keys_a_fleet_answers_to_its_own_names_only_with_a_body_and_without(fleet: LiveServer) -> None:
    async with httpx.AsyncClient(base_url=fleet.url, timeout=60) as http:
        for host, code in (("evil.example", 421), ("localhost", 200)):
            assert (await http.get("/policy", headers={"Host": host})).status_code == code
        answer = await http.post("/generate", json={"prompt": "a"}, headers={"Host": "evil.example"})
        assert (answer.status_code, "serve.allowed_hosts" in answer.text) == (421, True)


def begin(fleet: LiveServer, **changed: Any) -> Experiment:
    pointer = fleet.store.serving()
    assert pointer is not None
    experiments = Experiments(fleet.store.root)
    number = len(experiments.numbers()) + 1
    served = {"control": pointer.version, "generation": pointer.generation}
    own = {"number": number, "seed": f"seed {number}", "block_s": BLOCK_S, "unit": "user"}
    made = experiment_record(**(served | own | changed))
    experiments.begin(made)
    return made


def end(fleet: LiveServer, experiment: Experiment) -> None:
    experiments = Experiments(fleet.store.root)
    experiments.stop(experiment.number, who="test", why="the end")
    experiments.change(experiment.number, lambda one: replace(one, state="ended"))


async def until(fleet: LiveServer, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Wait for ``GET /policy`` to say something."""
    deadline, policy = time.monotonic() + PATIENCE_S, dict[str, Any]()
    async with httpx.AsyncClient(base_url=fleet.url, timeout=60) as client:
        while time.monotonic() < deadline:
            answer = await client.get("/policy")
            if answer.status_code == 200 and condition(policy := answer.json()):
                return policy
            await asyncio.sleep(0.1)
    raise TimeoutError(f"the fleet never came there: {policy}\n{fleet.log.read_text()[-3000:]}")


def serving(*versions: int) -> Callable[[dict[str, Any]], bool]:
    """Whether the two replicas serve these, whichever which."""
    return lambda policy: (
        sorted(one["version"] for one in policy["replicas"].values() if one["state"] == "ready") == sorted(versions)
    )


def sharing(policy: dict[str, Any]) -> bool:
    """Whether each of the two policies of an experiment has its replica."""
    variants = {one["variant"] for one in policy["replicas"].values()}
    return serving(1, 2)(policy) and variants == {"candidate", "control"}


class Traffic:
    """What users' requests came to. One that is answered 503 is sent again, as it says."""

    def __init__(self, fleet: LiveServer, name: str) -> None:
        self.fleet, self.name = fleet, name
        self.statuses: list[int] = []

    async def ask(self, client: httpx.AsyncClient, number: int) -> None:
        body = {"prompt": "one and two", "max_tokens": 4, "user": f"{self.name} {number}"}
        if number % 3 == 0:  # the other API
            body |= {"model": "millrace"}
        path = "/v1/completions" if number % 3 == 0 else "/generate"
        answer = await client.post(path, json=body)
        self.statuses.append(answer.status_code)

    def rows(self) -> list[dict[str, Any]]:
        return self.fleet.rows("interactions", f"\"user\" LIKE '{self.name} %'")

    async def until_rows(self, condition: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
        """Wait until the rows are so."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition(rows := await asyncio.to_thread(self.rows)):
            assert time.monotonic() < deadline, self.fleet.log.read_text()[-3000:]
            await asyncio.sleep(0.5)
        return rows


@asynccontextmanager
async def traffic(fleet: LiveServer, name: str) -> AsyncIterator[Traffic]:
    """Requests of ``USERS`` users, four at a time, until the block ends."""
    found, stop = Traffic(fleet, name), asyncio.Event()
    async with httpx.AsyncClient(base_url=fleet.url, timeout=120) as client:

        async def keep_asking(first: int) -> None:
            number = first
            while not stop.is_set():
                await found.ask(client, number % USERS)
                number += 4
                await asyncio.sleep(0.01)

        askers = [asyncio.create_task(keep_asking(first)) for first in range(4)]
        try:
            yield found
        finally:
            stop.set()
            await asyncio.gather(*askers)


def labelled(rows: list[dict[str, Any]], variant: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["variant"] == variant]


def check_labels(rows: list[dict[str, Any]], experiment: Experiment) -> None:
    """Every label is what can be drawn again from the row and the record."""
    for row in rows:
        if row["experiment"] is None:
            assert (row["variant"], row["propensity"]) == (None, None)
            continue
        assert row["experiment"] == experiment.number
        unit = unit_of(row["tenant"], user=row["user"], session=row["session_id"], request=row["request_id"])
        drawn = experiment.assign(unit, row["created_at"].timestamp())
        assert dict(row["metadata"])[DRAW] == drawn.draw
        if row["variant"] == FALLBACK:
            assert row["propensity"] is None
            continue
        assert (row["variant"], row["propensity"]) == (drawn.variant, drawn.propensity)
        assert row["policy_spans"][0]["policy_version"] == drawn.version


def enough(rows: list[dict[str, Any]]) -> bool:
    return min(len({row["user"] for row in labelled(rows, variant)}) for variant in ("candidate", "control")) >= 4


async def test_a_user_stays_with_the_policy_that_was_drawn_and_nobody_is_lost_at_the_start_and_the_end(
    fleet: LiveServer,
) -> None:
    async with traffic(fleet, "stay") as asked:
        await asyncio.sleep(1)
        experiment = begin(fleet)
        policy = await until(fleet, sharing)
        assert policy["version"] == 1
        (candidate,) = policy["experiment"]["candidates"]
        assert [one["variant"] for one in policy["replicas"].values() if one["version"] == 2] == ["candidate"]
        await asked.until_rows(enough)
        end(fleet, experiment)
        policy = await until(fleet, lambda policy: serving(1, 1)(policy) and policy["experiment"] is None)
    assert set(asked.statuses) == {200}
    rows = asked.rows()
    assert len(rows) == len(asked.statuses)
    check_labels(rows, experiment)
    for number in range(USERS):
        variants = {row["variant"] for row in rows if row["user"] == f"stay {number}"}
        assert len(variants - {None, FALLBACK}) <= 1
    assert {row["replica"] for row in labelled(rows, "candidate")} == {candidate}


async def test_a_candidates_replica_that_dies_is_replaced_and_until_then_the_control_answers(
    fleet: LiveServer,
) -> None:
    async with traffic(fleet, "die") as asked:
        experiment = begin(fleet)
        policy = await until(fleet, sharing)
        (candidate,) = policy["experiment"]["candidates"]
        before = await asked.until_rows(enough)
        victim = replica_process(fleet, candidate)
        victim.kill()
        without = await asked.until_rows(
            lambda rows: any(
                row["created_at"] > max(one["created_at"] for one in before) for row in labelled(rows, FALLBACK)
            )
        )
        await until(fleet, lambda policy: sharing(policy) and not victim.is_running())
        last = max(row["created_at"] for row in without)
        await asked.until_rows(lambda rows: any(row["created_at"] > last for row in labelled(rows, "candidate")))
    assert set(asked.statuses) <= {200, 503}
    assert asked.statuses.count(200) > 10 * asked.statuses.count(503)  # those that were at work there, and few behind
    rows = asked.rows()
    check_labels(rows, experiment)
    end(fleet, experiment)
    await until(fleet, serving(1, 1))


def replica_process(fleet: LiveServer, name: str) -> psutil.Process:
    """The process that holds a replica's name."""
    lock = (fleet.home / "replicas" / f"{name}.lock").resolve()
    for process in psutil.Process(fleet.process.pid).children(recursive=True):
        if "ray::ServeReplica" in " ".join(process.cmdline()) and lock in held(process):
            return process
    raise AssertionError(f"no process holds {lock}")


def held(process: psutil.Process) -> set[Path]:
    return {link.resolve() for link in Path(f"/proc/{process.pid}/fd").iterdir() if link.exists()}


async def test_a_commit_needs_no_canary_and_a_watched_candidate_keeps_a_control_beside_it(fleet: LiveServer) -> None:
    experiments = Experiments(fleet.store.root)
    async with traffic(fleet, "commit") as asked:
        experiment = begin(fleet, number=10)
        await until(fleet, sharing)
        await asked.until_rows(enough)
        verdict = {"verdict": "pass", "experiment": experiment.number}
        pointer = fleet.store.promote(
            2, expected=fleet.store.serving(), who="experiment", why="better", verdict=verdict
        )
        following = experiment.block_at(time.time()) + 2
        watched = experiments.change(
            experiment.number,
            lambda one: replace(
                one,
                state="committed",
                generation=pointer.generation,
                phases=(*one.phases, Phase(following, 0.8)),
                watched_from=following,
            ),
        )
        policy = await until(fleet, lambda policy: policy["generation"] == pointer.generation and sharing(policy))
        assert (policy["version"], policy["phase"], policy["failed"]) == (2, "settled", None)
        rows = await asked.until_rows(lambda rows: any(row["propensity"] == 0.8 for row in rows))
        check_labels(rows, watched)
        back = fleet.store.promote(
            1,
            expected=pointer,
            who="experiment",
            why="harm",
            verdict={"rollback_from": 2, "experiment": experiment.number},
        )
        end(fleet, experiment)
        await until(fleet, lambda policy: policy["generation"] == back.generation and serving(1, 1)(policy))
    assert set(asked.statuses) == {200}
    assert "canary" not in {row["variant"] for row in asked.rows()}


async def test_a_candidate_that_is_refused_ends_the_experiment_and_nobody_is_lost(
    fleet: LiveServer, model_folders: list[Path]
) -> None:
    damaged = fleet.store.publish(model_folders[1], parent=None, lineage={}, metrics={})
    weights = damaged.weight_files[0]
    weights.write_bytes(weights.read_bytes()[:-4] + b"evil")
    experiments = Experiments(fleet.store.root)
    async with traffic(fleet, "refused") as asked:
        experiment = begin(fleet, number=15, candidate=damaged.version)
        deadline = time.monotonic() + PATIENCE_S
        while experiments.get(experiment.number).holds:
            assert time.monotonic() < deadline, fleet.log.read_text()[-3000:]
            await asyncio.sleep(0.1)
        ended = experiments.get(experiment.number)
        end(fleet, experiment)
        await until(fleet, lambda policy: serving(1, 1)(policy) and policy["experiment"] is None)
    assert ended.end is not None
    assert ended.end["decision"] == "failed"
    assert "sha256" in ended.end["why"]
    assert set(asked.statuses) == {200}
    assert {row["variant"] for row in asked.rows()} <= {None, FALLBACK}


async def test_a_fleet_that_starts_while_an_experiment_runs_takes_part_in_it(fleet: LiveServer) -> None:
    """It stops the fleet, and starts it again."""
    assert stop_server(fleet) == 0
    experiment = begin(fleet, number=20)
    again = start(fleet.home, fleet.store)
    fleet.process, fleet.url = again.process, again.url
    await until(fleet, sharing)
    async with traffic(fleet, "late") as asked:
        check_labels(await asked.until_rows(enough), experiment)
    assert set(asked.statuses) == {200}
    end(fleet, experiment)
    await until(fleet, serving(1, 1))


async def test_a_fleet_takes_turns_in_an_experiment_that_began_before_there_was_a_fleet(fleet: LiveServer) -> None:
    experiment = begin(fleet, number=30, unit="block")
    async with traffic(fleet, "turns") as asked:
        rows = await asked.until_rows(enough)
    end(fleet, experiment)
    assert set(asked.statuses) == {200}
    await until(fleet, serving(1, 1))
    for row in (row for row in rows if row["experiment"] is not None):
        turn = experiment.turn(int(dict(row["metadata"])["millrace:block"]))
        assert (row["variant"], row["propensity"]) == (turn.variant, turn.propensity)
        assert row["policy_spans"][0]["policy_version"] == turn.version
    assert len({row["replica"] for row in labelled(rows, "candidate")}) == 2
