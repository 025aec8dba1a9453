from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from feedback.config import JournalConfig, LakeConfig
from feedback.journal.writer import Journal
from feedback.lake.tables import Lake


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A journal folder that does not exist yet."""
    return tmp_path / "journal"


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    made = Lake(str(tmp_path / "lake"), LakeConfig(lock_timeout_s=60))
    made.create()
    return made


@pytest.fixture
def journal(folder: Path) -> Iterator[Journal]:
    opened = Journal(folder, JournalConfig(segment_seconds=60), "replica-0")
    opened.open()
    yield opened
    opened.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 16 MiB."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", mounted], check=False).returncode != 0:
        pytest.skip("no right to mount a file system here")
    yield mounted
    subprocess.run(["umount", "-l", mounted], check=True)
