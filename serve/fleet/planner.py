"""The rollout's next step: a pure function of the record, the pointer, the replicas' reports and the clock.

The controller keeps what this returns and asks again, and nothing else: so it can be killed between any two steps, and
whoever comes after it goes on from the record.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from serve.config import FleetConfig
from serve.fleet.reports import Report
from serve.fleet.state import FleetState, Instant, Rollout
from serve.policies.store import Pointer


@dataclass(frozen=True)
class Step:
    """What is to be done next: keep ``state``, or move the pointer ``back``. ``said``: for the log."""

    state: FleetState | None = None
    back: bool = False
    said: str | None = None


NOTHING = Step()


def next_step(
    state: FleetState,
    pointer: Pointer,
    reports: Sequence[Report],
    served: Collection[int],
    config: FleetConfig,
    now: Instant,
) -> Step:
    """``reports``: of all replicas that live, those that start or end among them. ``served``: policies that have."""
    rollout = state.rollout
    ready = sorted((report for report in reports if report.state == "ready"), key=lambda report: report.name)
    if rollout is None:
        return _settled(state, pointer, reports, now)
    if rollout.clock != now.clock or rollout.since > now.seconds:
        judged_from = None if rollout.judged_from is None else now.seconds
        anew = replace(rollout, clock=now.clock, since=now.seconds, judged_from=judged_from)
        return _go_on(state, anew, "the machine has started since, or is another one: what is waited for begins anew")
    if rollout.phase == "undoing":
        return _undo(state, rollout, pointer, ready)
    if pointer.generation != rollout.to.generation:
        why = f"the pointer was moved to policy {pointer.version} meanwhile ({pointer.who}: {pointer.why})"
        return _fail(state, rollout, why, now)
    if failure := _failure(rollout, ready):
        return _fail(state, rollout, failure, now)
    if rollout.phase == "preparing":
        return _prepare(state, rollout, ready, served, config, now)
    step = {"canary": _canary, "committing": _commit}[rollout.phase]
    return step(state, rollout, ready, config, now)


def _settled(state: FleetState, pointer: Pointer, reports: Sequence[Report], now: Instant) -> Step:
    if pointer.generation == state.serving.generation:
        return NOTHING
    if pointer.version == state.serving.version:
        return Step(replace(state, serving=pointer, failed=None))
    if not reports:  # nobody to roll it out to: those who come will start on it
        return Step(replace(state, serving=pointer, failed=None), said=f"policy {pointer.version} is where to start")
    rollout = Rollout(to=pointer, phase="preparing", started=now.wall, since=now.seconds, clock=now.clock)
    return Step(
        replace(state, rollout=rollout, failed=None),
        said=f"policy {pointer.version}: all replicas prepare it ({pointer.who}: {pointer.why})",
    )


def _prepare(
    state: FleetState,
    rollout: Rollout,
    ready: list[Report],
    served: Collection[int],
    config: FleetConfig,
    now: Instant,
) -> Step:
    late = [report.name for report in ready if report.prepared != rollout.to.generation]
    if late or not ready:
        return _wait(state, rollout, f"{' and '.join(late) or 'no replica'} did not prepare", config, now)
    contents = {report.content for report in ready}
    if len(contents) > 1:
        return _fail(state, rollout, f"the replicas see different files of it: {_contents(ready)}", now)
    is_rollback = "rollback_from" in (rollout.to.verdict or {}) and rollout.to.version in served
    if config.canary_seconds == 0 or is_rollback or (len(ready) == 1 and config.least_replicas == 1):
        return _go_on(state, replace(rollout, phase="committing", since=now.seconds), "all are prepared")
    if len(ready) == 1:
        return _wait(state, rollout, "no second replica, beside which a canary could serve, was ready", config, now)
    canary = ready[-1]
    share = config.canary_share if config.canary_share is not None else 1 / len(ready)
    chosen = replace(
        rollout,
        phase="canary",
        since=now.seconds,
        canaries=(canary.name,),
        lives={canary.name: canary.life},
        share=share,
    )
    return _go_on(state, chosen, f"all are prepared; {canary.name} is the canary, with {share:.0%} of the traffic")


def _canary(state: FleetState, rollout: Rollout, ready: list[Report], config: FleetConfig, now: Instant) -> Step:
    by_name = {report.name: report for report in ready}
    for name in rollout.canaries:
        report = by_name.get(name)
        if report is None or report.life != rollout.lives[name]:
            return _fail(state, rollout, f"the canary {name} has ended", now)
        if report.unready:
            return _fail(state, rollout, f"the canary {name} is not ready: {report.unready}", now)
        if not _arrived(report, rollout):
            return _wait(state, rollout, f"the canary {name} did not commit", config, now)
    if rollout.judged_from is None:
        counts = {report.name: (report.life, report.requests, report.failures) for report in ready}
        return _go_on(state, replace(rollout, judged_from=now.seconds, baseline=counts), None)
    canary, others = _counts(rollout, ready)
    if canary.part > others.part + config.canary_tolerance:
        worse = f"{canary.failures} of {canary.requests} requests to the canary failed"
        return _fail(state, rollout, f"{worse}, {others.failures} of {others.requests} to the others", now)
    judged_s = now.seconds - rollout.judged_from
    if judged_s < config.canary_seconds:
        return NOTHING
    if canary.requests >= config.canary_requests:
        following = replace(rollout, phase="committing", since=now.seconds, done=rollout.canaries)
        return _go_on(state, following, "the canary is no worse; the others follow")
    few = f"the canary answered {canary.requests} requests of canary_requests={config.canary_requests}"
    if judged_s < config.longest_canary_s:
        said = f"{few}: it is held for up to canary_hold_seconds={config.canary_hold_seconds:g} s more"
        return NOTHING if rollout.held else _go_on(state, replace(rollout, held=True), said)
    few += f" in {judged_s:.0f} s"
    if config.canary_unproven == "undo":
        return _fail(state, rollout, f"{few} (canary_hold_seconds, canary_unproven)", now)
    following = replace(rollout, phase="committing", since=now.seconds, done=rollout.canaries, unproven=few)
    return _go_on(state, following, f"{few}, and canary_unproven is commit: the others follow, nothing is proven")


def _commit(state: FleetState, rollout: Rollout, ready: list[Report], config: FleetConfig, now: Instant) -> Step:
    for report in ready:
        if report.name in rollout.done:
            if report.unready:
                return _fail(state, rollout, f"{report.name} is not ready: {report.unready}", now)
            if not _arrived(report, rollout):
                return _wait(state, rollout, f"{report.name} did not commit", config, now)
    others = [report for report in ready if report.name not in rollout.done]
    if not others:
        if not ready:
            return _wait(state, rollout, "no replica is left", config, now)
        if len({report.content for report in ready}) > 1:
            return _fail(state, rollout, f"the replicas serve different files: {_contents(ready)}", now)
        settled = FleetState(serving=rollout.to, stopping=state.stopping)
        return Step(settled, said=f"policy {rollout.to.version} serves in the whole fleet")
    following = others[0]
    if following.prepared != rollout.to.generation:  # it has joined since
        return _wait(state, rollout, f"{following.name} did not prepare", config, now)
    return _go_on(state, replace(rollout, since=now.seconds, done=(*rollout.done, following.name)), None)


def _undo(state: FleetState, rollout: Rollout, pointer: Pointer, ready: list[Report]) -> Step:
    if pointer.generation == rollout.to.generation:
        return Step(back=True)
    if not all(r.version == state.serving.version and r.generation == state.serving.generation for r in ready):
        return NOTHING  # one that can't go back ends, and another one starts where the others are
    # Nobody need act upon a pointer that was put back; one that was moved elsewhere is the next rollout.
    serving = pointer if pointer.version == state.serving.version else state.serving
    settled = FleetState(serving=serving, failed=state.failed, stopping=state.stopping)
    return Step(settled, said=f"policy {serving.version} serves on in the whole fleet")


def _failure(rollout: Rollout, ready: list[Report]) -> str | None:
    """What a replica has told of this policy, if it can't serve it."""
    for report in ready:
        if report.failed is not None and report.failed[0] == rollout.to.generation:
            return f"{report.name}: {report.failed[1]}"
    return None


@dataclass(frozen=True)
class _Counts:
    requests: int = 0
    failures: int = 0

    @property
    def part(self) -> float:
        return self.failures / max(self.requests, 1)


def _counts(rollout: Rollout, ready: list[Report]) -> tuple[_Counts, _Counts]:
    """What the canary, and what the others have answered since the canary serves the policy."""
    counts = {True: _Counts(), False: _Counts()}
    for report in ready:
        life, requests, failures = rollout.baseline.get(report.name, ("", 0, 0))
        if life != report.life:
            requests = failures = 0
        is_canary = report.name in rollout.canaries
        before = counts[is_canary]
        counts[is_canary] = _Counts(
            before.requests + report.requests - requests, before.failures + report.failures - failures
        )
    return counts[True], counts[False]


def _arrived(report: Report, rollout: Rollout) -> bool:
    return report.version == rollout.to.version and report.generation == rollout.to.generation


def _wait(state: FleetState, rollout: Rollout, why: str, config: FleetConfig, now: Instant) -> Step:
    if now.seconds - rollout.since > config.step_timeout_s:
        return _fail(state, rollout, f"{why} within step_timeout_s={config.step_timeout_s:g} s", now)
    return NOTHING


def _fail(state: FleetState, rollout: Rollout, error: str, now: Instant) -> Step:
    failed = {
        "version": rollout.to.version,
        "generation": rollout.to.generation,
        "error": error,
        "at": datetime.fromtimestamp(now.wall, UTC).isoformat(timespec="milliseconds"),
    }
    undoing = replace(rollout, phase="undoing", since=now.seconds, error=error)
    return Step(
        replace(state, rollout=undoing, failed=failed),
        said=f"policy {rollout.to.version} is undone, {state.serving.version} stays: {error}",
    )


def _go_on(state: FleetState, rollout: Rollout, said: str | None) -> Step:
    return Step(
        replace(state, rollout=rollout), said=f"policy {rollout.to.version}: {said}" if said is not None else None
    )


def _contents(ready: list[Report]) -> str:
    return ", ".join(f"{report.name} {(report.content or 'none')[:12]}" for report in ready)
