"""The commands that ask how good a policy is, and how that was decided.

``harness`` (evaluate --harness), ``environment`` (evaluate --environment), ``estimate`` (estimate), ``suite`` (suite
sample, add, show), ``decisions`` (decisions list, show, verify; power), ``experiment`` (experiment start, show, stop,
look).
"""
