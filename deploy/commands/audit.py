"""audit: who did what to keys, policies and data, when and from where."""

from __future__ import annotations

import json
from dataclasses import asdict
from fnmatch import fnmatch
from typing import TYPE_CHECKING

import click

from deploy.commands.common import as_json_option, pass_settings
from deploy.config.root import Settings
from deploy.display.tables import print_table

if TYPE_CHECKING:
    from serve.observability.audit import AuditEntry


@click.command()
@click.option("--last", type=click.IntRange(1), default=50, show_default=True, help="So many actions, the newest.")
@click.option("--action", default="*", metavar="PATTERN", help="Only such actions, like 'keys.*'.")
@click.option("--head", is_flag=True, help="Print LINES:SHA256 of the whole log, to be kept elsewhere.")
@click.option("--since", metavar="LINES:SHA256", help="Exit code 1 unless the log goes on from such a head.")
@as_json_option
@pass_settings
def audit(settings: Settings, last: int, action: str, head: bool, since: str | None, as_json: bool) -> None:
    """Show who did what to keys, policies and data, by command, by HTTP and on the console; newest last.

    What the loop does by itself is in `millrace history` and in the ledger. Exit code 1 if a line of serve.audit was
    changed or taken out. Who may write to the file can cut off its end, or write all of it anew: --since tells, by a
    --head that was printed before and is kept where they can't write.
    """
    from serve.observability.audit import AuditLog, AuditLogError

    log = AuditLog(settings.path(settings.serve.audit))
    if since is not None:
        lines, _, sha256 = since.partition(":")
        if not lines.isdecimal():
            raise click.UsageError(f"--since {since}: it is LINES:SHA256, as --head prints it")
        if not log.has_head(int(lines), sha256):
            raise AuditLogError(f"{log.path} does not go on from {since}: its end was cut off, or it was written anew")
    if head:
        return click.echo("{}:{}".format(*log.head()))
    found = [entry for entry in log.entries() if fnmatch(entry.action, action)][-last:]
    if as_json:
        click.echo(json.dumps([asdict(entry) for entry in found], indent=2))
        return
    rows = [
        [
            "".join(one if one.isprintable() else "?" for one in cell)  # what a terminal would obey
            for cell in _cells(entry)
        ]
        for entry in found
    ]
    print_table(["at (UTC)", "who", "from", "action", "of", "outcome"], rows, f"no such action is in {log.path}")


def _cells(entry: AuditEntry) -> list[str]:
    of = {name: value for name, value in (entry.subject | entry.result).items() if value}
    return [
        entry.at[:19].replace("T", " "),
        entry.who,
        entry.origin,
        entry.action,
        " ".join(f"{name}={value}" for name, value in of.items()),
        entry.outcome or "not known: it was killed",
    ]
