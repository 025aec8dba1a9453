"""Peak memory and time of log-probabilities by tiles, against whole logits.

Run as ``python -m deploy.examples.bench.training.vocabulary``.

Each way runs in processes of its own, in turns; the peak is the growth of the process's resident memory over what its
inputs and their gradients take. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

import torch

from train.model.fused_log_probs import log_probs_and_entropy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3, help="processes of each way, alternating")
    parser.add_argument("--way", choices=["naive", "tiled"], help="measure one way in this process")
    arguments = parser.parse_args()
    if arguments.way is not None:
        print(json.dumps(measure(arguments)))
        return
    seen: dict[str, list[dict[str, float]]] = {"naive": [], "tiled": []}
    for _ in range(arguments.rounds):
        for way, figures in seen.items():
            command = [
                sys.executable,
                "-P",
                "-m",
                "deploy.examples.bench.training.vocabulary",
                *sys.argv[1:],
                "--way",
                way,
            ]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=600)
            figures.append(json.loads(done.stdout.splitlines()[-1]))
    result: dict[str, Any] = {n: getattr(arguments, n) for n in ("tokens", "width", "vocabulary", "dtype", "threads")}
    for name in ("bytes", "seconds"):
        for way, figures in seen.items():
            result[f"{way}_{name}"] = statistics.median(f[name] for f in figures)
        result[f"{name}_over_naive"] = round(result[f"tiled_{name}"] / result[f"naive_{name}"], 4)
    print(json.dumps(result))


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    """A forward and backward pass: bytes of peak memory beyond inputs and gradients; seconds of a second pass."""
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    dtype = getattr(torch, arguments.dtype)
    hidden = torch.randn(arguments.tokens, arguments.width, dtype=dtype).requires_grad_()
    weight = torch.randn(arguments.vocabulary, arguments.width, dtype=dtype).mul_(0.02).requires_grad_()
    targets = torch.randint(0, arguments.vocabulary, (arguments.tokens,))
    temperatures = torch.ones(arguments.tokens)
    for tensor in (hidden, weight):
        tensor.grad = torch.ones_like(tensor)

    def step() -> float:
        started = time.perf_counter()
        if arguments.way == "tiled":
            log_probs, _ = log_probs_and_entropy(hidden, weight, None, targets, temperatures)
        else:
            logits = torch.nn.functional.linear(hidden, weight).float() / temperatures[:, None]
            distribution = torch.log_softmax(logits, -1)
            log_probs = distribution.gather(1, targets[:, None])[:, 0]
            -(distribution.detach().exp() * distribution.detach()).sum(-1)
        log_probs.sum().backward()
        return time.perf_counter() - started

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # The gradients are added to ones that were there before; a pass makes them once more beside those.
    fresh = (hidden.numel() + weight.numel()) * hidden.element_size()
    return {"bytes": (peak - before) * 1024.0 - fresh, "seconds": step()}


if __name__ == "__main__":
    main()
