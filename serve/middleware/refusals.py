"""What becomes of keys and logins that are not good: they are counted, slowed down by address, and put on record.

A good key is let in whatever its address has sent before: a secret has 256 random bits, so guesses need no other
bound, and those who share an address with somebody who guesses (a proxy's, an office's) are not locked out. What goes
on record is bounded too: one entry of the audit log every ten minutes at most, however many were refused.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from serve.http import Problem
from serve.middleware.token_buckets import Buckets
from serve.observability.audit import AuditLog, AuditLogError

log = logging.getLogger(__name__)

ENTRY_EVERY_S: Final = 600.0
_GATHER_S: Final = 2.0  # from the first refusal to its entry
_ADDRESSES: Final = 1000  # that are told apart between two entries
_NAMED: Final = 10
_SLOWED: Final = frozenset({"unknown", "revoked"})  # an expired one is nobody's guess
_NONE: Final = frozenset({"missing", "scope"})  # no key, and one that is good


class Refusals:
    """The refusals of this process. ``per_minute``: how many an address may have before it gets 429."""

    def __init__(
        self,
        per_minute: float,
        audit: AuditLog | None = None,
        counted: Callable[[str], None] = lambda reason: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``counted``: called with the reason of each; ``audit``: where ``record`` puts them."""
        self._per_minute = per_minute
        self._audit = audit
        self._counted = counted
        self._buckets = Buckets(clock)
        self._reasons: Counter[str] = Counter()
        self._addresses: Counter[str] = Counter()
        self._any = asyncio.Event()

    def add(self, reason: str, address: str) -> None:
        """One more. Raises Problem 429 if its address has sent too many keys that are not good."""
        self._counted(reason)
        if reason in _NONE:
            return
        self._reasons[reason] += 1
        known = address in self._addresses or len(self._addresses) < _ADDRESSES
        self._addresses[address if known else "others"] += 1
        self._any.set()
        if reason not in _SLOWED:
            return
        wait, _ = self._buckets.take(
            ("refused", _neighbourhood(address)), self._per_minute / 60, max(1.0, self._per_minute), 1.0
        )
        if wait:
            raise Problem(
                429,
                f"too many keys from this address were not good; {self._per_minute:g} a minute are answered, and a "
                "good one always is",
                retry_after=wait,
            )

    async def record(self) -> None:
        """Put them on record, until cancelled; what is not by then, is at the end."""
        try:
            while True:
                await self._any.wait()
                await asyncio.sleep(_GATHER_S)
                await asyncio.to_thread(self.write)
                await asyncio.sleep(ENTRY_EVERY_S)
        finally:
            self.write()

    def write(self) -> None:
        """An entry of all since the last one, if there were any."""
        if self._audit is None or not self._reasons:
            return
        self._any.clear()  # before, so that what comes meanwhile sets it again
        reasons, self._reasons = self._reasons, Counter()
        addresses, self._addresses = self._addresses, Counter()
        subject = {
            **dict(sorted(reasons.items())),
            "addresses": dict(addresses.most_common(_NAMED)),
            "more_addresses": max(0, len(addresses) - _NAMED),
        }
        origin = next(iter(addresses)) if len(addresses) == 1 else f"{len(addresses)} addresses"
        try:
            with self._audit.entry("auth.refused", subject, who="nobody", origin=origin) as outcome:
                outcome.refused(f"{reasons.total()} keys or logins that are not good")
        except AuditLogError as error:
            log.error("%d keys or logins were refused: %s", reasons.total(), error)


def _neighbourhood(address: str) -> str:
    """Whom one bucket is for: an address, or the /64 of an IPv6 one, which is a single customer's."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is None:
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return address
