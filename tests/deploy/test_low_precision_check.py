"""fp8 where there is none is refused before anything is started, by the setting and the device."""

from __future__ import annotations

import importlib.util

import pytest

from deploy import cli, devices, low_precision_check
from deploy.config import root
from deploy.config.root import ConfigError, Settings
from deploy.loop.cycle import run_cycle
from deploy.loop.preflight import training_problems
from serve.gpus import Gpu

REFUSED = r"train\.fp8\.training=rowwise: the CPU of this machine does not multiply in fp8.*train\.fp8\.emulate=true"
OPTIONS = [("train.fp8.training", "rowwise"), ("train.dtype", "bfloat16")]


def with_fp8(settings: Settings, *more: tuple[str, str]) -> Settings:
    return root.load(settings.snapshot(), [*OPTIONS, *more], {})


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def on_gpus(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int]) -> None:
    """As if vLLM's build for GPUs were installed, and the driver showed these."""
    found = [Gpu(i, 0, 2**36, 0.0, f"GPU {i}", capability) for i, capability in enumerate(capabilities)]
    monkeypatch.setattr(devices, "installed", lambda _: {"vllm": "1"})
    monkeypatch.setattr(low_precision_check, "gpus", lambda: found)


@pytest.mark.usefixtures("on_cpu")
def test_a_cycle_on_a_cpu_is_refused_and_has_no_record(home_with_policy: Settings) -> None:
    with pytest.raises(ConfigError, match=REFUSED):
        run_cycle(with_fp8(home_with_policy))
    assert not home_with_policy.path(home_with_policy.cycle.folder).exists()


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("what", [[], ["--reward-model"]])
def test_a_training_on_a_cpu_is_refused_and_makes_no_run(
    home_with_policy: Settings, capsys: pytest.CaptureFixture[str], what: list[str]
) -> None:
    assert cli.run(["train", *what, "--config", str(with_fp8(home_with_policy).snapshot())]) == 2
    assert "train.fp8.training=rowwise: the CPU of this machine does not multiply in fp8" in capsys.readouterr().err
    assert not home_with_policy.path(home_with_policy.train.runs).exists()


@pytest.mark.usefixtures("on_cpu")
def test_what_is_emulated_or_runs_on_a_cluster_is_not_refused_here(home_with_policy: Settings) -> None:
    assert low_precision_check.fp8_problem(home_with_policy.train) is None
    assert low_precision_check.fp8_problem(with_fp8(home_with_policy, ("train.fp8.emulate", "true")).train) is None
    cluster = with_fp8(home_with_policy, ("train.ray_address", "http://cluster:8265"))
    assert low_precision_check.fp8_problem(cluster.train) is None


def test_of_several_gpus_the_newest_decides_and_an_old_one_is_named(
    home_with_policy: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    train = with_fp8(home_with_policy).train
    on_gpus(monkeypatch, (8, 0), (9, 0))
    assert low_precision_check.fp8_problem(train) is None
    on_gpus(monkeypatch, (8, 0), (8, 6))
    assert "GPU 1 (compute capability 8.6) does not multiply in fp8" in str(low_precision_check.fp8_problem(train))
    on_gpus(monkeypatch)
    assert low_precision_check.fp8_problem(train) is None, "nothing is known, and the ranks look themselves"


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        ([("train.optimizer.name", "adamw_8bit")], "train.optimizer.name=adamw_8bit"),
        ([("train.lora", "{rank: 4, base: nf4}")], "train.lora.base=nf4"),
        ([*OPTIONS, ("train.fp8.emulate", "true")], "train.fp8.training"),
    ],
)
def test_without_torchao_what_needs_it_is_refused_with_what_to_install(
    home_with_policy: Settings, monkeypatch: pytest.MonkeyPatch, options: list[tuple[str, str]], setting: str
) -> None:
    settings = root.load(home_with_policy.snapshot(), options, {})
    assert low_precision_check.torchao_problem(settings.train) is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    said = f"{setting} needs torchao, which is not installed: pip install 'millrace[low-precision]'"
    assert low_precision_check.torchao_problem(settings.train) == said
    assert said in training_problems(settings)
    assert low_precision_check.torchao_problem(home_with_policy.train) is None
