"""The token bucket against a plain account of it, and what the limiter answers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.http import Problem
from serve.middleware.keyring import Principal
from serve.middleware.rate_limits import Limiter
from serve.middleware.token_buckets import Bucket

RATES = st.floats(0.01, 1000)
CAPACITIES = st.floats(1, 10_000)
STEPS = st.lists(st.tuples(st.floats(0, 100), st.floats(0, 12_000)), min_size=1, max_size=60)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def principal(requests: float | None = None, tokens: float | None = None, key: str = "k") -> Principal:
    return Principal("t", key, f"name of {key}", frozenset({"generate"}), requests, tokens)


@given(RATES, CAPACITIES, STEPS)
def test_a_bucket_never_pays_out_more_than_it_held_and_earned(
    rate: float, capacity: float, steps: list[tuple[float, float]]
) -> None:
    bucket, now, paid = Bucket(rate, capacity, 0.0), 0.0, 0.0
    for pause, amount in steps:
        now += pause
        if bucket.take(amount, now) == 0:
            paid += amount
        assert 0 <= bucket.level <= capacity
        assert paid <= (capacity + rate * now) * (1 + 1e-6)


@given(RATES, CAPACITIES, STEPS)
def test_a_refused_request_passes_after_exactly_the_time_that_it_was_told(
    rate: float, capacity: float, steps: list[tuple[float, float]]
) -> None:
    bucket, now = Bucket(rate, capacity, 0.0), 0.0
    for pause, amount in steps:
        now += pause
        wait = bucket.take(amount, now)
        if wait == float("inf"):
            assert amount > capacity
        elif wait > 0:
            too_soon = Bucket(rate, capacity, now)
            too_soon.level = bucket.level
            assert too_soon.take(amount, now + 0.99 * wait) > 0
            now += wait
            assert bucket.take(amount, now) == 0


@given(RATES, CAPACITIES, st.floats(0, 1), st.floats(0, 1), st.floats(0, 100))
def test_what_is_given_back_can_be_used_and_never_fills_a_bucket_beyond_its_capacity(
    rate: float, capacity: float, asked: float, unused: float, later: float
) -> None:
    bucket = Bucket(rate, capacity, 0.0)
    assert bucket.take(asked * capacity, 0.0) == 0
    bucket.give_back(unused * asked * capacity, later)
    expected = min(capacity, min(capacity, capacity * (1 - asked) + later * rate) + unused * asked * capacity)
    assert bucket.level == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_a_clock_that_goes_back_earns_nothing() -> None:
    bucket = Bucket(1.0, 10.0, 100.0)
    assert bucket.take(10, 100.0) == 0
    assert bucket.take(1, 50.0) == pytest.approx(1.0)
    assert bucket.take(1, 101.0) == 0


async def test_requests_over_the_limit_get_429_with_the_time_until_they_would_pass() -> None:
    clock, refused = Clock(), []
    limiter = Limiter(60, lambda limit, who: refused.append((limit, who.key)), clock)
    for _ in range(30):
        await limiter.take_request(principal(requests=30))
    with pytest.raises(Problem) as told:
        await limiter.take_request(principal(requests=30))
    problem = told.value
    assert (problem.status, problem.retry_after, problem.limit) == (429, pytest.approx(2.0), "requests")
    assert "requests_per_minute is 30 for name of k" in problem.detail
    assert refused == [("requests", "k")]
    await limiter.take_request(principal(requests=30, key="other"))
    clock.now += 2
    await limiter.take_request(principal(requests=30))


async def test_tokens_are_paid_for_when_asked_for_and_come_back_unused() -> None:
    clock = Clock()
    limiter = Limiter(60, clock=clock)
    who = principal(tokens=600)
    await limiter.take_tokens(who, 500)
    with pytest.raises(Problem, match="100 tokens are left, this takes 150") as told:
        await limiter.take_tokens(who, 150)
    assert told.value.retry_after == pytest.approx(5.0)
    limiter.give_back(who, 480)
    await limiter.take_tokens(who, 150)


async def test_a_request_that_could_never_pass_is_told_so_and_not_to_try_again() -> None:
    limiter = Limiter(60, clock=Clock())
    with pytest.raises(Problem, match=r"601 tokens, more than the 600 .* could never pass") as told:
        await limiter.take_tokens(principal(tokens=600), 601)
    assert (told.value.status, told.value.retry_after) == (400, None)
    await limiter.take_tokens(principal(tokens=600), 600)


async def test_a_rate_below_one_a_burst_still_lets_one_request_pass() -> None:
    clock = Clock()
    limiter = Limiter(1, clock=clock)
    await limiter.take_request(principal(requests=1))
    with pytest.raises(Problem) as told:
        await limiter.take_request(principal(requests=1))
    assert told.value.retry_after == pytest.approx(60)
    clock.now += 60
    await limiter.take_request(principal(requests=1))


async def test_without_limits_nothing_is_kept() -> None:
    limiter = Limiter(60)
    await limiter.take_request(principal())
    await limiter.take_tokens(principal(), 10**9)
    limiter.give_back(principal(), 10**9)
    assert len(limiter) == 0


async def test_a_limit_that_changes_holds_for_what_is_left() -> None:
    clock = Clock()
    limiter = Limiter(60, clock=clock)
    await limiter.take_tokens(principal(tokens=600), 100)
    await limiter.take_tokens(principal(tokens=60), 59)
    with pytest.raises(Problem, match=r"tokens_per_minute is 60 .* 1 tokens are left") as told:
        await limiter.take_tokens(principal(tokens=60), 2)
    assert told.value.retry_after == pytest.approx(1.0)


async def test_buckets_that_are_full_again_are_dropped() -> None:
    clock = Clock()
    limiter = Limiter(60, clock=clock)
    for number in range(1024):
        await limiter.take_request(principal(requests=60, key=str(number)))
    clock.now += 60
    busy = principal(requests=60, key="busy")
    await limiter.take_request(busy)
    assert len(limiter) == 1
    for _ in range(59):
        await limiter.take_request(busy)
    with pytest.raises(Problem):
        await limiter.take_request(busy)
