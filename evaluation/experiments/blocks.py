"""The blocks of an experiment as rows: what each came to, by the traffic and the feedback in the lake.

A block is what was drawn for, so it is the unit: one row, however many requests and thumbs. It closes a fixed time
after its end and has what was known by then, so it never changes. Feedback: first the mean of what one voice said in
the block, then the mean over voices. A voice is a source of feedback or, where none was named, the request's user.
Everything else: the mean over its requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import duckdb
import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict

from evaluation.experiments.plan import ExperimentPlan
from evaluation.statistics.experiment import Rows
from feedback.events import ANYBODY
from feedback.lake.tables import Lake
from feedback.scoring.sources.human import opinions_sql
from serve.generation.interaction_rows import BLOCK
from serve.policies.experiments import Experiment

_COLUMNS: Final = """
    response_id, tenant, "user", variant, propensity, completed_at, status, len(response_token_ids) AS tokens,
    timings.total_ms / 1000 AS seconds
"""


_SETTLING_S: Final = 2.0  # what was recorded or scored at the last moment is in the lake or the journal by then


class BadEvidence(RuntimeError):
    """The rows of an experiment can't decide it; the text names what is wrong with them."""


class Block(BaseModel):
    """What one closed block came to. ``values`` are None where nothing was known; ``voices``: who gave feedback."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    block: int
    candidate: bool
    propensity: float
    requests: int
    voices: int
    responded: float
    values: dict[str, float | None]


class Observed(BaseModel):
    """The closed blocks in order, and what is not among them.

    ``pending``: blocks that have not closed. ``late``: feedbacks that came after their block had closed.
    ``mislabelled``: responses whose label is not what was drawn for their block; they count for nothing.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    blocks: tuple[Block, ...]
    pending: int = 0
    late: int = 0
    mislabelled: int = 0

    def rows(self, plan: ExperimentPlan) -> Rows:
        """For the statistics; propensities are the candidate's."""

        def column(name: str) -> np.ndarray:
            return np.array([_number(block.values.get(name)) for block in self.blocks], np.float64)

        responded = {"feedback": np.array([block.responded for block in self.blocks], np.float64)}
        return Rows(
            candidate=np.array([block.candidate for block in self.blocks], bool),
            propensities=np.array(
                [block.propensity if block.candidate else 1 - block.propensity for block in self.blocks], np.float64
            ),
            values={outcome.name: column(outcome.name) for outcome in plan.outcomes},
            responded=responded,
            pending=self.pending,
            late=self.late,
        )


def observe(
    lake: Lake,
    journal: Path,
    experiment: Experiment,
    plan: ExperimentPlan,
    *,
    now: float,
    known: Sequence[Block] = (),
) -> Observed:
    """The blocks of an experiment that have closed by ``now``, in seconds of Unix time.

    known: those that an earlier call has given. They stay as they are, and only later ones come to them: what is
    sealed, scored or erased behind its time changes nothing that was looked at.

    Raises BadEvidence for a reward outside its bounds, LakeError.
    """

    def gather(connection: duckdb.DuckDBPyConnection) -> tuple[pa.Table, int, int]:
        return _gather(connection, experiment, plan)

    per_block, late, mislabelled = lake.read(gather, journal)
    last = known[-1].block if known else -1
    blocks = [
        Block(
            block=row["block"],
            candidate=row["variant"] == "candidate",
            propensity=row["propensity"],
            requests=row["requests"],
            voices=row["voices"],
            responded=row["responded"],
            values={
                outcome.name: None
                if outcome.name == "feedback" and row["voices"] < plan.min_voices
                else row[outcome.name]
                for outcome in plan.outcomes
            },
        )
        for row in per_block.to_pylist()
        if row["closes"] + _SETTLING_S <= now and row["block"] > last
    ]
    return Observed(
        blocks=(*known, *blocks),
        pending=sum(row > last for row in per_block["block"].to_pylist()) - len(blocks),
        late=late,
        mislabelled=mislabelled,
    )


def _gather(
    connection: duckdb.DuckDBPyConnection, experiment: Experiment, plan: ExperimentPlan
) -> tuple[pa.Table, int, int]:
    """What each block has by its close; how many feedbacks came later; how many responses are mislabelled."""
    connection.execute(
        f"""
        CREATE TEMP TABLE mine AS
        SELECT {_COLUMNS}, TRY_CAST(element_at(metadata, '{BLOCK}')[1] AS BIGINT) AS block
        FROM interactions WHERE experiment = ? AND created_at >= to_timestamp(?)
        """,
        [experiment.number, experiment.started_at],
    )
    numbers = [row[0] for row in connection.execute("SELECT DISTINCT block FROM mine WHERE block >= 0").fetchall()]
    turns = [experiment.turn(block) for block in sorted(numbers)]
    drawn = pa.table(
        {
            "block": pa.array([turn.block for turn in turns], pa.int64()),
            "drawn": pa.array([turn.variant for turn in turns], pa.string()),
            "share": pa.array([turn.propensity for turn in turns], pa.float64()),
            "closes": pa.array([experiment.begins(turn.block + 1) + plan.window_s for turn in turns], pa.float64()),
        }
    )
    connection.register("drawn", drawn)
    connection.execute(
        """
        CREATE TEMP TABLE counted AS
        SELECT mine.*, drawn.closes FROM mine JOIN drawn USING (block)
        WHERE variant = drawn.drawn AND propensity = drawn.share AND epoch(completed_at) <= closes
        """
    )
    connection.execute(
        """
        CREATE TEMP TABLE said AS
        SELECT feedback.*, epoch(feedback.created_at) <= counted.closes AS in_time
        FROM feedback JOIN counted USING (tenant, response_id)
        UNION ALL
        SELECT feedback.*, epoch(feedback.created_at) <= counted.closes AS in_time
        FROM feedback JOIN counted
        ON feedback.tenant = counted.tenant AND feedback.rejected_response_id = counted.response_id
        """
    )
    # A choice between responses of two blocks counts for neither if it came too late for one of them.
    connection.execute(
        """
        CREATE TEMP TABLE in_time AS
        SELECT DISTINCT * EXCLUDE (in_time) FROM said
        QUALIFY bool_and(in_time) OVER (PARTITION BY tenant, feedback_id)
        """
    )
    opinions = opinions_sql("in_time", plan.human, plan.kinds, among="counted")
    connection.execute(f"CREATE TEMP TABLE opinions AS SELECT * FROM ({opinions})")
    bounds = {outcome.name: outcome.bounds for outcome in plan.outcomes}
    _check_rewards(connection, bounds.get("reward"))
    connection.execute(
        f"""
        CREATE TEMP TABLE voices AS
        SELECT block, tenant, CASE source WHEN '{ANYBODY}' THEN coalesce("user", source) ELSE source END AS who,
               avg(opinion) AS voice
        FROM opinions JOIN counted USING (tenant, response_id)
        GROUP BY block, tenant, who
        """
    )
    per_block = connection.sql(
        """
        WITH of_requests AS (
            SELECT block, any_value(variant) AS variant, any_value(propensity) AS propensity,
                   any_value(closes) AS closes, count(*) AS requests,
                   avg((status = 'error')::INTEGER) AS errors,
                   avg(CASE WHEN seconds IS NOT NULL THEN greatest($latency_low, least($latency_high, seconds)) END)
                       AS latency_s,
                   avg(greatest($length_low, least($length_high, tokens))) AS length,
                   avg(reward) AS reward,
                   count(*) FILTER (said.response_id IS NOT NULL) / count(*) AS responded
            FROM counted
            LEFT JOIN (
                SELECT DISTINCT tenant, response_id FROM opinions
            ) said USING (tenant, response_id)
            LEFT JOIN in_time_rewards USING (response_id)
            GROUP BY block
        ),
        of_voices AS (SELECT block, count(*) AS voices, avg(voice) AS feedback FROM voices GROUP BY block)
        SELECT block, variant, propensity, closes, requests, responded, coalesce(voices, 0) AS voices,
               feedback, errors, latency_s, length, reward
        FROM of_requests LEFT JOIN of_voices USING (block)
        ORDER BY block
        """,
        params={
            "latency_low": bounds.get("latency_s", (0.0, 0.0))[0],
            "latency_high": bounds.get("latency_s", (0.0, 1.0))[1],
            "length_low": bounds.get("length", (0.0, 0.0))[0],
            "length_high": bounds.get("length", (0.0, 1.0))[1],
        },
    ).to_arrow_table()
    late = connection.execute("SELECT count(DISTINCT feedback_id) FROM said WHERE NOT in_time").fetchall()[0][0]
    mislabelled = connection.execute(
        "SELECT count(*) FROM mine LEFT JOIN drawn USING (block) "
        "WHERE drawn.drawn IS NULL OR variant <> drawn.drawn OR propensity <> drawn.share"
    ).fetchall()[0][0]
    return per_block, late, mislabelled


def _check_rewards(connection: duckdb.DuckDBPyConnection, bounds: tuple[float, float] | None) -> None:
    """Make the rewards that were there in time. Raises BadEvidence naming a response whose reward is out of bounds."""
    connection.execute(
        """
        CREATE TEMP TABLE in_time_rewards AS
        SELECT response_id, max_by(rewards.reward, scored_at) AS reward
        FROM rewards JOIN counted USING (response_id)
        WHERE epoch(scored_at) <= closes AND rewards.reward IS NOT NULL
        GROUP BY response_id
        """
    )
    if bounds is None:
        return
    outside = connection.execute(
        "SELECT response_id, reward FROM in_time_rewards WHERE NOT (reward BETWEEN ? AND ?) ORDER BY 1 LIMIT 1",
        list(bounds),
    ).fetchall()
    if outside:
        response, value = outside[0]
        raise BadEvidence(
            f"response {response} has reward {value:g}, outside experiment.outcomes.reward.bounds "
            f"[{bounds[0]:g}, {bounds[1]:g}]"
        )


def _number(value: float | None) -> float:
    return float("nan") if value is None else value
