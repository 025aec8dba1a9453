"""Pure functions that algorithms are made of: ``advantages``, ``losses``, ``kl``, ``corrections`` (off-policy),
``shaping`` (of rewards), ``values`` (critics), ``preferences`` (pairs). Each names its paper.
"""
