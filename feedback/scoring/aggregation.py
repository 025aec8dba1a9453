"""What people's feedback comes to, as SQL over the lake's views: votes, preferences and corrections, each resolved.

One rule for all. Feedback counts for a response of its own tenant that is complete or imported. Of one source's
feedback on the same thing the last counts, by time and then by id; over sources the majority decides, and a tie decides
nothing. Feedback that was recorded twice under one id, by two servers at once, counts once: what was recorded first.
Feedback on a session counts for the last response that it had by then.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import duckdb

from feedback.schema import IMPORTED

UNKNOWN: Final = "on an unknown response"
FOREIGN: Final = "on a response of another tenant"
INCOMPLETE: Final = "on a response that is not complete"
REDACTED: Final = "on a redacted response or prompt"
TIE: Final = "tie"
PROMPTS_DIFFER: Final = "prompts differ"
SAME_TEXT: Final = "both texts are the same"
OVER_CAP: Final = "over the cap of their prompt"

_SAID: Final = """
CREATE TEMP TABLE entries AS
SELECT * FROM feedback
WHERE kind IN ({kinds}) AND feedback_id NOT LIKE '%~turn:%~%'
QUALIFY row_number() OVER (
    PARTITION BY tenant, feedback_id
    ORDER BY created_at, response_id, kind, source, value, text, rejected_response_id
) = 1
"""

_MENTIONED: Final = f"""
CREATE TEMP TABLE mentioned AS
SELECT tenant, response_id, status IN ('complete', '{IMPORTED}') AND len(prompt_token_ids) > 0 AS usable,
       prompt_token_ids, response, status = 'redacted' AS redacted
FROM interactions
SEMI JOIN (
    SELECT response_id FROM entries
    UNION SELECT rejected_response_id FROM entries WHERE rejected_response_id IS NOT NULL
) USING (response_id)
"""

_JUDGED: Final = f"""
CREATE TEMP TABLE judged AS
WITH known AS (SELECT DISTINCT response_id FROM mentioned)
SELECT entries.*, CASE
    WHEN known.response_id IS NULL OR (rejected_response_id IS NOT NULL AND known_rejected.response_id IS NULL)
    THEN '{UNKNOWN}'
    WHEN own.usable IS NULL OR (rejected_response_id IS NOT NULL AND rejected.usable IS NULL) THEN '{FOREIGN}'
    WHEN own.redacted OR coalesce(rejected.redacted, false) THEN '{REDACTED}'
    WHEN NOT own.usable OR NOT coalesce(rejected.usable, true) THEN '{INCOMPLETE}'
END AS left_out,
    own.prompt_token_ids = rejected.prompt_token_ids AS same_prompt,
    own.response = if(kind = 'correction', text, rejected.response) AS same_text
FROM entries
LEFT JOIN known ON known.response_id = entries.response_id
LEFT JOIN known known_rejected ON known_rejected.response_id = entries.rejected_response_id
LEFT JOIN mentioned own ON own.tenant = entries.tenant AND own.response_id = entries.response_id
LEFT JOIN mentioned rejected ON rejected.tenant = entries.tenant AND rejected.response_id = entries.rejected_response_id
"""

_RESOLVED: Final = {
    "thumb": """
        CREATE TEMP TABLE thumbs AS
        SELECT tenant, response_id, count(*) FILTER (value > 0.5) AS up, count(*) FILTER (value <= 0.5) AS down,
               max(created_at) AS voted_at
        FROM (
            SELECT * FROM judged
            WHERE kind = 'thumb' AND left_out IS NULL AND value IS NOT NULL
            QUALIFY row_number() OVER (
                PARTITION BY tenant, response_id, source ORDER BY created_at DESC, feedback_id DESC
            ) = 1
        )
        GROUP BY tenant, response_id
    """,
    "preference": """
        CREATE TEMP TABLE preferences AS
        WITH votes AS (
            SELECT tenant, same_prompt, same_text, response_id AS chosen, feedback_id, created_at,
                   least(response_id, rejected_response_id) AS low, greatest(response_id, rejected_response_id) AS high
            FROM judged
            WHERE kind = 'preference' AND left_out IS NULL
            QUALIFY row_number() OVER (
                PARTITION BY tenant, source, low, high ORDER BY created_at DESC, feedback_id DESC
            ) = 1
        ), choices AS (
            SELECT tenant, same_prompt, same_text, low, high, chosen, count(*) AS votes,
                   max({'created_at': created_at, 'feedback_id': feedback_id}) AS last
            FROM votes
            GROUP BY tenant, same_prompt, same_text, low, high, chosen
        )
        SELECT tenant, same_prompt, same_text, chosen, if(chosen = low, high, low) AS rejected,
               last.feedback_id, last.created_at,
               coalesce(votes = lead(votes) OVER pair, false) AS tied
        FROM choices
        WINDOW pair AS (PARTITION BY tenant, low, high ORDER BY votes DESC, chosen)
        QUALIFY row_number() OVER pair = 1
    """,
    "correction": """
        CREATE TEMP TABLE corrections AS
        SELECT tenant, response_id, text, source, feedback_id, created_at, same_text
        FROM (
            SELECT * FROM judged
            WHERE kind = 'correction' AND left_out IS NULL AND text IS NOT NULL
            QUALIFY row_number() OVER (
                PARTITION BY tenant, response_id, source ORDER BY created_at DESC, feedback_id DESC
            ) = 1
        )
        QUALIFY row_number() OVER (PARTITION BY tenant, response_id, text ORDER BY created_at, feedback_id) = 1
    """,
}


# Of n up and m down there are n * m pairs. The newest few of each are matched along the diagonals, so that as many
# different responses as can be take part before one comes again.
_PAIRS_OF_THUMBS: Final = """
CREATE TEMP TABLE pairs_of_thumbs AS
WITH voted AS (
    SELECT tenant, response_id, up > down AS good, voted_at, created_at, prompt_token_ids, response
    FROM thumbs JOIN interactions USING (tenant, response_id)
    WHERE up <> down
), ranked AS (
    SELECT *, row_number() OVER side AS place, count(*) OVER (PARTITION BY tenant, prompt_token_ids, good) AS many
    FROM voted
    WINDOW side AS (PARTITION BY tenant, prompt_token_ids, good ORDER BY created_at DESC, response_id DESC)
), matched AS (
    SELECT tenant, prompt_token_ids, chosen.response_id AS chosen, rejected.response_id AS rejected,
           greatest(chosen.voted_at, rejected.voted_at) AS created_at, chosen.response = rejected.response AS same_text,
           chosen.many * rejected.many AS possible, chosen.place AS place,
           (rejected.place - chosen.place + greatest(chosen.many, rejected.many))
               % greatest(chosen.many, rejected.many) AS diagonal
    FROM (FROM ranked WHERE good AND place <= {cap}) chosen
    JOIN (FROM ranked WHERE NOT good AND place <= {cap}) rejected USING (tenant, prompt_token_ids)
)
SELECT tenant, chosen, rejected, created_at, same_text, possible,
       row_number() OVER (PARTITION BY tenant, prompt_token_ids, same_text ORDER BY diagonal, place) AS number,
       row_number() OVER (PARTITION BY tenant, prompt_token_ids ORDER BY diagonal, place) = 1 AS is_first
FROM matched
"""

_PAIRS: Final = """
CREATE TEMP TABLE pairs AS
SELECT 'preference' AS kind, tenant, feedback_id, chosen AS chosen_id, rejected AS rejected_id, NULL AS text, created_at
FROM preferences
WHERE same_prompt AND NOT same_text AND NOT tied
UNION ALL
SELECT 'correction', tenant, feedback_id, NULL, response_id, text, created_at
FROM corrections
WHERE NOT same_text
UNION ALL
SELECT 'thumbs', tenant, NULL, chosen, rejected, NULL, created_at
FROM pairs_of_thumbs
WHERE NOT same_text AND number <= {cap}
"""

_PAIRS_LEFT_OUT: Final = """
SELECT
    (SELECT count(*) FROM preferences WHERE NOT same_prompt),
    (SELECT count(*) FROM preferences WHERE same_prompt AND NOT same_text AND tied),
    (SELECT count(*) FROM preferences WHERE same_prompt AND same_text)
        + (SELECT count(*) FROM corrections WHERE same_text) + (SELECT count(*) FROM pairs_of_thumbs WHERE same_text),
    (SELECT coalesce(sum(possible) FILTER (is_first), 0) - count(*) FILTER (same_text) FROM pairs_of_thumbs)
        - (SELECT count(*) FROM pairs WHERE kind = 'thumbs')
"""


def resolve(connection: duckdb.DuckDBPyConnection, kinds: Iterable[str]) -> dict[str, int]:
    """Make the temporary tables of these kinds; returns how many feedbacks count for nothing, by reason.

    ``thumbs``: tenant, response_id, up, down (votes, one a source), voted_at.
    ``preferences``: tenant, chosen, rejected, feedback_id and created_at of the last one, tied, same_prompt;
    one row for two responses, whichever way round.
    ``corrections``: tenant, response_id, text, source, feedback_id, created_at; each text once.
    """
    kinds = list(kinds)
    connection.execute(_SAID.format(kinds=", ".join(f"'{kind}'" for kind in kinds)))
    connection.execute(_MENTIONED)
    connection.execute(_JUDGED)
    for kind in kinds:
        connection.execute(_RESOLVED[kind])
    left_out = dict.fromkeys((UNKNOWN, FOREIGN, INCOMPLETE), 0)
    counted = connection.execute("SELECT left_out, count(*) FROM judged WHERE left_out IS NOT NULL GROUP BY left_out")
    return left_out | dict(counted.fetchall())


def make_pairs(connection: duckdb.DuckDBPyConnection, thumb_pairs_per_prompt: int) -> dict[str, int]:
    """Make the temporary table ``pairs`` from those of ``resolve``; returns how many pairs it leaves out, by reason.

    ``pairs``: kind (preference, correction, thumbs), tenant, feedback_id, chosen_id and rejected_id (of responses),
    text (in place of a chosen response), created_at.
    """
    cap = thumb_pairs_per_prompt
    connection.execute(_PAIRS_OF_THUMBS.format(cap=max(cap, 1)))  # also where none is wanted, to count them
    connection.execute(_PAIRS.format(cap=cap))
    [counted] = connection.execute(_PAIRS_LEFT_OUT).fetchall()
    return dict(zip((PROMPTS_DIFFER, TIE, SAME_TEXT, OVER_CAP), map(int, counted), strict=True))
