"""Pure functions that algorithms are made of: ``advantages`` (how much better than expected: group, leave-one-out,
GAE), ``losses`` (ratios, clipping, means over tokens), ``kl`` (its estimators, and the control of its weight),
``corrections`` (off-policy: weights for what another policy sampled), ``shaping`` (of rewards, by length), ``values``
(what a critic learns), ``preferences`` (pairs of a better and a worse response). Formulas from a paper name it.
"""
