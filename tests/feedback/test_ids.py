from __future__ import annotations

import threading
import time
import uuid

from feedback import ids
from feedback.ids import uuid7


def test_an_id_is_a_uuid_of_version_7_with_the_present_time():
    before = time.time_ns() // 1_000_000
    made = uuid.UUID(uuid7())
    assert made.version == 7
    assert made.variant == uuid.RFC_4122
    assert before - 1 <= made.int >> 80 <= time.time_ns() // 1_000_000 + 1


def test_ids_grow_across_threads_and_never_repeat():
    made: list[list[str]] = [[] for _ in range(4)]

    def work(mine: list[str]) -> None:
        mine.extend(uuid7() for _ in range(2000))

    threads = [threading.Thread(target=work, args=(mine,)) for mine in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(mine == sorted(mine) for mine in made)
    assert len({identifier for mine in made for identifier in mine}) == 8000


def test_ids_grow_when_the_clock_is_set_back(monkeypatch):
    first = uuid7()
    monkeypatch.setattr(ids.time, "time_ns", lambda: 1_000_000_000)
    assert uuid7() > first
