"""``python -m train.controller.torchrun_guard …``: torchrun that ends, with its ranks, when its parent process ends."""

from __future__ import annotations

import os
from typing import Final

from feedback.process_exit import end_with_parent

PARENT: Final = "MILLRACE_PARENT"
"""The environment variable with the process id of who starts torchrun; for the ranks that of torchrun."""


def end_with_starter() -> None:
    """Have this process killed when the one that started it has ended."""
    end_with_parent(int(os.environ.get(PARENT, os.getppid())))


if __name__ == "__main__":
    from torch.distributed.run import main

    end_with_starter()
    os.environ[PARENT] = str(os.getpid())
    main()
