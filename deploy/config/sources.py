"""Where settings come from: the command line, the environment and a file, each a layer that knows its origins.

The sources of pydantic-settings 2.16 do less: they name no source and no nearest key, ignore an unknown section in the
environment, refuse ``serve:`` with nothing below it, quote the line of a YAML error, which may hold a secret, and take
no option below a mapping (``--feedback.scoring.rules.NAME.weight``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import BaseModel

from deploy.config import describe, wording, yaml_text
from feedback.settings_base import hide_credentials

ENV_PREFIX: Final = "MILLRACE__"
DEFAULT_FILE: Final = Path("millrace.yaml")


class ConfigError(ValueError):
    """The configuration can't be used; the text names each bad key, its value and where it came from."""


_NOTHING: Final = object()


@dataclass(frozen=True)
class Layer:
    """Values of one source, nested. ``origin`` says where it read them: all of them, or each dotted key."""

    values: dict[str, Any]
    origin: dict[str, str] | str

    def where(self, key: str) -> str:
        """Where the value of a key was read, or the values below it."""
        if isinstance(self.origin, str):
            return self.origin
        if (name := next((name for name in _prefixes(key) if name in self.origin), None)) is not None:
            return self.origin[name]
        return ", ".join(where for name, where in self.origin.items() if name.startswith(f"{key}."))

    def value(self, key: str) -> Any:
        """The value of a dotted key; ``_NOTHING`` if this source has none."""
        value: Any = self.values
        for part in key.split("."):
            if isinstance(value, list) and part.isdigit() and int(part) < len(value):
                value = value[int(part)]
            elif isinstance(value, Mapping) and part in value:
                value = value[part]
            else:
                return _NOTHING
        return value


def merged(layers: Sequence[Layer]) -> dict[str, Any]:
    """The values of all layers; the first layer's count."""
    values: dict[str, Any] = {}
    for layer in reversed(layers):
        values = overlaid(values, layer.values)
    return values


def overlaid(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """The values of both, nested; where both have one, that above."""
    values = below | above
    for key in below.keys() & above.keys():
        if isinstance(below[key], dict) and isinstance(above[key], dict):
            values[key] = overlaid(below[key], above[key])
    return values


def from_options(model: type[BaseModel], options: Iterable[tuple[str, str]]) -> Layer:
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for key, text in options:
        key = key.replace("-", "_")
        _put(values, key, _read(text, key, model), f"--{key}")
        origin[key] = f"the command line (--{key})"
    return Layer(values, origin)


def from_environment(model: type[BaseModel], environment: Mapping[str, str]) -> Layer:
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for name in sorted(environment):
        if name.upper().startswith(ENV_PREFIX):
            key = name[len(ENV_PREFIX) :].lower().replace("__", ".")
            _put(values, key, _read(environment[name], key, model), name)
            origin[key] = f"the environment ({name})"
    return Layer(values, origin)


def from_file(model: type[BaseModel], file: Path | None) -> Layer:
    if file is None and not DEFAULT_FILE.exists():
        return Layer({}, "no file")
    path = file or DEFAULT_FILE
    try:
        values = yaml_text.load(path.read_text())
    except yaml_text.KeyProblem as problem:
        raise ConfigError(f"the config file {path}, {problem}") from None
    except OSError as error:
        raise ConfigError(f"the config file {path} can't be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"the config file {path} is not YAML: {_where(error)}") from None
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(f"the config file {path} must hold keys and values, it holds a {type(values).__name__}")
    return Layer(describe.drop_empty_sections(values, model), str(path))


def _read(text: str, key: str, model: type[BaseModel]) -> Any:
    """The value that a text stands for: itself where the setting may be text, else as YAML (numbers, null, [lists])."""
    annotation = describe.annotation_of(key, model)
    if annotation is None:  # unknown; reported later with a hint
        return text
    if describe.takes_text(annotation):
        return None if text in ("null", "none") and describe.takes_none(annotation) else text
    try:
        return yaml_text.load(text)
    except yaml_text.KeyProblem as problem:
        raise ConfigError(f"{key}: {problem}") from None
    except yaml.YAMLError as error:
        shown = "the value" if describe.is_secret(key, model) else repr(text)
        raise ConfigError(f"{key}: {shown} can't be read: {_where(error)}") from None


def _where(error: yaml.YAMLError | UnicodeDecodeError) -> str:
    """What is wrong, and where, without the text around it that PyYAML and Python show: it may be a secret."""
    if isinstance(error, UnicodeDecodeError):
        return f"{error.reason} at byte {error.start}"
    if isinstance(error, yaml.composer.ComposerError | yaml.constructor.ConstructorError):  # they name the value
        what: Any = "an alias or tag that means nothing here: quote a value that begins with * or !"
    else:
        what = getattr(error, "problem", None) or getattr(error, "context", None) or "it can't be parsed"
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    return what if mark is None else f"{what} (line {mark.line + 1}, column {mark.column + 1})"


def _put(values: dict[str, Any], key: str, value: Any, source: str) -> None:
    *sections, last = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise ConfigError(f"{source}: {section} is set as a value and as a section")
    if isinstance(value, dict) and isinstance(values.get(last), dict):
        values[last] = value | values[last]
    else:
        values[last] = value


def explain(detail: Any, layers: Sequence[Layer], model: type[BaseModel]) -> str:
    """A pydantic error in one line: key, what is wrong, the value, and the source that the value came from.

    Of an unknown key the nearest right one; a line for each where a whole section is unknown.
    """
    message = wording.wrong(detail)
    key = ".".join(str(part) for part in detail["loc"] if not str(part).startswith("("))  # which member of a union
    if detail["type"] == "extra_forbidden":
        unknown = [(name, layer) for layer in layers for name in _leaves(key, layer.value(key))]
        return "\n".join(describe.unknown_message(name, model, layer.where(name)) for name, layer in unknown)
    if detail["type"] == "missing":
        return f"{key or 'the settings'} {message}"
    of_section = isinstance(detail["input"], (dict, BaseModel))
    value = "" if of_section or describe.is_secret(key, model) else f", not {detail['input']!r}"
    sources = _sources(_SETTING.findall(message), layers) if of_section else {}
    if not sources:
        # Drop what is no key of ours: pydantic adds list indexes and the names of union members at the end.
        sources = next((found for name in _prefixes(key) if (found := _sources([name], layers))), {})
    if len(set(sources.values())) > 1:
        where = f" ({'; '.join(f'{key} from {source}' for key, source in sources.items())})"
    else:
        where = "".join(f" (from {source})" for source in set(sources.values()))
    return f"{key or 'the settings'}: {message}{hide_credentials(value)}{where}"


_SETTING: Final = re.compile(r"[a-z_]+(?:\.[a-z_]+)+")
"""A setting's name, in the words of an error that is about several."""


def _sources(keys: Iterable[str], layers: Sequence[Layer]) -> dict[str, str]:
    """Where each key's value came from, of those that some layer gives: the first one's counts, of a section all."""
    found = {}
    for key in keys:
        holders = [layer for layer in layers if layer.value(key) is not _NOTHING]
        if holders and not isinstance(holders[0].value(key), Mapping):
            holders = holders[:1]
        if holders:
            found[key] = " and ".join(layer.where(key) for layer in holders)
    return found


def _prefixes(key: str) -> Iterator[str]:
    """A dotted key and the sections that it is in, the longest first."""
    while key:
        yield key
        key = key.rpartition(".")[0]


def _leaves(key: str, value: Any) -> Iterator[str]:
    """The dotted keys of a value: those below it, else its own."""
    if isinstance(value, Mapping) and value:
        for name, below in value.items():
            yield from _leaves(f"{key}.{name}", below)
    elif value is not _NOTHING:
        yield key
