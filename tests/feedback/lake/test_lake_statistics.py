from __future__ import annotations

import math
import statistics as stdlib
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from feedback_rows import NOON, append, interaction, put, reward, said
from hypothesis import given, settings
from hypothesis import strategies as st

from feedback.config import LakeConfig
from feedback.ingest.seal import seal
from feedback.lake.statistics import QUANTILES, KindStatistics, gather, orphans
from feedback.lake.tables import Lake


def spans(*versions: int) -> list[dict[str, int]]:
    return [{"start": start, "policy_version": version} for start, version in enumerate(versions)]


def test_an_empty_lake_has_statistics_of_nothing(lake, tmp_path):
    found = gather(lake, tmp_path / "no-journal")
    for numbers in found.tables.values():
        assert (numbers.rows, numbers.files, numbers.bytes, numbers.bytes_a_row, numbers.duplicates) == (
            0,
            0,
            0,
            None,
            0,
        )
    assert found.feedback.rate is None
    assert (found.rewards, found.lag.scorer, found.lag.p50_s, found.orphans.count) == ([], None, None, 0)
    assert not (tmp_path / "no-journal").exists()


def test_tables_and_journal_are_counted(lake, folder, journal):
    put(lake, "interactions", [interaction("a"), interaction("b", created_at=NOON + timedelta(days=1))])
    append(journal, "interactions", interaction("c", created_at=NOON + timedelta(days=2)))
    append(journal, "interactions", interaction("going", status="started"))
    append(journal, "interactions", interaction("gone", status="started"))
    append(journal, "interactions", interaction("gone"))
    (folder / "damaged").mkdir()
    (folder / "damaged" / "x.arrows").write_bytes(b"")
    found = gather(lake, folder)
    numbers = found.tables["interactions"]
    assert (numbers.rows, numbers.unsealed_rows, numbers.files, numbers.version) == (2, 2, 2, 1)
    files = [Path(file) for file in lake.table("interactions").file_uris()]
    assert numbers.bytes == sum(file.stat().st_size for file in files)
    assert numbers.bytes_a_row == numbers.bytes / 2
    assert (numbers.oldest, numbers.newest) == (NOON, NOON + timedelta(days=2))
    assert (found.journal.open_segments, found.journal.closed_segments, found.journal.damaged_segments) == (1, 0, 1)
    assert found.journal.bytes > 0
    assert found.journal.streams == 1
    sealed = gather(lake, None)
    assert (sealed.tables["interactions"].unsealed_rows, sealed.journal.streams) == (0, 0)
    assert sealed.tables["interactions"].newest == NOON + timedelta(days=1)


def test_the_feedback_rate_is_of_complete_responses_of_the_same_tenant(lake, folder, journal):
    put(lake, "interactions", [interaction(name) for name in "abcd"])
    put(lake, "interactions", [interaction("half", status="aborted"), interaction("theirs", tenant="them")])
    put(
        lake,
        "feedback",
        [
            said("1", "a", "thumb", value=1.0),
            said("2", "a", "comment", text="good"),
            said("3", "b", "thumb", value=0.0),
            said("4", "half", "thumb", value=0.0),
            said("5", "theirs", "thumb", value=0.0),
        ],
    )
    append(journal, "feedback", said("6", "c", "thumb", value=1.0))
    found = gather(lake, folder).feedback
    assert (found.complete_responses, found.responses_with_feedback, found.rate) == (5, 3, 0.6)
    assert found.kinds == {"thumb": KindStatistics(5, 3), "comment": KindStatistics(1, 1)}


def test_rewards_are_counted_by_the_policy_of_the_last_token(lake):
    put(lake, "interactions", [interaction(name, policy_spans=spans(1, 2)) for name in "abcde"])
    put(lake, "interactions", [interaction("f", policy_spans=spans(1)), interaction("x", status="aborted")])
    put(lake, "rewards", [reward(name, value) for name, value in zip("abcd", (9.0, 2.0, 3.0, 4.0), strict=True)])
    put(lake, "rewards", [reward("e", None), reward("f", 0.5, components={"human": 0.0, "rules": 1.0})])
    put(lake, "rewards", [reward("a", 1.0, minute=1), reward("x", 7.0)])
    one, two = gather(lake, None).rewards
    assert (one.policy, one.responses, one.rewarded, one.mean, one.sd, one.missing_share) == (1, 1, 1, 0.5, None, 0.0)
    assert one.components == {"human": (1, 0.0), "rules": (1, 1.0)}
    assert (two.policy, two.responses, two.rewarded, two.missing_share) == (2, 5, 4, pytest.approx(0.2))
    assert (two.mean, two.sd) == (2.5, pytest.approx(math.sqrt(5 / 3)))
    assert two.quantiles == {0.0: 1.0, 0.1: 1.0, 0.25: 1.0, 0.5: 2.0, 0.75: 3.0, 0.9: 4.0, 1.0: 4.0}
    assert two.components == {"human": (4, 2.5)}


def test_the_lag_is_to_the_first_reward_and_what_the_current_scorer_lacks_is_counted(lake):
    put(lake, "interactions", [interaction(name) for name in "abcd"])
    put(lake, "interactions", [interaction("half", status="aborted")])
    put(lake, "rewards", [reward(name, 1.0, minute=minute) for minute, name in enumerate("abc", start=1)])
    put(lake, "rewards", [reward("a", 1.0, minute=60, scorer="later@1")])
    lag = gather(lake, None).lag
    assert (lag.scorer, lag.scored, lag.unscored) == ("later@1", 3, 3)
    assert (lag.p50_s, lag.p90_s, lag.max_s) == (120.0, 180.0, 180.0)
    assert gather(lake, None, scorer="human@0").lag.unscored == 1
    assert gather(lake, None, scorer="never@0").lag.unscored == 4


def test_feedback_without_its_response_is_counted_and_listed_until_the_response_comes(lake, folder, journal):
    put(lake, "interactions", [interaction("a"), interaction("theirs", tenant="them")])
    put(
        lake,
        "feedback",
        [
            said("1", "a", "thumb", value=1.0),
            said("2", "late", "thumb", value=1.0, minute=2),
            said("3", "theirs", "comment", text="not ours", minute=1),
            said("4", "a", "preference", rejected_response_id="nowhere", minute=3),
            said("5", "going", "thumb", value=1.0),
        ],
    )
    append(journal, "interactions", interaction("going", status="started"))
    found = [(orphan.feedback_id, orphan.response_id, orphan.kind) for orphan in orphans(lake, folder, limit=10)]
    assert found == [("3", "theirs", "comment"), ("2", "late", "thumb"), ("4", "nowhere", "preference")]
    assert [orphan.feedback_id for orphan in orphans(lake, folder, limit=1)] == ["3"]
    counted = gather(lake, folder).orphans
    assert (counted.count, counted.oldest) == (3, NOON + timedelta(minutes=1))
    append(journal, "interactions", interaction("late"))
    assert gather(lake, folder).orphans.count == 2
    journal.close()
    seal(lake, folder)
    assert gather(lake, folder).orphans.count == 2
    assert gather(lake, None).orphans.count == 2


def test_an_id_that_is_sealed_twice_is_reported(lake, folder, journal):
    put(lake, "interactions", [interaction("a"), interaction("a"), interaction("b")])
    put(lake, "feedback", [said("1", "a", "thumb", value=1.0), said("1", "a", "thumb", value=1.0, tenant="them")])
    append(journal, "feedback", said("1", "a", "thumb", value=1.0))  # the seal leaves it out
    put(lake, "rewards", [reward("a", 1.0), reward("a", 1.0), reward("a", 1.0, minute=1)])
    found = gather(lake, folder).tables
    assert {name: numbers.duplicates for name, numbers in found.items()} == {
        "interactions": 1,
        "feedback": 0,
        "rewards": 1,
    }


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.none() | st.integers(-4, 4).map(lambda n: n / 4)), min_size=1, max_size=25)
)
def test_the_distribution_is_the_one_that_plain_python_finds(scored):
    with TemporaryDirectory() as folder:
        lake = Lake(folder, LakeConfig())
        lake.create()
        put(lake, "interactions", [interaction(f"{n}", policy_spans=spans(p)) for n, (p, _) in enumerate(scored)])
        put(lake, "rewards", [reward(f"{n}", value) for n, (_, value) in enumerate(scored)])
        rows = gather(lake, None).rewards
    assert [row.policy for row in rows] == sorted({policy for policy, _ in scored})
    for row in rows:
        values = sorted(value for policy, value in scored if policy == row.policy and value is not None)
        assert row.responses == sum(policy == row.policy for policy, _ in scored)
        assert row.rewarded == len(values)
        assert row.mean == (pytest.approx(stdlib.fmean(values)) if values else None)
        assert row.sd == (pytest.approx(stdlib.stdev(values)) if len(values) > 1 else None)
        nearest = {q: values[max(1, math.ceil(q * len(values))) - 1] for q in QUANTILES} if values else {}
        assert row.quantiles == nearest
