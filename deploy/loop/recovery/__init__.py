"""What the next cycle does about one that was cut off.

``killed_runs`` (what it goes on with where one was killed), ``other_machines`` (and where its machine was lost).
"""
