"""What ranks send each other in an update is what a plan says, collective by collective."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.train.collectives import Collectives
from tests.train.ranks import run_ranks
from tests.train.tiny_models import own_part
from train.batch.packed import PackedBatch, Rollout
from train.config.training import TrainConfig
from train.model.mesh import mesh_sizes
from train.planner.memory import MASTER, Sharding
from train.planner.model_shape import read_config, shape_of
from train.planner.sizes import ModelShape, Share
from train.planner.step_time import exchanged_bytes, gathered_bytes, passed_bytes
from train.workers.actor import ActorWorker

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "two share the layers": (2, {"fsdp": {"tensor_parallel": 2}}),
    "two share the layers, computed again": (2, {"fsdp": {"tensor_parallel": 2}, "activation_checkpointing": True}),
    "four, two to a layer": (4, {"fsdp": {"tensor_parallel": 2}}),
    "four, two to a layer, in parts": (4, {"fsdp": {"tensor_parallel": 2}, "micro_batch_tokens": 130}),
    "two share the sequences": (2, {"fsdp": {"sequence_parallel": 2}}),
    "four share the sequences": (4, {"fsdp": {"sequence_parallel": 4}, "activation_checkpointing": True}),
    "four, two to a sequence and a layer": (4, {"fsdp": {"sequence_parallel": 2, "tensor_parallel": 2}}),
    "four, two copies": (4, {"fsdp": {"replicas": 2, "reduce_every_micro_batch": True}, "micro_batch_tokens": 65}),
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    torch.manual_seed(3)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def found(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """By case, of each rank."""
    by_case: dict[str, list[dict[str, Any]]] = {}
    for ranks in (2, 4):
        cases = {name: settings for name, (count, settings) in CASES.items() if count == ranks}
        for of_rank in run_ranks(ranks, in_a_rank, tmp_path_factory.mktemp("ranks"), policy, cases):
            for name, counted in of_rank.items():
                by_case.setdefault(name, []).append(counted)
    return by_case


def in_a_rank(rank: int, folder: Path, policy: Path, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {name: an_update(policy, settings) for name, settings in cases.items()}


def an_update(policy: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The second update of a run; the first makes what an optimizer keeps."""
    config = config_of(torch.distributed.get_world_size(), settings)
    actor = ActorWorker(policy=policy, config=config, peers={})
    batch = a_batch()
    part = batch.select(own_part(batch, **mesh_sizes(config, actor.world_size)))
    actor.update(part)
    actor.usage()
    with Collectives() as counted:
        actor.update(part)
    usage = actor.usage()
    return {"sent": counted.sent, "computed": Share(usage.rows, usage.scored, usage.pairs)}


def config_of(ranks: int, settings: dict[str, Any]) -> TrainConfig:
    return TrainConfig.model_validate({"ranks": ranks, "dtype": "float32", "micro_batch_tokens": 4096, **settings})


def a_batch() -> PackedBatch:
    """Of as many tokens for each of two, or four, ranks."""
    generator = torch.Generator().manual_seed(4)

    def some(count: int) -> list[int]:
        return torch.randint(1, 120, (count,), generator=generator).tolist()

    batch = PackedBatch.pack([Rollout(some(9), some(56), [-3.0] * 56, float(i % 3), i) for i in range(8)])
    old = batch.behaviour_log_probs
    return batch.with_(old_log_probs=old, ref_log_probs=old, advantages=torch.ones(len(batch.tokens)))


def planned(case: str, shape: ModelShape, computed: Share, micro_batches: int) -> Counter[tuple[str, int]]:
    """What a plan says that a rank sends in an update, by collective and ranks in it."""
    ranks, settings = CASES[case]
    config = config_of(ranks, settings)
    fsdp = config.fsdp
    how = Sharding(
        shards=ranks // fsdp.replicas // fsdp.tensor_parallel,
        itemsize=4,
        frozen_itemsize=4,
        checkpointing=bool(config.activation_checkpointing),
        slices=fsdp.tensor_parallel,
        copies=fsdp.replicas,
        sharers=fsdp.sequence_parallel,
    )
    own = shape.slice_of(how.slices)
    share = Share(computed.rows // how.sharers, computed.scored // how.sharers, computed.pairs / how.sharers)
    reductions = micro_batches if fsdp.reduce_every_micro_batch else 1
    slice_bytes = MASTER * own.trained // how.shards
    sent = Counter(
        {
            ("reducescatter", how.shards): reductions * slice_bytes * (how.shards - 1),
            ("alltoall", how.sharers): exchanged_bytes(own, how, share, learns=True),
        }
    )
    sent["allgather", how.shards] += micro_batches * gathered_bytes(own, how)
    sent["allgather", how.shards] += micro_batches * gathered_bytes(own, how, root=False)
    sent["allreduce", how.slices] += passed_bytes(own, how, share, learns=True)
    sent["allreduce", how.copies] += reductions * 2 * slice_bytes * (how.copies - 1) // how.copies
    return +sent


@pytest.mark.parametrize("case", CASES)
def test_what_a_rank_sends_in_an_update_is_what_a_plan_says(
    policy: Path, found: dict[str, list[dict[str, Any]]], case: str
) -> None:
    shape = shape_of(read_config(policy))
    micro_batches = 2 if CASES[case][1].get("micro_batch_tokens") else 1
    for rank in found[case]:
        expected = planned(case, shape, rank["computed"], micro_batches)
        assert {kind: rank["sent"][kind] for kind in expected} == pytest.approx(dict(expected), rel=0.03)
        assert sum(rank["sent"].values()) == pytest.approx(sum(expected.values()), rel=0.05)


def test_what_nobody_shares_is_not_sent(policy: Path) -> None:
    shape, how = shape_of(read_config(policy)), Sharding(2, 4, 4)
    share = Share(100, 50, 2500.0)
    assert passed_bytes(shape, how, share, learns=True) == exchanged_bytes(shape, how, share, learns=True) == 0
    assert exchanged_bytes(shape, replace(how, sharers=2), share, learns=False) > 0
