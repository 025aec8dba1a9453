"""up, serve, schedule: what runs until it is stopped."""

from __future__ import annotations

import threading

import click
from pydantic import ValidationError

from deploy.commands.common import pass_settings
from deploy.config.root import ConfigError, Settings
from deploy.supervise.children import Stopped, no_leftovers, stop_on_signals
from serve.config import FleetConfig

replicas = click.option(
    "--replicas",
    type=click.IntRange(1),
    metavar="N",
    help="Serve with N replicas, on Ray Serve if N > 1 (serve.fleet.replicas).",
)
COLOURS = {"up": "green", "serve": "cyan", "schedule": "yellow"}


@click.command()
@click.option(
    "--schedule/--no-schedule", "with_schedule", default=True, help="Turn the loop on a schedule, or only serve."
)
@replicas
@pass_settings
def up(settings: Settings, with_schedule: bool, replicas: int | None) -> None:
    """Serve, record, and turn the loop on a schedule, until Ctrl-C."""
    from deploy import up as supervisor

    printing = threading.Lock()

    def say(process: str, line: str) -> None:
        with printing:
            click.echo(f"{click.style(f'{process:>8} |', fg=COLOURS.get(process))} {line}")

    with no_leftovers():
        try:
            with stop_on_signals():
                supervisor.up(_with_replicas(settings, replicas), schedule=with_schedule, say=say)
        except Stopped as stopped:
            say("up", f"stopped by {stopped}")


@click.command()
@replicas
@pass_settings
def serve(settings: Settings, replicas: int | None) -> None:
    """Run the server alone."""
    resolved = _with_replicas(settings, replicas).resolved()
    with no_leftovers():
        if resolved.serve.fleet.is_one:
            from serve import app

            app.run(resolved.serve, resolved.feedback)
        else:
            from serve.fleet import deployment

            deployment.run(resolved.serve, resolved.feedback)


@click.command()
@pass_settings
def schedule(settings: Settings) -> None:
    """Run cycles when they are due, until Ctrl-C."""
    import signal

    from deploy.loop.schedule import Scheduler

    scheduler = Scheduler(settings, say=click.echo)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: scheduler.stop())
    with no_leftovers():
        scheduler.run()


def _with_replicas(settings: Settings, replicas: int | None) -> Settings:
    """The settings with another number of replicas, if it is not None. Raises ConfigError if that is out of bounds."""
    if replicas is None:
        return settings
    try:
        fleet = FleetConfig(**settings.serve.fleet.model_dump() | {"replicas": replicas})
    except ValidationError as error:
        raise ConfigError(f"--replicas {replicas}: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None
    return settings.model_copy(update={"serve": settings.serve.model_copy(update={"fleet": fleet})})
