"""Rewards of fresh responses, on processes of their own: for rewards that are slow, or need a device."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from train.controller.dispatch import by_rank, dispatch
from train.controller.worker import Worker
from train.data.rewards import Reward, RewardError, Rewards, RewardSettings


class RewardWorker(Worker):
    """One rank that rewards."""

    def __init__(self, *, reward: RewardSettings, timeout_s: float, **peers: Any) -> None:
        super().__init__(**peers)
        self.reward = Reward(reward, timeout_s)

    def rest(self) -> None:
        vars(self).pop("reward", None)

    @dispatch(by_rank)
    def rewards(self, tables: list[pa.Table]) -> list[Rewards | str]:
        """The rewards of the rows of each table, or why there can't be any."""
        return [self._rewards(table) for table in tables]

    def _rewards(self, table: pa.Table) -> Rewards | str:
        try:
            return self.reward(table)
        except RewardError as error:
            return str(error)
