"""What can be concluded from numbers: pure functions, float64, seeded where they draw.

Read ``intervals`` (the bootstrap, Wilson's interval, best of n).
"""
