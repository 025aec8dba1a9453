"""What a candidate would earn on traffic that another policy answered, before anybody meets it.

Read ``logged_responses`` (which rows of the lake can be used, and why others can't), ``training_reads`` (which of them
a policy or a reward model may have learned from), ``same_tokens`` (whether logged token ids are the candidate's),
``estimate`` (the candidate's log-probabilities of them, the reward model's baseline, the numbers). The statistics are
``evaluation.statistics.off_policy``.
"""
