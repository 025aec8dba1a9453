"""The page of what has not been run on a GPU says what the suite and the code say, and the suite skips with reasons."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.gpu_suite import Fsdp, Optimizer
from tests.paths import ROOT
from train.config.sections import FsdpConfig, OptimizerConfig

SUITE = ROOT / "tests/gpu"
PAGE = (ROOT / "docs/guide/gpu.md").read_text()
OURS = ("feedback", "serve", "evaluation", "train", "deploy", "loadtests", "tests")
ALONE = {"torch", "transformers", "numpy", "safetensors", "tokenizers", "pytest"}
"""What a machine with torch and transformers has, and pytest."""


def functions() -> dict[str, tuple[Path, ast.FunctionDef]]:
    """The tests of the suite, by name."""
    found = {}
    for file in SUITE.glob("test_*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found[node.name] = (file, node)
    return found


def mark_of(test: ast.FunctionDef) -> dict[str, Any]:
    """The arguments of its ``gpu_test``; positional ones as "0", "1"."""
    call = next(d for d in test.decorator_list if isinstance(d, ast.Call) and ast.unparse(d.func) == "gpu_test")
    named = {k.arg: k.value for k in call.keywords} | {str(i): value for i, value in enumerate(call.args)}
    return {str(name): ast.literal_eval(v) for name, v in named.items() if not isinstance(v, ast.Name)}


def rows() -> dict[str, list[str]]:
    """Cells of the page's lines, by the test in them."""
    found = {}
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if len(cells) == 5 and cells[2].startswith("`"):
            found[cells[2].strip("`")] = cells
    return found


TESTS = functions()


def test_the_page_has_a_line_for_each_test_of_the_suite_and_no_other() -> None:
    assert rows().keys() == TESTS.keys()


@pytest.mark.parametrize("name", TESTS)
def test_a_line_says_what_its_test_needs_and_what_a_cpu_runs_of_it(name: str) -> None:
    mark = mark_of(TESTS[name][1])
    _, code, _, alone, on_cpu = rows()[name]
    assert alone == ("yes" if mark.get("torch_only") else "no")
    assert on_cpu.strip("| ") == ": ".join(filter(None, (mark["0"], mark.get("1"))))
    for path in code.split(", "):
        assert (ROOT / path.strip("`")).is_file(), path


def test_each_module_that_chooses_by_device_is_on_the_page() -> None:
    choosing = {
        str(file.relative_to(ROOT))
        for top in ("feedback", "serve", "evaluation", "train", "deploy")
        for file in (ROOT / top).rglob("*.py")
        if "examples" not in file.parts and re.search(r"\bcuda\b", file.read_text())
    }
    missing = sorted(path for path in choosing if f"`{path}`" not in PAGE)
    assert not missing, f"docs/guide/gpu.md has no line for what these do on a GPU: {', '.join(missing)}"


def test_what_runs_with_torch_alone_imports_nothing_else() -> None:
    files = {file for file, test in TESTS.values() if mark_of(test).get("torch_only")}
    starts = [name for file in {*files, SUITE / "conftest.py"} for name in imports(file, ast.parse(file.read_text()))]
    foreign = {name: why for name, why in closure(starts).items() if name not in ALONE}
    assert not foreign, "; ".join(f"{why} imports {name}" for name, why in foreign.items())


def imports(file: Path, tree: ast.AST) -> Iterator[str]:
    """Modules, and names that may be modules: in the suite inside of functions too, else on the way of an import."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and SUITE not in file.parents:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        yield from imports(file, node)


def closure(names: list[str]) -> dict[str, str]:
    """What is not ours of all that these import: package -> the first of our modules that imports it."""
    seen: set[Path] = set()
    foreign: dict[str, str] = {}
    waiting = [(name, "the suite") for name in names]
    while waiting:
        name, why = waiting.pop()
        top, *_ = parts = name.split(".")
        if top not in OURS:
            if top not in sys.stdlib_module_names:
                foreign.setdefault(top, why)
            continue
        for end in range(1, len(parts) + 1):
            path = ROOT.joinpath(*parts[:end])
            for file in (path.with_suffix(".py"), path / "__init__.py"):
                if file.is_file() and file not in seen:
                    seen.add(file)
                    waiting += [(m, str(file.relative_to(ROOT))) for m in imports(file, ast.parse(file.read_text()))]
    return foreign


def test_each_name_that_the_suite_imports_of_ours_exists() -> None:
    for file in SUITE.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in OURS:
                path = ROOT.joinpath(*node.module.split("."))
                source = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
                text = source.read_text() if source.is_file() else ""
                for alias in node.names:
                    n = alias.name
                    ways = (rf"(async )?(def|class) {n}\b", rf"{n}\b.*=", rf"from .* import .*\b{n}\b")
                    known = any(re.search(f"^{way}", text, re.M) for way in ways)
                    assert known or (path / f"{n}.py").is_file(), f"{file.name}: {node.module}.{n}"


@pytest.mark.parametrize(("stand_in", "settings"), [(Fsdp, FsdpConfig), (Optimizer, OptimizerConfig)])
def test_settings_without_pydantic_have_the_fields_and_defaults_of_those_with_it(stand_in: Any, settings: Any) -> None:
    for field in dataclasses.fields(stand_in):
        default = settings.model_fields[field.name].get_default(call_default_factory=True)
        assert field.default == (tuple(default) if isinstance(default, list) else default), field.name


def test_without_a_gpu_each_test_is_skipped_with_a_line_that_says_why() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "MILLRACE_"))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "gpu", "--confcutdir=tests/gpu", "-p", "no:cacheprovider", "tests/gpu"],
        env=environment | {"CUDA_VISIBLE_DEVICES": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("skipped tests/gpu/")]
    for name in TESTS:
        reasons = [line for line in lines if f"::{name}" in line]
        assert reasons, name
        assert all(re.search(r": needs .*(a GPU, and torch|not installed)", line) for line in reasons), reasons
    assert f"0 passed, 0 failed, {len(lines)} skipped; device: cuda" in done.stdout
