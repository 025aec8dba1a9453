"""What a step's metrics say of the hardware, by numbers worked out by hand; and how long the rest will take."""

from __future__ import annotations

import pytest

from train.config.training import TrainConfig
from train.controller.usage import Usage
from train.observe.progress import StepProgress, duration, time_left
from train.observe.resources import step_metrics
from train.planner.sizes import ModelShape, Unit

GIB = 2**30


def shape(trained: int = 100, frozen: int = 0) -> ModelShape:
    """Two heads of width 4, ten tokens of width 8, one layer; the embedding is the output too."""
    return ModelShape(
        architecture="X",
        layers=(Unit(trained, frozen, 0, 0, 0),),
        root=Unit(0, 0, 0, 0, 0),
        kinds={"mlp": 220, "embedding": 80},
        active=300,
        vocabulary=10,
        hidden=8,
        heads=2,
        key_value_heads=2,
        head_size=4,
        tied=True,
        stored="float32",
        context=None,
    )


RANKS = [Usage(3 * GIB, 2.0, rows=50, scored=20, pairs=400.0), Usage(2 * GIB, 1.0, rows=30, scored=10, pairs=200.0)]
FORWARD = 2 * (220 * 80 + 80 * 30) + 4 * 8 * 600
"""220 parameters at each of 80 rows, 80 of the output at 30, and 4 · 8 for each of 600 pairs."""


def test_flops_are_those_of_all_ranks_in_the_time_of_the_slowest_and_memory_is_the_highest() -> None:
    metrics = step_metrics(TrainConfig(), shape(), RANKS, peak_flops=1e6)
    flops = 3 * FORWARD
    assert metrics == {
        "peak_memory_gib": 3.0,
        "model_flops": flops,
        "model_flops_per_s": flops / 2,
        "mfu": flops / 2 / 1e6,
    }


def test_frozen_weights_need_no_gradients_and_ranks_that_share_sequences_count_them_once() -> None:
    metrics = step_metrics(TrainConfig(), shape(trained=10, frozen=290), RANKS, None)
    assert metrics["model_flops"] == 2 * FORWARD
    config = TrainConfig.model_validate({"ranks": 2, "fsdp": {"sequence_parallel": 2}})
    assert step_metrics(config, shape(), RANKS, None)["model_flops"] == 3 * FORWARD / 2


def test_a_step_without_an_update_and_a_device_of_unknown_peak_have_no_share_of_it() -> None:
    assert step_metrics(TrainConfig(), shape(), [Usage(GIB)], 1e6) == {"peak_memory_gib": 1.0}
    assert "mfu" not in step_metrics(TrainConfig(), shape(), RANKS, None)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (59.6, "1 min 0 s"), (200, "3 min 20 s"), (7499, "2 h 4 min")]
)
def test_durations_are_rounded_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_time_left_is_that_of_the_last_steps(capsys: pytest.CaptureFixture[str]) -> None:
    assert time_left([1.0, 3.0], 5) == ", 10 s left"
    with StepProgress("r", 3, 6) as progress:
        for step, took in ((3, 2.0), (4, 4.0), (5, 4.0)):
            progress.step(step, {"reward": 0.5, "tokens_per_s": 10.0, "mfu": 0.4, "seconds": took})
    assert capsys.readouterr().out.splitlines() == [
        "r: step 4/6 reward 0.500 10 tokens/s MFU 40.0% 2.00 s, 4 s left",
        "r: step 5/6 reward 0.500 10 tokens/s MFU 40.0% 4.00 s, 3 s left",
        "r: step 6/6 reward 0.500 10 tokens/s MFU 40.0% 4.00 s",
    ]
