"""up, serve, schedule: what runs until it is stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import click
from pydantic import ValidationError

from deploy import devices, memory_check
from deploy.commands.common import log_lines, pass_settings
from deploy.config import root, wording
from deploy.config.root import ConfigError, Settings
from deploy.config.sources import DEFAULT_FILE
from deploy.supervise.children import no_leftovers
from feedback.processes.signals import Stopped, stop_on_signals

replicas = click.option(
    "--replicas",
    type=click.IntRange(1),
    metavar="N",
    help="Serve with N replicas, on Ray Serve if N > 1 (serve.fleet.replicas).",
)
COLOURS = {"up": "green", "serve": "cyan", "schedule": "yellow"}


@click.command()
@click.argument("model", required=False, metavar="[NAME_OR_FOLDER]")
@click.option(
    "--schedule/--no-schedule",
    "with_schedule",
    default=None,
    help="Refuse to start where no cycle can work, or only serve. By default it serves, and says why the loop is off.",
)
@replicas
@pass_settings
@click.pass_context
def up(
    ctx: click.Context, settings: Settings, model: str | None, with_schedule: bool | None, replicas: int | None
) -> None:
    """Serve, record, and turn the loop on a schedule, until Ctrl-C.

    With a model, a folder or a name on the Hugging Face hub: where there is no home, make one with the model as policy
    1, and a short millrace.yaml. The loop is then opened as far as the settings let it; what is off is listed.
    """
    from deploy import up as supervisor
    from serve.observability import log_format

    printing = threading.Lock()
    as_json = settings.serve.log_format == "json"

    def say(process: str, line: str) -> None:
        prefix = "" if as_json else f"{click.style(f'{process:>8} |', fg=COLOURS.get(process))} "
        with printing:
            click.echo(prefix + (log_format.as_json(line, f"millrace.{process}") if as_json else line))

    with no_leftovers():
        try:
            with stop_on_signals():
                if model is not None:
                    settings = _home_of(model, settings, ctx, partial(say, "up"))
                settings = _with_replicas(settings, replicas)
                supervisor.up(settings, schedule=with_schedule, list_switches=model is not None, say=say)
        except Stopped as stopped:
            say("up", f"stopped by {stopped}")


def _home_of(model: str, settings: Settings, ctx: click.Context, say: Callable[[str], None]) -> Settings:
    """Make a home of a model, and its millrace.yaml, where they are missing; the settings with that file's.

    Raises deploy.initialise.NotAModel if there is a home of another model.
    """
    from deploy import initialise
    from deploy.loop import promotion

    options = ctx.meta["millrace.options"]
    written = ctx.find_root().params["file"] is None and initialise.write_config(settings, DEFAULT_FILE, options)
    try:
        # Before there is a home: the options may contradict the file.
        loaded = root.load(None, options) if written else settings
        if settings.policy_store().serving() is None:
            say(f"looking at the model {model}")
            initialise.initialise(settings, model, revision=None, who=promotion.person())
            say(f"made {settings.home}: policy 1 is {model}")
        else:
            initialise.require_made_from(settings, model)
    except BaseException:
        if written:
            DEFAULT_FILE.unlink()
        raise
    if written:
        given = " and those given here" if options else ""
        say(f"wrote {DEFAULT_FILE}: the settings that matter most{given}; `millrace config reference` prints all")
        if (tokens := initialise.fit_responses(loaded, DEFAULT_FILE)) is not None:
            say(initialise.SHORT_CONTEXT.format(tokens=tokens))
            return root.load(None, options)
    return loaded


@click.command()
@replicas
@click.option(
    "--policy",
    type=int,
    metavar="VERSION",
    help="Serve this policy, whatever is promoted, and record nothing: for evaluation.",
)
@pass_settings
def serve(settings: Settings, replicas: int | None, policy: int | None) -> None:
    """Run the server alone."""
    if policy is not None and replicas is not None:
        raise click.UsageError("--policy serves by one process: leave --replicas out")
    settings = _with_replicas(settings, replicas)
    assignment = devices.take(settings, "serve" if policy is None else "evaluate")
    settings = devices.with_sleep(settings, assignment if policy is None else None)
    resolved = settings.resolved()
    memory_check.require_server(settings, policy, log_lines(settings, "serve"))
    with no_leftovers():
        if policy is not None:
            from serve import app

            app.run_policy(resolved.serve, resolved.feedback, policy)
            return
        from deploy.console.app import create

        console = partial(create, settings.snapshot())
        if resolved.serve.fleet.is_one:
            from serve import app

            app.run(resolved.serve, resolved.feedback, console=console)
        else:
            from serve.fleet import deployment

            deployment.run(resolved.serve, resolved.feedback, console)


@click.command()
@click.option("--cycles/--no-cycles", default=True, help="Or only look at experiments, and maintain the lake.")
@pass_settings
def schedule(settings: Settings, cycles: bool) -> None:
    """Run cycles when they are due, until Ctrl-C."""
    import signal

    from deploy.loop.schedule import Scheduler
    from deploy.monitoring import listener
    from deploy.notify import webhooks

    scheduler = Scheduler(settings, cycles=cycles, say=log_lines(settings, "schedule"))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: scheduler.stop())
    with no_leftovers(), listener.serving(settings, cycles=cycles), webhooks.notifying(settings):
        scheduler.run()


def _with_replicas(settings: Settings, replicas: int | None) -> Settings:
    """The settings with another number of replicas, if it is not None. Raises ConfigError if that can't be."""
    if replicas is None:
        return settings
    try:
        return settings.model_copy(update={"serve": settings.serve.with_replicas(replicas)})
    except ValidationError as error:
        raise ConfigError(f"--replicas {replicas}: {wording.wrong(error.errors()[0])}") from None
    except ValueError as error:
        raise ConfigError(f"--replicas {replicas}: {error}") from None
