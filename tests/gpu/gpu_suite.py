"""What the tests of a GPU share: which of them run here, on which device, and in how many ranks.

``gpu_test`` marks a test. It says what the test needs, and what of it a CPU can run: with
``MILLRACE_GPU_SUITE_DEVICE=cpu`` the same tests run on CPUs over gloo, which proves the tests, and of the product what
is the same on both. This module, and every test that is ``torch_only``, imports torch, transformers, what those need,
and pytest; a machine with a GPU may have nothing else.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import pytest

VARIABLE: Final = "MILLRACE_GPU_SUITE_DEVICE"
DEVICE: Final = os.environ.get(VARIABLE, "cuda")
if DEVICE not in ("cuda", "cpu"):
    raise pytest.UsageError(f"{VARIABLE}={DEVICE}: the GPU suite runs on cuda, or to be tried out on cpu")

OnCpu = Literal["all", "part", "no"]
Test = TypeVar("Test", bound=Callable[..., Any])


def gpu_test(
    on_cpu: OnCpu,
    why: str = "",
    *,
    devices: int = 1,
    torch_only: bool = False,
    packages: tuple[str, ...] = (),
    capability: tuple[int, int] = (0, 0),
) -> Callable[[Test], Test]:
    """Mark a test of the GPU suite.

    Args:
        on_cpu: whether its body runs on a CPU: all of it, part of it, or not at all.
        why: what a CPU leaves out, unless it runs all.
        devices: GPUs that it needs; on a CPU as many ranks.
        torch_only: it needs no package but torch, transformers and what those need.
        packages: that it needs beside them.
        capability: the least compute capability.
    """
    assert (on_cpu == "all") == (not why), "say what a CPU leaves out, and only that"

    def mark(test: Test) -> Test:
        needs = {"on_cpu": on_cpu, "why": why, "devices": devices, "packages": packages, "capability": capability}
        test = pytest.mark.gpu(pytest.mark.needs(**needs)(test))
        return pytest.mark.torch_only(test) if torch_only else test

    return mark


def reason_to_skip(needs: dict[str, Any]) -> str | None:
    """Why a test can't run here; None if it can. ``needs``: of its mark."""
    import torch

    if absent := [name for name in needs["packages"] if importlib.util.find_spec(name) is None]:
        return f"needs {', '.join(absent)}, which is not installed"
    if DEVICE == "cpu":
        return f"a CPU can't run it: {needs['why']}" if needs["on_cpu"] == "no" else None
    if not torch.cuda.is_available():
        return f"needs a GPU, and torch {torch.__version__} finds none"
    if (found := torch.cuda.device_count()) < needs["devices"]:
        return f"needs {needs['devices']} GPUs, and there is {found}"
    if (own := torch.cuda.get_device_capability(0)) < needs["capability"]:
        wanted, has = (".".join(map(str, c)) for c in (needs["capability"], own))
        return f"needs a GPU of compute capability {wanted}, and {torch.cuda.get_device_name(0)} has {has}"
    return None


# ----------------------------------------------------------------------------------------------------- ranks


def ranks_here(most: int = 2) -> int:
    """Ranks of a test that runs on any number: one for each device, as NCCL refuses two on one."""
    import torch

    return most if DEVICE == "cpu" else min(most, torch.cuda.device_count())


def require_own_groups() -> None:
    """Skip where torch can't make the process groups of a mesh of several dimensions as training makes them."""
    import inspect

    import torch

    orders = "sort_ranks" in inspect.signature(torch.distributed.new_group).parameters
    if not (orders and hasattr(torch.distributed, "all_gather_single")):
        pytest.skip(f"torch {torch.__version__} has no groups whose ranks are not sorted; training's torch has")


def on_ranks(count: int, function: Callable[..., Any], folder: Path, *arguments: Any) -> list[Any]:
    """What ``function(rank, folder, *arguments)`` returns on each of so many ranks, a process and a device each.

    Their group is the one that training makes. ``folder`` must be new.
    """
    import multiprocessing

    import torch

    multiprocessing.set_forkserver_preload(["train.model.fsdp", "tests.train.tiny_models"])
    # Those imports begin a CUDA context where torchao is installed, and no fork survives one.
    method = "forkserver" if DEVICE == "cpu" else "spawn"
    torch.multiprocessing.start_processes(_run, (count, function, folder, arguments), nprocs=count, start_method=method)
    return [torch.load(folder / f"{rank}.pt", weights_only=False, map_location="cpu") for rank in range(count)]


def _run(rank: int, count: int, function: Callable[..., Any], folder: Path, arguments: tuple[Any, ...]) -> None:
    import torch

    from train.controller.rendezvous import join_ranks

    torch.set_num_threads(1)
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    join_ranks(torch.distributed.FileStore(str(folder / "store"), count), rank, count, timeout_s=120)
    torch.save(function(rank, folder, *arguments), folder / f"{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def device_type() -> str:
    """That the product chooses here."""
    import torch

    assert torch.cuda.is_available() == (DEVICE == "cuda")
    return DEVICE


class Peak:
    """Within: the most bytes of the device's memory beyond what was held before; None on a CPU."""

    bytes: int | None = None

    def __enter__(self) -> Peak:
        import torch

        if DEVICE == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        return self

    def __exit__(self, *_: object) -> None:
        import torch

        if DEVICE == "cuda":
            torch.cuda.synchronize()
            self.bytes = torch.cuda.max_memory_allocated() - self._before


# ------------------------------------------------------------------------- settings, where there is no pydantic


@dataclass(frozen=True)
class Fsdp:
    """The fields of ``train.config.sections.FsdpConfig`` that ``train.model.fsdp.build`` reads, and their defaults."""

    layers: list[str] | str | None = None
    reshard_after_forward: bool = True
    prefetch_layers: int | None = None
    compile_layers: str | None = None
    cpu_offload: bool = False
    attention: str = "auto"


@dataclass(frozen=True)
class Optimizer:
    """The fields of ``train.config.sections.OptimizerConfig`` that ``train.optimizers.build`` reads, and their
    defaults."""

    name: str = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    momentum: float | None = None
    weight_decay: float = 0.0
    decay_vectors: bool = False
    groups: tuple[Any, ...] = ()
