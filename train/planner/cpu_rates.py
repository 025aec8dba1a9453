"""This machine's processors as a machine to plan for: their rates are measured, in a second."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from serve.kv_cache import machine_memory
from train.planner.machine import Machine


def measure_cpu(ranks: int, *, dtype: str = "bfloat16", threads: int = 1, width: int = 512) -> Machine:
    """So many ranks on this machine, each with a part of its memory; as fast as matrix products of training's size are.

    Args:
        width: of the square weight in the products that are timed, of 1024 tokens each.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x = torch.randn(1024, width).to(getattr(torch, dtype))
        weight = torch.randn(width, width).to(x.dtype)
        flops = 2 * 1024 * width * width / _fastest(lambda: x @ weight)
        source, target = torch.ones(2**23), torch.empty(2**23)
        bandwidth = 2 * source.nbytes / _fastest(lambda: target.copy_(source))
    finally:
        torch.set_num_threads(before)
    return Machine(
        name="this CPU",
        devices=ranks,
        memory=machine_memory() // ranks,
        flops=flops,
        bandwidth=bandwidth,
        link=bandwidth / 8,  # gloo over the loopback device copies each byte several times
        network=bandwidth / 8,
        host=bandwidth,
        node_devices=ranks,
        fragmentation=0.05,
        flops_share=0.6,
        bandwidth_share=0.7,
        float32_share=1.0,  # measured in the compute type
        kind="cpu",
    )


def _fastest(call: Callable[[], object]) -> float:
    """Seconds of the fastest of some calls."""
    seconds = []
    for _ in range(8):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
