from __future__ import annotations

import shutil
import threading
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from feedback_rows import NOON, interaction, put, said, table_of, thumb
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from feedback.config import HumanConfig, KindsConfig, LakeConfig, RuleConfig, ScoringConfig
from feedback.lake.data_files import TableFiles
from feedback.lake.tables import Lake, LakeConflictError
from feedback.scoring import candidates, run
from feedback.scoring.run import ScoringError, score
from feedback.scoring.scorer import load_sources, scorer_name
from feedback.scoring.sources.rules import RuleError

RULE = '''
def exact(batch):
    """1 if the response is the answer in its metadata, else 0."""
    answers = [dict(metadata or ()).get("answer") for metadata in batch["metadata"].to_pylist()]
    responses = batch["response"].to_pylist()
    if "explode" in responses:
        raise ValueError("exploded")
    return [None if a is None else float(a == r) for a, r in zip(answers, responses, strict=True)]
'''
HUMAN = ScoringConfig()


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> ScoringConfig:
    """Human votes with weight 1, an exact-match rule with weight 3."""
    folder = tmp_path_factory.mktemp("rules")
    (folder / "exact_for_scoring.py").write_text(RULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield ScoringConfig(rules={"exact": RuleConfig(function="exact_for_scoring:exact", weight=3.0)})


def rewards(lake: Lake, view: str = "current_rewards") -> list[dict[str, Any]]:
    with lake.connect() as connection:
        rows = connection.sql(f"SELECT * FROM {view} ORDER BY response_id, scored_at").to_arrow_table().to_pylist()
    return [row | {"components": dict(row["components"]), "missing": dict(row["missing"])} for row in rows]


def by_id(lake: Lake) -> dict[str, dict[str, Any]]:
    return {row["response_id"]: row for row in rewards(lake)}


def test_a_redacted_response_gets_no_reward_from_any_source(lake, both):
    without = {"prompt_token_ids": [], "response_token_ids": [], "logprobs": [], "status": "redacted"}
    put(lake, "interactions", [interaction("a"), interaction("r", **without)])
    put(lake, "feedback", [thumb("a", 1), thumb("r", 1)])
    assert score(lake, both).scored == 1
    put(lake, "feedback", [thumb("r", 0)])
    assert score(lake, both).scored == 0
    assert by_id(lake).keys() == {"a"}


def test_the_reward_is_the_weighted_mean_of_the_components_that_are_there(lake, both):
    put(
        lake,
        "interactions",
        [
            interaction("both"),
            interaction("only-rule", response="five"),
            interaction("only-human", metadata={}),
            interaction("neither", metadata={}),
        ],
    )
    put(lake, "feedback", [thumb("both", 0), thumb("only-human", 1)])
    result = score(lake, both)
    assert (result.scored, result.missing) == (4, 1)
    found = by_id(lake)
    assert found["both"]["reward"] == pytest.approx(3 / 4)
    assert found["both"]["components"] == {"human": 0.0, "exact": 1.0}
    assert found["only-rule"]["reward"] == 0.0
    assert found["only-rule"]["missing"] == {"human": "no vote"}
    assert found["only-human"]["reward"] == 1.0
    assert found["only-human"]["missing"] == {"exact": "the rule gave none"}
    assert found["neither"]["reward"] is None
    assert found["neither"]["components"] == {}
    assert set(found["neither"]["missing"]) == {"human", "exact"}
    assert all(row["scorer"] == result.scorer for row in found.values())


def test_only_complete_responses_are_scored(lake):
    put(lake, "interactions", [interaction("a", status="aborted"), interaction("b", status="error"), interaction("c")])
    put(lake, "feedback", [thumb("a", 1), thumb("b", 1), thumb("c", 1), thumb("nobody", 1)])
    assert score(lake, HUMAN).scored == 1
    assert list(by_id(lake)) == ["c"]


def test_a_second_run_has_nothing_to_do_and_a_third_scores_only_what_is_new(lake, both):
    put(lake, "interactions", [interaction(f"r{i}") for i in range(10)])
    assert score(lake, both).scored == 10
    idle = score(lake, both)
    assert (idle.scored, idle.versions["rewards"]) == (0, 1)
    put(lake, "interactions", [interaction("new")])
    assert score(lake, both).scored == 1
    assert len(rewards(lake, "rewards")) == 11


def test_new_feedback_rescores_its_response_and_no_other(lake):
    put(lake, "interactions", [interaction("a"), interaction("b")])
    put(lake, "feedback", [thumb("a", 1, created_at=NOON)])
    score(lake, HUMAN)
    put(lake, "feedback", [thumb("a", 0, created_at=NOON + timedelta(hours=1))])
    assert score(lake, HUMAN).scored == 1
    assert len(rewards(lake, "rewards")) == 3
    assert by_id(lake)["a"]["reward"] == 0.0


def test_feedback_that_changes_no_reward_rescores_nothing(lake):
    put(lake, "interactions", [interaction("a")])
    score(lake, HUMAN)
    put(lake, "feedback", [thumb("a", 1) | {"kind": "comment", "value": None, "text": "nice"}])
    assert score(lake, HUMAN).scored == 0
    assert score(lake, HUMAN).versions["feedback"] == 1


def test_feedback_that_comes_before_its_interaction_is_joined_late(lake):
    put(lake, "feedback", [thumb("late", 1)])
    assert score(lake, HUMAN).scored == 0
    put(lake, "interactions", [interaction("late")])
    assert score(lake, HUMAN).scored == 1
    assert by_id(lake)["late"]["reward"] == 1.0


def test_another_scorer_scores_everything_anew_under_its_own_name(lake, both):
    put(lake, "interactions", [interaction("a"), interaction("b")])
    first = score(lake, HUMAN)
    second = score(lake, both)
    heavier = score(lake, both.model_copy(update={"human": HumanConfig(weight=2.0)}))
    assert [result.scored for result in (first, second, heavier)] == [2, 2, 2]
    assert len({result.scorer for result in (first, second, heavier)}) == 3
    assert {row["scorer"] for row in rewards(lake)} == {heavier.scorer}
    assert score(lake, HUMAN).scored == 0, "each scorer remembers how far it has come"


def test_the_scorers_name_changes_with_what_decides_a_reward_and_not_with_sizes(tmp_path, monkeypatch):
    def name(config: ScoringConfig, kinds: KindsConfig | None = None) -> str:
        return scorer_name(load_sources(config, kinds or KindsConfig()))

    (tmp_path / "changing_rule.py").write_text("def rule(batch): return [1.0] * batch.num_rows\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = ScoringConfig(rules={"b": RuleConfig(function="changing_rule:rule"), "a": RuleConfig(sql="1")})
    before = name(config)
    assert before.startswith("human+a+b@")
    assert before == name(config.model_copy(update={"threads": 1, "batch_rows": 3}))
    assert before == name(config.model_copy(update={"rules": dict(reversed(config.rules.items()))}))
    assert before != name(config.model_copy(update={"rules": config.rules | {"a": RuleConfig(sql="2")}}))
    assert before != name(config.model_copy(update={"human": HumanConfig(metrics=0.5)}))
    assert before != name(config, KindsConfig.model_validate({"ratings": {"stars": {"low": 0, "high": 5}}}))
    (tmp_path / "changing_rule.py").write_text("def rule(batch): return [0.0] * batch.num_rows\n")
    assert before != name(config)


@pytest.mark.parametrize("when", ["before the commit", "after the commit"])
def test_a_run_killed_around_its_commit_and_repeated_scores_each_response_once(lake, both, monkeypatch, when):
    put(lake, "interactions", [interaction(f"r{i}") for i in range(5)])
    commit = DeltaTable.create_write_transaction

    def killed(*args: Any, **kwargs: Any) -> None:
        if when == "after the commit":
            commit(*args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(DeltaTable, "create_write_transaction", killed)
        with pytest.raises(KeyboardInterrupt):
            score(lake, both)
    assert score(lake, both).scored == (0 if when == "after the commit" else 5)
    assert len(rewards(lake, "rewards")) == 5


def test_of_two_runs_at_once_one_commits_and_the_other_starts_over(lake, both, monkeypatch):
    put(lake, "interactions", [interaction(f"r{i}") for i in range(5)])
    real_append, others = Lake.append, []

    def append(self: Lake, table: str, *args: Any, **kwargs: Any) -> Any:
        if not others:  # another process is just a little faster
            others.append(None)
            others.append(score(Lake(lake.uri, lake.config), both))
        return real_append(self, table, *args, **kwargs)

    monkeypatch.setattr(Lake, "append", append)
    mine = score(lake, both)
    assert others[1].scored == 5
    assert mine.scored == 0
    assert len(rewards(lake, "rewards")) == 5


def test_a_run_that_never_gets_its_turn_gives_up(lake, monkeypatch):
    put(lake, "interactions", [interaction("a")])

    def conflict(*_: Any, **__: Any) -> None:
        raise LakeConflictError("again")

    monkeypatch.setattr(Lake, "append", conflict)
    with pytest.raises(LakeConflictError):
        score(lake, HUMAN)


def test_a_rule_that_fails_on_a_row_leaves_that_rows_component_missing_never_zero(lake, both):
    put(lake, "interactions", [interaction("bad", response="explode"), interaction("good")])
    result = score(lake, both)
    assert (result.scored, result.missing) == (2, 1)
    found = by_id(lake)
    assert found["bad"]["reward"] is None
    assert "exploded" in found["bad"]["missing"]["exact"]
    assert found["good"]["reward"] == 1.0


def test_a_rule_that_is_not_there_stops_the_run_before_it_writes(lake):
    put(lake, "interactions", [interaction("a")])
    with pytest.raises(RuleError, match="nowhere_at_all"):
        score(lake, ScoringConfig(rules={"mine": RuleConfig(function="nowhere_at_all:rule")}))
    assert lake.versions()["rewards"] == 0


def test_no_source_at_all_is_an_error(lake):
    with pytest.raises(ValueError, match=r"scoring\.human\.weight"):
        score(lake, ScoringConfig(human=HumanConfig(weight=0)))


def test_compaction_makes_nothing_new(lake, both):
    for number in range(3):
        put(lake, "interactions", [interaction(f"r{number}")])
        put(lake, "feedback", [thumb(f"r{number}", 1)])
    score(lake, both)
    for table in ("interactions", "feedback"):
        lake.table(table).optimize.compact()
    assert score(lake, both).scored == 0


def test_a_log_that_was_cleaned_up_since_the_last_run_loses_no_response(lake, caplog):
    put(lake, "interactions", [interaction("old")])
    score(lake, HUMAN)
    put(lake, "interactions", [interaction("new")])
    put(lake, "feedback", [thumb("old", 1)])
    put(lake, "interactions", [interaction("newer")])
    for table in ("interactions", "feedback"):
        lake.table(table).create_checkpoint()
        for commit in (Path(lake.table_uri(table)) / "_delta_log").glob("*.json"):
            if int(commit.stem) < lake.table(table).version():
                commit.unlink()
    (Path(lake.table_uri("feedback")) / "_delta_log" / f"{1:020d}.json").unlink()
    score(lake, HUMAN)
    found = by_id(lake)
    assert sorted(found) == ["new", "newer", "old"]
    assert found["old"]["reward"] == 1.0
    assert "cleaned up" in caplog.text
    assert score(lake, HUMAN).scored == 0


def test_progress_reaches_the_end_and_scored_at_grows_with_every_run(lake, both, monkeypatch):
    put(lake, "interactions", [interaction(f"r{i}") for i in range(25)])
    seen: list[tuple[str, int, int]] = []
    score(lake, both.model_copy(update={"batch_rows": 10}), progress=lambda *what: seen.append(what))
    assert seen == [("exact", n, 25) for n in (10, 20, 25)] + [("rewards", 25, 25)]
    monkeypatch.setattr(run, "datetime", type("Stopped", (), {"now": staticmethod(lambda _: NOON)}))
    put(lake, "feedback", [thumb("r0", 0)])
    score(lake, both)
    history = [row for row in rewards(lake, "rewards") if row["response_id"] == "r0"]
    assert [row["reward"] for row in history] == [1.0, 0.75]


def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(table, how many of its data files) of each search of a run, in their order; filled while runs go on."""
    files: list[tuple[str, int]] = []
    rows = candidates.Search._rows

    def recorded(search: candidates.Search, table: str, paths: list[str], columns: Any) -> str:
        files.append((table, len(paths)))
        return rows(search, table, paths, columns)

    monkeypatch.setattr(candidates.Search, "_rows", recorded)
    search = TableFiles.search

    def searched(self: TableFiles, table: str, paths: list[str], *arguments: Any) -> pa.Table:
        files.append((table, len(paths)))
        return search(self, table, paths, *arguments)

    monkeypatch.setattr(TableFiles, "search", searched)
    return files


def test_a_run_opens_only_the_files_that_can_hold_what_is_new(lake, monkeypatch):
    for number in range(12):
        put(lake, "interactions", [interaction(f"r{number:02}-{row}") for row in range(3)])
        put(lake, "feedback", [thumb(f"r{number:02}-0", 1)])
    score(lake, HUMAN)
    put(lake, "interactions", [interaction("r12-0")])
    put(lake, "feedback", [thumb("r12-0", 1)])
    put(lake, "feedback", [thumb("r03-1", 0), thumb("r08-2", 0)])
    files = opened(monkeypatch)
    assert score(lake, HUMAN).scored == 3
    # The votes on r03-1 and r08-2 stand in one file; the files of the votes on r04 to r07 lie between, and stay shut.
    added, whole, some = ("feedback", 2), ("interactions", 1), ("interactions", 2)
    about_some, about_whole = ("feedback", 1), ("feedback", 1)
    assert files == [added, whole, some, whole, about_some, about_whole]


def test_a_preference_scores_both_its_responses_again_also_old_ones(lake):
    put(lake, "interactions", [interaction("old")])
    put(lake, "interactions", [interaction("other")])
    assert score(lake, HUMAN).scored == 2
    put(lake, "interactions", [interaction("young")])
    put(lake, "feedback", [said("1", "young", "preference", rejected_response_id="old")])
    assert score(lake, HUMAN).scored == 2
    found = by_id(lake)
    assert (found["young"]["reward"], found["old"]["reward"], found["other"]["reward"]) == (1.0, 0.0, None)
    put(lake, "feedback", [said("2", "old", "preference", rejected_response_id="young", minute=1)])
    assert score(lake, HUMAN).scored == 2, "the source has changed its mind"
    found = by_id(lake)
    assert (found["young"]["reward"], found["old"]["reward"]) == (0.0, 1.0)


def test_what_was_new_and_is_compacted_before_it_is_scored_is_scored_once(lake, both):
    put(lake, "interactions", [interaction("first")])
    score(lake, both)
    for number in range(3):
        put(lake, "interactions", [interaction(f"r{number}"), interaction(f"aborted{number}", status="aborted")])
        put(lake, "feedback", [thumb("first", number % 2)])
    for table in ("interactions", "feedback"):
        lake.table(table).optimize.compact()
    put(lake, "interactions", [interaction("last")])
    assert score(lake, both).scored == 5
    assert Counter(row["response_id"] for row in rewards(lake, "rewards")) == {
        "first": 2, "r0": 1, "r1": 1, "r2": 1, "last": 1,
    }  # fmt: skip
    assert score(lake, both).scored == 0


def test_what_was_compacted_and_vacuumed_before_it_is_scored_is_found_all_the_same(lake, both, caplog):
    put(lake, "interactions", [interaction("first")])
    score(lake, both)
    for number in range(3):
        put(lake, "interactions", [interaction(f"r{number}")])
        put(lake, "feedback", [thumb("first", number % 2)])
    for table in ("interactions", "feedback"):
        lake.table(table).optimize.compact()
        lake.table(table).vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    assert score(lake, both).scored == 4
    assert "cleaned up" in caplog.text
    assert {row["response_id"] for row in rewards(lake)} == {"first", "r0", "r1", "r2"}
    assert score(lake, both).scored == 0


def test_where_the_log_does_not_tell_which_votes_are_new_no_state_of_them_is_rewarded_twice(lake, both, caplog):
    put(lake, "interactions", [interaction(name) for name in ("same", "voted", "without")])
    put(lake, "feedback", [thumb("same", 1), thumb("voted", 0)])
    score(lake, both)
    put(lake, "feedback", [thumb("voted", 1)])
    put(lake, "interactions", [interaction("new")])
    for table in ("interactions", "feedback"):
        lake.table(table).optimize.compact()
        lake.table(table).vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    assert score(lake, both).scored == 2
    assert "what is new in feedback since version" in caplog.text
    made = Counter(row["response_id"] for row in rewards(lake, "rewards"))
    assert made == {"same": 1, "voted": 2, "without": 1, "new": 1}
    assert score(lake, both).scored == 0


def test_rows_that_an_erasure_writes_anew_are_not_new_and_the_erased_are_not_scored(lake, both):
    put(lake, "interactions", [interaction("kept"), interaction("erased")])
    score(lake, both)
    put(lake, "interactions", [interaction("young"), interaction("erased young")])
    lake.replace(
        "interactions",
        lake.table("interactions").get_add_actions().column("path").to_pylist(),
        table_of("interactions", [interaction("kept"), interaction("young")]),
    )
    assert score(lake, both).scored == 1
    assert sorted(row["response_id"] for row in rewards(lake, "rewards")) == ["erased", "kept", "young"]


def test_a_vacuum_that_takes_a_file_from_under_a_run_makes_it_start_over(lake, both, monkeypatch):
    for number in range(3):
        put(lake, "interactions", [interaction(f"r{number}")])
    find, runs = candidates.Search.run, []

    def find_and_lose(*args: Any, **kwargs: Any) -> Any:
        find(*args, **kwargs)
        if not runs:
            lake.table("interactions").optimize.compact()
            lake.table("interactions").vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
        runs.append(args)

    monkeypatch.setattr(candidates.Search, "run", find_and_lose)
    assert score(lake, both).scored == 3
    assert len(runs) == 2
    assert len(rewards(lake, "rewards")) == 3


def test_tables_that_do_not_belong_together_are_an_error(lake, tmp_path):
    for number in range(3):
        put(lake, "interactions", [interaction(f"r{number}")])
    score(lake, HUMAN)
    shutil.rmtree(lake.table_uri("interactions"))
    lake.create()
    put(lake, "interactions", [interaction("r9")])
    with pytest.raises(ScoringError, match="interactions is scored up to version 3, but it is at version 1"):
        score(lake, HUMAN)


def test_two_runs_at_the_same_time_score_each_response_once(lake, both):
    put(lake, "interactions", [interaction(f"r{number}") for number in range(50)])
    results: list[Any] = []
    start = threading.Barrier(3, timeout=60)

    def run() -> None:
        start.wait()
        results.append(score(Lake(lake.uri, lake.config), both).scored)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(results) == [0, 0, 50]
    assert len(rewards(lake, "rewards")) == 50


def test_what_a_run_says_counts_components_and_reasons(lake, both):
    put(lake, "interactions", [interaction("a"), interaction("b", metadata={}), interaction("c", response="explode")])
    put(lake, "feedback", [thumb("a", 1)])
    result = score(lake, both.model_copy(update={"rules": both.rules | {"long": RuleConfig(sql="length(response)")}}))
    assert result.components == {"human": 1, "exact": 1, "long": 3}
    assert result.reasons["human"] == {"no vote": 2}
    assert result.reasons["long"] == {}
    assert sorted(result.reasons["exact"].values()) == [1, 1]
    assert any("exploded" in reason for reason in result.reasons["exact"])


def test_sql_and_ready_rules_are_components_beside_the_others(lake):
    config = ScoringConfig(
        rules={
            "exact": RuleConfig(ready="exact_match", weight=2),
            "short": RuleConfig(ready="length_penalty", target_tokens=2, max_tokens=4),
            "json": RuleConfig(ready="json_schema", json_schema={"type": "number"}),
            "even": RuleConfig(sql="CASE WHEN length(response) < 9 THEN length(response) % 2 = 0 END"),
        }
    )
    put(
        lake,
        "interactions",
        [
            interaction("a"),
            interaction("b", response="12", response_token_ids=[1, 2, 3], metadata={"answer": " 12 "}),
            interaction("c", response="much too long", metadata={}),
        ],
    )
    assert score(lake, config).missing == 0
    found = by_id(lake)
    assert found["a"]["components"] == {"even": 1.0, "exact": 1.0, "json": 0.0, "short": 1.0}
    assert found["a"]["reward"] == pytest.approx(4 / 5)
    assert found["b"]["components"] == {"even": 1.0, "exact": 1.0, "json": 1.0, "short": 0.5}
    assert found["c"]["components"] == {"json": 0.0, "short": 1.0}
    assert found["c"]["missing"] == {
        "human": "no vote",
        "even": "the expression gave no number, or failed",
        "exact": "no 'answer' in the response's metadata",
    }


def test_more_rows_than_memory_are_scored_by_spilling_and_too_little_memory_is_a_clear_error(lake, monkeypatch):
    count = 150_000
    ids = pa.array([f"r{number:07}" for number in range(count)])
    for table, row in (("interactions", interaction("x")), ("feedback", thumb("x", 1))):
        rows = table_of(table, [row]).take(pa.array([0] * count))
        column = rows.schema.get_field_index("response_id")
        lake.append(table, rows.set_column(column, rows.schema.field(column), ids))
    config = ScoringConfig(memory_limit="40MB", rules={"exact": RuleConfig(ready="exact_match")})
    connect = run.connect

    def without_a_disk(*limits: Any) -> Any:
        connection = connect(*limits)
        connection.execute("SET max_temp_directory_size = '0KB'")
        return connection

    with monkeypatch.context() as patch:
        patch.setattr(run, "connect", without_a_disk)
        with pytest.raises(ScoringError, match="memory_limit=40MB"):
            score(lake, config)
    assert lake.counts()["rewards"] == 0
    result = score(lake, config)
    assert (result.scored, result.components) == (count, {"human": count, "exact": count})


# What may happen: responses appear, votes come (also before and long after their responses), files are compacted, and
# a scoring run is killed before or after its commit, or lives. A plain model in Python says what must be true then.

numbers = st.integers(0, 5)
sources = st.sampled_from(["ann", "ben"])
times = st.integers(0, 30)
event = st.one_of(
    st.tuples(st.just("respond"), st.lists(numbers, min_size=1, max_size=3, unique=True)),
    st.tuples(st.just("thumb"), numbers, sources, st.sampled_from([0.0, 1.0]), times),
    st.tuples(st.just("prefer"), numbers, numbers, sources, times),
    st.tuples(st.just("score"), st.sampled_from(["lives", "before the commit", "after the commit"])),
    st.tuples(st.just("compact"), st.sampled_from(["interactions", "feedback"])),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=st.lists(event, max_size=12), few=st.sampled_from([1, 10_000]))
def test_whatever_happens_rewards_are_those_of_all_rows_at_once_and_each_state_has_one(
    tmp_path_factory, monkeypatch, events, few
):
    monkeypatch.setattr(candidates, "_FEW", few)  # more are looked for by DuckDB
    lake = Lake(str(tmp_path_factory.mktemp("lake")), LakeConfig())
    lake.create()
    there: set[int] = set()
    said_of: dict[tuple[int, str, str], tuple[int, str, float]] = {}
    dirty: set[int] = set()
    rows: Counter[int] = Counter()

    def vote(number: int, source: str, item: str, value: float, second: int, feedback_id: str) -> None:
        latest = said_of.get((number, source, item), (-1, "", 0.0))
        said_of[number, source, item] = max(latest, (second, feedback_id, value))
        dirty.add(number)

    for index, (what, *details) in enumerate([*events, ("score", "lives"), ("score", "lives")]):
        feedback_id = f"f{index:03}"
        if what == "respond":
            fresh = [number for number in details[0] if number not in there]
            there.update(fresh)
            dirty.update(fresh)
            if fresh:
                put(lake, "interactions", [interaction(f"r{number}") for number in fresh])
        elif what == "thumb":
            number, source, value, second = details
            columns = {"source": source, "value": value, "created_at": NOON + timedelta(seconds=second)}
            put(lake, "feedback", [said(feedback_id, f"r{number}", "thumb", **columns)])
            vote(number, source, "thumb", value, second, feedback_id)
        elif what == "prefer":
            chosen, rejected, source, second = details
            if chosen != rejected:
                columns = {"source": source, "created_at": NOON + timedelta(seconds=second)}
                row = said(feedback_id, f"r{chosen}", "preference", rejected_response_id=f"r{rejected}", **columns)
                put(lake, "feedback", [row])
                for number, value in ((chosen, 1.0), (rejected, 0.0)):
                    vote(number, source, f"{min(chosen, rejected)}-{max(chosen, rejected)}", value, second, feedback_id)
        elif what == "compact":
            lake.table(details[0]).optimize.compact()
        else:
            run_and_die(lake, details[0])
            if details[0] != "before the commit":
                rows.update(dirty & there)
                dirty = dirty - there

    found = {row["response_id"]: row["reward"] for row in rewards(lake)}
    assert found == {f"r{number}": expected(number, said_of) for number in there}
    assert Counter(row["response_id"] for row in rewards(lake, "rewards")) == {
        f"r{number}": count for number, count in rows.items()
    }


def expected(number: int, said_of: dict[tuple[int, str, str], tuple[int, str, float]]) -> float | None:
    """The mean over the sources of the means of their last votes."""
    opinions: dict[str, list[Fraction]] = {}
    for (about, source, _), (_, _, value) in said_of.items():
        if about == number:
            opinions.setdefault(source, []).append(Fraction(value))
    means = [sum(votes, Fraction(0)) / len(votes) for votes in opinions.values()]
    return pytest.approx(float(sum(means, Fraction(0)) / len(means))) if means else None


def run_and_die(lake: Lake, when: str) -> None:
    """A scoring run that is killed around its commit, or is not."""
    commit = DeltaTable.create_write_transaction

    def killed(*args: Any, **kwargs: Any) -> None:
        if when == "after the commit":
            commit(*args, **kwargs)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        if when != "lives":
            patch.setattr(DeltaTable, "create_write_transaction", killed)
        with suppress(KeyboardInterrupt):
            score(Lake(lake.uri, lake.config), HUMAN)
