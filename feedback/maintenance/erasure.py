"""Erasing what is known of a user, a tenant or a response: from the journal and the lake, for good.

What goes: the interactions of the user, tenant or response; the feedback on those responses, also preferences that
name one as the rejected response; all feedback of the tenant; feedback whose source is the user (the source ``user``,
which feedback has that names none, is no user's); the rewards of those responses. A reward that another response got
from feedback that goes stays: it is a number that identifies no one.

Only what was made until the moment of the erasure goes; what the same user does later is new. What is in the tables at
that moment was made before it, also where a clock that ran ahead dated it later: the tables' versions decide. Rows that
lie in the journal of another machine are dropped when they are sealed, by their time (``erasure_registry``); what was
sealed while an erasure ran is found by ``finish_erasures``, which the scheduled maintenance calls.

Feedback on a response is found by the response's id, which only the response itself has. So before responses go, their
ids are entered in the registry, whichever process removes them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from feedback.ingest.id_index import take_in_if_used
from feedback.ingest.seal import seal
from feedback.journal.recovery import load_all
from feedback.journal.segment import list_segments
from feedback.journal.streams import STARTED
from feedback.lake.data_files import DataFile, Spans, data_files
from feedback.lake.delta_log import DROPPED, ERASED
from feedback.lake.erasure_registry import (
    ALL_TIMES,
    COLUMNS,
    SKEW,
    Erasure,
    Kind,
    Selector,
    Values,
    erasures,
    id_of,
    mark_done,
    matching,
    needed_columns,
    register,
    reopen,
    upgrade,
)
from feedback.lake.table_changes import LogGoneError, commits
from feedback.lake.tables import Lake, LakeConflictError, LakeError, is_sealed
from feedback.maintenance.vacuum import drop_damaged_segments, drop_spilled, purge
from feedback.schema import TABLES

log = logging.getLogger(__name__)

_ORDER: Final = ("feedback", "rewards", "interactions")
"""Interactions last: if it is killed earlier, they still show whose the rest is."""

_ATTEMPTS: Final = 10
_POLL_S: Final = 0.1
_DAMAGED_MARGIN: Final = timedelta(minutes=5)  # a segment that was open at the erasure is closed by then


Rewritten = Callable[[str, Mapping[str, int]], None]
"""Called with an erasure's id and versions of the tables: between those and now its rows went. May come again."""

_Meaning = tuple[Selector, Selector]
"""A selector, and what it means in a certain file."""


@dataclass(frozen=True)
class Target:
    """Whose rows are to go: a user (of one tenant, or of all), all of a tenant, or one response."""

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

    ``since`` is when the oldest of the interactions and feedback was made, None if there is none; ``ahead`` of them are
    dated later than now, by a clock that ran ahead.
    """

    rows: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TABLES, 0))
    response_ids: set[str] = field(default_factory=set)
    sealed: dict[str, set[str]] = field(default_factory=lambda: {"interactions": set(), "feedback": set()})
    since: datetime | None = None
    ahead: int = 0


@dataclass(frozen=True)
class Erased:
    """What an erasure removed.

    ``rows``: how many of each table there were, in lake and journal, when it began; ``ahead`` of them were dated later.
    ``damaged``: damaged segments that had been put aside. ``left``: files on an object store that no version names, too
    young to be removed, that may hold such rows: ``maintain`` removes them once they are old.
    """

    at: datetime
    rows: dict[str, int]
    ahead: int
    damaged: int
    left: list[str]
    seconds: float


def find(lake: Lake, journal_folder: Path, target: Target, *, at: datetime | None = None) -> Found:
    """The rows that ``erase`` would remove ``at`` a moment (now): all that there are. Raises LakeError."""
    kind, value = target.values()
    main = Values(kind, pa.array([value]), ALL_TIMES)
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
    selectors: list[Selector] = [main, _responses(found.response_ids, main)]
    # A stream that goes out has several rows in the journal, of which the lake gets one.
    journal["interactions"] = [rows.filter(pc.not_equal(rows["status"], STARTED)) for rows in journal["interactions"]]
    late = (at or datetime.now(UTC)) + SKEW
    for table in TABLES:
        for rows in _matches(lake, table, snapshots, journal, selectors, sealed=found.sealed.get(table)):
            found.rows[table] += rows.num_rows
            if table != "rewards":
                times = rows.column("created_at")
                found.since = min(filter(None, (found.since, pc.min(times).as_py())), default=None)
                found.ahead += pc.sum(pc.greater(times, pa.scalar(late, times.type))).as_py() or 0
    return found


def earlier(lake: Lake, journal_folder: Path, target: Target) -> frozenset[str]:
    """The ids of the erasures of a target that are on record. Raises LakeError."""
    kind, value = target.values()
    known = erasures(lake, journal_folder, since=datetime.min.replace(tzinfo=UTC))
    same = (one for one in known if one.kind == kind and one.is_in(pa.array([value]))[0].as_py())
    return frozenset(id_of(one.name) for one in same)


def erase(
    lake: Lake,
    journal_folder: Path,
    target: Target,
    *,
    wait_s: float = 60.0,
    report: Callable[[str], None] = log.info,
    registered: Callable[[str], None] = lambda _: None,
    rewritten: Rewritten = lambda *_: None,
) -> Erased:
    """Remove a target's rows from journal and lake, so that no file holds them; returns what went.

    A segment that a living server is writing is waited for, up to ``wait_s`` seconds: it is closed when it is
    ``journal.segment_seconds`` old, or 30 s later. Older versions of all tables can't be read afterwards. Killed
    anywhere, it can be repeated, and the next maintenance finishes it. Raises LakeError, LockTimeoutError or OSError.

    ``registered`` is called with the erasure's id before any row goes; ``rewritten`` when all are gone, before the
    erasure is noted as done: if it raises, the next maintenance calls its own.
    """
    started = time.perf_counter()
    versions = lake.versions()
    at = datetime.now(UTC)
    found = find(lake, journal_folder, target, at=at)
    report(f"found {_listed(found.rows)}")
    if found.ahead:
        report(f"{found.ahead} of them are dated later than now, by a clock that ran ahead; they go too")
    kind, value = target.values()
    names = [register(lake, kind, [value], at, versions)]
    if found.response_ids and kind != "response_id":
        names.append(register(lake, "response_id", sorted(found.response_ids), at, versions))
    registered(id_of(names[0]))
    _drain(lake, journal_folder, wait_s, report)
    sealed = lake.versions()  # all that the journal held is there now, and what was made while it was waited for
    main = Values(kind, pa.array([value]), at, versions, sealed, max(at, datetime.now(UTC)) + SKEW)
    selectors: list[Selector] = [main, _responses(found.response_ids, main)]
    more = _register_responses(lake, selectors)  # those that came in while it was registered
    _rewrite_all(lake, [*selectors, *more.values()], report)
    left = _purge_all(lake, report)
    damaged = drop_damaged_segments(journal_folder)
    drop_spilled()
    take_in_if_used(lake, journal_folder)  # hashes of feedback that is gone
    now = lake.versions()
    rewritten(id_of(names[0]), versions)
    mark_done(lake, [*names, *more], sealed, now)
    return Erased(at, found.rows, found.ahead, damaged, left, time.perf_counter() - started)


def finish_erasures(
    lake: Lake, journal_folder: Path | None = None, rewritten: Rewritten = lambda *_: None
) -> dict[str, int]:
    """Finish what a killed erasure left, and erase what was sealed behind the back of one; returns rows of each table.

    Rows come in behind an erasure where the journal of another machine was sealed, or scoring ran, at that moment.
    A ``journal_folder`` loses the damaged segments put aside in it until a few minutes after the erasure, wherever it
    was done. ``rewritten`` is called as by ``erase``, also where a killed one had removed all. Raises what ``erase``
    raises.
    """
    upgrade(lake)
    hours = 2 * lake.config.orphan_hours  # a writer of that time has long ended
    known = erasures(lake, journal_folder, since=datetime.now(UTC) - timedelta(hours=hours), pending=True)
    rows = dict.fromkeys(TABLES, 0)
    if not known:
        return rows
    versions = lake.versions()
    late = _sealed_late(lake, [erasure for erasure in known if erasure.done])
    reopen(lake, late)  # killed from here on, it is gone through again
    unfinished = [erasure for erasure in known if not erasure.done or erasure.name in late]
    pending: list[Selector] = [*unfinished]
    names = [erasure.name for erasure in known if dict(erasure.done_until) != versions]
    if pending:
        more = _register_responses(lake, pending)
        names += more
        rows = _rewrite_all(lake, [*pending, *more.values()], log.info)
        _purge_all(lake, log.info)
    if journal_folder is not None:
        drop_damaged_segments(journal_folder, written_until=max(erasure.at for erasure in known) + _DAMAGED_MARGIN)
    _warn_of_rows_ahead(lake, known)
    now = lake.versions()
    for erasure_id, since in _since(known, unfinished).items():
        rewritten(erasure_id, since)
    mark_done(lake, names, versions, now)
    return rows


def _since(known: Iterable[Erasure], unfinished: Iterable[Erasure]) -> dict[str, Mapping[str, int]]:
    """By the id of each unfinished erasure the versions behind which rows went of which nothing is on record."""
    since: dict[str, Mapping[str, int]] = {id_of(erasure.name): erasure.versions for erasure in unfinished}
    for erasure in known:
        reported = since.get(id_of(erasure.name))
        if reported is not None:
            since[id_of(erasure.name)] = {
                table: max(reported.get(table, -1), erasure.reported_until.get(table, -1)) for table in TABLES
            }
    return since


def was_visible(lake: Lake, table: str, ids: set[str], version: int) -> bool | None:
    """Whether one of these rows (by response or feedback id) was in a table at a version; None: it can't be read."""
    column = {"interactions": "response_id", "feedback": "feedback_id"}[table]
    if not ids:
        return False
    wanted, spans = pa.array(sorted(ids)), Spans.of(ids)
    try:
        snapshot = lake.table(table, version)
        for file in data_files(snapshot, (column,)):
            if not file.may_hold(column, spans):
                continue
            for batch in lake.files(table).batches(table, file.path, [column]):
                if pc.any(pc.is_in(batch.column(column), value_set=wanted)).as_py():
                    return True
    except (LakeError, OSError, pa.ArrowException) as error:
        log.info("%s can't be read at version %d: %s", table, version, error)
        return None
    return False


def _drain(lake: Lake, journal_folder: Path, wait_s: float, report: Callable[[str], None]) -> None:
    """Seal the journal until no segment is left that was there at the first look."""
    deadline = time.monotonic() + wait_s
    waiting: set[str] | None = None
    while journal_folder.exists():
        seal(lake, journal_folder)
        there = {str(segment.name) for segment in list_segments(journal_folder)}
        if waiting is None and there:
            report(f"waiting for the server to close {len(there)} journal segments")
        waiting = there if waiting is None else waiting & there
        if not waiting:
            return
        if time.monotonic() > deadline:
            raise LakeError(
                f"{journal_folder}: {sorted(waiting)[0]} and {len(waiting) - 1} other segments are still open after "
                f"{wait_s:g} s, so their rows can't be erased yet; nothing of the lake was. Is journal.segment_seconds "
                "longer? Repeat the erasure when they are closed"
            )
        time.sleep(_POLL_S)


def _register_responses(
    lake: Lake, selectors: Sequence[Selector], files: Sequence[tuple[DataFile, list[_Meaning]]] | None = None
) -> dict[str, Values]:
    """Register the ids of the sealed responses that are to go and that no selector names; returns selectors by name.

    Feedback on a response may still lie in another journal, and is found by nothing else. ``files``: look into these
    alone, which were sealed since; the next maintenance removes the feedback on their responses.
    """
    table, registered = "interactions", dict[str, Values]()
    if files is None:
        files = _candidates(lake, table, lake.table(table), selectors)
    for selector in selectors:
        if selector.kind == "response_id":
            continue
        ids: set[str] = set()
        for file, here in ((file, here) for file, meaning in files for of, here in meaning if of is selector):
            for batch in lake.files(table).batches(table, file.path, needed_columns(table)):
                ids.update(batch.column("response_id").filter(matching(table, batch, [here])).to_pylist())
        unnamed = pa.array(sorted(ids), pa.string())
        for other in selectors:
            if other.kind == "response_id" and other.registered_at >= selector.registered_at:
                unnamed = unnamed.filter(pc.invert(other.is_in(unnamed)))
        if len(unnamed):
            name = register(lake, "response_id", unnamed.to_pylist(), selector.registered_at, selector.versions)
            registered[name] = _responses(unnamed.to_pylist(), selector)
    return registered


def _sealed_late(lake: Lake, done: Sequence[Erasure]) -> set[str]:
    """The names of the erasures of which something was sealed after they went through."""
    return {
        erasure.name
        for table in TABLES
        for erasure, files in _with_files_since(lake, table, done)
        if any(_may_mean(file, table, erasure) and _count(lake, table, file, [erasure]) for file in files)
    }


def _warn_of_rows_ahead(lake: Lake, known: Sequence[Erasure]) -> None:
    """Warn of rows that were sealed after an erasure, that it means, and whose time is no evidence."""
    late = datetime.now(UTC) + SKEW
    for table in ("interactions", "feedback"):
        for erasure, files in _with_files_since(lake, table, known):
            timeless = replace(erasure, at=ALL_TIMES)
            count = 0
            for file in files:
                if file.bounds.get("created_at", (None, ALL_TIMES))[1] > late and _may_mean(file, table, timeless):
                    count += _count(lake, table, file, [timeless], later_than=late)
            if count:
                log.warning(
                    "%d rows of %s that the erasure %s means are dated later than now, by a clock that ran ahead: they "
                    "may have been made before it; repeat that erasure to remove them",
                    *(count, table, erasure.name),
                )


def _with_files_since(lake: Lake, table: str, known: Sequence[Erasure]) -> Iterator[tuple[Erasure, list[DataFile]]]:
    """Each erasure with the files of a table that were added after it went through."""
    snapshot = lake.table(table)
    files = data_files(snapshot, needed_columns(table))
    added: dict[int | None, set[str]] = {None: {file.path for file in files}}  # all, where it is not known
    for erasure in known:
        since = erasure.done_until.get(table)
        if since is not None and since not in added:
            try:
                changes = commits(lake, table, since, snapshot.version())
                added[since] = {path for commit in changes for path in commit.added}
            except LogGoneError as error:
                log.info("%s; looking at all files", error)
                added[since] = added[None]
        yield erasure, [file for file in files if file.path in added[since]]


def _rewrite_all(lake: Lake, selectors: Iterable[Selector], report: Callable[[str], None]) -> dict[str, int]:
    selectors = list(selectors)
    rows = {table: _rewrite(lake, table, selectors) for table in _ORDER}
    report(f"removed from the lake: {_listed(rows)}")
    return rows


def count_on_responses(lake: Lake, table: str, ids: Iterable[str], *, but: Collection[str] = ()) -> int:
    """How many rows of feedback or rewards in the lake name one of these responses, but in some files.

    Raises LakeError.
    """
    meant = _on_responses(ids)
    files = [file for file, _ in _candidates(lake, table, lake.table(table), meant) if file.path not in but]
    return sum(_count(lake, table, file, meant) for file in files)


def remove_on_responses(lake: Lake, table: str, ids: Iterable[str]) -> int:
    """Remove the rows of feedback or rewards that name one of these responses, as a retention; returns how many.

    Raises LakeError.
    """
    return _rewrite(lake, table, _on_responses(ids), mark=DROPPED)


def _on_responses(ids: Iterable[str]) -> list[Selector]:
    return [Values("response_id", pa.array(sorted(ids), pa.string()), ALL_TIMES)]


def _rewrite(lake: Lake, table: str, selectors: list[Selector], *, mark: str = ERASED) -> int:
    """Replace every file that holds a row to be erased by one without it; returns the number of rows that went.

    ``mark``: what the commits say that the rows were.
    """
    removed = 0
    for _ in range(_ATTEMPTS):
        conflicts = 0
        for file, meaning in _candidates(lake, table, lake.table(table), selectors):
            try:
                here = [selector for _, selector in meaning]
                count = _count(lake, table, file, here)
                if count:
                    if table == "interactions":
                        _register_responses(lake, selectors, [(file, meaning)])
                    rest = pa.RecordBatchReader.from_batches(TABLES[table], _rest(lake, table, file, here))
                    lake.replace(table, [file.path], rest, metadata={mark: count})
                    removed += count
            except (LakeConflictError, FileNotFoundError) as error:  # a compaction took it: look where its rows are
                log.info("looking again for rows to erase: %s", error)
                conflicts += 1
        if not conflicts:
            return removed
    raise LakeError(f"{lake.table_uri(table)}: other processes replace files again and again; repeat the erasure")


def _count(
    lake: Lake, table: str, file: DataFile, selectors: Sequence[Selector], *, later_than: datetime | None = None
) -> int:
    count = 0
    for batch in lake.files(table).batches(table, file.path, needed_columns(table)):
        meant = matching(table, batch, selectors)
        if later_than is not None:
            times = batch.column("created_at")
            meant = pc.and_(meant, pc.greater(times, pa.scalar(later_than, times.type)))
        count += pc.sum(meant).as_py() or 0
    return count


def _rest(lake: Lake, table: str, file: DataFile, selectors: list[Selector]) -> Iterator[pa.RecordBatch]:
    for batch in lake.files(table).batches(table, file.path):
        yield batch.filter(pc.invert(matching(table, batch, selectors)))


def _matches(
    lake: Lake,
    table: str,
    snapshots: dict[str, DeltaTable],
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
    for file, meaning in _candidates(lake, table, snapshots[table], selectors):
        for batch in lake.files(table).batches(table, file.path, names):
            rows = pa.Table.from_batches([batch]).filter(matching(table, batch, [here for _, here in meaning]))
            if rows.num_rows:
                if sealed is not None and id_column is not None:
                    sealed.update(rows.column(id_column).to_pylist())
                yield rows


def _candidates(
    lake: Lake, table: str, snapshot: DeltaTable, selectors: Sequence[Selector]
) -> list[tuple[DataFile, list[_Meaning]]]:
    """The files that may hold a row that a selector means, by the bounds in the log, each with those selectors.

    Of a file whose rows were all there at the selector's version the rows' time does not matter.
    """
    sealed_at = _sealed_at(lake, table, snapshot, selectors)
    found = []
    for file in data_files(snapshot, needed_columns(table)):
        meaning = []
        for selector in selectors:
            here = _in_file(selector, table, sealed_at(file.path))
            if _may_mean(file, table, here):
                meaning.append((selector, here))
        if meaning:
            found.append((file, meaning))
    return found


def _in_file(selector: Selector, table: str, sealed_at: int) -> Selector:
    """What a selector means in a file whose rows were all in the table at a version."""
    if sealed_at <= selector.versions.get(table, -1):
        return replace(selector, at=ALL_TIMES)
    if isinstance(selector, Values) and sealed_at > selector.drained.get(table, -1):
        return replace(selector, late=None)
    return selector


def _sealed_at(lake: Lake, table: str, snapshot: DeltaTable, selectors: Sequence[Selector]) -> Callable[[str], int]:
    """Of a file the version by which all of its rows were in the table; 0 for one from before all selectors.

    A compaction makes rows no younger: its files are as old as the youngest of those that it merged.
    """
    since = min((selector.versions[table] for selector in selectors if table in selector.versions), default=None)
    if since is None or since >= snapshot.version():
        return lambda _: 0
    try:
        log_since = commits(lake, table, since, snapshot.version())
    except LogGoneError as error:
        log.info("%s; going by the rows' time", error)
        return lambda _: snapshot.version()
    known: dict[str, int] = {}
    for commit in log_since:
        newest = max((known.get(path, 0) for path in commit.removed), default=commit.version)
        known.update(dict.fromkeys(commit.added, commit.version if commit.fresh else newest))
    return lambda path: known.get(path, 0)


def _may_mean(file: DataFile, table: str, selector: Selector) -> bool:
    if "created_at" in file.bounds:
        first, last = file.bounds["created_at"]
        late = selector.late if isinstance(selector, Values) else None
        if first > selector.at and (late is None or last <= late):
            return False
    columns = [names[-1] for names in COLUMNS[table].get(selector.kind, ())]
    if isinstance(selector, Erasure):  # of which hashes are known, and no text
        return bool(columns)
    spans = Spans.of(value.rpartition("\0")[2] for value in selector.values.to_pylist())
    return any(file.may_hold(column, spans) for column in columns)


def _responses(ids: Iterable[str], like: Selector) -> Values:
    values = pa.array(sorted(ids), pa.string())
    if isinstance(like, Values):
        return replace(like, kind="response_id", values=values)
    return Values("response_id", values, like.at, like.versions)


def _purge_all(lake: Lake, report: Callable[[str], None]) -> list[str]:
    left = [f"{table}/{path}" for table in TABLES for path in purge(lake, table)]
    if left:
        report(f"{len(left)} files that no version names stay until they are older than lake.orphan_hours")
    return left


def _listed(rows: dict[str, int]) -> str:
    return ", ".join(f"{count} {table}" for table, count in rows.items())
