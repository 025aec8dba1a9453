"""Weights from a pool that trains to one that generates, by the product's own workers, a process each.

What they do is in pool_ranks.py; each case is one start of the processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.paths import ROOT
from tests.train.pool_ranks import BUCKET_BYTES, DTYPE, Case, arguments
from tests.train.weight_sync.test_weight_sync import make_policy
from train.controller.rendezvous import open_store


def run_pools(policy: Path, case: Case) -> tuple[list[Any], list[Any]]:
    """What the ranks that train found, and those that generate; None of one that has ended without an answer."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    store = open_store("127.0.0.1", 300)
    named = [("training", rank) for rank in range(case.training)]
    named += [("generation", rank) for rank in range(case.generation)]
    processes = []
    try:
        for pool, rank in named:
            command = [sys.executable, "-m", "tests.train.pool_ranks", str(policy), str(store.port), pool, str(rank)]
            processes.append(
                subprocess.Popen(
                    [*command, arguments(case)],
                    env=environment,
                    cwd=ROOT,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        answering = len(named) - case.dies
        store.set_timeout(timedelta(seconds=500))
        while store.add("done", 0) < answering:
            failed = [i for i, process in enumerate(processes) if process.poll() not in (None, 9)]
            assert not failed, processes[failed[0]].communicate()[1][-4000:]
            try:
                processes[0].wait(0.5)
            except subprocess.TimeoutExpired:
                continue
        store.set("all done", "")
        outputs = [process.communicate(timeout=60) for process in processes]
    finally:
        for process in processes:
            process.kill()
    found = []
    for (pool, rank), (out, err) in zip(named, outputs, strict=True):
        lines = [line for line in out.splitlines() if line.startswith("{")]
        dead = case.dies and (pool, rank) == ("generation", 0)
        assert lines or dead, f"{pool} {rank}:\n{err[-4000:]}"
        found.append(json.loads(lines[-1]) if lines else None)
    return found[: case.training], found[case.training :]


@pytest.mark.parametrize(
    "case",
    [
        Case(2, 1, 2, 2),  # FSDP to tensor-parallel slices
        Case(2, 2, 1, 1),  # slices of tensor parallelism, to whole tensors
        pytest.param(Case(2, 1, 1, 1), marks=pytest.mark.long),
        pytest.param(Case(2, 1, 2, 1), marks=pytest.mark.long),  # two engines
        pytest.param(Case(2, 2, 2, 2), marks=pytest.mark.long),
    ],
    ids=lambda case: f"{case.training}-{case.tensor_parallel}-{case.generation}-{case.engine}",
)
def test_each_slice_goes_once_and_engines_have_what_whole_tensors_give_them(tmp_path: Path, case: Case) -> None:
    training, generation = run_pools(make_policy(tmp_path, key_value_heads=2, vocabulary=258), case)
    for rank in training + generation:
        assert rank["sent"] == rank["planned_sent"]
        assert rank["received"] == rank["planned_received"]
        assert rank["exchanges"] > 3, "the buckets must be small enough for several"
        assert rank["buffers"] <= BUCKET_BYTES
    for rank in training:
        assert rank["received"] == 0, "no shard leaves for another rank that trains"
    for rank in generation:
        assert rank["sent"] == 0
        assert rank["received"] == DTYPE.itemsize * rank["needs"], "each slice once, in generation's type"
        assert rank["differing"] == [], "equal to the bit"
        assert all(rank["moved"]), "and other weights are seen to be others"
    sent = [rank["sent"] for rank in training]
    assert sum(sent) == sum(rank["received"] for rank in generation)
    assert max(sent) <= 0.6 * sum(sent), "all ranks that train send"


def test_an_engine_that_dies_in_a_transfer_ends_it_on_all_ranks_at_once(tmp_path: Path) -> None:
    training, [dead] = run_pools(make_policy(tmp_path, key_value_heads=2, vocabulary=258), Case(2, 1, 1, 1, dies=True))
    assert dead is None
    for rank in training:
        assert rank["consequence"], f"the driver must look for the cause elsewhere: {rank['error']}"
        assert rank["seconds"] < 60, "the time-out is 400 s"
