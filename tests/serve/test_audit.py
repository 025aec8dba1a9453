"""The audit log: nothing is done off the record, and what was changed in it shows."""

from __future__ import annotations

import stat
import threading
from pathlib import Path

import pytest

from serve.observability.audit import AuditLog, AuditLogError


@pytest.fixture
def log(tmp_path: Path) -> AuditLog:
    return AuditLog(tmp_path / "audit.jsonl")


def test_an_action_is_on_record_before_it_is_taken_and_what_it_came_to_behind_it(log: AuditLog) -> None:
    with log.entry("keys.create", {"name": "app"}, who="ann@host", origin="a command") as outcome:
        [begun] = log.entries()
        outcome.result = {"key": "k1"}
    assert (begun.action, begun.subject, begun.outcome) == ("keys.create", {"name": "app"}, None)
    with pytest.raises(ZeroDivisionError), log.entry("policy.promote", {"version": 3}, who="bob", origin="::1"):
        raise ZeroDivisionError("no such policy")
    with log.entry("console.promote", {"why": "x" * 2000, "who": "ann"}, who="eve", origin="10.0.0.1") as outcome:
        outcome.refused("policy 3 has no verdict")
    done, failed, refused = log.entries()
    assert (done.outcome, done.result) == ("done", {"key": "k1"})
    assert failed.outcome == "failed: ZeroDivisionError: no such policy"
    assert (refused.outcome, len(refused.subject["why"])) == ("refused: policy 3 has no verdict", 500)


def test_what_can_not_be_put_on_record_is_not_done(log: AuditLog) -> None:
    log.path.mkdir()
    done = []
    with pytest.raises(AuditLogError, match="nothing is done off the record"), log.entry("a", who="b", origin="c"):
        done.append(1)
    assert not done


@pytest.mark.parametrize("damage", ["changed", "taken out", "put in"])
def test_a_line_that_is_not_as_it_was_written_is_named(log: AuditLog, damage: str) -> None:
    for who in ("ann", "eve", "bob"):
        with log.entry("keys.revoke", who=who, origin="a command"):
            pass
    lines = log.path.read_bytes().splitlines(keepends=True)
    if damage == "changed":
        lines[2] = lines[2].replace(b'"eve"', b'"bob"')
    elif damage == "taken out":
        del lines[2:4]
    else:
        lines.insert(2, lines[0])
    log.path.write_bytes(b"".join(lines))
    number = 4 if damage == "changed" else 3
    with pytest.raises(AuditLogError, match=f"line {number}, is not as it was written"):
        log.entries()


def test_a_line_that_a_crash_tore_is_taken_away_by_the_next(log: AuditLog) -> None:
    with log.entry("keys.revoke", who="ann", origin="a command"):
        pass
    with log.path.open("ab") as file:
        file.write(b'{"at": "2026-')
    assert len(log.entries()) == 1
    with log.entry("keys.revoke", who="bob", origin="a command"):
        pass
    assert [entry.who for entry in log.entries()] == ["ann", "bob"]


def test_a_log_of_any_length_is_added_to_without_reading_it_whole(log: AuditLog) -> None:
    with log.entry("keys.revoke", who="ann", origin="a command"):
        pass
    lines = log.path.read_bytes()
    with log.path.open("wb") as file:
        file.seek(1 << 40)  # a hole: no memory holds so much
        file.write(b"\n" + lines)
    with log.entry("keys.revoke", {"why": "x" * 400}, who="bob", origin="a command"):
        pass
    with log.path.open("rb") as file:
        file.seek((1 << 40) + 1)
        log.path.with_name("end").write_bytes(file.read())
    assert [entry.who for entry in AuditLog(log.path.with_name("end")).entries()] == ["ann", "bob"]


def test_lines_that_are_longer_than_what_is_read_at_once_are_found(log: AuditLog) -> None:
    for number in range(3):
        with log.entry("console.create_key", {"n" * 100_000: number}, who="ann", origin="::1"):
            pass
    assert len(log.entries()) == 3


def test_only_its_user_reads_the_log_or_holds_its_lock(log: AuditLog) -> None:
    log.path.touch(0o644)
    with log.entry("keys.revoke", who="ann", origin="a command"):
        pass
    files = (log.path, log.path.with_name("audit.jsonl.lock"))
    assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o600, 0o600]


def test_what_was_done_is_handed_on_though_its_outcome_can_not_be_put_on_record(
    log: AuditLog, caplog: pytest.LogCaptureFixture
) -> None:
    def act(divisor: int) -> float:
        with log.entry("keys.create", who="ann", origin="a command"):
            log.path.unlink()
            log.path.mkdir()
            return 1 / divisor

    assert act(1) == 1
    log.path.rmdir()
    with pytest.raises(ZeroDivisionError):
        act(0)
    assert [record.message.partition(";")[0] for record in caplog.records] == [
        "keys.create: done",
        "keys.create: failed: ZeroDivisionError: division by zero",
    ]


def test_many_at_once_are_all_on_record(log: AuditLog) -> None:
    def act(number: int) -> None:
        with AuditLog(log.path).entry("a", who=str(number), origin="here"):
            pass

    threads = [threading.Thread(target=act, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {entry.who for entry in log.entries()} == {str(number) for number in range(8)}
    assert all(entry.outcome == "done" for entry in log.entries())


def test_a_head_that_was_kept_tells_a_log_that_was_cut_or_written_anew(log: AuditLog) -> None:
    start = log.head()
    for who in ("ann", "bob"):
        with log.entry("keys.revoke", who=who, origin="a command"):
            pass
    lines, sha256 = kept = log.head()
    assert lines == 4
    with log.entry("keys.revoke", who="cy", origin="a command"):
        pass
    assert log.has_head(*kept)
    assert log.has_head(*start)
    whole = log.path.read_bytes().splitlines(keepends=True)
    log.path.write_bytes(b"".join(whole[:2]))  # which is a sound log
    assert [entry.who for entry in log.entries()] == ["ann"]
    assert not log.has_head(*kept)
    for who in ("eve", "mal"):
        with log.entry("keys.revoke", who=who, origin="a command"):
            pass
    assert not log.has_head(lines, sha256)
