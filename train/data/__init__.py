"""What a run learns from: ``prompts`` and ``samples`` (responses and their rewards), ``feedback_items`` and
``demonstrations`` (offline), ``rewards`` (of fresh responses), ``held_out`` (what nothing is learned from).
"""
