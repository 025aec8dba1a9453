"""A lake to look at."""

from __future__ import annotations

from pathlib import Path

import pytest

from feedback.config import LakeConfig
from feedback.lake.tables import Lake


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    made = Lake(str(tmp_path / "lake"), LakeConfig())
    made.create()
    return made
