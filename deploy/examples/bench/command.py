"""bench: what the data plane does on this machine and this disk."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from deploy.commands.common import pass_settings
from deploy.config.root import Settings


@click.group()
def bench() -> None:
    """Measure the journal, the lake and scoring on the disk of the home; each prints one line of JSON."""


@bench.command()
@click.option("--writers", type=click.IntRange(min=1), default=64, show_default=True, help="Writers at a time.")
@click.option("--seconds", type=click.FloatRange(min=0.1), default=3.0, show_default=True, help="Length of a turn.")
@click.option("--rate", type=click.FloatRange(min=1), default=1000.0, show_default=True, help="Rows per second, paced.")
@click.option("--turns", type=click.IntRange(min=1), default=10, show_default=True, help="Turns of each.")
def capture(**options: Any) -> None:
    """Durable rows a second, and how long a writer waits, in turns with SQLite and with the bare disk."""
    from deploy.examples.bench.data_plane.capture import capture

    _measure(capture, options)


@bench.command()
@click.option("--rows", "count", type=click.IntRange(min=8), default=20_000, show_default=True, help="Interactions.")
@click.option("--turns", type=click.IntRange(min=1), default=10, show_default=True, help="Turns of each.")
def storage(**options: Any) -> None:
    """Sealing and compacting in turns with deltalake's own writer, reading rates, and bytes a row."""
    from deploy.examples.bench.data_plane.storage import storage

    _measure(storage, options)


@bench.command()
@click.option("--history", type=click.IntRange(min=100), default=10_000_000, show_default=True, help="Rows scored.")
@click.option("--small", type=click.IntRange(min=100), default=10_000, show_default=True, help="Rows to compare with.")
@click.option("--fresh", type=click.IntRange(min=1), default=10_000, show_default=True, help="New rows per turn.")
@click.option("--turns", type=click.IntRange(min=1), default=10, show_default=True, help="Turns of each.")
def scoring(**options: Any) -> None:
    """Scoring's rate, and whether it stays flat as history grows. Ten million rows take some 2 GB of disk."""
    from deploy.examples.bench.data_plane.scoring import scoring

    _measure(scoring, options)


@bench.command()
@click.option("--rows", type=click.IntRange(min=1), required=True, help="Responses; one in three has a thumb.")
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=6, show_default=True, help="Of each prompt.")
@click.option("--response-tokens", type=click.IntRange(min=1), default=2, show_default=True, help="Of each response.")
@pass_settings
def fill(settings: Settings, rows: int, prompt_tokens: int, response_tokens: int) -> None:
    """Fill the lake of a home that has none with made-up traffic, and score it, for measurements beside a large lake.

    A lake with rows is refused.
    """
    from deploy.examples.bench.data_plane.scoring import fill as append
    from feedback.scoring.run import score

    lake, config = settings.lake(), settings.resolved().feedback
    lake.create()
    if any(lake.counts().values()):
        raise click.ClickException(f"the lake {config.lake.uri} has rows already: made-up ones would be among them")
    append(lake, 0, rows, tokens=(prompt_tokens, response_tokens))
    click.echo(json.dumps({"rows": rows, "scored": score(lake, config.scoring, config.kinds).scored}))


@bench.command()
@pass_settings
def traffic(settings: Settings) -> None:
    """What a run of training reads of the lake: seconds, and how much memory that takes beside what is imported."""
    from deploy.examples.bench.training.traffic import traffic as measure

    click.echo(json.dumps(measure(settings)))


@bench.command()
@click.option("--capture/--no-capture", default=True, help="Record the responses, or drop them.")
@pass_settings
def front_end(settings: Settings, capture: bool) -> None:
    """Serve with an engine that answers at once, until SIGTERM, for a load generator: all but the engine's cost."""
    from deploy.examples.bench.data_plane.front_end import front_end as serve

    resolved = settings.resolved()
    serve(resolved.serve, resolved.feedback, capture=capture)


@pass_settings
def _measure(settings: Settings, measure: Callable[..., dict[str, Any]], options: dict[str, Any]) -> None:
    """Print what is measured in a folder beside the home's own, on its disk, that goes afterwards."""
    settings.home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=settings.home) as folder:
        click.echo(json.dumps(measure(Path(folder), settings.feedback, **options)))
