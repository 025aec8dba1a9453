"""What all tests share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest
from hypothesis import settings

from deploy.supervise import preloaded

# An example that takes long on a busy machine is no failure; pytest's own time limit stands.
settings.register_profile("millrace", deadline=None)
settings.load_profile("millrace")


LONGEST: Final = (
    "tests/loop/",
    "tests/train/model/test_tensor_parallel.py",
    "tests/train/environments/test_environment_jobs.py",
    "tests/deploy/supervise/test_resident.py",
    "tests/deploy/loop/test_experiments.py",
    "tests/deploy/supervise/test_stopping_training.py",
    "tests/deploy/loop/test_cycle.py",
    "tests/train/planner/test_fit.py",
    "tests/train/run/recovery/test_erased_runs.py",
    "tests/train/planner/test_plan_choice.py",
    "tests/train/run/recovery/test_resume.py",
    "tests/train/weight_sync/test_weight_sync.py",
    "tests/train/run/recovery/test_restarts.py",
    "tests/deploy/supervise/test_children.py",
    "tests/deploy/loop/test_fleet_experiments.py",
    "tests/deploy/loop/test_undecided.py",
)
"""Files, and a folder, in the order in which they begin: begun last, one of them would have the other processes wait.

None needs what its folder's tests share for the session, some of which stop it at their end.
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        return next((i for i, name in enumerate(LONGEST) if item.nodeid.startswith(name)), len(LONGEST))

    items.sort(key=place)


@pytest.fixture(scope="session", autouse=True)
def forked_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Stages of cycles, trainings and their ranks are forked from one process that has imported what they need."""
    with preloaded.serving(tmp_path_factory.getbasetemp() / "preloaded.log"):
        yield
