"""What a setting must be, in our words: of pydantic's errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

_MUST_BE: Final[dict[str, str]] = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "a text",
    "path_type": "a path",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "keys and values",
    "model_type": "a section, with settings below it",
    "model_attributes_type": "a section, with settings below it",
    "none_required": "null",
}
_WITH_BOUNDS: Final[dict[str, Callable[[Mapping[str, Any]], str]]] = {
    "literal_error": lambda of: f"{of['expected']}",
    "enum": lambda of: f"{of['expected']}",
    "greater_than": lambda of: f"more than {of['gt']}",
    "greater_than_equal": lambda of: f"{of['ge']} or more",
    "less_than": lambda of: f"less than {of['lt']}",
    "less_than_equal": lambda of: f"{of['le']} or less",
    "string_too_short": lambda of: (
        "a text that is not empty" if of["min_length"] == 1 else f"a text of {of['min_length']} characters or more"
    ),
    "string_too_long": lambda of: f"a text of {of['max_length']} characters or fewer",
    "string_pattern_mismatch": lambda of: f"a text of the form {of['pattern']}",
    "too_short": lambda of: f"a list of {of['min_length']} or more",
    "too_long": lambda of: f"a list of {of['max_length']} or fewer",
}
_TEXTS: Final = frozenset({"literal_error", "string_type"})


def wrong(detail: Any) -> str:
    """What is wrong with a value, by an entry of ``ValidationError.errors()``."""
    kind = detail["type"]
    if kind == "missing":
        return "is missing"
    expected = _MUST_BE.get(kind)
    if expected is None and kind in _WITH_BOUNDS:
        expected = _WITH_BOUNDS[kind](detail["ctx"])
    if expected is None:
        return str(detail["msg"]).removeprefix("Value error, ")
    hint = ""
    if kind in _TEXTS and isinstance(detail["input"], bool):
        hint = " (YAML reads no, off, on and yes as true or false: quote them)"
    return f"must be {expected}{hint}"
