"""What several commands share: the settings, the lake, the result file, options."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deploy.config.root import Settings

if TYPE_CHECKING:
    from feedback.lake.tables import Lake
    from serve.observability.audit import Outcome

pass_settings = click.make_pass_decorator(Settings)

json_out = click.option(
    "--json-out", type=click.Path(path_type=Path), metavar="FILE", help="Also write the result to FILE, as JSON."
)


dry_run_option = click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
as_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
date_and_time = click.DateTime(["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S"])


def utc(_: click.Context, __: click.Parameter, value: datetime | None) -> datetime | None:
    """What an option of ``date_and_time`` means: it is in UTC."""
    return value and value.replace(tzinfo=UTC)


def write_result(result: dict[str, Any], file: Path | None) -> None:
    """Write a command's result for the process that ran it, whole or not at all."""
    from feedback.files import replace_file

    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, json.dumps(result, indent=2, default=str).encode() + b"\n")


def log_lines(settings: Settings, process: str) -> Callable[[str], None]:
    """What prints the lines of a process that goes on by itself, as ``serve.log_format`` says, and logs as they are."""
    if settings.serve.log_format == "text":
        return click.echo
    from serve.observability import log_format

    log_format.configure("json")
    return lambda line: click.echo(log_format.as_json(line, f"millrace.{process}"))


def existing_lake(settings: Settings) -> Lake:
    """The lake. Raises LakeError if there is none; makes none."""
    from feedback.lake.tables import LakeError

    lake = settings.lake()
    try:
        lake.versions()
    except LakeError as error:
        if lake.local and not Path(lake.uri).exists():
            raise LakeError(f"there is no lake at {lake.uri}: the server makes it when it starts") from error
        raise
    return lake


def audited(settings: Settings, action: str, **subject: Any) -> AbstractContextManager[Outcome]:
    """Have what a command does in the block in the audit log. Raises AuditLogError if that can't be written."""
    from deploy.loop.promotion import person
    from serve.observability.audit import AuditLog

    client = os.environ.get("SSH_CONNECTION", "").split(" ")[0]
    origin = f"a command on {socket.gethostname()}" + (f", from {client}" if client else "")
    return AuditLog(settings.path(settings.serve.audit)).entry(action, subject, who=person(), origin=origin)
