"""Rewards of fresh responses, on processes of their own: for rewards that are slow, or need a device."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from feedback.config import RuleConfig
from train.controller.dispatch import by_rank, dispatch
from train.controller.worker import Worker
from train.data.rewards import Rewards, load_reward_function, with_timeout


class RewardWorker(Worker):
    """One rank that rewards."""

    def __init__(self, *, reward: str | dict[str, RuleConfig], timeout_s: float, **peers: Any) -> None:
        super().__init__(**peers)
        self.reward = with_timeout(load_reward_function(reward), timeout_s)

    @dispatch(by_rank)
    def rewards(self, tables: list[pa.Table]) -> list[Rewards]:
        """The rewards of the rows of each table."""
        return [self.reward(table) for table in tables]
