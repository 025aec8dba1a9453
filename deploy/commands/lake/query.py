"""lake sql, lake stats: what is in the lake. They only read, and make nothing where nothing is."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from deploy.commands.common import as_json_option, existing_lake, pass_settings
from deploy.config.root import Settings
from feedback.processes.signals import stop_on_signals

_TABLES = ("interactions", "feedback", "rewards")

_sealed_only = click.option("--sealed-only", is_flag=True, help="Leave out the rows that are still in the journal.")


@click.command()
@click.argument("query", metavar="QUERY")
@_sealed_only
@click.option(
    "--version",
    "pinned",
    multiple=True,
    metavar="TABLE=N",
    help="Read a table as it was at Delta version N, without unsealed rows. Can be repeated.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "csv", "json", "jsonl", "parquet"]),
    default="table",
    show_default=True,
    help="How rows are written; all but table write every row, whole.",
)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write to FILE.")
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="Rows of a table.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    help="Stop a query that runs longer (seconds).",
)
@pass_settings
def sql(
    settings: Settings,
    query: str,
    sealed_only: bool,
    pinned: tuple[str, ...],
    form: str,
    out: Path | None,
    limit: int,
    timeout: float,
) -> None:
    """Run a DuckDB query over interactions, feedback, rewards and current_rewards.

    QUERY is SQL that reads; - takes it from standard input. Times are UTC. What is not sealed yet is there too.

    \b
    millrace lake sql "SELECT kind, count(*) FROM feedback GROUP BY kind"
    millrace lake sql - --format parquet --out good.parquet < good.sql
    """
    versions = _versions(pinned)
    if out is not None and not out.parent.is_dir():
        raise click.BadParameter(f"there is no folder {out.parent}", param_hint="--out")
    if form == "parquet" and out is None and sys.stdout.isatty():
        raise click.UsageError("Parquet is not for a terminal: give --out FILE")
    if query == "-":
        query = sys.stdin.read()
    lake, journal = existing_lake(settings), Path(settings.resolved().feedback.journal.folder)

    from deploy.display.query_output import WRITERS, opened, write_table
    from feedback.lake.query import QueryError, Rows, run

    begun = False

    def write(rows: Rows) -> None:
        nonlocal begun
        if begun and out is None:
            raise QueryError("a vacuum removed a file after rows were written; run it again, or with --out")
        with opened(out) as file:
            begun = True
            if form == "table":
                write_table(rows, file, limit)
            else:
                WRITERS[form](rows, file)

    with stop_on_signals():
        run(lake, query, write, None if sealed_only else journal, versions=versions, timeout_s=timeout)


@click.command()
@as_json_option
@click.option("--orphans", is_flag=True, help="List feedback whose response is neither in the lake nor the journal.")
@click.option(
    "--limit", type=click.IntRange(min=1), default=100, show_default=True, help="Orphans to list, the oldest first."
)
@_sealed_only
@pass_settings
def stats(settings: Settings, as_json: bool, orphans: bool, limit: int, sealed_only: bool) -> None:
    """Show how much is in the lake, how much feedback, the rewards by policy, the lag, and anomalies."""
    lake, journal_folder = existing_lake(settings), Path(settings.resolved().feedback.journal.folder)
    journal = None if sealed_only else journal_folder

    from deploy.display import statistics as display
    from feedback.lake import statistics

    with stop_on_signals():
        if orphans:
            found = statistics.orphans(lake, journal, limit=limit)
            text = display.orphans_json(found) if as_json else display.orphans(found, limit)
        else:
            gathered = statistics.gather(lake, journal)
            text = display.to_json(gathered) if as_json else display.to_text(gathered)
    click.echo(text)


def _versions(pinned: tuple[str, ...]) -> dict[str, int]:
    versions: dict[str, int] = {}
    for text in pinned:
        table, _, number = text.partition("=")
        if table not in _TABLES or not number.isdecimal():
            raise click.BadParameter(f"{text!r} is no TABLE=N; tables are {', '.join(_TABLES)}", param_hint="--version")
        versions[table] = int(number)
    return versions
