"""Child processes: ``children`` (starts, follows and stops them), ``preloaded`` (has imported what stages of a cycle
need, and is what they are forked from), ``resident`` (owns workers that stay between cycles), ``subreaper`` (leaves
nothing of them behind).
"""
