"""Bytes of a rank, against sums worked out by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from train.config.sections import OptimizerConfig
from train.planner.memory import Sharding, held, held_frozen, inference, state_bytes, update
from train.planner.sizes import Activations, ModelShape, Unit

LAYER = Unit(trained=1000, frozen=0, by_columns=0, largest=400, largest_trained=400)
ROOT = Unit(trained=2000, frozen=0, by_columns=0, largest=1000, largest_trained=1000)
SHAPE = ModelShape(
    architecture="Small",
    layers=(LAYER,) * 10,
    root=ROOT,
    kinds={"mlp": 10_000, "embedding": 1000, "output": 1000},
    active=12_000,
    vocabulary=100,
    hidden=10,
    heads=2,
    key_value_heads=2,
    head_size=5,
    tied=False,
    stored="bfloat16",
    context=128,
)
KEPT = Activations(
    layer=5000,
    outside=300,
    layer_input=200,
    forward=700,
    backward=3000,
    inference=1500,
    head_kept=100,
    head_forward=900,
    head_backward=1200,
)
NOTHING = Activations(*[0] * 9)


def bf16(shards: int, **how: object) -> Sharding:
    return Sharding(shards, itemsize=2, frozen_itemsize=2, **how)  # type: ignore[arg-type]


def test_a_trained_parameter_takes_twelve_bytes_over_all_ranks() -> None:
    assert held(SHAPE, bf16(1)).total() == 12 * 12_000
    assert held(SHAPE, bf16(4)) == Counter(weights=4 * 3000, optimizer=8 * 3000)


@pytest.mark.parametrize(
    ("optimizer", "of_matrices", "of_others"),
    [
        ({"name": "adamw"}, 8, 8),
        ({"name": "muon"}, 4, 8),
        ({"name": "sgd"}, 0, 0),
        ({"name": "sgd", "momentum": 0.9}, 4, 4),
        ({"name": "adamw_8bit"}, 2 + 2 / 64, 2 + 2 / 64),
        ({"name": "module:Own"}, 8, 8),
    ],
)
def test_an_optimizers_state_is_what_it_keeps_of_a_parameter(
    optimizer: dict[str, Any], of_matrices: float, of_others: float
) -> None:
    shape = replace(SHAPE, layers=(replace(LAYER, matrices=800),) * 10)
    state = state_bytes(OptimizerConfig.model_validate(optimizer))
    expected = int(of_matrices * 8000 + of_others * 4000) // 4
    assert held(shape, bf16(4, state=state)) == Counter(weights=4 * 3000, optimizer=expected)
    assert held(shape, bf16(4, state=state, waits=True)) == Counter(weights=4 * 3000)
    back = update(shape, bf16(4, state=state, waits=True), NOTHING)
    assert back["optimizer"] in (0, expected)
    assert back.total() >= 4 * 3000 + expected + 4 * 3000, "it is there for the step, beside the gradients"


def test_muon_needs_a_matrix_whole() -> None:
    wide = replace(SHAPE, layers=(replace(LAYER, largest_trained=40_000),) * 10)
    assert update(wide, bf16(4, muon=True), NOTHING)["buffers"] == 16 * 40_000
    assert update(wide, bf16(4, muon=True, slices=2), NOTHING)["buffers"] == 16 * 2 * 40_000
    assert update(wide, bf16(4, muon=True, host=True), NOTHING) == Counter(buffers=16 * 40_000)


def test_layers_that_are_kept_after_forward_are_all_there_when_the_last_one_goes_back() -> None:
    assert update(SHAPE, bf16(4, resharded=False), KEPT)["unsharded"] == 2 * (2000 + 10 * 1000)


def test_layers_that_are_prefetched_are_there_beside_the_one_that_computes() -> None:
    assert update(SHAPE, bf16(4, ahead=3), KEPT)["unsharded"] == 2 * (2000 + 1000 + 3 * 1000)


def test_a_frozen_model_is_held_in_slices_of_the_compute_type() -> None:
    assert held_frozen(SHAPE, bf16(4)) == Counter(weights=2 * 3000)


def test_one_rank_has_most_when_the_last_layer_goes_back() -> None:
    most = update(SHAPE, bf16(1), KEPT)
    assert most == Counter(
        weights=4 * 12_000,
        optimizer=8 * 12_000,
        unsharded=2 * (2000 + 1000),  # the root's, and the layer's
        activations=300 + 10 * 5000 + 3000,
        gradients=2 * 1000,  # of the output layer
    )


def test_of_several_ranks_each_has_the_next_layer_gathered_too() -> None:
    most = update(SHAPE, bf16(4), KEPT)
    assert most["unsharded"] == 2 * (2000 + 1000 + 1000)
    assert most["weights"] + most["optimizer"] == 12 * 3000


def test_checkpointing_keeps_a_layers_input_and_one_layer() -> None:
    plain, checkpointed = (update(SHAPE, bf16(4, checkpointing=on), KEPT) for on in (False, True))
    assert plain["activations"] == 300 + 10 * 5000 + 3000
    # The first layer's backward pass, the last of all, when the gradients of the others are there too.
    assert checkpointed["activations"] == 300 + 200 + 5000 + 3000


@pytest.mark.parametrize(("reduced", "bytes_"), [(False, 4 * 12_000), (True, 4 * 12_000 // 4)])
def test_gradients_of_earlier_micro_batches_are_whole_unless_each_is_reduced(reduced: bool, bytes_: int) -> None:
    how = bf16(4, micro_batches=3, reduce_every_micro_batch=reduced)
    assert update(SHAPE, how, KEPT)["gradients"] == bytes_ + 2 * 1000


def test_without_activations_what_is_left_at_the_end_is_the_most() -> None:
    most = update(SHAPE, bf16(1), NOTHING)
    # The buffer and the result of the reduction of the root's gradients, beside those of all layers.
    assert most.total() == 12 * 12_000 + 4 * 10_000 + 4 * 2000 + 4 * 2000


def test_gloo_reduces_in_a_copy_of_the_buffer() -> None:
    on_gpus, on_cpus = (bf16(4, gloo=gloo).reduction(1000).total() for gloo in (False, True))
    assert on_gpus == max(2 * 1000 + 4 * 1000, 4 * 1000 + 4 * 250)
    assert on_cpus == 2 * 4 * 1000 + 4 * 250
    assert bf16(1, gloo=True).reduction(1000).total() == 8 * 1000  # there is nobody to reduce with


def test_offload_leaves_a_device_what_a_pass_needs() -> None:
    how = bf16(4, micro_batches=3, reduce_every_micro_batch=True, host=True)
    most = update(SHAPE, how, KEPT)
    assert not most["weights"]
    assert not most["optimizer"]
    assert most["gradients"] == 2 * 1000


def test_a_pass_without_gradient_has_one_layer_or_the_logits() -> None:
    assert inference(SHAPE, bf16(1), KEPT) == Counter(unsharded=2 * 3000, activations=1500)
    assert inference(SHAPE, bf16(1), NOTHING).total() == 2 * 3000
