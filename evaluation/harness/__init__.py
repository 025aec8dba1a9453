"""Other people's harnesses on a policy: ``run`` (what one is asked, and its environment), ``lm_eval`` and ``inspect``
(each one's command line and result files), ``results`` (what is kept of a run). A harness runs unchanged, in an
environment of its own.
"""
