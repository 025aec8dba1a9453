"""A Ray on this machine that belongs to the process that starts it: ``cluster``, and ``reaper`` for when its owner is
killed.
"""
