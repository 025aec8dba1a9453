"""Held-out suites: ``suite`` (items), ``held_out`` (which prompts nothing is learned from), ``sampling`` (a suite from
traffic), ``decoding`` (by which sampling parameters items are answered), ``answers`` (what a policy answered, cached),
``latency`` (how long a token takes), ``text_metrics`` (of responses: distinct n-grams, KL).
"""
