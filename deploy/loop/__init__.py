"""The loop: ``cycle`` (score, train, evaluate, promote) with ``records``, ``preflight`` (what would fail an hour
later), ``promotion`` (moving the serving pointer), ``wait_for_serving``, ``schedule``, ``lineage`` (what a
policy was trained on).
"""
