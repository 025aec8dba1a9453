"""One timer for the many waits of a task."""

from __future__ import annotations

import asyncio

import pytest

from serve.time_limit import TimeLimit


async def test_a_wait_past_its_limit_raises_and_the_task_goes_on_to_its_next_waits() -> None:
    loop, limit = asyncio.get_running_loop(), TimeLimit()
    for _ in range(3):
        with limit.until(loop.time() + 0.1):
            await asyncio.sleep(0)
    with pytest.raises(TimeoutError), limit.until(loop.time() + 0.1):
        await asyncio.sleep(60)
    with limit.until(loop.time() + 60):
        await asyncio.sleep(0.02)
    limit.close()


async def test_the_timer_of_an_earlier_wait_ends_no_later_one_before_its_time() -> None:
    loop, limit = asyncio.get_running_loop(), TimeLimit()
    with limit.until(loop.time() + 0.01):
        await asyncio.sleep(0)
    await asyncio.sleep(0.03)  # the timer goes off while nobody waits
    with limit.until(loop.time() + 0.01):
        pass
    with limit.until(loop.time() + 60):
        await asyncio.sleep(0.03)  # and here while a wait has more time than the one it was set for
    limit.close()


async def test_a_limit_that_has_passed_ends_the_wait() -> None:
    limit = TimeLimit()
    with pytest.raises(TimeoutError), limit.until(asyncio.get_running_loop().time() - 1):
        await asyncio.sleep(60)
    limit.close()


async def test_a_cancelled_task_is_cancelled_and_not_timed_out() -> None:
    limit = TimeLimit()

    async def wait() -> None:
        with limit.until(asyncio.get_running_loop().time() + 60):
            await asyncio.sleep(60)

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    limit.close()
