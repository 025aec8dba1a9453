"""Two policies that take turns in an experiment, in a real server."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve.config import EngineConfig, SwapConfig
from serve.generation.interaction_rows import BLOCK
from serve.policies.experiments import Experiment, ExperimentRunning, Experiments, Phase
from serve.policies.store import PolicyError, PolicyStore
from serve.swap.swapper import Swapper
from serve.vllm.engine import Engine
from tests.serve.conftest import LiveServer, start_server, stop_server
from tests.serve.experiment_records import experiment_record

BLOCK_S = 0.5


def experiment_of(store: PolicyStore, number: int, **changed: Any) -> Experiment:
    pointer = store.serving()
    assert pointer is not None
    served = {"control": pointer.version, "generation": pointer.generation}
    return experiment_record(**(served | {"number": number, "seed": f"seed {number}", "block_s": BLOCK_S} | changed))


@pytest.fixture(scope="module")
def taking_turns(tmp_path_factory: pytest.TempPathFactory, model_folders: list[Path]) -> Iterator[LiveServer]:
    home = tmp_path_factory.mktemp("turns")
    store = PolicyStore(home / "policies")
    for folder in model_folders:
        store.publish(folder, parent=None, lineage={}, metrics={})
    store.promote(1, expected=None, who="test", why="first")
    live = start_server(home, store)
    yield live
    stop_server(live)


numbers = itertools.count(1)


@pytest.fixture
def begin(taking_turns: LiveServer) -> Iterator[Callable[..., Experiment]]:
    """Begin an experiment, which ends with the test; then policy 1 serves again."""
    experiments = Experiments(taking_turns.store.root)

    def start(**changed: Any) -> Experiment:
        made = experiment_of(taking_turns.store, next(numbers), **changed)
        experiments.begin(made)
        return made

    yield start
    if (current := experiments.current()) is not None:
        experiments.stop(current.number, who="test", why="the end")
        experiments.change(current.number, lambda one: Experiment(**{**vars(one), "state": "ended"}))
    pointer = taking_turns.store.serving()
    assert pointer is not None
    settled(taking_turns, pointer.version)
    if pointer.version != 1:
        taking_turns.settle(taking_turns.promote(1))


def settled(server: LiveServer, version: int) -> dict[str, Any]:
    """Wait until no turns are taken, and the policy serves."""
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        policy: dict[str, Any] = httpx.get(f"{server.url}/policy", timeout=60).json()
        if policy["experiment"] is None and policy["version"] == version:
            return policy
        time.sleep(0.02)
    raise TimeoutError(server.log.read_text()[-3000:])


async def ask_for(server: LiveServer, blocks: int, user: str) -> int:
    """Ask, four at a time, for as long as some blocks take; how many were answered."""
    end, answered = time.monotonic() + blocks * BLOCK_S, 0
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:

        async def one() -> None:
            nonlocal answered
            while time.monotonic() < end:
                body = {"prompt": "one and two", "max_tokens": 8, "user": user}
                answer = await client.post("/generate", json=body)
                assert answer.status_code == 200, answer.text
                answered += 1

        await asyncio.gather(*(one() for _ in range(4)))
    return answered


async def test_each_block_is_served_and_labelled_as_it_was_drawn(
    taking_turns: LiveServer, begin: Callable[..., Experiment]
) -> None:
    """The first phase is long, as a server that has not held the candidate before needs a while to its first turn."""
    experiment = begin(phases=(Phase(0, 0.5), Phase(40, 0.8)))
    answered = await ask_for(taking_turns, 48, "blocks")
    rows = taking_turns.rows("interactions", "\"user\" = 'blocks'")
    assert len(rows) == answered
    labelled = [row for row in rows if row["experiment"] is not None]
    assert labelled
    versions = {"candidate": 2, "control": 1}
    for row in labelled:
        metadata = dict(row["metadata"])
        turn = experiment.turn(int(metadata[BLOCK]))
        assert (row["experiment"], row["variant"], row["propensity"]) == (
            experiment.number,
            turn.variant,
            turn.propensity,
        )
        assert row["policy_spans"][0]["policy_version"] == versions[turn.variant]
        lag = row["created_at"].timestamp() - experiment.begins(turn.block)
        assert lag >= 0
    assert {row["variant"] for row in labelled} == {"candidate", "control"}
    assert {row["variant"] for row in rows if row["experiment"] is None} <= {None}
    assert {row["propensity"] for row in labelled} >= {0.5, 0.8}


async def test_a_stop_brings_back_what_the_pointer_names(
    taking_turns: LiveServer, begin: Callable[..., Experiment]
) -> None:
    experiment = begin(phases=(Phase(0, 1.0),))
    while httpx.get(f"{taking_turns.url}/policy", timeout=60).json()["version"] != 2:
        await asyncio.sleep(0.02)
    Experiments(taking_turns.store.root).stop(experiment.number, who="test", why="enough")
    policy = settled(taking_turns, 1)
    assert policy["failed"] is None
    assert [swap["ok"] for swap in policy["swaps"][-2:]] == [True, True]


async def test_a_moved_pointer_counts_more_than_an_experiment(
    taking_turns: LiveServer, begin: Callable[..., Experiment]
) -> None:
    begin(phases=(Phase(0, 1.0),))
    while httpx.get(f"{taking_turns.url}/policy", timeout=60).json()["version"] != 2:
        await asyncio.sleep(0.02)
    taking_turns.settle(taking_turns.promote(3))
    settled(taking_turns, 3)
    before = time.monotonic()
    while time.monotonic() < before + 3 * BLOCK_S:
        assert httpx.get(f"{taking_turns.url}/policy", timeout=60).json()["version"] == 3
        await asyncio.sleep(0.05)


async def test_a_committed_experiment_goes_on_under_the_candidates_pointer(
    taking_turns: LiveServer, begin: Callable[..., Experiment]
) -> None:
    experiment = begin()
    experiments = Experiments(taking_turns.store.root)
    pointer = taking_turns.promote(2)
    experiments.change(
        experiment.number,
        lambda one: Experiment(**{**vars(one), "state": "committed", "generation": pointer.generation}),
    )
    seen = set()
    deadline = time.monotonic() + 120 * BLOCK_S
    while len(seen) < 2 and time.monotonic() < deadline:
        seen.add(httpx.get(f"{taking_turns.url}/policy", timeout=60).json()["version"])
        await asyncio.sleep(0.05)
    assert seen == {1, 2}


async def test_a_policy_that_is_refused_ends_the_experiment_and_the_pointer_stays(
    taking_turns: LiveServer, begin: Callable[..., Experiment], model_folders: list[Path]
) -> None:
    store = taking_turns.store
    damaged = store.publish(model_folders[1], parent=None, lineage={}, metrics={})
    weights = damaged.weight_files[0]
    content = bytearray(weights.read_bytes())
    content[-1] ^= 0xFF
    weights.write_bytes(content)
    before = store.serving()
    experiment = begin(candidate=damaged.version, phases=(Phase(0, 1.0),))
    experiments = Experiments(store.root)
    deadline = time.monotonic() + 180
    while experiments.get(experiment.number).holds and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    ended = experiments.get(experiment.number)
    assert ended.end is not None
    assert (ended.state, ended.end["decision"]) == ("stopping", "failed")
    assert "sha256" in ended.end["why"]
    settled(taking_turns, 1)
    assert store.serving() == before
    shutil.rmtree(damaged.path)


def test_since_is_when_the_policy_whose_turn_it_is_began_to_serve(
    taking_turns: LiveServer, begin: Callable[..., Experiment]
) -> None:
    def policy() -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{taking_turns.url}/policy", timeout=60).json()
        return found

    before = policy()
    begin(phases=(Phase(0, 1.0),))
    deadline = time.monotonic() + 180
    while (found := policy())["version"] == 1 or not found["swaps"] or found["swaps"][-1]["to"] != 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert found["since"] == found["swaps"][-1]["at"] > before["since"]


def test_one_at_a_time_and_what_has_ended_stays_so(tmp_path: Path, model_folders: list[Path]) -> None:
    store = PolicyStore(tmp_path / "policies")
    store.publish(model_folders[0], parent=None, lineage={}, metrics={})
    store.promote(1, expected=None, who="test", why="first")
    experiments = Experiments(store.root)
    first, second = experiment_of(store, 1), experiment_of(store, 2)
    experiments.begin(first)
    experiments.begin(first)
    with pytest.raises(ExperimentRunning, match="experiment 1 on policy 2 has not ended"):
        experiments.begin(second)
    stopped = experiments.stop(1, who="ann", why="enough")
    assert experiments.stop(1, who="bob", why="again") == stopped
    with pytest.raises(ExperimentRunning):
        experiments.begin(second)
    ended = experiments.change(1, lambda one: Experiment(**{**vars(one), "state": "ended"}))
    assert experiments.change(1, lambda one: experiment_of(store, 1)) == ended
    experiments.begin(second)
    assert (experiments.numbers(), experiments.current()) == ([1, 2], second)


def test_a_blocks_policy_follows_from_the_record_alone() -> None:
    made = Experiment(1, 2, 1, "seed", 1000.0, 60.0, (Phase(0, 0.1), Phase(500, 0.5)), 1, "running", "test", "test", {})
    turns = [made.turn(block) for block in range(5000)]
    assert next(turn.propensity for turn in turns if turn.block < 500 and turn.variant == "candidate") == 0.1
    early = sum(turn.variant == "candidate" for turn in turns[:500]) / 500
    late = sum(turn.variant == "candidate" for turn in turns[500:]) / 4500
    assert abs(early - 0.1) < 0.05
    assert abs(late - 0.5) < 0.03
    assert (made.block_at(999.9), made.block_at(1000.0), made.block_at(1060.0)) == (-1, 0, 1)
    assert [turn.version for turn in turns[:3]] == [2 if turn.variant == "candidate" else 1 for turn in turns[:3]]


@pytest.mark.parametrize(
    "record",
    ["{broken", "null", "3", '"x"', "{}", "changed:block_s:0", "changed:started_at:null", "changed:phases:[]"],
)
def test_a_record_that_is_none_is_said_and_the_pointer_counts(
    tmp_path: Path, model_folders: list[Path], record: str
) -> None:
    store = PolicyStore(tmp_path / "policies")
    store.publish(model_folders[0], parent=None, lineage={}, metrics={})
    store.promote(1, expected=None, who="test", why="first")
    experiments = Experiments(store.root)
    experiments.begin(experiment_of(store, 1))
    path = experiments.folder / "000001.json"
    if record.startswith("changed:"):
        _, name, value = record.split(":")
        path.write_text(json.dumps(json.loads(path.read_text()) | {name: json.loads(value)}))
    else:
        path.write_text(record)
    with pytest.raises(PolicyError, match=r"000001\.json is no experiment .*servers follow the serving pointer"):
        experiments.current()
    swapper = Swapper(store, Engine(EngineConfig()), SwapConfig(), tmp_path / "swaps")  # it is not started
    assert swapper._desired().turn is None


def test_servers_take_an_experiment_for_over_when_its_time_is(tmp_path: Path, model_folders: list[Path]) -> None:
    store = PolicyStore(tmp_path / "policies")
    store.publish(model_folders[0], parent=None, lineage={}, metrics={})
    store.promote(1, expected=None, who="test", why="first")
    Experiments(store.root).begin(experiment_of(store, 1, expires_at=time.time() + 3600))
    swapper = Swapper(store, Engine(EngineConfig()), SwapConfig(), tmp_path / "swaps")  # it is not started
    assert swapper._desired().turn is not None
    Experiments(store.root).change(1, lambda one: Experiment(**{**vars(one), "expires_at": time.time() - 1}))
    assert swapper._desired().turn is None


def test_one_server_takes_no_part_in_an_experiment_that_needs_a_fleet_and_says_so_once(
    tmp_path: Path, model_folders: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    store = PolicyStore(tmp_path / "policies")
    store.publish(model_folders[0], parent=None, lineage={}, metrics={})
    store.promote(1, expected=None, who="test", why="first")
    Experiments(store.root).begin(experiment_of(store, 1, unit="user"))
    swapper = Swapper(store, Engine(EngineConfig()), SwapConfig(), tmp_path / "swaps")  # it is not started
    assert [swapper._desired().turn for _ in range(3)] == [None] * 3
    said = [record.message for record in caplog.records if "this is one server" in record.message]
    assert len(said) == 1


@pytest.mark.long
async def test_a_server_that_starts_while_an_experiment_runs_takes_turns_in_it(
    tmp_path: Path, model_folders: list[Path]
) -> None:
    store = PolicyStore(tmp_path / "policies")
    for folder in model_folders[:2]:
        store.publish(folder, parent=None, lineage={}, metrics={})
    store.promote(1, expected=None, who="test", why="first")
    experiment = experiment_of(store, 1)
    Experiments(store.root).begin(experiment)
    live = start_server(tmp_path, store)
    try:
        await ask_for(live, 40, "late")
        rows = [row for row in live.rows("interactions", "\"user\" = 'late'") if row["experiment"] is not None]
    finally:
        stop_server(live)
    assert {row["variant"] for row in rows} == {"candidate", "control"}
    for row in rows:
        turn = experiment.turn(int(dict(row["metadata"])[BLOCK]))
        assert (row["variant"], row["policy_spans"][0]["policy_version"]) == (turn.variant, turn.version)
