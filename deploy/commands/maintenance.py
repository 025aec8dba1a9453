"""lake compact, vacuum, retain, erase, maintain: what keeps the lake in order."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deploy.commands.common import hand_on, json_out, pass_settings, table
from deploy.config import Settings
from deploy.processes import stop_on_signals

if TYPE_CHECKING:
    from feedback.lake import Lake
    from feedback.maintenance import Compacted, Retained, Vacuumed

dry_run_option = click.option("--dry-run", is_flag=True, help="Only say what would be removed.")


@click.command()
@json_out
@pass_settings
def compact(settings: Settings, json_out: Path | None) -> None:
    """Merge small files of each date into large ones, sorted by response id."""
    from feedback.maintenance import compact as compact_lake

    with stop_on_signals():
        done = compact_lake(_lake(settings))
    _tell_compacted(done)
    hand_on({name: asdict(result) for name, result in done.items()}, json_out)


@click.command()
@dry_run_option
@json_out
@pass_settings
def vacuum(settings: Settings, dry_run: bool, json_out: Path | None) -> None:
    """Remove files that no version within lake.vacuum_hours needs, and what killed writers left."""
    from feedback.maintenance import vacuum as vacuum_lake

    with stop_on_signals():
        done = vacuum_lake(_lake(settings), dry_run=dry_run)
    _tell_vacuumed(done, dry_run)
    hand_on({name: asdict(result) for name, result in done.items()}, json_out)


@click.command()
@dry_run_option
@json_out
@pass_settings
def retain(settings: Settings, dry_run: bool, json_out: Path | None) -> None:
    """Drop whole dates, oldest first, as lake.retain_days and lake.retain_bytes say."""
    from feedback.maintenance import retain as retain_lake

    with stop_on_signals():
        done = retain_lake(_lake(settings), dry_run=dry_run)
    _tell_retained(done, dry_run)
    hand_on(asdict(done), json_out)


@click.command()
@json_out
@pass_settings
def maintain(settings: Settings, json_out: Path | None) -> None:
    """Finish erasures, drop old dates, compact and vacuum: what the schedule runs."""
    from feedback.maintenance import maintain as maintain_lake

    lake = _lake(settings)
    with stop_on_signals():
        lake.create()
        done = maintain_lake(lake, Path(settings.resolved().feedback.journal.folder))
    if any(done.erased.values()):
        click.echo(f"erased, behind an earlier erasure: {_counted(done.erased)}")
    _tell_retained(done.retained, dry_run=False)
    _tell_compacted(done.compacted)
    _tell_vacuumed(done.vacuumed, dry_run=False)
    hand_on(asdict(done), json_out)


@click.command()
@click.option("--user", metavar="USER", help="Rows of this user; with --tenant, of this tenant's user only.")
@click.option("--tenant", metavar="TENANT", help="All rows of this tenant.")
@click.option("--response-id", metavar="ID", help="One response, and what was said of it.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option(
    "--wait", "wait_s", default=60.0, show_default=True, help="Seconds to wait for a server's open journal segments."
)
@json_out
@pass_settings
def erase(
    settings: Settings,
    user: str | None,
    tenant: str | None,
    response_id: str | None,
    yes: bool,
    wait_s: float,
    json_out: Path | None,
) -> None:
    """Remove rows from journal and lake for good, and list the policies that were trained on them.

    Older versions of the tables can't be read afterwards. The policies are not touched.
    """
    from deploy.lineage import policies_with
    from feedback.erasure import Target, find
    from feedback.erasure import erase as erase_rows
    from serve.policies import PolicyStore

    try:
        target = Target(user=user, tenant=tenant, response_id=response_id)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    resolved = settings.resolved()
    lake, journal = _lake(settings), Path(resolved.feedback.journal.folder)
    with stop_on_signals():
        found = find(lake, journal, target)
        # Looked up first: the versions that a policy was made from can't be read after the erasure.
        policies = policies_with(PolicyStore(Path(resolved.serve.policies)), lake, found)
        click.echo(f"to be erased: {_counted(found.rows)}")
        if policies:
            rows = [[str(p.version), p.certainty, p.why] for p in policies]
            click.echo(table(["policy", "trained on them", "because"], rows))
        else:
            click.echo("no policy was trained on them")
        if not yes:
            if not sys.stdin.isatty():
                raise click.UsageError("nothing is erased without being asked: there is no terminal, so give --yes")
            click.confirm("Erase for good? Older versions of the lake can't be read afterwards", abort=True)
        done = erase_rows(lake, journal, target, wait_s=wait_s, say=click.echo)
    click.echo(f"erased: {_counted(done.rows)} in {done.seconds:.1f} s")
    if done.damaged:
        click.echo(f"removed {done.damaged} damaged journal segments that had been put aside")
    for path in done.left:
        click.echo(f"left until it is lake.orphan_hours old, as a writer may be about to commit it: {path}")
    hand_on(asdict(done) | {"policies": [asdict(policy) for policy in policies]}, json_out)


def _lake(settings: Settings) -> Lake:
    from feedback.lake import Lake

    config = settings.resolved().feedback.lake
    return Lake(config.uri, config)


def _tell_compacted(done: dict[str, Compacted]) -> None:
    for name, result in done.items():
        left = f", {result.conflicts} groups left for the next time" if result.conflicts else ""
        click.echo(
            f"{name}: {result.files_before} small files became {result.files_after} ({result.rows} rows, "
            f"{_megabytes(result.bytes_before)} to {_megabytes(result.bytes_after)}, {result.seconds:.1f} s){left}"
        )


def _tell_vacuumed(done: dict[str, Vacuumed], dry_run: bool) -> None:
    for name, result in done.items():
        click.echo(
            f"{name}: {'would remove' if dry_run else 'removed'} {len(result.replaced)} replaced files and "
            f"{len(result.orphans)} that no version names ({_megabytes(result.bytes)}), {len(result.log)} log entries"
        )
        if dry_run:
            for path in (*result.replaced, *result.orphans):
                click.echo(f"  {path}")


def _tell_retained(done: Retained, dry_run: bool) -> None:
    if not done.dates:
        click.echo("no date is due to be dropped")
        return
    click.echo(
        f"{'would drop' if dry_run else 'dropped'} {len(done.dates)} dates, {done.dates[0]} to {done.dates[-1]}: "
        f"{_counted(done.rows)} ({_megabytes(sum(done.bytes.values()))})"
    )


def _counted(rows: dict[str, Any]) -> str:
    return ", ".join(f"{count} {name}" for name, count in rows.items())


def _megabytes(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


COMMANDS: tuple[click.Command, ...] = (compact, vacuum, retain, erase, maintain)
