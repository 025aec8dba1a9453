"""What all tests share."""

from __future__ import annotations

import pytest
from hypothesis import settings

# An example that takes long on a busy machine is no failure; pytest's own time limit stands.
settings.register_profile("millrace", deadline=None)
settings.load_profile("millrace")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The demo first: it takes as long as a third of all, and begun last it would have the other processes wait."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/loop/"))
