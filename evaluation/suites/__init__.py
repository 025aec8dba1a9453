"""Held-out suites: ``suite`` (items), ``answers`` (what a policy answered, cached), ``text_metrics`` (of responses)."""
