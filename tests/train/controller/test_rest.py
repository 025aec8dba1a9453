"""What is left in a process whose workers rest."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

from feedback.config import ScoringConfig
from tests.train.ranks import run_ranks
from train.controller.worker import Workers


class Model:
    """A cycle, as a sharded model and its optimizer are."""

    def __init__(self) -> None:
        self.itself = self


def test_what_a_run_built_before_vllm_froze_the_heap_is_freed() -> None:
    model = Model()
    known = weakref.ref(model)
    gc.freeze()  # as vLLM does once its engine has started
    try:
        del model
        gc.collect()
        assert known() is not None
        Workers().rest()
        assert known() is None
    finally:
        gc.unfreeze()


def rewards_of_two_runs(rank: int, folder: Path) -> list[bool]:
    """Whether the reward of each is gone when its workers rest, also of the first, when they freeze the heap."""
    workers, gone = Workers(), []
    reward = ScoringConfig.model_validate({"rules": {"one": {"sql": "1"}}})
    for _ in range(2):
        workers.create("reward", "train.workers.reward:RewardWorker", {"reward": reward, "timeout_s": 60})
        worker: Any = workers.by_role["reward"]
        known = weakref.ref(worker.reward)
        workers.rest()
        gone.append(known() is None)
    return gone


def test_a_reward_and_its_models_are_dropped_where_its_workers_rest(tmp_path: Path) -> None:
    assert run_ranks(1, rewards_of_two_runs, tmp_path) == [[True, True]]
