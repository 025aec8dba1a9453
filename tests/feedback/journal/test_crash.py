"""``kill -9`` of real processes. What they printed they acknowledged; all of that must be there, once."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

from feedback.config import LakeConfig
from feedback.ingest.seal import seal
from feedback.lake.tables import Lake
from tests.paths import ROOT

WRITER = """
import asyncio, sys
from pathlib import Path
from feedback.config import JournalConfig
from feedback.journal.writer import Journal
from feedback_rows import interaction, thumb

async def client(journal, name):
    for number in range(1_000_000):
        row = f"{name}-{number}"
        if number % 3:
            await journal.append("interactions", interaction(row))
        else:
            await journal.append("feedback", thumb(row, 1))
        sys.stdout.write(row + "\\n")
        sys.stdout.flush()

async def main(folder, life):
    journal = Journal(Path(folder), JournalConfig(segment_bytes=60_000, segment_seconds=0.2), "replica-0")
    journal.open()
    await asyncio.gather(*(client(journal, f"{life}-{task}") for task in range(16)))

asyncio.run(main(sys.argv[1], sys.argv[2]))
"""

SEALER = """
import sys
from pathlib import Path
from feedback.config import LakeConfig
from feedback.lake.tables import Lake
from feedback.ingest.seal import seal

while True:
    seal(Lake(sys.argv[2], LakeConfig()), Path(sys.argv[1]))
"""


def start(code: str, *arguments: str, output: Path | None = None) -> subprocess.Popen[bytes]:
    path = [str(ROOT / "tests" / "feedback"), str(ROOT)]
    prelude = f"import sys; sys.path[:0] = {path!r}\n"
    with open(output, "wb") if output is not None else open("/dev/null", "wb") as out:
        return subprocess.Popen([sys.executable, "-c", prelude + code, *arguments], stdout=out)


def acknowledged(outputs: list[Path]) -> set[str]:
    # The last line of a killed process may be cut; a cut line was not yet told to anybody.
    return {line for output in outputs for line in output.read_text().rpartition("\n")[0].splitlines()}


def wait_for_lines(output: Path, lines: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while output.read_bytes().count(b"\n") < lines:
        assert process.poll() is None, "the writer ended by itself"
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_killed_writers_and_sealers_lose_and_double_nothing(tmp_path):
    folder = tmp_path / "journal"
    lake = Lake(str(tmp_path / "lake"), LakeConfig())
    lake.create()
    folder.mkdir()
    chance = random.Random(2)
    outputs: list[Path] = []
    sealer = start(SEALER, str(folder), lake.uri)
    try:
        for life in range(3):
            output = tmp_path / f"life-{life}"
            outputs.append(output)
            writer = start(WRITER, str(folder), str(life), output=output)
            try:
                wait_for_lines(output, 200, writer)
                time.sleep(chance.uniform(0, 0.5))
                if life == 1:
                    sealer.kill()
                    sealer.wait(120)
                    sealer = start(SEALER, str(folder), lake.uri)
            finally:
                writer.kill()
                writer.wait(120)
    finally:
        sealer.kill()
        sealer.wait(120)

    told = acknowledged(outputs)
    assert len(told) >= 600
    # Before anything is recovered the view has them all, and so has the lake after it.
    for _ in range(2):
        with lake.connect(folder) as connection:
            found = connection.sql(
                "SELECT response_id FROM interactions UNION ALL SELECT response_id FROM feedback"
            ).fetchall()
        rows = [row for [row] in found]
        assert len(rows) == len(set(rows))
        assert told <= set(rows)
        seal(lake, folder)
        folder_is_empty = not list(folder.glob("*.open")) and not list(folder.glob("*.arrows"))
        assert folder_is_empty
    assert lake.counts()["interactions"] + lake.counts()["feedback"] == len(rows)
