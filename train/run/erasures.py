"""Erasures that come while a run trains: rows that it has learned from are gone, and what it makes must not hold them.

A run may not publish unseen by an erasure. The run publishes and then looks for erasures; an erasure removes the rows
and then looks for policies: whichever is second sees the other.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from feedback.lake.table_changes import ErasedSince, LogGoneError
from feedback.lake.tables import Lake, LakeError
from serve.policies.store import PolicyStore
from train.config.training import TrainConfig
from train.context import RowsErased
from train.observe.progress import say
from train.run.unfinished import mark


class Erasures:
    """Those of rows that the lake had at a run's versions, made since."""

    def __init__(self, lake: Lake, versions: Mapping[str, int], config: TrainConfig) -> None:
        self._since = ErasedSince(lake, versions)
        self._refuse = config.erased_rows == "refuse"

    def check(self) -> dict[str, int]:
        """How many rows, by table, where that is only to be marked.

        Raises:
            RowsErased: there are some, and train.erased_rows says refuse; or nobody can say.
            feedback.lake.tables.LakeError: the lake can't be read.
        """
        try:
            rows = self._since.rows()
        except LogGoneError as error:
            raise RowsErased(
                f"nobody can say whether rows that it had read have been erased ({error}): a run must end within "
                "feedback.lake.vacuum_hours"
            ) from error
        if rows and self._refuse:
            raise RowsErased(
                f"rows that it had read were erased meanwhile ({told(rows)}), so nothing is published "
                "(train.erased_rows=refuse); the next run learns without them"
            )
        return rows

    def settle(self, store: PolicyStore, made: int | Path) -> None:
        """``check`` behind publishing, for erasures that saw no policy yet: what was made is marked, or withdrawn.

        Args:
            made: the policy's version, or the reward model's folder.

        Raises:
            RowsErased: it is withdrawn.
            serve.policies.store.PolicyError: it is marked, and can't be withdrawn: it serves.
        """
        try:
            if rows := self.check():
                mark(store, made, f"erased while it was trained: {told(rows)}")
        except RowsErased as erased:
            mark(store, made, str(erased))  # first: it may serve
            if isinstance(made, int):
                store.withdraw(made)
            else:
                shutil.rmtree(made)
            raise

    def look(self, run: str) -> None:
        """``check`` between two steps, so that nothing is trained in vain; a lake that can't be read is asked later."""
        try:
            self.check()
        except (LakeError, OSError) as error:
            say(f"{run}: whether rows were erased is asked again later: {error}")


def told(rows: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {table}" for table, count in rows.items())
