from __future__ import annotations

from collections import Counter, defaultdict
from datetime import timedelta
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from feedback_rows import NOON, interaction, put, reward, said
from hypothesis import given, settings
from hypothesis import strategies as st

from feedback.config import LakeConfig
from feedback.datasets import (
    DEMONSTRATIONS,
    PAIRS,
    ROLLOUTS,
    THUMBS,
    count_on_policy,
    demonstrations,
    preference_pairs,
    prompts,
    redacted,
    rollouts,
    thumbs,
)
from feedback.events import session_rows
from feedback.lake.tables import Lake, LakeFileGoneError


@pytest.fixture
def asked(lake):
    """Prompt [1] asked twice (one request had two responses), [2] last, [3] only in an aborted response."""
    at = [NOON + timedelta(minutes=minute) for minute in range(5)]
    put(
        lake,
        "interactions",
        [
            interaction("a", prompt_token_ids=[1], created_at=at[0], prompt="one", metadata={"answer": "old"}),
            interaction("b", prompt_token_ids=[1], created_at=at[2], prompt="one", request_id="twice"),
            interaction("c", prompt_token_ids=[1], created_at=at[2], prompt="one", request_id="twice"),
            interaction("d", prompt_token_ids=[2], created_at=at[3], prompt=None, messages='[{"role": "user"}]'),
            interaction("e", prompt_token_ids=[3], created_at=at[4], status="aborted"),
        ],
    )
    return lake


def test_a_prompt_stands_once_the_latest_first_with_its_latest_metadata(asked):
    second, first = prompts(asked)
    assert (second.prompt_token_ids, second.prompt, second.messages) == ([2], None, '[{"role": "user"}]')
    assert (first.prompt_token_ids, first.prompt) == ([1], "one")
    assert first.metadata == {"answer": "four"}


def test_feedback_on_a_policy_is_what_was_said_of_responses_that_it_ended_and_a_session_counts_once(lake):
    swapped = [{"start": 0, "policy_version": 1}, {"start": 1, "policy_version": 2}]
    responses = [
        interaction("a"),
        interaction("b", policy_spans=swapped),
        interaction("c", policy_spans=[], status="imported"),
        interaction("d", tenant="other"),
    ]
    put(lake, "interactions", responses)
    assert count_on_policy(lake, 1) == 0
    votes = [("1", "a"), ("2", "a"), ("3", "b"), ("4", "c"), ("5", "unknown"), ("6", "d")]
    put(lake, "feedback", [said(name, of, "thumb", value=1.0) for name, of in votes])
    assert [count_on_policy(lake, policy) for policy in (1, 2, 3)] == [2, 1, 0]
    put(lake, "feedback", session_rows(said("session", "", "thumb", value=1.0), ["a", "a", "b"]))
    assert [count_on_policy(lake, policy) for policy in (1, 2, 3)] == [2, 2, 0]


def test_a_limit_keeps_the_prompts_that_were_requested_last(asked):
    assert [prompt.prompt_token_ids for prompt in prompts(asked, limit=1)] == [[2]]


def test_a_limit_below_one_is_refused(asked):
    with pytest.raises(ValueError, match="at least 1"):
        prompts(asked, limit=0)


def test_the_same_versions_give_the_same_data_whatever_came_after(asked):
    versions = asked.versions()
    before = prompts(asked)
    put(asked, "interactions", [interaction("f", prompt_token_ids=[1], created_at=NOON + timedelta(days=1))])
    assert prompts(asked) != before
    assert prompts(asked, versions=versions) == before


def test_rollouts_are_rewarded_responses_with_what_their_policy_did(lake):
    spans = [{"start": 0, "policy_version": 1}, {"start": 1, "policy_version": 2}]
    put(
        lake,
        "interactions",
        [
            interaction("b", created_at=NOON + timedelta(seconds=1), policy_spans=spans),
            interaction("a"),
            interaction("unrated"),
            interaction("aborted", status="aborted"),
        ],
    )
    assert rollouts(lake).num_rows == 0
    put(lake, "rewards", [reward("a", 1.0), reward("b", 0.0), reward("unrated", None), reward("aborted", 1.0)])
    versions = lake.versions()
    table = rollouts(lake)
    assert table.schema == ROLLOUTS
    assert table.column("response_id").to_pylist() == ["a", "b"]
    assert table.column("reward").to_pylist() == [1.0, 0.0]
    assert table.column("logprobs").to_pylist() == [[-0.25, -0.5]] * 2
    assert table.column("policy_spans").to_pylist()[1] == spans
    put(lake, "rewards", [reward("a", 0.0, minute=1), reward("unrated", 1.0, minute=1)])
    assert rollouts(lake).column("reward").to_pylist() == [0.0, 1.0, 0.0]
    assert rollouts(lake, versions=versions).equals(table)


def responses(lake: Lake, *names: str, **columns: Any) -> None:
    """Complete responses, each with a text of its own, one second apart."""
    rows = [
        interaction(name, **{"response": f"text of {name}", "created_at": NOON + timedelta(seconds=at)} | columns)
        for at, name in enumerate(names)
    ]
    put(lake, "interactions", rows)


NOTHING_LEFT_OUT = {
    "on an unknown response": 0,
    "on a response of another tenant": 0,
    "on a response that is not complete": 0,
}
NO_PAIR_LEFT_OUT = {"prompts differ": 0, "tie": 0, "both texts are the same": 0, "over the cap of their prompt": 0}


def test_an_empty_lake_gives_empty_datasets_with_their_columns_and_versions(lake):
    for read, schema, more in (
        (preference_pairs, PAIRS, NO_PAIR_LEFT_OUT),
        (thumbs, THUMBS, {"tie": 0}),
        (demonstrations, DEMONSTRATIONS, {}),
    ):
        found = read(lake)
        assert (found.table.num_rows, found.table.schema) == (0, schema)
        assert found.versions == {"interactions": 0, "feedback": 0}
        assert found.left_out == NOTHING_LEFT_OUT | more


def test_a_preference_is_a_pair_of_two_responses_to_one_prompt(lake):
    responses(lake, "a", "b")
    responses(lake, "other", prompt_token_ids=[9])
    put(
        lake,
        "feedback",
        [
            said("f1", "a", "preference", rejected_response_id="b", minute=1),
            said("f2", "a", "preference", rejected_response_id="other", minute=2),
        ],
    )
    found = preference_pairs(lake)
    assert found.table.schema == PAIRS
    [pair] = found.table.to_pylist()
    assert pair == {
        "kind": "preference",
        "feedback_id": "f1",
        "tenant": "default",
        "chosen_response_id": "a",
        "rejected_response_id": "b",
        "prompt": "two and two",
        "messages": None,
        "prompt_token_ids": [2, 4, 2],
        "chosen": "text of a",
        "chosen_token_ids": [4, 0],
        "chosen_logprobs": [-0.25, -0.5],
        "rejected": "text of b",
        "rejected_token_ids": [4, 0],
        "rejected_logprobs": [-0.25, -0.5],
        "imported": False,
        "created_at": NOON + timedelta(minutes=1),
    }
    assert found.left_out == NOTHING_LEFT_OUT | NO_PAIR_LEFT_OUT | {"prompts differ": 1}


def test_of_preferences_the_last_of_each_source_counts_and_the_majority_decides(lake):
    responses(lake, "a", "b", "c", "d")
    put(
        lake,
        "feedback",
        [
            said("1", "a", "preference", rejected_response_id="b", source="ann", minute=1),
            said("2", "b", "preference", rejected_response_id="a", source="ann", minute=2),  # ann changed her mind
            said("3", "b", "preference", rejected_response_id="a", source="bob", minute=3),
            said("4", "a", "preference", rejected_response_id="b", source="eve", minute=4),
            said("5", "c", "preference", rejected_response_id="d", source="ann"),
            said("6", "d", "preference", rejected_response_id="c", source="bob"),
        ],
    )
    found = preference_pairs(lake)
    pairs = found.table.select(["chosen_response_id", "rejected_response_id", "feedback_id"]).to_pylist()
    assert [tuple(pair.values()) for pair in pairs] == [("b", "a", "3")]
    assert found.left_out["tie"] == 1


def test_a_correction_is_a_pair_with_what_it_corrects_and_a_demonstration(lake):
    responses(lake, "a", "same")
    put(
        lake,
        "feedback",
        [
            said("1", "a", "correction", text="first try", minute=1),
            said("2", "a", "correction", text="better", minute=2),
            said("3", "a", "correction", text="better", source="bob", minute=3),
            said("4", "a", "correction", text="mine", source="eve", minute=4),
            said("5", "same", "correction", text="text of same", minute=5),
        ],
    )
    found = preference_pairs(lake)
    first, second = found.table.to_pylist()
    assert (first["kind"], first["feedback_id"], first["chosen"], first["rejected"]) == (
        "correction",
        "2",
        "better",
        "text of a",
    )
    assert (first["chosen_response_id"], first["chosen_token_ids"], first["chosen_logprobs"]) == (None, None, None)
    assert first["rejected_logprobs"] == [-0.25, -0.5]
    assert second["chosen"] == "mine"
    assert found.left_out["both texts are the same"] == 1
    shown = demonstrations(lake)
    assert shown.table.schema == DEMONSTRATIONS
    assert shown.table.column("text").to_pylist() == ["better", "mine", "text of same"]
    assert shown.table.column("prompt_token_ids").to_pylist() == [[2, 4, 2]] * 3


def test_thumbs_are_the_majority_of_the_last_votes_and_ties_are_counted(lake):
    responses(lake, "good", "bad", "tie", "changed")
    put(
        lake,
        "feedback",
        [
            said("1", "good", "thumb", value=1.0, source="ann"),
            said("2", "good", "thumb", value=1.0, source="bob"),
            said("3", "good", "thumb", value=0.0, source="eve"),
            said("4", "bad", "thumb", value=0.0, minute=1),
            said("5", "tie", "thumb", value=0.0, source="ann"),
            said("6", "tie", "thumb", value=1.0, source="bob"),
            said("7", "changed", "thumb", value=0.0, minute=2),
            said("8", "changed", "thumb", value=1.0, minute=3),
        ],
    )
    found = thumbs(lake)
    assert found.table.schema == THUMBS
    shown = found.table.select(["response_id", "desirable", "up", "down"]).to_pylist()
    assert [tuple(row.values()) for row in shown] == [
        ("good", True, 2, 1),
        ("bad", False, 0, 1),
        ("changed", True, 1, 0),
    ]
    assert found.left_out == NOTHING_LEFT_OUT | {"tie": 1}


def test_feedback_that_counts_for_nothing_is_counted_by_reason(lake):
    responses(lake, "a", "b")
    responses(lake, "theirs", tenant="them")
    responses(lake, "half", status="aborted")
    put(
        lake,
        "feedback",
        [
            said("1", "never-seen", "thumb", value=1.0),
            said("2", "theirs", "thumb", value=1.0),
            said("3", "half", "thumb", value=1.0),
            said("4", "a", "preference", rejected_response_id="never-seen"),
            said("5", "a", "preference", rejected_response_id="theirs"),
            said("6", "half", "preference", rejected_response_id="a"),
            said("7", "never-seen", "correction", text="so"),
            said("8", "a", "comment", text="not asked for"),
        ],
    )
    reasons = ("on an unknown response", "on a response of another tenant", "on a response that is not complete")
    found = preference_pairs(lake)
    assert found.table.num_rows == 0
    assert [found.left_out[reason] for reason in reasons] == [3, 2, 2]
    assert [thumbs(lake).left_out[reason] for reason in reasons] == [1, 1, 1]
    assert [demonstrations(lake).left_out[reason] for reason in reasons] == [1, 0, 0]


def test_a_sessions_thumb_is_a_thumb_on_its_last_response(lake):
    responses(lake, "a", "b")
    put(lake, "feedback", session_rows(said("1", "", "thumb", value=1.0), ["a", "b"]))
    assert thumbs(lake).table.column("response_id").to_pylist() == ["b"]


def test_redacted_responses_are_in_no_dataset_and_what_is_said_of_them_is_counted(lake):
    responses(lake, "a")
    without = {"prompt_token_ids": [], "response_token_ids": [], "logprobs": []}
    responses(lake, "r", "s", status="redacted", **without)
    put(
        lake,
        "feedback",
        [
            said("1", "r", "thumb", value=1.0),
            said("2", "a", "preference", rejected_response_id="r"),
            said("3", "s", "correction", text="so"),
            said("4", "a", "thumb", value=1.0),
        ],
    )
    reason = "on a redacted response or prompt"
    assert preference_pairs(lake).left_out[reason] == 3
    assert preference_pairs(lake).table.num_rows == demonstrations(lake).table.num_rows == 0
    assert thumbs(lake).table.column("response_id").to_pylist() == ["a"]
    assert (thumbs(lake).left_out[reason], demonstrations(lake).left_out[reason]) == (1, 1)
    assert len(prompts(lake)) == 1
    assert redacted(lake) == 2
    assert redacted(lake, versions={"interactions": 1}) == 0


def test_feedback_recorded_twice_under_one_id_counts_once(lake):
    responses(lake, "a")
    put(lake, "feedback", [said("1", "a", "thumb", value=1.0), said("1", "a", "thumb", value=1.0, source="retry")])
    put(lake, "feedback", [said("1", "a", "thumb", value=0.0, source="elsewhere", minute=1)])
    [row] = thumbs(lake).table.to_pylist()
    assert (row["up"], row["down"]) == (1, 0)


def test_thumbs_up_and_down_on_one_prompt_are_paired_up_to_the_cap(lake):
    ups, downs = [f"up{number}" for number in range(4)], [f"down{number}" for number in range(3)]
    responses(lake, *ups, *downs)
    responses(lake, "elsewhere", prompt_token_ids=[9])
    responses(lake, "theirs", tenant="them")
    votes = [said(name, name, "thumb", value=float(name in ups)) for name in (*ups, *downs, "elsewhere")]
    put(lake, "feedback", [*votes, said("theirs", "theirs", "thumb", value=0.0, tenant="them")])
    everything = preference_pairs(lake, max_thumb_pairs_per_prompt=50)
    assert found_pairs(everything) == set(product(ups, downs))
    assert everything.left_out == NOTHING_LEFT_OUT | NO_PAIR_LEFT_OUT
    three = preference_pairs(lake, max_thumb_pairs_per_prompt=3)
    assert found_pairs(three) == {("up3", "down2"), ("up2", "down1"), ("up1", "down0")}, "different ones first"
    assert three.left_out["over the cap of their prompt"] == 9
    none = preference_pairs(lake, max_thumb_pairs_per_prompt=0)
    assert (none.table.num_rows, none.left_out["over the cap of their prompt"]) == (0, 12)
    with pytest.raises(ValueError, match="-1"):
        preference_pairs(lake, max_thumb_pairs_per_prompt=-1)


def test_the_same_text_voted_up_and_down_is_no_pair(lake):
    responses(lake, "a", "b", response="the same")
    put(lake, "feedback", [said("1", "a", "thumb", value=1.0), said("2", "b", "thumb", value=0.0)])
    found = preference_pairs(lake)
    assert (found.table.num_rows, found.left_out["both texts are the same"]) == (0, 1)


def found_pairs(found: Any) -> set[tuple[str, str]]:
    rows = found.table.to_pylist()
    pairs = {(row["chosen_response_id"], row["rejected_response_id"]) for row in rows}
    assert len(pairs) == len(rows)
    return pairs


def test_a_version_whose_files_are_gone_is_named(lake):
    for name in ("a", "b"):
        responses(lake, name)
    versions = lake.versions()
    table = DeltaTable(lake.table_uri("interactions"))
    table.optimize.compact()
    table.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)
    assert len(prompts(lake)) == 1
    with pytest.raises(LakeFileGoneError, match="interactions at version 2"):
        prompts(lake, versions=versions)


names = st.sampled_from("abcdef")
minutes = st.integers(0, 3)
sources = st.sampled_from(["ann", "bob", "eve"])
votes = st.builds(
    lambda name, value, minute, source: {
        "response_id": name,
        "kind": "thumb",
        "value": value,
        "minute": minute,
        "source": source,
    },
    names,
    st.sampled_from([0.0, 1.0]),
    minutes,
    sources,
)
choices = st.builds(
    lambda pair, minute, source: {
        "response_id": pair[0],
        "kind": "preference",
        "rejected_response_id": pair[1],
        "minute": minute,
        "source": source,
    },
    st.permutations("abcdef").map(lambda order: order[:2]),
    minutes,
    sources,
)
corrections = st.builds(
    lambda name, text, minute, source: {
        "response_id": name,
        "kind": "correction",
        "text": text,
        "minute": minute,
        "source": source,
    },
    names,
    st.sampled_from(["so", "or so"]),
    minutes,
    sources,
)


def six_responses(lake: Lake) -> None:
    """a, b, c to one prompt, d, e to another, f is another tenant's."""
    responses(lake, "a", "b", "c")
    responses(lake, "d", "e", prompt_token_ids=[9])
    responses(lake, "f", tenant="them")


def rows_of(feedback: list[dict[str, Any]], first: int = 0) -> list[dict[str, Any]]:
    return [said(f"{first + number:03d}", **row) for number, row in enumerate(feedback)]


@settings(max_examples=12, deadline=None)
@given(st.lists(st.one_of(votes, choices), max_size=30))
def test_votes_and_preferences_come_to_what_counting_them_by_hand_gives(feedback):
    rows = rows_of(feedback)
    with TemporaryDirectory() as folder:
        lake = Lake(folder, LakeConfig())
        lake.create()
        six_responses(lake)
        put(lake, "feedback", rows)
        voted, pairs = thumbs(lake), preference_pairs(lake)
    last: dict[Any, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: (row["created_at"], row["feedback_id"])):
        about = frozenset((row["response_id"], row.get("rejected_response_id")))
        if "f" not in about:
            last[row["kind"], row["source"], about] = row
    scores: Counter[str] = Counter()
    balance: defaultdict[frozenset[str], Counter[str]] = defaultdict(Counter)
    for (kind, _, about), row in last.items():
        if kind == "thumb":
            scores[row["response_id"]] += 1 if row["value"] else -1
        else:
            balance[about][row["response_id"]] += 1
    desirable = {name: score > 0 for name, score in scores.items() if score}
    rows_found = voted.table.to_pylist()
    assert {row["response_id"]: row["desirable"] for row in rows_found} == desirable
    assert len(rows_found) == len(desirable)
    assert voted.left_out["tie"] == list(scores.values()).count(0)
    same = [set("abc"), set("de")]
    chosen = {
        (ranking[0][0], next(iter(about - {ranking[0][0]})))
        for about, counted in balance.items()
        if any(about <= prompt for prompt in same)
        and (len(ranking := counted.most_common()) == 1 or ranking[0][1] > ranking[1][1])
    }
    preferred = [row for row in pairs.table.to_pylist() if row["kind"] == "preference"]
    assert {(row["chosen_response_id"], row["rejected_response_id"]) for row in preferred} == chosen
    assert len(preferred) == len(chosen)
    assert pairs.left_out["prompts differ"] == sum(not any(about <= p for p in same) for about in balance)
    ups = {name for name, good in desirable.items() if good}
    thumbed = {
        (up, down) for up in ups for down in desirable.keys() - ups if any({up, down} <= prompt for prompt in same)
    }
    rows_of_thumbs = [row for row in pairs.table.to_pylist() if row["kind"] == "thumbs"]
    assert {(row["chosen_response_id"], row["rejected_response_id"]) for row in rows_of_thumbs} == thumbed


said_of_all = st.lists(st.one_of(votes, choices, corrections), max_size=12)


@settings(max_examples=6, deadline=None)
@given(said_of_all, said_of_all, st.integers(0, 3))
def test_old_versions_give_the_same_data_after_appends_and_compaction(before, after, files):
    with TemporaryDirectory() as folder:
        lake = Lake(str(Path(folder) / "lake"), LakeConfig())
        lake.create()
        six_responses(lake)
        put(lake, "rewards", [reward(name, 0.5) for name in "abcd"])
        for number in range(0, len(before), files + 1):
            put(lake, "feedback", rows_of(before[number : number + files + 1], first=number))
        versions = lake.versions()
        first = everything(lake, versions)
        responses(lake, "g", "h")
        put(lake, "rewards", [reward(name, 0.1, minute=1) for name in "agh"])
        put(lake, "feedback", rows_of(after, first=500))
        for table in versions:
            DeltaTable(lake.table_uri(table)).optimize.compact()
        latest = lake.versions()
        again = everything(lake, versions)
        assert all(old.equals(new) for old, new in zip(first, again, strict=True))
        compacted = everything(lake, latest)
        assert compacted[0].num_rows == 6, "a, b, c, d, g and h"
        assert all(old.equals(new) for old, new in zip(compacted, everything(lake, latest), strict=True))


def everything(lake: Lake, versions: dict[str, int]) -> list[pa.Table]:
    datasets = [read(lake, versions=versions) for read in (preference_pairs, thumbs, demonstrations)]
    assert all(dataset.versions.items() <= versions.items() for dataset in datasets)
    return [rollouts(lake, versions=versions), *(dataset.table for dataset in datasets)]
