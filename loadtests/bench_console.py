"""What the console costs and how quick it is, beside a lake of a million scored rows: ``make bench-console``.

A real server of a model of 3M parameters answers 16 clients, in turns: with the page Now open, which polls ("open"),
and with nobody at the console ("off"). A machine's speed drifts by more than the bars over minutes, so turns are short,
neighbours are compared, and the order changes from pair to pair. Of the turns with the page open over those without,
with 95 % intervals: ``serving_ratio``: requests a second; ``processor_ratio``: processor time of all the server's
processes an answer, which is what an answer costs where the processors are the limit, as here; noise moves it less than
a rate. ``processor_share``: what the server's processes but the engine's used more, over the turn's seconds and this
machine's processors. ``browsed`` has the same three with a person besides, who turns to another page every five
seconds.

Then, without other load, each page is fetched some times: ``page_ms`` has the median of each as a client sees it,
the first visit apart, which may start the process that reads the lake. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import string
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import httpx
import psutil

from loadtests import closed_loop, paired
from loadtests.event_lines import read_lines
from loadtests.server import MILLRACE, Server, free_port, run
from loadtests.tiny_model import make_model_folder

CLIENTS, TOKENS = 16, 16
WARM_UP_S, LOOK_S = 5.0, 5.0
# The page polls every two seconds, so that a turn with it open has its first request and two polls or three.
TURN_S: Final = {"open": 5.0, "browsed": 10.0}
LEAST_PAIRS, NARROW = 8, 0.02
TIMES: Final = 15
PAGES: Final = (
    "",
    "policies",
    "policies/1",
    "playground",
    "compare",
    "compare/suites",
    "labels",
    "labels?order=low",
    "labels?order=random",
    "traffic",
    "traffic?text=41+%2B+3",
    "traffic?user=user-7",
    "traffic?policy=1",
    "data",
    "keys",
)


class Visitor:
    """The page Now, open while the block lasts; with ``browsing``, other pages are looked at in turn."""

    def __init__(self, url: str, cookies: httpx.Cookies, *, browsing: bool) -> None:
        self._client = httpx.Client(base_url=url, cookies=cookies, timeout=60)
        self._over = threading.Event()
        works = [self._follow, self._look] if browsing else [self._follow]
        self._threads = [threading.Thread(target=work, daemon=True) for work in works]
        self.events = 0

    def _follow(self) -> None:
        while not self._over.is_set():
            with self._client.stream("GET", "/console/live") as stream:
                for line in read_lines(stream):
                    self.events += line.startswith("data:")
                    if self._over.is_set():
                        return

    def _look(self) -> None:
        for page in itertools.cycle(("", "traffic", "policies")):
            if self._over.wait(LOOK_S):
                return
            self._client.get(f"/console/{page}").raise_for_status()

    def __enter__(self) -> Visitor:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)
        self._client.close()


def requests(key: str) -> Iterator[bytes]:
    while True:
        prompt = "".join(random.choices(string.ascii_letters, k=24))
        body = json.dumps({"prompt": prompt, "max_tokens": TOKENS}).encode()
        head = f"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nX-API-Key: {key}\r\n"
        yield head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


class Turn(NamedTuple):
    """Answers a second; processor seconds an answer; the share of this machine's processors of all but the engine."""

    rate: float
    cost: float
    share: float


def turn(server: Server, key: str, seconds: float) -> Turn:
    before, started = used(server), time.monotonic()
    seen = closed_loop.run([server.port], [requests(key) for _ in range(CLIENTS)], seconds)
    if seen.failures:
        raise SystemExit(f"requests failed: {seen.failures[:3]}")
    taken = time.monotonic() - started
    engine, others = (after - earlier for after, earlier in zip(used(server), before, strict=True))
    return Turn(seen.rate, (engine + others) / (seen.rate * taken), others / taken / (os.cpu_count() or 1))


def used(server: Server) -> tuple[float, float]:
    """Processor seconds of the engine, and of the server's other processes."""
    tree = psutil.Process(server.process.pid)
    seconds = {True: 0.0, False: 0.0}
    for one in (tree, *tree.children(recursive=True)):
        seconds["EngineCore" in " ".join(one.cmdline())] += sum(one.cpu_times()[:2])
    return seconds[True], seconds[False]


class Turns(NamedTuple):
    """Turns in a state of the console, each with its neighbour without."""

    ours: list[Turn]
    without: list[Turn]

    def costs(self) -> dict[str, paired.Ratio]:
        return {
            "serving_ratio": paired.ratio([one.rate for one in self.ours], [one.rate for one in self.without]),
            "processor_ratio": paired.ratio([one.cost for one in self.ours], [one.cost for one in self.without]),
        }

    def share(self) -> float:
        pairs = zip(self.ours, self.without, strict=True)
        return round(statistics.fmean(ours.share - without.share for ours, without in pairs), 4)

    def are_enough(self, until: float) -> bool:
        if len(self.without) < LEAST_PAIRS:
            return False
        return time.monotonic() > until or max(ratio.width for ratio in self.costs().values()) <= NARROW


def alternate(server: Server, key: str, cookies: httpx.Cookies, state: str, until: float) -> Turns:
    turns = Turns([], [])
    while not turns.are_enough(until):
        if ours_first := len(turns.without) % 2 == 0:
            turns.ours.append(visited_turn(server, key, cookies, state))
        turns.without.append(turn(server, key, TURN_S[state]))
        if not ours_first:
            turns.ours.append(visited_turn(server, key, cookies, state))
        ours, without = turns.ours[-1], turns.without[-1]
        rates, costs = [round(ours.rate, 1), round(without.rate, 1)], [round(ours.cost, 5), round(without.cost, 5)]
        print(json.dumps({"pair": len(turns.ours), state: {"rates": rates, "costs": costs}}), flush=True)
    return turns


def visited_turn(server: Server, key: str, cookies: httpx.Cookies, state: str) -> Turn:
    with Visitor(server.url, cookies, browsing=state == "browsed") as visitor:
        seen = turn(server, key, TURN_S[state])
    if visitor.events == 0:
        raise SystemExit("the page Now sent no event")
    return seen


def pages(url: str, cookies: httpx.Cookies, times: int) -> dict[str, float]:
    """Milliseconds that each page takes, the median of some fetches; of what it took to start its process, nothing."""
    found: dict[str, float] = {}
    with httpx.Client(base_url=url, cookies=cookies, timeout=120) as client:
        for page in PAGES:
            taken = []
            for _ in range(times + 1):
                started = time.perf_counter()
                client.get(f"/console/{page}").raise_for_status()
                taken.append(time.perf_counter() - started)
            found[page or "now"] = round(statistics.median(taken[1:]) * 1e3, 1)
            print(json.dumps({"page": page or "now", "ms": found[page or "now"]}), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="scored rows in the lake")
    parser.add_argument("--minutes", type=float, default=8, help="how long the turns may take")
    options = parser.parse_args()
    runs = Path("runs").absolute()
    runs.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=runs) as folder:
        home, port = Path(folder) / "home", free_port()
        home.mkdir()
        model = make_model_folder(
            home / "model", 1, hidden=256, layers=4, heads=4, intermediate=1024, eos=False, printable=True
        )
        flags = ["--home", str(home), "--serve.port", str(port), "--serve.engine.kv_cache_bytes", str(32 << 20)]
        flags += ["--feedback.scoring.rules", "{exact: {ready: exact_match}}"]
        run("init", "--model", str(model), *flags, folder=home)
        print(run("bench", "fill", "--rows", str(options.rows), *flags, folder=home).strip(), flush=True)
        scopes = [part for scope in ("read", "generate", "feedback", "admin") for part in ("--scope", scope)]
        key = json.loads(run("keys", "create", "--name", "bench", *scopes, "--json", *flags, folder=home))["secret"]
        with Server([MILLRACE, "serve", *flags], port, home / "serve.log") as server:
            with httpx.Client(base_url=server.url, timeout=60) as client:
                client.post("/console/login", data={"key": key}, headers={"Origin": server.url})
                client.get("/console/").raise_for_status()
                cookies = client.cookies
            turn(server, key, WARM_UP_S)
            opened = alternate(server, key, cookies, "open", time.monotonic() + options.minutes * 60)
            browsed = alternate(server, key, cookies, "browsed", time.monotonic() + options.minutes * 60 / 4)
            time_of = pages(server.url, cookies, TIMES)
    ratios = opened.costs()
    slowest, median = max(time_of, key=lambda page: time_of[page]), statistics.median(time_of.values())
    figures = {
        **{name: round(ratio.value, 4) for name, ratio in ratios.items()},
        "processor_share": opened.share(),
        "browsed": {name: [round(ratio.value, 4), *ratio.interval()] for name, ratio in browsed.costs().items()}
        | {"processor_share": browsed.share()},
        "pairs": len(opened.ours),
        "requests_per_s": round(statistics.median(one.rate for one in opened.without), 1),
        "rows": options.rows,
        "page_ms": time_of,
        "slowest_page": slowest,
        "median_page_ms": median,
        "bars": {
            name: {
                "bar": f"{relation} {bar}",
                "verdict": ratios[name].judge(relation, bar),
                "interval": ratios[name].interval(),
            }
            for name, relation, bar in (("serving_ratio", "at least", 0.98), ("processor_ratio", "at most", 1.02))
        }
        | {"median_page_ms": {"bar": "at most 100", "verdict": "met" if median <= 100 else "missed"}},
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
