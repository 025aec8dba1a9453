"""``python -m train.controller.torchrun_guard …``: torchrun that ends, with its ranks, when its parent process ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_INIT: Final = 1


def end_with_parent() -> None:
    """Have the kernel kill this process when the one that started it has ended, however that ended. Linux alone."""
    if not sys.platform.startswith("linux"):
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl: {os.strerror(number)}")
    if os.getppid() == _INIT:  # it had ended before
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    from torch.distributed.run import main

    end_with_parent()
    main()
