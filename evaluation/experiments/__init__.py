"""Experiments on live traffic: what an experiment has shown, from the rows of the lake alone.

Read ``plan`` (by what one is decided, settled at its start), ``blocks`` (the rows of its blocks of time, or users, from
traffic and feedback) with ``measures`` (what is measured of a response) and ``earlier`` (what the people of a block did
before the experiment), ``looks`` (one look: commit, hold or roll back), ``verification`` (the ledger's experiments
recomputed).

Which policy has which block or user is `serve.policies.experiments`; who acts on a look is `deploy.loop.experiments`.
"""
