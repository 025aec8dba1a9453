"""The queries of ``feedback.lake.statistics``, over the lake's views.

They begin with temporary tables of the few columns that they share: ``responses``, ``streams`` and ``scored``.
"""

from __future__ import annotations

from typing import Final

from feedback.journal.streams import STARTED

RESPONSES: Final = """
CREATE TEMP TABLE responses AS
SELECT tenant, response_id, completed_at, status = 'complete' AS complete, policy_spans[-1].policy_version AS policy
FROM interactions
"""

STREAMS: Final = f"""
CREATE TEMP TABLE streams AS
SELECT DISTINCT tenant, response_id FROM unsealed_interactions WHERE status = '{STARTED}'
EXCEPT SELECT tenant, response_id FROM responses
"""

NO_STREAMS: Final = "CREATE TEMP TABLE streams (tenant VARCHAR, response_id VARCHAR)"

KINDS: Final = """
SELECT kind, count(DISTINCT (tenant, feedback_id)), count(DISTINCT response_id) FILTER (complete)
FROM feedback LEFT JOIN responses USING (tenant, response_id)
GROUP BY kind
"""

FEEDBACK_RATE: Final = """
SELECT (SELECT count(*) FROM responses WHERE complete),
       (SELECT count(*) FROM responses SEMI JOIN feedback USING (tenant, response_id) WHERE complete)
"""

SCORED: Final = """
CREATE TEMP TABLE scored AS
SELECT policy, reward, components
FROM current_rewards JOIN responses USING (response_id)
WHERE complete
"""

REWARDS: Final = """
SELECT policy, count(*), count(reward), avg(reward), stddev_samp(reward)
FROM scored
GROUP BY policy
ORDER BY policy
"""

REWARD_QUANTILES: Final = """
SELECT policy, {quantiles}
FROM (
    SELECT policy, reward AS value,
           sum(n) OVER (PARTITION BY policy ORDER BY reward) AS upto, sum(n) OVER (PARTITION BY policy) AS total
    FROM (SELECT policy, reward, count(*) AS n FROM scored WHERE reward IS NOT NULL GROUP BY policy, reward)
)
GROUP BY policy
"""

COMPONENTS: Final = """
SELECT policy, component.key, count(*), avg(component.value)
FROM (SELECT policy, unnest(map_entries(components)) AS component FROM scored)
GROUP BY policy, component.key
ORDER BY policy, component.key
"""

LAG: Final = """
SELECT max(total), {quantiles}
FROM (
    SELECT lag AS value, sum(n) OVER (ORDER BY lag) AS upto, sum(n) OVER () AS total
    FROM (
        SELECT first - epoch_us(completed_at) AS lag, count(*) AS n
        FROM (SELECT response_id, epoch_us(min(scored_at)) AS first FROM rewards GROUP BY response_id)
        JOIN responses USING (response_id)
        WHERE complete
        GROUP BY lag
    )
)
"""

UNSCORED: Final = """
SELECT count(*)
FROM responses ANTI JOIN (SELECT response_id FROM rewards WHERE scorer = ?) USING (response_id)
WHERE complete
"""

# Feedback that two servers took under one id is twice in their journals, until it is sealed.
ORPHANS: Final = """
CREATE TEMP VIEW orphans AS
SELECT DISTINCT ON (tenant, feedback_id, response_id) feedback_id, response_id, tenant, kind, created_at
FROM (
    SELECT feedback_id, tenant, kind, created_at, response_id FROM feedback
    UNION ALL
    SELECT feedback_id, tenant, kind, created_at, rejected_response_id FROM feedback
    WHERE rejected_response_id IS NOT NULL
)
ANTI JOIN (SELECT tenant, response_id FROM responses UNION ALL FROM streams) USING (tenant, response_id)
"""


def quantiles(shares: tuple[float, ...]) -> str:
    """SQL for quantiles by nearest rank, of ``value`` with ``upto`` of ``total`` values at most as great."""
    return ", ".join(f"min(value) FILTER (upto >= {share!r} * total)" for share in shares)
