"""Erasures while a run trains: rows that it has learned from are gone, and what it publishes must not hold them.

A run may not publish unseen by an erasure. The run publishes and then looks for erasures; an erasure removes the rows
and then looks for policies: whichever is second sees the other.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from feedback.lake.table_changes import ErasedSince, LogGoneError
from feedback.lake.tables import Lake, LakeError
from serve.policies.store import PolicyStore
from train.config.training import TrainConfig
from train.context import RowsErased
from train.observe.progress import say
from train.run.recovery.unfinished import mark

_EVERY_S: Final = 1.0
"""From one look between steps to the next, at least: it opens the tables, which a short step would notice."""


class Erasures:
    """Erasures, since a run started, of rows that the lake had at its versions."""

    def __init__(self, lake: Lake, versions: Mapping[str, int], config: TrainConfig) -> None:
        self._since = ErasedSince(lake, versions)
        self._refuse = config.erased_rows == "refuse"
        self._looked = time.monotonic()

    def check(self) -> dict[str, int]:
        """How many rows, by table, if they are only to be marked.

        Raises:
            RowsErased: there are some and train.erased_rows is refuse, or the log no longer tells.
            feedback.lake.tables.LakeError: the lake can't be read.
        """
        try:
            rows = self._since.rows()
        except LogGoneError as error:
            raise RowsErased(
                f"whether rows that it had read have been erased is unknown ({error}): a run must end within "
                "feedback.lake.vacuum_hours"
            ) from error
        if rows and self._refuse:
            raise RowsErased(
                f"rows that it had read were erased meanwhile ({counts_text(rows)}), so nothing is published "
                "(train.erased_rows=refuse); the next run learns without them"
            )
        return rows

    def settle(self, store: PolicyStore, published: int) -> None:
        """``check`` after publishing, for erasures that saw no policy yet: what was published is marked or withdrawn.

        Args:
            store: of policies, or of reward models.
            published: the version.

        Raises:
            RowsErased: it was withdrawn.
            serve.policies.store.PolicyError: it is marked, and can't be withdrawn: it serves.
        """
        try:
            if rows := self.check():
                mark(store, published, f"erased while it was trained: {counts_text(rows)}")
        except RowsErased as erased:
            mark(store, published, str(erased))  # first: it may serve
            store.withdraw(published)
            raise

    def check_between_steps(self, run: str) -> None:
        """``check``, so that no further second is wasted; an unreadable lake is only logged."""
        if time.monotonic() - self._looked < _EVERY_S:
            return
        self._looked = time.monotonic()
        try:
            self.check()
        except (LakeError, OSError) as error:
            say(f"{run}: whether rows were erased will be checked again later: {error}")


def counts_text(rows: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {table}" for table, count in rows.items())
