"""A training job that goes on only when it is its turn: used by ``loadtests.bench_train`` on both sides.

The job connects to a Unix socket, reports there the end of each step, and waits for its next turn. This file stands
alone: it is also read by a peer's Python, and as a module of a home.
"""

from __future__ import annotations

import os
import socket
from typing import Any

TURN_TIMEOUT_S = 1800


class Turns:
    """The job's side of the socket that the environment names in ``BENCH_TURNS``."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(TURN_TIMEOUT_S)
        self._socket.connect(os.environ["BENCH_TURNS"])

    def step_ended(self) -> None:
        """Report, and wait for the next turn. Raises ConnectionError when there is none."""
        self._socket.sendall(b"done\n")
        if self._socket.recv(16) != b"go\n":
            raise ConnectionError("the benchmark has ended")


def share_of_letters(responses: list[str]) -> list[float]:
    """A reward that differs from response to response: the share of characters that are small letters."""
    return [sum(c.islower() for c in text) / max(1, len(text)) for text in responses]


def reward(rows: Any) -> list[float]:
    """``share_of_letters`` of a table of responses."""
    return share_of_letters(rows.column("response").to_pylist())
