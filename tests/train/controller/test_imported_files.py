"""Whether code that was imported is as it was then."""

from __future__ import annotations

import importlib
import os
import sys
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from train.controller.imported_files import ImportedFiles, imported_files


def test_code_that_was_imported_is_seen_to_have_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "imported_by_a_resident.py"
    file.touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    os.utime(file, ns=(1, 1))
    importlib.import_module(file.stem)
    imported = ImportedFiles()
    assert imported.changed() is None
    os.utime(file, ns=(2, 2))
    assert imported.changed() == f"{file} has changed since it was imported"


def test_code_that_was_replaced_by_some_of_the_same_time_is_seen_to_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "unpacked_by_a_deployment.py"
    file.write_text("REWARD = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    os.utime(file, ns=(1, 1))
    importlib.import_module(file.stem)
    imported = ImportedFiles()
    other = tmp_path / "other"
    other.write_text("REWARD = 2\n")
    os.utime(other, ns=(1, 1))
    other.replace(file)
    assert imported.changed() == f"{file} has changed since it was imported"


def test_what_another_process_has_imported_counts_as_it_looked_there(tmp_path: Path) -> None:
    imported, file = ImportedFiles(), tmp_path / "imported_elsewhere.py"
    file.touch()
    os.utime(file, ns=(1, 1))
    imported.add({str(file): (1, 0, file.stat().st_ino)})
    assert imported.changed() is None
    os.utime(file, ns=(2, 2))
    assert imported.changed() == f"{file} has changed since it was imported"
    newer, soon = ImportedFiles(), time.time_ns() + 10**9
    os.utime(file, ns=(soon, soon))
    newer.add({str(file): (soon, 0, file.stat().st_ino)})  # maybe changed after the other had imported it
    assert newer.changed() == f"{file} has changed since it was imported"


def test_code_that_a_compiler_writes_and_runs_is_not_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imported, file = ImportedFiles(), tmp_path / "kernel.py"
    file.touch()
    module = ModuleType("written_by_a_compiler")  # as torch._inductor does
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert str(file) not in imported_files()
    imported.note()
    assert imported.changed() is None


@pytest.mark.parametrize("cache", ["torchinductor_root/ab", ".triton/cache/cd", "set/ef"])
def test_a_library_that_a_compiler_loads_as_a_module_is_not_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: str
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "set"))
    file = tmp_path / cache / "launcher.py"
    file.parent.mkdir(parents=True)
    file.touch()
    imported, spec = ImportedFiles(), spec_from_file_location("launcher", file)
    assert spec is not None
    monkeypatch.setitem(sys.modules, "launcher", module_from_spec(spec))
    assert str(file) not in imported_files()
    imported.note()
    assert imported.changed() is None
