"""The order of ranks in the FSDP mesh; test_fsdp.py has FSDP2 use it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.model.mesh import shard_order


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


def test_without_tensor_parallelism_the_order_is_that_of_the_ranks() -> None:
    assert shard_order(5) == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"tensor_parallel_size": 3}, "tensor_parallel_size=3"),
        ({"replicas": 3}, "replicas=3"),
        ({"replicas": 2, "tensor_parallel_size": 4}, "must not cross replicas"),
    ],
)
def test_a_size_that_does_not_divide_is_named(sizes: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        shard_order(4, **sizes)
