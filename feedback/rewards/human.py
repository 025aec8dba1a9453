"""The reward component ``human``: what users' thumbs say of a response, between 0 (down) and 1 (up).

The last thumb of each source counts, by its time and then by its id; the component is the mean over the sources.
A response without a thumb has no such component. A thumb counts only for a response of its own tenant.
"""

from __future__ import annotations

from typing import Final

NAME: Final = "human"
KINDS: Final = ("thumb",)
"""Feedback of these kinds changes the component, so that it makes scoring look at its response again."""

MISSING: Final = "no vote"


def votes_sql(feedback: str) -> str:
    """SQL for (tenant, response_id, human), one row for each response that has a vote, from a feedback view."""
    return f"""
        SELECT tenant, response_id, avg(value) AS {NAME}
        FROM (
            SELECT tenant, response_id, value
            FROM {feedback}
            WHERE kind = 'thumb' AND value IS NOT NULL
            QUALIFY row_number() OVER (
                PARTITION BY tenant, response_id, source ORDER BY created_at DESC, feedback_id DESC
            ) = 1
        )
        GROUP BY tenant, response_id
    """
