"""What became of each promotion, by the moves of a real pointer."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.display.fates import fates
from serve.policies.pointer import ServingPointer


class AnyVersion(ServingPointer):
    def require_servable(self, version: int) -> None:
        """All are."""


@pytest.fixture
def pointer(tmp_path: Path) -> ServingPointer:
    return AnyVersion(tmp_path)


def promote(pointer: ServingPointer, version: int, *, served: bool | None = True, **verdict: object) -> None:
    move = pointer.promote(version, expected=pointer.serving(), who="a@b", why="test", verdict=verdict or None)
    if served is not None:
        pointer.record_outcome(move, served=served, by="replica-0")


def became(pointer: ServingPointer) -> list[tuple[int, str]]:
    return [(move.version, move.fate) for move in fates(pointer.history(), pointer.outcomes())]


def test_a_policy_is_replaced_and_the_next_one_serves(pointer: ServingPointer) -> None:
    promote(pointer, 1)
    promote(pointer, 2, verdict="pass")
    assert became(pointer) == [(1, "replaced"), (2, "serves")]


def test_a_promotion_that_was_rolled_back_says_by_whom_and_why(pointer: ServingPointer) -> None:
    promote(pointer, 1)
    promote(pointer, 2, verdict="pass")
    promote(pointer, 1, rollback_from=2, experiment=3)
    rows = fates(pointer.history(), pointer.outcomes())
    assert became(pointer) == [(1, "replaced"), (2, "rolled back"), (1, "serves")]
    assert (rows[1].after, rows[1].then, rows[2].back, rows[2].experiment) == (1, "a@b: test", True, 3)


def test_what_a_server_refused_was_not_rolled_back_by_anybody(pointer: ServingPointer) -> None:
    promote(pointer, 1)
    promote(pointer, 2, served=None)
    refused = pointer.serving()
    assert refused is not None
    pointer.move_back(refused, 1, who="replica-0", why="bad hash")
    assert became(pointer) == [(1, "replaced"), (2, "refused by the server"), (1, "not served yet")]


def test_one_server_of_several_that_refuses_is_enough(pointer: ServingPointer) -> None:
    promote(pointer, 1)
    current = pointer.serving()
    assert current is not None
    pointer.record_outcome(current, served=False, by="replica-1")
    assert became(pointer) == [(1, "refused by the server")]


def test_an_override_says_what_it_overrode(pointer: ServingPointer) -> None:
    promote(pointer, 1)
    promote(pointer, 2, verdict="refuse", override=True, objection="it did not pass")
    (_, row) = fates(pointer.history(), pointer.outcomes())
    assert (row.override, row.objection, row.fate) == (True, "it did not pass", "serves")


def test_without_a_server_s_word_nothing_has_served(pointer: ServingPointer) -> None:
    promote(pointer, 1, served=None)
    promote(pointer, 2, served=None)
    promote(pointer, 2, served=None)
    assert became(pointer) == [(1, "never served"), (2, "tried again"), (2, "not served yet")]
