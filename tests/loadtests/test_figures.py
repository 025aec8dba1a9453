"""What a load test makes of its users' account and of its samples, worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from loadtests.capacity import figures
from loadtests.capacity.figures import Level, Limits
from loadtests.capacity.observe import of_metrics
from loadtests.capacity.page import page

LIMITS = Limits(p95=2.0, first=1.0, errors=0.01, growth=0.02)


def row(at: float, *, users: int, seconds: float = 0.5, ok: bool = True, **more: Any) -> dict[str, Any]:
    """A request that ended at ``at``."""
    return {"at": at, "ms": seconds * 1e3, "users": users, "kind": "generate", "route": "/generate", "ok": ok, **more}


def level(users: int, p95: float | None, *, errors: int = 0, first: float | None = None) -> Level:
    return Level(users, 0, 10, 100, errors, 10, p95, p95, p95, first)


def test_times_leave_out_the_first_fifth_of_a_level_and_errors_do_not() -> None:
    account = [row(at + 0.5, users=4, seconds=9.0 if at < 2 else 0.5) for at in range(10)]
    account += [row(at + 0.5, users=8, seconds=0.5, ok=at != 10, error="503") for at in range(10, 20)]
    for late in account[:2]:
        late["at"] += 8.5
    few, many = figures.levels(account)
    assert (few.users, few.requests, few.errors, few.p95) == (4, 10, 0, 0.5)
    assert (many.users, many.requests, many.errors) == (8, 10, 1)
    assert many.error_share == pytest.approx(1 / 10)


def test_percentiles_are_the_smallest_that_so_many_do_not_exceed() -> None:
    values = [float(n) for n in range(1, 101)]
    assert [figures.percentile(values[::-1], percent) for percent in (50, 95, 100)] == [50.0, 95.0, 100.0]
    assert figures.percentile([3.0], 95) == 3.0
    assert figures.percentile([], 95) is None


def test_a_server_holds_the_most_users_that_leave_a_fifth_of_the_limit_and_breaks_at_the_first_past_it() -> None:
    found = [level(8, 0.5), level(16, 1.6), level(24, 1.7), level(32, 2.1), level(40, 0.5)]
    holds, breaks = figures.capacity(found, LIMITS)
    assert holds == 16
    assert breaks is not None
    assert breaks.users == 32


def test_errors_the_first_token_and_silence_break_it_too() -> None:
    for broken in (level(8, 0.5, errors=2), level(8, 0.5, first=1.5), level(8, None)):
        assert figures.capacity([level(4, 0.5), broken], LIMITS) == (4, broken)
    assert figures.capacity([level(8, 0.5, errors=1)], LIMITS) == (8, None)


def test_the_worst_of_two_levels_with_as_many_users_counts() -> None:
    before, after = level(8, 0.5), level(8, 1.9)
    assert figures.capacity([before, level(32, 1.0), after], LIMITS)[0] == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"waiting": 5.0, "running": 16.0}, "the engine's batch: 16 responses ran and 5 waited"),
        ({"waiting": 5.0, "kv_cache": 0.97}, "the KV cache: 97% in use"),
        ({"api_cpu_s": 0.98}, "the API process: it used 98% of a core"),
        ({"users_cpu_s": 0.95}, "the load generator itself"),
        ({"codes": {"200": 1.0, "503": 3.0}}, "admission: 27 requests were refused with 503"),
        ({"rate_limited": 1.0}, "a key's rate limit"),
        ({"commits": 1.0, "commit_ms": 200.0}, "the disk: a commit of the journal took 200 ms"),
        (
            {"machine_busy": 0.99},
            "the machine's processors: 99% of 4 cores in use, most of that by what else runs here",
        ),
        ({}, "nothing that can be seen: 2 responses ran"),
    ],
)
def test_what_was_used_up_is_said_first(change: dict[str, Any], words: str) -> None:
    counters = {"api_cpu_s": 0.1, "users_cpu_s": 0.1, "commits": 1.0, "commit_ms": 5.0, "rate_limited": 0.0}
    gauges = {"waiting": 0.0, "running": 2.0, "kv_cache": 0.1, "preemptions": 0.0, "machine_busy": 0.5}
    rates = counters | {name: value for name, value in change.items() if name in counters}
    codes = change.get("codes", {"200": 1.0})
    samples = [
        {
            "at": float(at),
            **gauges,
            **{name: value for name, value in change.items() if name in gauges},
            **{name: value * at for name, value in rates.items()},
            "codes": {code: count * at for code, count in codes.items()},
            "cpu_s": {"engine": 0.2 * at, "API": rates["api_cpu_s"] * at},
        }
        for at in range(10)
    ]
    assert figures.limited_by(samples, level(8, 3.0), cores=4)[0].startswith(words)


def test_without_metrics_what_limited_it_is_not_guessed() -> None:
    assert figures.limited_by([{"at": 1.0}], level(8, 3.0), cores=4) == ["not known: /metrics could not be read"]


def test_memory_is_compared_after_warm_up_and_by_process() -> None:
    def memory(at: float) -> dict[str, float]:
        return {"API": 100.0 + at, "engine": min(900.0, 500.0 + 40 * at)}

    grown = figures.growth([{"at": 0.0 + at, "memory": memory(at)} for at in range(101)])
    assert grown is not None
    assert grown.by_process == {"API": (125.0, 195.0), "engine": (900.0, 900.0)}
    assert grown.share == pytest.approx(70 / 1025)


def test_a_soak_whose_server_grows_fails_and_a_steady_run_does_not() -> None:
    samples = [{"at": 0.0 + at, "memory": {"API": 100.0 + at}} for at in range(101)]
    account = [row(0.5 + at, users=8) for at in range(100)]

    def found(shape: str) -> dict[str, Any]:
        return figures.summary(account, samples, shape, LIMITS, hold=0, cores=2)

    assert found("steady")["passed"]
    assert found("soak")["problems"] == ["the server's memory grew by 56.0% after warm-up, over 2.0%"]
    assert not figures.summary([], samples, "steady", LIMITS, hold=0, cores=2)["passed"]


def test_a_ramp_passes_though_it_breaks_if_it_held_as_many_as_it_must() -> None:
    account = [row(at + 0.5, users=8 if at < 50 else 16, seconds=0.5 if at < 50 else 3.0) for at in range(100)]
    for hold, passed in ((0, True), (8, True), (16, False)):
        assert figures.summary(account, [], "ramp", LIMITS, hold=hold, cores=2)["passed"] is passed
    assert not figures.summary(account, [], "steady", LIMITS, hold=0, cores=2)["passed"]


def test_metrics_of_a_fleet_are_added_up_but_for_the_cache_and_the_policy() -> None:
    text = """
# TYPE millrace_requests counter
millrace_requests_total{code="200",route="/generate",replica="a"} 3
millrace_requests_total{code="200",route="/generate",replica="b"} 4
millrace_requests_total{code="200",route="/metrics",replica="b"} 9
# TYPE millrace_engine_running gauge
millrace_engine_running{replica="a"} 2
millrace_engine_running{replica="b"} 5
# TYPE millrace_engine_kv_cache_usage gauge
millrace_engine_kv_cache_usage{replica="a"} 0.5
millrace_engine_kv_cache_usage{replica="b"} 0.25
"""
    expected = {"running": 7.0, "kv_cache": 0.5, "rate_limited": 0.0, "swaps": 0.0, "codes": {"200": 7.0}}
    assert of_metrics(text) == expected


def test_a_swap_is_marked_where_another_policy_first_served() -> None:
    samples: list[dict[str, Any]] = [{"at": 1.0}, {"at": 2.0, "policy": 1.0}, {"at": 3.0}, {"at": 4.0, "policy": 2.0}]
    samples += [{"at": 5.0, "policy": 2.0}, {"at": 6.0, "policy": 1.0}]
    assert figures.swaps(samples) == [(4.0, 2), (6.0, 1)]
    account = [row(at + 0.5, users=8) for at in range(8)]
    found = figures.summary(account, samples, "steady", LIMITS, hold=0, cores=2) | {"when": "today"}
    assert page("swaps", found, account, samples).count(" policy 2</text>") >= 2


def test_what_an_error_says_is_text_on_the_page() -> None:
    account = [row(at + 0.5, users=8, ok=at > 5, error="503 <script>alert(1)</script>") for at in range(20)]
    found = figures.summary(account, [], "steady", LIMITS, hold=0, cores=2) | {"when": "today"}
    shown = page("a <b>", found, account, [])
    assert "<script" not in shown
    assert "503 &lt;script&gt;" in shown
