"""Each feedback id is in the lake once, also when two replicas took it.

A replica knows the ids in the lake and in its own journal. One that another replica took a moment ago it does not know,
and acknowledges too. So rows are compared with the lake when they are sealed: the first that is sealed stands, and what
comes later under its id is left out, whether its content is the same or not.

Each seal of feedback sets the same application transaction, so that of two at once the lake itself refuses one, which
looks again: there is no moment in which both could commit an id, on a local disk or on an object store.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from feedback.ingest.id_index import COLUMNS, SealedIds, keys_and_contents, take_in
from feedback.lake.data_files import Spans, data_files
from feedback.lake.delta_log import FEEDBACK_IDS
from feedback.lake.erasure_registry import ALL_TIMES, erasures, matching
from feedback.lake.tables import Lake, LakeConflictError

log = logging.getLogger(__name__)

_GUARD: Final = "feedback.ids"
_ATTEMPTS: Final = 8
_PAUSE_S: Final = 0.05
_MOST_NAMED: Final = 100  # conflicting ids that a commit and a log line name; all are counted


_counts: Counter[str] = Counter()


def append_feedback(
    lake: Lake,
    journal_folder: Path,
    rows: pa.Table,
    *,
    transactions: Mapping[str, int],
    metadata: Mapping[str, Any],
    snapshot: DeltaTable,
) -> tuple[int, list[str]]:
    """``Lake.append`` for feedback: without the rows whose id the lake has, and each id once.

    Returns what was left out: how many rows say what stands already, and the ids of those that don't.

    The caller holds the journal's seal lock. Raises what ``Lake.append`` and ``take_in`` raise; LakeConflictError if
    other seals came in between again and again.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        kept, repeated, conflicts = _without_known(lake, journal_folder, snapshot, rows)
        try:
            if kept.num_rows:
                lake.append(
                    "feedback",
                    kept,
                    transactions={**transactions, _GUARD: snapshot.version() + 1},
                    metadata={**metadata, "repeated": repeated, FEEDBACK_IDS: conflicts[:_MOST_NAMED]},
                    snapshot=snapshot,
                )
        except LakeConflictError:
            if attempt == _ATTEMPTS:
                raise
            time.sleep(random.uniform(0, _PAUSE_S * attempt))
            snapshot = lake.table("feedback")
        else:
            _report(repeated, conflicts)
            return repeated, conflicts
    raise AssertionError("unreachable")


def take_counts() -> Counter[str]:
    """How many rows the seals of this process have left out since the last call, by the reason."""
    taken = _counts.copy()
    _counts.clear()
    return taken


def _without_known(
    lake: Lake, journal_folder: Path, snapshot: DeltaTable, rows: pa.Table
) -> tuple[pa.Table, int, list[str]]:
    """(rows to append, how many others say what stands already, the ids of those that don't)."""
    identities = list(keys_and_contents(rows))
    standing = _in_lake(lake, journal_folder, snapshot, rows, [key for key, _ in identities])
    repeated, conflicts, kept = 0, [], [True] * rows.num_rows
    for position in pc.sort_indices(rows, [("created_at", "ascending")]).to_pylist():  # the earlier stands
        key, content = identities[position]
        if key not in standing:
            standing[key] = content
            continue
        kept[position] = False
        if standing[key] == content:
            repeated += 1
        else:
            conflicts.append(rows.column("feedback_id")[position].as_py())
    return rows.filter(pa.array(kept, pa.bool_())), repeated, conflicts


def _in_lake(
    lake: Lake, journal_folder: Path, snapshot: DeltaTable, rows: pa.Table, keys: list[bytes]
) -> dict[bytes, bytes]:
    """Of the rows' keys those that the lake has, with their contents there.

    The index nominates rows, and the lake decides, so that no row is left out because an index is wrong.
    A row that an unfinished erasure is about to remove does not count: a new row under its id stays.
    """
    take_in(lake, journal_folder, snapshot)
    with closing(SealedIds(journal_folder)) as index:
        index.reopen()
        nominated = [position for position, key in enumerate(keys) if index.get(key) is not None]
    if not nominated:
        return {}
    ids = rows.column("feedback_id").take(nominated)
    spans, standing = Spans.of(ids.to_pylist()), dict[bytes, bytes]()
    leaving = erasures(lake, since=ALL_TIMES, pending=True)
    for file in data_files(snapshot, ("feedback_id",)):
        if file.may_hold("feedback_id", spans):
            for batch in lake.files("feedback").batches("feedback", file.path, [*COLUMNS, "created_at"]):
                stored = batch.filter(pc.is_in(batch.column("feedback_id"), value_set=ids))
                standing.update(keys_and_contents(stored.filter(pc.invert(matching("feedback", stored, leaving)))))
    return standing


def _report(repeated: int, conflicts: list[str]) -> None:
    _counts.update(repeated_feedback=repeated, conflicting_feedback=len(conflicts))
    if repeated:
        log.info("%d feedback rows were in the lake already and are left out", repeated)
    if conflicts:
        log.warning(
            "%d feedback rows are left out: the lake has other content under their ids (%s%s)",
            len(conflicts),
            ", ".join(conflicts[:_MOST_NAMED]),
            " …" if len(conflicts) > _MOST_NAMED else "",
        )
