"""Looks for the responses of sessions, in a process of its own: see ``sessions``."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import IO, Any

import duckdb

from feedback.config import LakeConfig
from feedback.lake.tables import Lake, LakeError


def main(requests: IO[str], answers: IO[str]) -> None:
    """Answer until the pipe ends; the first line says where the lake and the journal are."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    task = json.loads(requests.readline())
    lake = Lake(task["uri"], LakeConfig.model_validate(task["config"]))
    print("ready", file=answers, flush=True)
    for line in requests:
        print(json.dumps(_answer(lake, Path(task["journal"]), json.loads(line))), file=answers, flush=True)


def _answer(lake: Lake, journal_folder: Path, request: dict[str, Any]) -> dict[str, Any]:
    """``found``: the first column of what a query finds in the tables, or ``error``."""

    def look(connection: duckdb.DuckDBPyConnection) -> list[str]:
        return [value for (value,) in connection.execute(request["query"], request["parameters"]).fetchall()]

    try:
        return {"found": lake.read(look, journal_folder, tables=request["tables"])}
    except (LakeError, OSError, duckdb.Error) as error:
        return {"error": lake.config.redact(str(error))}


if __name__ == "__main__":
    answers, sys.stdout = sys.stdout, sys.stderr  # what code prints is no answer
    main(sys.stdin, answers)
