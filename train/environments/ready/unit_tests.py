"""Python code that has to pass unit tests, in a sandbox.

The code and a test run in two processes (``tested_code``). The code's knows neither the test nor how it does, and the
verdict is how the test's process ends.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any, Final

from train.environments.ready import sandbox, tested_code
from train.environments.ready.places import in_a_place
from train.environments.ready.single_turn import SingleTurn

_FENCED: Final = re.compile(r"```(?:python|py)?[^\S\n]*\n(.*?)```", re.DOTALL)

_PLACES: Final = BoundedSemaphore(4 * (os.cpu_count() or 1))
"""More at once would share the processors until code that is right isn't done in its seconds."""
_HARNESS: Final = Path(tested_code.__file__).read_text()


class UnitTests(SingleTurn):
    """The reward is the share of the prompt's tests that a response's code passes."""

    def __init__(self, tests: str = "tests", system: str | None = None, whole: bool = False, **limits: Any) -> None:
        """An environment whose code can be run.

        Args:
            tests: key of the tests in metadata: Python code, or a JSON list of several, each of which counts.
            whole: reward 1 where all are passed, else 0.
            limits: of ``sandbox.SandboxLimits``; ``seconds`` are of all tests of a response, and those that are left
                when they are over have failed.

        Raises:
            train.environments.ready.sandbox.SandboxUnavailable: code can't be cut off on this machine.
        """
        super().__init__(system)
        sandbox.require()
        self.key, self.whole = tests, whole
        self.limits = replace(sandbox.SandboxLimits(), **limits)

    async def verdict(self, text: str) -> float:
        code, tests = code_of(text), tests_of(self.metadata(self.key))
        passed, limits = list[bool](), self.limits
        for test in tests:
            if limits.seconds <= 0:
                passed.append(False)
                continue
            verdict, seconds = await in_a_place(_PLACES, partial(_timed, code, test, limits))
            passed.append(verdict)
            limits = replace(limits, seconds=limits.seconds - seconds)
        return float(all(passed)) if self.whole else sum(passed) / len(passed)


def code_of(text: str) -> str:
    """A response's last fenced block, or all of it."""
    fenced = _FENCED.findall(text)
    return fenced[-1] if fenced else text


def tests_of(text: str) -> list[str]:
    """The tests of a prompt. Raises ValueError if there are none."""
    tests = json.loads(text) if text.lstrip().startswith("[") else [text]
    if not tests or not all(isinstance(test, str) and test.strip() for test in tests):
        raise ValueError(f"{text[:80]!r} is neither Python code nor a JSON list of it")
    return tests


def _timed(code: str, test: str, limits: sandbox.SandboxLimits, begins: Callable[[], None]) -> tuple[bool, float]:
    """Whether code passes a test, and how many seconds that took."""
    begins()
    started = time.monotonic()
    return passes(code, test, limits), time.monotonic() - started


def passes(code: str, test: str, limits: sandbox.SandboxLimits) -> bool:
    """Whether code passes a test. Raises ValueError if the test can't be run."""
    ended = sandbox.run([sys.executable, "-I", "-c", _HARNESS], files={"solution.py": code}, text=test, limits=limits)
    if ended.how == "exited" and ended.code == tested_code.UNSUPPORTED:
        raise ValueError(f"the test {test[:80]!r} can't be run: {ended.errors.strip()}")
    return ended.how == "exited" and ended.code == 0
