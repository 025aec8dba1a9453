"""Other people's harnesses on a policy: ``run`` (what one is asked, and its environment), ``lm_eval`` (how EleutherAI's
is called, and what it writes), ``inspect`` (that of the UK AI Security Institute, likewise), ``results`` (what is kept
of a run). A harness runs unchanged, in an environment of its own.
"""
