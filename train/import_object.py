"""What ``module:name`` in a config names. Imports no torch."""

from __future__ import annotations

import importlib
from typing import Any


class NamesNothingError(ValueError):
    """The module can't be imported, or has no such name; the text says which, and not who asked."""


def load_named(module: str, name: str) -> Any:
    """The attribute ``name`` of a module. Raises NamesNothingError."""
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise NamesNothingError(f"the module can't be imported: {error}") from error
    except AttributeError:
        raise NamesNothingError(f"the module {module} has no {name!r}") from None
