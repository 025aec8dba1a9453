"""Prove that the algorithms learn: ``python -m deploy.examples.learn``.

Each one is trained from the same seed policy, and measured before and after on prompts that no training saw; grpo also
by a judge's reward (rlaif), by a judge's and a rule's (mix), and by a model of people's thumbs (rlhf_thumbs) or choices
(rlhf_pairs) alone. A table, and as the last line JSON: {algorithm: {before, after, ci_low, steps, seconds}}, with
``reason`` where it is no proof.
The exit code is 1 if there is such a reason.
"""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from deploy.examples.learn import experiment, home, people, plans, trial
from deploy.examples.learn.judge import reward_by
from deploy.examples.learn.trial import Outcome
from deploy.examples.stages import Stages
from deploy.supervise.children import no_leftovers
from feedback.config import ScoringConfig
from feedback.processes.signals import Stopped, stop_on_signals

ALL = (*plans.PLANS, *plans.RECIPES, *plans.PEOPLE)


def chosen(_: click.Context, __: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    names = None if value is None else tuple(name.strip() for name in value.split(","))
    if unknown := set(names or ()) - {*ALL}:
        raise click.BadParameter(f"{', '.join(sorted(unknown))} is none of {', '.join(ALL)}")
    return names


@click.command(help=__doc__)
@click.option("--algorithms", callback=chosen, metavar="NAME,…", help="Which ones; by default all.")
@click.option(
    "--off-policy/--no-off-policy",
    default=None,
    help="Whether to learn from another policy's traffic too, with correction and without; alone, only that. "
    "By default it is done when all algorithms are.",
)
@click.option("--steps", type=click.IntRange(min=1), help="Steps of each, in place of its own number.")
@click.option(
    "--seconds", type=click.FloatRange(min=1), default=300.0, show_default=True, help="Longest training of each."
)
@click.option("--twice", is_flag=True, help="Train each once more, and prove that the weights are the same.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of training; the seed policy is always one.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("runs/learn"),
    show_default=True,
    help="Where the seed policy is kept, and what the trials leave.",
)
def main(
    algorithms: tuple[str, ...] | None,
    off_policy: bool | None,
    steps: int | None,
    seconds: float,
    twice: bool,
    seed: int,
    folder: Path,
) -> None:
    names = algorithms if algorithms is not None else () if off_policy else ALL
    off_policy = algorithms is None if off_policy is None else off_policy
    outcomes: dict[str, Outcome] = {}
    last: dict[str, Outcome] = {}
    try:
        with no_leftovers(), stop_on_signals(), Stages("learn", total=1 + len(names) + off_policy) as stages:
            with stages("seed policy"):
                prepared = home.prepare(folder, stages.say)
            if off_policy:  # before the others: seeds depend on the parent's version, which theirs would shift
                with stages("off-policy"):
                    last["off_policy"] = experiment.run(prepared, seed=seed, longest_s=seconds, say=stages.say)
            for name in names:
                with stages(name):
                    how: dict[str, Any] = {"longest_s": seconds, "say": stages.say, "twice": twice}
                    if name in plans.PEOPLE:
                        outcomes |= people.outcomes(prepared, name, steps=steps, seed=seed, **how)
                        continue
                    algorithm = name
                    reward: AbstractContextManager[str | ScoringConfig] = nullcontext(home.REWARD)
                    if name in plans.RECIPES:
                        algorithm = "grpo"
                        reward = reward_by(
                            plans.RECIPES[name], prepared, prepared.work / f"{name}-verdicts", stages.say
                        )
                    settings = plans.settings(algorithm, plans.PLANS[algorithm], steps=steps, seed=seed)
                    with reward as given:
                        outcomes[name] = trial.run(prepared, name, settings, reward=given, **how)
    except home.LearnError as error:
        raise click.ClickException(str(error)) from error
    except Stopped as stopped:
        click.echo(f"stopped by {stopped}", err=True)
        sys.exit(stopped.code)
    outcomes |= last
    show(outcomes)
    print(json.dumps({name: figures(outcome) for name, outcome in outcomes.items()}), flush=True)
    sys.exit(any(outcome.reason for outcome in outcomes.values()))


def show(outcomes: dict[str, Outcome]) -> None:
    table = Table(title="Right answers to prompts that no training saw (reward models: pairs ordered rightly)")
    for column in ("algorithm", "before", "after", "gain, at least", "steps", "seconds", "no proof, because"):
        table.add_column(column)
    for name, outcome in outcomes.items():
        shares = [share(outcome.before), share(outcome.after), share(outcome.ci_low, sign="+")]
        table.add_row(name, *shares, str(outcome.steps), f"{outcome.seconds:.0f}", outcome.reason or "")
    console = Console() if sys.stdout.isatty() else Console(width=140)
    console.print(table)
    for outcome in outcomes.values():
        if isinstance(outcome, experiment.OffPolicy):
            console.print(by_staleness(outcome))


def by_staleness(found: experiment.OffPolicy) -> Table:
    forms = list(experiment.FORMS)
    table = Table(title=f"From another policy's traffic alone, after {share(found.before)} before")
    for column in ("staleness", *forms, "corrected less uncorrected (95 %)"):
        table.add_column(column)
    for staleness, accuracy in found.accuracy.items():
        value, low, high = found.difference[staleness]
        gain = f"{share(value, '+')} ({share(low, '+')} to {share(high, '+')})"
        table.add_row(staleness, *(share(accuracy[form]) for form in forms), gain)
    return table


def share(value: float | None, sign: str = "") -> str:
    return "–" if value is None else f"{value:{sign}.1%}"


def figures(outcome: Outcome) -> dict[str, Any]:
    """What the JSON has of an outcome: numbers to four digits, ``reason`` only if there is one."""
    found = json.loads(json.dumps(asdict(outcome)), parse_float=lambda number: round(float(number), 4))
    return {key: value for key, value in found.items() if key != "reason" or value is not None}


if __name__ == "__main__":
    main()
