"""Import what a setting names as ``module:name``. Imports no torch."""

from __future__ import annotations

import importlib
from typing import Any, TypeVar

_Base = TypeVar("_Base")


def import_object(setting: str, name: str, kind: str = "class") -> Any:
    """The object that ``setting`` names.

    Raises:
        ValueError: it names none; the message has the setting and the reason.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ValueError(f"{setting}={name!r} names no {kind}; write 'module:{kind}'")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise ValueError(f"{setting}={name!r}: the module can't be imported: {error}") from error
    except AttributeError:
        raise ValueError(f"{setting}={name!r}: the module {module} has no {attribute!r}") from None


def import_subclass(setting: str, name: str, base: type[_Base]) -> type[_Base]:
    """The class that ``setting`` names. Raises as ``import_object``, and if it is not a subclass of ``base``."""
    found = import_object(setting, name)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(f"{setting}={name!r} is not a subclass of {base.__module__}.{base.__name__}")
    return found
