"""Each package's docstring says what is in it."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from tests.paths import ROOT

TOP = ("serve", "train", "feedback", "evaluation", "deploy", "loadtests")
PACKAGES = sorted(file.parent.relative_to(ROOT) for top in TOP for file in (ROOT / top).rglob("__init__.py"))


@pytest.mark.parametrize("package", PACKAGES, ids=str)
def test_a_package_names_each_of_its_modules_with_a_gloss(package: Path) -> None:
    docstring = ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text())) or ""
    modules = {path.stem for path in (ROOT / package).glob("*.py")} - {"__init__"}
    inside = modules | {path.parent.name for path in (ROOT / package).glob("*/__init__.py")}
    unnamed = sorted(name for name in inside if f"``{name}`` (" not in " ".join(docstring.split()))
    assert not unnamed, f"{package}/__init__.py does not say what these are for: {', '.join(unnamed)}"


def test_no_two_files_of_tests_have_one_name() -> None:
    """They are imported by it alone: pytest reads one, and ends with an error at the other."""
    found = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in found.items() if count > 1] == []
