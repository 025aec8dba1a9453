"""Turns what is new in the lake into rewards, one DuckDB batch at a time.

Read ``run`` first, then ``candidates`` (what there is to score), ``scorer`` (the configured sources), ``sources`` (one
file per source), ``composition`` (components to one reward), ``aggregation`` (which feedback counts) and ``retry``. Its
settings are in ``feedback.config``.
"""
