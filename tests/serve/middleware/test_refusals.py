"""Keys that are not good: slowed down by address, counted by reason, and on record in a bounded log."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from serve.http import Problem
from serve.middleware.refusals import Refusals
from serve.observability.audit import AuditLog
from tests.serve.middleware.test_request_context import Open, bearer, make, secrets

__all__ = ["secrets"]
WRONG = "mrk_none_" + "x" * 43


async def test_an_address_that_guesses_gets_429_and_a_good_key_from_it_is_let_in(
    tmp_path: Path, secrets: dict[str, str]
) -> None:
    from serve.config import LimitsConfig

    door = Open(make(tmp_path, limits=LimitsConfig(refused_per_minute=3)))
    answers = [await door.http.get("/policy", headers=bearer(WRONG)) for _ in range(5)]
    assert [answer.status_code for answer in answers] == [401, 401, 401, 429, 429]
    assert 1 <= int(answers[-1].headers["Retry-After"]) <= 21
    assert "3 a minute" in answers[-1].json()["detail"]
    assert (await door.http.get("/metrics")).status_code == 401  # no key is no guess
    good = await door.http.get("/metrics", headers=bearer(secrets["admin"]))
    assert good.status_code == 200
    assert 'millrace_auth_failures_total{reason="unknown"} 5.0' in good.text
    assert 'millrace_auth_failures_total{reason="missing"} 1.0' in good.text
    door.server.refusals.write()
    (entry,) = AuditLog(tmp_path / "audit.jsonl").entries()
    assert (entry.action, entry.origin, entry.subject["unknown"]) == ("auth.refused", "127.0.0.1", 5)
    assert "missing" not in entry.subject
    assert WRONG not in (tmp_path / "audit.jsonl").read_text()
    await door.close()


def test_each_address_has_its_own_bucket_and_an_ipv6_network_one() -> None:
    now = [0.0]
    refusals = Refusals(1, clock=lambda: now[0])
    for address in ("192.0.2.1", "192.0.2.2", "2001:db8::1", "2001:db8:0:1::1", "unknown"):
        refusals.add("unknown", address)
    for again in ("192.0.2.1", "2001:db8::2"):
        with pytest.raises(Problem) as refused:
            refusals.add("revoked", again)
        assert (refused.value.status, refused.value.retry_after) == (429, 60)
    refusals.add("expired", "192.0.2.1")
    now[0] = 60.0
    refusals.add("unknown", "192.0.2.1")


async def test_refusals_of_many_addresses_are_one_entry_of_bounded_size(tmp_path: Path) -> None:
    audit = AuditLog(tmp_path / "audit.jsonl")
    refusals = Refusals(1e9, audit)
    for number in range(100_000):
        refusals.add("unknown", f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}")
    writer = asyncio.create_task(refusals.record())
    while not (entries := audit.entries()):
        await asyncio.sleep(0.1)
    refusals.add("unknown", "10.0.0.1")  # waits for its turn
    (entry,) = entries
    assert entry.subject["unknown"] == 100_000
    assert len(entry.subject["addresses"]) == 10
    assert (tmp_path / "audit.jsonl").stat().st_size < 2000
    writer.cancel()
    await asyncio.gather(writer, return_exceptions=True)
    assert [one.subject["unknown"] for one in audit.entries()] == [100_000, 1]


def test_a_refusal_that_comes_while_others_are_put_on_record_is_in_this_entry_or_the_next(tmp_path: Path) -> None:
    audit = AuditLog(tmp_path / "audit.jsonl")
    refusals = Refusals(1e9, audit)

    class Raced(asyncio.Event):
        """Another refusal comes just before it is cleared."""

        def clear(self) -> None:
            refusals.add("unknown", "192.0.2.2")
            super().clear()

    refusals._any = Raced()
    refusals.add("unknown", "192.0.2.1")
    refusals.write()
    recorded = sum(entry.subject["unknown"] for entry in audit.entries())
    assert recorded == 2 or refusals._any.is_set()
