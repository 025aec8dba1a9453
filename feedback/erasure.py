"""Erasing what is known of a user, a tenant or a response: from the journal and the lake, for good.

What goes: the interactions of the user, tenant or response; the feedback on those responses, also preferences that
name one as the rejected response; all feedback of the tenant; feedback whose source is the user (the source ``user``,
which feedback has that names none, is nobody's); the rewards of those responses. A reward that another response got
from feedback that goes stays: it is a number that names nobody.

Only what was made until the moment of the erasure goes; what the same user does later is new. Rows that lie in the
journal of another machine are dropped when they are sealed (``erased.py``), and what slipped in while an erasure ran
is found by ``finish_erasures``, which the scheduled maintenance calls.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from feedback.erased import (
    COLUMNS,
    Kind,
    Selector,
    Values,
    erasures,
    mark_done,
    matching,
    needed_columns,
    register,
)
from feedback.lake import Lake, LakeConflictError, LakeError, is_sealed
from feedback.purging import drop_damaged_segments, drop_spilled, purge
from feedback.recovery import load_all
from feedback.schema import TABLES
from feedback.sealed_ids import take_in
from feedback.sealing import seal
from feedback.segments import list_segments
from feedback.storage import DataFile, data_files
from feedback.streams import STARTED

log = logging.getLogger(__name__)

_ORDER: Final = ("feedback", "rewards", "interactions")
"""Interactions last: killed before, they still tell whose the rest is."""

_ATTEMPTS: Final = 10
_POLL_S: Final = 0.1
_DAMAGED_MARGIN: Final = timedelta(minutes=5)  # a segment that was open at the erasure is closed by then


class ErasureError(LakeError):
    """An erasure could not be done, or not to its end; the text says what to do."""


@dataclass(frozen=True)
class Target:
    """Whose rows are to go: a user (of one tenant, if it is given, or of all), all of a tenant, or one response."""

    user: str | None = None
    tenant: str | None = None
    response_id: str | None = None

    def __post_init__(self) -> None:
        if self.response_id is not None and (self.user is not None or self.tenant is not None):
            raise ValueError("a response is erased by its id alone, without a user or a tenant")
        if self.response_id is None and self.user is None and self.tenant is None:
            raise ValueError("nothing to erase: give a user, a tenant or a response id")
        if "" in (self.user, self.tenant, self.response_id):
            raise ValueError("the name of what is to be erased is empty")

    def values(self) -> tuple[Kind, str]:
        """The kind of value, and the value, by which its rows are found."""
        if self.response_id is not None:
            return "response_id", self.response_id
        if self.user is None:
            assert self.tenant is not None
            return "tenant", self.tenant
        return ("user", self.user) if self.tenant is None else ("user_of_tenant", f"{self.tenant}\0{self.user}")


@dataclass
class Found:
    """The rows that an erasure would remove: how many of each table, sealed or not, and the ids of sealed ones.

    ``since`` is when the oldest of the interactions and feedback was made, None if there is none.
    """

    rows: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TABLES, 0))
    response_ids: set[str] = field(default_factory=set)
    sealed: dict[str, set[str]] = field(default_factory=lambda: {"interactions": set(), "feedback": set()})
    since: datetime | None = None


@dataclass(frozen=True)
class Erased:
    """What an erasure removed.

    ``rows``: how many of each table there were, in lake and journal, when it began. ``damaged``: damaged segments that
    had been put aside. ``left``: files on an object store that no version names, too young to be removed, that may
    hold such rows: ``maintain`` removes them once they are old.
    """

    at: datetime
    rows: dict[str, int]
    damaged: int
    left: list[str]
    seconds: float


def find(lake: Lake, journal_folder: Path, target: Target, *, at: datetime | None = None) -> Found:
    """The rows that ``erase`` would remove, made until ``at`` (now). Raises LakeError."""
    kind, value = target.values()
    main = Values(kind, pa.array([value]), at or datetime.now(UTC))
    # The journal before the tables, as for views: a row that is sealed in between is in both, and counted once.
    unsealed = load_all(journal_folder)
    snapshots = {table: lake.table(table) for table in TABLES}
    journal = {
        table: [rows for segment, rows in unsealed if segment.name.table == table and not is_sealed(segment, snapshot)]
        for table, snapshot in snapshots.items()
    }
    found = Found()
    for rows in _matches(lake, "interactions", snapshots, journal, [main]):
        found.response_ids.update(rows.column("response_id").to_pylist())
    selectors: list[Selector] = [main, _responses(found.response_ids, main.at)]
    # A stream that goes out has several rows in the journal, of which the lake gets one.
    journal["interactions"] = [rows.filter(pc.not_equal(rows["status"], STARTED)) for rows in journal["interactions"]]
    for table in TABLES:
        for rows in _matches(lake, table, snapshots, journal, selectors, sealed=found.sealed.get(table)):
            found.rows[table] += rows.num_rows
            if table != "rewards":
                oldest = pc.min(rows.column("created_at")).as_py()
                found.since = min(filter(None, (found.since, oldest)), default=None)
    return found


def erase(
    lake: Lake,
    journal_folder: Path,
    target: Target,
    *,
    wait_s: float = 60.0,
    say: Callable[[str], None] = log.info,
) -> Erased:
    """Remove a target's rows from journal and lake, so that no file holds them; returns what went.

    A segment that a living server is writing is waited for, up to ``wait_s`` seconds: it is closed when it is
    ``journal.segment_seconds`` old. Older versions of all tables can't be read afterwards. Killed anywhere, it can be
    repeated, and the next maintenance finishes it. Raises ErasureError, LakeError, LockTimeoutError or OSError.
    """
    started = time.perf_counter()
    at = datetime.now(UTC)
    found = find(lake, journal_folder, target, at=at)
    say(f"found {_listed(found.rows)}")
    kind, value = target.values()
    names = [register(lake, kind, [value], at)]
    if found.response_ids and kind != "response_id":
        names.append(register(lake, "response_id", sorted(found.response_ids), at))
    _drain(lake, journal_folder, wait_s, say)
    main = Values(kind, pa.array([value]), at)
    found.response_ids |= _sealed_responses(lake, main)  # with those that came in while it was registered
    _rewrite_all(lake, [main, _responses(found.response_ids, at)], say)
    left = _purge_all(lake, say)
    damaged = drop_damaged_segments(journal_folder)
    drop_spilled()
    if (journal_folder / "ids").exists():  # hashes of feedback that is gone
        take_in(lake, journal_folder, anew=True)
    mark_done(lake, names)
    return Erased(at, found.rows, damaged, left, time.perf_counter() - started)


def finish_erasures(lake: Lake, journal_folder: Path | None = None) -> dict[str, int]:
    """Finish what a killed erasure left, and erase what was sealed behind the back of one; returns rows of each table.

    Rows come in behind an erasure where the journal of another machine was sealed, or scoring ran, at that moment.
    A ``journal_folder`` loses the damaged segments put aside in it until a few minutes after the erasure, wherever it
    was done. Raises what ``erase`` raises.
    """
    hours = 2 * lake.config.orphan_hours  # a writer of that time has long ended
    known = erasures(lake, since=datetime.now(UTC) - timedelta(hours=hours), pending=True)
    pending = [erasure for erasure in known if not erasure.done]
    rows = dict.fromkeys(TABLES, 0)
    if pending:
        rows = _rewrite_all(lake, pending, log.info)
    if done := [erasure for erasure in known if erasure.done]:
        more = _rewrite_all(lake, done, log.info, written_since=min(erasure.at for erasure in done))
        rows = {table: rows[table] + more[table] for table in TABLES}
    if pending or any(rows.values()):
        _purge_all(lake, log.info)
        mark_done(lake, [erasure.name for erasure in pending])
    if known and journal_folder is not None:
        drop_damaged_segments(journal_folder, written_until=max(erasure.at for erasure in known) + _DAMAGED_MARGIN)
    return rows


def was_visible(lake: Lake, table: str, ids: set[str], version: int) -> bool | None:
    """Whether one of these rows (by response or feedback id) was in a table at a version; None: it can't be read."""
    column = {"interactions": "response_id", "feedback": "feedback_id"}[table]
    if not ids:
        return False
    wanted, ordered = pa.array(sorted(ids)), sorted(ids)
    try:
        snapshot = lake.table(table, version)
        for file in data_files(snapshot, (column,)):
            if not _may_hold(file, column, ordered):
                continue
            for batch in lake.files(table).batches(table, file.path, [column]):
                if pc.any(pc.is_in(batch.column(column), value_set=wanted)).as_py():
                    return True
    except (LakeError, OSError, pa.ArrowException) as error:
        log.info("%s can't be read at version %d: %s", table, version, error)
        return None
    return False


def _drain(lake: Lake, journal_folder: Path, wait_s: float, say: Callable[[str], None]) -> None:
    """Seal the journal until no segment is left that was there at the first look."""
    deadline = time.monotonic() + wait_s
    waiting: set[str] | None = None
    while journal_folder.exists():
        seal(lake, journal_folder)
        there = {str(segment.name) for segment in list_segments(journal_folder)}
        if waiting is None and there:
            say(f"waiting for the server to close {len(there)} journal segments")
        waiting = there if waiting is None else waiting & there
        if not waiting:
            return
        if time.monotonic() > deadline:
            raise ErasureError(
                f"{journal_folder}: {sorted(waiting)[0]} and {len(waiting) - 1} other segments are still open after "
                f"{wait_s:g} s, so their rows can't be erased yet; nothing of the lake was. Is journal.segment_seconds "
                "longer? Repeat the erasure when they are closed"
            )
        time.sleep(_POLL_S)


def _sealed_responses(lake: Lake, main: Values) -> set[str]:
    found: set[str] = set()
    snapshots = {"interactions": lake.table("interactions")}
    for rows in _matches(lake, "interactions", snapshots, {}, [main]):
        found.update(rows.column("response_id").to_pylist())
    return found


def _rewrite_all(
    lake: Lake, selectors: Iterable[Selector], say: Callable[[str], None], *, written_since: datetime | None = None
) -> dict[str, int]:
    selectors = list(selectors)
    rows = {table: _rewrite(lake, table, selectors, written_since) for table in _ORDER}
    say(f"removed from the lake: {_listed(rows)}")
    return rows


def _rewrite(lake: Lake, table: str, selectors: list[Selector], written_since: datetime | None) -> int:
    """Replace every file that holds a row to be erased by one without it; returns the number of rows that went."""
    removed = 0
    for _ in range(_ATTEMPTS):
        conflicts = 0
        for file in _candidates(lake, table, lake.table(table), selectors):
            if written_since is not None and file.modified < written_since:
                continue
            try:
                count = _count(lake, table, file, selectors)
                if count:
                    rest = pa.RecordBatchReader.from_batches(TABLES[table], _rest(lake, table, file, selectors))
                    lake.replace(table, [file.path], rest, metadata={"erased": count})
                    removed += count
            except (LakeConflictError, FileNotFoundError) as error:  # a compaction took it: look where its rows are
                log.info("looking again for rows to erase: %s", error)
                conflicts += 1
        if not conflicts:
            return removed
    raise ErasureError(f"{lake.table_uri(table)}: other processes replace files again and again; repeat the erasure")


def _count(lake: Lake, table: str, file: DataFile, selectors: list[Selector]) -> int:
    batches = lake.files(table).batches(table, file.path, needed_columns(table))
    return sum(pc.sum(matching(table, batch, selectors)).as_py() or 0 for batch in batches)


def _rest(lake: Lake, table: str, file: DataFile, selectors: list[Selector]) -> Iterator[pa.RecordBatch]:
    for batch in lake.files(table).batches(table, file.path):
        yield batch.filter(pc.invert(matching(table, batch, selectors)))


def _matches(
    lake: Lake,
    table: str,
    snapshots: dict[str, Any],
    journal: dict[str, list[pa.Table]],
    selectors: list[Selector],
    *,
    sealed: set[str] | None = None,
) -> Iterator[pa.Table]:
    """The matching rows, with the columns that matching needs; the ids of sealed ones are added to ``sealed``."""
    names = needed_columns(table)
    id_column = {"interactions": "response_id", "feedback": "feedback_id"}.get(table)
    if id_column is not None and id_column not in names:
        names = [*names, id_column]
    for rows in journal.get(table, []):
        yield rows.select(names).filter(matching(table, rows, selectors))
    for file in _candidates(lake, table, snapshots[table], selectors):
        for batch in lake.files(table).batches(table, file.path, names):
            rows = pa.Table.from_batches([batch]).filter(matching(table, batch, selectors))
            if rows.num_rows:
                if sealed is not None and id_column is not None:
                    sealed.update(rows.column(id_column).to_pylist())
                yield rows


def _candidates(lake: Lake, table: str, snapshot: Any, selectors: list[Selector]) -> list[DataFile]:
    """Files that may hold a row that a selector means, by the bounds in the log."""
    tests = [(s.at, _last_parts(s), names[-1]) for s in selectors for names in COLUMNS[table].get(s.kind, ())]
    return [
        file
        for file in data_files(snapshot, needed_columns(table))
        if any(
            _made_until(file, at) and (ordered is None or _may_hold(file, column, ordered))
            for at, ordered, column in tests
        )
    ]


def _last_parts(selector: Selector) -> list[str] | None:
    """Sorted, what a selector looks for in the last of its columns; None if it knows hashes only."""
    if not isinstance(selector, Values):
        return None
    return sorted(value.rpartition("\0")[2] for value in selector.values.to_pylist())


def _made_until(file: DataFile, at: datetime) -> bool:
    return "created_at" not in file.bounds or file.bounds["created_at"][0] <= at


def _may_hold(file: DataFile, column: str, ordered: list[str]) -> bool:
    """Whether one of the sorted values may be in a file's column."""
    if column not in file.bounds:
        return column not in file.empty
    low, high = file.bounds[column]
    at = bisect_left(ordered, low)
    return at < len(ordered) and ordered[at] <= high


def _responses(ids: set[str], at: datetime) -> Values:
    return Values("response_id", pa.array(sorted(ids), pa.string()), at)


def _purge_all(lake: Lake, say: Callable[[str], None]) -> list[str]:
    left = [f"{table}/{path}" for table in TABLES for path in purge(lake, table)]
    if left:
        say(f"{len(left)} files that no version names are younger than lake.orphan_hours and stay until they are not")
    return left


def _listed(rows: dict[str, int]) -> str:
    return ", ".join(f"{count} {table}" for table, count in rows.items())
