"""Millrace's server against vLLM's own, on the same model with the same flags: ``make bench-serve``.

Both run side by side, idle while the other is loaded; the turns alternate, so that a machine whose speed drifts treats
them alike. Millrace records every response durably, vLLM's server records nothing. Every prompt is a new one. The last
line printed is one JSON object; ``bars`` has each bar, and whether it was met.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import string
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from loadtests import load
from loadtests.server import MILLRACE, Server, free_port, run
from loadtests.tiny_model import make_model_folder

PROMPT_CHARACTERS = 32
KV_CACHE_BYTES = 512 << 20
CONTEXT = 256
SEQUENCES = 64
WARM_UP_S = 3.0
FRONT_END_CLIENTS = 64
MOST_SILENT = 0.05
FEW_SILENT = 5
"""Of the streams, and this many of few: a random model says nothing but special tokens now and then."""


class Target(Server):
    """A server to load. ``mark``: what the first token's event of a stream contains, and nothing before it."""

    name: str
    mark: bytes | None = None

    def requests(self, clients: int, tokens: int, *, stream: bool, seed: int) -> list[Iterator[bytes]]:
        """An endless row of requests for each client."""
        raise NotImplementedError


class Millrace(Target):
    """``millrace serve``, by /generate."""

    name = "millrace"
    mark = b"event: delta"

    def __init__(self, home: Path, model: Path) -> None:
        port = free_port()
        settings = ["--home", str(home), "--serve.port", str(port)]
        settings += ["--serve.engine.kv_cache_bytes", str(KV_CACHE_BYTES)]
        settings += ["--serve.engine.max_num_seqs", str(SEQUENCES)]
        if not (home / "policies").is_dir():
            run("init", "--model", str(model), *settings, folder=home)
        super().__init__([MILLRACE, "serve", *settings], port, home / "millrace.log")

    def requests(self, clients: int, tokens: int, *, stream: bool, seed: int) -> list[Iterator[bytes]]:
        fields = {"max_tokens": tokens} | ({"stream": True} if stream else {})
        return [requests("/generate", fields, f"{seed}.{client}") for client in range(clients)]


class FrontEnd(Target):
    """Millrace with an engine that answers at once, recording its answers or dropping them."""

    def __init__(self, home: Path, model: Path, *, capture: bool) -> None:
        self.name = "capture" if capture else "no_capture"
        port = free_port()
        settings = ["--home", str(home / self.name), "--serve.port", str(port)]
        run("init", "--model", str(model), *settings, folder=home)
        command = [MILLRACE, "bench", "front-end", "--capture" if capture else "--no-capture", *settings]
        super().__init__(command, port, home / f"{self.name}.log")

    def requests(self, clients: int, tokens: int, *, stream: bool, seed: int) -> list[Iterator[bytes]]:
        return [requests("/generate", {"max_tokens": tokens}, f"{seed}.{client}") for client in range(clients)]


class Vllm(Target):
    """vLLM's own server, by /v1/completions."""

    name = "vllm"
    mark = b'"text":'

    def __init__(self, home: Path, model: Path) -> None:
        port = free_port()
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "model"]
        command += ["--dtype", "float32", "--enforce-eager", "--distributed-executor-backend", "uni"]
        command += ["--kv-cache-memory-bytes", str(KV_CACHE_BYTES), "--max-num-seqs", str(SEQUENCES)]
        command += ["--uvicorn-log-level", "warning", "--disable-uvicorn-access-log"]
        super().__init__(command, port, home / "vllm.log", "/health")

    def requests(self, clients: int, tokens: int, *, stream: bool, seed: int) -> list[Iterator[bytes]]:
        fields = {"model": "model", "max_tokens": tokens} | ({"stream": True} if stream else {})
        return [requests("/v1/completions", fields, f"{seed}.{client}") for client in range(clients)]


def requests(path: str, fields: dict[str, Any], seed: str) -> Iterator[bytes]:
    """Requests with prompts that never were there before."""
    chance = random.Random(seed)
    while True:
        prompt = "".join(chance.choices(string.ascii_letters, k=PROMPT_CHARACTERS))
        body = json.dumps({"prompt": prompt, **fields}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        yield head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


def measure(ours: Target, theirs: Target, cell: dict[str, Any], turns: int, seconds: float) -> dict[str, Any]:
    """One cell: alternating turns, then the ratios, ours over theirs. Times in milliseconds."""
    clients, tokens, stream = cell["clients"], cell["tokens"], cell["stream"]
    loads: dict[Target, list[load.Load]] = {ours: [], theirs: []}
    for turn in range(turns):
        for server in (ours, theirs) if turn % 2 == 0 else (theirs, ours):
            loop = server.requests(clients, tokens, stream=stream, seed=random.getrandbits(64))
            seen = load.run(server.port, loop, seconds, server.mark if stream else None)
            if seen.failures or not seen.latencies or seen.silent > max(FEW_SILENT, len(seen.latencies) * MOST_SILENT):
                raise SystemExit(
                    f"{server.name} failed with {clients} clients: {seen.failures[:3]}, {seen.silent} silent"
                )
            loads[server].append(seen)
    pairs = list(zip(loads[ours], loads[theirs], strict=True))
    result = {
        **cell,
        f"{ours.name}_rps": statistics.median(a.rate for a, _ in pairs),
        f"{theirs.name}_rps": statistics.median(b.rate for _, b in pairs),
        "ratio_rps": statistics.median(a.rate / b.rate for a, b in pairs),
        "turns": [round(a.rate / b.rate, 3) for a, b in pairs],
    }
    for name, values in (("latency", "latencies"), *((("first", "first"),) if stream else ())):
        mine, other = (sorted(v for x in loads[side] for v in getattr(x, values)) for side in (ours, theirs))
        for percent in (50, 99):
            a, b = percentile(mine, percent), percentile(other, percent)
            result |= {f"{ours.name}_{name}_p{percent}": a * 1e3, f"{theirs.name}_{name}_p{percent}": b * 1e3}
            result[f"ratio_{name}_p{percent}"] = a / b
    result = {name: round(value, 3) if isinstance(value, float) else value for name, value in result.items()}
    print(json.dumps(result), flush=True)
    return result


def percentile(ordered: list[float], percent: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32, 64], help="numbers of clients")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 64], help="lengths of the responses")
    parser.add_argument("--turns", type=int, default=4, help="turns of each server in each cell")
    parser.add_argument("--seconds", type=float, default=3, help="length of a turn")
    parser.add_argument("--only", choices=("plain", "stream", "front_end"), help="one part of it")
    options = parser.parse_args()
    cells = [
        {"clients": clients, "tokens": tokens, "stream": kind == "stream"}
        for kind in ("plain", "stream")
        for tokens in options.tokens
        for clients in options.clients
        if options.only in (None, kind)
    ]
    runs = Path("runs").absolute()
    runs.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=runs) as folder:
        home = Path(folder)
        # Three million parameters, and no end-of-sequence token: every response is as long as it may be.
        model = make_model_folder(
            home / "model", 1, hidden=256, layers=4, heads=4, intermediate=1024, eos=False, printable=True
        )
        results, front_end = [], None
        if cells:
            with serving(lambda: Millrace(home, model), lambda: Vllm(home, model)) as (ours, theirs):
                results = [measure(ours, theirs, cell, options.turns, options.seconds) for cell in cells]
        if options.only in (None, "front_end"):
            cell = {"clients": FRONT_END_CLIENTS, "tokens": 16, "stream": False}
            with serving(lambda: FrontEnd(home, model, capture=True), lambda: FrontEnd(home, model, capture=False)) as (
                on,
                off,
            ):
                front_end = measure(on, off, cell, options.turns, options.seconds)
    print(json.dumps(summary(results, front_end)))


@contextlib.contextmanager
def serving(*kinds: Callable[[], Target]) -> Iterator[list[Target]]:
    """The servers, started one after the other and warmed up; stopped afterwards."""
    with contextlib.ExitStack() as stack:
        servers: list[Target] = []
        for kind in kinds:
            servers.append(stack.enter_context(kind()))
        for server in servers:
            load.run(server.port, server.requests(SEQUENCES, 16, stream=False, seed=0), WARM_UP_S)
        yield servers


def summary(results: list[dict[str, Any]], front_end: dict[str, Any] | None) -> dict[str, Any]:
    totals: dict[str, Any] = {}
    if results:
        totals["min_ratio_rps"] = min(r["ratio_rps"] for r in results)
        totals["max_ratio_p50"] = max(r["ratio_latency_p50"] for r in results)
        totals["max_ratio_p99"] = max(r["ratio_latency_p99"] for r in results)
    if streams := [r for r in results if r["stream"]]:
        totals["max_ratio_first_token_p50"] = max(r["ratio_first_p50"] for r in streams)
        totals["max_ratio_first_token_p99"] = max(r["ratio_first_p99"] for r in streams)
    if front_end is not None:
        totals["front_end_on_over_off"] = front_end["ratio_rps"]
        for percent in ("p50", "p99"):
            on, off = (front_end[f"{name}_latency_{percent}"] for name in ("capture", "no_capture"))
            totals[f"front_end_added_ms_{percent}"] = round(on - off, 3)
    cells = {
        f"{'stream' if r['stream'] else 'plain'}_{r['clients']}_clients_{r['tokens']}_tokens": {
            key: value for key, value in r.items() if key.startswith("ratio_")
        }
        for r in results
    }
    at_least = {"min_ratio_rps": 1.05, "front_end_on_over_off": 0.8}
    bars: dict[str, Any] = {}
    for name, value in totals.items():
        if name in at_least:
            bars[name] = {"bar": f"at least {at_least[name]}", "met": value >= at_least[name]}
        elif name.startswith("max_ratio"):
            bars[name] = {"bar": "at most 1", "met": value <= 1}
    return totals | {"cells": cells, "bars": bars}


if __name__ == "__main__":
    main()
