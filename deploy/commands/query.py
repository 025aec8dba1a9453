"""lake sql, lake stats: what is in the lake."""

from __future__ import annotations

import click

COMMANDS: tuple[click.Command, ...] = ()
