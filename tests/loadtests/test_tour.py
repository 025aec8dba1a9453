"""That docs/tour.md is of this program: its command is the one that `make tour` runs, and its pictures are there."""

from __future__ import annotations

import re

import pytest

from loadtests.thumbs import OPTIONS
from loadtests.tour import BLOCK, PAGE, command_of, told, written


def test_the_page_has_the_command_that_the_tour_runs_and_no_empty_block() -> None:
    blocks = {found[1]: found[0] for found in BLOCK.finditer(PAGE.read_text())}
    assert command_of(OPTIONS) in blocks["command"], "make tour ARGS=--write-docs writes the page anew"
    assert not [name for name, text in blocks.items() if text.count("\n") < 2]


def test_every_picture_is_on_the_page_and_they_are_small() -> None:
    there = {path.name: path.stat().st_size for path in PAGE.with_suffix("").iterdir()}
    shown = dict(re.findall(r"!\[([^\]]+)\]\(tour/([^)]+)\)", PAGE.read_text()))
    assert sorted(shown.values()) == sorted(there)
    assert sum(there.values()) < 1_500_000


def test_blocks_are_filled_anew_as_a_reader_has_them() -> None:
    page = "a\n<!-- make tour: one -->\nold\n<!-- end -->\nb\n<!-- make tour: two -->\n<!-- end -->\n"
    found = written(page, {"one": "at /home/me/x:1234", "two": "2"}, {"/home/me": "…", ":1234": ":8000"})
    assert (
        found == "a\n<!-- make tour: one -->\nat …/x:8000\n<!-- end -->\nb\n<!-- make tour: two -->\n2\n<!-- end -->\n"
    )
    assert written(found, {"one": "1", "two": "2"}, {}).count("<!-- end -->") == 2
    with pytest.raises(SystemExit, match="the page has the blocks one, two, and there are one"):
        written(page, {"one": "1"}, {})


def test_of_the_log_what_a_person_needs_is_told_up_to_the_promotion() -> None:
    log = [
        "      up | made …/home: policy 1 is ./model",
        "   serve | 2026-11-25 12:05:08 INFO ready",
        "      up | serving on http://127.0.0.1:8000",
        "schedule | cycle 1: train …",
        "schedule | cycle-000001: step 1/10 reward 0.4",
        "schedule | cycle-000001: step 5/10 reward 0.5",
        "schedule | cycle-000001: step 10/10 reward 0.9",
        "schedule | cycle 1: train took 1.0 s",
        "schedule | gate: pass: better",
        "schedule | cycle 1: promoted policy 2 (before: 1)",
        "schedule | cycle 1: promoted",
        "schedule | cycle 2: skipped: too little",
        "      up | stopping serve",
    ]
    up, loop = told(log)
    assert up.splitlines() == [log[0].strip(), log[2].strip()]
    assert loop.splitlines() == [log[4], log[6], log[8], log[9]]
