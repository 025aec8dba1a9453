"""The base of every group of settings, and the types that they share."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    PlainSerializer,
    SecretStr,
    SerializationInfo,
    StringConstraints,
)

_SIZE = re.compile(r"\d+(\.\d+)?\s*(KB|MB|GB|TB|KiB|MiB|GiB|TiB)")
_USERINFO = re.compile(r"//[^/@\s]*@")
_MASK = str(SecretStr("any"))
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


def _no_credentials(value: str) -> str:
    if _USERINFO.search(value):
        raise ValueError(
            "an address with a user name or password in it would show them wherever it is shown: take them out of it"
        )
    return value


def _no_mask(secret: SecretStr) -> SecretStr:
    if secret.get_secret_value() == _MASK:
        raise ValueError("this is the mask that --print-config shows in place of a secret: put the secret itself")
    return secret


def _masked(secret: SecretStr, info: SerializationInfo) -> str:
    return secret.get_secret_value() if (info.context or {}).get("secrets") else str(secret)


def hide_credentials(text: str) -> str:
    """A text with the user names and passwords of the addresses in it masked."""
    return _USERINFO.sub(f"//{_MASK}@", text)


MemorySize = Annotated[str, AfterValidator(_memory_size)]
"""An amount of memory as DuckDB writes it: ``1GB``, ``512MiB``."""

FunctionName = Annotated[str, AfterValidator(_function_name)]
"""``module:name`` of a Python function."""

Identifier = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[\x21-\x7e]+$")]
"""An id or a name: 1 to 200 printable ASCII characters without spaces."""

Secret = Annotated[SecretStr, AfterValidator(_no_mask), PlainSerializer(_masked, return_type=str)]
"""Masked wherever it is shown. ``model_dump(context=IN_CLEAR)`` writes it in clear."""

IN_CLEAR: Final[dict[str, Any]] = {"secrets": True}
"""Context of a dump that hands secrets on: to a file that its user alone can read, or through a pipe."""

Address = Annotated[str, AfterValidator(_no_credentials)]
"""A URL or path without credentials."""


class Section(BaseModel):
    """A group of settings; a key that is not one of them, and a number that is not finite, is an error."""

    # Of a section's values pydantic would show all in an error about one of them, the secrets too.
    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False, hide_input_in_errors=True
    )
