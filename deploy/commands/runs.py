"""runs: the training runs, one by one and side by side, and which keep their checkpoints."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deploy.commands.common import as_json_option, dry_run_option, json_out, pass_settings, write_result
from deploy.config.root import Settings
from deploy.display.tables import print_table

if TYPE_CHECKING:
    from train.run.retention import RunFolder

_NAMED = 8  # runs, at most, that an error lists


@click.group(invoke_without_command=True)
@as_json_option
@pass_settings
@click.pass_context
def runs(ctx: click.Context, settings: Settings, as_json: bool) -> None:
    """List the training runs, and what each came to."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_runs, as_json=as_json)
    elif as_json:
        raise click.UsageError(f"--json stands behind the command: millrace runs {ctx.invoked_subcommand} … --json")


@runs.command("list")
@as_json_option
@pass_settings
def list_runs(settings: Settings, as_json: bool) -> None:
    """List the training runs, and what each came to."""
    folder = settings.resolved().train.runs
    found, elsewhere = _all_runs(settings)
    rows = []
    for run in found:
        result = run.result
        ended = "-" if result is None else result.reason or result.published
        row = [run.name, f"{run.at:%Y-%m-%d %H:%M:%S}", run.state, f"{run.bytes / 2**20:.1f} MiB", ended]
        rows.append(row if elsewhere is None else [*row, elsewhere.get(run.name, "-")])
    columns = ["run", "last at work (UTC)", "state", "checkpoints", "result"]
    columns += [] if elsewhere is None else ["in the store"]
    if as_json:
        click.echo(json.dumps([dict(zip(columns, row, strict=True)) for row in rows], indent=2))
        return
    print_table(columns, rows, f"no runs in {folder}")


@runs.command("show")
@click.argument("run")
@as_json_option
@pass_settings
def show_run(settings: Settings, run: str, as_json: bool) -> None:
    """Show what RUN learned from, what its steps took and reached, what it published, and what went wrong."""
    from deploy.display.run_records import shown
    from train.run.record import read_metrics, read_record

    [found] = _found(settings, (run,))
    record = read_record(found)
    click.echo(record.model_dump_json(indent=2) if as_json else shown(record, read_metrics(found.folder)))


@runs.command("compare")
@click.argument("names", metavar="RUN RUN...", nargs=-1, required=True)
@click.option("--metric", metavar="NAME", help="The metric to draw; by default what tells their best step.")
@as_json_option
@pass_settings
def compare_runs(settings: Settings, names: tuple[str, ...], metric: str | None, as_json: bool) -> None:
    """Compare runs: their results and last metrics side by side, a metric step by step, and settings that differ."""
    from deploy.display.run_records import compared, differing_settings
    from train.run.record import read_metrics, read_record, values

    if len(set(names)) < 2:
        raise click.UsageError("name at least two runs; `millrace runs show RUN` shows one")
    found = _found(settings, tuple(dict.fromkeys(names)))
    records = [read_record(run) for run in found]
    steps = [read_metrics(run.folder) for run in found]
    if metric is None:
        metric = next((record.best.metric for record in records if record.best is not None), "reward")
    elif not any(values(each, metric) for each in steps):
        measured = sorted({name for each in steps for step in each for name in step})
        raise click.UsageError(f"--metric {metric}: none of these runs has it; they have: {', '.join(measured) or '-'}")
    curves = [values(each, metric) for each in steps]
    if as_json:
        result = {
            "runs": [record.model_dump(mode="json") for record in records],
            "settings": differing_settings(records),
            "metric": metric,
            "curves": {record.run: curve for record, curve in zip(records, curves, strict=True)},
        }
        click.echo(json.dumps(result, indent=2))
        return
    click.echo(compared(records, metric, curves))


def _all_runs(settings: Settings) -> tuple[list[RunFolder], dict[str, str] | None]:
    """The runs of this machine and of the object store; how they are there, None without a store that answers."""
    from train.run.retention import run_folders

    folder, shared = settings.resolved().train.runs, settings.run_store()
    if shared is not None:
        from serve.policies.folder import PolicyError
        from train.run.shared_run import with_shared

        try:
            return with_shared(shared, folder, report=partial(click.echo, err=True))
        except PolicyError as error:
            click.echo(f"warning: the runs of this machine alone: {error}", err=True)
    return run_folders(folder), None


def _found(settings: Settings, names: tuple[str, ...]) -> list[RunFolder]:
    """The runs of these names. Raises UsageError if there is none of a name."""
    folder = settings.resolved().train.runs
    there = {run.name: run for run in _all_runs(settings)[0]}
    for name in names:
        if name not in there:
            newest = ", ".join(list(there)[-_NAMED:]) or "none"
            raise click.UsageError(f"there is no run {name} in {folder}; the newest are: {newest}")
    return [there[name] for name in names]


@runs.command("prune")
@dry_run_option
@json_out
@pass_settings
def prune_runs(settings: Settings, dry_run: bool, json_out: Path | None) -> None:
    """Remove the checkpoints of runs that train.retention doesn't keep; all else of a run stays.

    The schedule does it after the lake's maintenance.
    """
    from deploy.loop.records import load_all
    from train.run.recovery.unfinished import give_up
    from train.run.retention import kept_runs, run_folders

    train = settings.resolved().train
    trained = [record for record in load_all(settings) if record.run is not None][-1:]
    last = [run for record in trained for run in (record.run, *(stage.run for stage in record.stages)) if run]
    found, shared = run_folders(train.runs), settings.run_store()
    if shared is not None:
        from serve.policies.folder import PolicyError
        from train.run.shared_run import with_shared

        try:
            found, _ = with_shared(shared, train.runs)
        except PolicyError as error:
            click.echo(f"warning: the runs of this machine alone: {error}", err=True)
            shared = None
    stay = kept_runs(found, train.retention, last)
    gone = [run for run in found if run.state == "unfinished" and run.name not in stay]
    removed = [run.name for run in gone] if dry_run else give_up((run.folder for run in gone), shared)
    for name, reason in sorted((stay | {run.name: "at work" for run in gone if run.name not in removed}).items()):
        click.echo(f"run {name}: kept ({reason})")
    size = sum(run.bytes for run in gone if run.name in removed)
    verb = "would remove" if dry_run else "removed"
    click.echo(f"{verb} the checkpoints of runs: {', '.join(removed) or 'none'} ({size / 2**20:.1f} MiB)")
    write_result({"removed": removed, "kept": stay, "bytes": size, "dry_run": dry_run}, json_out)


@runs.command("release")
@click.argument("run")
@click.option("--yes", is_flag=True, help="Don't ask.")
@pass_settings
def release_run(settings: Settings, run: str, yes: bool) -> None:
    """Break the claim that a machine which is gone has on RUN in the object store, so that another goes on with it.

    A claim runs out by itself after train.run_store.lease_s; this is for one that doesn't, as its machine's clock was
    ahead. It waits as long as such a claim is for, whatever the clocks say: a machine that is at work on the run renews
    it meanwhile, and keeps it.
    """
    from serve.policies.folder import PolicyError
    from train.checkpoint.folders import CheckpointError

    if (shared := settings.run_store()) is None:
        raise click.UsageError("train.run_store.uri is not set: no other machine can have a claim on a run")
    try:
        if (found := shared.read(run)) is None:
            raise click.UsageError(
                f"{shared.uri} has no run {run}; it has: {', '.join(shared.names()[-_NAMED:]) or '-'}"
            )
        if (claim := found.manifest.claim) is None:
            return click.echo(f"run {run}: no machine has a claim on it")
        whose = f"{claim.holder}, until {claim.until:%Y-%m-%d %H:%M:%S} UTC"
        if not yes:
            click.confirm(f"run {run} is claimed by {whose}. Break this claim?", abort=True)
        lease = (claim.until - found.manifest.at).total_seconds()
        click.echo(f"waits {lease:.0f} s, in which a machine at work renews its claim", err=True)
        time.sleep(max(0.0, lease))
        shared.replace(found, claim=None)  # RunTaken if it was: it may be publishing
    except (PolicyError, CheckpointError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"run {run}: the claim of {whose} is broken")
