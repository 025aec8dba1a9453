"""What an experiment drew for, as rows: what each came to, by the traffic and the feedback in the lake.

The unit is what was drawn for: a block of time or, in a fleet, a user, else a session, else a request. It is one row,
however many requests and thumbs. A block closes a fixed time after its end, a user that long after the first request;
it has what was known by then, so it never changes. Of a user, the requests of the phase count in which the first one
was: with the next phase some users of the control become the candidate's, and what they did before would otherwise be
cut off for one policy alone. Feedback: first the mean of what one voice said in the unit, then the mean over voices.
A voice is a source of feedback or, where none was named, the request's user. The end of sessions: the mean over the
sessions that had a response in the unit early enough for their wait. Everything else: the mean over its requests.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

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
from serve.generation.interaction_rows import BLOCK, DRAW
from serve.policies.experiments import FALLBACK, Experiment

_SETTLING_S: Final = 2.0  # what was recorded or scored at the last moment is in the lake or the journal by then


class BadEvidence(RuntimeError):
    """The rows of an experiment can't decide it; the text names what is wrong with them."""


class Block(BaseModel):
    """What one closed block came to. ``values`` are None where nothing was known; ``voices``: how many gave feedback.

    Or what a user came to: ``draw`` names them in this experiment alone, ``first_at`` is when their first request came,
    in seconds of Unix time, and ``block`` the block that it came in.

    ``predictions``: the mean score that the responses with feedback are to be expected to have, and that they have
    (``_per_unit``); None where a response was not scored.
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
    draw: str | None = None
    first_at: float | None = None
    covariates: dict[str, float | None] = {}
    predictions: dict[str, tuple[float, float] | None] = {}


class Observed(BaseModel):
    """The closed blocks, or users, in order, and what is not among them.

    ``pending``: those that have not closed. ``late``: feedbacks that came after theirs had closed. ``mislabelled``:
    responses whose label is not what was drawn; they count for nothing. Nor do ``fallbacks``: those that were answered
    outside of the draw, as a policy had no replica.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    blocks: tuple[Block, ...]
    pending: int = 0
    late: int = 0
    mislabelled: int = 0
    fallbacks: int = 0

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
    """The blocks, or users, of an experiment that have closed by ``now``, in seconds of Unix time.

    known: those that an earlier call has given. They stay as they are, and only later ones come to them: what is
    sealed, scored or erased behind its time changes nothing that was looked at.

    Raises BadEvidence for a reward outside its bounds, LakeError.
    """

    def gather(connection: duckdb.DuckDBPyConnection) -> _Gathered:
        return _gather(connection, experiment, plan, known=known, now=now)

    found = lake.read(gather, journal)
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
            draw=row["draw"],
            first_at=row["first_at"] if row["draw"] else None,
            covariates=found.before.get(row["unit"], {}),
            predictions={} if plan.predicted_by is None else {"feedback": _predictions(row)},
        )
        for row in found.closed
    ]
    return Observed(
        blocks=(*known, *blocks),
        pending=found.pending,
        late=found.late,
        mislabelled=found.mislabelled,
        fallbacks=found.fallbacks,
    )


def has_rows(lake: Lake, journal: Path, experiment: Experiment) -> bool:
    """Whether the lake or the journal has a response of the experiment. Raises LakeError."""
    sql = "SELECT 1 FROM interactions WHERE experiment = ? AND created_at >= to_timestamp(?) LIMIT 1"
    values = [experiment.number, experiment.started_at]
    return bool(lake.read(lambda connection: connection.execute(sql, values).fetchall(), journal))


class _Gathered(NamedTuple):
    """The units that have closed and no look has seen, in that order, each with what it has by its close; what the
    people of each did before; and the counts of ``Observed``."""

    closed: list[dict[str, Any]]
    before: dict[str, dict[str, float | None]]
    pending: int
    late: int
    mislabelled: int
    fallbacks: int


def _gather(
    connection: duckdb.DuckDBPyConnection,
    experiment: Experiment,
    plan: ExperimentPlan,
    *,
    known: Sequence[Block],
    now: float,
) -> _Gathered:
    connection.execute(
        f"""
        CREATE TEMP TABLE recorded AS
        SELECT {response_columns(plan)}, metadata, epoch(created_at) AS asked_at
        FROM interactions WHERE experiment = ? AND created_at >= to_timestamp(?)
        """,
        [experiment.number, experiment.started_at],
    )
    count = _count_users if experiment.unit == "user" else _count_blocks
    mislabelled = count(connection, experiment, plan)
    fallbacks = connection.execute(f"SELECT count(*) FROM recorded WHERE variant = '{FALLBACK}'").fetchall()[0][0]
    per_unit, late = _per_unit(connection, experiment, plan)
    last, seen = _place(known[-1]) if known else (-1, 0.0, ""), {block.draw for block in known if block.draw}
    new = [
        row
        for row in per_unit.to_pylist()
        if (row["block"], row["first_at"], row["draw"] or "") > last and row["draw"] not in seen
    ]
    closed = [row for row in new if row["closes"] + _SETTLING_S <= now]
    before = covariates(connection, experiment, plan, [row["unit"] for row in closed])
    return _Gathered(closed, before, len(new) - len(closed), late, mislabelled, fallbacks)


def _place(block: Block) -> tuple[int, float, str]:
    """Where it stands in the order in which units close."""
    return block.block, block.first_at or 0.0, block.draw or ""


def _count_blocks(connection: duckdb.DuckDBPyConnection, experiment: Experiment, plan: ExperimentPlan) -> int:
    """Make the table of the responses that count, each with its block; how many are mislabelled."""
    connection.execute(
        f"""
        CREATE TEMP TABLE mine AS
        SELECT *, TRY_CAST(element_at(metadata, '{BLOCK}')[1] AS BIGINT) AS block FROM recorded
        """
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
        SELECT mine.*, block::VARCHAR AS unit, 0.0::DOUBLE AS first_at, NULL::VARCHAR AS draw, drawn.closes
        FROM mine JOIN drawn USING (block)
        WHERE variant = drawn.drawn AND propensity = drawn.share AND epoch(completed_at) <= closes
        """
    )
    return _number_of(
        connection,
        "mine LEFT JOIN drawn USING (block) "
        "WHERE drawn.drawn IS NULL OR variant <> drawn.drawn OR propensity <> drawn.share",
    )


def _count_users(connection: duckdb.DuckDBPyConnection, experiment: Experiment, plan: ExperimentPlan) -> int:
    """Make the table of the responses that count, each with its user's draw; how many are mislabelled."""
    connection.execute(
        f"""
        CREATE TEMP TABLE mine AS
        SELECT *, element_at(metadata, '{DRAW}')[1] AS draw, floor((asked_at - $start) / $seconds)::BIGINT AS asked_in
        FROM recorded WHERE variant IS NULL OR variant <> '{FALLBACK}'
        """,
        {"start": experiment.started_at, "seconds": experiment.block_s},
    )
    begins = [phase.from_block for phase in experiment.phases]
    ends = [*begins[1:], np.iinfo(np.int64).max]
    connection.register(
        "phases", pa.table({"phase": pa.array(begins, pa.int64()), "until": pa.array(ends, pa.int64())})
    )
    connection.execute(
        """
        CREATE TEMP TABLE placed AS
        SELECT mine.*, phase FROM mine JOIN phases ON asked_in >= phase AND asked_in < until
        """
    )
    pairs = connection.execute("SELECT DISTINCT draw, phase FROM placed ORDER BY ALL").fetchall()
    labels = [(draw, phase, *experiment.drawn(draw, phase)) for draw, phase in pairs if _is_draw(draw)]
    drawn = pa.table(
        {
            "draw": pa.array([label[0] for label in labels], pa.string()),
            "phase": pa.array([label[1] for label in labels], pa.int64()),
            "drawn": pa.array([label[2] for label in labels], pa.string()),
            "share": pa.array([label[3] for label in labels], pa.float64()),
        }
    )
    connection.register("drawn", drawn)
    connection.execute(
        """
        CREATE TEMP TABLE labelled AS
        SELECT placed.* FROM placed JOIN drawn USING (draw, phase)
        WHERE variant = drawn.drawn AND propensity = drawn.share
        """
    )
    connection.execute(
        """
        CREATE TEMP TABLE counted AS
        WITH first AS (
            SELECT draw, min(asked_at) AS first_at, min(asked_at) + $window AS closes,
                   arg_min(phase, asked_at) AS phase, arg_min(asked_in, asked_at) AS block
            FROM labelled GROUP BY draw
        )
        SELECT labelled.*, draw AS unit, first_at, closes, block FROM labelled JOIN first USING (draw, phase)
        WHERE epoch(completed_at) <= closes
        """,
        {"window": plan.window_s},
    )
    return _number_of(connection, "mine") - _number_of(connection, "labelled")


def _is_draw(draw: str | None) -> bool:
    return draw is not None and re.fullmatch("[0-9a-f]{32}", draw) is not None


def _number_of(connection: duckdb.DuckDBPyConnection, what: str) -> int:
    return int(connection.execute(f"SELECT count(*) FROM {what}").fetchall()[0][0])


def _per_unit(
    connection: duckdb.DuckDBPyConnection, experiment: Experiment, plan: ExperimentPlan
) -> tuple[pa.Table, int]:
    """What each unit of the table ``counted`` has by its close; how many feedbacks came later.

    ``labelled_score`` g is weighted as feedback is: the mean score of what a voice gave feedback on, then the mean over
    voices. ``expected_score`` f is the same with, in place of each response's score, the mean score of all responses of
    its user in the unit (of its session where it has no user; where it has neither, its own).

    E[f - g] = 0 if chance decides which of a user's responses a voice gives feedback on. Let voice v give feedback on
    k_u of user u's responses in the unit, whose mean score is m_u. Given the policy, all scores and all k, each k_u of
    them are as likely as any others, so their scores sum to k_u m_u on average. Hence E[g] is the mean over voices of
    (sum over u of k_u m_u) / (sum over u of k_u), which is f; and f follows from the scores and the k alone. So f - g,
    times a coefficient that is fitted on earlier rows, is 0 on average for either policy, whatever the score is worth,
    whoever gives feedback, and how much. A mean over all users, or over all responses, has other weights than g: then
    a score that errs on some users alone would count as a difference of feedback.
    """
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
    # A choice between responses of two units counts for neither if it came too late for one of them.
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
        SELECT unit, tenant, {VOICE} AS who, avg(opinion) AS voice, avg(score) AS score, avg(of_user) AS expected
        FROM opinions JOIN counted USING (tenant, response_id) JOIN scored USING (unit, tenant, response_id)
        GROUP BY unit, tenant, who
        """
    )
    per_unit = connection.sql(
        """
        WITH of_requests AS (
            SELECT unit, any_value(block) AS block, any_value(first_at) AS first_at, any_value(draw) AS draw,
                   any_value(variant) AS variant, any_value(propensity) AS propensity,
                   any_value(closes) AS closes, count(*) AS requests,
                   avg(errors) AS errors, avg(latency_s) AS latency_s, avg(length) AS length, avg(reward) AS reward,
                   count(*) FILTER (said.response_id IS NOT NULL) / count(*) AS responded
            FROM counted
            LEFT JOIN (
                SELECT DISTINCT tenant, response_id FROM opinions
            ) said USING (tenant, response_id)
            LEFT JOIN in_time_rewards USING (response_id)
            GROUP BY unit
        ),
        of_voices AS (
            SELECT unit, count(*) AS voices, avg(voice) AS feedback, avg(score) AS labelled_score,
                   avg(expected) AS expected_score
            FROM voices GROUP BY unit
        ),
        of_scores AS (SELECT unit, bool_and(score IS NOT NULL) AS all_scored FROM scored GROUP BY unit),
        of_sessions AS (SELECT unit, avg(session_end) AS session_end FROM ended GROUP BY unit)
        SELECT unit, block, first_at, draw, variant, propensity, closes, requests, responded,
               coalesce(voices, 0) AS voices, feedback, errors, latency_s, length, reward, session_end, all_scored,
               expected_score, labelled_score
        FROM of_requests LEFT JOIN of_voices USING (unit) LEFT JOIN of_scores USING (unit)
        LEFT JOIN of_sessions USING (unit)
        ORDER BY block, first_at, draw
        """
    ).to_arrow_table()
    late = connection.execute("SELECT count(DISTINCT feedback_id) FROM said WHERE NOT in_time").fetchall()[0][0]
    return per_unit, late


def _score(connection: duckdb.DuckDBPyConnection, component: str | None) -> None:
    """Make ``scored``: (unit, tenant, response_id, score, of_user) of each counted response.

    The score is null where it was not in time; of_user is the mean of its user's in the unit, else of its session's.
    A response that is not complete has 0, and one that the component has no value for 0.5: any score will do for the
    statistics that does not follow from whether there is feedback.
    """
    connection.execute(
        f"""
        CREATE TEMP TABLE scored AS
        WITH of_responses AS (
            SELECT unit, tenant, response_id, "user", session_id,
                   CASE WHEN any_value(status) <> 'complete' THEN 0.0::DOUBLE
                        ELSE max_by(greatest(0.0, least(1.0, coalesce(components[$name], 0.5)))::DOUBLE, scored_at)
                             FILTER (epoch(scored_at) <= closes
                                     AND (map_contains(components, $name) OR map_contains(missing, $name)))
                        END AS score
            FROM counted LEFT JOIN (SELECT * FROM rewards WHERE {component is not None}) USING (response_id)
            GROUP BY unit, tenant, response_id, "user", session_id
        )
        SELECT unit, tenant, response_id, score,
               avg(score) OVER (
                   PARTITION BY unit, tenant, "user", CASE WHEN "user" IS NULL THEN session_id END,
                                CASE WHEN "user" IS NULL AND session_id IS NULL THEN response_id END
               ) AS of_user
        FROM of_responses
        """,
        {"name": component or ""},
    )


def _end_sessions(connection: duckdb.DuckDBPyConnection, experiment: Experiment, plan: ExperimentPlan) -> None:
    """Make ``ended``: (unit, tenant, session_id, session_end) of each session in a unit, 1 if it ended there.

    The last wait for a further request ends with its unit's closing, even for a response that came late. A user may
    send requests until then; those that leave less than the wait count for nothing, as cut short it would always end.
    """
    until = f"least(epoch(completed_at) + {plan.session_s!r}, closes)"
    ends = session_ends_sql("counted", experiment.started_at, until)
    connection.execute(
        f"""
        CREATE TEMP TABLE ended AS
        SELECT unit, tenant, ends.session_id, max(session_end) AS session_end
        FROM ({ends}) ends JOIN counted USING (tenant, response_id)
        WHERE {plan.session_s > 0} AND asked_at + {plan.session_s!r} <= closes
        GROUP BY unit, tenant, ends.session_id
        """
    )


def _predictions(row: dict[str, Any]) -> tuple[float, float] | None:
    known = row["all_scored"] and row["labelled_score"] is not None
    return (row["expected_score"], row["labelled_score"]) if known else None


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
