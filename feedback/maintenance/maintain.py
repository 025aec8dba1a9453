"""Keeping the lake in order: small files become large ones, old dates go, files that no version needs go.

Everything here may be killed at any moment and repeated, and run beside sealers, scorers, readers and itself. What is
replaced stays on disk for ``LakeConfig.vacuum_hours``, so that readers of an older version can finish.
deltalake's ``optimize`` is not used: it fsyncs nothing, and two commits that replace one file do not conflict.

Retention goes by a row's own date, with one limit for the three tables. Feedback and rewards are never older than
their interaction, so that what is kept has all of its feedback and rewards. Those of later dates go with the
interaction that they are about: without it, an erasure of its user would not find them. Feedback that comes in only
after that joins nothing, and is kept until its own date is dropped.

A clock that jumps must not take rows with it. Retention believes today's date only if rows of earlier days bear it out,
and a file that no version names goes only while no writer is at work, however old it looks.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Final

import pyarrow as pa

from feedback.files import TEMPORARY, LockTimeoutError
from feedback.lake.data_files import DataFile, StoredFile, TableFiles, data_files, unneeded
from feedback.lake.delta_log import DROPPED, LOG_FOLDER, TORN_FOLDER, last_checkpoint
from feedback.lake.tables import COMMIT_HOOKS, Lake, LakeConflictError, LakeError
from feedback.maintenance.erasure import Rewritten, count_on_responses, finish_erasures, remove_on_responses
from feedback.maintenance.external_sort import sort_rows
from feedback.schema import TABLES

log = logging.getLogger(__name__)

_ORDER: Final = {
    "interactions": ("response_id",),
    "feedback": ("response_id", "created_at", "feedback_id"),
    "rewards": ("response_id", "scored_at"),
}
_BEGUN: Final = "retention.json"
_ATTEMPTS: Final = 3
_TOO_YOUNG: Final = timedelta(days=1)


class ClockError(LakeError):
    """The clock is too far from what the rows say for anything to be dropped by it."""


@dataclass
class Compacted:
    """What compaction did to a table: of ``files_before`` small files it made ``files_after``; ``conflicts`` groups
    were left for the next time, because another process replaced one of their files."""

    files_before: int = 0
    files_after: int = 0
    rows: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    conflicts: int = 0
    seconds: float = 0.0


def compact(lake: Lake) -> dict[str, Compacted]:
    """Merge small files of each date into files near ``LakeConfig.compact_target_bytes``, rows sorted by response id.

    Of each date at most one small file is left, so that a second run does nothing. Readers of what is new (the change
    feed) don't see it. Memory holds the ids of the rows that become one file, and a row group; the rows themselves lie
    in a temporary file meanwhile. Raises LakeError.
    """
    return {table: _compact_table(lake, table) for table in TABLES}


def _compact_table(lake: Lake, table: str) -> Compacted:
    done = Compacted()
    started = time.perf_counter()
    given_up: set[str] = set()
    # What has been merged may still be small: rows compress better together.
    while groups := [group for group in _small_groups(lake, table) if given_up.isdisjoint(f.path for f in group)]:
        for group in groups:
            paths = [file.path for file in group]
            try:
                rows = pa.RecordBatchReader.from_batches(TABLES[table], _sorted_rows(lake, table, group))
                made = lake.replace(table, paths, rows, metadata={"compacted": len(group)})
            except LakeConflictError as error:
                log.info("not compacted: %s", error)
                given_up.update(paths)
                done.conflicts += 1
                continue
            if len(made) >= len(group):  # another tool put rows into a date that is not theirs
                given_up.update(action.path for action in made)
            done.files_before += len(group)
            done.files_after += len(made)
            done.rows += sum(file.rows or 0 for file in group)
            done.bytes_before += sum(file.size for file in group)
            done.bytes_after += sum(action.size for action in made)
    done.seconds = time.perf_counter() - started
    return done


def _small_groups(lake: Lake, table: str) -> list[list[DataFile]]:
    """Files to be merged into one each: neighbours by response id, of one date, together no larger than the target."""
    target = lake.config.compact_target_bytes
    small = [file for file in data_files(lake.table(table), ("response_id",)) if file.size < target / 2]
    small.sort(key=lambda file: (file.day, file.bounds.get("response_id", ("",))[0], file.path))
    groups: list[list[DataFile]] = []
    for file in small:
        if groups and groups[-1][0].day == file.day and sum(f.size for f in groups[-1]) + file.size <= target:
            groups[-1].append(file)
        else:
            groups.append([file])
    return [group for group in groups if len(group) > 1]


def _sorted_rows(lake: Lake, table: str, group: list[DataFile]) -> Iterator[pa.RecordBatch]:
    files = lake.files(table)
    source = (batch for file in group for batch in files.batches(table, file.path))
    rows = 0
    for batch in sort_rows(source, TABLES[table], _ORDER[table]):
        rows += batch.num_rows
        yield batch
    expected = [file.rows for file in group]
    if None not in expected and rows != sum(file.rows or 0 for file in group):
        raise LakeError(
            f"{lake.table_uri(table)}: {rows} rows were read of {len(group)} files ({group[0].path}, …) in which the "
            f"log counts {sum(file.rows or 0 for file in group)}; they are left as they are"
        )


@dataclass(frozen=True)
class Retained:
    """Dates that were dropped, oldest first, and for each table the files, rows and bytes of them.

    ``later``: feedback and rewards of other dates that went with the responses that they are about.
    """

    dates: list[date]
    files: dict[str, int]
    rows: dict[str, int]
    bytes: dict[str, int]
    later: dict[str, int]


def retain(lake: Lake, *, dry_run: bool = False, today: date | None = None) -> Retained:
    """Drop whole dates, oldest first, of all tables, as ``retain_days`` and ``retain_bytes`` say; today's never.

    ``today`` (UTC) is for tests. Raises ClockError, and LakeError if other processes replace files again and again.
    """
    today = today or datetime.now(UTC).date()
    for attempt in range(1, _ATTEMPTS + 1):
        files = {table: data_files(lake.table(table)) for table in TABLES}
        everything = [file for found in files.values() for file in found]
        days = _to_drop(lake, everything, today)
        _check_clock(lake, everything, days, today)
        days |= _begun(lake) & {file.day for file in files["interactions"]}
        dropped = {table: [file for file in found if file.day in days] for table, found in files.items()}
        try:
            ids = _response_ids(lake, dropped["interactions"])
            result = Retained(
                sorted(days),
                {table: len(found) for table, found in dropped.items()},
                {table: sum(file.rows or 0 for file in found) for table, found in dropped.items()},
                {table: sum(file.size for file in found) for table, found in dropped.items()},
                {
                    table: count_on_responses(lake, table, ids, but={file.path for file in dropped[table]})
                    for table in ("feedback", "rewards")
                },
            )
            if dry_run:
                return result
            # Interactions go last: killed earlier, they still name the feedback that is to go with them. Without that
            # they may fit into retain_bytes, and must go all the same.
            if days:
                lake.store().write_bytes(_BEGUN, json.dumps(sorted(map(str, days))).encode())
            for table in ("feedback", "rewards", "interactions"):
                if found := dropped[table]:
                    lake.replace(table, [file.path for file in found], metadata={DROPPED: sorted(map(str, days))})
                if result.later.get(table):
                    remove_on_responses(lake, table, ids)
            lake.store().delete([_BEGUN])
            return result
        except LakeConflictError as error:
            if attempt == _ATTEMPTS:
                raise
            log.info("looking again at what to drop: %s", error)
    raise AssertionError("unreachable")


def _begun(lake: Lake) -> set[date]:
    """The dates of a retention that did not come to its end."""
    try:
        return set(map(date.fromisoformat, json.loads(lake.store().read_bytes(_BEGUN))))
    except FileNotFoundError:
        return set()


def _response_ids(lake: Lake, files: list[DataFile]) -> set[str]:
    """Raises LakeConflictError if a compaction took one of the files."""
    ids: set[str] = set()
    for file in files:
        try:
            for batch in lake.files("interactions").batches("interactions", file.path, ["response_id"]):
                ids.update(batch.column("response_id").to_pylist())
        except FileNotFoundError as error:
            raise LakeConflictError(f"{lake.uri}: {file.path} was removed while it was read") from error
    return ids


def _to_drop(lake: Lake, files: list[DataFile], today: date) -> set[date]:
    sizes: dict[date, int] = {}
    for file in files:
        sizes[file.day] = sizes.get(file.day, 0) + file.size
    total = sum(sizes.values())
    days = set()
    for day in sorted(day for day in sizes if day < today):
        too_old = _is_too_old(lake, day, today)
        too_much = lake.config.retain_bytes is not None and total > lake.config.retain_bytes
        if not (too_old or too_much):
            break
        days.add(day)
        total -= sizes[day]
    return days


def _is_too_old(lake: Lake, day: date, today: date) -> bool:
    return lake.config.retain_days is not None and day < today - timedelta(days=lake.config.retain_days)


def _check_clock(lake: Lake, files: list[DataFile], days: set[date], today: date) -> None:
    """Raise ClockError if ``days`` are too old by a clock that no row bears out.

    Rows of today and yesterday prove nothing: those that a server makes while its clock is ahead are of that day.
    """
    config = lake.config
    if config.retain_days is None or config.retain_gap_days is None:
        return
    if not any(_is_too_old(lake, day, today) for day in days):
        return
    newest = max(file.day for file in files if file.day < today - _TOO_YOUNG)
    gap = (today - newest).days
    # However few days are kept, the newest before yesterday is two days back.
    if gap > max(min(config.retain_gap_days, config.retain_days), _TOO_YOUNG.days + 1):
        raise ClockError(
            f"{lake.uri}: the clock says {today}, but the newest rows from before yesterday are of {newest}, {gap} "
            f"days back (feedback.lake.retain_gap_days allows {config.retain_gap_days}, retain_days "
            f"{config.retain_days}): the clock may be ahead, so no date is dropped and a maintenance vacuums nothing. "
            "Both go on two days after rows come again; if the clock is right and dates should go now: "
            "millrace lake retain --feedback.lake.retain_gap_days null"
        )


@dataclass
class Vacuumed:
    """Files of a table that were removed: ``replaced`` ones, ``orphans`` that no version names, ``log`` entries."""

    replaced: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    bytes: int = 0


def vacuum(lake: Lake, *, dry_run: bool = False) -> dict[str, Vacuumed]:
    """Remove what no version of the last ``LakeConfig.vacuum_hours`` needs, and what killed writers left behind.

    A sealer writes a file before it commits it: a file that no version names is removed only once it is
    ``LakeConfig.orphan_hours`` old and, on a local disk, while there is no writer. Raises LakeError, LockTimeoutError.
    """
    return {table: _vacuum_table(lake, table, dry_run) for table in TABLES}


def _vacuum_table(lake: Lake, table: str, dry_run: bool) -> Vacuumed:
    files = lake.files(table)
    with ExitStack() as stack:
        # The age of a file alone does not prove that its writer is dead: the clock may have jumped since. On an object
        # store it can't be known who writes.
        try:
            stack.enter_context(lake.alone(table, wait_s=0))
            alone = True
        except LockTimeoutError:
            log.info("%s is being written: files that no version names stay for the next time", lake.table_uri(table))
            alone = False
        listing = {file.path: file for file in files.list("")}
        snapshot, hours = lake.table(table), lake.config.vacuum_hours
        replaced = unneeded(snapshot, hours)
        orphans = unneeded(snapshot, max(hours, lake.config.orphan_hours), unnamed=True)
        orphans.update(path for path in listing if _is_left_behind(listing[path], lake.config.orphan_hours))
        found = Vacuumed(sorted(replaced), sorted(orphans - replaced) if alone else [])
        found.bytes = sum(listing[path].size for path in (*found.replaced, *found.orphans) if path in listing)
        if not dry_run:
            files.delete([*found.replaced, *found.orphans])
    if not dry_run:
        _tidy_log(lake, table, files)  # only now: a checkpoint forgets which files were replaced long ago
        kept = {*found.orphans, *(file.path for file in files.list(LOG_FOLDER))}
        found.log = [path for path in listing if path.startswith(f"{LOG_FOLDER}/") and path not in kept]
    return found


def _is_left_behind(file: StoredFile, hours: int) -> bool:
    """What a killed process left in the log's folder, or ``Lake.create`` moved away, long enough ago."""
    old = datetime.now(UTC) - file.modified > timedelta(hours=hours)
    return old and (file.path.startswith(f"{TORN_FOLDER}/") or file.path.endswith(TEMPORARY))


def _tidy_log(lake: Lake, table: str, files: TableFiles) -> None:
    """A checkpoint, and away with the log entries before it that are older than ``vacuum_hours``."""
    with lake.committing(table):
        snapshot = lake.table(table)
        wanted = lake.properties()
        if any(snapshot.metadata().configuration.get(key) != value for key, value in wanted.items()):
            snapshot.alter.set_table_properties(wanted, post_commithook_properties=COMMIT_HOOKS)
            snapshot = lake.table(table)
            lake.make_durable(table, snapshot)
        if last_checkpoint(files) < snapshot.version():
            snapshot.create_checkpoint()
            lake.make_durable(table, snapshot)
        snapshot.cleanup_metadata()


@dataclass(frozen=True)
class Maintained:
    """What ``maintain`` did."""

    erased: dict[str, int]
    retained: Retained
    compacted: dict[str, Compacted]
    vacuumed: dict[str, Vacuumed]
    seconds: float


def maintain(lake: Lake, journal_folder: Path | None = None, rewritten: Rewritten = lambda *_: None) -> Maintained:
    """All of it, for the schedule: finish erasures, drop old dates, compact, vacuum. Raises what they raise.

    ``journal_folder``: this machine's, in which an erasure may have left damaged segments. ``rewritten``:
    as of ``feedback.maintenance.erasure.finish_erasures``. If retention does not
    believe the clock, ClockError is raised when the rest is done that needs no clock.
    """
    started = time.perf_counter()
    erased = finish_erasures(lake, journal_folder, rewritten)
    try:
        retained = retain(lake)
    except ClockError:
        compact(lake)
        raise
    return Maintained(erased, retained, compact(lake), vacuum(lake), time.perf_counter() - started)
