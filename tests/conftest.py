"""What all tests share."""

from __future__ import annotations

from hypothesis import settings

# An example that takes long on a busy machine is no failure; pytest's own time limit stands.
settings.register_profile("millrace", deadline=None)
settings.load_profile("millrace")
