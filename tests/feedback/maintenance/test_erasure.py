from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from feedback_rows import NOON, append, interaction, put, reward, table_of, thumb

from feedback.config import JournalConfig, LakeConfig, ScoringConfig
from feedback.events import FeedbackIn
from feedback.files import LockTimeoutError
from feedback.ids import uuid7
from feedback.ingest.id_index import take_in
from feedback.ingest.seal import seal
from feedback.journal.writer import Journal
from feedback.lake.erasure_registry import FOLDER, Selector, drop_erased, erasures, register
from feedback.lake.query import QueryError
from feedback.lake.query import run as query
from feedback.lake.tables import Lake, LakeError
from feedback.maintenance.erasure import (
    Target,
    _drain,
    _rewrite,
    erase,
    find,
    finish_erasures,
    was_visible,
)
from feedback.maintenance.maintain import compact, maintain
from feedback.maintenance.vacuum import drop_spilled
from feedback.scoring.run import score
from tests.paths import ROOT

SECRET = "Zaphod-Beeblebrox"
PROMPT = f"my name is {SECRET} and I live at the end of the universe"


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    made = Lake(str(tmp_path / "lake"), LakeConfig(lock_timeout_s=60))
    made.create()
    return made


def secret(response_id: str, **columns: object) -> dict[str, object]:
    """An interaction of the user who wants to be forgotten; its id, too, is one that must go."""
    texts = {"prompt": PROMPT, "response": f"hello {SECRET}", "metadata": {"who": SECRET}}
    return interaction(f"{SECRET}-{response_id}", user=SECRET, **(texts | columns))


def preference(chosen: str, rejected: str) -> dict[str, object]:
    given = FeedbackIn(response_id=chosen, kind="preference", rejected_response_id=rejected)
    return given.to_row("default")


def journal_of(folder: Path, rows: list[tuple[str, dict[str, object]]], **config: float) -> None:
    journal = Journal(folder, JournalConfig(**config), "replica-0")
    journal.open()
    for table, row in rows:
        append(journal, table, row)
    journal.close()


def ids(lake: Lake, table: str = "interactions") -> list[str]:
    with lake.connect() as connection:
        return sorted(row for [row] in connection.sql(f"SELECT response_id FROM {table}").fetchall())


def texts(root: Path) -> Iterator[tuple[Path, str]]:
    """Everything that the files below a folder hold: their names, their bytes, and decoded what is Parquet."""
    for path in root.rglob("*"):
        yield path, path.name
        if path.is_file():
            yield path, path.read_bytes().decode(errors="replace")
            if path.suffix == ".parquet":
                table = pq.read_table(path, partitioning=None)
                yield path, json.dumps(table.to_pylist(), default=str)
                yield path, str(pq.read_metadata(path).to_dict())


def holders(*roots: Path, needle: str = SECRET) -> set[str]:
    return {str(path) for root in roots for path, text in texts(root) if needle in text}


def history(lake: Lake, folder: Path) -> None:
    """A lake with a past: compacted files, checkpoints, an orphan, change data, a torn commit, a damaged segment."""
    for number in range(3):
        put(lake, "interactions", [interaction(f"other{number}", user="ann"), secret(str(number))])
    put(lake, "feedback", [thumb(f"{SECRET}-0", 1), thumb("other0", 1), thumb("other1", 0, source=SECRET)])
    put(lake, "feedback", [preference("other0", f"{SECRET}-1"), preference("other1", "other2")])
    score(lake, ScoringConfig())
    compact(lake)
    for table in ("interactions", "feedback"):
        lake.table(table).create_checkpoint()
    folder.mkdir()
    (folder / "damaged").mkdir()
    (folder / "damaged" / "feedback.replica-0.aa.arrows").write_bytes(PROMPT.encode())
    tables = Path(lake.table_uri("interactions"))
    for name in ("_torn/x.json", "_delta_log/_commit_x.json.tmp"):
        (tables / name).parent.mkdir(exist_ok=True)
        (tables / name).write_bytes(PROMPT.encode())
    (tables / "_change_data").mkdir()
    pq.write_table(table_of("interactions", [secret("changed")]), tables / "_change_data" / "cdc-1.parquet")
    lake.files("interactions").write("interactions", table_of("interactions", [secret("orphan")]))


def test_an_erased_user_is_in_no_file_of_journal_and_lake(lake, folder):
    history(lake, folder)
    now = datetime.now(UTC)
    journal_of(
        folder,
        [
            ("interactions", secret("sealed-later", created_at=now)),
            ("interactions", interaction("other9", user="ann")),
            ("feedback", thumb(f"{SECRET}-sealed-later", 0)),
            ("feedback", thumb("other9", 0)),
        ],
    )
    root = Path(lake.uri)
    assert len(holders(root, folder)) > 10
    done = erase(lake, folder, Target(user=SECRET), report=print)
    assert holders(root, folder) == set()
    assert done.rows == {"interactions": 4, "feedback": 4, "rewards": 3}
    assert (done.damaged, done.left) == (1, [])
    assert ids(lake) == ["other0", "other1", "other2", "other9"]
    assert ids(lake, "feedback") == ["other0", "other1", "other9"]
    assert ids(lake, "rewards") == ["other0", "other1", "other2"]
    again = erase(lake, folder, Target(user=SECRET))
    assert again.rows == {"interactions": 0, "feedback": 0, "rewards": 0}


def test_scoring_goes_on_after_an_erasure_and_what_comes_later_is_new(lake, folder):
    history(lake, folder)
    put(lake, "interactions", [interaction("unscored")])
    erase(lake, folder, Target(user=SECRET))
    assert score(lake, ScoringConfig()).scored == 1
    put(lake, "interactions", [secret("later", created_at=datetime.now(UTC))])
    journal_of(folder, [("feedback", thumb(f"{SECRET}-later", 1)), ("feedback", thumb(f"{SECRET}-0", 1))])
    seal(lake, folder)
    maintain(lake)
    assert score(lake, ScoringConfig()).scored == 1
    assert f"{SECRET}-later" in ids(lake)
    assert {f"{SECRET}-later", f"{SECRET}-0"} <= set(ids(lake, "feedback")), "said after the erasure"


def test_a_tenant_goes_with_all_of_its_feedback_and_other_tenants_stay(lake, folder):
    put(lake, "interactions", [interaction("a", tenant=SECRET), interaction("b", user=SECRET)])
    put(lake, "feedback", [thumb("a", 1, tenant=SECRET), thumb("elsewhere", 1, tenant=SECRET), thumb("b", 1)])
    done = erase(lake, folder, Target(tenant=SECRET))
    assert done.rows == {"interactions": 1, "feedback": 2, "rewards": 0}
    assert (ids(lake), ids(lake, "feedback")) == (["b"], ["b"])


def test_a_user_of_one_tenant_is_not_that_of_another(lake, folder):
    mine = {"user": SECRET, "tenant": "mine"}
    put(
        lake, "interactions", [interaction("a", **mine), interaction("b", user=SECRET), interaction("c", tenant="mine")]
    )
    put(lake, "feedback", [thumb("c", 1, source=SECRET, tenant="mine"), thumb("b", 1, source=SECRET)])
    done = erase(lake, folder, Target(user=SECRET, tenant="mine"))
    assert done.rows == {"interactions": 1, "feedback": 1, "rewards": 0}
    assert (ids(lake), ids(lake, "feedback")) == (["b", "c"], ["b"])


def test_one_response_goes_with_its_feedback(lake, folder):
    put(lake, "interactions", [secret("1"), secret("2"), interaction("a")])
    put(lake, "feedback", [thumb(f"{SECRET}-1", 1), preference("a", f"{SECRET}-1"), thumb("a", 1)])
    score(lake, ScoringConfig())
    done = erase(lake, folder, Target(response_id=f"{SECRET}-1"))
    assert done.rows == {"interactions": 1, "feedback": 2, "rewards": 1}
    assert ids(lake) == ids(lake, "rewards") == [f"{SECRET}-2", "a"]
    assert holders(Path(lake.uri), needle=f"{SECRET}-1") == set()


def test_anonymous_feedback_is_not_that_of_a_user_called_user(lake, folder):
    put(lake, "interactions", [interaction("a", user="user"), interaction("b")])
    put(lake, "feedback", [thumb("a", 1), thumb("b", 1)])
    assert erase(lake, folder, Target(user="user")).rows == {"interactions": 1, "feedback": 1, "rewards": 0}
    assert ids(lake, "feedback") == ["b"]


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ({}, "nothing to erase"),
        ({"response_id": "r", "user": "u"}, "by its id alone"),
        ({"user": ""}, "is empty"),
    ],
)
def test_a_target_that_means_nothing_or_too_much_is_refused(target, says):
    with pytest.raises(ValueError, match=says):
        Target(**target)


SERVER = """
import asyncio, sys, time
from pathlib import Path
from feedback.config import JournalConfig
from feedback.journal.writer import Journal
from feedback_rows import interaction, thumb

journal = Journal(Path(sys.argv[1]), JournalConfig(segment_seconds=float(sys.argv[2])), "replica-0")
journal.open()
asyncio.run(journal.append("interactions", interaction("open", user=sys.argv[3])))
asyncio.run(journal.append("feedback", thumb("open", 1)))
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def server(request: pytest.FixtureRequest, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A living process that holds the user's rows in open segments, closed after so many seconds."""
    path = os.pathsep.join([str(ROOT / "tests" / "feedback"), str(ROOT)])
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, str(folder), str(request.param), SECRET],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


@pytest.mark.parametrize("server", [1.0], indirect=True)
def test_segments_that_a_living_server_is_writing_are_waited_for(lake, folder, server):
    assert find(lake, folder, Target(user=SECRET)).rows == {"interactions": 1, "feedback": 1, "rewards": 0}
    done = erase(lake, folder, Target(user=SECRET))
    assert done.rows == {"interactions": 1, "feedback": 1, "rewards": 0}
    assert holders(Path(lake.uri), folder) == set()
    assert (ids(lake), ids(lake, "feedback")) == ([], [])


@pytest.mark.parametrize("server", [60.0], indirect=True)
def test_a_segment_that_stays_open_is_named_and_the_next_maintenance_finishes_the_erasure(lake, folder, server):
    put(lake, "interactions", [secret("1")])
    with pytest.raises(LakeError, match=r"feedback\.replica-0.*still open after 0\.3 s.*segment_seconds"):
        erase(lake, folder, Target(user=SECRET), wait_s=0.3)
    server.kill()
    server.wait(120)
    seal(lake, folder)
    assert finish_erasures(lake)["interactions"] == 1
    assert holders(Path(lake.uri), folder) == set()
    assert finish_erasures(lake) == {"interactions": 0, "feedback": 0, "rewards": 0}


def test_rows_in_the_journal_of_another_machine_are_dropped_when_they_are_sealed(lake, folder, tmp_path):
    elsewhere = tmp_path / "journal-elsewhere"
    journal_of(
        elsewhere,
        [
            ("interactions", secret("there")),
            ("interactions", interaction("ann's", user="ann")),
            ("feedback", thumb(f"{SECRET}-there", 1)),
            ("feedback", thumb("ann's", 1)),
        ],
    )
    put(lake, "feedback", [thumb(f"{SECRET}-there", 0, source="early")])  # of a response that is not known here
    erase(lake, folder, Target(user=SECRET))
    assert holders(Path(lake.uri)) != set()
    seal(lake, elsewhere)
    assert ids(lake) == ["ann's"]
    assert "ann's" in ids(lake, "feedback")
    maintain(lake)
    assert holders(Path(lake.uri), elsewhere) == set()
    assert ids(lake, "feedback") == ["ann's"]


def test_the_registry_holds_no_name_and_costs_a_seal_nothing_that_is_newer(lake, folder, monkeypatch):
    erase(lake, folder, Target(user=SECRET))
    assert holders(Path(lake.uri)) == set()
    [entry] = erasures(lake, since=datetime.now(UTC) - timedelta(minutes=1))
    assert entry.kind == "user"
    assert entry.is_in(pa.array([SECRET, "ann", None])).to_pylist() == [True, False, None]
    (Path(lake.uri) / FOLDER / f"{entry.name}.json").write_text("it is not read")
    journal_of(folder, [("interactions", secret("later", created_at=datetime.now(UTC)))])
    seal(lake, folder)
    assert ids(lake) == [f"{SECRET}-later"]
    journal_of(folder, [("interactions", secret("earlier"))])
    with pytest.raises(LakeError, match=rf"{entry.name}.json is damaged.*repeat that erasure"):
        seal(lake, folder)


def test_rewards_that_were_written_while_an_erasure_ran_go_with_the_next_maintenance(lake, folder):
    put(lake, "interactions", [secret("1"), interaction("a")])
    erase(lake, folder, Target(user=SECRET))
    row = {
        "response_id": f"{SECRET}-1",
        "reward": 1.0,
        "components": {},
        "missing": {},
        "scorer": "s",
        "scored_at": datetime.now(UTC),
    }
    put(lake, "rewards", [row])
    assert maintain(lake).erased == {"interactions": 0, "feedback": 0, "rewards": 1}
    assert holders(Path(lake.uri)) == set()


@pytest.mark.parametrize(
    "where",
    [
        "feedback.maintenance.erasure.seal",
        "feedback.lake.data_files._FileWriter.write",
        "deltalake.DeltaTable.create_write_transaction",
        "feedback.lake.data_files.Store.delete",
        "deltalake.DeltaTable.create_checkpoint",
        "feedback.maintenance.vacuum.forget",
        "feedback.maintenance.erasure.drop_damaged_segments",
        "feedback.maintenance.erasure.mark_done",
    ],
)
@pytest.mark.parametrize("then", ["repeated", "left to the maintenance"])
def test_an_erasure_that_is_killed_anywhere_is_finished(lake, folder, monkeypatch, where, then):
    history(lake, folder)
    journal_of(folder, [("interactions", secret("late"))])

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(where, interrupt)
        with pytest.raises(KeyboardInterrupt):
            erase(lake, folder, Target(user=SECRET))
    if then == "repeated":
        erase(lake, folder, Target(user=SECRET))
        assert holders(Path(lake.uri), folder) == set()
    else:
        seal(lake, folder)
        maintain(lake, folder)
        assert holders(Path(lake.uri), folder) == set()
    assert ids(lake) == ["other0", "other1", "other2"]
    assert ids(lake, "feedback") == ["other0", "other1"]


def test_an_erasure_and_compactions_at_once_bring_nothing_back(lake, folder):
    for number in range(10):
        put(lake, "interactions", [interaction(f"r{number}", user="ann"), secret(str(number))])
    stop = threading.Event()

    def compact_again_and_again() -> None:
        number = 10
        while not stop.is_set():
            put(lake, "interactions", [interaction(f"r{number}", user="ann")])
            compact(Lake(lake.uri, lake.config))
            number += 1

    with ThreadPoolExecutor(1) as pool:
        compacting = pool.submit(compact_again_and_again)
        try:
            erase(lake, folder, Target(user=SECRET))
        finally:
            stop.set()
            compacting.result(120)
    found = ids(lake)
    assert found == sorted(f"r{number}" for number in range(len(found)))
    assert len(found) >= 10
    assert holders(Path(lake.uri)) == set()


def test_a_writer_that_is_about_to_commit_is_waited_for(lake, folder):
    put(lake, "interactions", [secret("1")])
    written, go_on = threading.Event(), threading.Event()

    def slow() -> Iterator[pa.RecordBatch]:
        yield from table_of("interactions", [interaction("a")]).to_batches()
        written.set()
        assert go_on.wait(120)

    def write() -> None:
        schema = table_of("interactions", []).schema
        Lake(lake.uri, lake.config).append("interactions", pa.RecordBatchReader.from_batches(schema, slow()))

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        assert written.wait(120)
        impatient = Lake(lake.uri, LakeConfig(lock_timeout_s=0.2))
        with pytest.raises(LockTimeoutError, match=r"\.interactions\.writing\.lock"):
            erase(impatient, folder, Target(user=SECRET))
        go_on.set()
        writing.result(120)
    erase(lake, folder, Target(user=SECRET))
    assert ids(lake) == ["a"]
    assert holders(Path(lake.uri)) == set()


def test_the_index_of_feedback_ids_forgets_too(lake, folder):
    put(lake, "interactions", [secret("1")])
    row = thumb(f"{SECRET}-1", 1, feedback_id="mine")
    journal_of(folder, [("feedback", row)])
    seal(lake, folder)
    [before] = (folder / "ids").glob("*.db")
    erase(lake, folder, Target(user=SECRET))
    [after] = (folder / "ids").glob("*.db")
    assert before != after
    assert take_in(lake, folder) == lake.versions()["feedback"]


def test_what_was_visible_at_a_version_is_known_as_long_as_it_can_be_read(lake, folder):
    put(lake, "interactions", [interaction("a", user="ann")])
    put(lake, "interactions", [secret("1")])
    found = find(lake, folder, Target(user=SECRET))
    assert found.sealed["interactions"] == {f"{SECRET}-1"}
    assert found.since == interaction("a")["created_at"]
    seen = [was_visible(lake, "interactions", found.sealed["interactions"], version) for version in (0, 1, 2)]
    assert seen == [False, False, True]
    assert was_visible(lake, "interactions", set(), 2) is False
    erase(lake, folder, Target(user=SECRET))
    assert was_visible(lake, "interactions", {f"{SECRET}-1"}, 2) is None


def test_old_versions_stay_in_the_log_so_that_a_writer_that_has_one_in_hand_commits_behind_them(lake, folder):
    put(lake, "interactions", [secret("1")])
    stale = lake.table("interactions")
    put(lake, "interactions", [secret("2")])
    erase(lake, folder, Target(user=SECRET))
    rows = table_of("interactions", [interaction("a")])
    lake.append("interactions", rows, transactions={"me": 1}, snapshot=stale)
    assert ids(lake) == ["a"]
    assert DeltaTable(lake.table_uri("interactions")).version() == lake.versions()["interactions"] > 4


def test_what_a_killed_query_spilled_is_removed_and_a_living_ones_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in (f"millrace-{uuid7()}", f"millrace-{uuid7()}", "millrace-mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "spilled").write_text(SECRET)
        hour_ago = time.time() - 3600
        os.utime(tmp_path / name, (hour_ago, hour_ago))
    exports = [tmp_path / f"millrace-export-{name}" for name in ("killed_1", "being_sent")]
    for export in exports:
        export.write_text(SECRET)
        os.utime(export, (hour_ago, hour_ago))
    living = min(tmp_path.glob("millrace-0*"))
    with (living / "spilled").open(), exports[1].open():
        assert drop_spilled() == 2
        assert {path.name for path in tmp_path.iterdir()} == {living.name, "millrace-mine", exports[1].name}
    assert drop_spilled() == 2


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def at_the_second(call: Callable[..., Any]) -> Callable[..., Any]:
    """A process is killed before it makes a call for the second time."""
    calls = []

    def once(*arguments: Any, **named: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return call(*arguments, **named)

    return once


def test_feedback_on_a_response_goes_too_where_the_erasure_was_killed_before_it_registered_its_id(
    lake, folder, tmp_path, monkeypatch
):
    put(lake, "interactions", [secret("1"), interaction("a")])
    put(lake, "feedback", [thumb(f"{SECRET}-1", 1), preference("a", f"{SECRET}-1"), thumb("a", 1)])
    score(lake, ScoringConfig())
    elsewhere = tmp_path / "elsewhere"
    journal_of(elsewhere, [("feedback", thumb(f"{SECRET}-1", 0)), ("feedback", thumb("a", 0))])
    with monkeypatch.context() as patch:
        patch.setattr("feedback.maintenance.erasure.register", at_the_second(register))
        with pytest.raises(KeyboardInterrupt):
            erase(lake, folder, Target(user=SECRET))
    maintain(lake, folder)
    assert (ids(lake), ids(lake, "feedback"), ids(lake, "rewards")) == (["a"], ["a"], ["a"])
    seal(lake, elsewhere)
    assert ids(lake, "feedback") == ["a", "a"]
    maintain(lake, folder)
    assert holders(Path(lake.uri)) == set()


@pytest.mark.parametrize("killed", [False, True])
def test_feedback_on_a_response_goes_too_where_it_was_sealed_behind_the_back_of_the_erasure(
    lake, folder, tmp_path, monkeypatch, killed
):
    elsewhere, late = tmp_path / "elsewhere", tmp_path / "late"
    journal_of(elsewhere, [("interactions", secret("there")), ("feedback", thumb(f"{SECRET}-there", 1))])
    journal_of(late, [("feedback", thumb(f"{SECRET}-there", 0))])

    def then_an_erasure(lake: Lake, journal_folder: Path, table: str, rows: pa.Table) -> pa.Table:
        kept = drop_erased(lake, journal_folder, table, rows)
        if table == "interactions":
            erase(lake, folder, Target(user=SECRET))
        return kept

    with monkeypatch.context() as patch:
        patch.setattr("feedback.ingest.seal.drop_erased", then_an_erasure)
        seal(lake, elsewhere)
    assert ids(lake) == ids(lake, "feedback") == [f"{SECRET}-there"]
    if killed:
        with monkeypatch.context() as patch:
            patch.setattr("feedback.maintenance.erasure._rewrite", at_the_second(_rewrite))
            with pytest.raises(KeyboardInterrupt):
                maintain(lake, folder)
    maintain(lake, folder)
    seal(lake, late)
    maintain(lake, folder)
    assert ids(lake) == ids(lake, "feedback") == []
    assert holders(Path(lake.uri)) == set()


def test_feedback_on_a_response_goes_too_where_it_was_sealed_when_interactions_were_already_rewritten(
    lake, folder, monkeypatch
):
    put(lake, "interactions", [secret("1"), interaction("a")])

    def sealed_meanwhile(lake: Lake, table: str, selectors: list[Selector]) -> int:
        if table == "interactions":
            put(lake, "feedback", [thumb(f"{SECRET}-there", 1, created_at=NOON)])
            put(lake, "interactions", [secret("there")])
        return _rewrite(lake, table, selectors)

    with monkeypatch.context() as patch:
        patch.setattr("feedback.maintenance.erasure._rewrite", sealed_meanwhile)
        erase(lake, folder, Target(user=SECRET))
    maintain(lake, folder)
    assert (ids(lake), ids(lake, "feedback")) == (["a"], [])
    assert holders(Path(lake.uri)) == set()


def test_a_removal_behind_an_erasure_that_is_killed_before_old_files_are_gone_is_finished(lake, folder, monkeypatch):
    put(lake, "interactions", [secret("1"), interaction("a")])
    erase(lake, folder, Target(user=SECRET))
    put(lake, "rewards", [reward(f"{SECRET}-1", 1.0)])
    with monkeypatch.context() as patch:
        patch.setattr("feedback.maintenance.erasure._purge_all", interrupt)
        with pytest.raises(KeyboardInterrupt):
            maintain(lake)
    maintain(lake)
    assert holders(Path(lake.uri)) == set()


def test_what_is_sealed_behind_an_erasure_is_found_whatever_the_clock_of_its_machine_says(lake, folder, monkeypatch):
    put(lake, "interactions", [secret("1"), interaction("a")])
    erase(lake, folder, Target(user=SECRET))
    an_hour_ago = time.time_ns() - 3600 * 10**9
    with monkeypatch.context() as patch:
        patch.setattr("feedback.lake.data_files.time.time_ns", lambda: an_hour_ago)
        put(lake, "rewards", [reward(f"{SECRET}-1", 1.0)])
    assert maintain(lake).erased["rewards"] == 1
    assert holders(Path(lake.uri)) == set()


# Clocks that are wrong

AHEAD = timedelta(days=40)


def ahead() -> datetime:
    return datetime.now(UTC) + AHEAD


@pytest.mark.parametrize("finished", ["at once", "by the maintenance"])
def test_rows_that_were_made_while_the_clock_ran_ahead_are_erased_and_reported(lake, folder, monkeypatch, finished):
    put(lake, "interactions", [secret("sealed", created_at=ahead()), interaction("a", created_at=ahead())])
    put(lake, "feedback", [thumb(f"{SECRET}-sealed", 1, created_at=ahead()), thumb("a", 1, created_at=ahead())])
    put(lake, "feedback", [thumb("a", 0, source=SECRET, created_at=ahead())])
    unsealed = [("interactions", secret("unsealed", created_at=ahead()))] if finished == "at once" else []
    journal_of(folder, unsealed)
    if finished == "at once":
        done = erase(lake, folder, Target(user=SECRET))
        assert (done.rows, done.ahead) == ({"interactions": 2, "feedback": 2, "rewards": 0}, 4)
    else:
        with monkeypatch.context() as patch:
            patch.setattr("feedback.maintenance.erasure._drain", interrupt)
            with pytest.raises(KeyboardInterrupt):
                erase(lake, folder, Target(user=SECRET))
        put(lake, "interactions", [secret("later", created_at=datetime.now(UTC))])
        compact(lake)
        put(lake, "interactions", [secret("later still", created_at=datetime.now(UTC))])
        maintain(lake, folder)
        assert ids(lake) == [f"{SECRET}-later", f"{SECRET}-later still", "a"], "made after the erasure"
        erase(lake, folder, Target(user=SECRET))
    assert (ids(lake), ids(lake, "feedback")) == (["a"], ["a"])
    assert holders(Path(lake.uri), folder) == set()


def test_rows_from_the_future_that_come_after_an_erasure_are_reported_once(lake, folder, caplog):
    erase(lake, folder, Target(user=SECRET))
    put(lake, "interactions", [secret("1", created_at=ahead()), interaction("a", created_at=ahead())])
    maintain(lake)
    [told] = [record.message for record in caplog.records if "later than now" in record.message]
    assert "1 rows of interactions" in told
    assert "repeat" in told
    caplog.clear()
    maintain(lake)
    assert "later than now" not in caplog.text


class FastClock(datetime):
    """A clock that runs ahead."""

    @classmethod
    def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
        return datetime.now(tz) + AHEAD


def test_an_erasure_by_a_clock_that_ran_ahead_takes_nothing_that_is_made_after_it(lake, folder, monkeypatch):
    put(lake, "interactions", [secret("1")])
    with monkeypatch.context() as patch:
        patch.setattr("feedback.maintenance.erasure.datetime", FastClock)
        erase(lake, folder, Target(user=SECRET))
    folder.mkdir()
    seal(lake, folder)  # the next turn of the sealer, by the right clock
    journal_of(folder, [("interactions", secret("later", created_at=datetime.now(UTC)))])
    seal(lake, folder)
    maintain(lake, folder)
    assert ids(lake) == [f"{SECRET}-later"]
    with monkeypatch.context() as patch:  # 41 days later
        patch.setattr("feedback.maintenance.erasure.datetime", FastClock)
        patch.setattr("feedback.lake.erasure_registry.datetime", FastClock)
        maintain(lake, folder)
    assert ids(lake) == [f"{SECRET}-later"]


def test_what_is_made_while_an_erasure_waits_for_the_journal_stays(lake, folder, monkeypatch):
    journal_of(folder, [("interactions", secret("old", created_at=datetime.now(UTC)))])

    def made_meanwhile(*given: Any) -> None:
        now = datetime.now(UTC)
        made = [("interactions", secret("new", created_at=now)), ("feedback", thumb("a", 1, source=SECRET))]
        journal_of(folder, [*made, ("interactions", secret("of a wrong clock", created_at=ahead()))])
        _drain(*given)

    with monkeypatch.context() as patch:
        patch.setattr("feedback.maintenance.erasure._drain", made_meanwhile)
        assert erase(lake, folder, Target(user=SECRET)).rows["interactions"] == 1
    assert (ids(lake), ids(lake, "feedback")) == ([f"{SECRET}-new"], ["a"])
    maintain(lake, folder)
    assert (ids(lake), ids(lake, "feedback")) == ([f"{SECRET}-new"], ["a"])


class SlowClock(datetime):
    """A clock that is behind."""

    @classmethod
    def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
        return datetime.now(tz) - timedelta(minutes=10)


def test_a_machine_whose_clock_is_behind_weakens_an_erasure_for_no_other(lake, folder, tmp_path, monkeypatch):
    right, behind = tmp_path / "right", tmp_path / "behind"
    made = datetime.now(UTC) - timedelta(minutes=2)
    journal_of(right, [("interactions", secret("1", created_at=made)), ("interactions", interaction("a"))])
    journal_of(behind, [("interactions", secret("2", created_at=SlowClock.now(UTC)))])
    journal_of(right, [("feedback", thumb(f"{SECRET}-2", 1, created_at=made))])  # of a response that is unknown here
    erase(lake, folder, Target(user=SECRET))
    with monkeypatch.context() as patch:
        patch.setattr("feedback.lake.erasure_registry.datetime", SlowClock)
        seal(lake, behind)
    seal(lake, right)
    maintain(lake, right)
    assert ids(lake) == ["a"]
    assert ids(lake, "feedback") == []


# The registry


def entries(lake: Lake) -> list[Path]:
    return sorted((Path(lake.uri) / FOLDER).glob("*.json"))


def test_the_registry_is_its_owners_and_its_key_is_not_in_the_lake(lake, folder, tmp_path):
    put(lake, "interactions", [secret("1")])
    erase(lake, folder, Target(user=SECRET))
    assert {path.stat().st_mode & 0o777 for path in (Path(lake.uri) / FOLDER).iterdir()} == {0o600}
    key = tmp_path / "erasure.key"
    assert key.stat().st_mode & 0o777 == 0o600
    assert all(key.read_text().strip() not in text for _, text in texts(Path(lake.uri)))
    content = json.loads(entries(lake)[0].read_text())
    key.unlink()
    with pytest.raises(LakeError, match=rf"{entries(lake)[0].name} was hashed with another key.*erasure\.key"):
        erasures(lake, since=NOON)
    assert "key" not in content
    with pytest.raises(QueryError, match="Permission"):
        query(lake, f"SELECT content FROM read_text('{lake.uri}/{FOLDER}/*')", lambda rows: list(rows.batches))


def test_a_machine_without_the_key_keeps_in_its_journal_what_may_be_erased_until_it_has_the_key(lake, folder, tmp_path):
    mine, theirs = tmp_path / "mine.key", tmp_path / "theirs.key"
    here = Lake(lake.uri, lake.config.model_copy(update={"erasure_key": str(mine)}))
    there = Lake(lake.uri, lake.config.model_copy(update={"erasure_key": str(theirs)}))
    erase(here, folder, Target(user=SECRET))
    elsewhere = tmp_path / "elsewhere"
    journal_of(elsewhere, [("interactions", secret("there")), ("interactions", interaction("a"))])
    with pytest.raises(LakeError, match=r"hashed with another key.*theirs\.key.*copy"):
        seal(there, elsewhere)
    with pytest.raises(LakeError, match=r"hashed with another key"):
        erase(there, elsewhere, Target(user="ann"))
    assert ids(lake) == []
    assert not theirs.exists(), "a second key would split the registry"
    shutil.copy(mine, theirs)
    seal(there, elsewhere)
    assert ids(lake) == ["a"]


def test_a_key_inside_the_lake_and_a_file_that_is_no_key_are_refused(lake, folder, tmp_path):
    inside = Lake(lake.uri, lake.config.model_copy(update={"erasure_key": f"{lake.uri}/my.key"}))
    with pytest.raises(LakeError, match=r"my\.key.*is in the lake"):
        erase(inside, folder, Target(user=SECRET))
    (tmp_path / "erasure.key").write_text("secret")
    with pytest.raises(LakeError, match=r"erasure\.key.*is no key"):
        erase(lake, folder, Target(user=SECRET))


def test_a_registry_whose_keys_are_beside_its_hashes_is_brought_up_to_date_by_the_maintenance(lake, folder):
    at, key = datetime.now(UTC), bytes(range(16))
    name = f"{at:%Y%m%dT%H%M%S%fZ}-{uuid7()}"
    digest = hashlib.blake2b(SECRET.encode(), digest_size=16, key=key).hexdigest()
    path = Path(lake.uri) / FOLDER / f"{name}.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"kind": "user", "at": at.isoformat(), "key": key.hex(), "digests": [digest]}))
    path.with_suffix(".done").touch()
    put(lake, "interactions", [secret("1")])
    [before] = erasures(lake, since=NOON)
    maintain(lake, folder)
    assert ids(lake) == []
    [after] = [entry for entry in erasures(lake, since=NOON) if entry.name == name]
    for entry in (before, after):
        assert entry.is_in(pa.array([SECRET, "ann"])).to_pylist() == [True, False]
    assert digest not in path.read_text()
    assert {path.stat().st_mode & 0o777 for path in path.parent.iterdir()} == {0o600}
