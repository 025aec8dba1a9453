"""Lists of interactions: the search by windows of time finds what one query over everything would."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from feedback_rows import NOON, append, interaction, put, reward, said

from deploy.console.pages import rows, traffic
from deploy.console.pages.rows import Search
from feedback.config import JournalConfig, LakeConfig
from feedback.journal.writer import Journal
from feedback.lake.open_lake import OpenLake
from feedback.lake.tables import Lake

AGES = [timedelta(0), *(timedelta(seconds=9**power) for power in range(9)), timedelta(days=9000)]
"""Each in a window of its own or two in one; the last two are older than all windows but the last."""


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[OpenLake]:
    lake = Lake(str(tmp_path / "lake"), LakeConfig())
    lake.create()
    put(lake, "interactions", [interaction(f"r{n:02}", created_at=NOON - age) for n, age in enumerate(AGES)])
    early = NOON - AGES[4] - timedelta(minutes=2)  # by a clock that is behind
    put(lake, "feedback", [said("f", "r04", "thumb", value=1.0, created_at=early)])
    put(lake, "rewards", [reward("r05", 0.5, scored_at=NOON - AGES[5] + timedelta(days=1))])
    found = OpenLake(lake, tmp_path / "journal")
    yield found
    found.close()


def listed(kept: OpenLake, search: Search, count: int) -> list[str]:
    return [name for name, _ in kept.read(lambda lake: rows.newest(lake, "default", search, count))]


def test_a_list_has_the_newest_of_all_windows_in_order_and_goes_on_where_it_ended(kept: OpenLake) -> None:
    everything = [f"r{n:02}" for n in range(len(AGES))]
    for count in range(1, len(AGES) + 2):
        assert listed(kept, Search(), count) == everything[:count]
    for after, age in enumerate(AGES):
        rest = Search(before=(NOON - age, f"r{after:02}"))
        assert listed(kept, rest, len(AGES)) == everything[after + 1 :]


def test_what_was_said_of_a_response_is_found_also_by_a_clock_that_was_behind(kept: OpenLake) -> None:
    assert listed(kept, Search(feedback="with"), 9) == ["r04"]
    assert "r04" not in listed(kept, Search(feedback="without"), len(AGES))
    assert listed(kept, Search(reward_above=0.5), 9) == listed(kept, Search(reward_below=0.5), 9) == ["r05"]
    [row] = kept.read(lambda lake: rows.found(lake, "default", Search(feedback="with")))
    assert [one["feedback_id"] for one in row["feedback"]] == ["f"]


def test_a_row_of_the_journal_comes_before_all_of_the_lake(kept: OpenLake) -> None:
    newest = interaction("r99", created_at=datetime.now(UTC))
    journal = Journal(kept.journal_folder, JournalConfig(), "replica-0")
    journal.open()
    append(journal, "interactions", newest)
    journal.close()
    assert listed(kept, Search(), 2) == ["r99", "r00"]
    assert listed(kept, Search(period="1h"), 2) == ["r99"]


def test_a_list_goes_on_from_a_time_in_any_zone_and_of_any_year(kept: OpenLake) -> None:
    def on_from(at: str) -> list[str]:
        return listed(kept, traffic._search({"before": f"{at}~r00"}), len(AGES))

    everything = [f"r{n:02}" for n in range(len(AGES))]
    for hours in (-14, 0, 14):
        zone = timezone(timedelta(hours=hours))
        assert on_from(NOON.astimezone(zone).isoformat()) == everything[1:], zone
    assert on_from(NOON.replace(tzinfo=None).isoformat()) == everything[1:], "UTC, as all times of the console"
    assert on_from("9999-12-31T23:59:59.999999") == everything
    assert on_from("0001-01-01T00:00:00") == []
    for beyond in ("0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"):
        with pytest.raises(ValueError, match=r"before: .* is no time"):
            on_from(beyond)
