"""The order of ranks in the FSDP mesh; test_fsdp.py has FSDP2 use it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.model.mesh import batch_parts, sequence_groups, shard_order, tensor_groups


@given(
    t=st.sampled_from([1, 2, 3, 4, 8]), engines=st.integers(1, 6), replicas=st.integers(1, 3), columns=st.integers(1, 5)
)
def test_every_chunk_lies_inside_the_slice_its_rank_generates_with(
    t: int, engines: int, replicas: int, columns: int
) -> None:
    n = t * engines
    order = shard_order(n * replicas, tensor_parallel_size=t, replicas=replicas)
    assert sorted(r for replica in order for r in replica) == list(range(n * replicas))
    for first, replica in enumerate(order):
        assert all(rank // n == first for rank in replica), "a replica is made of consecutive ranks"
        for chunk, rank in enumerate(replica):
            rows = range(chunk * columns, (chunk + 1) * columns)
            width = n * columns // t
            assert {row // width for row in rows} == {rank % t}


@given(
    t=st.sampled_from([1, 2, 4, 8]),
    training=st.sampled_from([1, 2, 4, 8]),
    more=st.integers(1, 3),
    replicas=st.integers(1, 3),
)
def test_slices_of_training_lie_inside_or_around_those_of_generation_and_their_ranks_are_near(
    t: int, training: int, more: int, replicas: int
) -> None:
    n = max(t, training) * more
    sizes = {"tensor_parallel_size": t, "tensor_parallel": training, "replicas": replicas}
    for replica, order in enumerate(shard_order(n * replicas, **sizes)):
        assert sorted(order) == list(range(replica * n, (replica + 1) * n))
        for chunk, rank in enumerate(order):
            assert chunk * t // n == rank % t
    groups = tensor_groups(n * replicas, **sizes)
    assert sorted(rank for group in groups for rank in group) == list(range(n * replicas))
    for group in groups:
        assert len(group) == training
        assert len({rank // max(t, training) for rank in group}) == 1, "ranks of one engine, or neighbours"


@pytest.mark.parametrize(
    ("sizes", "groups", "parts"),
    [
        ({}, [[0], [1], [2], [3]], (0, 1, 2, 3)),
        ({"sequence_parallel_size": 2, "tensor_parallel_size": 2}, [[0, 1], [2, 3]], (0, 0, 1, 1)),
        ({"sequence_parallel_size": 2, "tensor_parallel": 2}, [[0, 2], [1, 3]], (0, 0, 0, 0)),
        ({"tensor_parallel": 2, "tensor_parallel_size": 4}, [[0], [2], [1], [3]], (0, 1, 0, 1)),
    ],
)
def test_who_shares_a_layer_or_a_sequence_shares_a_part_of_the_batch(
    sizes: dict[str, int], groups: list[list[int]], parts: tuple[int, ...]
) -> None:
    assert sequence_groups(4, **sizes) == groups
    assert batch_parts(4, **sizes) == parts


def test_without_tensor_parallelism_the_order_is_that_of_the_ranks() -> None:
    assert shard_order(5) == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"tensor_parallel_size": 3}, "tensor_parallel_size=3"),
        ({"replicas": 3}, "replicas=3"),
        ({"replicas": 2, "tensor_parallel_size": 4}, "must not cross replicas"),
        ({"tensor_parallel": 3}, "tensor_parallel=3 does not divide the 4 ranks"),
    ],
)
def test_a_size_that_does_not_divide_is_named(sizes: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        shard_order(4, **sizes)
