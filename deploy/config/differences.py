"""What differs between two sets of settings: those of two snapshots, or the defaults.

Secrets are masked in both, as wherever settings are shown: another secret is no difference, one more is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final

from deploy.config import describe, root
from deploy.config.root import ConfigError, Settings

_SNAPSHOT: Final = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True)
class Difference:
    """A setting by its dotted key, and its values as text; None where there is no such setting."""

    key: str
    before: str | None
    after: str | None


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Difference]:
    """The settings whose values differ, by name."""
    old, new = dict(_leaves(before)), dict(_leaves(after))
    return [Difference(key, old.get(key), new.get(key)) for key in sorted(old | new) if old.get(key) != new.get(key)]


def of_snapshot(settings: Settings, name: object) -> Mapping[str, Any]:
    """The settings that ``Settings.snapshot`` wrote under a name (``<hash>`` of ``configs/<hash>.yaml``), masked.

    ``home`` is left out. Raises ConfigError, with no path and no value, if they are not there, or are those of a
    Millrace with other settings.
    """
    if not isinstance(name, str) or _SNAPSHOT.fullmatch(name) is None:
        raise ConfigError(f"{str(name)[:50]!r} is no snapshot of settings")
    file = settings.path("configs") / f"{name}.yaml"
    if not file.is_file():
        raise ConfigError(f"configs/{name}.yaml is not on this machine")
    try:
        return _masked(file)
    except ConfigError as error:
        raise ConfigError(f"configs/{name}.yaml is not one that this version of Millrace reads") from error


@cache
def defaults() -> Mapping[str, Any]:
    """What every setting is if nothing is set, but for ``home``."""
    return Settings().model_dump(mode="json", exclude={"home"})


@lru_cache(maxsize=64)
def _masked(file: Path) -> Mapping[str, Any]:
    """What a snapshot holds; it never changes, since its name is its hash."""
    return root.load(file, environment={}).model_dump(mode="json", exclude={"home"})


def _leaves(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", describe.show(value)
