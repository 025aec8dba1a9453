"""Seconds and bytes, against numbers worked out from the papers' formulas."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.train.planner.public_configs import write
from train.planner.machine import PRESETS, parse_gpus
from train.planner.memory import Sharding
from train.planner.model_shape import read_config, shape_of
from train.planner.sizes import Batch, ModelShape, Operations, PassOperations
from train.planner.step_time import (
    Generation,
    exchanged_bytes,
    forward_flops,
    gathered_bytes,
    generation_cost,
    inference_cost,
    passed_bytes,
    products_seconds,
    sync_bytes,
    update_cost,
)

A100 = replace(parse_gpus("8xA100"), flops_share=1.0, bandwidth_share=1.0, link_share=1.0)
BATCH = Batch.of(8, 1, 100, 924)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    return shape_of(read_config(write("Llama-3-8B", tmp_path_factory.mktemp("llama"))))


def test_a_forward_pass_is_two_operations_a_parameter_and_the_scores(llama: ModelShape) -> None:
    # 32 layers of 4096 wide heads: 4 · 4096 for each of the L²/2 pairs that are computed.
    scores = 32 * 4 * 4096 * 8 * 1023**2 / 2
    inside = llama.parameters - 2 * 128256 * 4096  # neither the embedding nor the output
    assert forward_flops(llama, BATCH) == pytest.approx(2 * (inside * 8 * 1023 + 128256 * 4096 * 8 * 924) + scores)


def test_an_update_is_three_forward_passes_and_four_with_checkpointing(llama: ModelShape) -> None:
    how = Sharding(1, 2, 2)
    beside = 28 * llama.parameters / 2.04e12
    plain = update_cost(llama, how, BATCH, A100).seconds - beside
    assert plain == pytest.approx(3 * forward_flops(llama, BATCH) / 312e12)
    again = update_cost(llama, replace(how, checkpointing=True), BATCH, A100).seconds - beside
    assert again == pytest.approx(plain * 4 / 3)


def test_on_a_cpu_nothing_overlaps_and_what_a_pass_runs_beside_products_counts(llama: ModelShape) -> None:
    cpu = replace(A100, kind="cpu", operation_s=1e-5, touched=1e10, unit_s=1e-3, parameter_s=1e-12, float32_share=0.25)
    how = Sharding(2, 2, 2, micro_batches=3)
    beside = PassOperations(Operations(100, 10**9), Operations(200, 3 * 10**9), again=Operations(80, 8 * 10**8))
    none = PassOperations(Operations(), Operations(), Operations())

    def seconds(how: Sharding, what: PassOperations) -> float:
        return update_cost(llama, how, BATCH, cpu, what).seconds

    assert seconds(how, beside) - seconds(how, none) == pytest.approx(3 * (300e-5 + 0.4))
    again = replace(how, checkpointing=True)
    assert seconds(again, beside) - seconds(again, none) == pytest.approx(3 * (380e-5 + 0.48))
    gpu = update_cost(llama, how, BATCH, A100)
    both = gpu.moved / A100.slowest_link(2) + 3 * 3 * forward_flops(llama, BATCH) / 312e12
    assert gpu.seconds < both < seconds(how, none)
    # Layers and the root, twice for each micro-batch, and once to reduce their gradients.
    slower = replace(cpu, unit_s=2e-3)
    assert update_cost(llama, how, BATCH, slower, none).seconds - seconds(how, none) == pytest.approx(7 * 33e-3)


def test_ranks_that_share_layers_start_as_many_collectives_as_there_are_sums(llama: ModelShape) -> None:
    cpu = replace(A100, kind="cpu")
    how = Sharding(1, 2, 2, slices=2, resharded=False)
    without = update_cost(llama, how, BATCH, cpu).seconds
    units = update_cost(llama, how, BATCH, replace(cpu, unit_s=1e-3)).seconds - without
    assert units == pytest.approx(33 * 2 * 1e-3)  # gathered, and reduced
    sums = update_cost(llama, how, BATCH, replace(cpu, wait_s=1e-3)).seconds - without
    assert sums == pytest.approx((32 * 4 + 2) * 1e-3)


def test_an_update_gathers_twice_and_reduces_in_float32(llama: ModelShape) -> None:
    how = Sharding(8, 2, 2, micro_batches=3)
    share = 7 / 8 * llama.parameters
    assert gathered_bytes(llama, how) == pytest.approx(2 * share)
    outside = 7 / 8 * (2 * 128256 * 4096 + 4096)  # embedding, output layer and the last norm, which stay
    moved = 3 * 2 * (2 * share - outside) + 4 * share
    assert update_cost(llama, how, BATCH, A100).moved == pytest.approx(moved)
    every = replace(how, reduce_every_micro_batch=True)
    assert update_cost(llama, every, BATCH, A100).moved == pytest.approx(moved + 2 * 4 * share)


def test_layers_that_are_kept_after_forward_are_gathered_once(llama: ModelShape) -> None:
    how = Sharding(8, 2, 2, micro_batches=3, resharded=False)
    assert update_cost(llama, how, BATCH, A100).moved == pytest.approx((3 * 2 + 4) * 7 / 8 * llama.parameters)


def test_what_two_ranks_pass_each_other_that_share_the_layers(llama: ModelShape) -> None:
    # Hidden states of 8 · 1023 rows, 4096 wide, in bfloat16: two all-reduces a layer in each direction, one of the
    # embedding's output; and in float32 the gradient that the output layer gives to the 8 · 924 scored rows.
    how, half = Sharding(1, 2, 2, slices=2), llama.slice_of(2)
    rows, scored = 2 * 4096 * 8 * 1023, 4 * 4096 * 8 * 924
    assert passed_bytes(half, how, BATCH, learns=False) == (2 * 32 + 1) * rows
    assert passed_bytes(half, how, BATCH, learns=True) == (4 * 32 + 1) * rows + scored
    again = replace(how, checkpointing=True)
    assert passed_bytes(half, again, BATCH, learns=True) == (5 * 32 + 1) * rows + scored
    assert passed_bytes(half, again, BATCH, learns=False) == passed_bytes(half, how, BATCH, learns=False)
    four = passed_bytes(llama.slice_of(4), replace(how, slices=4), BATCH, learns=True)
    assert four == 1.5 * passed_bytes(half, how, BATCH, learns=True)  # 2 · 3/4 of the bytes in place of 2 · 1/2


def test_ranks_that_share_sequences_exchange_heads_for_tokens(llama: ModelShape) -> None:
    # 32 heads of queries, 8 of keys and of values, of 128 each, there, and 32 back; (w - 1)/w of them.
    own, how = BATCH.share(4), Sharding(4, 2, 2, sharers=4)
    assert (own.rows, own.scored, own.pairs) == (2046, 1848, BATCH.pairs / 4)
    assert exchanged_bytes(llama, how, own, learns=False) == 32 * 2 * 2046 * (32 + 8 + 8 + 32) * 128 * 3 / 4
    both = exchanged_bytes(llama, how, own, learns=True)
    assert both == 2 * exchanged_bytes(llama, how, own, learns=False)
    assert exchanged_bytes(llama, replace(how, checkpointing=True), own, learns=True) == 1.5 * both
    sixteen = exchanged_bytes(llama, replace(how, sharers=16), BATCH.share(16), learns=False)
    # The 8 heads of keys and values are there twice, so that each of 16 ranks has one.
    assert sixteen == pytest.approx(32 * 2 * 512 * (32 + 16 + 16 + 32) * 128 * 15 / 16)
    plain, shared = (update_cost(llama, replace(how, sharers=n), own, A100) for n in (1, 4))
    assert shared.moved - plain.moved == both
    assert shared.seconds - plain.seconds == pytest.approx(both / 300e9)


def test_copies_gather_within_a_node_and_add_up_their_gradients_over_the_network(llama: ModelShape) -> None:
    machine, few = replace(A100, devices=64), BATCH.share(64)
    whole, copies = (update_cost(llama, Sharding(64 // n, 2, 2, copies=n), few, machine) for n in (1, 8))
    layers = 2 * (llama.parameters - llama.root.parameters)
    gathered, reduced = layers + 2 * llama.parameters, 4 * llama.parameters
    assert whole.moved == pytest.approx((gathered + reduced) * 63 / 64)
    optimizer = 28 * llama.parameters / 2.04e12
    assert whole.seconds == pytest.approx(whole.moved / 25e9 + optimizer / 64)
    added = 2 * 7 / 8 * 4 * llama.parameters / 8
    assert copies.moved == pytest.approx((gathered + reduced) * 7 / 8 + added)
    assert copies.seconds == pytest.approx((gathered + reduced) * 7 / 8 / 300e9 + added / 25e9 + optimizer / 8)


def test_muon_gathers_matrices_sends_updates_and_computes_its_share_of_them(llama: ModelShape) -> None:
    # A layer has q and o of 4096², k and v of 1024 x 4096, and three of 14336 x 4096; five iterations of two products
    # of m x m and m x n, m the smaller, and one of m x m.
    layers = {(4096, 4096): 2, (1024, 4096): 2, (4096, 14336): 3}
    assert llama.matrices == 32 * sum(count * m * n for (m, n), count in layers.items())
    flops = 32 * sum(count * 5 * (2 * 2 * m * m * n + 2 * m**3) for (m, n), count in layers.items())
    how = Sharding(8, 2, 2, state=(4.0, 8.0))
    plain, muon = (update_cost(llama, replace(how, muon=on), BATCH, A100) for on in (False, True))
    sent = 2 * 4 * 7 / 8 * llama.matrices
    assert muon.moved - plain.moved == pytest.approx(sent)
    assert muon.seconds - plain.seconds == pytest.approx(flops / 8 / 312e12 + sent / A100.slowest_link(8))


def test_state_that_waits_in_the_hosts_memory_comes_and_goes(llama: ModelShape) -> None:
    how = Sharding(8, 2, 2)
    plain, waits = (update_cost(llama, replace(how, waits=on), BATCH, A100).seconds for on in (False, True))
    assert waits - plain == pytest.approx(2 * 8 * llama.parameters / 8 / A100.host)


def test_a_sync_moves_what_a_rank_lacks(llama: ModelShape) -> None:
    assert sync_bytes(llama, 8, 8, 2) == 0  # its slice is its shard
    assert sync_bytes(llama, 8, 2, 2) == pytest.approx(2 * llama.parameters * 6 / 16)


def test_decoding_is_bound_by_reading_weights_or_by_starting_kernels(llama: ModelShape) -> None:
    one = Generation(sequences=1, concurrent=1, prefills=1, prompt_tokens=1, response_tokens=1000)
    quick, how = replace(A100, layer_s=0.0), {"tensor_parallel": 1, "itemsize": 2}
    cost = generation_cost(llama, one, quick, eager=True, **how)
    assert cost.bound == "memory bandwidth"
    assert cost.seconds == pytest.approx(1000 * 2 * llama.parameters / 2.04e12, rel=0.01)
    assert generation_cost(llama, one, A100, eager=True, **how).seconds == pytest.approx(9.6, rel=0.01)
    assert generation_cost(llama, one, A100, eager=False, **how) == cost  # CUDA graphs start them
    two_waves = replace(one, sequences=20, concurrent=10)
    twice = generation_cost(llama, two_waves, quick, eager=True, **how)
    assert twice.seconds == pytest.approx(2 * cost.seconds, rel=0.1)


def test_weights_of_4_bits_are_unpacked_in_either_pass_and_again_by_checkpointing(llama: ModelShape) -> None:
    packed = replace(llama, layers=tuple(replace(unit, packed=10**8) for unit in llama.layers))
    once = 33 * 32 * 10**8 / A100.bandwidth
    how = Sharding(1, 2, 2, micro_batches=3)
    for cost, passes in ((inference_cost, 1), (update_cost, 2)):
        assert cost(packed, how, BATCH, A100).seconds - cost(llama, how, BATCH, A100).seconds == pytest.approx(
            3 * passes * once
        )
    how = replace(how, checkpointing=True)
    more = update_cost(packed, how, BATCH, A100).seconds - update_cost(llama, how, BATCH, A100).seconds
    assert more == pytest.approx(9 * once)


def test_in_fp8_layers_compute_faster_where_the_device_can_and_weights_are_half_as_long_to_read(
    llama: ModelShape, tmp_path: Path
) -> None:
    h100, how = PRESETS["H100"], Sharding(1, 2, 2)
    body = sum(llama.kinds[kind] for kind in ("attention", "mlp"))
    for machine, gain in ((A100, 1.0), (h100, 1.4)):
        plain, fast = (products_seconds(llama, replace(how, fp8=on), BATCH, machine) for on in (False, True))
        saved = 2 * (body + llama.kinds["norm"]) * BATCH.rows / machine.matrix_flops(2) * (1 - 1 / gain)
        assert plain - fast == pytest.approx(saved, rel=1e-3)
    mixture = shape_of(read_config(write("Qwen3-30B-A3B", tmp_path)))
    plain, fast = (products_seconds(mixture, replace(how, fp8=on), BATCH, h100) for on in (False, True))
    others = sum(mixture.kinds[kind] for kind in ("attention", "mlp", "norm"))  # its experts are no linear layers
    assert plain - fast == pytest.approx(2 * others * BATCH.rows / h100.matrix_flops(2) * (1 - 1 / 1.4), rel=1e-3)
    one = Generation(sequences=1, concurrent=1, prefills=1, prompt_tokens=1, response_tokens=1000)
    options: dict[str, Any] = {"tensor_parallel": 1, "itemsize": 2, "eager": False}
    read = generation_cost(llama, one, h100, **options, in_fp8=body)
    assert read.seconds == pytest.approx(
        1000 * (2 * llama.parameters - body) / (h100.bandwidth * h100.bandwidth_share), rel=0.01
    )
    many = Generation(sequences=4096, concurrent=4096, prefills=4096, prompt_tokens=4096, response_tokens=1)
    plain, fast = (generation_cost(llama, many, h100, **options, in_fp8=n).seconds for n in (0, body))
    assert plain / fast == pytest.approx(1 / (1 - body / llama.parameters * (1 - 1 / 1.4)), rel=0.01)


def test_a_prompt_that_is_computed_once_for_its_responses_takes_a_part_of_the_time(llama: ModelShape) -> None:
    each = Generation(sequences=80, concurrent=80, prefills=80, prompt_tokens=4000, response_tokens=1)
    costs = [
        generation_cost(llama, replace(each, prefills=n), A100, tensor_parallel=1, itemsize=2, eager=False).seconds
        for n in (10, 80)
    ]
    assert costs[1] - costs[0] == pytest.approx(70 * 4000 * 2 * llama.active / A100.matrix_flops(2))
