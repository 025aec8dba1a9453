"""After a power loss behind any I/O call, what was acknowledged is in the lake, once."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from power_loss import LEFT, losses, record, restore

from feedback.config import JournalConfig, LakeConfig
from feedback.ingest.seal import seal
from feedback.journal.writer import Journal
from feedback.lake.tables import Lake
from tests.paths import ROOT

EVERY = int(os.environ.get("POWER_LOSS_EVERY", "8"))
"""Of the different states of the disk, each so-manieth is tried; `make crash-test` tries all."""

PRELUDE = f"""
import asyncio, sys
sys.path[:0] = {[str(ROOT / "tests" / "feedback"), str(ROOT)]!r}
from pathlib import Path
from feedback.config import JournalConfig, LakeConfig
from feedback.journal.writer import Journal
from feedback.lake.tables import Lake
from feedback.ingest.seal import seal
from feedback_rows import interaction, thumb
from tests.feedback.journal.test_streams import tokens

home = Path(sys.argv[1])
lake = Lake(str(home / "lake"), LakeConfig())
lake.create()
journal = Journal(home / "journal", JournalConfig(segment_bytes=10_000), "replica-0")

def acknowledged(*ids):
    print("\\n".join(ids), flush=True)

async def append(*numbers):
    for n in numbers:
        await asyncio.gather(
            journal.append("interactions", interaction(f"i{{n}}")),
            journal.append("feedback", thumb(f"i{{n}}", 1, feedback_id=f"f{{n}}")),
        )
        acknowledged(f"i{{n}}", f"f{{n}}")
"""

JOURNAL_AND_SEAL = """
async def main():
    journal.open()
    await append(1, 2)
    stream = await journal.begin(tokens("s1", 0), lambda: tokens("s1", 1))
    await append(3, 4, 5)
    seal(lake, home / "journal")
    await journal.end(stream, tokens("s1", 4))
    acknowledged("s1")
    await append(6)
    await asyncio.to_thread(journal.close)
    seal(lake, home / "journal")

asyncio.run(main())
"""

SECOND_LIFE = """
async def main():
    journal.open()
    await append(1, 2)
    journal._forget_in_child()  # as killed: the files are left as they are
    again = Journal(home / "journal", JournalConfig(), "replica-0")
    again.open()
    await again.append("interactions", interaction("i3"))
    acknowledged("i3")
    seal(lake, home / "journal")
    await asyncio.to_thread(again.close)
    seal(lake, home / "journal")

asyncio.run(main())
"""

KILLED_SEALER = """
async def main():
    journal.open()
    await append(1, 2)
    await asyncio.to_thread(journal.close)

asyncio.run(main())

from feedback.lake import tables

def killed(*_):
    raise KeyboardInterrupt

durable, tables.make_log_durable = tables.make_log_durable, killed
for _ in range(2):  # each seal is killed behind the commit of one table, before that is durable
    try:
        seal(lake, home / "journal")
    except KeyboardInterrupt:
        pass
tables.make_log_durable = durable
seal(lake, home / "journal")
"""

PROGRAMS = {"journal and seal": JOURNAL_AND_SEAL, "second life": SECOND_LIFE, "killed sealer": KILLED_SEALER}

CARELESS = {
    "journal": "import os; os.fdatasync = lambda fd: None",
    "names in the journal": "import feedback.journal.session; feedback.journal.session.fsync_path = lambda path: None",
    "data files": "import feedback.lake.data_files; feedback.lake.data_files.fsync_path = lambda path: None",
}
"""What a program must not leave out."""

needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")


@needs_strace
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_a_power_loss_behind_any_io_call_loses_and_doubles_nothing(program, tmp_path):
    tried: Counter[str] = Counter()
    for case, what, acknowledged, found in power_losses(program, tmp_path, EVERY):
        assert acknowledged - found.keys() == set(), f"lost {case}"
        assert max(found.values(), default=1) == 1, f"doubled {case}"
        tried[what] += 1
    assert len(acknowledged) >= 3
    assert all(tried[what] for what in LEFT), tried
    print(f"states tried, by what was left: {dict(tried)}")


@needs_strace
@pytest.mark.parametrize("left_out", CARELESS)
@pytest.mark.long
def test_a_program_that_leaves_out_an_fsync_is_seen_to_lose_rows(left_out, tmp_path):
    # The last states matter: all is acknowledged by then, and the segments are gone.
    try:
        lost = any(
            acknowledged - found.keys()
            for _, _, acknowledged, found in power_losses(CARELESS[left_out] + JOURNAL_AND_SEAL, tmp_path, 2)
        )
    except NoRecovery:
        lost = True
    assert lost, "nothing was lost"


class NoRecovery(AssertionError):
    """What was left can't be read."""


def power_losses(program: str, folder: Path, every: int) -> Iterator[tuple[str, str, set[str], Counter[str]]]:
    """(case, what was left, acknowledged ids, ids in the lake after recovery) for states of the disk."""
    home, script = folder / "home", folder / "program.py"
    home.mkdir()
    script.write_text(PRELUDE + program)
    calls = record(script, str(home))
    told = b"".join(call.data for call in calls if call.name == "write" and call.fd == 1)
    kinds: set[str] = set()
    for number, (call, what, files, printed) in enumerate(losses(calls, home)):
        if number % every and what in kinds:
            continue
        kinds.add(what)
        restore(files, folder / "left")
        case = f"behind call {call}, {calls[call].name} of {calls[call].paths}, {what} left"
        try:
            found = recovered(folder / "left")
        except Exception as error:
            raise NoRecovery(f"no recovery {case}: {error}") from error
        yield case, what, set(told[:printed].decode().split()), found


def recovered(home: Path) -> Counter[str]:
    """Start as a server does, stop, and count each id in the lake."""
    lake = Lake(str(home / "lake"), LakeConfig())
    lake.create()
    journal = Journal(home / "journal", JournalConfig(), "replica-0")
    journal.open()
    journal.close()
    seal(lake, home / "journal")
    assert not [path for path in (home / "journal").iterdir() if path.suffix in (".open", ".arrows")]
    with lake.connect() as connection:
        found = connection.sql(
            "SELECT response_id FROM interactions WHERE status = 'complete' "
            "UNION ALL SELECT feedback_id FROM feedback UNION ALL "
            "SELECT response_id FROM interactions WHERE status <> 'complete' AND response_id NOT LIKE 's%'"
        ).fetchall()
    return Counter(name for [name] in found)
