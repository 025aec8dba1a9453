from __future__ import annotations

import asyncio

import pytest
from feedback_rows import put, thumb

from feedback.config import JournalConfig
from feedback.journal import Journal, JournalBroken
from feedback.ledger import FeedbackLedger
from feedback.recovery import rows


def body(value: float = 1.0, feedback_id: str = "f1", source: str = "user"):
    return thumb("r1", value, feedback_id=feedback_id, source=source)


async def test_the_same_again_is_recorded_once_and_other_content_is_a_conflict(folder, journal):
    ledger = FeedbackLedger()
    assert await ledger.record(body(), journal) == "new"
    assert await ledger.record(body(), journal) == "same"
    assert await ledger.record(body(0.0), journal) == "conflict"
    assert await ledger.record(body(source="somebody-else"), journal) == "conflict"
    assert rows(folder, "feedback").num_rows == len(ledger) == 1


async def test_many_at_once_with_one_id_record_one_row(folder, journal):
    ledger = FeedbackLedger()
    verdicts = await asyncio.gather(*(ledger.record(body(float(i % 2)), journal) for i in range(20)))
    assert sorted(verdicts) == ["conflict"] * 10 + ["new"] + ["same"] * 9
    assert rows(folder, "feedback").num_rows == 1


async def test_it_knows_what_lake_and_journal_hold(folder, lake, journal):
    put(lake, "feedback", [body(feedback_id="sealed")])
    journal.append_sync("feedback", body(feedback_id="unsealed"))
    ledger = FeedbackLedger.load(lake, folder)
    assert len(ledger) == 2
    for known in ("sealed", "unsealed"):
        assert ledger.check(body(feedback_id=known)) == "same"
        assert ledger.check(body(0.0, feedback_id=known)) == "conflict"
    assert ledger.check(body(feedback_id="other")) == "new"


async def test_an_append_that_fails_leaves_the_id_free_and_the_waiting_ones_try_again(folder):
    ledger = FeedbackLedger()
    closed = Journal(folder, JournalConfig(), "replica-0")
    results = await asyncio.gather(*(ledger.record(body(), closed) for _ in range(3)), return_exceptions=True)
    assert all(isinstance(result, JournalBroken) for result in results)
    assert ledger.check(body()) == "new"
    closed.open()
    assert await ledger.record(body(), closed) == "new"
    closed.close()


async def test_a_caller_that_goes_away_does_not_block_the_id(folder, journal):
    ledger = FeedbackLedger()
    gone = asyncio.create_task(ledger.record(body(), journal))
    await asyncio.sleep(0)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    async with asyncio.timeout(10):
        assert await ledger.record(body(), journal) == "same"
    assert rows(folder, "feedback").num_rows == 1
