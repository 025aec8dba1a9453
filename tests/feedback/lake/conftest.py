from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from feedback_rows import interaction, table_of

from feedback.config import LakeConfig
from feedback.lake import tables
from feedback.lake.tables import Lake
from feedback.schema import INTERACTIONS, TABLES


@pytest.fixture
def older(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lake:
    """A lake of schema version 0 with a row, without the columns of experiments."""
    columns = [field for field in INTERACTIONS if field.name not in ("experiment", "propensity")]
    with monkeypatch.context() as patch:
        patch.setitem(TABLES, "interactions", pa.schema(columns))
        patch.setattr(tables, "SCHEMA_VERSION", 0)
        lake = Lake(str(tmp_path / "older"), LakeConfig())
        lake.create()
        lake.append("interactions", table_of("interactions", [interaction("old")]))
    return lake
