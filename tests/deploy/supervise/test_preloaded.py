"""The process that stages are forked from: by which version it knows that another one is installed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from deploy.supervise import preloaded


def test_what_was_imported_is_outdated_once_a_file_has_changed_and_while_folders_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deploy" / "supervise").mkdir(parents=True)
    file = tmp_path / "train" / "job.py"
    file.parent.mkdir()
    file.touch()
    monkeypatch.setattr(preloaded, "__file__", str(tmp_path / "deploy" / "supervise" / "preloaded.py"))
    version = preloaded._installed()
    assert preloaded._still_installed(version)
    os.utime(file, ns=(1, 1))
    assert not preloaded._still_installed(version)
    version = preloaded._installed()
    shutil.rmtree(file.parent)
    assert not preloaded._still_installed(version)

    def goes_meanwhile() -> None:
        raise FileNotFoundError("__pycache__")

    monkeypatch.setattr(preloaded, "_installed", goes_meanwhile)
    assert not preloaded._still_installed(version)
