"""One case of ``make bench-reshard``, run by torchrun: a plan's hand-over against gathering whole tensors.

``torchrun --nproc-per-node N -m deploy.examples.bench.training.reshard --policy FOLDER --tp T`` prints one JSON object
from rank 0. What is received is counted at the collectives themselves, in torch's dispatcher, not taken from the plan.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from train.config.training import TrainConfig
from train.model.fsdp import build
from train.weight_sync.gather import gather
from train.weight_sync.slices import numel
from train.weight_sync.sync import WeightSync
from train.workers.rollout import RolloutWorker


@click.command()
@click.option("--policy", type=click.Path(path_type=Path, exists=True), required=True, help="The model's folder.")
@click.option("--tp", default=1, show_default=True, help="Tensor-parallel ranks of an engine.")
@click.option("--training-tp", default=1, show_default=True, help="Tensor-parallel ranks in training.")
@click.option("--rounds", default=5, show_default=True, help="Times that each way is run, in turn.")
@click.option("--bucket-bytes", default=8 * 2**20, show_default=True, help="train.rollout.reshard_bucket_bytes.")
def main(policy: Path, tp: int, training_tp: int, rounds: int, bucket_bytes: int) -> None:
    """Run the case and print its measurements."""
    exact_resident_memory()
    join_torchruns_ranks()
    torch.set_num_threads(1)
    ranks = torch.distributed.get_world_size()
    config = TrainConfig.model_validate(
        {
            "ranks": ranks,
            "fsdp": {"tensor_parallel": training_tp},
            "rollout": {
                "tensor_parallel_size": tp,
                "max_model_len": 64,
                "max_tokens": 8,
                "max_num_seqs": 4,
                "kv_cache_bytes": 2**22,
            },
        }
    )
    model = build_model(policy, config)
    rollout = RolloutWorker(policy=policy, config=config, seed=0, peers={"actor": SimpleNamespace(model=model)})
    began = time.perf_counter()
    plan = WeightSync(model, rollout.llm, bucket_bytes=bucket_bytes)
    planning = time.perf_counter() - began
    plan.run(checked_tensors=10**9)
    gather(model, rollout.llm)

    seconds: dict[str, list[float]] = {"plan": [], "gather": []}
    received: dict[str, int] = {}
    peak: dict[str, int] = {}
    ways: dict[str, Callable[[], Any]] = {"plan": plan.run, "gather": lambda: gather(model, rollout.llm)}
    for _ in range(rounds):
        for name, way in ways.items():
            seconds[name].append(most(timed(way)))
    for name, way in ways.items():
        way()
        with ReceivedBytes() as counter, peak_memory() as extra:
            way()
        received[name], peak[name] = int(most(counter.received)), int(most(extra[0]))
    itemsize = getattr(torch, config.dtype).itemsize
    weights = sum(p.numel() for p in model.parameters()) * itemsize
    least = int(most(least_received(plan, ranks) * itemsize))
    planned = int(most(plan.plan.received * itemsize))
    result = {
        "n": ranks,
        "tp": tp,
        "training_tp": training_tp,
        "weight_bytes": weights,
        "received": received["plan"],
        "planned": planned,
        "least": least,
        "excess": (received["plan"] - least) / weights,
        "gathered": received["gather"],
        # One rank receives nothing, either way.
        "over_gather": received["plan"] / received["gather"] if ranks > 1 else None,
        "seconds": statistics.median(seconds["plan"]),
        "seconds_over_gather": statistics.median(seconds["plan"]) / statistics.median(seconds["gather"]),
        "plan_seconds": planning,
        "staging_bytes": int(most(min(2, len(plan.plan.buckets)) * plan.plan.largest_exchange * itemsize)),
        "peak_extra_bytes": peak["plan"],
        "peak_extra_bytes_gather": peak["gather"],
    }
    if torch.distributed.get_rank() == 0:
        print(json.dumps(result), flush=True)
    torch.distributed.barrier()


def build_model(policy: Path, config: TrainConfig) -> torch.nn.Module:
    from train.model.mesh import make_meshes, mesh_sizes

    meshes = make_meshes(device_type(), **mesh_sizes(config, config.ranks))
    return build(policy, dtype=getattr(torch, config.dtype), meshes=meshes)


def least_received(weight_sync: WeightSync, ranks: int) -> float:
    """Elements that a rank must receive at least: what it needs of each tensor, less the 1/N of it that it can hold.

    For a tensor that is cut in t that is (N − t)/(tN) of it (design.md); for a replicated one (N − 1)/N.
    """
    least = 0.0
    for tensor, place in weight_sync.held.items():
        size = numel(tuple((0, n) for n in place.shape))
        needed = sum(numel(box) for box in weight_sync.needed.by(weight_sync.plan.rank, tensor))
        least += max(0.0, needed - size / ranks)
    return least


class ReceivedBytes(TorchDispatchMode):
    """Counts the bytes that this rank receives from others, at the operators that all collectives pass through."""

    def __init__(self) -> None:
        super().__init__()
        self.received = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name.startswith(("c10d::", "_c10d_functional::")):
            self.received += self._of(name.partition("::")[2], args, result)
        return result

    def _of(self, name: str, args: Any, result: Any) -> int:
        rank = torch.distributed.get_rank()
        if name == "alltoall_base_":
            output, splits = args[0], args[3]
            others = sum(n for source, n in enumerate(splits) if source != rank)
            return int(others * output.itemsize)
        if name in ("all_gather_into_tensor", "_allgather_base_"):
            output, own = (result, args[0]) if name == "all_gather_into_tensor" else (args[0], args[1])
            return int(output.nbytes - own.nbytes)
        if name in ("wait_tensor", "_wrap_tensor_autograd", "allreduce_", "barrier"):  # checksums: a few bytes
            return 0
        raise ValueError(f"the collective {name} is not counted")


def device_type() -> str:
    """Of the devices that training chooses: cuda, where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def join_torchruns_ranks() -> None:
    """Make the group of torchrun's ranks as training makes it, with a device each where there are any."""
    if device_type() == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl")
    else:
        torch.distributed.init_process_group("gloo")


def exact_resident_memory() -> None:
    """Have the C library give large blocks back when they are freed, or their reuse goes unseen; glibc."""
    mmap_threshold = -3  # M_MMAP_THRESHOLD
    if not ctypes.CDLL(None).mallopt(mmap_threshold, 2**15):
        raise RuntimeError("mallopt refused to set M_MMAP_THRESHOLD")


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """[bytes by which ``resident`` of this process rose at most]; Linux."""
    if device_type() == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before, extra = resident(), [0]
    yield extra
    peak = torch.cuda.max_memory_allocated() if device_type() == "cuda" else _status("VmHWM")
    extra[0] = max(0, peak - before)


def resident() -> int:
    """Bytes of this process's memory: that torch has on its device, or resident memory, Linux."""
    if device_type() == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    return _status("VmRSS")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {field}")


def timed(way: Callable[[], Any]) -> float:
    torch.distributed.barrier()
    began = time.perf_counter()
    way()
    if device_type() == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def most(value: float) -> float:
    """The greatest of all ranks' values."""
    tensor = torch.tensor(float(value), dtype=torch.float64)
    torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX)
    return float(tensor)


if __name__ == "__main__":
    main()
