"""The rule by which votes become the component ``human``, against a plain loop in Python over all of them."""

from __future__ import annotations

import random
from collections import defaultdict
from datetime import timedelta
from typing import Any

import duckdb
import pytest
from feedback_rows import NOON, said, table_of
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from feedback.config import HumanConfig, KindsConfig
from feedback.events import session_rows
from feedback.scoring.sources.human import counts_sql, identity, votes_sql

KINDS = KindsConfig.model_validate(
    {
        "ratings": {"stars": {"low": 1, "high": 5}, "percent": {"low": 0, "high": 100}},
        "metrics": {
            "latency": {"low": 0, "high": 10, "direction": "lower"},
            "clicks": {"low": 0, "high": 4},
            "solved": {"type": "boolean"},
            "reopened": {"type": "boolean", "direction": "lower"},
        },
    }
)


def human(rows: list[dict[str, Any]], config: HumanConfig | None = None) -> dict[tuple[str, str], float]:
    """{(tenant, response): component} by the SQL, whatever the order of the rows."""
    random.Random(1).shuffle(rows)
    with duckdb.connect() as connection:
        connection.register("votes_cast", table_of("feedback", rows))
        sql = votes_sql("votes_cast", config or HumanConfig(), KINDS)
        return {(tenant, response): value for tenant, response, value in connection.execute(sql).fetchall()}


def of_a(rows: list[dict[str, Any]], config: HumanConfig | None = None) -> float | None:
    return human(rows, config).get(("default", "a"))


def test_the_last_vote_of_each_source_counts_by_time_and_then_by_id():
    votes = [
        said("1", "a", "thumb", value=1.0, source="ann", minute=0),
        said("2", "a", "thumb", value=0.0, source="ann", minute=1),
        said("3", "a", "thumb", value=1.0, source="ben", minute=0),
        said("5", "a", "thumb", value=1.0, source="cat", minute=2),
        said("4", "a", "thumb", value=0.0, source="cat", minute=2),
    ]
    assert of_a(votes) == pytest.approx(2 / 3)


def test_a_vote_counts_only_for_a_response_of_its_own_tenant():
    votes = [said("1", "a", "thumb", value=1.0), said("2", "a", "thumb", value=0.0, tenant="eve", source="eve")]
    assert human(votes) == {("default", "a"): 1.0, ("eve", "a"): 0.0}


@pytest.mark.parametrize(
    ("kind", "name", "value", "vote"),
    [
        ("thumb", None, 1.0, 1.0),
        ("rating", "stars", 1.0, 0.0),
        ("rating", "stars", 4.0, 0.75),
        ("rating", None, 2.0, 0.25),
        ("rating", "percent", 30.0, 0.3),
        ("rating", "stars", 9.0, 1.0),
        ("rating", "unknown", 3.0, None),
        ("metric", "latency", 2.5, 0.75),
        ("metric", "latency", 99.0, 0.0),
        ("metric", "clicks", 1.0, 0.25),
        ("metric", "solved", 1.0, 1.0),
        ("metric", "reopened", 1.0, 0.0),
        ("metric", "reopened", 0.0, 1.0),
        ("metric", "unknown", 1.0, None),
        ("metric", "clicks", None, None),
        ("metric", "clicks", float("nan"), None),
        ("comment", None, None, None),
        ("correction", None, None, None),
    ],
)
def test_a_vote_is_the_place_of_its_value_in_its_range(kind, name, value, vote):
    row = said("1", "a", kind, name=name, value=value)
    assert of_a([row]) == (None if vote is None else pytest.approx(vote))
    with duckdb.connect() as connection:
        connection.register("rows", table_of("feedback", [row]))
        counted = connection.execute(f"SELECT {counts_sql(HumanConfig(), KINDS)} FROM rows").fetchall()
    assert counted == [(vote is not None,)]


def test_a_preference_is_a_vote_for_one_response_and_against_the_other():
    votes = [said("1", "a", "preference", rejected_response_id="b")]
    assert human(votes) == {("default", "a"): 1.0, ("default", "b"): 0.0}


def test_of_preferences_between_two_responses_the_last_counts_whichever_it_prefers():
    votes = [
        said("1", "a", "preference", rejected_response_id="b", minute=0),
        said("2", "b", "preference", rejected_response_id="a", minute=1),
        said("3", "a", "preference", rejected_response_id="c", minute=0),
    ]
    assert human(votes) == {("default", "a"): 0.5, ("default", "b"): 1.0, ("default", "c"): 0.0}


def test_who_votes_often_weighs_no_more_than_who_votes_once():
    often = [said(f"{n}", "a", "preference", rejected_response_id=f"x{n}", source="ann") for n in range(9)]
    once = [said("z", "a", "thumb", value=0.0, source="ben")]
    assert of_a(often + once) == pytest.approx(0.5)


def test_kinds_weigh_within_a_source_and_a_source_weighs_as_its_weightiest_kind():
    config = HumanConfig(metrics=0.25)
    ann = [said("1", "a", "thumb", value=1.0), said("2", "a", "metric", name="solved", value=0.0)]
    assert of_a(ann, config) == pytest.approx(0.8)
    machine = said("3", "a", "metric", name="clicks", value=0.0, source="machine")
    assert of_a([*ann, machine], config) == pytest.approx((1 * 0.8 + 0.25 * 0.0) / 1.25)


def session(feedback_id: str, value: float, *response_ids: str, minute: int = 0) -> list[dict[str, Any]]:
    """A thumb on a session with these responses, as it is recorded."""
    row = said(feedback_id, "", "thumb", value=value, minute=minute)
    return session_rows(row, response_ids)


@pytest.mark.parametrize(
    ("rule", "up", "down"),
    [
        ("last", [None, None, 1.0], [None, None, 0.0]),
        ("equal", [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]),
        ("discounted", [0.5 + 0.25 * 0.5, 0.5 + 0.5 * 0.5, 1.0], [0.5 - 0.25 * 0.5, 0.5 - 0.5 * 0.5, 0.0]),
    ],
)
def test_a_sessions_vote_is_shared_by_the_rule(rule: Any, up: list[float | None], down: list[float | None]) -> None:
    config = HumanConfig(sessions=rule, session_discount=0.5)
    for value, expected in ((1.0, up), (0.0, down)):
        found = human(session("f", value, "a", "b", "c"), config)
        assert [found.get(("default", name)) for name in "abc"] == expected


def test_a_later_vote_on_a_response_replaces_the_sessions_and_an_earlier_session_counts_where_a_later_has_no_vote():
    votes = [*session("f", 1.0, "a", "b"), said("g", "a", "thumb", value=0.0, minute=1)]
    assert human(votes, HumanConfig(sessions="equal")) == {("default", "a"): 0.0, ("default", "b"): 1.0}
    votes = [*session("f", 1.0, "a"), *session("g", 0.0, "a", "b", minute=1)]
    assert human(votes) == {("default", "a"): 1.0, ("default", "b"): 0.0}
    assert human(votes, HumanConfig(sessions="equal")) == {("default", "a"): 0.0, ("default", "b"): 0.0}


def test_another_rule_for_sessions_is_another_scorer_and_the_default_is_the_one_from_before_there_were_any() -> None:
    assert len(identity(HumanConfig(), KINDS)) == 6
    others = [
        HumanConfig(sessions="equal"),
        HumanConfig(sessions="discounted"),
        HumanConfig(sessions="discounted", session_discount=0.8),
    ]
    assert len({str(identity(config, KINDS)) for config in [HumanConfig(), *others]}) == 4


def test_a_kind_without_weight_is_no_vote():
    votes = [said("1", "a", "thumb", value=1.0), said("2", "b", "rating", name="stars", value=1.0)]
    assert human(votes, HumanConfig(thumbs=0)) == {("default", "b"): 0.0}
    with pytest.raises(ValidationError, match="no kind of vote has a weight"):
        HumanConfig(thumbs=0, ratings=0, preferences=0, metrics=0)


def test_the_same_row_twice_counts_once():
    vote = said("1", "a", "thumb", value=0.0)
    other = said("2", "a", "thumb", value=1.0, source="ben")
    assert of_a([vote, dict(vote), other]) == pytest.approx(0.5)


responses, people = st.sampled_from("abc"), st.sampled_from(["ann", "ben"])
cast = st.one_of(
    st.tuples(responses, people, st.just("thumb"), st.none(), st.sampled_from([0.0, 1.0])),
    st.tuples(responses, people, st.just("rating"), st.sampled_from([None, "stars", "percent"]), st.floats(-1, 9)),
    st.tuples(responses, people, st.just("metric"), st.sampled_from(["latency", "solved", "x"]), st.floats(0, 12)),
    st.tuples(responses, people, st.just("preference"), responses, st.none()),
)


@settings(max_examples=40, deadline=None)
@given(
    votes=st.lists(st.tuples(cast, st.integers(0, 5), st.sampled_from(["default", "other"])), max_size=25),
    weights=st.fixed_dictionaries(
        {kind: st.sampled_from([0.0, 0.5, 1.0]) for kind in ("thumbs", "ratings", "metrics")}
    ),
)
def test_the_component_is_what_the_rule_says(votes, weights):
    config = HumanConfig(**weights, preferences=2.0)
    weight = {"thumb": config.thumbs, "rating": config.ratings, "metric": config.metrics, "preference": 2.0}
    rows, last = [], {}
    for index, ((response, source, kind, extra, value), minute, tenant) in enumerate(votes):
        columns: dict[str, Any] = {"source": source, "tenant": tenant, "created_at": NOON + timedelta(minutes=minute)}
        feedback_id = f"{index:03}"
        if kind == "preference":
            rows.append(said(feedback_id, response, kind, rejected_response_id=extra, **columns))
            each = [] if response == extra else [(response, 1.0), (extra, 0.0)]
            item = "".join(sorted([response, extra]))
        else:
            rows.append(said(feedback_id, response, kind, name=extra, value=value, **columns))
            place = plain_vote(kind, extra, value)
            each = [] if place is None else [(response, place)]
            item = str(extra or "stars") if kind == "rating" else str(extra)
        for about, vote in each if weight[kind] > 0 else []:
            key = (tenant, about, source, kind, item)
            last[key] = max(last.get(key, (-1, "", 0.0)), (minute, feedback_id, vote))

    opinions = defaultdict(list)
    for (tenant, about, source, kind, _), (_, _, vote) in last.items():
        opinions[tenant, about, source].append((weight[kind], vote))
    means = defaultdict(list)
    for (tenant, about, _), given_votes in opinions.items():
        opinion = sum(w * vote for w, vote in given_votes) / sum(w for w, _ in given_votes)
        means[tenant, about].append((max(w for w, _ in given_votes), opinion))
    expected = {key: sum(w * o for w, o in each) / sum(w for w, _ in each) for key, each in means.items()}
    assert human(rows, config) == {key: pytest.approx(value) for key, value in expected.items()}


def plain_vote(kind: str, name: str | None, value: float) -> float | None:
    if kind == "thumb":
        return value
    ranges = {"stars": (1, 5), "percent": (0, 100), "latency": (0, 10), "solved": (0, 1)}
    if kind == "rating":
        name = name or "stars"
    if name not in ranges:
        return None
    low, high = ranges[name]
    place = min(1.0, max(0.0, (value - low) / (high - low)))
    return 1 - place if name == "latency" else place
