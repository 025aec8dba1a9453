"""What a load test found, from the users' account and the samples of the server: pure functions, times in seconds."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from typing import Any, Final

Rows = Sequence[dict[str, Any]]

SPARE: Final = 0.2
"""Of the limit on p95 and on the first token, what the users that a server holds leave unused."""
SETTLING_S: Final = 5.0
SETTLING_SHARE: Final = 0.2
WARM_UP: Final = 0.2
"""Share of the time after which memory is expected to have stopped growing."""
WINDOW: Final = 0.1
"""Share of the time of which a median is memory at the beginning, and at the end."""
FULL: Final = 0.9


@dataclass(frozen=True)
class Limits:
    """p95: of an answer, whole; first: 95th percentile to the first token of a stream; errors: share of requests;
    growth: of the server's memory after warm-up, judged in a soak alone."""

    p95: float
    first: float
    errors: float
    growth: float


@dataclass(frozen=True)
class Level:
    """A time with one number of users. Percentiles are None where there was no such request, or none was answered."""

    users: int
    start: float
    end: float
    requests: int
    errors: int
    rate: float
    p50: float | None
    p95: float | None
    p99: float | None
    first_p95: float | None

    @property
    def error_share(self) -> float:
        return self.errors / self.requests if self.requests else 0.0

    def broken(self, limits: Limits, spare: float = 0.0) -> list[str]:
        """What is over its limit, in words, with so large a part of the limits on times to be left unused."""
        found = []
        for name, value, limit in (("p95", self.p95, limits.p95), ("first token's p95", self.first_p95, limits.first)):
            if value is not None and value > limit * (1 - spare):
                found.append(f"{name} {value:.2f} s, over {limit * (1 - spare):.2f} s")
        if self.error_share > limits.errors:
            found.append(f"{self.errors} of {self.requests} requests failed, over {limits.errors:.2%}")
        if self.p95 is None:
            found.append("no request was answered")
        return found


@dataclass(frozen=True)
class Growth:
    """Memory in bytes at the end of warm-up and at the end, in all and by process."""

    first: float
    last: float
    by_process: dict[str, tuple[float, float]]

    @property
    def share(self) -> float:
        return self.last / self.first - 1 if self.first else 0.0


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The smallest of them that so many percent don't exceed; None if there are none."""
    return sorted(values)[math.ceil(len(values) * percent / 100) - 1] if values else None


def levels(account: Rows, settling_s: float = SETTLING_S) -> list[Level]:
    """The account by levels of users, in order of time: errors of all of it, times without what it takes to settle,
    at most SETTLING_SHARE of the level."""
    by_start = sorted(account, key=lambda row: row["at"] - row["ms"] / 1e3)
    groups = [list(rows) for _, rows in groupby(by_start, key=lambda row: row["users"])]
    starts = [rows[0]["at"] - rows[0]["ms"] / 1e3 for rows in groups]
    ends = [*starts[1:], max((row["at"] for row in account), default=0.0)][: len(groups)]
    return [_level(rows, start, end, settling_s) for rows, start, end in zip(groups, starts, ends, strict=True)]


def _level(rows: Rows, start: float, end: float, settling_s: float) -> Level:
    settled = start + min(settling_s, SETTLING_SHARE * (end - start))
    kept = [row for row in rows if row["at"] - row["ms"] / 1e3 >= settled] or rows
    answers = [row for row in kept if row["kind"] == "generate" and row["ok"]]
    times = [row["ms"] / 1e3 for row in answers]
    return Level(
        users=rows[0]["users"],
        start=start,
        end=end,
        requests=len(rows),
        errors=sum(not row["ok"] for row in rows),
        rate=sum(settled <= row["at"] < end for row in rows if row["ok"]) / max(end - settled, 1e-3),
        p50=percentile(times, 50),
        p95=percentile(times, 95),
        p99=percentile(times, 99),
        first_p95=percentile([row["first_ms"] / 1e3 for row in answers if "first_ms" in row], 95),
    )


def capacity(found: Sequence[Level], limits: Limits) -> tuple[int, Level | None]:
    """The most users at which all limits are kept with SPARE left, as at every fewer; and the least at which one is
    not kept, None if all were. Levels of as many users count by the worst of them."""
    holds, breaks, spare = 0, None, True
    for _, same in groupby(sorted(found, key=lambda level: level.users), key=lambda level: level.users):
        each = list(same)
        if over := [level for level in each if level.broken(limits)]:
            breaks = over[0]
            break
        spare = spare and not any(level.broken(limits, SPARE) for level in each)
        holds = each[0].users if spare else holds
    return holds, breaks


def growth(samples: Rows, kind: str = "memory") -> Growth | None:
    """Of the server's memory, or its ``pss``, after warm-up; None where it is not known, or of too few samples."""
    known = [sample for sample in samples if kind in sample]
    if len(known) < 5:
        return None
    start, seconds = known[0]["at"], known[-1]["at"] - known[0]["at"]

    def median(low: float, high: float) -> dict[str, float]:
        some = [s[kind] for s in known if low <= (s["at"] - start) / seconds <= high]
        some = some or [known[round(low * (len(known) - 1))][kind]]
        roles = {role for one in some for role in one}
        return {role: statistics.median(one.get(role, 0) for one in some) for role in sorted(roles)}

    first, last = median(WARM_UP, WARM_UP + WINDOW), median(1 - WINDOW, 1)
    both = {role: (first.get(role, 0.0), last.get(role, 0.0)) for role in sorted(first.keys() | last.keys())}
    return Growth(sum(first.values()), sum(last.values()), both)


def rates(samples: Rows, key: str, role: str | None = None) -> list[tuple[float, float]]:
    """(time, increase per second) of a counter of the samples, or of one role in it."""
    points = [
        (sample["at"], sample[key] if role is None else sample[key].get(role, 0.0))
        for sample in samples
        if key in sample
    ]
    return [(b[0], max(0.0, b[1] - a[1]) / (b[0] - a[0])) for a, b in pairwise(points) if b[0] > a[0]]


def limited_by(samples: Rows, level: Level, *, cores: int) -> list[str]:
    """What was used up while a level lasted, in words, what tells most first; without samples, that it isn't known."""
    during = [sample for sample in samples if level.start <= sample["at"] <= level.end]
    known = [sample for sample in during if "codes" in sample]
    if not known:
        return ["not known: /metrics could not be read"]

    def mean(key: str) -> float:
        return statistics.fmean(values) if (values := [s[key] for s in known if key in s]) else 0.0

    def increase(key: str) -> float:
        return known[-1].get(key, 0.0) - known[0].get(key, 0.0)

    def busy(key: str, role: str | None = None) -> float:
        each = rates(during, key, role)
        return statistics.fmean(value for _, value in each) if each else 0.0

    found = []
    users = busy("users_cpu_s")
    if users > FULL:
        found.append(f"the load generator itself: it used {users:.0%} of a core, so the server holds more than this")
    refused = {
        code: count
        for code in ("429", "503")
        if (count := known[-1]["codes"].get(code, 0) - known[0]["codes"].get(code, 0)) > 0
    }
    if refused.get("503"):
        found.append(f"admission: {refused['503']:.0f} requests were refused with 503")
    if refused.get("429") or increase("rate_limited"):
        found.append("a key's rate limit: requests got 429")
    waiting, running, cache = mean("waiting"), mean("running"), mean("kv_cache")
    if (preempted := increase("preemptions")) > 0 or (cache > FULL and waiting >= 1):
        found.append(f"the KV cache: {cache:.0%} in use, {preempted:.0f} responses set back for want of it")
    elif waiting >= 1:
        found.append(f"the engine's batch: {running:.0f} responses ran and {waiting:.0f} waited (max_num_seqs)")
    api, engine = busy("api_cpu_s"), busy("cpu_s", "engine")
    if api > FULL:
        found.append(f"the API process: it used {api:.0%} of a core, and has no more than about one")
    commits = increase("commits")
    if commits and (commit := increase("commit_ms") / commits) > 100:
        found.append(f"the disk: a commit of the journal took {commit:.0f} ms")
    machine = [sample["machine_busy"] for sample in during if "machine_busy" in sample]
    used = statistics.fmean(machine) if machine else 0.0
    if used > FULL:
        other = max(0.0, used * cores - sum(busy("cpu_s", role) for role in _roles(during)) - users)
        whose = "by what else runs here, without which it may hold more" if other > cores / 2 else "by the load test"
        found.append(
            f"the machine's processors: {used:.0%} of {cores} cores in use, most of that {whose} (cores: {engine:.2f} "
            f"the engine, {api:.2f} the API process, {users:.2f} the users, {other:.2f} what else runs)"
        )
    elif engine > FULL:
        found.append(f"the engine: it used {engine:.2f} cores, and nothing waited")
    return found or [
        f"nothing that can be seen: {running:.0f} responses ran, {waiting:.0f} waited, the KV cache was "
        f"{cache:.0%} full, the API process used {api:.0%} of a core"
    ]


def _roles(samples: Rows) -> set[str]:
    return {role for sample in samples for role in sample.get("cpu_s", ())}


def swaps(samples: Rows) -> list[tuple[float, int]]:
    """When another policy began to serve, and which, as the samples saw it."""
    policies = [(sample["at"], int(sample["policy"])) for sample in samples if "policy" in sample]
    return [after for before, after in pairwise(policies) if before[1] != after[1]]


def summary(account: Rows, samples: Rows, shape: str, limits: Limits, *, hold: int, cores: int) -> dict[str, Any]:
    """All of it. ``hold``: users that a ramp must show; other shapes must keep the limits at all of their levels."""
    found = levels(account, math.inf if shape == "soak" else SETTLING_S)
    holds, breaks = capacity(found, limits)
    problems = [f"{level.users} users: {why}" for level in found for why in level.broken(limits)]
    grown = growth(samples)
    if shape == "ramp":
        least = hold or min((level.users for level in found), default=1)
        problems = [] if holds >= least else [f"it holds {holds} users, fewer than {least}", *problems]
    if shape == "soak" and grown and grown.share > limits.growth:
        problems.append(f"the server's memory grew by {grown.share:.1%} after warm-up, over {limits.growth:.1%}")
    if not account:
        problems = ["no request was sent"]
    answers = [row for row in account if row["kind"] == "generate" and row["ok"]]
    errors = Counter(f"{row['route']}: {row['error']}" for row in account if not row["ok"])
    at = breaks or max(found, key=lambda level: level.users, default=None)
    return {
        "passed": not problems,
        "problems": problems,
        "holds_users": holds,
        "breaks_at_users": breaks.users if breaks else None,
        "most_users": max((level.users for level in found), default=0),
        "limited_by": limited_by(samples, at, cores=cores) if at else [],
        "p95_s": percentile([row["ms"] / 1e3 for row in answers], 95),
        "first_token_p95_s": percentile([row["first_ms"] / 1e3 for row in answers if "first_ms" in row], 95),
        "requests": len(account),
        "failed": sum(errors.values()),
        "errors": dict(errors.most_common(20)),
        "memory_growth": grown.share if grown else None,
        "pss_growth": pss.share if (pss := growth(samples, "pss")) else None,
        "memory_by_process": grown.by_process if grown else None,
        "swaps": [{"at": when, "policy": policy} for when, policy in swaps(samples)],
        "levels": [asdict(level) for level in found],
        "limits": asdict(limits),
        "routes": [
            {
                "route": route,
                "requests": len(rows),
                "failed": sum(not row["ok"] for row in rows),
                "p50_s": percentile([row["ms"] / 1e3 for row in rows if row["ok"]], 50),
                "p95_s": percentile([row["ms"] / 1e3 for row in rows if row["ok"]], 95),
                "first_p95_s": percentile([row["first_ms"] / 1e3 for row in rows if "first_ms" in row], 95),
            }
            for route, rows in (
                (route, [row for row in account if row["route"] == route])
                for route in sorted({row["route"] for row in account})
            )
        ],
    }
