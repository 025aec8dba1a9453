"""Feedback and its response reach the lake in any order, by any replica, and are joined when both are there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from feedback_rows import append, interaction, thumb

from feedback.config import JournalConfig
from feedback.ingest.seal import seal
from feedback.journal.writer import Journal
from feedback.lake.tables import Lake


def journaled(folder: Path, writer: str, table: str, row: dict[str, Any]) -> Path:
    journal = Journal(folder, JournalConfig(), writer)
    journal.open()
    append(journal, table, row)
    journal.close()
    return folder


def joined(lake: Lake, journal_folder: Path | None = None) -> int:
    with lake.connect(journal_folder) as connection:
        query = "SELECT count(*) FROM feedback JOIN interactions USING (response_id, tenant)"
        return int(connection.execute(query).fetchall()[0][0])


@pytest.mark.parametrize("first", ["feedback", "interactions"])
def test_whichever_is_sealed_first_they_are_joined_when_both_are_there(tmp_path, lake, first):
    served = journaled(tmp_path / "one", "one", "interactions", interaction("r1"))
    said = journaled(tmp_path / "two", "two", "feedback", thumb("r1", 1.0))
    early, late = (said, served) if first == "feedback" else (served, said)
    assert joined(lake, served) == joined(lake, said) == 0
    seal(lake, early)
    assert joined(lake) == 0
    assert joined(lake, late) == 1  # the other is in the journal still
    seal(lake, late)
    assert joined(lake) == 1


def test_feedback_whose_response_never_comes_stays_in_the_lake(folder, lake):
    seal(lake, journaled(folder, "one", "feedback", thumb("nobody-knows", 1.0)))
    assert lake.counts()["feedback"] == 1
    assert joined(lake) == 0
