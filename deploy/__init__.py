"""Runs it all: the command ``millrace``, settings, the cycle and its schedule, supervision.

Read ``cli`` and ``commands``, then ``loop`` (the cycle), ``config`` (all settings), ``up`` (server and scheduler
together), ``supervise`` (child processes), ``display`` (what commands print). ``examples`` import the product and are
never imported by it.
"""
