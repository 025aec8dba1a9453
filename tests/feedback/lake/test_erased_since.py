"""Whether rows that were in the lake at some versions have been erased since, by its log and by no clock."""

from __future__ import annotations

from pathlib import Path

import pytest
from feedback_rows import interaction, put, thumb

from feedback.config import LakeConfig
from feedback.lake.table_changes import ErasedSince, LogGoneError
from feedback.lake.tables import Lake
from feedback.maintenance.erasure import Target, erase
from feedback.maintenance.maintain import compact, retain


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    made = Lake(str(tmp_path / "lake"), LakeConfig(lock_timeout_s=60))
    made.create()
    put(made, "interactions", [interaction("a", user="ann"), interaction("b", user="bob")])
    put(made, "feedback", [thumb("a", 1)])
    return made


def test_rows_that_were_there_and_were_erased_are_counted_by_table(lake, folder):
    since = ErasedSince(lake, lake.versions())
    assert since.rows() == {}
    erase(lake, folder, Target(user="ann"))
    assert since.rows() == {"interactions": 1, "feedback": 1}
    erase(lake, folder, Target(user="bob"))
    assert since.rows() == {"interactions": 2, "feedback": 1}
    assert ErasedSince(lake, lake.versions()).rows() == {}


def test_an_erasure_that_finds_nothing_or_only_what_came_later_counts_for_nothing(lake, folder):
    since = ErasedSince(lake, lake.versions())
    erase(lake, folder, Target(user="nobody"))
    put(lake, "interactions", [interaction("new1", user="eve")])
    assert since.rows() == {}
    put(lake, "interactions", [interaction("new2", user="eve"), interaction("new3", user="fay")])
    erase(lake, folder, Target(user="eve"))
    assert since.rows() == {}
    erase(lake, folder, Target(user="fay"))  # from a file that the erasure before wrote
    assert since.rows() == {}
    erase(lake, folder, Target(user="bob"))
    assert since.rows() == {"interactions": 1}


def test_compaction_and_retention_are_no_erasures_and_what_compaction_mixed_counts(lake, folder):
    versions = lake.versions()
    put(lake, "interactions", [interaction("new", user="eve")])
    compact(lake)
    assert ErasedSince(lake, versions).rows() == {}
    erase(lake, folder, Target(user="eve"))
    assert ErasedSince(lake, versions).rows() == {"interactions": 1}, "one file held both, so it may have been there"
    later = lake.versions()
    kept = Lake(lake.uri, LakeConfig(retain_days=1, retain_gap_days=None, lock_timeout_s=60))
    assert retain(kept).rows["interactions"] == 2
    assert ErasedSince(lake, later).rows() == {}


def test_erasures_before_some_versions_may_be_left_out(lake, folder):
    versions = lake.versions()
    erase(lake, folder, Target(user="ann"))
    between = lake.versions()
    assert ErasedSince(lake, versions, after=between).rows() == {}
    erase(lake, folder, Target(user="bob"))
    assert ErasedSince(lake, versions, after=between).rows() == {"interactions": 1}


def test_a_log_that_does_not_reach_back_is_no_answer(lake, folder):
    versions = lake.versions()
    erase(lake, folder, Target(user="ann"))
    log = Path(lake.table_uri("interactions")) / "_delta_log"
    (log / f"{versions['interactions'] + 1:020d}.json").unlink()
    with pytest.raises(LogGoneError, match="was cleaned up"):
        ErasedSince(lake, versions).rows()
