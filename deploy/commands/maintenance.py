"""lake compact, vacuum, retain, erase: what keeps the lake in order."""

from __future__ import annotations

import click

COMMANDS: tuple[click.Command, ...] = ()
