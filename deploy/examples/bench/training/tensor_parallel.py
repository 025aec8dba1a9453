"""Training with tensor parallelism against FSDP alone: ``make bench-tp``.

Two ranks of an actor over gloo, a model of 9M parameters in bfloat16, updates on the same responses: two ranks that
share each layer (train.fsdp.tensor_parallel=2) and two that share out the responses take turns. ``tp2_over_fsdp2`` is
tokens a second of the first over those of the second, by medians. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from deploy.examples.bench.training.plan import LENGTHS, a_batch, make_model, measured_in_ranks
from deploy.examples.bench.training.reshard import most, timed
from train.config.training import TrainConfig
from train.model.mesh import batch_parts, mesh_sizes
from train.workers.actor import ActorWorker

MODEL: Final = "llama-9M"
PROMPTS: Final = 4
WAYS: Final = {"fsdp2": 1, "tp2": 2}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Training with tensor parallelism against FSDP alone.")
    parser.add_argument("--rounds", type=int, default=7, help="updates of each, in turn")
    parser.add_argument("--in-rank", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.in_rank is not None:
        in_rank(arguments.in_rank, arguments.rounds)
        return
    with tempfile.TemporaryDirectory() as folder:
        make_model(MODEL, Path(folder))
        options = ["--in-rank", folder, "--rounds", str(arguments.rounds)]
        result = measured_in_ranks("deploy.examples.bench.training.tensor_parallel", 2, options, "the two ranks")
    print(json.dumps(result))


def in_rank(policy: Path, rounds: int) -> None:
    """Have both actors update in turns; rank 0 prints what that gave."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    updates: dict[str, Any] = {}
    tokens = 0
    for name, size in WAYS.items():
        settings = {"ranks": ranks, "fsdp": {"tensor_parallel": size}, "data": {"traffic_share": 1.0}}
        config = TrainConfig.model_validate(settings)
        batch = a_batch(config, PROMPTS, 4096, seed=0)
        tokens = len(batch.tokens)
        parts = batch_parts(ranks, **mesh_sizes(config, ranks))
        part = batch.select(batch.balanced(max(parts) + 1)[parts[rank]])
        actor = ActorWorker(policy=policy, config=config, peers={})
        updates[name] = partial(actor.update, part)
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    for turn in range(rounds + 1):
        for name, update in updates.items():
            took = most(timed(update))
            if turn:  # the first makes kernels and moments
                seconds[name].append(took)
    rates = {name: tokens / statistics.median(took) for name, took in seconds.items()}
    if rank == 0:
        ratio = rates["tp2"] / rates["fsdp2"]
        result = {"tp2_over_fsdp2": round(ratio, 3), "tokens_per_s": rates, "seconds": seconds}
        print(json.dumps({**result, "tokens": tokens, "model": MODEL, **LENGTHS}), flush=True)
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
