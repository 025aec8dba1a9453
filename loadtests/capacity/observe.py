"""What a server and its machine say while it is under load, about once a second."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

EVERY_S: Final = 1.0
MEMORY_EVERY_S: Final = 5.0
TIMEOUT_S: Final = 10.0
ROUTES: Final = ("/generate", "/v1/chat/completions", "/v1/completions", "/feedback")


class Observer:
    """Samples in a thread, while the block lasts. A context manager.

    server: a process of this machine, whose tree is looked at too; None if there is none.
    users: the load generator's process.
    """

    def __init__(self, url: str, headers: dict[str, str], server: psutil.Process | None, users: psutil.Process) -> None:
        self.samples: list[dict[str, Any]] = []
        self.trouble: str | None = None
        """Why the last sample has nothing of /metrics."""
        self._http = httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_S)
        self._server, self._users = server, users
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._go_on, daemon=True)
        self._memory_due = 0.0

    def _go_on(self) -> None:
        while not self._stop.wait(EVERY_S):
            self.samples.append(self._sample())

    def _sample(self) -> dict[str, Any]:
        sample: dict[str, Any] = {"at": time.time()}
        try:
            reply = self._http.get("/metrics")
            reply.raise_for_status()
            sample |= of_metrics(reply.text)
        except httpx.HTTPError as error:
            self.trouble = str(error).splitlines()[0]
        with contextlib.suppress(psutil.Error):
            sample["users_cpu_s"] = _processor_seconds(self._users)
        if self._server is not None:
            sample |= {"machine_busy": psutil.cpu_percent() / 100, "machine_load": os.getloadavg()[0]}
            processes = dict(_by_role(self._server))
            sample["cpu_s"] = _sums((role, _processor_seconds(one)) for one, role in processes.items())
            if time.monotonic() >= self._memory_due:
                sizes = [(role, _memory(one)) for one, role in processes.items()]
                for kind in ("memory", "pss"):
                    sample[kind] = _sums((role, size[kind]) for role, size in sizes)
                self._memory_due = time.monotonic() + MEMORY_EVERY_S
        return sample

    def __enter__(self) -> Observer:
        psutil.cpu_percent()  # the first is of no time at all
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(3 * TIMEOUT_S)
        self.samples.append(self._sample())
        self._http.close()


def of_metrics(text: str) -> dict[str, Any]:
    """The figures of /metrics that tell what is used up; of a fleet sums over its replicas, and the fullest cache."""
    found: dict[str, float] = defaultdict(float)
    codes: dict[str, float] = defaultdict(float)
    known = set()
    for family in text_string_to_metric_families(text):
        for name, labels, value, *_ in family.samples:
            known.add(name)
            if name == "millrace_requests_total" and labels["route"] in ROUTES:
                codes[labels["code"]] += value
            elif name in ("millrace_engine_kv_cache_usage", "millrace_policy_version"):
                found[name] = max(found[name], value)
            elif name != "millrace_swaps_total" or labels["ok"] == "true":
                found[name] += value
    series = {
        "running": "millrace_engine_running",
        "waiting": "millrace_engine_waiting",
        "kv_cache": "millrace_engine_kv_cache_usage",
        "preemptions": "millrace_engine_preemptions",
        "api_cpu_s": "process_cpu_seconds_total",
        "commits": "millrace_journal_commits",
        "commit_ms": "millrace_journal_commit_ms_total",
        "rate_limited": "millrace_rate_limited_total",
        "swaps": "millrace_swaps_total",
        "policy": "millrace_policy_version",
    }
    counted = ("rate_limited", "swaps")  # not there before the first
    figures = {name: found[one] for name, one in series.items() if one in known or name in counted}
    return figures | {"codes": dict(codes)}


def local_server(url: str) -> psutil.Process | None:
    """The process that listens at a loopback address, if it is this user's to look at."""
    where = urlsplit(url)
    if where.hostname not in ("127.0.0.1", "localhost", "::1"):
        return None
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            for connection in one.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr.port == (where.port or 80):
                    return one
    return None


def _by_role(root: psutil.Process) -> Iterator[tuple[psutil.Process, str]]:
    with contextlib.suppress(psutil.Error):
        yield root, "API"
        for child in root.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                command = " ".join(child.cmdline())
                yield child, "engine" if "EngineCore" in command else "sealer" if "sealer" in command else "other"


def _processor_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:  # it has ended
        return 0.0
    return float(times.user + times.system)


def _memory(process: psutil.Process) -> dict[str, int]:
    """Bytes of a process, of which pages that several share count once in all: all of them (``pss``), and without
    mapped files (``memory``), whose share falls and rises as other programs map the same libraries."""
    try:
        text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    except OSError:  # it has ended, or is another user's
        return {"pss": 0, "memory": 0}
    kib = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in text.splitlines()[1:])}
    return {"pss": kib["Pss"] * 1024, "memory": (kib["Pss"] - kib["Pss_File"]) * 1024}


def _sums(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    total: dict[str, float] = defaultdict(float)
    for role, value in pairs:
        total[role] += value
    return dict(total)
