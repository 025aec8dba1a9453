"""``python -m train.controller.torchrun_guard …``: torchrun that ends, with its ranks, when its parent process ends.

Its exit code is torchrun's, or 128 and the number of the signal that has ended a rank.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from feedback.processes.exit import SIGNALLED, end_with_parent
from feedback.processes.fork_server import PARENT

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


def end_with_starter() -> None:
    """Have this process killed when the one that started it has ended.

    What this one starts has another parent, and would end at once by the variable that says which one it is to end
    with, as ranks under Ray do that a fork server is to fork: so it is not left in the environment.
    """
    end_with_parent(int(os.environ.pop(PARENT, os.getppid())))


def exit_code(failures: Iterable[ProcessFailure]) -> int:
    """128 and the signal that ended a rank, if no rank failed by itself; else 1.

    torchrun ends the ranks that are left by SIGTERM; a rank that lost its peer fails only because of that. A rank that
    has recorded an exception failed by that, also if its threads then had the interpreter abort.
    """
    from train.controller.rendezvous import follows_from_another

    signals = []
    for failure in failures:
        if failure.exitcode < 0 and not os.path.isfile(failure.error_file):
            signals.append(-failure.exitcode)
        elif not follows_from_another(str(failure.message)):
            return 1
    return next((SIGNALLED + number for number in signals if number != signal.SIGTERM), 1)


def main() -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    end_with_starter()
    os.environ[PARENT] = str(os.getpid())
    try:
        torchrun()
    except ChildFailedError as failed:
        print(failed, file=sys.stderr)
        sys.exit(exit_code(failed.failures.values()))


if __name__ == "__main__":
    main()
