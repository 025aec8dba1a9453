"""A fleet's next step: a pure function of the record, the pointer, the experiment, the replicas' reports and the clock.

The controller does nothing but record what this returns and call it again: so it can be killed between any two steps,
and its successor goes on from the record.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from serve.config import FleetConfig
from serve.fleet.reports import Report
from serve.fleet.state import Deployment, FleetState, Instant, Split
from serve.policies.experiments import Experiment
from serve.policies.store import Pointer


@dataclass(frozen=True)
class Step:
    """What to do next: record ``state``, or move the pointer ``back``. ``message``: for the log."""

    state: FleetState | None = None
    back: bool = False
    message: str | None = None


NOTHING = Step()


def next_step(
    state: FleetState,
    pointer: Pointer,
    reports: Sequence[Report],
    served: Collection[int],
    config: FleetConfig,
    now: Instant,
    experiment: Experiment | None = None,
) -> Step:
    """``reports``: of all living replicas, also those that start or stop. ``served``: policies that have served.

    ``experiment``: the one that holds while the pointer is where it is.
    """
    deployment = state.deployment
    ready = sorted((report for report in reports if report.state == "ready"), key=lambda report: report.name)
    if deployment is None:
        return _settled(state, pointer, reports, ready, experiment, now)
    if deployment.clock != now.clock or deployment.since > now.seconds:
        judged_from = None if deployment.judged_from is None else now.seconds
        anew = replace(deployment, clock=now.clock, since=now.seconds, judged_from=judged_from)
        return _go_on(state, anew, "the machine has started since, or is another one: the wait begins anew")
    if deployment.phase == "undoing":
        return _undo(state, deployment, pointer, ready)
    if pointer.generation != deployment.to.generation:
        why = f"the pointer was moved to policy {pointer.version} meanwhile ({pointer.who}: {pointer.why})"
        return _fail(state, deployment, why, now)
    if failure := _failure(deployment, ready):
        return _fail(state, deployment, failure, now)
    if deployment.phase == "preparing":
        return _prepare(state, deployment, ready, served, config, now)
    step = {"canary": _canary, "committing": _commit}[deployment.phase]
    return step(state, deployment, ready, config, now)


def _settled(
    state: FleetState,
    pointer: Pointer,
    reports: Sequence[Report],
    ready: list[Report],
    experiment: Experiment | None,
    now: Instant,
) -> Step:
    if pointer.generation == state.serving.generation:
        return _share_out(state, ready, experiment, now)
    if state.split is not None and (pointer.verdict or {}).get("experiment") == state.split.experiment:
        # It serves here already: what a canary would show, the experiment has.
        message = f"policy {pointer.version}: experiment {state.split.experiment} came to it; the others follow"
        return Step(replace(state, serving=pointer, failed=None), message=message)
    if pointer.version == state.serving.version:
        return Step(replace(state, serving=pointer, failed=None))
    if not reports:  # no replica to deploy it to: those that join start on it
        return Step(replace(state, serving=pointer, failed=None), message=f"policy {pointer.version} is where to start")
    deployment = Deployment(to=pointer, phase="preparing", started=now.wall, since=now.seconds, clock=now.clock)
    return Step(
        replace(state, deployment=deployment, failed=None, split=None),
        message=f"policy {pointer.version}: all replicas prepare it ({pointer.who}: {pointer.why})",
    )


def _share_out(state: FleetState, ready: list[Report], experiment: Experiment | None, now: Instant) -> Step:
    """Give each policy of an experiment its replicas."""
    if experiment is None or experiment.unit != "user":
        ended = None if state.split is None else f"experiment {state.split.experiment} has no replicas any more"
        return NOTHING if ended is None else Step(replace(state, split=None), message=ended)
    before = state.split
    share = experiment.share(experiment.block_at(now.wall))
    of_before = before.candidates if before is not None and before.experiment == experiment.number else ()
    chosen = candidates(of_before, [report.name for report in ready], share)
    split = Split(experiment.number, chosen) if chosen else None
    if split == before:
        return NOTHING
    names = " and ".join(chosen) or "no replica"
    message = f"experiment {experiment.number}: policy {experiment.candidate} is to serve in {names}"
    return Step(replace(state, split=split), message=message)


def candidates(before: Sequence[str], ready: Sequence[str], share: float) -> tuple[str, ...]:
    """The replicas of an experiment's candidate: its share of those that are ready, and of either policy one at least.

    As few change as can. Where one alone is ready, there is nothing to choose: those of before are waited for.
    """
    if len(ready) < 2:
        return tuple(before)
    number = min(max(1, round(share * len(ready))), len(ready) - 1)
    kept = [name for name in before if name in ready]
    return tuple(sorted([*kept, *(name for name in sorted(ready, reverse=True) if name not in kept)][:number]))


def _prepare(
    state: FleetState,
    deployment: Deployment,
    ready: list[Report],
    served: Collection[int],
    config: FleetConfig,
    now: Instant,
) -> Step:
    late = [report.name for report in ready if report.prepared != deployment.to.generation]
    if late or not ready:
        return _wait(state, deployment, f"{' and '.join(late) or 'no replica'} did not prepare", config, now)
    contents = {report.content for report in ready}
    if len(contents) > 1:
        return _fail(state, deployment, f"the replicas see different files of it: {_contents(ready)}", now)
    is_rollback = "rollback_from" in (deployment.to.verdict or {}) and deployment.to.version in served
    if config.canary_seconds == 0 or is_rollback or (len(ready) == 1 and config.least_replicas == 1):
        return _go_on(state, replace(deployment, phase="committing", since=now.seconds), "all are prepared")
    if len(ready) == 1:
        return _wait(state, deployment, "no second replica, beside which a canary could serve, was ready", config, now)
    canary = ready[-1]
    share = config.canary_share if config.canary_share is not None else 1 / len(ready)
    chosen = replace(
        deployment,
        phase="canary",
        since=now.seconds,
        canaries=(canary.name,),
        lives={canary.name: canary.life},
        share=share,
    )
    return _go_on(state, chosen, f"all are prepared; {canary.name} is the canary, with {share:.0%} of the traffic")


def _canary(state: FleetState, deployment: Deployment, ready: list[Report], config: FleetConfig, now: Instant) -> Step:
    by_name = {report.name: report for report in ready}
    for name in deployment.canaries:
        report = by_name.get(name)
        if report is None or report.life != deployment.lives[name]:
            return _fail(state, deployment, f"the canary {name} has ended", now)
        if report.unready:
            return _fail(state, deployment, f"the canary {name} is not ready: {report.unready}", now)
        if not _arrived(report, deployment):
            return _wait(state, deployment, f"the canary {name} did not commit", config, now)
    if deployment.judged_from is None:
        counts = {report.name: (report.life, report.requests, report.failures) for report in ready}
        return _go_on(state, replace(deployment, judged_from=now.seconds, baseline=counts), None)
    requests, failures = _counts(deployment, [report for report in ready if report.name in deployment.canaries])
    to_others, of_others = _counts(deployment, [report for report in ready if report.name not in deployment.canaries])
    if failures / max(requests, 1) > of_others / max(to_others, 1) + config.canary_tolerance:
        worse = f"{failures} of {requests} requests to the canary failed, {of_others} of {to_others} to the others"
        return _fail(state, deployment, worse, now)
    judged_s = now.seconds - deployment.judged_from
    if judged_s < config.canary_seconds:
        return NOTHING
    if requests >= config.canary_requests:
        following = replace(deployment, phase="committing", since=now.seconds, done=deployment.canaries)
        return _go_on(state, following, "the canary is no worse; the others follow")
    few = f"the canary answered {requests} requests of canary_requests={config.canary_requests}"
    if judged_s < config.longest_canary_s:
        message = f"{few}: it is held for up to canary_hold_seconds={config.canary_hold_seconds:g} s more"
        return NOTHING if deployment.held else _go_on(state, replace(deployment, held=True), message)
    few += f" in {judged_s:.0f} s"
    if config.canary_unproven == "undo":
        return _fail(state, deployment, f"{few} (canary_hold_seconds, canary_unproven)", now)
    following = replace(deployment, phase="committing", since=now.seconds, done=deployment.canaries, unproven=few)
    return _go_on(state, following, f"{few}, and canary_unproven is commit: the others follow, nothing is proven")


def _commit(state: FleetState, deployment: Deployment, ready: list[Report], config: FleetConfig, now: Instant) -> Step:
    for report in ready:
        if report.name in deployment.done:
            if report.unready:
                return _fail(state, deployment, f"{report.name} is not ready: {report.unready}", now)
            if not _arrived(report, deployment):
                return _wait(state, deployment, f"{report.name} did not commit", config, now)
    others = [report for report in ready if report.name not in deployment.done]
    if not others:
        if not ready:
            return _wait(state, deployment, "no replica is left", config, now)
        if len({report.content for report in ready}) > 1:
            return _fail(state, deployment, f"the replicas serve different files: {_contents(ready)}", now)
        settled = FleetState(serving=deployment.to, stopping=state.stopping)
        return Step(settled, message=f"policy {deployment.to.version} serves in the whole fleet")
    following = others[0]
    if following.prepared != deployment.to.generation:  # it has joined since
        return _wait(state, deployment, f"{following.name} did not prepare", config, now)
    return _go_on(state, replace(deployment, since=now.seconds, done=(*deployment.done, following.name)), None)


def _undo(state: FleetState, deployment: Deployment, pointer: Pointer, ready: list[Report]) -> Step:
    if pointer.generation == deployment.to.generation:
        return Step(back=True)
    if not all(r.version == state.serving.version and r.generation == state.serving.generation for r in ready):
        return NOTHING  # one that can't go back ends, and another one starts where the others are
    # Nobody need act upon a pointer that was put back; one that was moved elsewhere is the next deployment.
    serving = pointer if pointer.version == state.serving.version else state.serving
    settled = FleetState(serving=serving, failed=state.failed, stopping=state.stopping)
    return Step(settled, message=f"policy {serving.version} serves on in the whole fleet")


def _failure(deployment: Deployment, ready: list[Report]) -> str | None:
    """Why a replica can't serve this policy, if one has reported that."""
    for report in ready:
        if report.failed is not None and report.failed[0] == deployment.to.generation:
            return f"{report.name}: {report.failed[1]}"
    return None


def _counts(deployment: Deployment, reports: list[Report]) -> tuple[int, int]:
    """(requests, failures) of these replicas since the canary serves the policy."""
    requests = failures = 0
    for report in reports:
        life, *before = deployment.baseline.get(report.name, ("", 0, 0))
        requests_before, failures_before = before if life == report.life else (0, 0)
        requests += report.requests - requests_before
        failures += report.failures - failures_before
    return requests, failures


def _arrived(report: Report, deployment: Deployment) -> bool:
    return report.version == deployment.to.version and report.generation == deployment.to.generation


def _wait(state: FleetState, deployment: Deployment, why: str, config: FleetConfig, now: Instant) -> Step:
    if now.seconds - deployment.since > config.step_timeout_s:
        return _fail(state, deployment, f"{why} within step_timeout_s={config.step_timeout_s:g} s", now)
    return NOTHING


def _fail(state: FleetState, deployment: Deployment, error: str, now: Instant) -> Step:
    failed = {
        "version": deployment.to.version,
        "generation": deployment.to.generation,
        "error": error,
        "at": datetime.fromtimestamp(now.wall, UTC).isoformat(timespec="milliseconds"),
    }
    undoing = replace(deployment, phase="undoing", since=now.seconds, error=error)
    return Step(
        replace(state, deployment=undoing, failed=failed),
        message=f"policy {deployment.to.version} is undone, {state.serving.version} stays: {error}",
    )


def _go_on(state: FleetState, deployment: Deployment, message: str | None) -> Step:
    return Step(
        replace(state, deployment=deployment),
        message=f"policy {deployment.to.version}: {message}" if message is not None else None,
    )


def _contents(ready: list[Report]) -> str:
    return ", ".join(f"{report.name} {(report.content or 'none')[:12]}" for report in ready)
