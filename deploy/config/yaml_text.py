"""YAML as settings are written in it: PyYAML's safe subset, without two of its traps.

A key that YAML reads as true or false (``no``, ``on``), as a number or as nothing, and a key that stands twice, are
errors that name the line; PyYAML takes both without a word.
"""

from __future__ import annotations

from typing import Any, Final

import yaml

_TEXT: Final = "tag:yaml.org,2002:str"
_READ_AS: Final = {
    "tag:yaml.org,2002:bool": "true or false",
    "tag:yaml.org,2002:int": "a number",
    "tag:yaml.org,2002:float": "a number",
    "tag:yaml.org,2002:null": "nothing",
    "tag:yaml.org,2002:timestamp": "a date",
}


class KeyProblem(ValueError):
    """A key that would not be read as it is meant; the text names it and its line."""


def load(text: str) -> Any:
    """The values of a YAML text. Raises KeyProblem, yaml.YAMLError."""
    node = yaml.compose(text, yaml.SafeLoader)
    if node is None:
        return None
    _check(node, set())
    return yaml.safe_load(text)


def _check(node: yaml.Node, seen: set[int]) -> None:
    """Look at the keys of a node and of those below it; what an alias repeats, once. Raises KeyProblem."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check(item, seen)
    if isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.tag in _READ_AS:
                raise KeyProblem(
                    f"line {line}: YAML reads the key {key.value} as {_READ_AS[key.tag]}, and keys are texts: quote "
                    f'it, "{key.value}"'
                )
            if key.tag == _TEXT:
                if key.value in lines:
                    raise KeyProblem(
                        f"line {line}: the key {key.value} stands in line {lines[key.value]} already: put what is "
                        "below both of them together, or remove one"
                    )
                lines[key.value] = line
            _check(value, seen)
