"""Files of others' packages are the ones that were published, with their licence."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from tests.paths import ROOT

RECORDS = sorted(file for top in ("serve", "deploy") for file in (ROOT / top).rglob("vendored.json"))


@pytest.mark.parametrize("record", RECORDS, ids=lambda file: str(file.parent.relative_to(ROOT)))
def test_every_vendored_file_is_recorded_with_its_hash_and_its_licence_lies_beside_it(record: Path) -> None:
    known = json.loads(record.read_text())
    for package in known.values():
        assert package["integrity"].startswith("sha512-")
        assert package["licence_file"] in package["files"]
    recorded = {name: sha256 for package in known.values() for name, sha256 in package["files"].items()}
    there = {str(file.relative_to(record.parent)): file for file in record.parent.rglob("*") if file.is_file()}
    del there[record.name]
    assert recorded == {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in there.items()}
