"""The plan, executed on arrays by many ranks that are plain loops; and what it says of models too large to run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import train
from deploy.examples.bench.training import reshard_table as table
from train.model.mesh import shard_order
from train.model.shard_dimensions import placement_for
from train.weight_sync.checksums import checksum
from train.weight_sync.plan import Needed, Plan, elements_received, make_plan
from train.weight_sync.slices import Box, Held, numel, shards_of, within


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, Held], Needed, int]:
    """Tensors of any shape on ranks × replicas, and boxes of them that ``t`` kinds of ranks need."""
    t, groups, replicas = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    ranks = t * groups * replicas
    order = shard_order(ranks, tensor_parallel_size=t, replicas=replicas)
    held: dict[str, Held] = {}
    kinds: list[dict[str, tuple[Box, ...]]] = [{} for _ in range(t)]
    for i in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 13), min_size=1, max_size=3)))
        dim = draw(st.integers(0, len(shape) - 1))
        held[f"t{i}"] = shards_of(shape, order, (None, dim))
        for kind in kinds:
            boxes = []
            for _ in range(draw(st.integers(0, 2))):
                starts = [draw(st.integers(0, n - 1)) for n in shape]
                boxes.append(tuple((s, draw(st.integers(s + 1, n))) for s, n in zip(starts, shape, strict=True)))
            kind[f"t{i}"] = tuple(boxes)
    return held, Needed(tuple(kinds), tuple(r % t for r in range(ranks))), draw(st.integers(1, 200))


def executed(plans: list[Plan], held: dict[str, Held], needed: Needed) -> None:
    """Run the plans on arrays whose every element is different; what each rank ends with must be what it needs."""
    whole = {name: np.arange(numel(tuple((0, n) for n in h.shape))).reshape(h.shape) for name, h in held.items()}
    for plan in plans:
        assert all(
            np.array_equal(whole[n][tuple(slice(*s) for s in b)].shape, [s[1] - s[0] for s in b])
            for n, b in plan.own.items()
        )
    got = [
        {(name, i): np.full([b - a for a, b in box], -1) for name in held for i, box in enumerate(needed.by(r, name))}
        for r in range(len(plans))
    ]
    for plan in plans:
        for name, local in plan.local.items():
            for i, box in local:
                place = within(box, needed.by(plan.rank, name)[i])
                assert (got[plan.rank][name, i][place] == -1).all(), "nothing is written twice"
                got[plan.rank][name, i][place] = whole[name][tuple(slice(*s) for s in box)]
    for step in range(len(plans[0].buckets)):
        for target, plan in enumerate(plans):
            bucket = plan.buckets[step]
            assert bucket.pieces == plans[0].buckets[step].pieces, "all ranks have the same exchanges"
            arrived = [t for source in plans for t in source.buckets[step].sends if t.target == target]
            assert arrived == list(bucket.receives), "what is sent is what is received, in one order"
            for transfer in arrived:
                name, sender = transfer.piece.tensor, plans[transfer.source]
                shard = whole[name][tuple(slice(*s) for s in sender.own[name])]
                place = within(transfer.box, needed.by(target, name)[transfer.need])
                assert (got[target][name, transfer.need][place] == -1).all(), "nothing is written twice"
                got[target][name, transfer.need][place] = shard[within(transfer.box, sender.own[name])]
    for rank, boxes in enumerate(got):
        for (name, i), values in boxes.items():
            assert np.array_equal(values, whole[name][tuple(slice(*s) for s in needed.by(rank, name)[i])])


@settings(max_examples=60, deadline=None)
@given(cases())
def test_every_rank_ends_with_what_it_needs_and_gets_nothing_twice(case: tuple[dict[str, Held], Needed, int]) -> None:
    held, needed, limit = case
    plans = [make_plan(r, held, needed, exchange_elements=limit) for r in range(len(needed.kind_of))]
    executed(plans, held, needed)
    assert [plan.received for plan in plans] == elements_received(held, needed)
    for plan in plans:
        for bucket in plan.buckets:
            load = sum(bucket.send_counts) + sum(bucket.receive_counts)
            rows = all(len(bucket.pieces) == 1 and p.parts == rows_of(held[p.tensor]) for p in bucket.pieces)
            assert load <= limit or rows, "an exchange is over its bound only when it can't be cut further"


@st.composite
def separate_cases(draw: st.DrawFn) -> tuple[dict[str, Held], Needed, int, int]:
    """As ``cases``, with generation on ranks of its own, which come after those that hold something."""
    held, needed, limit = draw(cases())
    senders, receivers = len(needed.kind_of), draw(st.integers(1, 5))
    kinds = (*needed.kinds, {})
    kind_of = (len(needed.kinds),) * senders + tuple(r % len(needed.kinds) for r in range(receivers))
    return held, Needed(kinds, kind_of), limit, senders


@settings(max_examples=60, deadline=None)
@given(separate_cases())
def test_ranks_of_another_pool_get_each_box_once_from_those_that_hold_it(
    case: tuple[dict[str, Held], Needed, int, int],
) -> None:
    held, needed, limit, senders = case
    plans = [make_plan(r, held, needed, exchange_elements=limit) for r in range(len(needed.kind_of))]
    executed(plans, held, needed)
    for plan in plans:
        wanted = sum(numel(box) for name in held for box in needed.by(plan.rank, name))
        assert plan.received == wanted
        assert plan.received == 0 or plan.rank >= senders
        assert not any(bucket.sends for bucket in plan.buckets) or plan.rank < senders


def test_replicas_share_what_they_send_to_another_pool() -> None:
    held = {"w": shards_of((8, 4), [[0, 1], [2, 3]], (None, 0))}
    needed = Needed(({}, {"w": (((0, 8), (0, 4)),)}), (0,) * 4 + (1,) * 2)
    plans = [make_plan(r, held, needed, exchange_elements=1000) for r in range(6)]
    assert [sum(sum(bucket.send_counts) for bucket in plan.buckets) for plan in plans] == [16] * 4 + [0] * 2


def rows_of(held: Held) -> int:
    return max(box[0][1] - box[0][0] for box, _ in held.shards)


@pytest.mark.parametrize(("dim", "size"), [(0, 10), (0, 3), (1, 8)])
def test_shards_are_where_torch_chunk_puts_them(dim: int, size: int) -> None:
    whole = torch.arange(size * size).view(size, size)
    held = shards_of((size, size), [[3, 0, 2, 1]], (None, dim))
    chunks = [c for c in whole.chunk(4, dim=dim) if c.numel()]
    assert len(held.shards) == len(chunks)
    for (box, holders), chunk, rank in zip(held.shards, chunks, [3, 0, 2, 1], strict=False):
        assert holders == (rank,)
        assert torch.equal(whole[tuple(slice(*s) for s in box)], chunk)


def test_of_a_tensor_cut_in_t_a_rank_receives_the_least_that_there_is() -> None:
    n, t = 8, 2
    order = shard_order(n, tensor_parallel_size=t)
    for dim, box in ((0, lambda k: ((32 * k, 32 * k + 32), (0, 64))), (1, lambda k: ((0, 64), (32 * k, 32 * k + 32)))):
        held = {"w": shards_of((64, 64), order, (None, dim))}
        needed = Needed(tuple({"w": (box(k),)} for k in range(t)), tuple(r % t for r in range(n)))
        least = (n - t) * 64 * 64 // (t * n)  # design.md
        assert elements_received(held, needed) == [least] * n


def test_replicas_are_fed_from_within() -> None:
    held = {"w": shards_of((8, 4), shard_order(8, tensor_parallel_size=2, replicas=2), (None, 0))}
    needed = Needed(tuple({"w": (((4 * k, 4 * k + 4), (0, 4)),)} for k in range(2)), tuple(r % 2 for r in range(8)))
    for rank in range(8):
        plan = make_plan(rank, held, needed, exchange_elements=1000)
        sources = {t.source for bucket in plan.buckets for t in bucket.receives}
        assert all(source // 4 == rank // 4 for source in sources), f"rank {rank} receives from {sources}"


def test_a_tensor_that_nobody_holds_is_named() -> None:
    with pytest.raises(ValueError, match=r"generation needs lm_head\.weight, which no training rank holds"):
        make_plan(0, {}, Needed(({"lm_head.weight": (((0, 2),),)},), (0,)), exchange_elements=8)


def test_parameter_counts_of_the_table_are_those_that_are_published() -> None:
    published = {"Llama-3-8B": 8_030_261_248, "Llama-3-70B": 70_553_706_496, "Qwen3-32B": 32_762_123_264}
    for model in (table.LLAMA_3_8B, table.LLAMA_3_70B, table.QWEN3_32B):
        assert table.elements(model) == published[model.name]


@pytest.mark.parametrize("ranks", [8, 64, 512])
def test_large_models_move_no_more_than_a_fiftieth_above_the_least(ranks: int) -> None:
    for model, t in table.MODELS:
        received = max(elements_received(table.placed(model, ranks, t), table.slices(model, ranks, t)))
        least = (ranks - t) / (t * ranks) * table.elements(model)
        assert 0 <= received - least <= 0.002 * table.elements(model)


@pytest.mark.parametrize("training", [2, 4, 8])
@pytest.mark.parametrize("ranks", [8, 64, 512])
def test_of_slices_of_tensor_parallel_training_they_move_no_more(ranks: int, training: int) -> None:
    for model, t in table.MODELS:
        received = max(elements_received(table.placed(model, ranks, t, training), table.slices(model, ranks, t)))
        least = (ranks - t) / (t * ranks) * table.elements(model)
        assert received - least <= 0.002 * table.elements(model)


@pytest.mark.parametrize("ranks", [8, 512])
def test_the_documented_table_is_what_the_plan_says(ranks: int) -> None:
    documented = (Path(train.__file__).parent / "README.md").read_text()
    for model, t in table.MODELS:
        assert table.row(model, t, ranks) in documented


def test_row_parallel_weights_are_sharded_on_dim_1_where_that_is_even() -> None:
    from transformers import AutoModelForCausalLM, Qwen3Config

    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(
            Qwen3Config(
                hidden_size=64,
                intermediate_size=90,
                num_hidden_layers=1,
                vocab_size=70,
                head_dim=16,
                num_attention_heads=4,
                num_key_value_heads=2,
            )
        )
    placement = placement_for(model, 4)
    chosen = {name for name, parameter in model.named_parameters() if placement(parameter) is not None}
    assert chosen == {"model.layers.0.self_attn.o_proj.weight"}, "90 columns do not divide by 4"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checksums_add_up_however_a_tensor_is_cut_and_see_two_values_change_places(dtype: torch.dtype) -> None:
    values = torch.randn(300, 70)
    whole = checksum(values, ((0, 300), (0, 70)), dtype)
    parts = [
        checksum(values[a:b, c:d], ((a, b), (c, d)), dtype)
        for a, b in ((0, 11), (11, 300))
        for c, d in ((0, 64), (64, 70))
    ]
    assert (sum(parts) - whole) % 2**64 == 0
    swapped = values.clone()
    swapped[3, 5], swapped[200, 9] = values[200, 9], values[3, 5]
    assert checksum(swapped, ((0, 300), (0, 70)), dtype) != whole
