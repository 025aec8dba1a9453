"""Deployments into a fleet, without Ray: the real record, pointer, names and reports; replicas that fail and die."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feedback.config import FeedbackConfig, JournalConfig, LakeConfig
from serve.app import create_app
from serve.config import FleetConfig, ServeConfig, SwapConfig
from serve.fleet.controller import Controller
from serve.fleet.member import Member
from serve.fleet.planner import next_step
from serve.fleet.reports import Name, Report, living, reports, write_report
from serve.fleet.router import in_share, rank
from serve.fleet.state import (
    Deployment,
    FleetError,
    FleetRecord,
    FleetState,
    Instant,
    Split,
    by_content,
    instant,
    task_of,
)
from serve.middleware.api_keys import create_key
from serve.policies.store import Pointer, PolicyStore
from serve.runtime import Server
from serve.vllm.engine import Weights

CONFIG = FleetConfig(replicas=3, canary_seconds=10, step_timeout_s=100)
LOOKS_RARELY = SwapConfig(poll_seconds=1000)


class Killed(BaseException):
    """The controller dies here."""


@dataclass(eq=False)
class Fake:
    """A replica as far as a deployment sees it: it follows the record as ``serve.swap.swapper`` does, and can fail."""

    folder: Path
    record: FleetRecord
    bad: set[int]
    requests: int = 0  # that it answers in a turn

    def __post_init__(self) -> None:
        self.held = Name(self.folder, "replica")
        self.report = Report(self.held.name, f"life {id(self)}", "starting")
        write_report(self.folder, self.report)

    @property
    def name(self) -> str:
        return self.held.name

    def turn(self) -> bool:
        """Follow the record by one step; whether it lives on."""
        state = self.record.read()
        assert state is not None
        task, now = task_of(state, self.name), self.report
        if now.state == "starting":
            if task.serve.version in self.bad:
                return self.die()
            now = replace(now, state="ready", version=task.serve.version, generation=task.serve.generation)
        elif now.generation != task.serve.generation and (now.failed or (0,))[0] != task.serve.generation:
            if task.serve.version == now.version:
                now = replace(now, generation=task.serve.generation, prepared=None, failed=None)
            elif task.serve.version not in self.bad:
                version, generation = task.serve.version, task.serve.generation
                now = replace(now, version=version, generation=generation, prepared=None, failed=None)
            elif task.trial:
                now = replace(now, prepared=None, failed=(task.serve.generation, "it can't be loaded"))
            else:
                return self.die()
        elif task.prepare is not None and now.prepared != task.prepare.generation:
            if task.prepare.version == 99:
                now = replace(now, failed=(task.prepare.generation, "it is damaged"))
            else:
                now = replace(now, prepared=task.prepare.generation)
        elif task.prepare is None:
            now = replace(now, prepared=None)
        requests = now.requests + (self.requests if now.state == "ready" else 0)
        content = f"content {now.prepared or now.version}"
        self.report = replace(now, content=content, variant=task.variant, requests=requests)
        write_report(self.folder, self.report)
        return True

    def die(self) -> bool:
        self.held.release()
        return False


class Fleet:
    """A store with policies, a record, and replicas in a folder."""

    def __init__(self, root: Path, replicas: int, config: FleetConfig = CONFIG) -> None:
        self.store = PolicyStore(root / "policies")
        self.folder = root / "replicas"
        self.folder.mkdir(parents=True)
        self.record = FleetRecord(self.store.root)
        self.config = config
        self.now, self.clock, self.wall = 1000.0, "boot 1", 1.7e9
        self.requests = 10  # that each replica answers in a turn
        for version in (1, 2, 3):
            path = self.store.root / f"v{version:06d}"
            path.mkdir(parents=True)
            manifest = {"version": version, "parent": None, "created_at": "", "files": {}, "lineage": {}, "metrics": {}}
            (path / "policy.json").write_text(json.dumps(manifest))
        self.promote(1)
        self.controller: Controller | None = self.start()
        self.replicas = [self.join() for _ in range(replicas)]
        self.run(4)

    def promote(self, version: int, **more: Any) -> Pointer:
        now = self.store.serving()
        return self.store.promote(version, expected=now.version if now else None, who="test", why="a test", **more)

    def start(self) -> Controller:
        clock = lambda: Instant(self.now, self.clock, self.wall)  # noqa: E731
        controller = Controller(self.store, self.folder, self.config, clock)
        controller.open()
        return controller

    def join(self, bad: set[int] | None = None) -> Fake:
        return Fake(self.folder, self.record, bad or set())

    def run(self, turns: int, seconds: float = 1.0) -> None:
        for _ in range(turns):
            self.now += seconds
            self.wall += seconds
            if self.controller is not None:
                self.controller.turn()
            for replica in self.replicas:
                replica.requests = self.requests
            self.replicas = [replica for replica in self.replicas if replica.turn()]

    def until_settled(self, turns: int = 400) -> FleetState:
        """Go on with a controller, and a new replica for each that died, until nothing moves any more."""
        for _ in range(turns):
            if self.controller is None:
                self.controller = self.start()
            while len(self.replicas) < 2:
                self.replicas.append(self.join())
            self.run(1, seconds=2.0)
            state, pointer = self.record.read(), self.store.serving()
            assert state is not None
            assert pointer is not None
            if (
                state.deployment is None
                and state.serving == pointer
                and all(self._is_there(r.report) for r in self.replicas)
            ):
                return state
        raise AssertionError(f"it never settles: {self.record.read()}, {[r.report for r in self.replicas]}")

    def _is_there(self, report: Report) -> bool:
        state = self.record.read()
        assert state is not None
        return (report.version, report.generation) == (state.serving.version, state.serving.generation)

    def close(self) -> None:
        if self.controller is not None:
            self.controller.close()
        for replica in self.replicas:
            replica.die()

    @property
    def versions(self) -> list[int]:
        return [replica.report.version for replica in self.replicas]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path, 3)
    yield fleet
    fleet.close()


def phases(fleet: Fleet, turns: int) -> list[tuple[str, list[int]]]:
    """(phase, versions that are served) whenever they change."""
    seen: list[tuple[str, list[int]]] = []
    for _ in range(turns):
        fleet.run(1)
        state = fleet.record.read()
        assert state is not None
        now = (state.phase, list(fleet.versions))
        if not seen or seen[-1] != now:
            seen.append(now)
    return seen


def test_all_prepare_one_tries_and_the_others_follow_one_at_a_time(fleet: Fleet) -> None:
    fleet.promote(2)
    seen = phases(fleet, 40)
    assert [phase for phase, _ in seen if phase == "canary"]
    order = [versions for _, versions in seen]
    assert sorted({tuple(versions) for versions in order}) == [(1, 1, 1), (1, 1, 2), (2, 1, 2), (2, 2, 2)]
    assert seen[-1] == ("settled", [2, 2, 2])
    assert [(entry["from"], entry["to"], entry["outcome"]) for entry in history(fleet)] == [(1, 2, "done")]


@pytest.mark.parametrize("fails", [False, True])
def test_requests_go_by_their_content_from_before_a_canary_serves_until_all_replicas_are_alike(
    fleet: Fleet, fails: bool
) -> None:
    assert fleet.controller is not None
    routed, switched = [False], list[tuple[bool, list[int]]]()

    def route(by_content: bool) -> None:
        if by_content != routed[-1]:
            switched.append((by_content, list(fleet.versions)))
        routed.append(by_content)

    fleet.controller.route = route
    if fails:
        fleet.replicas[2].bad = {2}  # it prepares it, and can't serve it
    fleet.promote(2)
    for _ in range(60):
        ((phase, versions),) = phases(fleet, 1)
        if phase in ("canary", "undoing"):
            assert len(set(versions)) == 1 or routed[-1], versions
    assert switched == [(True, [1, 1, 1]), (False, [1, 1, 1] if fails else [2, 2, 2])]


def test_a_canary_that_leaves_without_going_back_gets_no_request_that_is_not_routed(fleet: Fleet) -> None:
    assert fleet.controller is not None
    routed: list[bool] = []
    fleet.controller.route = routed.append
    fleet.promote(2)
    while 2 not in fleet.versions:
        fleet.run(1)
    (canary,) = (replica for replica in fleet.replicas if replica.report.version == 2)
    fleet.replicas.remove(canary)
    write_report(fleet.folder, replace(canary.report, state="stopping"))
    fleet.run(10)
    state = fleet.record.read()
    assert state is not None
    assert (state.phase, state.serving.version) == ("settled", 1)
    assert routed[-1]
    canary.die()
    fleet.run(1)
    assert not routed[-1]


def test_no_canary_serves_while_requests_can_not_be_routed_by_their_content(fleet: Fleet) -> None:
    assert fleet.controller is not None

    def route(by_content: bool) -> None:
        if by_content:
            raise OSError("the front does not take it")

    fleet.controller.route = route
    fleet.promote(2)
    with pytest.raises(OSError, match="does not take it"):
        fleet.run(20)
    for _ in range(3):
        fleet.replicas = [replica for replica in fleet.replicas if replica.turn()]
    state = fleet.record.read()
    assert state is not None
    assert state.phase == "preparing"
    assert fleet.versions == [1, 1, 1]
    fleet.controller.route = lambda by_content: None
    assert fleet.until_settled().serving.version == 2


def test_an_experiment_with_replicas_of_its_own_is_routed(fleet: Fleet) -> None:
    state = fleet.record.read()
    assert state is not None
    assert not by_content(state)
    assert by_content(replace(state, split=Split(1, ("replica-0",))))


def test_nobody_changes_anything_before_all_have_prepared(fleet: Fleet) -> None:
    slow = fleet.replicas.pop()
    fleet.promote(2)
    fleet.run(20)
    assert fleet.versions == [1, 1]
    fleet.replicas.append(slow)
    assert fleet.until_settled().serving.version == 2
    assert fleet.versions == [2, 2, 2]


def test_a_replica_that_never_prepares_undoes_the_deployment(fleet: Fleet) -> None:
    slow = fleet.replicas.pop()
    fleet.promote(2)
    fleet.run(3)
    fleet.run(2, seconds=CONFIG.step_timeout_s + 1)
    fleet.replicas.append(slow)
    state = fleet.until_settled()
    assert state.serving.version == 1
    assert state.failed is not None
    assert f"{slow.name} did not prepare within step_timeout_s" in state.failed["error"]


def test_the_canary_has_its_label_and_its_time_and_only_then_do_the_others_follow(fleet: Fleet) -> None:
    fleet.promote(2)
    fleet.run(6)
    assert fleet.versions == [1, 1, 2]
    assert [replica.report.variant for replica in fleet.replicas] == [None, None, "canary"]
    state = fleet.record.read()
    assert state is not None
    assert state.deployment is not None
    assert state.deployment.share == pytest.approx(1 / 3)
    fleet.run(4)
    assert fleet.versions == [1, 1, 2]
    fleet.run(20)
    assert [replica.report.variant for replica in fleet.replicas] == [None, None, None]


def test_a_canary_whose_requests_fail_more_than_the_others_is_undone(fleet: Fleet) -> None:
    fleet.requests = 0
    before = [replica.report.requests for replica in fleet.replicas]
    fleet.promote(2)
    fleet.run(6)
    for replica, requests, failures in zip(fleet.replicas, before, (1, 1, 20), strict=True):
        replica.report = replace(replica.report, requests=requests + 100, failures=failures)
    state = fleet.until_settled()
    assert fleet.versions == [1, 1, 1]
    assert state.failed is not None
    assert "20 of 100 requests to the canary failed, 2 of 200 to the others" in state.failed["error"]
    pointer = fleet.store.serving()
    assert pointer is not None
    assert (pointer.version, pointer.who) == (1, "fleet")
    assert "policy 2 was undone: 20 of 100" in pointer.why


def test_failures_that_all_have_alike_are_no_fault_of_the_canary(fleet: Fleet) -> None:
    fleet.promote(2)
    fleet.run(6)
    for replica in fleet.replicas:
        replica.report = replace(replica.report, requests=replica.report.requests + 100, failures=20)
    assert fleet.until_settled().serving.version == 2


def waiting(fleet: Fleet) -> Deployment:
    """The deployment, in whose canary no request has come; its time of `canary_seconds` is over."""
    fleet.requests = 0
    fleet.promote(2)
    fleet.run(6 + int(CONFIG.canary_seconds) * 2)
    return deployment_of(fleet)


def deployment_of(fleet: Fleet) -> Deployment:
    state = fleet.record.read()
    assert state is not None
    assert state.deployment is not None
    return state.deployment


def test_a_canary_that_saw_too_little_is_held_and_passes_once_it_has_seen_enough(fleet: Fleet) -> None:
    assert waiting(fleet).held
    assert fleet.versions == [1, 1, 2]
    fleet.requests = 1  # of which 20 are needed
    fleet.run(CONFIG.canary_requests - 5)
    assert deployment_of(fleet).phase == "canary"
    fleet.run(10)
    assert fleet.until_settled().serving.version == 2
    assert history(fleet)[-1]["unproven"] is None


def test_a_canary_that_never_sees_enough_is_undone_and_says_what_it_saw(fleet: Fleet) -> None:
    waiting(fleet)
    fleet.replicas[2].report = replace(fleet.replicas[2].report, requests=fleet.replicas[2].report.requests + 7)
    fleet.run(1)
    fleet.run(2, seconds=CONFIG.canary_hold_seconds)
    state = fleet.until_settled()
    assert state.serving.version == 1
    assert state.failed is not None
    assert "the canary answered 7 requests of canary_requests=20" in state.failed["error"]
    assert history(fleet)[-1]["outcome"] == "undone"


def test_where_so_little_is_asked_that_it_is_set_so_the_others_follow_and_the_record_says_unproven(
    tmp_path: Path,
) -> None:
    fleet = Fleet(tmp_path, 3, CONFIG.model_copy(update={"canary_unproven": "commit"}))
    try:
        waiting(fleet)
        assert fleet.versions == [1, 1, 2]
        fleet.run(2, seconds=CONFIG.canary_hold_seconds)
        assert fleet.until_settled().serving.version == 2
        assert history(fleet)[-1]["outcome"] == "done"
        assert "the canary answered 0 requests of canary_requests=20" in history(fleet)[-1]["unproven"]
    finally:
        fleet.close()


def test_a_held_canary_is_undone_at_once_when_it_fails(fleet: Fleet) -> None:
    waiting(fleet)
    canary = fleet.replicas[2]
    canary.report = replace(canary.report, requests=canary.report.requests + 1, failures=1)
    state = fleet.until_settled()
    assert state.serving.version == 1
    assert state.failed is not None
    assert "1 of 1 requests to the canary failed, 0 of 0 to the others" in state.failed["error"]


def test_a_canarys_time_is_not_over_when_somebody_sets_the_clock(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet.promote(2)
    fleet.run(6)
    assert fleet.controller is not None
    controller = fleet.controller
    controller._clock = instant  # the machine's own, as for a real fleet
    controller.turn()
    judged_from = deployment_of(fleet).judged_from
    wall = instant().wall
    monkeypatch.setattr("time.time", lambda: wall + 10 * CONFIG.step_timeout_s)
    for _ in range(3):
        controller.turn()
    deployment = deployment_of(fleet)
    assert (deployment.phase, deployment.judged_from) == ("canary", judged_from)


def test_a_canarys_time_goes_on_while_the_controller_is_dead(fleet: Fleet) -> None:
    fleet.promote(2)
    fleet.run(6)
    judged_from = deployment_of(fleet).judged_from
    assert judged_from is not None
    assert fleet.controller is not None
    fleet.controller.close()
    fleet.now = judged_from + CONFIG.canary_seconds
    fleet.controller = fleet.start()
    assert deployment_of(fleet).phase == "committing"


def test_on_another_machines_clock_a_canarys_time_begins_anew(fleet: Fleet) -> None:
    fleet.promote(2)
    fleet.run(6)
    assert fleet.controller is not None
    fleet.controller.close()
    fleet.now, fleet.clock = 1e6, "boot 2"
    fleet.controller = fleet.start()
    deployment = deployment_of(fleet)
    assert (deployment.phase, deployment.judged_from, deployment.clock) == ("canary", 1e6, "boot 2")
    fleet.now += CONFIG.canary_seconds - 1
    fleet.controller.turn()
    assert deployment_of(fleet).phase == "canary"
    assert fleet.until_settled().serving.version == 2


def test_a_deployment_that_an_older_version_recorded_is_gone_on_with(fleet: Fleet) -> None:
    fleet.promote(2)
    fleet.run(6)
    record = json.loads((fleet.store.root / "fleet.json").read_bytes())
    for name in ("clock", "held", "unproven"):
        del record["rollout"][name]
    record["rollout"] |= {"since": fleet.wall, "judged_from": fleet.wall}
    (fleet.store.root / "fleet.json").write_text(json.dumps(record))
    assert fleet.until_settled().serving.version == 2


def test_the_one_replica_that_is_left_of_several_waits_for_a_second_beside_which_to_try_a_policy(fleet: Fleet) -> None:
    lost = [fleet.replicas.pop(), fleet.replicas.pop()]
    for replica in lost:
        replica.die()
    fleet.promote(2)
    fleet.run(20)
    assert (deployment_of(fleet).phase, fleet.versions) == ("preparing", [1])
    fleet.replicas.append(fleet.join())
    assert ("canary", [1, 2]) in phases(fleet, 40)
    assert fleet.versions == [2, 2]


def test_the_only_replica_of_a_fleet_of_one_follows_without_a_canary(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 1, CONFIG.model_copy(update={"replicas": 1, "ray_address": "auto"}))
    try:
        fleet.promote(2)
        assert {phase for phase, _ in phases(fleet, 20)} <= {"preparing", "committing", "settled"}
        assert fleet.versions == [2]
    finally:
        fleet.close()


def history(fleet: Fleet) -> list[dict[str, Any]]:
    """The deployments that have ended."""
    return [json.loads(line) for line in (fleet.store.root / "rollouts.jsonl").read_text().splitlines()]


def test_a_replica_that_can_not_load_it_takes_all_back_that_could(fleet: Fleet) -> None:
    fleet.replicas[1].bad = {2}
    fleet.promote(2)
    seen = phases(fleet, 60)
    assert ("committing", [2, 1, 2]) in seen
    assert seen[-1] == ("settled", [1, 1, 1])
    state = fleet.record.read()
    assert state is not None
    assert state.failed is not None
    assert state.failed["error"] == f"{fleet.replicas[1].name}: it can't be loaded"
    assert state.serving == fleet.store.serving()


def test_a_rollback_has_no_canary(fleet: Fleet) -> None:
    fleet.promote(2)
    fleet.until_settled()
    fleet.promote(1, verdict={"rollback_from": 2})
    assert {phase for phase, _ in phases(fleet, 20)} == {"preparing", "committing", "settled"}
    assert fleet.versions == [1, 1, 1]


def test_a_rollback_to_what_the_fleet_never_served_has_a_canary(fleet: Fleet) -> None:
    fleet.replicas[1].bad = {2}
    fleet.promote(2)
    assert fleet.until_settled().serving.version == 1  # it was tried, and undone
    fleet.replicas[1].bad = set()
    fleet.promote(2, verdict={"rollback_from": 1})
    assert "canary" in {phase for phase, _ in phases(fleet, 40)}
    fleet.promote(3, verdict={"rollback_from": 2, "override": True})
    assert "canary" in {phase for phase, _ in phases(fleet, 40)}


def test_what_the_whole_fleet_serves_has_served_and_nothing_else_has(fleet: Fleet) -> None:
    assert fleet.store.served() == {1}
    fleet.promote(2)
    fleet.run(6)
    assert fleet.versions == [1, 1, 2]
    assert fleet.store.served() == {1}  # a canary is a trial
    fleet.until_settled()
    assert fleet.store.served() == {1, 2}
    fleet.replicas[0].bad = {3}
    fleet.promote(3)
    fleet.until_settled()
    assert fleet.store.served() == {1, 2}
    assert [(o.version, o.served) for o in fleet.store.outcomes()][:3] == [(1, True), (2, True), (3, False)]


def test_a_pointer_that_moves_in_the_middle_is_followed_from_where_all_began(fleet: Fleet) -> None:
    fleet.promote(2)
    fleet.run(6)
    pointer = fleet.promote(3)
    state = fleet.until_settled()
    assert state.serving == pointer
    assert fleet.versions == [3, 3, 3]


def test_a_replica_that_joins_in_the_middle_ends_where_the_others_end(fleet: Fleet) -> None:
    fleet.promote(2)
    fleet.run(6)
    fleet.replicas.append(fleet.join())
    assert fleet.until_settled().serving.version == 2
    assert fleet.versions == [2] * 4


def test_a_fleet_that_starts_takes_the_pointer_as_it_is(tmp_path: Path, fleet: Fleet) -> None:
    fleet.close()
    fleet.replicas, fleet.controller = [], None
    pointer = fleet.promote(2)
    assert fleet.start().record.read() == FleetState(serving=pointer)


def test_there_is_one_controller(fleet: Fleet) -> None:
    with pytest.raises(FleetError, match="another process runs the fleet"):
        fleet.start()


def test_a_name_is_taken_once_and_free_again_when_its_holder_is_gone(tmp_path: Path) -> None:
    first, second = Name(tmp_path, "replica"), Name(tmp_path, "replica")
    assert living(tmp_path) == ["replica-0", "replica-1"]
    assert [report.state for report in reports(tmp_path)] == ["starting", "starting"]
    first.release()
    assert living(tmp_path) == ["replica-1"]
    assert Name(tmp_path, "replica").name == "replica-0"
    second.release()


def test_the_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    pointer = Pointer(2, 1, "now", "me", "why", {"verdict": "pass"}, 7)
    deployment = Deployment(
        pointer, "canary", 1.5, 2.5, "boot", ("a",), {"a": "life"}, 0.5, 3.0, {"a": ("life", 3, 1)}, True, "few", ("a",)
    )
    state = FleetState(replace(pointer, version=1), deployment, {"version": 9}, stopping=True)
    FleetRecord(tmp_path).write(state)
    assert FleetRecord(tmp_path).read() == state


def test_the_share_is_kept_by_session_and_other_sessions_are_chosen_each_time() -> None:
    sessions = [f"session {i}" for i in range(4000)]
    chosen = [session for session in sessions if in_share(session, 1, 0.3)]
    assert 0.26 < len(chosen) / len(sessions) < 0.34
    again = [session for session in sessions if in_share(session, 2, 0.3)]
    assert len(set(chosen) & set(again)) < 0.2 * len(sessions)


def test_a_session_keeps_its_replica_when_another_one_leaves() -> None:
    replicas = ["a", "b", "c", "d"]
    for session in map(str, range(200)):
        order = rank(session, replicas)
        assert rank(session, [replica for replica in replicas if replica != order[-1]]) == order[:-1]
    first = [rank(str(session), replicas)[0] for session in range(2000)]
    assert all(400 < first.count(replica) < 600 for replica in replicas)


EVENTS = st.sampled_from(
    ["turn", "turn", "turn", "replica", "replica", "replica", "clock", "kill", "torn", "join", "die", "promote", "back"]
)


@settings(max_examples=60, deadline=None)
@given(events=st.lists(st.tuples(EVENTS, st.integers(0, 5)), max_size=60), bad=st.sets(st.integers(0, 3), max_size=2))
def test_however_it_is_disturbed_all_end_on_one_policy_and_it_is_the_pointers(
    events: list[tuple[str, int]], bad: set[int]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(Path(folder), 3)
        for number in bad:
            if number < len(fleet.replicas):
                fleet.replicas[number].bad = {2}
        fleet.promote(2)
        try:
            for event, number in events:
                _disturb(fleet, event, number)
            state = fleet.until_settled()
            assert set(fleet.versions) == {state.serving.version}
            assert state.serving == fleet.store.serving()
            assert_no_canary_was_skipped(fleet)
        finally:
            fleet.close()


def assert_no_canary_was_skipped(fleet: Fleet) -> None:
    """What the fleet serves either was tried in a canary, or had served in the whole of it before."""
    if not (fleet.store.root / "rollouts.jsonl").exists():
        return
    for entry in history(fleet):
        before = {o.version for o in fleet.store.outcomes() if o.served and o.generation < entry["generation"]}
        assert entry["outcome"] == "undone" or entry["canaries"] or entry["to"] in before


def _disturb(fleet: Fleet, event: str, number: int) -> None:
    if fleet.controller is None and event in ("turn", "kill", "torn"):
        fleet.controller = fleet.start()
    controller = fleet.controller
    if event == "turn" and controller is not None:
        controller.turn()
    elif event == "clock":
        fleet.now += 30 * number
    elif event == "kill" and controller is not None:
        controller.close()
        fleet.controller = None
    elif event == "torn" and controller is not None:  # between what it does and what it would have done next
        with suppress(Killed):
            _killed_in(controller, number)
        controller.close()
        fleet.controller = None
    elif event == "join":
        fleet.replicas.append(fleet.join({2} if number == 0 else None))
    elif event == "promote":
        fleet.promote(2 + number % 2)
    elif event == "back":
        fleet.promote(1 + number % 3, verdict={"rollback_from": 2})
    elif fleet.replicas:
        replica = fleet.replicas[number % len(fleet.replicas)]
        if event == "die" or (event == "replica" and not replica.turn()):
            replica.die()
            fleet.replicas.remove(replica)


def _killed_in(controller: Controller, number: int) -> None:
    """Take a step and die in it: before or after each of its writes."""

    def die(*_: Any, **__: Any) -> None:
        raise Killed

    target: Any = [controller.record, controller.record, controller.store, controller][number % 4]
    name = ["write", "append_history", "promote", "_write"][number % 4]
    real = getattr(target, name)

    def die_after(*arguments: Any, **more: Any) -> None:
        real(*arguments, **more)
        raise Killed

    setattr(target, name, die if number < 4 else die_after)
    try:
        controller.turn()
    finally:
        setattr(target, name, real)


async def test_a_replica_without_an_engine_is_not_reported_as_ready(fleet: Fleet, tmp_path: Path) -> None:
    config = ServeConfig(
        policies=str(fleet.store.root), replicas=str(fleet.folder), keys=str(tmp_path / "keys.json"), swap=LOOKS_RARELY
    )
    journal, lake = JournalConfig(folder=str(tmp_path / "journal")), LakeConfig(uri=str(tmp_path / "lake"))
    member = Member(config)
    assert member.policy()["replicas"][member.name]["state"] == "starting"
    server = Server(config, FeedbackConfig(journal=journal, lake=lake), desired_state=member.desired_state)
    server.swapper._serving = Weights(fleet.store.get(1), {})  # as after a start, but for the engine's process
    member.begin(server)
    status = member.policy()["replicas"][member.name]
    assert (status["state"], status["unready"]) == ("unready", "the engine's process has died")
    assert member.name not in member.ready()
    server.draining = True  # this replica knows, and has not reported it
    assert member.policy()["replicas"][member.name]["unready"] == "the server is stopping"
    member.stop()
    assert member.policy()["replicas"][member.name]["state"] == "stopping"
    member.release()


async def test_what_a_replica_reports_is_requests_for_responses_that_it_let_in(fleet: Fleet, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    _, secret = create_key(keys, name="app", tenant="acme", scopes=["generate"], requests_per_minute=3)
    config = ServeConfig(policies=str(fleet.store.root), replicas=str(fleet.folder), keys=str(keys), swap=LOOKS_RARELY)
    journal, lake = JournalConfig(folder=str(tmp_path / "journal")), LakeConfig(uri=str(tmp_path / "lake"))
    member = Member(config)
    feedback = FeedbackConfig(journal=journal, lake=lake)
    server = Server(config, feedback, desired_state=member.desired_state)
    server.swapper._serving = Weights(fleet.store.get(1), {})  # as after a start, but for the engine's process
    server.keyring.load()
    member.begin(server)
    transport = httpx.ASGITransport(create_app(config, feedback, server=server))
    async with httpx.AsyncClient(transport=transport, base_url="http://millrace") as client:
        for path in ("/generate", "/v1/completions", "/v1/chat/completions", "/made-up"):
            for wrong in ({}, {"X-API-Key": "mrk_none_" + "x" * 43}):
                await client.post(path, json={"prompt": "a"}, headers=wrong)
        for path in ("/health", "/v1/models/a"):
            await client.get(path, headers={"X-API-Key": secret})
        answers = [await client.post("/generate", json={"prompt": "a"}, headers={"X-API-Key": secret}) for _ in "abc"]
    assert [answer.status_code for answer in answers] == [503, 503, 429]  # there is no engine; over the key's limit
    status = member.policy()["replicas"][member.name]
    assert (status["requests"], status["failures"]) == (2, 2)
    member.stop()
    member.release()


def test_a_step_does_nothing_when_there_is_nothing_to_do() -> None:
    pointer = Pointer(1, None, "", "", "", None, 1)
    assert next_step(FleetState(pointer), pointer, [], (), CONFIG, Instant(0.0, "boot", 0.0)).state is None


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("serve.app", ["ray", "serve.fleet"]),
        ("serve.fleet.router", ["torch", "vllm", "transformers"]),
        ("serve.fleet.proxy", ["torch", "vllm", "transformers"]),
        ("serve.fleet.rate_limit_store", ["torch", "vllm", "transformers"]),
    ],
)
def test_nobody_pays_for_what_is_not_used_there(module: str, unwanted: list[str]) -> None:
    found = f"import sys, {module}; print([name for name in {unwanted!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", found], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout.strip() == "[]"


def damage_outcomes(fleet: Fleet) -> Path:
    file = fleet.store.root / "outcomes.jsonl"
    file.write_text("{}garbage\n" + file.read_text())
    return file


def test_a_damaged_record_of_what_has_served_stops_no_rollout_and_is_told_of_once(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    file = damage_outcomes(fleet)
    fleet.promote(2)
    assert fleet.until_settled().serving.version == 2
    assert [record.message.count(f"{file}, line 1") for record in caplog.records if record.levelname == "ERROR"] == [1]
    fleet.promote(1, verdict={"rollback_from": 2})
    assert "canary" in {phase for phase, _ in phases(fleet, 40)}  # nobody knows that it has served
    assert fleet.versions == [1, 1, 1]
    file.write_text(file.read_text().replace("{}garbage\n", ""))
    assert fleet.store.served() == {1, 2}


def test_a_damaged_record_of_what_has_served_keeps_no_bad_policy_from_being_undone(fleet: Fleet) -> None:
    damage_outcomes(fleet)
    fleet.replicas[1].bad = {2}
    fleet.promote(2)
    state = fleet.until_settled()
    assert (state.serving.version, fleet.versions) == (1, [1, 1, 1])
    fleet.replicas.append(fleet.join())
    fleet.run(3)
    assert fleet.versions == [1, 1, 1, 1]
