"""What a run learns from: ``prompts`` (what each step draws) with ``traffic`` (logged responses),
``rewards`` and ``samples`` (fresh responses), ``feedback_items`` and ``demonstrations`` (offline), ``held_out``
(what nothing is learned from).
"""
