"""What kinds of failure there are, and which of them is a lack of memory. Imports no torch."""

from __future__ import annotations

import re
from typing import Final, Literal

Kind = Literal["lost", "hung", "crashed", "raised", "memory", "refused", "stopped"]
"""lost: a process was killed, or its machine has gone. hung: it gave no sign of life, or no answer in time. crashed: it
ended by a signal that it brought on itself. raised: an exception, of whatever code. memory: there was too little of it.
refused: settings, files or versions with which it can't run. stopped: somebody asked it to stop."""

_OUT_OF_MEMORY: Final = "OutOfMemoryError"
"""The name of torch's type for GPUs and of Ray's for processes that its monitor has ended."""
_CPU_ALLOCATOR: Final = "DefaultCPUAllocator: can't allocate memory"
"""torch has no type for it: c10/core/impl/alloc_cpu.cpp."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """By the types of an exception and of what it was raised from."""
    while error is not None:
        names = {base.__name__ for base in type(error).__mro__}
        if isinstance(error, MemoryError) or _OUT_OF_MEMORY in names or _CPU_ALLOCATOR in str(error):
            return True
        error = error.__cause__
    return False


def text_is_out_of_memory(text: str) -> bool:
    """As ``is_out_of_memory``, of a traceback: by the type that its last lines name."""
    return _CPU_ALLOCATOR in text or bool(re.search(rf"^(\w+\.)*({_OUT_OF_MEMORY}|MemoryError)\b", text, re.M))
