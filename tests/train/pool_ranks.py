"""Run for test_separate_pools.py: one rank of a pool that trains, or of one that generates.

Arguments: the policy, the port of the test's store, the pool, the rank, and the case (JSON). Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import PrefixStore, TCPStore

from tests.train.reshard_ranks import DTYPE, computed
from train.config.training import TrainConfig
from train.controller.rendezvous import find_store, follows_from_another, join_ranks
from train.model.hf_io import own_slice
from train.weight_sync.plan import Plan
from train.weight_sync.slices import numel
from train.weight_sync.transfer import JoinedPools
from train.workers.disaggregated import ReceivingRollout, Rendezvous, SendingActor

TIMEOUT_S = 400.0
BUCKET_BYTES = 2**16


@dataclass(frozen=True)
class Case:
    """Ranks that train, and of them those that share each layer; ranks that generate, and those of an engine.

    ``dies``: the first rank that generates ends in the middle of a transfer.
    """

    training: int
    tensor_parallel: int
    generation: int
    engine: int
    dies: bool = False

    def config(self, reshard: str) -> TrainConfig:
        return TrainConfig.model_validate(
            {
                "ranks": self.training,
                "dtype": "bfloat16",
                "fsdp": {"tensor_parallel": self.tensor_parallel},
                "placement": {
                    "pools": {"training": {}, "generation": {"ranks": self.generation}},
                    "actor": "training",
                    "reference": "training",
                    "rollout": "generation",
                },
                "rollout": {
                    "tensor_parallel_size": self.engine,
                    "max_model_len": 64,
                    "max_tokens": 8,
                    "max_num_seqs": 4,
                    "kv_cache_bytes": 2**22,
                    "reshard": reshard,
                    "reshard_bucket_bytes": BUCKET_BYTES,
                },
                "step_timeout_s": TIMEOUT_S,
            }
        )


def main() -> None:
    torch.set_num_threads(1)
    policy, port, pool, rank = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    case = Case(**json.loads(sys.argv[5]))
    ranks = case.training if pool == "training" else case.generation
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    store = find_store("127.0.0.1", port, 300)
    join_ranks(PrefixStore(pool, store), rank, ranks, TIMEOUT_S)
    found = trains(policy, store, case) if pool == "training" else generates(policy, store, case)
    print(json.dumps(found), flush=True)
    store.add("done", 1)
    store.wait(["all done"])  # the rendezvous is rank 0's


def trains(policy: Path, store: TCPStore, case: Case) -> dict[str, Any]:
    actor = SendingActor(policy=policy, config=case.config("gather"), peers={})
    rendezvous = actor.open_rendezvous(case.generation)
    if rendezvous is not None:
        store.set("rendezvous", json.dumps(asdict(rendezvous)))
    rendezvous = Rendezvous(**json.loads(store.get("rendezvous")))
    for seed in (1, 2):
        change(actor.model, seed)
        actor.send_weights(rendezvous)
    actor.config = case.config("plan")
    change(actor.model, 1)
    with Counted() as counted:
        began = time.monotonic()
        try:
            actor.send_weights(rendezvous)
        except RuntimeError as error:
            seconds = time.monotonic() - began
            return {"consequence": follows_from_another(str(error)), "error": str(error), "seconds": seconds}
    assert actor.weight_sync is not None
    change(actor.model, 3)
    actor.send_weights(rendezvous)
    return counted.beside(actor.weight_sync.plan)


def generates(policy: Path, store: TCPStore, case: Case) -> dict[str, Any]:
    rollout = ReceivingRollout(policy=policy, config=case.config("gather"), seed=0, peers={})
    rendezvous = Rendezvous(**json.loads(store.get("rendezvous")))
    engine = rollout.llm.collective_rpc(lambda worker: worker.get_model())[0]
    seen = []
    for version in (1, 2):
        rollout.receive_weights(rendezvous, version=version)
        seen.append(computed(engine))
    rollout.config = case.config("plan")
    with Counted(ends_in=2 if case.dies and rollout.rank == 0 else None) as counted:
        try:
            rollout.receive_weights(rendezvous, version=3)
        except RuntimeError as error:
            return {"consequence": follows_from_another(str(error)), "error": str(error)}
    seen.append(computed(engine))
    rollout.receive_weights(rendezvous, version=4)
    seen.append(computed(engine))
    assert rollout.weight_sync is not None
    needed = rollout.weight_sync.needed
    joined_rank = case.training + rollout.rank
    return {
        **counted.beside(rollout.weight_sync.plan),
        "needs": sum(numel(box) for name in rollout.weight_sync.held for box in needed.by(joined_rank, name)),
        "differing": differing(seen[0], seen[2]),
        "moved": [len(differing(seen[0], seen[i])) for i in (1, 3)],
    }


def change(model: nn.Module, seed: int) -> None:
    """Give every parameter new values, the same for the same seed on any rank: what several hold is one tensor."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            whole = torch.randn(parameter.shape, generator=generator)
            parameter.to_local().copy_(whole[own_slice(parameter)])  # type: ignore[attr-defined]


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


class Counted:
    """Counts the bytes that this rank hands to the group of both pools, and that it gets from it."""

    def __init__(self, ends_in: int | None = None) -> None:
        """``ends_in``: the exchange in which the process ends, as if it was killed."""
        self.sent = self.received = self.exchanges = 0
        self.ends_in = ends_in

    def __enter__(self) -> Counted:
        self._all_to_all = original = JoinedPools.all_to_all

        def all_to_all(group: JoinedPools, received: Tensor, sent: Tensor, *counts: Any) -> Any:
            self.exchanges += 1
            if self.exchanges == self.ends_in:
                os._exit(9)
            self.sent += sent.nbytes
            self.received += received.nbytes
            return original(group, received, sent, *counts)

        JoinedPools.all_to_all = all_to_all  # type: ignore[method-assign]
        return self

    def __exit__(self, *exc: object) -> None:
        JoinedPools.all_to_all = self._all_to_all  # type: ignore[method-assign]

    def beside(self, plan: Plan) -> dict[str, Any]:
        """What was counted, and what the plan says."""
        return {
            "sent": self.sent,
            "received": self.received,
            "planned_sent": DTYPE.itemsize * sum(sum(bucket.send_counts) for bucket in plan.buckets),
            "planned_received": DTYPE.itemsize * plan.received,
            "exchanges": self.exchanges,
            "buffers": 2 * DTYPE.itemsize * plan.largest_exchange,
        }


def arguments(case: Case) -> str:
    return json.dumps(asdict(case))


if __name__ == "__main__":
    main()
