"""The ledger's file: chain, torn lines, changed lines, two writers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evaluation.decisions.ledger import EvaluationBusy, Ledger, LedgerDamaged, LedgerError, canonical
from tests.evaluation.decisions.worlds import rewrite
from tests.paths import ROOT


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "decisions")


def filled(ledger: Ledger, n: int = 3) -> Ledger:
    for i in range(n):
        ledger.append("rollback", {"version": i, "x": 0.1 + i}, who="me")
    return ledger


def test_an_entry_reads_back_as_it_was_added_by_another_reader_too(ledger: Ledger) -> None:
    assert ledger.entries() == []
    added = ledger.append("rollback", {"a": 0.1, "b": None, "ü": [1]}, who="me@here")
    assert (added.number, added.who, added.body) == (1, "me@here", {"a": 0.1, "b": None, "ü": [1]})
    assert Ledger(ledger.folder).entries() == ledger.entries() == [added]


def test_a_reader_sees_what_another_has_added_since_without_reading_the_rest_again(ledger: Ledger) -> None:
    filled(ledger)
    reader = Ledger(ledger.folder)
    first = reader.entries()
    filled(ledger, 2)
    now = reader.entries()
    assert [entry.number for entry in now] == [1, 2, 3, 4, 5]
    assert all(a is b for a, b in zip(first, now[:3], strict=True))


def test_a_reader_that_stays_gets_each_entry_once_and_checks_the_next_against_what_it_no_longer_holds(
    ledger: Ledger,
) -> None:
    filled(ledger)
    reader = Ledger(ledger.folder)
    assert reader.unread() == ledger.entries()
    assert reader.unread() == []
    filled(ledger, 2)
    assert reader.unread() == ledger.entries()[3:]
    assert all(not entry.body for entry in reader._entries)
    last = json.loads(ledger.file.read_bytes().splitlines()[-1])
    with ledger.file.open("ab") as file:
        file.write(canonical(last | {"number": 6}) + b"\n")
    for _ in range(2):
        with pytest.raises(LedgerDamaged, match="line 6"):
            reader.unread()


@pytest.mark.parametrize("line", [1, 2, 3])
def test_a_changed_line_is_named(ledger: Ledger, line: int) -> None:
    filled(ledger)
    lines = ledger.file.read_text().splitlines(keepends=True)
    lines[line - 1] = lines[line - 1].replace(f'"version":{line - 1}', '"version":9')
    ledger.file.write_text("".join(lines))
    with pytest.raises(LedgerDamaged, match=rf"decisions\.jsonl, line {line} was changed"):
        Ledger(ledger.folder).entries()


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda lines: lines[1:], 1),
        (lambda lines: [lines[0], *lines[2:]], 2),
        (lambda lines: [lines[1], lines[0], lines[2]], 1),
        (lambda lines: [lines[0], "garbage\n", *lines[1:]], 2),
        (lambda lines: [lines[0], lines[0], *lines[1:]], 2),
    ],
)
def test_a_line_that_was_removed_moved_or_put_in_is_named(ledger: Ledger, change: object, line: int) -> None:
    filled(ledger)
    ledger.file.write_text("".join(change(ledger.file.read_text().splitlines(keepends=True))))  # type: ignore[operator]
    with pytest.raises(LedgerDamaged, match=f"line {line} "):
        Ledger(ledger.folder).entries()


def test_a_line_that_was_changed_with_its_hash_breaks_the_chain_behind_it(ledger: Ledger) -> None:
    filled(ledger)
    entry = Ledger(ledger.folder).entries()[1]
    forged = entry.model_copy(update={"body": {"version": 7}})
    forged = forged.model_copy(update={"sha256": forged.digest()})
    lines = ledger.file.read_text().splitlines(keepends=True)
    lines[1] = json.dumps(forged.model_dump()) + "\n"
    ledger.file.write_text("".join(lines))
    with pytest.raises(LedgerDamaged, match="line 3 does not follow the one before it"):
        Ledger(ledger.folder).entries()


def test_a_ledger_that_became_shorter_is_seen_by_who_has_read_it(ledger: Ledger) -> None:
    filled(ledger)
    ledger.file.write_text("".join(ledger.file.read_text().splitlines(keepends=True)[:2]))
    with pytest.raises(LedgerDamaged, match="has become shorter"):
        ledger.entries()
    ledger.file.unlink()
    with pytest.raises(LedgerDamaged, match="was removed"):
        ledger.entries()


def test_every_torn_last_line_is_passed_over_and_cut_by_the_next_entry(ledger: Ledger) -> None:
    filled(ledger, 1)
    head = (ledger.folder / "head.json").read_bytes()
    filled(ledger, 1)
    (ledger.folder / "head.json").write_bytes(head)  # it is written behind the whole line
    whole = ledger.file.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(first, len(whole)):
        ledger.file.write_bytes(whole[:cut])
        reader = Ledger(ledger.folder)
        assert [entry.number for entry in reader.entries()] == [1]
    added = reader.append("rollback", {"again": 1}, who="me")
    assert added.number == 2
    assert [entry.body for entry in Ledger(ledger.folder).entries()] == [{"version": 0, "x": 0.1}, {"again": 1}]


def test_a_writer_that_is_killed_leaves_a_ledger_that_reads_and_goes_on(ledger: Ledger) -> None:
    script = (
        "import sys; from pathlib import Path; from evaluation.decisions.ledger import Ledger\n"
        "ledger = Ledger(Path(sys.argv[1]))\n"
        "while True:\n"
        "    print(ledger.append('rollback', {'x': 'y' * 2000}, who='me').number, flush=True)\n"
    )
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(ledger.folder)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert process.stdout is not None
        acknowledged = [int(process.stdout.readline()) for _ in range(5)]
        process.send_signal(signal.SIGKILL)
        acknowledged += [int(line) for line in process.stdout.read().splitlines() if line]
        process.wait()
        numbers = [entry.number for entry in Ledger(ledger.folder).entries()]
        assert numbers == list(range(1, len(numbers) + 1))
        assert len(numbers) >= acknowledged[-1]


def test_evidence_is_kept_by_its_hash_and_a_change_is_named(ledger: Ledger) -> None:
    name = ledger.keep({"scores": [0.1, 1 / 3]})
    assert ledger.evidence(name) == {"scores": [0.1, 1 / 3]}
    assert ledger.keep({"scores": [0.1, 1 / 3]}) == name
    path = ledger.folder / "evidence" / name
    path.write_bytes(path.read_bytes().replace(b"0.1", b"0.9"))
    with pytest.raises(LedgerDamaged, match=f"{name} was changed"):
        ledger.evidence(name)
    path.unlink()
    with pytest.raises(LedgerDamaged, match=f"{name} can't be read"):
        ledger.evidence(name)


def test_an_entry_that_must_not_follow_what_another_added_is_not_added(ledger: Ledger) -> None:
    filled(Ledger(ledger.folder))
    with pytest.raises(LedgerError, match="3 are there"):
        ledger.append("rollback", {}, who="me", unless=lambda entries: f"{len(entries)} are there")
    assert len(ledger.entries()) == 3


def test_a_number_that_is_not_finite_is_no_entry(ledger: Ledger) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        ledger.append("rollback", {"x": float("nan")}, who="me")
    assert ledger.entries() == []


def test_two_evaluations_never_run_at_once(ledger: Ledger) -> None:
    started = time.monotonic()
    with ledger.evaluating(), pytest.raises(EvaluationBusy, match="try again later"), ledger.evaluating():
        pass
    assert time.monotonic() - started < 10
    with ledger.evaluating():
        pass


def test_an_evaluation_that_is_killed_keeps_no_other_from_running(ledger: Ledger) -> None:
    script = (
        "import sys, time; from pathlib import Path; from evaluation.decisions.ledger import Ledger\n"
        "with Ledger(Path(sys.argv[1])).evaluating():\n"
        "    print('at work', flush=True); time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script, str(ledger.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "at work\n"
        with pytest.raises(EvaluationBusy), ledger.evaluating():
            pass
        process.kill()
    with ledger.evaluating():
        pass


def test_an_end_that_was_cut_off_is_found_by_the_head_and_a_head_that_was_removed_is_missed(ledger: Ledger) -> None:
    filled(ledger)
    lines = ledger.file.read_bytes().splitlines(keepends=True)
    ledger.file.write_bytes(b"".join(lines[:2]))
    with pytest.raises(LedgerDamaged, match=r"has 2 lines, and head.json beside it knows 3: its last lines were"):
        Ledger(ledger.folder).entries()
    (ledger.folder / "head.json").unlink()
    with pytest.raises(LedgerDamaged, match=r"head.json was removed, which says where \S+decisions.jsonl ends"):
        Ledger(ledger.folder).entries()
    (ledger.folder / "head.json").write_text("{}")
    with pytest.raises(LedgerDamaged, match=r"head.json is no head of a ledger"):
        Ledger(ledger.folder).entries()


def test_a_ledger_that_was_removed_with_its_head_left_is_found(ledger: Ledger) -> None:
    filled(ledger, 1)
    ledger.file.unlink()
    with pytest.raises(LedgerDamaged, match=r"decisions.jsonl was removed"):
        Ledger(ledger.folder).entries()


def test_a_ledger_that_was_rewritten_without_its_head_is_found(ledger: Ledger) -> None:
    filled(ledger)
    head = (ledger.folder / "head.json").read_bytes()
    rewrite(ledger, lambda entries: entries[0]["body"].update(version=9))
    assert Ledger(ledger.folder).entries()[0].body["version"] == 9, "with the head rewritten it is consistent"
    (ledger.folder / "head.json").write_bytes(head)
    with pytest.raises(LedgerDamaged, match=r"line 3 is not the one that head.json knows: it was rewritten"):
        Ledger(ledger.folder).entries()


@pytest.mark.parametrize("n", [1, 2])
def test_a_writer_that_was_killed_before_the_head_leaves_a_ledger_that_reads_and_the_next_entry_mends_it(
    ledger: Ledger, n: int
) -> None:
    head = ledger.folder / "head.json"
    filled(ledger, n - 1)
    before = head.read_bytes() if head.exists() else None
    filled(ledger, 1)
    head.unlink() if before is None else head.write_bytes(before)
    assert len(Ledger(ledger.folder).entries()) == n
    Ledger(ledger.folder).append("rollback", {}, who="me")
    assert json.loads(head.read_bytes())["number"] == n + 1


KEY = bytes(range(32))


@pytest.mark.parametrize(
    "change",
    [
        lambda entries: entries[1]["body"].update(version=9),
        lambda entries: entries.pop(),
        lambda entries: [entry.update(mac=None) for entry in entries],
    ],
)
def test_with_a_key_nothing_that_was_rewritten_without_it_is_taken(
    tmp_path: Path, change: Callable[[list[dict[str, Any]]], None]
) -> None:
    ledger = filled(Ledger(tmp_path, KEY))
    assert Ledger(tmp_path, KEY).entries() == ledger.entries()
    assert len(Ledger(tmp_path).entries()) == 3, "it can be read without the key"
    rewrite(ledger, change)
    with pytest.raises(LedgerDamaged, match="not signed"):
        Ledger(tmp_path, KEY).entries()
    with pytest.raises(LedgerDamaged, match="not signed"):
        Ledger(tmp_path, KEY).append("rollback", {}, who="me")


def test_another_key_and_no_key_can_not_add_to_a_signed_ledger(tmp_path: Path) -> None:
    filled(Ledger(tmp_path, KEY))
    with pytest.raises(LedgerDamaged, match=r"not signed with the key of evaluation\.decisions_key"):
        Ledger(tmp_path, KEY[::-1]).append("rollback", {}, who="me")
    with pytest.raises(LedgerError, match=r"is signed: evaluation\.decisions_key must name the file with its key"):
        Ledger(tmp_path).append("rollback", {}, who="me")
    assert len(Ledger(tmp_path, KEY).entries()) == 3


def test_a_ledger_that_was_begun_without_a_key_is_signed_once_and_nothing_unsigned_follows(tmp_path: Path) -> None:
    filled(Ledger(tmp_path))
    keyed = Ledger(tmp_path, KEY)
    with pytest.raises(LedgerDamaged, match=r"is not signed, .*`millrace decisions sign` signs what is there"):
        keyed.append("rollback", {}, who="me")
    with pytest.raises(LedgerError, match="there is no key to sign with"):
        Ledger(tmp_path).sign(who="me")
    assert Ledger(tmp_path, KEY).sign(who="me").kind == "signed"
    filled(Ledger(tmp_path, KEY), 1)
    assert [entry.kind for entry in Ledger(tmp_path, KEY).entries()] == [*["rollback"] * 3, "signed", "rollback"]
    with pytest.raises(LedgerError, match="signed already"):
        Ledger(tmp_path, KEY).sign(who="me")
    rewrite(Ledger(tmp_path), lambda entries: entries[4].update(mac=None))
    with pytest.raises(LedgerDamaged, match="not signed"):
        Ledger(tmp_path, KEY).entries()


def test_what_was_written_without_the_key_before_a_signed_line_is_taken_only_behind_an_entry_that_signs_it(
    tmp_path: Path,
) -> None:
    filled(Ledger(tmp_path / "a"))
    (tmp_path / "a" / "head.json").unlink()
    lines = (tmp_path / "a" / "decisions.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "a" / "decisions.jsonl").write_bytes(lines[0])
    keyed = Ledger(tmp_path / "a", KEY)
    keyed.sign(who="me")
    whole = keyed.entries()
    assert [entry.mac is None for entry in whole] == [True, False]
    forged = whole[1].model_copy(update={"kind": "rollback"})
    forged = forged.model_copy(update={"sha256": forged.digest()})
    keyed.file.write_bytes(lines[0] + canonical(forged.model_dump()) + b"\n")
    with pytest.raises(LedgerDamaged, match="not signed"):
        Ledger(tmp_path / "a", KEY).entries()
