"""What is measured of each response, as SQL over the lake's ``interactions`` and its feedback."""

from __future__ import annotations

from typing import Final

from evaluation.experiments.plan import ExperimentPlan
from feedback.events import ANYBODY

VOICE: Final = f"""CASE source WHEN '{ANYBODY}' THEN coalesce("user", source) ELSE source END"""
"""Who gave an opinion on a response: its source or, where none was named, the request's user."""


def response_columns(plan: ExperimentPlan) -> str:
    """The columns of a response: whose it is, when, and its ``errors``, ``latency_s`` and ``length``.

    What lies beyond the bounds that the plan has for it counts as the bound. What the plan doesn't compare is null: a
    length takes reading all token ids.
    """
    bounds = {outcome.name: outcome.bounds for outcome in plan.outcomes}

    def within(value: str, name: str) -> str:
        if name not in bounds:
            return "NULL::DOUBLE"
        low, high = (repr(float(bound)) for bound in bounds[name])
        return f"CASE WHEN {value} IS NOT NULL THEN greatest({low}::DOUBLE, least({high}::DOUBLE, {value})) END"

    return f"""
        response_id, tenant, "user", session_id, variant, propensity, created_at, completed_at, status,
        (status = 'error')::DOUBLE AS errors,
        {within("timings.total_ms::DOUBLE / 1000", "latency_s")} AS latency_s,
        {within("len(response_token_ids)::DOUBLE", "length")} AS length
    """


def session_ends_sql(responses: str, since: float, until: str) -> str:
    """SQL for (tenant, response_id, session_id, session_end) of the ``responses`` that belong to a session.

    session_end: 1 if the session had no further request by ``until``, SQL for seconds of Unix time, else 0. A request
    is further that came in later, also while the response was still being generated, whoever answered it.
    since: where the interactions begin that can be further ones, in seconds of Unix time.
    """
    return f"""
        SELECT tenant, response_id, session_id, (next_at IS NULL OR epoch(next_at) > {until})::DOUBLE AS session_end
        FROM {responses} JOIN (
            SELECT tenant, response_id, min(created_at) OVER (
                       PARTITION BY tenant, session_id ORDER BY created_at
                       RANGE BETWEEN INTERVAL 1 MICROSECOND FOLLOWING AND UNBOUNDED FOLLOWING
                   ) AS next_at
            FROM interactions SEMI JOIN {responses} USING (tenant, session_id)
            WHERE created_at >= to_timestamp({since!r})
        ) USING (tenant, response_id)
    """
