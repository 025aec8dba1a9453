"""What can be concluded from numbers: pure functions, float64, seeded where they draw.

Read ``intervals`` (the bootstrap, Wilson's interval, best of n); ``experiment`` (a candidate on live traffic, with its
``wealth``); ``off_policy`` (a candidate on logged traffic); ``pairwise`` (win rates and Bradley-Terry strengths).
"""
