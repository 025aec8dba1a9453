"""What a run learns from.

Of responses: ``prompts`` (what each step draws: prompts and logged responses), ``traffic`` (logged responses, and why
others are left out), ``own_prompts`` (prompts of your own, from files), ``pass_rates`` (how often earlier runs have
solved them), ``rewards`` (what rewards fresh responses), ``samples`` (fresh responses with their rewards, and which of
them are learned from). Of feedback: ``feedback_items`` (feedback as token ids), ``demonstrations`` (what people wrote
in place of a response). What nothing is learned from is in ``evaluation.suites.held_out``.
"""
