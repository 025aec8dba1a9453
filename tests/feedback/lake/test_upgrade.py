"""A lake and journals that the release before schema versions has written, and what becomes of them.

``schema_0.tar.gz``: a few rows in all three tables; a journal with closed segments of a server that was stopped and
open ones of a server that was killed; and, in ``expected.json``, what that release itself read: the tables, the sets
for training, and both again when it had sealed and scored.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tarfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from feedback_rows import interaction, table_of

from feedback import datasets
from feedback.config import HumanConfig, KindsConfig, LakeConfig, ScoringConfig
from feedback.ingest.seal import seal
from feedback.journal.recovery import load_all
from feedback.lake import tables
from feedback.lake.tables import VERSION_PROPERTY, Lake, LakeConflictError, LakeVersionError, NoLakeError
from feedback.lake.upgrade import STEPS, Upgraded, upgrade
from feedback.maintenance.maintain import maintain
from feedback.schema import SCHEMA_VERSION, TABLES
from feedback.scoring.run import score

ALL = [Upgraded(table, 1, []) for table in TABLES]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    with tarfile.open(Path(__file__).with_name("schema_0.tar.gz")) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


@pytest.fixture
def old(home: Path) -> Lake:
    return Lake(str(home / "lake"), LakeConfig(lock_timeout_s=60))


def plain(rows: Any) -> Any:
    return json.loads(json.dumps(rows, default=str))


def contents(lake: Lake) -> dict[str, Any]:
    with lake.connect() as connection:
        return {
            table: plain(connection.sql(f"SELECT * FROM {table} ORDER BY ALL").to_arrow_table().to_pylist())
            for table in TABLES
        }


def training_sets(lake: Lake) -> dict[str, Any]:
    sets = {
        "votes": datasets.votes(lake, HumanConfig(), KindsConfig()),
        "demonstrations": datasets.demonstrations(lake),
        "thumbs": datasets.thumbs(lake),
        "pairs": datasets.preference_pairs(lake),
    }
    found = {name: plain(found.table.to_pylist()) for name, found in sets.items()}
    prompts = [asdict(prompt) for prompt in datasets.prompts(lake)]
    return {"rollouts": plain(datasets.rollouts(lake).to_pylist()), "prompts": plain(prompts)} | found


def test_a_lake_of_the_release_before_is_read_scored_and_trained_on_as_that_release_did(home: Path, old: Lake) -> None:
    expected = json.loads((home / "expected.json").read_text())
    assert list(upgrade(old)) == ALL
    assert contents(old) == expected["tables"]
    assert training_sets(old) == expected["reads"]
    assert len(seal(old, home / "journal")) == 4
    assert score(old, ScoringConfig()).scored == 2
    sealed = contents(old)
    for rows in (sealed["rewards"], expected["sealed"]["rewards"]):
        for row in rows:  # when it was scored, and on which day
            row.pop("scored_at", None)
            del row["date"]
    assert sealed == expected["sealed"]
    assert training_sets(old) == expected["sealed_reads"]


def test_every_opener_refuses_an_older_lake_and_names_the_remedy(home: Path, old: Lake) -> None:
    openers = [
        old.create,
        old.versions,
        old.counts,
        old.connect,
        lambda: old.append("interactions", table_of("interactions", [interaction("x")])),
        lambda: seal(old, home / "journal"),
        lambda: score(old, ScoringConfig()),
        lambda: maintain(old, home / "journal"),
    ]
    for opener in openers:
        with pytest.raises(LakeVersionError, match=r"made by an older Millrace.*0.*needs 1.*`millrace lake upgrade`"):
            opener()
    assert len(load_all(home / "journal")) == 4


def test_a_newer_lake_is_refused_and_the_journal_keeps_its_rows_until_this_millrace_is_newer_too(
    home: Path, old: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    list(upgrade(old))
    old.open("interactions").alter.set_table_properties({VERSION_PROPERTY: "2"}, raise_if_not_exists=False)
    for opener in (old.create, old.connect, lambda: seal(old, home / "journal"), lambda: next(upgrade(old))):
        with pytest.raises(LakeVersionError, match=r"made by a newer Millrace.*version 2.*knows 1"):
            opener()
    with pytest.raises(LakeVersionError, match="newer"):  # also as it was at that version
        old.table("interactions", old.open("interactions").version())
    assert {segment.name.table for segment, _ in load_all(home / "journal")} >= {"interactions"}
    monkeypatch.setattr(tables, "SCHEMA_VERSION", 2)
    for table in ("feedback", "rewards"):
        old.open(table).alter.set_table_properties({VERSION_PROPERTY: "2"}, raise_if_not_exists=False)
    seal(old, home / "journal")
    assert old.counts()["interactions"] == 6


def test_a_version_that_is_no_number_is_refused(old: Lake) -> None:
    old.open("rewards").alter.set_table_properties({VERSION_PROPERTY: "one"}, raise_if_not_exists=False)
    with pytest.raises(LakeVersionError, match="is 'one', which is no number"):
        old.table("rewards")


def test_a_dry_run_changes_nothing_and_says_what_an_upgrade_would_do(older: Lake) -> None:
    before = {table: older.open(table).version() for table in TABLES}
    planned = list(upgrade(older, dry_run=True))
    assert planned[0] == Upgraded("interactions", 1, ["new columns: experiment, propensity"])
    assert {table: older.open(table).version() for table in TABLES} == before
    assert list(upgrade(older)) == planned
    assert list(upgrade(older)) == list(upgrade(older, dry_run=True)) == []


@pytest.mark.parametrize("commits", range(4))
def test_an_upgrade_that_is_killed_after_any_of_its_commits_is_finished_by_the_next(
    older: Lake, monkeypatch: pytest.MonkeyPatch, commits: int
) -> None:
    durable, left = older.make_durable, commits

    def killed(*arguments: Any, **options: Any) -> None:
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= 1
        durable(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(older, "make_durable", killed)
        with pytest.raises(KeyboardInterrupt):
            list(upgrade(older))
    list(upgrade(older))
    older.create()
    assert older.open("interactions").version() == 3  # created, a row, the columns, the stamp: each once
    assert older.counts() == {"interactions": 1, "feedback": 0, "rewards": 0}


def test_who_writes_while_the_lake_is_upgraded_finds_a_conflict_and_writes_at_the_next_turn(older: Lake) -> None:
    snapshot = older.open("interactions")
    list(upgrade(older))
    rows = table_of("interactions", [interaction("new")])
    with pytest.raises(LakeConflictError):
        older.append("interactions", rows, snapshot=snapshot)
    older.append("interactions", rows)
    assert older.counts()["interactions"] == 2


def test_what_goes_wrong_is_said_with_the_table_and_the_step(older: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> list[str]:
        raise OSError("the disk is full")

    monkeypatch.setitem(STEPS, 1, full)
    with pytest.raises(tables.LakeError, match=r"interactions can't be upgraded to version 1: the disk is full"):
        list(upgrade(older))


def test_where_there_is_no_lake_there_is_nothing_to_upgrade(tmp_path: Path) -> None:
    with pytest.raises(NoLakeError, match="no lake at"):
        list(upgrade(Lake(str(tmp_path / "none"), LakeConfig())))


def test_a_table_that_is_missing_is_made_beside_upgraded_ones(older: Lake) -> None:
    shutil.rmtree(older.table_uri("rewards"))
    assert [done.table for done in upgrade(older)] == ["interactions", "feedback"]
    older.create()
    assert older.counts()["rewards"] == 0


def test_maintenance_keeps_the_version(lake: Lake, folder: Path) -> None:
    changed = Lake(lake.uri, lake.config.model_copy(update={"vacuum_hours": lake.config.vacuum_hours + 1}))
    maintain(changed, folder)
    configuration = lake.open("interactions").metadata().configuration
    assert configuration["delta.logRetentionDuration"] == f"interval {changed.config.vacuum_hours} hours"
    assert configuration[VERSION_PROPERTY] == str(SCHEMA_VERSION)


def test_there_is_a_step_to_each_version_and_a_changed_schema_needs_a_new_one() -> None:
    assert list(STEPS) == list(range(1, SCHEMA_VERSION + 1))
    text = "\n".join(f"{table}: {field}" for table, schema in TABLES.items() for field in schema)
    # If this fails, SCHEMA_VERSION needs to be raised, and a step added, with the columns.
    assert (SCHEMA_VERSION, hashlib.sha256(text.encode()).hexdigest()[:16]) == (1, "77d59fee015c5111")
