"""experiment: try a policy on a copy of requests, or on live traffic; see what it shows, stop it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deploy import devices
from deploy.commands.common import as_json_option, audited, existing_lake, json_out, pass_settings, write_result
from deploy.config.root import Settings
from deploy.server_sleep import asleep
from deploy.supervise.children import NOTHING_TO_LEARN, no_leftovers
from feedback.processes.signals import stop_on_signals

if TYPE_CHECKING:
    from evaluation.shadow.kept import Result
    from serve.policies.experiments import Experiment


@click.command()
@click.argument("version", type=click.IntRange(1))
@click.option("--why", default="", help="The reason, which goes on record.")
@click.option("--override", is_flag=True, help="Try it though it has not passed the gate, or was tried before.")
@pass_settings
def start(settings: Settings, version: int, why: str, override: bool) -> None:
    """Have policy VERSION and the one that serves share live traffic.

    The server draws for each block of time which of the two answers, a fleet for each user (evaluation.experiment).
    `millrace up` and
    `millrace schedule` look at the evidence from then on: a policy that is shown better is promoted and watched for a
    while; one that is shown to do harm is rolled back.
    """
    from deploy.loop import promotion
    from deploy.loop.experiments import Controller

    with audited(settings, "experiment.start", version=version, why=why, override=override):
        Controller(settings, say=click.echo).start(version, who=promotion.person(), why=why, override=override)


@click.command()
@click.argument("version", type=click.IntRange(1))
@json_out
@as_json_option
@pass_settings
def shadow(settings: Settings, version: int, json_out: Path | None, as_json: bool) -> int:
    """Have policy VERSION answer a copy of a share of requests, beside the one that serves; nobody sees its answers.

    What scores them (feedback.scoring) scores what people got to the same requests, too. It goes on until harm, or that
    there is none, is shown, or evaluation.experiment.shadow.max_requests were answered, and waits for that many for
    evaluation.experiment.shadow.seconds. Harm goes on record: VERSION is then neither promoted nor tried on live
    traffic, unless --override says why. Killed and run again, it goes on.

    Exit code 3 if it can't tell: fewer than evaluation.experiment.shadow.min_requests could be answered.
    """
    from deploy.loop import promotion
    from deploy.loop.shadows import run_shadow

    devices.take(settings, "evaluate")
    say = (lambda _: None) if as_json else click.echo
    turn = partial(asleep, settings, "evaluate", say=say)
    with no_leftovers(), stop_on_signals():
        found = run_shadow(settings, existing_lake(settings), version, who=promotion.person(), say=say, turn=turn)
    if as_json:
        click.echo(found.model_dump_json(indent=2))
    else:
        for line in describe_shadow(found):
            click.echo(line)
    if json_out is not None:
        write_result(found.model_dump(mode="json"), json_out)
    return NOTHING_TO_LEARN if found.comparison.decision == "can't tell" else 0


@click.command()
@click.argument("number", type=click.IntRange(1), required=False)
@as_json_option
@pass_settings
def show(settings: Settings, number: int | None, as_json: bool) -> None:
    """Show experiment NUMBER, by default the last one: what it compares, and what it has shown so far.

    And the last shadow, or the one of the experiment's candidate.
    """
    from deploy.loop.shadows import results

    experiments = settings.policy_store().experiments
    found = experiments.last() if number is None else experiments.get(number)
    of = None if number is None or found is None else found.candidate
    last = next((one for one in reversed(results(settings)) if of in (None, one.candidate.version)), None)
    if as_json:
        shown = None if found is None else asdict(found)
        if last is not None:
            shown = {**(shown or {}), "shadow": last.model_dump(mode="json")}
        click.echo(json.dumps(shown, indent=2))
        return
    if found is None:
        click.echo("there was no experiment yet: millrace experiment start VERSION")
    for line in (*(describe(found) if found else ()), *(describe_shadow(last) if last else ())):
        click.echo(line)


@click.command()
@click.argument("number", type=click.IntRange(1), required=False)
@click.option("--why", required=True, help="The reason, which goes on record.")
@pass_settings
def stop(settings: Settings, number: int | None, why: str) -> None:
    """Stop experiment NUMBER, by default the one that runs: what the serving pointer names serves alone again."""
    from deploy.loop import promotion
    from deploy.loop.experiments import Controller
    from deploy.loop.promotion import ExperimentRefused
    from serve.policies.experiments import ExperimentRunning

    experiments = settings.policy_store().experiments
    current = experiments.current() if number is None else experiments.get(number)
    if current is None or current.state == "ended":
        which = "no experiment runs" if current is None else f"experiment {current.number} has ended"
        raise ExperimentRefused(f"{which}: there is nothing to stop")
    with audited(settings, "experiment.stop", number=current.number, why=why):
        experiments.stop(current.number, who=promotion.person(), why=why)
    try:
        Controller(settings, say=click.echo).look()
    except ExperimentRunning:
        click.echo(f"experiment {current.number} is stopped; the look that is under way puts its end on record")


@click.command()
@click.option("--only-changes", is_flag=True, help="Say what is done, and nothing where nothing is.")
@pass_settings
def look(settings: Settings, only_changes: bool) -> None:
    """Look at the experiment that runs, and do what follows: commit, roll back, or nothing yet."""
    from deploy.loop.experiments import Controller

    with stop_on_signals():
        found = Controller(settings, say=click.echo).look()
    if only_changes:
        return
    if found is None:
        return click.echo("no experiment runs")
    for line in describe(found):
        click.echo(line)


def describe(experiment: Experiment) -> list[str]:
    """What there is to say of an experiment, line by line."""
    state = experiment.state if experiment.end is None else f"{experiment.state}: {experiment.end['decision']}"
    lines = [
        f"experiment {experiment.number}: policy {experiment.candidate} against policy {experiment.control}, {state}",
        f"  started by {experiment.who}{f': {experiment.why}' if experiment.why else ''}; "
        + ("users are drawn for; " if experiment.unit == "user" else "")
        + f"blocks of {experiment.block_s:g} s, the candidate's share "
        + ", ".join(f"{phase.share:.0%} from block {phase.from_block}" for phase in experiment.phases),
    ]
    if experiment.latest is None:
        lines.append("  nobody has looked at it yet; `millrace up` and `millrace schedule` do, and `experiment look`")
    else:
        lines += _of_look(experiment.latest, "users" if experiment.unit == "user" else "blocks")
    if experiment.end is not None:
        lines.append(f"  {experiment.end['decision']} at {experiment.end['at'][:19]}: {experiment.end['why']}")
    return lines


def _of_look(latest: dict[str, Any], units: str) -> list[str]:
    blocks = latest["blocks"]
    lines = [
        f"  last look {latest['at'][:19]}: {latest['decision']}; {latest['requests']} requests in "
        f"{blocks['candidate']} {units} of the candidate and {blocks['control']} of the control, {blocks['pending']} "
        f"{units} still wait for feedback"
    ]
    lines += [f"  {reason}" for reason in (*latest["reasons"], *latest["holds"])]
    lines += [f"  {adjustment}" for adjustment in latest.get("adjustments", ())]
    if latest["few_voices"]:
        lines.append(
            f"  {latest['few_voices']} blocks had feedback of fewer than experiment.min_voices voices, and say nothing "
            "of it: give feedback a source, or requests a user, or make blocks longer"
        )
    if latest["late"]:
        lines.append(f"  {latest['late']} feedbacks came too late to count (experiment.feedback_window_seconds)")
    if latest["mislabelled"]:
        lines.append(f"  {latest['mislabelled']} responses are not labelled as was drawn for their {units}")
    if latest.get("fallbacks"):
        lines.append(
            f"  {latest['fallbacks']} responses were answered while a policy had no replica, or by the other one's: "
            "not counted"
        )
    return lines


def describe_shadow(found: Result) -> Iterator[str]:
    """What there is to say of a shadow, line by line."""
    comparison = found.comparison
    state = comparison.decision + (f"; {found.ended}" if found.ended else f", as of {found.at[:19]}")
    yield f"shadow of policy {found.candidate.version} beside policy {found.incumbent.version}: {state}"
    reasons = ", ".join(f"{count} {reason}" for reason, count in found.left_out.items())
    left_out = f", left out: {reasons}" if reasons else ""
    yield (
        f"  {comparison.requests} requests answered and scored by {found.scorer}; {found.drawn} of {found.considered} "
        f"responses of traffic were drawn (share {found.plan.share:g}){left_out}"
    )
    for one in comparison.compared:
        bounds = f"[{one.low:+.4f}, {one.high:+.4f}] at any time"
        value = "nothing yet" if one.value is None else f"{one.value:+.4f}, {bounds}"
        shown = "harm" if one.harm else f"{'shown' if one.holds else 'not shown'} to lose less than {one.margin:g}"
        yield f"  {one.measure}: {value}, over {one.n} requests; {shown}"
    for reason, count in found.unscored.items():
        yield f"  {count} responses have no reward: {reason}"
    if comparison.decision in ("harm", "can't tell"):
        yield from (f"  {reason}" for reason in comparison.reasons)


experiment = click.Group(
    "experiment",
    commands=[shadow, start, show, stop, look],
    help="Try a policy on a copy of requests, or on live traffic: shadow, start, show, stop.",
)
