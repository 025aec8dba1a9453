"""Scoring: one DuckDB batch that turns what is new in the lake into rewards.

What was scored up to which Delta version stands in the commit of the rewards themselves, as application transactions
of the rewards table. So a run that is killed anywhere and repeated gives each response one reward, and two runs at once
can't both commit. A response is scored when it appears, again when new feedback on it counts, and again while its
judge's score is missing for a reason that may pass.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from feedback.config import KindsConfig, ScoringConfig
from feedback.lake.tables import Lake, LakeConflictError, LakeFileGoneError
from feedback.lake.views import connect, is_file_gone
from feedback.schema import REWARDS
from feedback.scoring import retry
from feedback.scoring.candidates import Search
from feedback.scoring.composition import Composed, compose
from feedback.scoring.scorer import Source, columns_of, load_sources, scorer_name
from feedback.scoring.sources import human
from feedback.scoring.sources.rules import COLUMNS

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, responses done, responses in all)."""

_READ: Final = ("interactions", "feedback")
_CLOCK: Final = "score.clock"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_ATTEMPTS: Final = 3
_BATCH_ROWS: Final = 65_536
_MOST_REASONS: Final = 1000
_OUT_OF_MEMORY: Final = "Out of Memory"


class ScoringError(RuntimeError):
    """Scoring can't work with these settings, or on this lake. The message names the reason."""


@dataclass(frozen=True)
class ScoreResult:
    """What a run did.

    ``scored`` responses got a row in ``rewards``; ``missing`` of them have no reward, because every component is
    missing. ``components`` counts the values of each; ``reasons`` counts, for each, why it is missing, the commonest
    first. For ``retried`` responses a later run will ask the judge again. ``versions`` are the Delta versions that were
    read (interactions, feedback) and written (rewards).
    """

    scored: int
    missing: int
    components: dict[str, int]
    reasons: dict[str, dict[str, int]]
    retried: int
    versions: dict[str, int]
    seconds: float
    scorer: str


def score(
    lake: Lake, config: ScoringConfig, kinds: KindsConfig | None = None, *, progress: Progress | None = None
) -> ScoreResult:
    """Score all that is new since this scorer's last run.

    ``kinds``: the scales and metrics that are declared; by default those of the default settings. Raises RuleError,
    RewardModelError or JudgeCacheError if a source can't be used, ValueError if none has a weight, ScoringError if
    memory does not do or the tables don't belong together, LakeConflictError if other runs commit in between again and
    again.
    """
    kinds = kinds or KindsConfig()
    sources = load_sources(config, kinds)
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return _Run(lake, config, kinds, sources, progress or (lambda *_: None)).run()
        except (LakeConflictError, LakeFileGoneError) as error:
            if attempt == _ATTEMPTS:
                raise
            log.info("%s; starting over from the tables as they are", error)
    raise AssertionError("unreachable")


class _Run:
    """One attempt, against the tables as they are when it begins."""

    def __init__(
        self, lake: Lake, config: ScoringConfig, kinds: KindsConfig, sources: list[Source], progress: Progress
    ) -> None:
        self.lake = lake
        self.config = config
        self.kinds = kinds
        self.sources = sources
        self.scorer = scorer_name(sources)
        self.progress = progress
        # Rewards are read first: whatever the other tables hold beyond it is new.
        self.rewards = lake.table("rewards")
        self.snapshots = {name: lake.table(name) for name in _READ}
        self.versions = {name: table.version() for name, table in self.snapshots.items()}
        self.since = {name: self.rewards.transaction_version(self._application(name)) for name in self.snapshots}
        for name, version in self.versions.items():
            if (self.since[name] or 0) > version:
                raise ScoringError(
                    f"{lake.uri}: rewards say that {name} is scored up to version {self.since[name]}, but it is at "
                    f"version {version}: the tables don't belong together; restore them from one backup"
                )
        self.scored = self.missing = self.retried = 0
        self.values: Counter[str] = Counter()
        self.reasons: dict[str, Counter[str]] = {source.name: Counter() for source in sources}

    def run(self) -> ScoreResult:
        started = time.perf_counter()
        pending = self._pending()
        if len(pending) or self.since != self.versions:
            try:
                with connect(self.config.memory_limit, self.config.threads) as connection:
                    self._score(connection, pending)
            except (duckdb.Error, OSError, pa.ArrowException) as error:
                if is_file_gone(error):
                    raise LakeFileGoneError(f"{self.lake.uri}: a vacuum removed a file meanwhile: {error}") from error
                if _OUT_OF_MEMORY in str(error):
                    raise ScoringError(
                        f"scoring needs more memory than feedback.scoring.memory_limit={self.config.memory_limit} "
                        f"with feedback.scoring.threads={self.config.threads}: raise the limit, or take fewer threads"
                    ) from error
                raise
        return ScoreResult(
            scored=self.scored,
            missing=self.missing,
            components={source.name: self.values[source.name] for source in self.sources},
            reasons={name: dict(reasons.most_common()) for name, reasons in self.reasons.items()},
            retried=self.retried,
            versions=self.versions | {"rewards": self.rewards.version()},
            seconds=time.perf_counter() - started,
            scorer=self.scorer,
        )

    def _score(self, connection: duckdb.DuckDBPyConnection, pending: pa.Table) -> None:
        connection.execute("SET preserve_insertion_order = false")
        votes = human.counts_sql(self.config.human, self.kinds) if self.config.human.weight > 0 else "false"
        snapshots = self.snapshots | {"rewards": self.rewards}
        found = Search(connection, self.lake, snapshots, self.scorer, columns_of(self.sources))
        found.run(self.since, votes, pending)
        self._score_batches(connection, found, pending)
        self._commit(connection, found)

    def _pending(self) -> pa.Table:
        if not self.rewards.transaction_version(self._application("pending")):
            return retry.nothing()
        time = self.rewards.transaction_version(self._application("time"))
        return retry.pending(self.lake, self.rewards.version(), self.scorer, _EPOCH + timedelta(microseconds=time))

    def _application(self, name: str) -> str:
        return f"score.{self.scorer}.{name}"

    def _score_batches(self, connection: duckdb.DuckDBPyConnection, found: Search, pending: pa.Table) -> None:
        """Table ``scores``: (response_id, a value and a reason for each source that is no SQL), a batch at a time."""
        sources = [source for source in self.sources if source.by_row is not None]
        if not sources:
            return
        columns = ", ".join(f"value_{source.name} DOUBLE, reason_{source.name} VARCHAR" for source in sources)
        connection.execute(f"CREATE TABLE scores (response_id VARCHAR, {columns})")
        connection.register("pending", pending)
        reader = connection.sql(
            f"SELECT response_id, {', '.join(COLUMNS)}, coalesce(tries, 0) AS tries "
            "FROM responses LEFT JOIN pending USING (response_id)"
        ).to_arrow_reader(min([self.config.batch_rows, *(s.batch_rows for s in sources if s.batch_rows)]))
        done = 0
        with connection.cursor() as writer:  # the reader occupies the connection
            for batch in reader:
                rows = pa.Table.from_batches([batch])
                scores: dict[str, Any] = {"response_id": rows["response_id"]}
                for source in sources:
                    assert source.by_row is not None
                    values, reasons = source.by_row(rows)
                    scores[f"value_{source.name}"] = pa.array(values, pa.float64())
                    scores[f"reason_{source.name}"] = pa.array(reasons, pa.string())
                writer.register("batch", pa.table(scores))
                writer.execute("INSERT INTO scores SELECT * FROM batch")
                writer.unregister("batch")
                done += batch.num_rows
                self.progress(", ".join(source.name for source in sources), done, found.count)

    def _commit(self, connection: duckdb.DuckDBPyConnection, found: Search) -> None:
        scored_at = self._time()
        microseconds = (scored_at - _EPOCH) // timedelta(microseconds=1)
        transactions = {self._application(name): version for name, version in self.versions.items()}
        transactions |= {self._application("time"): microseconds, self._application("pending"): 0, _CLOCK: microseconds}
        result = connection.sql(self._components_sql(found)).to_arrow_reader(_BATCH_ROWS)

        def rows() -> Iterator[pa.RecordBatch]:
            with connection.cursor() as looking:  # the result occupies the connection
                yield from self._rows(result, scored_at, found, looking)
            # The commit takes the transactions when all rows are written.
            transactions[self._application("pending")] = self.retried

        stream = pa.RecordBatchReader.from_batches(REWARDS, rows())
        metadata = {"scorer": self.scorer, "read": self.versions}
        self.lake.append("rewards", stream, transactions=transactions, metadata=metadata, snapshot=self.rewards)

    def _components_sql(self, found: Search) -> str:
        """SQL for (response_id, a value and a reason for each source)."""
        inner, outer, joins = [], [], []
        for source in self.sources:
            value, reason = f"value_{source.name}", f"reason_{source.name}"
            if source.rule is not None:
                inner += [f"{source.rule.value} AS {value}", f"{source.rule.reason} AS {reason}"]
                outer += [value, f"CASE WHEN {value} IS NULL THEN {reason} END"]
            elif source.by_row is not None:
                outer += [value, reason]
            else:
                outer += [human.NAME, f"CASE WHEN {human.NAME} IS NULL THEN '{human.MISSING}' END"]
        if self.config.human.weight > 0:
            among = "touched" if found.some else None
            votes = human.votes_sql("feedback_on", self.config.human, self.kinds, among=among)
            joins.append(f"LEFT JOIN ({votes}) USING (tenant, response_id)")
        if any(source.by_row is not None for source in self.sources):
            joins.append("LEFT JOIN scores USING (response_id)")
        return (
            f"SELECT response_id, {', '.join(outer)} "
            f"FROM (SELECT {', '.join(['tenant', 'response_id', *inner])} FROM responses) {' '.join(joins)}"
        )

    def _time(self) -> datetime:
        """The time of this run, later than that of every run before also if the clock was set back."""
        last = self.rewards.transaction_version(_CLOCK) or 0
        return max(datetime.now(UTC), _EPOCH + timedelta(microseconds=last + 1))

    def _rows(
        self, result: pa.RecordBatchReader, scored_at: datetime, found: Search, looking: duckdb.DuckDBPyConnection
    ) -> Iterator[pa.RecordBatch]:
        names = [source.name for source in self.sources]
        weights = [source.weight for source in self.sources]
        for batch in result:
            if found.repeats:
                batch = _changed(looking, batch, compose(names, weights, batch.columns[1::2], batch.columns[2::2]))
            response_id, *columns = batch.columns
            composed = compose(names, weights, columns[::2], columns[1::2])
            self._count(batch.num_rows, composed.reward, columns[::2], columns[1::2])
            yield pa.RecordBatch.from_arrays(
                [
                    *(response_id, composed.reward, composed.components, composed.missing),
                    pa.repeat(self.scorer, batch.num_rows),
                    pa.repeat(pa.scalar(scored_at, REWARDS.field("scored_at").type), batch.num_rows),
                ],
                schema=REWARDS,
            )
            self.progress("rewards", self.scored, found.count)

    def _count(self, rows: int, reward: pa.Array, values: list[pa.Array], reasons: list[pa.Array]) -> None:
        self.scored += rows
        self.missing += reward.null_count
        for source, value, reason in zip(self.sources, values, reasons, strict=True):
            self.values[source.name] += rows - value.null_count
            counts = self.reasons[source.name]
            for each in pc.value_counts(reason).to_pylist():
                if each["values"] is not None and (each["values"] in counts or len(counts) < _MOST_REASONS):
                    counts[each["values"]] += each["counts"]
                self.retried += each["counts"] if retry.is_transient(each["values"]) else 0


def _changed(connection: duckdb.DuckDBPyConnection, batch: pa.RecordBatch, new: Composed) -> pa.RecordBatch:
    """The rows whose reward is not the one that their response has already."""
    numbers = pa.array(range(batch.num_rows), pa.int64())
    columns = [numbers, batch.column(0), new.reward, new.components, new.missing]
    connection.register("new", pa.table(columns, names=["number", "response_id", "reward", "components", "missing"]))
    changed = connection.execute(
        "SELECT number FROM new LEFT JOIN former USING (response_id) WHERE former.response_id IS NULL "
        "OR new.reward IS DISTINCT FROM former.reward OR new.components::VARCHAR IS DISTINCT FROM former.components "
        "OR new.missing::VARCHAR IS DISTINCT FROM former.missing ORDER BY number"
    ).fetchnumpy()["number"]
    connection.unregister("new")
    return batch.take(pa.array(changed, pa.int64()))
