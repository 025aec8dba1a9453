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
@as_json_option
@pass_settings
def audit(settings: Settings, last: int, action: str, as_json: bool) -> None:
    """Show who did what to keys, policies and data, by command, by HTTP and on the console; newest last.

    What the loop does by itself is in `millrace history` and in the ledger. Exit code 1 if a line of serve.audit was
    changed or taken out.
    """
    from serve.observability.audit import AuditLog

    log = AuditLog(settings.path(settings.serve.audit))
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
