"""Sealing in the background, in a process of its own.

Sealing takes a core for a moment at every turn; beside a server's event loop that would be felt by every request that
waits for the journal. The child seals at a steady pace and reports each turn to its parent as a line of JSON; it ends
when its parent's end of the pipe is closed, however the parent ended. A child that dies is started again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import IO

import pyarrow as pa
from deltalake.exceptions import DeltaError

from feedback.config import LakeConfig
from feedback.files import LockTimeoutError
from feedback.ingest.deduplication import take_counts
from feedback.ingest.seal import seal
from feedback.lake.tables import Lake, LakeError
from feedback.processes.signals import stop_signals_blocked
from feedback.settings_base import IN_CLEAR

log = logging.getLogger(__name__)

_NICENESS = 10  # the server goes first
_PARENT_CHECK_S = 1.0
_RESTART_DELAY_S = 1.0


class Sealer:
    """Seals a journal every ``LakeConfig.seal_seconds`` while it is written."""

    def __init__(self, lake: Lake, journal_folder: Path) -> None:
        self.lake = lake
        self.journal_folder = journal_folder
        self.error: str | None = "not started"
        """Why the last turn failed; None if it did not. Rows are safe in the journal either way."""
        self.sealed_segments = 0
        self.left_out: Counter[str] = Counter()
        """Feedback rows that were not sealed because the lake had their ids, by the reason."""
        self._stop = threading.Event()
        self._child: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None

    @property
    def healthy(self) -> bool:
        """Whether the process lives and its last turn succeeded."""
        return self._child is not None and self._child.poll() is None and self.error is None

    def start(self) -> None:
        """Start the process. Raises OSError if that can't be done."""
        self._child = self._spawn()
        self._thread = threading.Thread(target=self._follow, name="sealer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the process after its turn, and seal what is closed. Close the journal before.

        Raises what ``seal`` raises, and LockTimeoutError for a turn that does not end.
        """
        self._stop.set()
        if self._child is not None and self._child.stdin is not None:
            with contextlib.suppress(OSError):  # it has died already
                self._child.stdin.close()
        if self._thread is not None:
            self._thread.join(self.lake.config.lock_timeout_s)
            if self._thread.is_alive():
                raise LockTimeoutError(f"the sealer did not end in {self.lake.config.lock_timeout_s:g} s")
        self.sealed_segments += len(seal(self.lake, self.journal_folder))

    def stats(self) -> dict[str, float]:
        """Gauges for monitoring."""
        return {
            "healthy": float(self.healthy),
            "sealed_segments": self.sealed_segments,
            "repeated_feedback": self.left_out["repeated_feedback"],
            "conflicting_feedback": self.left_out["conflicting_feedback"],
        }

    def _spawn(self) -> subprocess.Popen[str]:
        with stop_signals_blocked():  # the parent handles them, and then ends it in order
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", "feedback.ingest.sealer_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        config = self.lake.config.model_dump(mode="json", context=IN_CLEAR)
        task = {"uri": self.lake.uri, "config": config, "journal": str(self.journal_folder), "parent": os.getpid()}
        assert child.stdin is not None
        try:
            child.stdin.write(json.dumps(task) + "\n")
            child.stdin.flush()
        except BrokenPipeError:  # it died at once; _follow reports it, and starts another
            log.error("the sealer died before it began")
        return child

    def _follow(self) -> None:
        while True:
            assert self._child is not None
            self._listen(self._child)
            code = self._child.wait()
            if self._stop.is_set():
                return
            self.error = f"the sealer's process ended with code {code}"
            log.error("%s; starting another", self.error)
            while True:
                if self._stop.wait(_RESTART_DELAY_S):
                    return
                try:
                    self._child = self._spawn()
                    break
                except OSError as error:
                    log.error("the sealer can't be started: %s", error)

    def _listen(self, child: subprocess.Popen[str]) -> None:
        assert child.stdout is not None
        with child.stdout as lines:
            for line in lines:
                turn = json.loads(line)
                self.sealed_segments += turn["sealed"]
                self.left_out.update(turn["left_out"])
                if turn["error"] and turn["error"] != self.error:
                    log.error("can't seal %s into %s: %s", self.journal_folder, self.lake.uri, turn["error"])
                self.error = turn["error"]


def main(task: IO[str] = sys.stdin, reports: IO[str] = sys.stdout) -> None:
    """The child: a task as one line of JSON, then turns until the pipe or the parent ends."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    os.nice(_NICENESS)
    task_fields = json.loads(task.readline())
    lake = Lake(task_fields["uri"], LakeConfig.model_validate(task_fields["config"]))
    while not _parent_ended(task, task_fields["parent"], lake.config.seal_seconds):
        sealed, error = 0, None
        try:
            sealed = len(seal(lake, Path(task_fields["journal"])))
        except (LakeError, LockTimeoutError, OSError, DeltaError, pa.ArrowException) as failure:
            # The rows stay in the journal, and the next turn tries again.
            error = lake.config.redact(f"{type(failure).__name__}: {failure}")
        turn = {"sealed": sealed, "error": error, "left_out": take_counts()}
        print(json.dumps(turn), file=reports, flush=True)


def _parent_ended(task: IO[str], parent: int, seconds: float) -> bool:
    """Wait for the next turn; whether the parent closed the pipe or died meanwhile."""
    rest = seconds
    while rest > 0:
        wait = min(rest, _PARENT_CHECK_S)
        if select.select([task], [], [], wait)[0] or os.getppid() != parent:
            return True
        rest -= wait
    return False


if __name__ == "__main__":
    main()
