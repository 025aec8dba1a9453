"""Run by test_prefix_caching.py: one rank that trains a small model and generates with it, in turns.

Arguments: the policy, a folder for what is trained, and what differs from the settings as JSON. Prints one JSON object.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from train.algorithms import load
from train.batch.packed import PackedBatch, Rollout
from train.config.training import TrainConfig
from train.controller.worker import Workers
from train.workers.actor import ActorWorker
from train.workers.rollout import RolloutWorker

GREEDY_TOKENS = 24
PROMPTS = [[3 + (7 * i + j * j) % 200 for j in range(150 + 40 * i)] for i in range(3)]
"""Longer than one of vLLM's blocks, and than two."""


def main() -> None:
    policy, folder, settings = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rollout = {"max_tokens": GREEDY_TOKENS, "max_model_len": 512, "max_num_seqs": 32, "kv_cache_bytes": 2**26}
    config = TrainConfig.model_validate(
        {
            "dtype": "float32",
            "micro_batch_tokens": 4096,
            "optimizer": {"learning_rate": settings.get("learning_rate", 1e-3), "warmup_steps": 0},
            "lora": settings.get("lora"),
            "fsdp": settings.get("fsdp", {}),
            "rollout": rollout | settings.get("rollout", {}),
        }
    )
    workers = Workers()
    for role, target, more in (
        ("actor", "train.workers.actor:ActorWorker", {}),
        ("reference", "train.workers.reference:ReferenceWorker", {}),
        ("rollout", "train.workers.rollout:RolloutWorker", {"seed": 0}),
    ):
        workers.create(role, target, {"policy": policy, "config": config} | more)
    engine, actor = workers.by_role["rollout"], workers.by_role["actor"]
    assert isinstance(engine, RolloutWorker)
    assert isinstance(actor, ActorWorker)
    if settings.get("stale"):  # what would be without: the cache outlives the weights
        engine._forget_prefixes = lambda: None  # type: ignore[method-assign]
    hits = counted_hits(engine)
    found: dict[str, Any] = {"away": [here(actor)]}

    batch = sampled(workers)
    found["hits of the first call"] = hits.pop()
    found["mismatch"] = mismatch(workers, batch)
    found["away"].append(here(actor))
    known = batch.with_(old_log_probs=batch.behaviour_log_probs, ref_log_probs=batch.behaviour_log_probs)
    advantages = load(config.algorithm).advantages(known)
    for _ in range(3):
        workers.call("actor", "update", known.with_(advantages=advantages), {})
    found["moved"] = mismatch(workers, batch)
    workers.call("rollout", "load_actor_weights", 1, {})
    found["away"].append(here(actor))
    found["greedy"] = [of[0].token_ids for of in generate(workers, n=0, greedy=True)]
    found["hits after the sync"] = hits.pop()
    found["versions"] = [of[0].policies for of in generate(workers, n=1, seed=1)]
    hits.pop()
    after = sampled(workers)
    found["hits of a later call"] = hits.pop()
    found["tokens"] = after.tokens.tolist()
    found["mismatch after"] = mismatch(workers, after)
    workers.call("actor", "export", folder, {})
    found["checksum"] = sum(float(p.to_local().double().abs().sum()) for p in actor.model.parameters())  # type: ignore[operator]
    print(json.dumps(found), flush=True)
    workers.close()
    torch.distributed.destroy_process_group()


def generate(workers: Workers, **how: Any) -> Any:
    return workers.call("rollout", "generate", PROMPTS, how)


def sampled(workers: Workers) -> PackedBatch:
    """Responses with a reward that differs within a group."""
    found = generate(workers, n=4, seed=3)
    return PackedBatch.pack(
        [
            Rollout(prompt, s.token_ids, s.log_probs, float(sum(s.token_ids) % 7), group)
            for group, (prompt, samples) in enumerate(zip(PROMPTS, found, strict=True))
            for s in samples
        ]
    )


def mismatch(workers: Workers, batch: PackedBatch) -> float:
    """The most that the engine and training differ on a token, in nats."""
    log_probs = workers.call("actor", "log_probs", batch, {})
    return float((log_probs - batch.behaviour_log_probs)[batch.response_mask].abs().max())


def counted_hits(engine: RolloutWorker) -> list[int]:
    """[tokens that requests have read from the cache of prefixes], of each call since, the last one's at its end."""
    hits: list[int] = []
    step, call = engine.llm.llm_engine.step, engine.generate

    def counting() -> Any:
        outputs = step()
        hits[-1] += sum(output.num_cached_tokens or 0 for output in outputs if output.finished)
        return outputs

    def beginning(*arguments: Any, **options: Any) -> Any:
        hits.append(0)
        return call(*arguments, **options)

    engine.llm.llm_engine.step, engine.generate = counting, beginning  # type: ignore[method-assign]
    return hits


def here(actor: ActorWorker) -> int:
    """Bytes of the actor's parameters and moments that are not away."""
    tensors: list[Any] = [*actor.weight_tensors(), *actor.state_tensors()]
    return sum(tensor.to_local().untyped_storage().nbytes() for tensor in tensors)


if __name__ == "__main__":
    main()
