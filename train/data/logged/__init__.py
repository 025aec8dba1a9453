"""Logged responses that are learned from.

``traffic`` (those of the lake, and why others are left out), ``sessions`` (which of them are one conversation),
``spool`` (where the tokens of those that a run draws lie).
"""
