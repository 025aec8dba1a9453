"""Run by torchrun for test_adapter_sync.py: ranks that train adapters, and an engine that generates beside them.

Arguments: the policy, the ranks of an engine, the ranks that share each layer in training, the type that both compute
in. Prints one JSON object from rank 0: name of each check -> None, or the traceback of the rank where it failed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deploy.examples.bench.training.reshard import ReceivedBytes, device_type, join_torchruns_ranks
from serve.vllm.adapters.slots import AdapterRefused
from tests.train.reshard_ranks import everywhere
from train.batch.packed import PackedBatch, Rollout, Sample
from train.config.training import TrainConfig
from train.model.fsdp import build, token_log_probs
from train.model.hf_io import held
from train.model.mesh import make_meshes, mesh_sizes
from train.rollouts.request import requests_of
from train.rollouts.responses import Responses, until_ended
from train.weight_sync.adapters import load_adapters, sync_adapters, whole_adapters
from train.weight_sync.gather import gather
from train.workers.rollout import RolloutWorker, load_files

RANK = 6
PROMPTS = [[5, 9, 3], [7] * 11, [4, 8], [3, 3, 3, 6, 2]]


class Ranks:
    """A model with adapters in training, and an engine that has the parent's weights."""

    def __init__(self, policy: Path, engine: int, training: int, dtype: str) -> None:
        count = torch.distributed.get_world_size()
        self.config = TrainConfig.model_validate(
            {
                "ranks": count,
                "dtype": dtype,
                "fsdp": {"tensor_parallel": training},
                "lora": {"rank": RANK, "alpha": 9, "sync": "adapters"},
                "rollout": {
                    "tensor_parallel_size": engine,
                    "max_model_len": 64,
                    "max_tokens": 12,
                    "max_num_seqs": 8,
                    "kv_cache_bytes": 2**22,
                },
            }
        )
        self.policy, self.dtype = policy, getattr(torch, dtype)
        meshes = make_meshes(device_type(), **mesh_sizes(self.config, count))
        self.model = build(policy, dtype=self.dtype, meshes=meshes, lora=self.config.lora)
        self.worker = RolloutWorker(
            policy=policy, config=self.config, seed=0, peers={"actor": SimpleNamespace(model=self.model)}
        )
        self.llm = self.worker.llm
        params: Any = self.worker.sampling._params  # type: ignore[attr-defined]
        self.without = Responses(self.llm.llm_engine, params, self.worker._sample, self.worker._salt)

    def sampled(self, *, adapter: bool) -> list[Sample]:
        """A greedy response and two drawn ones to each prompt, by the engine with its adapter or by its weights."""
        return until_ended(self.worker.sampling if adapter else self.without, requests("call"), {})

    def change(self, seed: int) -> None:
        """Other values of the adapters, of a size that changes what is said, and not so large that all is certain."""
        generator = torch.Generator().manual_seed(seed)  # the same on all ranks, as some have replicas
        for parameter in self.adapters():
            local = parameter.to_local()
            local.copy_(0.1 * torch.randn(local.shape, generator=generator))

    def adapters(self, side: str = "") -> list[Any]:
        return [parameter.detach() for name, parameter in held(self.model) if f".lora_{side}" in name]

    def trained(self, samples: list[Sample]) -> list[torch.Tensor]:
        """Training's logprobs of the samples' tokens."""
        prompts = [prompt for prompt in PROMPTS for _ in range(2)] + PROMPTS
        found = []
        for prompt, sample in zip(prompts, samples, strict=True):
            batch = PackedBatch.pack([Rollout(prompt, sample.token_ids, sample.log_probs, 0.0, 0)])
            with torch.no_grad():
                found.append(token_log_probs(self.model, batch)[0][batch.response_mask])
        return found


def require_alike(one: list[Sample], other: list[Sample], atol: float) -> None:
    assert [s.token_ids for s in one] == [s.token_ids for s in other]
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(torch.tensor(a.log_probs), torch.tensor(b.log_probs), atol=atol, rtol=0)


def before_a_first_sync_the_parent_generates(ranks: Ranks) -> None:
    require_alike(ranks.sampled(adapter=True), ranks.sampled(adapter=False), atol=1e-5)


def after_each_step_the_engine_says_what_merged_weights_say(ranks: Ranks) -> None:
    parents, seen = ranks.sampled(adapter=False), []
    for seed in (1, 2, 3):
        ranks.change(seed)
        ranks.worker.load_actor_weights(seed)
        found = ranks.sampled(adapter=True)
        assert {version for s in found for _, version in s.policies} == {seed}
        for log_probs, sample in zip(ranks.trained(found), found, strict=True):
            torch.testing.assert_close(log_probs, torch.tensor(sample.log_probs), atol=1e-4, rtol=0)
        gather(ranks.model, ranks.llm)
        require_alike(found, ranks.sampled(adapter=False), atol=1e-4)
        load_files(ranks.llm, ranks.policy)
        require_alike(parents, ranks.sampled(adapter=False), atol=0)
        seen.append([s.token_ids for s in found])
    assert all(tokens != [s.token_ids for s in parents] for tokens in seen)
    assert seen[0] != seen[1] != seen[2]


def what_has_no_adapter_is_answered_by_the_weights_alone_beside_what_has_one(ranks: Ranks) -> None:
    load_files(ranks.llm, ranks.policy)
    alone = ranks.sampled(adapter=False)
    ranks.change(4)
    sync_adapters(ranks.model, ranks.llm)
    adapted = ranks.sampled(adapter=True)
    one, other = ({r.key: r for r in of} for of in (requests("with"), requests("without")))
    for beginning in zip(one.values(), other.values(), strict=True):
        ranks.worker.sampling.start(beginning[0])
        ranks.without.start(beginning[1])
    found: dict[str, Sample] = {}
    everyone = {r.key: r for r in (*one.values(), *other.values())}
    while len(found) < len(everyone):
        for output in ranks.llm.llm_engine.step():
            if output.finished:
                request = everyone[output.request_id]
                found[request.key] = ranks.worker._sample(output.outputs[0], request.prompt)
    ranks.worker.sampling._under_way.clear()  # type: ignore[attr-defined]
    ranks.without._under_way.clear()
    require_alike([found[key] for key in one], adapted, atol=1e-4)
    require_alike([found[key] for key in other], alone, atol=1e-4)


def requests(name: str) -> list[Any]:
    return requests_of(name, PROMPTS, [0, 1, 2, 3], n=2, greedy=True, seed=3, episodes=False)


def adapters_alone_move(ranks: Ranks) -> None:
    numbers = sum(parameter.numel() for parameter in ranks.adapters())
    with ReceivedBytes() as counter:
        sync_adapters(ranks.model, ranks.llm)
    parts = ranks.config.fsdp.tensor_parallel
    count = ranks.config.ranks
    most = numbers * ranks.dtype.itemsize * (count - 1) / count
    if parts == 1:
        assert counter.received == most
    else:
        assert 0 < counter.received <= numbers * ranks.dtype.itemsize
    with ReceivedBytes() as merged:
        gather(ranks.model, ranks.llm)
    load_files(ranks.llm, ranks.policy)
    assert counter.received < merged.received / 3


def an_adapter_of_an_unknown_layer_is_refused_by_name(ranks: Ranks) -> None:
    tensors = dict(whole_adapters(ranks.model, ranks.dtype))
    wrong = {name.replace("layers.1.mlp.down_proj", "layers.9.mlp.down_proj"): t for name, t in tensors.items()}
    with pytest.raises(AdapterRefused, match=r"the engine has no adapters of model\.layers\.9\.mlp\.down_proj$"):
        load_adapters(ranks.llm, wrong.items())
    large = {name: t.repeat(3, 1) if "lora_A" in name else t.repeat(1, 3) for name, t in tensors.items()}
    with pytest.raises(AdapterRefused, match=r"LoRA rank 18 is greater than max_lora_rank 8"):
        load_adapters(ranks.llm, large.items())
    load_adapters(ranks.llm, tensors.items())


def in_bfloat16_adapters_are_nearer_to_training_than_merged_weights(ranks: Ranks) -> None:
    """Adapters as small as those of a first step: merged, most of what they add is rounded away."""
    ranks.change(5)
    for parameter in ranks.adapters("B"):
        parameter.mul_(0.02)
    sync_adapters(ranks.model, ranks.llm)
    beside = ranks.sampled(adapter=True)
    off = mean_difference(ranks, beside)
    gather(ranks.model, ranks.llm)
    merged = mean_difference(ranks, ranks.sampled(adapter=False))
    load_files(ranks.llm, ranks.policy)
    assert off < merged


def mean_difference(ranks: Ranks, samples: list[Sample]) -> float:
    pairs = zip(ranks.trained(samples), samples, strict=True)
    return float(torch.cat([(a - torch.tensor(s.log_probs)).abs() for a, s in pairs]).mean())


CHECKS = [
    before_a_first_sync_the_parent_generates,
    after_each_step_the_engine_says_what_merged_weights_say,
    what_has_no_adapter_is_answered_by_the_weights_alone_beside_what_has_one,
    adapters_alone_move,
    an_adapter_of_an_unknown_layer_is_refused_by_name,
]
CHECKS_IN_BFLOAT16 = [in_bfloat16_adapters_are_nearer_to_training_than_merged_weights]


def main() -> None:
    torch.set_num_threads(1)
    join_torchruns_ranks()
    engine, training = map(int, sys.argv[2:4])
    ranks = Ranks(Path(sys.argv[1]), engine, training, sys.argv[4])
    checks = CHECKS if ranks.dtype == torch.float32 else CHECKS_IN_BFLOAT16
    results = {check.__name__: everywhere(check, ranks) for check in checks}  # type: ignore[arg-type]
    if torch.distributed.get_rank() == 0:
        print(json.dumps(results), flush=True)
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
