"""What the people of each block, or each user, did before the experiment: the covariates of its outcomes.

Feedback: the mean of the block's voices, of each the mean opinion that it had before. Everything else: the mean of the
users whose requests came in the block's time, of each the mean over earlier responses. All are less the mean of
everybody who was there before, and 0 for those who were not, so that newcomers count as average. A user who sends more
requests than others weighs no more: how many they send may follow from the policy that they meet. Where users are what
is drawn for, it is their own; a unit without a user, a session or a request, was not there before.
"""

from __future__ import annotations

from collections.abc import Sequence

import duckdb
import pyarrow as pa

from evaluation.experiments.measures import VOICE, response_columns, session_ends_sql
from evaluation.experiments.plan import ExperimentPlan
from feedback.schema import IMPORTED
from feedback.scoring.sources.human import opinions_sql
from serve.policies.experiments import Experiment


def covariates(
    connection: duckdb.DuckDBPyConnection,
    experiment: Experiment,
    plan: ExperimentPlan,
    units: Sequence[str],
) -> dict[str, dict[str, float | None]]:
    """By unit and outcome, of ``units`` alone; None where nobody of the unit was there before.

    The connection has the lake's views, and the tables ``counted`` and ``voices`` of the experiment; of one that draws
    for blocks also ``drawn``.
    """
    if not plan.before_s or not units:
        return {}
    connection.register("closed", pa.table({"unit": pa.array(units, pa.string())}))
    if experiment.unit == "user":
        connection.execute(
            """
            CREATE TEMP TABLE came AS
            SELECT DISTINCT unit, tenant, "user" AS who FROM counted SEMI JOIN closed USING (unit)
            WHERE "user" IS NOT NULL
            """
        )
    else:
        numbers = [int(unit) for unit in units]
        connection.execute(
            """
            CREATE TEMP TABLE came AS
            SELECT DISTINCT unit, tenant, "user" AS who
            FROM interactions JOIN (SELECT *, block::VARCHAR AS unit FROM drawn) times
            ON created_at >= to_timestamp(begins) AND created_at < to_timestamp(ends)
            SEMI JOIN closed USING (unit)
            WHERE "user" IS NOT NULL AND epoch(completed_at) <= closes
              AND created_at >= to_timestamp(?) AND created_at < to_timestamp(?)
            """,
            [experiment.begins(min(numbers)), experiment.begins(max(numbers) + 1)],
        )
    connection.execute(
        f"""
        CREATE TEMP TABLE earlier AS
        SELECT {response_columns(plan)} FROM interactions
        WHERE created_at >= to_timestamp(?) AND completed_at < to_timestamp(?) AND status <> '{IMPORTED}'
        """,
        [experiment.started_at - plan.before_s, experiment.started_at],
    )
    found: dict[str, dict[str, float | None]] = {unit: {} for unit in units}
    for outcome in plan.outcomes:
        if outcome.name == "feedback":
            _voices_before(connection, experiment, plan)
        else:
            _users_before(connection, experiment, plan, outcome.name)
        means = connection.execute(
            f"""
            SELECT unit, CASE WHEN count(known.mean) > 0 THEN
                       avg(coalesce(known.mean - (SELECT avg(mean) FROM before), 0)) END
            FROM {"voices" if outcome.name == "feedback" else "came"} SEMI JOIN closed USING (unit)
            LEFT JOIN before known USING (tenant, who)
            GROUP BY unit
            """
        ).fetchall()
        by_unit = dict(means)
        for unit in units:
            found[unit][outcome.name] = by_unit.get(unit)
    return found


def _voices_before(connection: duckdb.DuckDBPyConnection, experiment: Experiment, plan: ExperimentPlan) -> None:
    """Make ``before``: (tenant, who, mean) of everybody who gave feedback on the earlier responses in their time."""
    connection.execute(
        "CREATE TEMP TABLE said_before AS "
        "SELECT * FROM feedback WHERE created_at >= to_timestamp(?) AND created_at < to_timestamp(?)",
        [experiment.started_at - plan.before_s, experiment.started_at],
    )
    connection.execute(
        f"""
        CREATE OR REPLACE TEMP TABLE before AS
        SELECT tenant, {VOICE} AS who, avg(opinion) AS mean
        FROM ({opinions_sql("said_before", plan.human, plan.kinds, among="earlier")}) JOIN earlier
        USING (tenant, response_id)
        GROUP BY ALL
        """
    )


def _users_before(
    connection: duckdb.DuckDBPyConnection, experiment: Experiment, plan: ExperimentPlan, outcome: str
) -> None:
    """Make ``before``: (tenant, who, mean) of every user of the earlier responses."""
    started = experiment.started_at
    if outcome == "reward":
        measured = f"""
            SELECT tenant, "user", max_by(rewards.reward, scored_at) AS reward
            FROM earlier JOIN rewards USING (response_id)
            WHERE rewards.reward IS NOT NULL AND scored_at < to_timestamp({started!r})
            GROUP BY tenant, "user", response_id
        """
    elif outcome == "session_end":  # of each response whose session had its time before the experiment
        until = f"epoch(completed_at) + {plan.session_s!r}"
        ends = session_ends_sql("earlier", started - plan.before_s, until)
        measured = f"""
            SELECT tenant, "user", session_end FROM earlier JOIN ({ends}) USING (tenant, response_id)
            WHERE {until} < {started!r}
        """
    else:
        measured = f'SELECT tenant, "user", {outcome} FROM earlier'
    connection.execute(
        f"""
        CREATE OR REPLACE TEMP TABLE before AS
        SELECT tenant, "user" AS who, avg({outcome}) AS mean FROM ({measured})
        WHERE "user" IS NOT NULL AND {outcome} IS NOT NULL
        GROUP BY ALL
        """
    )
