"""Run by torchrun for test_weight_sync.py: ranks that train and generate one small model, and what must hold of them.

Arguments: the policy, the ranks of an engine, the ranks that share each layer in training. Prints one JSON object from
rank 0: name of each check -> None, or the traceback of the rank where it failed.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deploy.examples.bench.training import reshard_table as table
from deploy.examples.bench.training.reshard import ReceivedBytes, device_type, join_torchruns_ranks, least_received
from serve.policies.folder import fingerprint
from train.batch.packed import PackedBatch, Rollout
from train.config.sections import LoraConfig
from train.config.training import TrainConfig
from train.model.fsdp import build, token_log_probs
from train.model.mesh import make_meshes, mesh_sizes
from train.weight_sync.gather import gather
from train.weight_sync.slices import ReshardError
from train.weight_sync.sync import WeightSync
from train.workers.rollout import RolloutWorker

DTYPE = torch.bfloat16


class Ranks:
    """All ranks: a model in training, an engine, the plan between them."""

    def __init__(self, policy: Path, engine: int, training: int) -> None:
        count = torch.distributed.get_world_size()
        self.config = TrainConfig.model_validate(
            {
                "ranks": count,
                "dtype": "bfloat16",
                "fsdp": {"tensor_parallel": training},
                "rollout": {
                    "tensor_parallel_size": engine,
                    "max_model_len": 64,
                    "max_tokens": 8,
                    "max_num_seqs": 4,
                    "kv_cache_bytes": 2**22,
                },
            }
        )
        self.policy = policy
        self.meshes = make_meshes(device_type(), **mesh_sizes(self.config, count))
        self.model = build(policy, dtype=DTYPE, meshes=self.meshes, activation_checkpointing=True)
        peers: Any = {"actor": SimpleNamespace(model=self.model)}
        self.llm = RolloutWorker(policy=policy, config=self.config, seed=0, peers=peers).llm
        self.engine: nn.Module = self.llm.collective_rpc(lambda worker: worker.get_model())[0]
        self.weight_sync = WeightSync(self.model, self.llm, bucket_bytes=2**14)


def plan_gives_the_weights_that_vllms_own_loaders_give(ranks: Ranks) -> None:
    change(ranks.model, 1)
    gather(ranks.model, ranks.llm)
    expected = computed(ranks.engine)
    change(ranks.model, 2)
    gather(ranks.model, ranks.llm)
    assert any(not torch.equal(a, b) for a, b in zip(expected.values(), computed(ranks.engine).values(), strict=True))
    change(ranks.model, 1)
    with torch.no_grad():  # leaves what is outside the layers gathered, in the compute dtype
        token_log_probs(ranks.model, PackedBatch.pack([Rollout([5], [6], [0.0], 0.0, 0)]))
    checked = ranks.weight_sync.run(checked_tensors=10**9)
    assert set(checked) == set(ranks.weight_sync.held)
    for name, values in computed(ranks.engine).items():
        assert torch.equal(values, expected[name]), f"{name} differs by {(values - expected[name]).abs().max()}"


def what_is_received_is_what_the_plan_says(ranks: Ranks) -> None:
    with ReceivedBytes() as counter:
        ranks.weight_sync.run()
    assert counter.received == ranks.weight_sync.plan.received * DTYPE.itemsize
    assert len(ranks.weight_sync.plan.buckets) > 3, "the buckets must be small enough for several"
    assert ranks.weight_sync.plan.largest_exchange * DTYPE.itemsize <= 2**13


def what_is_gathered_is_in_generations_type(ranks: Ranks) -> None:
    with ReceivedBytes() as counter:
        gather(ranks.model, ranks.llm)
    count = ranks.config.ranks
    whole = sum(p.numel() for p in ranks.model.parameters()) * DTYPE.itemsize
    assert 0 < counter.received <= 1.05 * whole * (count - 1) / count


def what_moves_is_nearly_the_least(ranks: Ranks) -> None:
    plan, count = ranks.weight_sync.plan, ranks.config.ranks
    with ReceivedBytes() as counter:
        ranks.weight_sync.run()
    assert counter.received == plan.received * DTYPE.itemsize
    everything = sum(p.numel() for p in ranks.model.parameters())
    assert plan.received - least_received(ranks.weight_sync, count) <= 0.02 * everything


def loaders_ask_for_the_slices_that_the_table_is_computed_from(ranks: Ranks) -> None:
    c = ranks.llm.llm_engine.model_config.hf_config
    shapes = table.Decoder(
        "tiny",
        c.hidden_size,
        c.intermediate_size,
        c.num_hidden_layers,
        c.num_attention_heads,
        c.num_key_value_heads,
        c.hidden_size // c.num_attention_heads,
        c.vocab_size,
    )
    supposed, asked = table.slices(shapes, ranks.config.ranks, 2), ranks.weight_sync.needed
    placed = table.placed(shapes, ranks.config.ranks, 2)
    for rank in range(ranks.config.ranks):
        for name in placed:
            assert asked.by(rank, name) == supposed.by(rank, name), name
    assert all(placed[name] == ranks.weight_sync.held[name] for name in placed)


def an_adapter_arrives_merged(ranks: Ranks) -> None:
    model = build(ranks.policy, dtype=DTYPE, meshes=ranks.meshes, lora=LoraConfig(rank=4))
    change(model, 3)
    gather(model, ranks.llm)
    expected = computed(ranks.engine)
    ranks.weight_sync.run()
    WeightSync(model, ranks.llm).run(checked_tensors=10**9)
    for name, values in computed(ranks.engine).items():
        assert torch.equal(values, expected[name]), name


def weights_that_arrive_changed_are_found_and_named(ranks: Ranks) -> None:
    wrong = WeightSync(ranks.model, ranks.llm)
    name, write = "model.layers.1.self_attn.q_proj.weight", wrong._target.write
    wrong._target.write = lambda need, box, values: write(  # type: ignore[method-assign]
        need, box, values.flip(0) if need.tensor == name else values
    )
    with pytest.raises(ReshardError, match=f"rank . generates with other weights than are in training: {name}$"):
        wrong.run(checked_tensors=10**9)
    ranks.weight_sync.run(checked_tensors=10**9)


def a_loader_that_computes_is_refused_by_name(ranks: Ranks) -> None:
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    weight = get_layerwise_info(ranks.engine.get_submodule("model.norm")).restore_metadata[0]["weight"]
    weight.weight_loader = lambda parameter, loaded: parameter.data.copy_(loaded * 2)
    try:
        with pytest.raises(ReshardError, match=r"of model\.norm\.weight can't be traced at model\.norm\.weight"):
            WeightSync(ranks.model, ranks.llm)
    finally:
        del weight.weight_loader


def nothing_is_kept_of_copies_of_the_engines_layers(ranks: Ranks) -> None:
    """Neither of those that loaders are traced with, for each run, nor of standby weights, for each swap."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

    from serve.vllm.standby_weights import StandbyWeights

    WeightSync(ranks.model, ranks.llm)
    files = {path.name: {"sha256": "", "fingerprint": fingerprint(path)} for path in ranks.policy.glob("*.safetensors")}
    config = ranks.llm.llm_engine.vllm_config
    with set_current_vllm_config(config):
        standby = StandbyWeights(
            ranks.engine, config, ranks.policy, files, device=torch.device("cpu"), spare_bytes=0, after=None
        )
        while not standby.done:
            time.sleep(0.01)
    assert standby.error is None, standby.error
    assert len(LAYERWISE_INFO) > len(list(ranks.engine.modules()))
    standby.release().join(60)
    gc.collect()
    assert set(LAYERWISE_INFO) <= set(ranks.engine.modules())


CHECKS_OF_SLICES = [
    plan_gives_the_weights_that_vllms_own_loaders_give,
    what_moves_is_nearly_the_least,
    an_adapter_arrives_merged,
    weights_that_arrive_changed_are_found_and_named,
    nothing_is_kept_of_copies_of_the_engines_layers,
]
"""Of a model trained with tensor parallelism, or of one rank, which receives nothing."""

CHECKS = [
    plan_gives_the_weights_that_vllms_own_loaders_give,
    what_is_received_is_what_the_plan_says,
    what_is_gathered_is_in_generations_type,
    loaders_ask_for_the_slices_that_the_table_is_computed_from,
    an_adapter_arrives_merged,
    weights_that_arrive_changed_are_found_and_named,
    a_loader_that_computes_is_refused_by_name,
    nothing_is_kept_of_copies_of_the_engines_layers,
]


def change(model: nn.Module, seed: int) -> None:
    """Give every parameter new values, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed + torch.distributed.get_rank())
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local()  # type: ignore[attr-defined]
            local.copy_(torch.randn(local.shape, generator=generator))


def computed(engine: nn.Module) -> dict[str, Tensor]:
    """What every layer with weights makes of the unit vectors: its weights, in whatever form its kernels have them."""
    return dict(_computed(engine))


def _computed(engine: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, layer in engine.named_modules():
        method = getattr(layer, "quant_method", None)
        if method is not None and hasattr(layer, "cpu_linear"):
            sizes = (getattr(layer, name, None) for name in ("input_size_per_partition", "input_size", "embedding_dim"))
            width = next(size for size in sizes if size is not None)
            yield name, method.apply(layer, torch.eye(width, dtype=DTYPE), None).clone()
        for key, parameter in layer.named_parameters(recurse=False):
            if parameter.numel():
                yield f"{name}.{key}", parameter.detach().clone()


def main() -> None:
    torch.set_num_threads(1)
    join_torchruns_ranks()
    engine, training = map(int, sys.argv[2:])
    ranks = Ranks(Path(sys.argv[1]), engine, training)
    results: dict[str, str | None] = {}
    for check in CHECKS if training == 1 and engine > 1 else CHECKS_OF_SLICES:
        results[check.__name__] = everywhere(check, ranks)
    if torch.distributed.get_rank() == 0:
        print(json.dumps(results), flush=True)
    torch.distributed.barrier()


def everywhere(check: Callable[[Ranks], None], ranks: Ranks) -> str | None:
    """The first failure of any rank."""
    failure = None
    try:
        check(ranks)
    except Exception:  # noqa: BLE001 - reported by name, with the other rank's
        failure = f"rank {torch.distributed.get_rank()}:\n{traceback.format_exc()}"
    failures: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(failures, failure)
    return next((f for f in failures if f), None)


if __name__ == "__main__":
    main()
