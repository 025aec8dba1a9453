"""Millrace's server against vLLM's own, on the same model with the same flags: ``make bench-serve``.

vLLM's has the engine's flags and environment of Millrace's (``vllm_peer``). Both run side by side, idle while the
other is loaded. Turns are in pairs, whose order alternates, so that a machine whose speed drifts treats them alike;
each pair gives one ratio of ours over theirs, and a figure is the geometric mean of its pairs with a 95 % interval
(Student's t on the logarithms). Every cell gets a pair in turn, at least ten, until the intervals of its throughput and
of the API process's processor time are narrower than 4 %, or the part's share of ``--minutes`` is used up and each
cell has three; ``stopped_by`` says which. By default there is time for about eight; ten take ``--minutes 20``. Millrace
records every response durably, vLLM's server records nothing. Every prompt is a new one.

- Processor time (``api_cpu_over_vllm``, ``engine_cpu_over_vllm``): user and system time of all of a process's threads
  per request, and per token of a stream; over all cells, as their geometric mean, and with ``_worst`` of the worst
  cell. ``sealing`` in a cell is what Millrace's other processes take, which vLLM has none of, over vLLM's API process;
  it is in no bar.
- Latencies (``max_ratio_p50`` and so on) are percentiles of all answers of a cell's turns together, with the interval
  of ``paired.pooled``. A cell counts only if both servers gave so many answers that the percentile is not just the
  greatest, 100 for a p99; the others are in ``too_few_answers``.
- The least and greatest ratios are those of the worst cell. Their interval goes from the least lower end of all cells
  to the least upper end (or the greatest ones), so a bar counts as met if each cell by itself meets it.
- ``front_end_on_over_off``: requests/s with an engine that answers at once, recording over dropping what it answers.
  Both sides build each response's row, which the answer is made from, and count it in the metrics; the side that drops
  has an open journal and a sealer, without work. So the figure has the cost of redacting and encoding rows, of the
  journal and of sealing, and leaves out that of building them.
- ``fleet_over_two``: requests/s of a fleet of two replicas over two single servers, to which the clients' connections
  are dealt in turn, as DNS or a router in the kernel does. No process stands before them, so this is the stricter way.
- ``api_processes_over_one``, with ``--only api_processes`` alone: a server with several API processes over one with a
  single one, requests/s, and processor time of all API processes and of the engine per request. It has no bar.

The last line printed is one JSON object. ``bars`` has each bar: met or missed if the whole interval is on one side of
it, else undecided.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import string
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx
import psutil

from loadtests import closed_loop, paired, vllm_peer
from loadtests.paired import Ratio
from loadtests.server import MILLRACE, READY_TIMEOUT_S, Server, free_port, run
from loadtests.tiny_model import make_model_folder

PROMPT_CHARACTERS = 32
KV_CACHE_BYTES = 512 << 20
WARM_UP_S = 3.0
MOST_SILENT = 0.05
FEW_SILENT = 5
"""Of the streams, and this many of few: a random model says nothing but special tokens now and then."""
LEAST_PAIRS: Final = 3
"""Of a cell, however little time there is."""
ENOUGH_PAIRS: Final = 10
"""Before a narrow interval ends a cell: one of fewer pairs may be narrow by chance."""
NARROW: Final = 0.04
TIMES: Final = (("latency", 50.0), ("latency", 99.0), ("first_token", 50.0), ("first_token", 99.0))
PARTS: Final = ("plain", "stream", "front_end", "fleet")
ON_REQUEST: Final = ("api_processes",)
SHARES: Final = {"plain": 4.0, "stream": 4.0, "front_end": 1.0, "fleet": 2.5, "api_processes": 2.5}
"""Of the time."""

AT_LEAST: Final = {
    "min_ratio_rps.plain": 1.0,
    "min_ratio_rps.stream": 0.97,
    "front_end_on_over_off": 0.8,
    "fleet_over_two": 0.9,
}
AT_MOST: Final = {
    "api_cpu_over_vllm.plain": 0.6,
    "api_cpu_over_vllm.stream": 1.0,
    "engine_cpu_over_vllm": 1.03,
    "max_ratio_p50": 1.05,
    "max_ratio_p99": 1.15,
    "max_ratio_first_token_p99": 1.15,
}


class Target(Server):
    """A server to load. ``mark``: what the first token's event of a stream contains, and nothing before it."""

    name: str
    mark: bytes | None = None

    @property
    def ports(self) -> list[int]:
        """Where clients connect, in turn."""
        return [self.port]

    def requests(self, clients: int, tokens: int, *, stream: bool, seed: int) -> list[Iterator[bytes]]:
        """An endless row of requests for each client."""
        raise NotImplementedError

    def processor_seconds(self) -> dict[str, float]:
        """What the API process, the engine and all others have used."""
        root = psutil.Process(self.process.pid)
        used = sorted(
            (sum(map(_processor_seconds, [child, *child.children(recursive=True)])) for child in root.children()),
            reverse=True,
        )
        return {"api": _processor_seconds(root), "engine": sum(used[:1]), "sealing": sum(used[1:])}


class Millrace(Target):
    """``millrace serve``, by /generate."""

    name = "millrace"
    mark = b"event: delta"

    def __init__(self, home: Path, model: Path, *options: str) -> None:
        port = free_port()
        home.mkdir(exist_ok=True)
        settings = ["--home", str(home), "--serve.port", str(port)]
        settings += ["--serve.engine.kv_cache_bytes", str(KV_CACHE_BYTES)]
        settings += ["--serve.engine.max_num_seqs", str(vllm_peer.SEQUENCES)]
        if not (home / "policies").is_dir():
            run("init", "--model", str(model), *settings, folder=home)
        super().__init__([MILLRACE, "serve", *settings, *options], port, home / "millrace.log")

    def requests(self, clients: int, tokens: int, *, stream: bool, seed: int) -> list[Iterator[bytes]]:
        fields = {"max_tokens": tokens} | ({"stream": True} if stream else {})
        return [requests("/generate", fields, f"{seed}.{client}") for client in range(clients)]


class Several(Millrace):
    """Several API processes in front of one engine."""

    name = "several"

    def __init__(self, home: Path, model: Path, processes: int) -> None:
        super().__init__(home / "several", model, "--serve.api_processes", str(processes))

    def processor_seconds(self) -> dict[str, float]:
        """As ``Target``'s; ``api``: of all that listen."""
        root = psutil.Process(self.process.pid)
        used = {"api": _processor_seconds(root), "engine": 0.0, "sealing": 0.0}
        others = []
        for child in root.children():
            listens = any(
                found.laddr.port == self.port for found in child.net_connections() if found.status == "LISTEN"
            )
            seconds = sum(map(_processor_seconds, [child, *child.children(recursive=True)]))
            if listens:
                used["api"] += seconds
            else:
                others.append(seconds)
        others.sort(reverse=True)
        return used | {"engine": sum(others[:1]), "sealing": sum(others[1:])}


class Fleet(Millrace):
    """Two replicas."""

    name = "fleet"

    def __init__(self, home: Path, model: Path) -> None:
        super().__init__(home / "fleet", model, "--replicas", "2")
        replicas: Sequence[str] = ()
        deadline = time.monotonic() + READY_TIMEOUT_S
        while len(replicas) < 2 and time.monotonic() < deadline:  # it is ready when the first one is
            time.sleep(0.2)
            replicas = httpx.get(f"{self.url}/ready", timeout=5).json().get("replicas", ())
        if len(replicas) < 2:
            self.stop()
            raise SystemExit(f"of two replicas only {replicas} were ready after {READY_TIMEOUT_S} s")

    def processor_seconds(self) -> dict[str, float]:
        """Not measured: the replicas are Ray's processes."""
        return {}


class Two(Target):
    """Two single servers."""

    name = "two"

    def __init__(self, home: Path, model: Path) -> None:
        self._first = Millrace(home / "first", model)
        try:
            self._second = Millrace(home / "second", model)
        except BaseException:
            self._first.stop()
            raise
        self.port = self._first.port

    @property
    def ports(self) -> list[int]:
        return [self._first.port, self._second.port]

    def requests(self, clients: int, tokens: int, *, stream: bool, seed: int) -> list[Iterator[bytes]]:
        return self._first.requests(clients, tokens, stream=stream, seed=seed)

    def processor_seconds(self) -> dict[str, float]:
        """Not measured, as a fleet's."""
        return {}

    def stop(self) -> int:
        return max(self._first.stop(), self._second.stop())


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
        command = vllm_peer.command(model, port, dtype="float32", kv_cache_bytes=KV_CACHE_BYTES)
        super().__init__(command, port, home / "vllm.log", "/health", vllm_peer.variables())

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


@dataclass
class Turn:
    """One server's figures, and its answers' times in seconds by their kind."""

    values: dict[str, float]
    times: dict[str, list[float]]


@dataclass
class Cell:
    """One load on two servers, and of each pair of turns so far the ratios of ours over theirs, by figure.

    ``times``: of each kind what ours and theirs took, turn by turn.
    """

    part: str
    clients: int
    tokens: int
    ratios: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    ours: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """What ours measured; processor time in milliseconds."""
    times: dict[str, tuple[list[list[float]], list[list[float]]]] = field(
        default_factory=lambda: defaultdict(lambda: ([], []))
    )

    @property
    def stream(self) -> bool:
        return self.part == "stream"

    @property
    def name(self) -> str:
        return f"{self.part}_{self.clients}_clients_{self.tokens}_tokens"

    @property
    def pairs(self) -> int:
        return len(self.ratios["rps"])

    def is_narrow(self) -> bool:
        """Whether throughput, and the API process's time where it counts, are known well enough."""
        decisive = [self.ratios[name] for name in ("rps", "api_cpu") if name in self.ratios]
        return self.pairs >= ENOUGH_PAIRS and all(paired.mean([ratios]).width < NARROW for ratios in decisive)

    def add_pair(self, ours: Target, theirs: Target, seconds: float) -> None:
        """Load both, one after the other; first the one that was last before."""
        order = (ours, theirs) if self.pairs % 2 == 0 else (theirs, ours)
        turns = {server: self._turn(server, seconds) for server in order}
        self.add(turns[ours], turns[theirs])

    def add(self, ours: Turn, theirs: Turn) -> None:
        """A pair that was measured."""
        for name, value in ours.values.items():
            self.ours[name].append(value)
            reference = theirs.values["api_cpu" if name == "sealing_cpu" else name]
            if value > 0 and reference > 0:
                self.ratios[name].append(value / reference)
        for kind in ours.times:
            for side, turn in zip(self.times[kind], (ours, theirs), strict=True):
                side.append(turn.times[kind])

    def _turn(self, server: Target, seconds: float) -> Turn:
        loop = server.requests(self.clients, self.tokens, stream=self.stream, seed=random.getrandbits(64))
        before = server.processor_seconds()
        seen = closed_loop.run(server.ports, loop, seconds, server.mark if self.stream else None)
        after = server.processor_seconds()
        answers = len(seen.latencies)
        if seen.failures or not answers or seen.silent > max(FEW_SILENT, answers * MOST_SILENT):
            raise SystemExit(
                f"{server.name} failed with {self.clients} clients: {seen.failures[:3]}, {seen.silent} silent"
            )
        items = answers * (self.tokens if self.stream else 1)
        values = {"rps": seen.rate}
        values |= {f"{process}_cpu": (after[process] - before[process]) / items * 1e3 for process in after}
        return Turn(values, {"latency": seen.latencies} | ({"first_token": seen.first} if self.stream else {}))

    def has_enough(self, kind: str, percent: float) -> bool:
        """Whether both servers gave so many answers that a percentile of them is not just the greatest."""
        return all(all(side) and sum(map(len, side)) * (100 - percent) >= 100 for side in self.times[kind])

    def time_ratio(self, kind: str, percent: float) -> Ratio:
        """A percentile of all turns' times."""
        return paired.pooled(*self.times[kind], percent)

    def report(self) -> dict[str, Any]:
        """Each ratio with its interval, and what ours measured: the turns' medians, and percentiles in milliseconds."""
        ratios = {name: paired.mean([values]) for name, values in self.ratios.items() if len(values) > 1}
        ours = {name: statistics.median(values) for name, values in self.ours.items()}
        for kind, percent in TIMES:
            if kind in self.times and self.has_enough(kind, percent):
                ratios[f"{kind}_p{percent:g}"] = self.time_ratio(kind, percent)
                ours[f"{kind}_p{percent:g}"] = paired.percentile(self.times[kind][0], percent) * 1e3
        return {
            "pairs": self.pairs,
            "answers": [sum(map(len, side)) for side in self.times["latency"]],
            "ratios": {
                name: {end: round(value, 3) for end, value in each._asdict().items()} for name, each in ratios.items()
            },
            "ours": {name: round(value, 4) for name, value in ours.items()},
        }


def measure(cells: Sequence[Cell], ours: Target, theirs: Target, seconds: float, until: float) -> str:
    """Pairs of turns for each cell that is not known well enough yet, until all are, or the time; why it ended."""
    while wide := [cell for cell in cells if not cell.is_narrow()]:
        for cell in wide:
            if time.monotonic() > until and all(each.pairs >= LEAST_PAIRS for each in cells):
                return "time"
            cell.add_pair(ours, theirs, seconds)
            shown = {name: round(values[-1], 3) for name, values in cell.ratios.items()}
            print(json.dumps({"cell": cell.name, "pair": cell.pairs, "ratios": shown}), flush=True)
    return "interval"


def worst(figures: Sequence[Ratio], choose: Callable[[Iterator[float]], float]) -> Ratio:
    """The least (``choose`` is min) or greatest of several cells' figures."""
    return Ratio(*(choose(iter(values)) for values in zip(*figures, strict=True)))


def figures_of(cells: Sequence[Cell]) -> dict[str, Ratio]:
    """The figures that the cells give, by name; a dot between a figure and its kind."""
    found: dict[str, Ratio] = {}
    served = [cell for cell in cells if cell.part in ("plain", "stream")]
    streams = [cell for cell in served if cell.stream]

    def each(name: str, of: Sequence[Cell]) -> list[Ratio]:
        return [paired.mean([cell.ratios[name]]) for cell in of]

    def times(kind: str, percent: float, of: Sequence[Cell]) -> list[Ratio]:
        return [cell.time_ratio(kind, percent) for cell in of if cell.has_enough(kind, percent)]

    for part in ("plain", "stream"):
        if of_part := [cell for cell in served if cell.part == part]:
            found[f"api_cpu_over_vllm.{part}"] = paired.mean([cell.ratios["api_cpu"] for cell in of_part])
            found[f"api_cpu_over_vllm_worst.{part}"] = worst(each("api_cpu", of_part), max)
            found[f"min_ratio_rps.{part}"] = worst(each("rps", of_part), min)
    if served:
        found["engine_cpu_over_vllm"] = paired.mean([cell.ratios["engine_cpu"] for cell in served])
    latencies = {
        "max_ratio_p50": times("latency", 50, served),
        "max_ratio_p99": times("latency", 99, served),
        "max_ratio_first_token_p99": times("first_token", 99, streams),
    }
    found |= {name: worst(ratios, max) for name, ratios in latencies.items() if ratios}
    for cell in cells:
        if cell.part == "api_processes":
            for name in ("rps", "api_cpu", "engine_cpu"):
                found[f"api_processes_over_one.{name}"] = paired.mean([cell.ratios[name]])
    names = {"front_end": "front_end_on_over_off", "fleet": "fleet_over_two"}
    return found | {names[cell.part]: paired.mean([cell.ratios["rps"]]) for cell in cells if cell.part in names}


def verdict(name: str, figure: Ratio) -> dict[str, Any]:
    """A figure's bar, if it has one, and what its interval says of it."""
    if name not in AT_LEAST and name not in AT_MOST:
        return {"interval": figure.interval()}
    relation, bar = ("at least", AT_LEAST[name]) if name in AT_LEAST else ("at most", AT_MOST[name])
    return {"bar": f"{relation} {bar:g}", "verdict": figure.judge(relation, bar), "interval": figure.interval()}


def summary(cells: Sequence[Cell], stopped_by: dict[str, str]) -> dict[str, Any]:
    """The last line."""
    figures = figures_of(cells)
    totals: dict[str, Any] = {}
    for name, figure in figures.items():
        group, _, kind = name.partition(".")
        if kind:
            totals.setdefault(group, {})[kind] = round(figure.value, 3)
        else:
            totals[group] = round(figure.value, 3)
    bars = {name: verdict(name, figure) for name, figure in figures.items()}
    few = {
        f"{kind}_p{percent:g}": [
            cell.name for cell in cells if kind in cell.times and not cell.has_enough(kind, percent)
        ]
        for kind, percent in TIMES
    }
    return totals | {
        "bars": bars,
        "stopped_by": stopped_by,
        "too_few_answers": {name: names for name, names in few.items() if names},
        "cells": {cell.name: cell.report() for cell in cells},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32, 64], help="numbers of clients")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 64], help="lengths of the responses")
    parser.add_argument("--seconds", type=float, default=2, help="length of a turn")
    parser.add_argument("--minutes", type=float, default=15, help="about how long all of it may take")
    parser.add_argument("--only", choices=PARTS + ON_REQUEST, nargs="+", default=PARTS, help="some parts of it")
    parser.add_argument("--api-processes", type=int, default=2, help="of the server with several of them")
    options = parser.parse_args()
    most = max(options.clients)
    grid = [
        (part, clients, tokens)
        for part in PARTS + ON_REQUEST
        for tokens in options.tokens
        for clients in options.clients
    ]
    cells = [
        Cell(part, clients, tokens)
        for part, clients, tokens in grid
        if part in options.only and (part in ("plain", "stream") or (clients == most and tokens == min(options.tokens)))
    ]
    runs = Path("runs").absolute()
    runs.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=runs) as folder:
        stopped_by = measure_all(cells, Path(folder), options.seconds, options.minutes * 60, options.api_processes)
    print(json.dumps(summary(cells, stopped_by), allow_nan=False))


def measure_all(
    cells: Sequence[Cell], home: Path, seconds: float, limit_s: float, api_processes: int
) -> dict[str, str]:
    """Start the servers of each group of cells and measure those; why each group ended, by its first part."""
    # Three million parameters, and no end-of-sequence token: every response is as long as it may be.
    model = make_model_folder(
        home / "model", 1, hidden=256, layers=4, heads=4, intermediate=1024, eos=False, printable=True
    )
    on, off = (partial(FrontEnd, home, model, capture=capture) for capture in (True, False))
    groups: list[tuple[tuple[str, ...], list[Callable[[], Target]]]] = [
        (("plain", "stream"), [partial(Millrace, home, model), partial(Vllm, home, model)]),
        (("front_end",), [on, off]),
        (("fleet",), [partial(Fleet, home, model), partial(Two, home, model)]),
        (("api_processes",), [partial(Several, home, model, api_processes), partial(Millrace, home, model)]),
    ]
    stopped_by = {}
    until = time.monotonic()
    shares = sum(SHARES[part] for part in {cell.part for cell in cells})
    for parts, kinds in groups:
        if chosen := [cell for cell in cells if cell.part in parts]:
            # Starting the servers counts: a group that took less leaves its time to the next ones.
            until += limit_s * sum(SHARES[part] for part in {cell.part for cell in chosen}) / shares
            with serving(kinds) as (ours, theirs):
                stopped_by["_".join(parts)] = measure(chosen, ours, theirs, seconds, until)
    return stopped_by


@contextlib.contextmanager
def serving(kinds: Sequence[Callable[[], Target]]) -> Iterator[list[Target]]:
    """The servers, started one after the other and warmed up; stopped afterwards."""
    with contextlib.ExitStack() as stack:
        servers: list[Target] = []
        for kind in kinds:
            servers.append(stack.enter_context(kind()))
        for server in servers:
            closed_loop.run(server.ports, server.requests(vllm_peer.SEQUENCES, 16, stream=False, seed=0), WARM_UP_S)
        yield servers


def _processor_seconds(process: psutil.Process) -> float:
    """utime and stime of all its threads, ended ones too. From the process's clock: /proc rounds them to 10 ms.

    The clock's number is what clock_getcpuclockid(3) makes of a process's.
    """
    try:
        return time.clock_gettime(~process.pid << 3 | 2)
    except OSError:  # it has ended
        return 0.0


if __name__ == "__main__":
    main()
