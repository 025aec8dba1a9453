"""What vLLM and torch warn of when an engine starts in a training process, and nobody can do anything about.

Each is silenced by the logger that says it and how it begins. All else is told: of an engine that is slow for want of
a preloaded allocator, say, somebody can do something.
"""

from __future__ import annotations

import logging
import warnings
from typing import Final

NOT_TOLD: Final = {
    # Samples have seeds of their own, and training's random states are kept apart (train/checkpoint/random_state.py).
    "vllm.engine.arg_utils": ("The global random seed is set to",),
    # What train.rollout.enforce_eager says, and what follows where Triton is none of the CPU build's requirements.
    "vllm.config.vllm": ("Enforce eager set", "Inductor compilation was disabled", "Model Runner V2 requires Triton"),
    "vllm.platforms.cpu": ("Triton is not installed", "Reset SSM cache type"),
    "torch._library.triton": ("Triton not available",),
    # Said to whatever asks for threads once the engine has bound them, in this process too.
    "vllm.v1.worker.cpu_worker": ("CPU backend doesn't allow to use `torch.set_num_threads`",),
}
"""By logger: how the messages begin."""


class _Silence(logging.Filter):
    def __init__(self, beginnings: tuple[str, ...]) -> None:
        super().__init__()
        self.beginnings = beginnings

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self.beginnings)


def quieten() -> None:
    """Silence them in this process; to be called before vLLM is imported."""
    for name, beginnings in NOT_TOLD.items():
        logging.getLogger(name).addFilter(_Silence(beginnings))
    # vLLM looks at every attribute of torch.distributed, this one among them.
    warnings.filterwarnings("ignore", message="`torch.distributed.reduce_op` is deprecated", category=FutureWarning)
