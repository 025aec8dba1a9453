"""Millrace's own environments.

``single_turn`` (a verdict on one response) with ``maths`` (answers that are equal by symbols), ``json_schema`` (JSON
that a schema allows) and ``unit_tests`` (of Python code); ``tools`` (Python functions that the policy calls). What a
hostile text could make last for ever: ``verifier`` (asks processes of their own for a verdict), ``verifier_worker``
(such a process). Code that nobody trusts: ``sandbox`` (runs it), ``sandbox_init`` (starts it, cut off from this
machine), ``tested_code`` (has it pass a test that is in another process). ``places`` (of either, only so many at once).
"""
