"""Scoring: one DuckDB batch that turns what is new in the lake into rewards.

What was scored up to which Delta version stands in the commit of the rewards themselves, as application transactions
of the rewards table. So a run that is killed anywhere and repeated gives each response one reward, and two runs at once
can't both commit. A response is scored when it appears, and again when new feedback on it changes its reward.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

import duckdb
import pyarrow as pa
from deltalake.exceptions import DeltaError

from feedback.config import ScoringConfig
from feedback.lake import Lake, LakeConflictError
from feedback.rewards import human, rules
from feedback.rewards.rules import Rule, load_rule
from feedback.schema import REWARDS

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with (responses done, responses in all)."""

_CLOCK: Final = "score.clock"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_ATTEMPTS: Final = 3
_RULE_COLUMNS: Final = ("prompt", "messages", "response", "response_token_ids", "metadata")


@dataclass(frozen=True)
class ScoreResult:
    """What a run did.

    ``scored`` responses got a row in ``rewards``; ``missing`` of them have no reward, because every component is
    missing. ``versions`` are the Delta versions that were read (interactions, feedback) and written (rewards).
    """

    scored: int
    missing: int
    versions: dict[str, int]
    seconds: float
    scorer: str


@dataclass(frozen=True)
class Component:
    """One term of the weighted mean; ``value`` and ``reason`` are SQL over the joined row."""

    name: str
    weight: float
    value: str
    reason: str


def score(lake: Lake, config: ScoringConfig, *, progress: Progress | None = None) -> ScoreResult:
    """Score all that is new since this scorer's last run.

    Raises RuleError if the rule can't be loaded, ValueError if no source has a weight, LakeConflictError if other
    runs commit in between again and again.
    """
    rule = load_rule(config.rules.function) if config.rules.function and config.rules.weight > 0 else None
    scorer = scorer_name(config, rule)
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return _Run(lake, config, rule, scorer, progress).run()
        except LakeConflictError:
            if attempt == _ATTEMPTS:
                raise
            log.info("another scoring run committed meanwhile; starting over from its state")
    raise AssertionError("unreachable")


def scorer_name(config: ScoringConfig, rule: Rule | None) -> str:
    """``human+rules@<hash>``: the sources and a hash of all that decides a reward, the rule's source included."""
    content = {
        "human": config.human.weight,
        "rules": None if rule is None else [rule.name, rule.digest, config.rules.weight],
    }
    names = [component.name for component in components(config, rule)]
    if not names:
        raise ValueError("no reward source has a weight: set scoring.human.weight, or scoring.rules.function")
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return f"{'+'.join(names)}@{digest[:16]}"


def components(config: ScoringConfig, rule: Rule | None) -> list[Component]:
    """The sources that take part."""
    found = []
    if config.human.weight > 0:
        found.append(Component(human.NAME, config.human.weight, "votes.human", f"'{human.MISSING}'"))
    if rule is not None:
        found.append(Component(rules.NAME, config.rules.weight, "rule_scores.value", "rule_scores.reason"))
    return found


def rewards_sql(parts: list[Component]) -> str:
    """SQL for (response_id, reward, components, missing): the weighted mean of the components that are present."""
    total = " + ".join(f"coalesce({part.weight!r} * {part.value}, 0)" for part in parts)
    weight = " + ".join(f"CASE WHEN {part.value} IS NULL THEN 0 ELSE {part.weight!r} END" for part in parts)
    values = ", ".join(f"{{'key': '{part.name}', 'value': {part.value}}}" for part in parts)
    reasons = ", ".join(
        f"{{'key': '{part.name}', 'value': CASE WHEN {part.value} IS NULL THEN {part.reason} END}}" for part in parts
    )
    return f"""
        SELECT
            touched.response_id,
            ({total}) / nullif({weight}, 0) AS reward,
            map_from_entries(list_filter([{values}], lambda entry : entry.value IS NOT NULL)) AS components,
            map_from_entries(list_filter([{reasons}], lambda entry : entry.value IS NOT NULL)) AS missing
        FROM touched
        LEFT JOIN votes USING (tenant, response_id)
        LEFT JOIN rule_scores USING (response_id)
    """


class _Run:
    """One attempt, against the tables as they are when it begins."""

    def __init__(
        self, lake: Lake, config: ScoringConfig, rule: Rule | None, scorer: str, progress: Progress | None
    ) -> None:
        self.lake = lake
        self.config = config
        self.rule = rule
        self.scorer = scorer
        self.progress = progress
        # Rewards are read first: whatever the other tables hold beyond it is new.
        self.rewards = lake.table("rewards")
        self.tables = {name: lake.table(name) for name in ("interactions", "feedback")}
        self.versions = {name: table.version() for name, table in self.tables.items()}
        self.missing = 0

    def run(self) -> ScoreResult:
        started = time.perf_counter()
        scored = 0
        if any(self._scored_until(name) != version for name, version in self.versions.items()):
            with self.lake.connect(
                versions=self.versions, memory_limit=self.config.memory_limit, threads=self.config.threads
            ) as connection:
                self._find_new(connection)
                self._find_touched(connection)
                scored = _count(connection, "touched")
                connection.execute(f"CREATE TABLE votes AS {human.votes_sql('touched_feedback')}")
                self._apply_rule(connection, scored)
                self._commit(connection)
        versions = self.versions | {"rewards": self.rewards.version()}
        return ScoreResult(scored, self.missing, versions, time.perf_counter() - started, self.scorer)

    def _application(self, table: str) -> str:
        return f"score.{self.scorer}.{table}"

    def _scored_until(self, table: str) -> int | None:
        return self.rewards.transaction_version(self._application(table))

    def _find_new(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Table ``candidates``: ids of responses that are new or have new votes."""
        connection.execute("CREATE TABLE candidates (response_id VARCHAR)")
        kinds = ", ".join(f"'{kind}'" for kind in human.KINDS)
        if self._scored_until("interactions") is None:  # never scored: everything is new
            connection.execute("INSERT INTO candidates SELECT response_id FROM interactions WHERE status = 'complete'")
            return
        unscored = f"response_id NOT IN (SELECT response_id FROM rewards WHERE scorer = '{self.scorer}')"
        self._add_changes(connection, "interactions", "status", "status = 'complete'", otherwise=unscored)
        if self.config.human.weight > 0:
            self._add_changes(connection, "feedback", "kind", f"kind IN ({kinds})", otherwise="true")

    def _add_changes(
        self, connection: duckdb.DuckDBPyConnection, table: str, column: str, condition: str, *, otherwise: str
    ) -> None:
        """Add the rows since the last run that meet ``condition`` (on ``column``) to the candidates.

        The change feed tells which they are. Where its log or files are gone (they are kept for a limited time), all
        rows that also meet ``otherwise`` are added: more than needed, never less.
        """
        since = self._scored_until(table) or 0
        if since == self.versions[table]:
            return
        try:
            changes = self.tables[table].load_cdf(
                starting_version=since + 1,
                ending_version=self.versions[table],
                columns=["response_id", column, "_change_type"],
            )
            connection.register("changes", changes)
            connection.execute(
                f"INSERT INTO candidates SELECT response_id FROM changes WHERE {condition} AND _change_type = 'insert'"
            )
            connection.unregister("changes")
        except (DeltaError, duckdb.Error) as error:
            log.warning("the changes of %s since version %d are cleaned up (%s): reading all", table, since, error)
            connection.execute(
                f"INSERT INTO candidates SELECT response_id FROM {table} WHERE {condition} AND {otherwise}"
            )

    def _find_touched(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Table ``touched``, the complete responses among the candidates, once each, and views for their rows.

        Response ids grow with time, so the files that can hold the candidates are few: the log's statistics tell.
        """
        low, high = connection.execute("SELECT min(response_id), max(response_id) FROM candidates").fetchall()[0]
        for table in ("interactions", "feedback"):
            self.lake.add_view(
                connection, f"touched_{table}", self.tables[table], between=("response_id", low or "", high or "")
            )
        connection.execute(
            "CREATE TABLE touched AS SELECT DISTINCT tenant, response_id FROM touched_interactions "
            "SEMI JOIN candidates USING (response_id) WHERE status = 'complete'"
        )

    def _apply_rule(self, connection: duckdb.DuckDBPyConnection, total: int) -> None:
        """Table ``rule_scores``: (response_id, value, reason), by the Python rule, a batch at a time."""
        connection.execute("CREATE TABLE rule_scores (response_id VARCHAR, value DOUBLE, reason VARCHAR)")
        if self.rule is None:
            return
        columns = ", ".join(_RULE_COLUMNS)
        reader = connection.sql(
            f"SELECT response_id, {columns} FROM touched_interactions SEMI JOIN touched USING (response_id)"
        ).to_arrow_reader(self.config.batch_rows)
        done = failed = 0
        with connection.cursor() as writer:  # the reader occupies the connection
            for batch in reader:
                table = pa.Table.from_batches([batch])
                values, reasons = self.rule.by_row(table.drop_columns("response_id"))
                failed += sum(reason is not None for reason in reasons)
                scores = pa.table(
                    {
                        "response_id": table["response_id"],
                        "value": pa.array(values, pa.float64()),
                        "reason": pa.array(reasons, pa.string()),
                    }
                )
                writer.register("scores", scores)
                writer.execute("INSERT INTO rule_scores SELECT * FROM scores")
                writer.unregister("scores")
                done += batch.num_rows
                if self.progress is not None:
                    self.progress(done, total)
        if failed:
            log.warning("rule %s gave no reward for %d of %d responses", self.rule.name, failed, done)

    def _commit(self, connection: duckdb.DuckDBPyConnection) -> None:
        scored_at = self._time()
        result = connection.sql(rewards_sql(components(self.config, self.rule))).to_arrow_reader(65_536)
        stream = pa.RecordBatchReader.from_batches(REWARDS, self._rewards(result, scored_at))
        transactions = {self._application(name): version for name, version in self.versions.items()}
        transactions[_CLOCK] = (scored_at - _EPOCH) // timedelta(microseconds=1)
        metadata = {"scorer": self.scorer, "read": self.versions}
        self.lake.append("rewards", stream, transactions=transactions, metadata=metadata, snapshot=self.rewards)

    def _time(self) -> datetime:
        """The time of this run, later than that of every run before also if the clock was set back."""
        last = self.rewards.transaction_version(_CLOCK) or 0
        return max(datetime.now(UTC), _EPOCH + timedelta(microseconds=last + 1))

    def _rewards(self, result: pa.RecordBatchReader, scored_at: datetime) -> Iterator[pa.RecordBatch]:
        for batch in result:
            self.missing += batch.column("reward").null_count
            rows = batch.num_rows
            yield pa.RecordBatch.from_arrays(
                [
                    *(batch.column(name).cast(REWARDS.field(name).type) for name in REWARDS.names[:4]),
                    pa.repeat(self.scorer, rows),
                    pa.repeat(pa.scalar(scored_at, REWARDS.field("scored_at").type), rows),
                ],
                schema=REWARDS,
            )


def _count(connection: duckdb.DuckDBPyConnection, table: str) -> int:
    return int(connection.execute(f"SELECT count(*) FROM {table}").fetchall()[0][0])
