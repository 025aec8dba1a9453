"""demo: the whole loop on this machine, with a model trained here and simulated users."""

from __future__ import annotations

from pathlib import Path

import click

from deploy.examples.demo import SEED
from deploy.supervise.children import no_leftovers
from feedback.processes.signals import stop_on_signals


@click.command()
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    default=Path("runs/demo"),
    show_default=True,
    help="Where it leaves its home, summary.json and report.html. Emptied first.",
)
@click.option(
    "--recipe",
    type=click.Choice(["rlhf", "rlvr"]),
    default="rlhf",
    show_default=True,
    help="What training sees: the users' feedback alone, or the rule that knows the answers.",
)
@click.option("--cycles", type=click.IntRange(min=1), default=3, show_default=True, help="Cycles that train.")
@click.option("--users", type=click.IntRange(min=1), default=3, show_default=True, help="Simulated users.")
@click.option(
    "--seed", type=click.IntRange(min=0), default=SEED, show_default=True, help="Of prompts, model, users and training."
)
def demo(folder: Path, recipe: str, cycles: int, users: int, seed: int) -> None:
    """Turn the whole loop on this machine, with a small model trained here and simulated users."""
    with no_leftovers(), stop_on_signals():
        from deploy.examples.demo.run import run

        run(folder, recipe=recipe, cycles=cycles, users=users, seed=seed)
