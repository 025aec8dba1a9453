"""Prove that experiments keep their promises in the real loop: ``python -m deploy.examples.live``.

A server, or a fleet, answers the demo's users, who ask and give thumbs by a truth that is known, one in ten of them
wrong. Policies that a good one was blended with noise to are tried against it: `millrace schedule` must roll each back
by itself. In half of these trials it is killed (SIGKILL) when it has decided to, and once more before the rollback is
on record; the next look must finish the job. Then copies of the policy are tried against it, where every commit and
every rollback is an error. In the end what the users were acknowledged is compared with the lake, and each row's label
with the draw. The last line is JSON; the exit code is 1 if a bar is missed.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Final

import click

from deploy.examples.live import counts, home, trial
from deploy.examples.live.home import LiveFailed
from deploy.examples.live.trial import Trial
from deploy.examples.stages import Stages
from deploy.supervise.children import no_leftovers
from feedback.processes.signals import Stopped, stop_on_signals

ONE_SERVER: Final = ((0.2, False), (0.2, True), (0.3, False), (0.3, True))
FLEET: Final = ((0.2, False), (0.3, True))
"""Noise to blend with, and whether the controller dies."""


@click.command(help=__doc__)
@click.option(
    "--experiments",
    type=click.IntRange(min=0),
    help="Trials of a policy against its copy: 20 by default, 4 in a fleet.",
)
@click.option("--replicas", type=click.IntRange(min=1), default=1, show_default=True, help="2 or more: a fleet.")
@click.option("--blocks", type=click.IntRange(min=1), default=48, show_default=True, help="Of a trial of a copy.")
@click.option("--block-seconds", type=click.FloatRange(min=0.1), default=0.5, show_default=True)
@click.option(
    "--seed", type=click.IntRange(min=0), default=7, show_default=True, help="Of the policy, the noise and the users."
)
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("runs/live"),
    show_default=True,
    help="Its home, emptied first; the policy that it trains is kept there.",
)
def main(experiments: int | None, replicas: int, blocks: int, block_seconds: float, seed: int, folder: Path) -> None:
    copies = experiments if experiments is not None else 20 if replicas == 1 else 4
    try:
        with no_leftovers(), stop_on_signals():
            wrong = run(folder.absolute(), copies, replicas, blocks, block_seconds, seed)
    except LiveFailed as error:
        raise click.ClickException(str(error)) from error
    except Stopped as stopped:
        click.echo(f"stopped by {stopped}", err=True)
        sys.exit(stopped.code)
    for line in wrong:
        click.echo(f"wrong: {line}", err=True)
    sys.exit(bool(wrong))


def run(folder: Path, copies: int, replicas: int, blocks: int, block_s: float, seed: int) -> list[str]:
    """All trials; what is wrong with what they show."""
    harms = ONE_SERVER if replicas == 1 else FLEET
    harmful: list[tuple[float, Trial]] = []
    equal: list[Trial] = []
    with Stages("live", total=3 + len(harms) + copies) as stages:
        with stages("home"):
            settings = home.prepare(folder, replicas=replicas, block_s=block_s, seed=seed, say=stages.say)
        with home.served(settings) as server:
            with home.asked(settings, folder, seed) as users:
                attempt = partial(trial.run, settings, say=stages.say)
                for noise in (noise for noise, die in harms if die):
                    with stages(f"noise {noise:g}, and the controller dies"):
                        candidate = home.spoiled(settings, noise, seed + len(harmful)).version
                        found = attempt(candidate, needed=[server, users], most_s=trial.LONGEST_S, die=True)
                        harmful.append((noise, found))
                with trial.controller(settings, stages.say) as scheduler:
                    needed = [server, users, scheduler]
                    for noise in (noise for noise, die in harms if not die):
                        with stages(f"noise {noise:g}"):
                            candidate = home.spoiled(settings, noise, seed + len(harmful)).version
                            found = attempt(candidate, needed=needed, most_s=trial.LONGEST_S, die=False)
                            harmful.append((noise, found))
                    for number in range(1, copies + 1):
                        with stages(f"copy {number}"):
                            candidate = home.copy_of(settings, number).version
                            equal.append(attempt(candidate, needed=needed, most_s=blocks * block_s, die=False))
            with stages("stop"):
                server.stop()
        with stages("counts"):
            account, prompts = home.account(folder), folder / "prompts.jsonl"
            figures = counts.figures(settings, account, prompts, equal, harmful)
        figures["seconds"] = round(stages.elapsed, 1)
    wrong = counts.problems(figures, [*equal, *(one for _, one in harmful)])
    print(json.dumps(figures), flush=True)
    return wrong


if __name__ == "__main__":
    main()
