"""Tables of an older Millrace become those of this one.

A table names its schema version in a Delta property; without one it is 0. A step leads from one version to the next,
and the table is stamped when it is through: killed anywhere, it is done again. To add a column, put it last in its
table in ``feedback/schema.py``, raise SCHEMA_VERSION there, and add a step here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from deltalake import Schema
from deltalake.exceptions import CommitFailedError, DeltaError

from feedback.lake.tables import COMMIT_HOOKS, VERSION_PROPERTY, Lake, LakeError, NoLakeError, schema_version
from feedback.schema import SCHEMA_VERSION, TABLES

_TRIES: Final = 5

Step = Callable[[Lake, str, bool], list[str]]
"""(lake, table, whether it is a dry run) -> what it does to the table, for people. It may be done before in part."""


@dataclass(frozen=True)
class Upgraded:
    """A table was, or would be, taken to schema version ``to``. ``changes``: what that took beside the stamp."""

    table: str
    to: int
    changes: list[str]


def upgrade(lake: Lake, *, dry_run: bool = False) -> Iterator[Upgraded]:
    """Take every table to SCHEMA_VERSION by steps, and yield each when it is durable; none if nothing is due.

    Servers may be up: where a commit of theirs conflicts with a step, they seal at their next turn. A table that is
    missing is left to ``Lake.create``. Raises NoLakeError, LakeError, LockTimeoutError, OSError, and, before anything
    is changed, LakeVersionError if a table is newer than this Millrace.
    """
    due = {table: range(found + 1, SCHEMA_VERSION + 1) for table, found in _versions(lake).items()}
    for table, versions in due.items():
        for to in versions:
            yield Upgraded(table, to, STEPS[to](lake, table, True) if dry_run else _upgrade(lake, table, to))


def _versions(lake: Lake) -> dict[str, int]:
    found: dict[str, int] = {}
    missing: list[NoLakeError] = []
    for table in TABLES:
        try:
            found[table] = schema_version(lake.open(table))
        except NoLakeError as error:
            missing.append(error)
            continue
        if found[table] > SCHEMA_VERSION:
            lake.table(table, readable=False)  # raises
    if not found:
        raise missing[0]
    return found


def _upgrade(lake: Lake, table: str, to: int) -> list[str]:
    """Do a step, and stamp the table, unless another process has meanwhile."""
    with lake.committing(table):
        for left in reversed(range(_TRIES)):
            try:
                changes = STEPS[to](lake, table, False)
                snapshot = lake.open(table)
                before = snapshot.version()
                if schema_version(snapshot) < to:
                    snapshot.alter.set_table_properties(
                        {VERSION_PROPERTY: str(to)},
                        raise_if_not_exists=False,
                        post_commithook_properties=COMMIT_HOOKS,
                    )
                lake.make_durable(table, snapshot, since=before)
                return changes
            except CommitFailedError as error:  # on an object store no lock keeps other commits out
                if not left:
                    raise LakeError(f"table {lake.table_uri(table)} is committed to all the time: {error}") from error
            except (DeltaError, OSError) as error:
                text = lake.error_text(error)
                raise LakeError(f"table {lake.table_uri(table)} can't be upgraded to version {to}: {text}") from error
    raise AssertionError("unreachable")


def add_columns(lake: Lake, table: str, names: Collection[str], dry_run: bool) -> list[str]:
    """Add those of a table's columns that it lacks, in one commit; its rows have nulls there."""
    snapshot = lake.open(table)
    known = {field.name for field in snapshot.schema().fields}
    if missing := [TABLES[table].field(name) for name in names if name not in known]:
        if not dry_run:
            before = snapshot.version()
            snapshot.alter.add_columns(
                Schema.from_arrow(pa.schema(missing)).fields, post_commithook_properties=COMMIT_HOOKS
            )
            lake.make_durable(table, snapshot, since=before)
        return [f"new columns: {', '.join(field.name for field in missing)}"]
    return []


def _to_version_1(lake: Lake, table: str, dry_run: bool) -> list[str]:
    """What tables got when a server started, before they named their version."""
    return add_columns(lake, table, ["experiment", "propensity"] if table == "interactions" else [], dry_run)


STEPS: Final[dict[int, Step]] = {1: _to_version_1}
"""By the version that a step leads to, of each up to SCHEMA_VERSION."""
