"""experiment: try a policy on live traffic, see what it shows, stop it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from deploy.commands.common import as_json_option, pass_settings
from deploy.config.root import Settings
from deploy.supervise.children import stop_on_signals

if TYPE_CHECKING:
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

    Controller(settings, say=click.echo).start(version, who=promotion.person(), why=why, override=override)


@click.command()
@click.argument("number", type=click.IntRange(1), required=False)
@as_json_option
@pass_settings
def show(settings: Settings, number: int | None, as_json: bool) -> None:
    """Show experiment NUMBER, by default the last one: what it compares, and what it has shown so far."""
    from serve.policies.experiments import Experiments

    experiments = Experiments(settings.policy_store().root)
    found = experiments.last() if number is None else experiments.get(number)
    if as_json:
        click.echo(json.dumps(None if found is None else asdict(found), indent=2))
    elif found is None:
        click.echo("there was no experiment yet: millrace experiment start VERSION")
    else:
        for line in describe(found):
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
    from serve.policies.experiments import ExperimentRunning, Experiments

    experiments = Experiments(settings.policy_store().root)
    current = experiments.current() if number is None else experiments.get(number)
    if current is None or current.state == "ended":
        which = "no experiment runs" if current is None else f"experiment {current.number} has ended"
        raise ExperimentRefused(f"{which}: there is nothing to stop")
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


experiment = click.Group(
    "experiment", commands=[start, show, stop, look], help="Try a policy on live traffic: start, show, stop."
)
