"""A rank of torchrun with a small worker: ``torchrun … torchrun_driver.py FOLDER well|raises|killed|idle|threads``."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record

from train.batch.packed import PackedBatch, Rollout
from train.config.training import TrainConfig
from train.controller import torchrun
from train.controller.dispatch import Layout


@record
def main(folder: Path, what: str) -> None:
    config = TrainConfig.model_validate(
        {"ranks": 2, "launcher": "torchrun", "start_timeout_s": 100, "step_timeout_s": 10 if what == "idle" else 100}
    )
    torchrun.run_rank(config, Layout(2), {}, partial(drive, folder, what))


def drive(folder: Path, what: str) -> None:
    small = torchrun.pool().group("small", "small_workers:Small", folder=folder)
    if what == "raises":
        small.sum_or_fail(1)
    elif what == "killed":
        small.sum_or_hang(1)
    elif what == "idle":
        assert small.who("hello") == "hello from 0"
        time.sleep(15)  # as a driver that publishes
    elif what == "threads":
        with ThreadPoolExecutor(4) as threads:
            given = [[i, i + 1, i + 2] for i in range(100)]
            found = list(threads.map(small.doubled, given))
        assert [[number for number, _ in of] for of in found] == [[2 * number for number in of] for of in given]
    batch = PackedBatch.pack([Rollout([3], [4 + i] * (5 - i), [0.0] * (5 - i), 0.0, i) for i in range(4)])
    assert [rank for rank, _ in small.where()] == [0, 1]
    assert small.who("hello") == "hello from 0"
    assert small.doubled([1, 2, 3]) == [(2, 0), (4, 1), (6, 0)]
    assert (small.tokens.start(batch).result() == batch.tokens).all()
    assert small.sum_or_fail(-1) == 1.0
    assert all(kept > 0.9 * 16 * 4 * 2**21 for kept in small.kept(2**21))
    assert small.modules("torch")
    assert not small.modules("ray")
    print("ALL WELL", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
