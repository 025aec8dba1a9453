"""Who is served by which policy of an experiment in a fleet: the draw, the header, and the replicas it leads to."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from serve.fleet.assignment import HEADER, Arms, Route, assigned, read, replica_stats, routed
from serve.fleet.planner import candidates
from serve.policies.experiments import Experiment, Phase, of_replicas, unit_of
from tests.paths import ROOT

START = 1_000.0
EXPERIMENT = Experiment(
    number=1,
    candidate=2,
    control=1,
    seed="a seed",
    started_at=START,
    block_s=10.0,
    phases=(Phase(0, 0.01), Phase(10, 0.1), Phase(20, 0.5)),
    generation=1,
    state="running",
    who="ann",
    why="a test",
    plan={"a": 1},
    unit="user",
)
AT = {0.01: START, 0.1: START + 100, 0.5: START + 200}
UNITS = [unit_of("acme", user=f"user {number}", session=None, request="") for number in range(20_000)]


def variants(experiment: Experiment, at: float) -> np.ndarray:
    return np.array([experiment.assign(unit, at).variant == "candidate" for unit in UNITS])


def test_a_unit_is_the_user_else_the_session_else_the_request_of_one_tenant() -> None:
    def unit(tenant: str = "acme", user: str | None = None, session: str | None = None, request: str = "r") -> str:
        return unit_of(tenant, user=user, session=session, request=request)

    assert unit(user="ann", session="s", request="1") == unit(user="ann", session="t", request="2")
    assert unit(session="s", request="1") == unit(session="s", request="2")
    assert len({unit(user="x"), unit(session="x"), unit(request="x"), unit("other", user="x"), unit(user="y")}) == 5


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
def test_each_phase_has_the_share_that_was_declared(share: float) -> None:
    found = variants(EXPERIMENT, AT[share])
    low, high = binom.interval(0.999, len(UNITS), share)
    assert low <= found.sum() <= high
    labels = [EXPERIMENT.assign(unit, AT[share]) for unit in UNITS[:500]]
    assert {label.propensity for label in labels if label.variant == "control"} == {1 - share}
    assert {label.propensity for label in labels if label.variant == "candidate"} <= {share}


def test_the_candidate_keeps_its_units_as_its_share_grows() -> None:
    first, second, third = (variants(EXPERIMENT, at) for at in AT.values())
    assert not (first & ~second).any()
    assert not (second & ~third).any()


def test_another_experiment_and_the_watch_of_the_same_one_draw_independently() -> None:
    at = AT[0.5]
    before = variants(EXPERIMENT, at)
    watched = replace(EXPERIMENT, watched_from=30, phases=(*EXPERIMENT.phases, Phase(30, 0.5)))
    for after in (variants(replace(EXPERIMENT, seed="another"), at), variants(watched, START + 300)):
        low, high = binom.interval(0.999, int(before.sum()), 0.5)
        assert low <= (before & after).sum() <= high
    assert (variants(watched, START + 299) == before).all()


def test_a_draw_is_enough_to_tell_the_variant_again_and_names_nobody() -> None:
    for unit in UNITS[:200]:
        found = EXPERIMENT.assign(unit, AT[0.5])
        assert EXPERIMENT.drawn(found.draw, 20) == (found.variant, found.propensity)
        assert found.draw != unit
        assert found.draw != replace(EXPERIMENT, seed="another").assign(unit, AT[0.5]).draw


def test_a_replicas_report_has_what_assignment_needs_and_nothing_that_people_wrote() -> None:
    told = of_replicas(EXPERIMENT.for_routers())
    assert (told.who, told.why, told.plan) == ("", "", {})
    assert [told.assign(unit, AT[0.1]) for unit in UNITS[:50]] == [
        EXPERIMENT.assign(unit, AT[0.1]) for unit in UNITS[:50]
    ]


# The header


def request(body: bytes, path: str = "/generate", **headers: str) -> dict[str, Any]:
    scope = {
        "type": "http",
        "path": path,
        "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()],
    }
    routed_scope = asyncio.run(routed(scope, body, "acme", EXPERIMENT))
    return {name.decode(): value.decode() for name, value in routed_scope["headers"]}


@pytest.mark.parametrize(
    ("path", "body", "headers", "expected"),
    [
        ("/generate", b'{"user": "ann", "session_id": "s"}', {}, {"user": "ann"}),
        ("/generate", b'{"session_id": "s"}', {"x_session_id": "t"}, {"session": "s"}),
        ("/generate", b"{}", {"x_session_id": "t"}, {"session": "t"}),
        ("/generate", b'{"safety_identifier": "ann"}', {"x_request_id": "r"}, {"request": "r"}),
        ("/v1/chat/completions", b'{"safety_identifier": "ann"}', {}, {"user": "ann"}),
        ("/v1/completions", b'{"user": 7}', {"x_request_id": "r"}, {"request": "r"}),
        ("/generate", b"{", {"x_request_id": "r"}, {"request": "r"}),
    ],
)
def test_the_proxy_finds_the_unit_where_the_row_has_it(
    path: str, body: bytes, headers: dict[str, str], expected: dict[str, str]
) -> None:
    found = read(request(body, path, **headers)[HEADER])
    whole: dict[str, Any] = {"user": None, "session": None, "request": "", **expected}
    assert (found.experiment, found.unit) == (1, unit_of("acme", **whole))
    assert found.session == headers.get("x_session_id", "")


def test_a_request_of_nobody_gets_the_id_that_it_is_drawn_by() -> None:
    for headers in ({}, {"x_request_id": "not well formed!"}):
        sent = request(b"{}", **headers)
        assert read(sent[HEADER]).unit == unit_of("acme", user=None, session=None, request=sent["x-request-id"])


def test_a_clients_own_header_is_taken_out() -> None:
    forged = Route(1, "0" * 32).encode().decode()
    for name in (HEADER, "x_millrace_route", "X-Millrace_Route"):
        scope = {"type": "http", "path": "/feedback", "headers": [(name.encode(), forged.encode())]}
        assert asyncio.run(routed(scope, b"{}", "acme", EXPERIMENT))["headers"] == []
    assert HEADER not in request(b"{}", "/feedback")


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_session_comes_through_as_it_was_sent(session: str) -> None:
    for route in (Route(session=session), Route(3, "0" * 32, session)):
        assert read(route.encode().decode()) == route


@given(st.one_of(st.none(), st.text()))
def test_whatever_a_header_says_is_read(value: str | None) -> None:
    found = read(value)
    assert (found.experiment is None) == (found.unit is None)


# The replicas


def stats(of: dict[str, tuple[str, bool]]) -> dict[str, dict[str, Any]]:
    return {
        name: {"experiment": replica_stats(EXPERIMENT, variant, serves=serves)}  # type: ignore[arg-type]
        for name, (variant, serves) in of.items()
    }


def test_a_request_goes_to_a_replica_of_what_was_drawn() -> None:
    arms = Arms.among(stats({"a": ("control", True), "b": ("candidate", True), "c": ("control", True)}))
    assert arms is not None
    for unit in UNITS[:100]:
        expected = {"candidate": ["b"], "control": ["a", "c"]}[EXPERIMENT.assign(unit, AT[0.5]).variant]
        assert arms.allowed(["a", "b", "c"], Route(1, unit), AT[0.5]) == expected
    assert arms.allowed(["a", "b", "c"], Route(), AT[0.5]) == ["a", "c"]  # what pays no part in it


@pytest.mark.parametrize(
    ("of", "ready", "expected"),
    [
        ({"a": ("control", True), "b": ("candidate", True)}, ["a"], ["a"]),  # the candidate's has died
        ({"a": ("control", True), "b": ("candidate", False)}, ["a", "b"], ["a"]),  # it does not serve it yet
        ({"a": ("control", True), "b": ("candidate", True)}, ["b"], ["b"]),  # nobody else is left
    ],
)
def test_where_a_policy_has_no_replica_the_others_answer_and_nothing_is_drawn(
    of: dict[str, tuple[str, bool]], ready: list[str], expected: list[str]
) -> None:
    arms = Arms.among(stats(of))
    assert arms is not None
    assert not arms.whole(ready)
    for unit in UNITS[:20]:
        assert arms.allowed(ready, Route(1, unit), AT[0.5]) == expected


def test_a_row_counts_only_from_a_replica_of_what_was_drawn_behind_a_router_that_drew_it() -> None:
    drawn = EXPERIMENT.assign(unit_of("acme", user="ann", session=None, request="r"), AT[0.5])
    unit = unit_of("acme", user="ann", session=None, request="r")

    def counts(route: Route, serving: int | None) -> bool:
        found = assigned(
            EXPERIMENT, route, tenant="acme", user="ann", session=None, request="r", at=AT[0.5], serving=serving
        )
        assert replace(found, counts=True) == drawn
        return found.counts

    assert counts(Route(1, unit), drawn.version)
    assert not counts(Route(1, unit), 3 - drawn.version)
    assert not counts(Route(1, unit), None)
    assert not counts(Route(), drawn.version)
    assert not counts(Route(2, unit), drawn.version)
    assert not counts(Route(1, UNITS[0]), drawn.version)


@given(
    ready=st.sets(st.sampled_from([f"r-{number}" for number in range(8)])),
    before=st.sets(st.sampled_from([f"r-{number}" for number in range(8)])),
    share=st.floats(0.001, 1.0),
)
def test_both_policies_have_a_replica_and_as_few_change_as_can(ready: set[str], before: set[str], share: float) -> None:
    found = candidates(sorted(before), sorted(ready), share)
    if len(ready) < 2:
        assert set(found) == before
        return
    assert 1 <= len(found) <= len(ready) - 1
    assert set(found) <= ready
    assert abs(len(found) - share * len(ready)) <= 1
    assert len(set(found) & before) == min(len(found), len(before & ready))


def test_a_proxy_that_draws_imports_no_torch_and_no_vllm() -> None:
    code = "import sys, serve.fleet.router, serve.fleet.proxy; print({'torch', 'vllm'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip().splitlines()[-1] == "set()", done.stderr
