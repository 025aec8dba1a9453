"""Runs it all: the command ``millrace``, settings, the cycle and its schedule, supervision.

Read ``cli`` (the command line: options, exit codes) and ``commands`` (one file per family), then ``loop`` (the cycle),
``config`` (all settings), ``initialise`` (a new home), ``up`` (server and scheduler together), ``status`` (what a home
does now, and what is wrong), ``doctor`` (whether this machine will do), ``devices`` (which of its GPUs a process has)
and ``server_sleep`` (whose turn it is), ``memory_check`` (whether training and the server fit into its memory),
``low_precision_check`` (whether it can compute in fewer bits), ``supervise`` (child processes), ``monitoring`` (metrics
of the loop, dashboards, alerts), ``notify`` (webhooks), ``console`` (web pages), ``display`` (what commands print, and
the report's data). ``examples`` (demo, proofs, benches) import the product and are never imported by it.
"""
