"""Shadow mode: a candidate answers a copy of a share of requests, is scored and never shown.

Read ``run`` (requests are drawn, answered, scored and compared until it is known what they show), ``requests`` (which
requests are drawn from traffic, and why others can't be answered again), ``kept`` (the candidate's responses, outside
the lake, gone with their requests), ``comparison`` (pairs of responses, and whether they show harm; pure),
``verification`` (the ledger's shadows recomputed).

Who acts on what a shadow shows is `deploy.loop.shadows`.
"""
