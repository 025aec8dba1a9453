"""What settings are made of."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

_SIZE = re.compile(r"\d+(\.\d+)?\s*(KB|MB|GB|TB|KiB|MiB|GiB|TiB)")
FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
"""``module:name``."""


def _memory_size(value: str) -> str:
    if not _SIZE.fullmatch(value):
        raise ValueError(f"{value!r} is not an amount of memory; write for example '1GB' or '512MiB'")
    return value


def _function_name(value: str) -> str:
    if not FUNCTION.fullmatch(value):
        raise ValueError(f"{value!r} does not name a function; write 'module:name', for example 'my_rewards:exact'")
    return value


MemorySize = Annotated[str, AfterValidator(_memory_size)]
"""An amount of memory as DuckDB writes it: ``1GB``, ``512MiB``."""

FunctionName = Annotated[str, AfterValidator(_function_name)]
"""``module:name`` of a Python function."""

Identifier = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[\x21-\x7e]+$")]
"""An id or a name: 1 to 200 printable ASCII characters without spaces."""

Finite = Annotated[float, Field(allow_inf_nan=False)]
"""A number that is neither infinite nor NaN."""


class Section(BaseModel):
    """A group of settings; a key that is not one of them is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
