"""Time-ordered identifiers: UUID version 7 (RFC 9562, section 5.7)."""

from __future__ import annotations

import os
import threading
import time
from typing import Final

_RANDOM_BITS: Final = (1 << 62) - 1

_lock = threading.Lock()
_last = 0


def uuid7() -> str:
    """A new UUIDv7 in its usual text form.

    48 bits of Unix milliseconds, then 12 bits of the fraction of that millisecond (RFC 9562, section 6.2, method 3),
    then 62 random bits. In one process each is greater than the one before, also when the clock is set back.
    """
    global _last
    nanoseconds = time.time_ns()
    milliseconds, rest = divmod(nanoseconds, 1_000_000)
    tick = milliseconds << 12 | (rest << 12) // 1_000_000
    with _lock:
        _last = tick = max(tick, _last + 1)
    random = int.from_bytes(os.urandom(8), "big") & _RANDOM_BITS
    digits = f"{(tick >> 12) << 80 | 0x7 << 76 | (tick & 0xFFF) << 64 | 0b10 << 62 | random:032x}"
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"
