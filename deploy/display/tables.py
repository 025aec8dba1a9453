"""Listings as aligned columns of text."""

from __future__ import annotations

import click


def table(header: list[str], rows: list[list[str]]) -> str:
    """Rows as aligned columns of plain text."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [header, *rows]]
    return "\n".join(line.rstrip() for line in lines)


def printable(text: str, keep: str = "") -> str:
    """Text that can't move the cursor: what came from elsewhere must not act on a terminal. ``keep``: but these do."""
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def print_table(header: list[str], rows: list[list[str]], empty: str) -> None:
    """Print a listing, or the text ``empty``, if there is one, where there is nothing to list."""
    click.echo(table(header, rows) if rows or not empty else empty)
