"""Turns what is new in the lake into rewards, one DuckDB batch at a time.

Read ``run`` (one scoring run, from the lake to committed rewards) first, then ``candidates`` (what there is to score),
``scorer`` (the configured sources), ``sources`` (one file per source), ``composition`` (components to one reward),
``aggregation`` (which feedback counts) and ``retry`` (components to ask for again). Its settings are in
``feedback.config``.
"""
