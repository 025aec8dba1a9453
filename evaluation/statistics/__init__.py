"""What can be concluded from numbers: pure functions, float64, seeded where they draw.

Of a suite's items: read ``betting`` (tests and confidence sequences that hold at every look), ``error_budget`` (the
level of each candidate), ``guardrails`` (what it is measured by), ``verdict`` (pass, refuse, undecided), ``power`` (how
many items a gain needs), ``intervals`` (the bootstrap, Wilson's interval, best of n). Of traffic and judges:
``experiment`` (a candidate on live traffic) with ``wealth`` (betting where each row has its own bounds), ``off_policy``
(a candidate on logged traffic), ``pairwise`` (win rates and Bradley-Terry strengths). Of people: ``agreement`` (how far
they judge alike).

`evaluation.decisions` decides by what is of items, `evaluation.experiments` by ``experiment``, `evaluation.estimation`
reports ``off_policy``; ``intervals`` are pictures.
"""
