"""Run by torchrun for test_gpu_generation.py: ranks that train a small model and generate with it, in turns.

Arguments: the policy, the ranks of an engine, and further settings of training as JSON. Rank 0 prints one JSON object:
what was seen.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from deploy.examples.bench.training.reshard import device_type, join_torchruns_ranks
from tests.gpu import device_memory
from train.algorithms import load
from train.batch.packed import PackedBatch, Rollout, Sample
from train.config.training import TrainConfig
from train.workers.actor import ActorWorker
from train.workers.rollout import RolloutWorker

DEVICE = device_type()
PROMPTS = [[10 + i, 40, 50 + i, 60, 70] for i in range(6)]


def main() -> None:
    torch.set_num_threads(1)
    join_torchruns_ranks()
    policy, engine = Path(sys.argv[1]), int(sys.argv[2])
    config = TrainConfig.model_validate(
        {
            "ranks": torch.distributed.get_world_size(),
            "launcher": "torchrun",
            "dtype": "bfloat16",
            "micro_batch_tokens": 4096,
            "optimizer": {"learning_rate": 1e-3, "warmup_steps": 0},
            "fsdp": {"offload_optimizer": True},
            "rollout": {
                "tensor_parallel_size": engine,
                "max_model_len": 128,
                "max_tokens": 24,
                "max_num_seqs": 32,
                "kv_cache_bytes": 2**26,
                "enforce_eager": DEVICE == "cpu",  # on a GPU with CUDA graphs, whose weights keep their places
            },
        }
        | (json.loads(sys.argv[3]) if len(sys.argv) > 3 else {})
    )
    peers: dict[str, Any] = {}
    actor = peers["actor"] = ActorWorker(policy=policy, config=config, peers=peers)
    rollout = peers["rollout"] = RolloutWorker(policy=policy, config=config, seed=0, peers=peers)
    found: dict[str, Any] = {"free": {"awake": free_bytes()}, "here": [here(actor)]}

    first = greedy(rollout)
    batch = sampled(rollout)
    actor.before_call("log_probs")  # as a call through its group
    found["mismatch"] = mismatch(batch, actor.log_probs(batch))
    found["goes on"] = greedy(rollout) == first
    rollout.sleep()
    found["free"]["asleep"] = free_bytes()
    found["refused"] = refusal(rollout)
    rollout.load_actor_weights(0)
    found["same after sleep"] = greedy(rollout) == first
    found["free"]["awake again"] = free_bytes()
    found["here"].append(here(actor))

    rollout.sleep()
    actor.before_call("update")
    known = batch.with_(old_log_probs=batch.behaviour_log_probs, ref_log_probs=batch.behaviour_log_probs)
    algorithm = load(config.algorithm)
    for _ in range(4):
        actor.update(known.with_(advantages=algorithm.advantages(known)))
    found["homes of moments"] = sorted(
        {
            x.to_local().device.type
            for state in actor.optimizer.state.values()
            for x in state.values()
            if hasattr(x, "to_local")
        }
    )
    rollout.load_actor_weights(1)
    found["changed"] = greedy(rollout) != first
    after = sampled(rollout)
    found["here"].append(here(actor))
    actor.before_call("log_probs")
    found["mismatch after"] = mismatch(after, actor.log_probs(after))
    found["moved"] = mismatch(batch, actor.log_probs(batch))
    if torch.distributed.get_rank() == 0:
        print(json.dumps(found), flush=True)
    torch.distributed.barrier()


def here(actor: ActorWorker) -> int:
    """Bytes of its parameters and moments that are on its device."""
    tensors: list[Any] = [*actor.weight_tensors(), *actor.state_tensors()]
    parts = [tensor.to_local() for tensor in tensors]
    return sum(part.untyped_storage().nbytes() for part in parts if part.device.type == DEVICE)


def generated(rollout: RolloutWorker, **how: Any) -> list[list[Sample]]:
    """Of the one engine that there is, whose first rank alone has its answers."""
    found = [rollout.generate(PROMPTS, **how)]
    torch.distributed.broadcast_object_list(found, src=0)
    return found[0]


def greedy(rollout: RolloutWorker) -> list[list[int]]:
    return [of[0].token_ids for of in generated(rollout, n=0, greedy=True)]


def sampled(rollout: RolloutWorker) -> PackedBatch:
    """Responses with a reward that differs within a group."""
    found = generated(rollout, n=4, seed=3)
    return PackedBatch.pack(
        [
            Rollout(prompt, s.token_ids, s.log_probs, float(sum(s.token_ids) % 7), group)
            for group, (prompt, samples) in enumerate(zip(PROMPTS, found, strict=True))
            for s in samples
        ]
    )


def mismatch(batch: PackedBatch, log_probs: torch.Tensor) -> dict[str, float]:
    """Between what the engine says of its tokens and what training does: differences, and the mean ratio."""
    difference = (log_probs - batch.behaviour_log_probs)[batch.response_mask]
    return {
        "mean": float(difference.abs().mean()),
        "most": float(difference.abs().max()),
        "ratio": float(difference.exp().mean()),
    }


def refusal(rollout: RolloutWorker) -> str | None:
    if DEVICE == "cpu":
        return None  # it does not sleep
    try:
        rollout.generate(PROMPTS[:1], n=1)
    except RuntimeError as error:
        return str(error)
    return None


def free_bytes() -> int:
    """Of the device; 0 without one."""
    if DEVICE == "cpu":
        return 0
    torch.cuda.empty_cache()
    return device_memory.free_bytes()


if __name__ == "__main__":
    main()
