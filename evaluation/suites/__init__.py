"""Held-out suites: ``suite`` (items), ``held_out`` (which prompts nothing is learned from), ``sampling`` (a suite from
traffic), ``answers`` (what a policy answered, cached), ``text_metrics`` (of responses: distinct n-grams, KL).
"""
