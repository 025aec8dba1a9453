"""Where the user's own modules (``module:name`` in the settings) are found."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path


def search_last(folders: Iterable[str | Path]) -> None:
    """Put folders at the end of ``sys.path``, so that a ``train.py`` of the user's hides no package.

    Millrace's own folder stands before them: an editable install finds its packages only where ``sys.path`` has none
    of their names.
    """
    users = [str(Path(folder).absolute()) for folder in folders]
    packages = str(Path(__file__).resolve().parents[1])
    if packages not in sys.path:
        sys.path.append(packages)
    sys.path[:] = [path for path in sys.path if path not in users or path == packages]
    sys.path += [path for path in dict.fromkeys(users) if path != packages]


def search_path() -> dict[str, str]:
    """Environment variables with which a Python process finds modules where this one does, in the same order."""
    return {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "PYTHONSAFEPATH": "1"}
