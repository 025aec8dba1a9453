"""What a run learns from.

Of responses: ``prompts`` (what each step draws: prompts and logged responses), ``logged`` (the latter, and the sessions
that they belong to), ``own_prompts`` (prompts of your own, from files), ``pass_rates`` (how often earlier runs have
solved them), ``curriculum`` (which prompts are drawn, by how often this run has), ``rewards`` (what rewards fresh
responses), ``teacher`` (a larger policy that does), ``samples`` (fresh responses with their rewards, and which of them
are learned from), ``episodes`` (the same of rollouts of several turns), ``episode_rollouts`` (an episode as a rollout).

Of feedback: ``feedback_items`` (feedback as token ids), ``demonstrations`` (what people wrote in place of a response).
What nothing is learned from is in ``evaluation.suites.held_out``.
"""
