"""The proof that the algorithms learn: each of them, from one seed policy, on a task of a minute or two.

Read ``__main__`` (runs them all, and prints what came of it), ``plans`` (what each is trained with), ``trial`` (one
algorithm, trained and measured), ``home`` (what the trials share) with ``task`` (what is learned), ``seed`` (trains the
seed policy), ``traffic`` (simulated users). Rewards that no rule gives: ``judge`` (a small model as judge), ``people``
(a model of thumbs or choices) with ``pairs`` (how well it orders answers). ``experiment`` (off-policy, with correction
and without).
"""
