"""What all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from deploy.supervise import preloaded

# An example that takes long on a busy machine is no failure; pytest's own time limit stands.
settings.register_profile("millrace", deadline=None)
settings.load_profile("millrace")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The demo first: it takes as long as a third of all, and begun last it would have the other processes wait."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/loop/"))


@pytest.fixture(scope="session", autouse=True)
def forked_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Stages of cycles, trainings and their ranks are forked from one process that has imported what they need."""
    with preloaded.serving(tmp_path_factory.getbasetemp() / "preloaded.log"):
        yield
