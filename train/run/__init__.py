"""What a run leaves: ``publish`` (a policy), ``reward_folder`` (a reward model), ``unfinished`` (runs that were
killed), ``erasures`` (rows that were erased while it trained).
"""
