"""The blocks of an experiment as rows: what each came to, by the traffic and the feedback in the lake.

A block is what was drawn for, so it is the unit: one row, however many requests and thumbs. It closes a fixed time
after its end and has what was known by then, so it never changes. Feedback: first the mean of what one voice said in
the block, then the mean over voices. A voice is a source of feedback or, where none was named, the request's user.
The end of sessions: the mean over the sessions that had a response in the block. Everything else: the mean over its
requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import duckdb
import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict

from evaluation.experiments.earlier import covariates
from evaluation.experiments.measures import VOICE, response_columns, session_ends_sql
from evaluation.experiments.plan import ExperimentPlan
from evaluation.statistics.experiment import Rows
from feedback.lake.tables import Lake
from feedback.scoring.sources.human import opinions_sql
from serve.generation.interaction_rows import BLOCK
from serve.policies.experiments import Experiment

_SETTLING_S: Final = 2.0  # what was recorded or scored at the last moment is in the lake or the journal by then


class BadEvidence(RuntimeError):
    """The rows of an experiment can't decide it; the text names what is wrong with them."""


class Block(BaseModel):
    """What one closed block came to. ``values`` are None where nothing was known; ``voices``: how many gave feedback.

    ``predictions``: the mean score of all its responses, and of those with feedback; None where one was not scored.
    ``covariates``: what its people did before the experiment, less the mean of all; None where nobody was there then.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    block: int
    candidate: bool
    propensity: float
    requests: int
    voices: int
    responded: float
    values: dict[str, float | None]
    covariates: dict[str, float | None] = {}
    predictions: dict[str, tuple[float, float] | None] = {}


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

        def column(each: Iterable[float | None]) -> np.ndarray:
            return np.array([_number(value) for value in each], np.float64)

        names = [outcome.name for outcome in plan.outcomes]
        predicted = [outcome.name for outcome in plan.outcomes if outcome.predicted_by is not None]
        predictions = {
            name: [block.predictions.get(name) or (None, None) for block in self.blocks] for name in predicted
        }
        responded = {"feedback": np.array([block.responded for block in self.blocks], np.float64)}
        return Rows(
            candidate=np.array([block.candidate for block in self.blocks], bool),
            propensities=np.array(
                [block.propensity if block.candidate else 1 - block.propensity for block in self.blocks], np.float64
            ),
            values={name: column(block.values.get(name) for block in self.blocks) for name in names},
            covariates={name: column(block.covariates.get(name) for block in self.blocks) for name in names},
            predictions={name: column(scores[0] for scores in predictions[name]) for name in predictions},
            labelled_predictions={name: column(scores[1] for scores in predictions[name]) for name in predictions},
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

    last = known[-1].block if known else -1

    def gather(connection: duckdb.DuckDBPyConnection) -> _Gathered:
        return _gather(connection, experiment, plan, last=last, now=now)

    per_block, before, late, mislabelled = lake.read(gather, journal)
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
            covariates=before.get(row["block"], {}),
            predictions={} if plan.predicted_by is None else {"feedback": _predictions(row)},
        )
        for row in per_block.to_pylist()
        if row["block"] > last and _has_closed(row, now)
    ]
    return Observed(
        blocks=(*known, *blocks),
        pending=sum(row > last for row in per_block["block"].to_pylist()) - len(blocks),
        late=late,
        mislabelled=mislabelled,
    )


_Gathered = tuple[pa.Table, dict[int, dict[str, float | None]], int, int]


def _gather(
    connection: duckdb.DuckDBPyConnection, experiment: Experiment, plan: ExperimentPlan, *, last: int, now: float
) -> _Gathered:
    """What each block has by its close, and of those after ``last`` that have closed by ``now`` what was before; how
    many feedbacks came later; how many responses are mislabelled."""
    connection.execute(
        f"""
        CREATE TEMP TABLE mine AS
        SELECT {response_columns(plan)}, TRY_CAST(element_at(metadata, '{BLOCK}')[1] AS BIGINT) AS block
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
            "begins": pa.array([experiment.begins(turn.block) for turn in turns], pa.float64()),
            "ends": pa.array([experiment.begins(turn.block + 1) for turn in turns], pa.float64()),
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
    _check_rewards(connection, next((one.bounds for one in plan.outcomes if one.name == "reward"), None))
    _score(connection, plan.predicted_by)
    _end_sessions(connection, experiment, plan)
    connection.execute(
        f"""
        CREATE TEMP TABLE voices AS
        SELECT block, tenant, {VOICE} AS who, avg(opinion) AS voice, avg(score) AS score
        FROM opinions JOIN counted USING (tenant, response_id) JOIN scored USING (tenant, response_id)
        GROUP BY block, tenant, who
        """
    )
    per_block = connection.sql(
        """
        WITH of_requests AS (
            SELECT block, any_value(variant) AS variant, any_value(propensity) AS propensity,
                   any_value(closes) AS closes, count(*) AS requests,
                   avg(errors) AS errors, avg(latency_s) AS latency_s, avg(length) AS length, avg(reward) AS reward,
                   count(*) FILTER (said.response_id IS NOT NULL) / count(*) AS responded
            FROM counted
            LEFT JOIN (
                SELECT DISTINCT tenant, response_id FROM opinions
            ) said USING (tenant, response_id)
            LEFT JOIN in_time_rewards USING (response_id)
            GROUP BY block
        ),
        of_voices AS (
            SELECT block, count(*) AS voices, avg(voice) AS feedback, avg(score) AS labelled_score
            FROM voices GROUP BY block
        ),
        of_users AS (
            SELECT block, CASE WHEN bool_and(whole) THEN avg(score) END AS score
            FROM (
                SELECT block, avg(score) AS score, count(score) = count(*) AS whole
                FROM counted JOIN scored USING (tenant, response_id) GROUP BY block, tenant, "user"
            )
            GROUP BY block
        ),
        of_sessions AS (SELECT block, avg(session_end) AS session_end FROM ended GROUP BY block)
        SELECT block, variant, propensity, closes, requests, responded, coalesce(voices, 0) AS voices,
               feedback, errors, latency_s, length, reward, session_end, score, labelled_score
        FROM of_requests LEFT JOIN of_voices USING (block) LEFT JOIN of_users USING (block)
        LEFT JOIN of_sessions USING (block)
        ORDER BY block
        """
    ).to_arrow_table()
    late = connection.execute("SELECT count(DISTINCT feedback_id) FROM said WHERE NOT in_time").fetchall()[0][0]
    mislabelled = connection.execute(
        "SELECT count(*) FROM mine LEFT JOIN drawn USING (block) "
        "WHERE drawn.drawn IS NULL OR variant <> drawn.drawn OR propensity <> drawn.share"
    ).fetchall()[0][0]
    new = [row["block"] for row in per_block.to_pylist() if row["block"] > last and _has_closed(row, now)]
    before = covariates(connection, experiment, plan, new)
    return per_block, before, late, mislabelled


def _score(connection: duckdb.DuckDBPyConnection, component: str | None) -> None:
    """Make ``scored``: (tenant, response_id, score) of each counted response, the score null where it was not in time.

    A response that is not complete has 0, and one that the component has no value for 0.5: any score will do for the
    statistics that does not follow from whether there is feedback.
    """
    connection.execute(
        f"""
        CREATE TEMP TABLE scored AS
        SELECT tenant, response_id,
               CASE WHEN any_value(status) <> 'complete' THEN 0.0::DOUBLE
                    ELSE max_by(greatest(0.0, least(1.0, coalesce(components[$name], 0.5)))::DOUBLE, scored_at)
                         FILTER (epoch(scored_at) <= closes
                                 AND (map_contains(components, $name) OR map_contains(missing, $name)))
                    END AS score
        FROM counted LEFT JOIN (SELECT * FROM rewards WHERE {component is not None}) USING (response_id)
        GROUP BY tenant, response_id
        """,
        {"name": component or ""},
    )


def _end_sessions(connection: duckdb.DuckDBPyConnection, experiment: Experiment, plan: ExperimentPlan) -> None:
    """Make ``ended``: (block, tenant, session_id, session_end) of each session in a block, 1 if it ended there.

    The last wait for a further request ends with its block's closing, even for a response that came late.
    """
    until = f"least(epoch(completed_at) + {plan.session_s!r}, closes)"
    ends = session_ends_sql("counted", experiment.started_at, until)
    connection.execute(
        f"""
        CREATE TEMP TABLE ended AS
        SELECT block, tenant, ends.session_id, max(session_end) AS session_end
        FROM ({ends}) ends JOIN counted USING (tenant, response_id)
        WHERE {plan.session_s > 0}
        GROUP BY block, tenant, ends.session_id
        """
    )


def _predictions(row: dict[str, Any]) -> tuple[float, float] | None:
    known = row["score"] is not None and row["labelled_score"] is not None
    return (row["score"], row["labelled_score"]) if known else None


def _has_closed(row: dict[str, Any], now: float) -> bool:
    return bool(row["closes"] + _SETTLING_S <= now)


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
