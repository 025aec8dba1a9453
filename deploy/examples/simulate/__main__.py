"""Prove that decisions keep their promises: ``python -m deploy.examples.simulate``.

The functions that production calls decide on generated worlds, whose truth is known. A line a world, and as the last
line JSON. The exit code is 1 if a world's bar is missed.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import click

from deploy.examples.simulate import gate, live, planted
from deploy.examples.simulate.world import Outcome, World, play

WORLDS: dict[str, World] = {  # those that take longest first, so that processes end together
    **planted.WORLDS,
    **gate.WORLDS,
    **live.WORLDS,
}


def chosen(_: click.Context, __: click.Parameter, value: str | None) -> tuple[str, ...]:
    """Names of worlds, or of a group of them: ``null`` stands for all that begin with ``null.``."""
    if value is None:
        return tuple(WORLDS)
    found: list[str] = []
    for name in (part.strip() for part in value.split(",")):
        matching = [world for world in WORLDS if world == name or world.startswith(f"{name}.")]
        if not matching:
            raise click.BadParameter(f"{name} is none of {', '.join(WORLDS)}")
        found += matching
    return tuple(dict.fromkeys(found))


@click.command(help=__doc__)
@click.option("--worlds", callback=chosen, metavar="NAME,…", help="Which ones; by default all.")
@click.option(
    "--histories", type=click.IntRange(min=1), default=200, show_default=True, help="How often each world is played."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--processes",
    type=click.IntRange(min=1),
    default=os.cpu_count() or 1,
    show_default="one a core",
    help="How many worlds are played at a time; the figures are the same.",
)
def main(worlds: tuple[str, ...], histories: int, seed: int, processes: int) -> None:
    figures: dict[str, Any] = {}
    missed = []
    for name, (outcome, seconds) in zip(worlds, play_all(worlds, histories, seed, processes), strict=True):
        print(f"{name}: {outcome.detail}{'' if outcome.kept else ' MISSED'}; {seconds:.1f} s", flush=True)
        for place, figure in outcome.figures.items():
            put(figures, place, figure)
        if not outcome.kept:
            missed.append(name)
    print(json.dumps(figures), flush=True)
    sys.exit(bool(missed))


def play_all(worlds: Sequence[str], histories: int, seed: int, processes: int) -> Iterator[tuple[Outcome, float]]:
    """The outcome of each world, in order, and the seconds that it took."""
    one, those = partial(play, histories=histories, seed=seed), [WORLDS[name] for name in worlds]
    if processes == 1 or len(worlds) == 1:
        yield from map(one, those)
        return
    # Not forked: the libraries below numpy may have threads, which a fork loses.
    with ProcessPoolExecutor(min(processes, len(worlds)), multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(one, those)


def put(figures: dict[str, Any], place: str, figure: Any) -> None:
    *groups, name = place.split(".")
    for group in groups:
        figures = figures.setdefault(group, {})
    figures[name] = figure


if __name__ == "__main__":
    main()
