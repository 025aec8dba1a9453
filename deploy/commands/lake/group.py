"""lake: look into the tables, and keep them in order."""

from __future__ import annotations

import click

from deploy.commands.lake.maintenance import compact, erase, maintain, retain, upgrade, vacuum
from deploy.commands.lake.query import sql, stats

lake = click.Group(
    "lake",
    commands=[sql, stats, compact, vacuum, retain, erase, maintain, upgrade],
    help="Look into the lake, and keep it in order.",
)
