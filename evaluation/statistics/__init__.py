"""What can be concluded from numbers: pure functions, float64, seeded where they draw.

Read ``betting`` (tests and confidence sequences that hold at every look), ``error_budget`` (the level of each
candidate), ``guardrails`` (what it is measured by), ``verdict`` (pass, refuse, undecided), ``power`` (how many items a
gain needs), ``intervals`` (the bootstrap, Wilson's interval, best of n).
"""
