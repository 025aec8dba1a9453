"""Held-out suites: ``suite`` (items), ``held_out`` (what nothing is learned from), ``sampling`` (a suite from traffic),
``answers`` (what a policy answered, cached), ``text_metrics`` (of responses).
"""
