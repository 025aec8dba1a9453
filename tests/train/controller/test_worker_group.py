"""Groups, pools and failures under a real Ray, one for the module."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import ray
import torch
from pydantic import ValidationError
from transformers import Qwen3Config, Qwen3ForCausalLM

from deploy.examples.demo.seed import make_tokenizer
from feedback.datasets import Prompt
from feedback.scoring.sources.rules import COLUMNS
from tests.paths import ROOT
from train.batch.packed import PackedBatch, Rollout
from train.config.training import TrainConfig
from train.controller.dispatch import Layout, by_rank, by_tokens, per_token
from train.controller.ray_pool import ResourcePool, explained
from train.controller.worker_group import WorkerError, WorkerGroup, results
from train.data.rewards import Reward
from train.data.samples import table_of
from train.rollouts.request import Request, requests_of
from train.rollouts.schedule import Schedule
from train.rollouts.stream import RolloutStream
from train.workers.role_groups import Groups, start_groups

HERE = ROOT / "tests" / "train"
SPLIT = {"pools": {"training": {}, "generation": {}}, "actor": "training", "reference": "training"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("controller")


@pytest.fixture(scope="module", autouse=True)
def cluster(folder: Path) -> Iterator[None]:
    ray.init(
        num_cpus=8,  # of the pools that the module keeps, and of those that tests make
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": f"{ROOT}:{HERE}:{folder}"}},
    )
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        ray.shutdown()


@pytest.fixture(scope="module")
def pool() -> Iterator[ResourcePool]:
    with started() as pool:
        yield pool


@pytest.fixture(scope="module")
def small(pool: ResourcePool, folder: Path) -> WorkerGroup:
    return pool.group("small", "small_workers:Small", folder=folder)


@pytest.fixture
def breakable(folder: Path) -> Iterator[WorkerGroup]:
    with started() as pool:
        yield pool.group("small", "small_workers:Small", folder=folder)


def started(ranks: int = 2) -> ResourcePool:
    return ResourcePool(ranks=ranks, threads=1, start_timeout_s=120, call_timeout_s=60)


def batch_of(lengths: list[int]) -> PackedBatch:
    return PackedBatch.pack([Rollout([3], [4 + i] * n, [0.0] * n, 0.0, i) for i, n in enumerate(lengths)])


# ---------------------------------------------------------------------------------------------------------- calls


def test_each_rule_reaches_the_ranks_it_names_and_joins_their_answers(small: WorkerGroup, folder: Path) -> None:
    where = small.where()
    assert [rank for rank, _ in where] == [0, 1]
    assert len({pid for _, pid in where}) == 2
    assert small.who("hello") == "hello from 0"
    assert small.doubled([1, 2, 3]) == [(2, 0), (4, 1), (6, 0)]
    batch = batch_of([5, 1, 2])
    torch.testing.assert_close(small.tokens(batch), batch.tokens.float())


def test_what_a_rank_on_a_cpu_frees_stays_with_it_for_its_next_tensors(small: WorkerGroup) -> None:
    numbers = 2**21
    assert all(0.9 < kept / (16 * 4 * numbers) < 1.3 for kept in small.kept(numbers))


def test_ranks_that_share_a_sequence_get_the_same_and_answer_once() -> None:
    layout = Layout(4, parts=(0, 0, 1, 1))
    batch = batch_of([5, 1, 2, 4])
    for rule in (by_tokens, per_token):
        parts, join = rule(layout, batch)
        assert [len(p) for p in parts] == [2] * 4
        assert torch.equal(parts[0].tokens, parts[1].tokens)
        assert torch.equal(parts[2].tokens, parts[3].tokens)
    assert torch.equal(join([p.tokens for p in parts]), batch.tokens)
    dealt, join = by_rank(layout, [1, 2, 3])
    assert dealt == [[1, 3], [1, 3], [2], [2]]
    assert join(dealt) == [1, 2, 3]


def test_calls_of_two_threads_reach_all_ranks_in_one_order(small: WorkerGroup) -> None:
    """Else ranks that share an engine would be in two calls at once."""

    def work(name: str) -> None:
        for pending in [small.note.start(f"{name}{number}") for number in range(300)]:
            pending.result()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    first, second = small.all_noted()
    assert len(first) == 600
    assert first == second


def test_calls_to_two_pools_overlap(small: WorkerGroup, folder: Path) -> None:
    with started(ranks=1) as other:
        second = other.group("small", "small_workers:Small", folder=folder)
        pending = small.wait_for.start("written")  # ends only once the other pool has done its call
        assert not pending.advance(0.0)
        second.write("written")
        assert pending.result(timeout_s=120) is None
        assert results(small.where.start(), second.who.start("x"))[1] == "x from 0"


def test_an_answer_that_is_late_is_an_error_with_the_ranks_and_can_still_be_had(
    small: WorkerGroup, folder: Path
) -> None:
    pending = small.wait_for.start("late")
    with pytest.raises(WorkerError, match=r"small\.wait_for: ranks \[0, 1\] did not answer within 0\.2 s"):
        pending.result(timeout_s=0.2)
    (folder / "late").touch()
    pending.result()


def test_a_rank_of_a_pool_without_gpus_sees_none_and_counts_its_device_by_its_rank(
    small: WorkerGroup,
) -> None:
    """Ray hides nothing from an actor that asks for no GPU: all of them would compute on the first."""
    assert small.environment("CUDA_VISIBLE_DEVICES") == ["", ""]
    assert small.environment("LOCAL_RANK") == ["0", "1"]


# ------------------------------------------------------------------------------------------------------- failures


def test_an_exception_on_one_rank_is_raised_at_once_while_the_others_wait_in_a_collective(
    breakable: WorkerGroup,
) -> None:
    start = time.monotonic()
    with pytest.raises(
        WorkerError, match=r"sum_or_fail failed on rank 1: [\s\S]*ArithmeticError: this rank is broken"
    ) as failure:
        breakable.sum_or_fail(1)
    assert failure.value.exit_code == 1
    assert time.monotonic() - start < 20, "the collective's time-out is 60 s"
    with pytest.raises(WorkerError, match="an earlier call failed, and its ranks are out of step"):
        breakable.where()


def test_a_rank_that_is_killed_in_a_call_is_named_although_the_others_fail_for_want_of_it(
    breakable: WorkerGroup, folder: Path
) -> None:
    marker = folder / "hanging"
    marker.unlink(missing_ok=True)
    pending = breakable.sum_or_hang.start(1)
    deadline = time.monotonic() + 300
    while not (marker.exists() and marker.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.3)  # rank 0 is in its collective
    start = time.monotonic()
    os.kill(int(marker.read_text()), signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"sum_or_hang failed on rank 1: [\s\S]*died") as failure:
        pending.result()
    assert time.monotonic() - start < 25, "the collective's time-out is 60 s"
    assert not failure.value.consequence
    assert failure.value.exit_code == 128 + signal.SIGKILL, "a cycle goes on with what a signal ended"


def test_a_pool_that_has_no_room_says_what_was_asked_and_what_there_is() -> None:
    with pytest.raises(WorkerError, match=r"pool big: no room within 1 s for 64 ranks of {'CPU': 1}.*'CPU': 8.0"):
        ResourcePool(ranks=64, threads=1, name="big", start_timeout_s=1)
    with started(ranks=1):
        pass  # what could not be placed is not waited for by what comes next


# ------------------------------------------------------------------------------------------------------ placement


def test_a_placement_that_can_not_be_is_refused_with_its_setting() -> None:
    for placement, message in (
        ({"actor": "b"}, "train.placement.actor=b is not a pool"),
        ({"pools": {"all": {}, "b": {}}}, "pools has b, and no role is on it"),
        ({**SPLIT, "pools": {"training": {}, "generation": {"ranks": 3}}}, "rollout=all is not a pool"),
        (
            {**SPLIT, "pools": {"training": {}, "generation": {"ranks": 3}}, "rollout": "generation"},
            "tensor_parallel_size=2 does not divide train.placement.pools.generation.ranks=3",
        ),
    ):
        with pytest.raises(ValidationError, match=re.escape(message)):
            TrainConfig.model_validate({"ranks": 2, "placement": placement, "rollout": {"tensor_parallel_size": 2}})
    with pytest.raises(ValidationError, match=r"staleness\n.*greater than or equal to 0"):
        TrainConfig.model_validate({"rollout": {"staleness": -1}})
    with pytest.raises(ValidationError, match=r"train\.launcher=torchrun has one pool"):
        TrainConfig.model_validate({"launcher": "torchrun", "placement": {**SPLIT, "rollout": "generation"}})


@pytest.fixture(scope="module", params=[None, {"rank": 8, "sync": "adapters"}], ids=["whole weights", "adapters"])
def split(request: pytest.FixtureRequest, folder: Path) -> Iterator[tuple[Groups, TrainConfig]]:
    """One rank that trains, one that generates, one that rewards."""
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    policy = folder / "policy"
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    model = Qwen3Config(vocab_size=len(tokenizer), tie_word_embeddings=True, **shape, **special, **heads)
    Qwen3ForCausalLM(model).save_pretrained(policy)
    tokenizer.save_pretrained(policy)
    (folder / "short.py").write_text("def reward(rows): return [-float(len(r)) for r in rows['response'].to_pylist()]")
    pools: dict[str, dict[str, int]] = {"training": {}, "generation": {}, "rewards": {}}
    config = TrainConfig.model_validate(
        {
            "ranks": 1,
            "placement": {**SPLIT, "pools": pools, "rollout": "generation", "reward": "rewards"},
            "dtype": "float32",
            "lora": request.param,
            "micro_batch_tokens": 64,
            "optimizer": {"learning_rate": 3e-2, "warmup_steps": 0},
            "rollout": {"max_tokens": 6, "max_model_len": 32, "kv_cache_bytes": 16 * 2**20, "staleness": 1},
            "start_timeout_s": 200,
            "step_timeout_s": 100,
        }
    )
    with start_groups(config, policy, seed=1, reward=Reward("short:reward", 100)) as groups:
        yield groups, config


PROMPTS = [[5 + i, 6, 7] for i in range(8)]


def learn(groups: Groups) -> None:
    """Move the weights, whatever to."""
    batch = PackedBatch.pack([Rollout([5, 6, 7], [8 + i, 9], [0.0] * 2, float(i), 0) for i in range(2)])
    now = groups.actor.log_probs(batch)
    groups.actor.update(batch.with_(old_log_probs=now, ref_log_probs=now, advantages=batch.per_token(batch.rewards)))


def test_each_token_is_labelled_with_the_weights_that_sampled_it_and_nothing_under_way_is_lost(
    split: tuple[Groups, TrainConfig],
) -> None:
    groups, _ = split
    rollout = groups.rollout
    assert rollout is not None
    groups.reshard(3)
    old = rollout.generate(PROMPTS, n=1, seed=1)
    requests = requests_of("first", PROMPTS, range(8), n=1, greedy=False, seed=1, episodes=False)
    [early] = rollout.advance([requests], steps=2)
    learn(groups)
    groups.reshard(4)
    asked = rollout.generate(PROMPTS[:2], n=0, greedy=True)
    [late] = rollout.advance([[]], steps=8)
    found = dict(early) | dict(late)
    assert [*found] == [*dict.fromkeys(found)]
    assert sorted(found) == sorted(request.key for request in requests)
    assert [len(of) for of in asked] == [1, 1]
    assert {version for of in asked for sample in of for _, version in sample.policies} == {4}
    moved = []
    for request, [before] in zip(requests, old, strict=True):
        sample, length = found[request.key], len(before.token_ids)
        assert before.policies == [(0, 3)]
        assert sample.policies == ([(0, 3), (2, 4)] if len(sample.token_ids) > 2 else [(0, 3)])
        assert sample.token_ids[:2] == before.token_ids[:2]
        torch.testing.assert_close(sample.log_probs[:2], before.log_probs[:2], atol=1e-5, rtol=0)
        if min(length, len(sample.token_ids)) > 2:
            moved.append((sample.token_ids[2], sample.log_probs[2]) != (before.token_ids[2], before.log_probs[2]))
    assert moved
    assert all(moved), "the third token is of other weights"


def test_apart_from_training_generation_has_its_weights_and_the_documented_dataflow_learns(
    split: tuple[Groups, TrainConfig],
) -> None:
    groups, _ = split
    blocks = python_blocks("best_of_n")
    dataflow: dict[str, Any] = {}
    exec(blocks[0], dataflow)
    lengths = dataflow["best_of_n"](groups, [[5, 6, 7], [8, 9, 10]], steps=4)
    assert lengths[-1] < lengths[0], lengths
    samples = groups.rollout.generate([[5, 6, 7], [8, 9, 10]], n=2)
    batch = dataflow["packed"]([[5, 6, 7], [8, 9, 10]], samples, [[0.0] * 2] * 2)
    torch.testing.assert_close(groups.actor.log_probs(batch), batch.behaviour_log_probs, atol=1e-4, rtol=0)
    difference = (groups.reference.log_probs(batch) - batch.behaviour_log_probs).abs().max()
    assert float(difference) > 1e-2, "what generates must no longer be what training started from"


def test_a_pool_of_its_own_rewards_responses(split: tuple[Groups, TrainConfig]) -> None:
    reward = split[0].reward
    assert reward is not None
    nothing = pa.nulls(3)
    rows = dict.fromkeys(COLUMNS, nothing) | {"response": ["ab", "c", "def"]}
    assert reward(pa.table(rows)).values == [-2.0, -1.0, -3.0]


def test_groups_are_sampled_while_training_learns_and_rewarded_by_their_pool(
    split: tuple[Groups, TrainConfig],
) -> None:
    groups, config = split
    rollout, reward = groups.rollout, groups.reward
    assert rollout is not None
    assert reward is not None

    def requests(number: int, prompt: Prompt) -> list[Request]:
        how: dict[str, Any] = {"n": 3, "greedy": False, "seed": 2, "episodes": False}
        return requests_of("group", [prompt.prompt_token_ids], [number], **how)

    groups.reshard(0)
    stream = RolloutStream(
        Schedule(per_step=2, staleness=config.rollout.staleness, steps=4),
        engines=1,
        size=3,
        prompt_of=lambda number: Prompt(None, None, PROMPTS[number]),
        requests_of=requests,
        advance=rollout.advance,
        reward=lambda rows: reward(table_of(rows)),
        beside=True,
        timeout_s=100,
    )
    taken = []
    try:
        for step in range(4):
            taken += [(step, group) for group in stream.take(step)]
            learn(groups)
            with stream.updating(step + 1):
                groups.reshard(step + 1)
    finally:
        stream.close()
    assert sorted(group.number for _, group in taken) == list(range(8))
    ages = [step - version for step, group in taken for sample in group.sampled for _, version in sample.policies]
    assert 0 <= min(ages) <= max(ages) <= 1
    for _, group in taken:
        assert [row.values for row in group.rewarded] == [[-float(len(sample.text))] for sample in group.sampled]


def test_a_receiver_that_dies_fails_the_transfer_and_not_the_sender_alone(split: tuple[Groups, TrainConfig]) -> None:
    """The last test of ``split``: its pools are of no use afterwards."""
    groups, _ = split
    host = groups.rollout._pool.hosts[0]  # type: ignore[attr-defined]
    start = time.monotonic()
    sending = groups.actor.send_weights.start(groups.rendezvous)
    timer = threading.Timer(0.5, ray.kill, (host,))
    timer.start()
    timer.join()
    receiving = groups.rollout.receive_weights.start(groups.rendezvous)
    with pytest.raises(WorkerError, match=r"rollout\.receive_weights failed on rank 0: [\s\S]*died"):
        results(sending, receiving)
    assert time.monotonic() - start < 40, "the transfer's time-out is 100 s"


# ----------------------------------------------------------------------------------------------------------- docs


def python_blocks(containing: str) -> list[str]:
    text = (ROOT / "train" / "README.md").read_text()
    blocks = [b for b in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if containing in b]
    assert blocks, f"train/README.md shows no {containing}"
    assert all(block.count("\n") < 30 for block in blocks), "they are to be short"
    return blocks


def test_the_documented_worker_runs_under_a_dataflow_that_does_not_know_it(folder: Path) -> None:
    worker, run = python_blocks("Bigram")
    (folder / "bigram.py").write_text(worker)
    namespace: dict[str, Any] = {"batch": batch_of([9, 9, 3, 4])}
    exec(run, namespace)
    losses = namespace["losses"]
    assert losses[-1] < losses[0] / 2, losses


def test_a_lack_of_memory_is_told_in_one_line_with_what_helps() -> None:
    killed = ray.exceptions.OutOfMemoryError(
        "1 worker(s) were killed due to the node running low on memory. Memory on the node was 22.43GB used\n"
        "Object store memory usage: [- objects spillable: 0\n- bytes spillable: 0"
    )
    message = explained(killed)
    assert message.startswith("1 worker(s) were killed due to the node running low on memory.")
    assert "\n" not in message
    assert "out of memory. Train adapters (train.lora)" in message
    assert explained(ray.exceptions.RayError("first\nsecond")) == "first\nsecond"
