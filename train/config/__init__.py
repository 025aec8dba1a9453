"""Settings of training. Imports no torch, so that they are checked before anything is loaded.

``training`` (all of them, and which work together) with ``sections``, ``algorithms`` and ``placement``;
``context_length`` is needed before a cycle begins.
"""
