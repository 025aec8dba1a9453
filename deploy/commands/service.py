"""up, serve, schedule: what runs until it is stopped."""

from __future__ import annotations

import threading

import click

from deploy.commands.common import pass_settings
from deploy.config import Settings
from deploy.processes import Stopped, no_leftovers, stop_on_signals

COLOURS = {"up": "green", "serve": "cyan", "schedule": "yellow"}


@click.command()
@click.option(
    "--schedule/--no-schedule", "with_schedule", default=True, help="Turn the loop on a schedule, or only serve."
)
@pass_settings
def up(settings: Settings, with_schedule: bool) -> None:
    """Serve, record, and turn the loop on a schedule, until Ctrl-C."""
    from deploy import up as supervisor

    printing = threading.Lock()

    def say(process: str, line: str) -> None:
        with printing:
            click.echo(f"{click.style(f'{process:>8} |', fg=COLOURS.get(process))} {line}")

    with no_leftovers():
        try:
            with stop_on_signals():
                supervisor.up(settings, schedule=with_schedule, say=say)
        except Stopped as stopped:
            say("up", f"stopped by {stopped}")


@click.command()
@pass_settings
def serve(settings: Settings) -> None:
    """Run the server alone."""
    from serve.app import run

    resolved = settings.resolved()
    with no_leftovers():
        run(resolved.serve, resolved.feedback)


@click.command()
@pass_settings
def schedule(settings: Settings) -> None:
    """Run cycles when they are due, until Ctrl-C."""
    import signal

    from deploy.schedule import Scheduler

    scheduler = Scheduler(settings, say=click.echo)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: scheduler.stop())
    with no_leftovers():
        scheduler.run()


COMMANDS = (up, serve, schedule)
