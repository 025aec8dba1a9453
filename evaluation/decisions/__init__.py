"""Decisions, and what they rest on: an append-only ledger from which every verdict can be computed again.

Read ``observations`` (what one look at a candidate saw, item by item), ``plan`` (by what a candidate is judged,
settled at its first look), ``gate`` (pass, refuse or undecided, look by look), ``over_optimisation`` (what training's
reward and one that it did not see say of the answers), ``bank`` (which items are fresh), ``ledger`` (the file of
decisions, and the evidence beside it), ``history`` (what the ledger says of candidates, items and levels),
``judgement`` (one evaluation: items, answers, scores, verdict, ledger), ``verification`` (all of it recomputed),
``ranking`` (all policies that a judge has compared, on one scale).
"""
