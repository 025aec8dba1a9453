"""lake: look into the tables, and keep them in order."""

from __future__ import annotations

import click

from deploy.commands import maintenance, query


@click.group()
def lake() -> None:
    """Look into the lake, and keep it in order."""


for command in (*query.COMMANDS, *maintenance.COMMANDS):
    lake.add_command(command)
