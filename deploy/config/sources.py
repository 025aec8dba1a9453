"""Where settings come from: the command line, the environment and a file, each a layer that knows its origins."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from deploy.config import describe
from feedback.settings_base import hide_credentials

ENV_PREFIX: Final = "MILLRACE__"
DEFAULT_FILE: Final = Path("millrace.yaml")


class ConfigError(ValueError):
    """The configuration can't be used; the text names each bad key, its value and where it came from."""


_NOTHING: Final = object()


class Layer(PydanticBaseSettingsSource):
    """Values of one source. ``origin`` says of a dotted key where it was read, for messages."""

    def __init__(self, model: type[BaseSettings], values: dict[str, Any], origin: dict[str, str] | str) -> None:
        super().__init__(model)
        self.values = values
        self.origin = origin

    def __call__(self) -> dict[str, Any]:
        return self.values

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return self.values.get(field_name), field_name, False

    def where(self, key: str) -> str:
        """Where the value of a key was read, or the values below it."""
        if isinstance(self.origin, str):
            return self.origin
        parts = key.split(".")
        above = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        if (given := next((name for name in above if name in self.origin), None)) is not None:
            return self.origin[given]
        return ", ".join(where for name, where in self.origin.items() if name.startswith(f"{key}."))

    def holds(self, key: str) -> bool:
        return self.value(key) is not _NOTHING

    def value(self, key: str) -> Any:
        """What this source gives for a dotted key; ``_NOTHING`` if it doesn't."""
        value: Any = self.values
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return _NOTHING
            value = value[part]
        return value

    def unknown(self) -> list[str]:
        return [
            describe.unknown_message(key, self.settings_cls, self.where(key))
            for key in describe.unknown_keys(self.values, self.settings_cls)
        ]


def from_options(model: type[BaseSettings], options: Iterable[tuple[str, str]]) -> Layer:
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for key, text in options:
        key = key.replace("-", "_")
        _put(values, key, _read(text, key, model), f"--{key}")
        origin[key] = f"the command line (--{key})"
    return Layer(model, values, origin)


def from_environment(model: type[BaseSettings], environment: Mapping[str, str]) -> Layer:
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for name in sorted(environment):
        if name.upper().startswith(ENV_PREFIX):
            key = name[len(ENV_PREFIX) :].lower().replace("__", ".")
            _put(values, key, _read(environment[name], key, model), name)
            origin[key] = f"the environment ({name})"
    return Layer(model, values, origin)


def from_file(model: type[BaseSettings], file: Path | None) -> Layer:
    if file is None and not DEFAULT_FILE.exists():
        return Layer(model, {}, "no file")
    path = file or DEFAULT_FILE
    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"the config file {path} can't be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"the config file {path} is not YAML: {_where(error)}") from None
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(f"the config file {path} must hold keys and values, it holds a {type(values).__name__}")
    return Layer(model, describe.drop_empty_sections(values, model), str(path))


def _read(text: str, key: str, model: type[BaseSettings]) -> Any:
    """A value given as text: itself where the setting may be text, else read as YAML (numbers, null, [lists])."""
    annotation = describe.annotation_of(key, model)
    if annotation is None:  # unknown; reported later with a hint
        return text
    if describe.takes_text(annotation):
        return None if text in ("null", "none") and describe.takes_none(annotation) else text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        given = "the value" if describe.is_secret(key, model) else repr(text)
        raise ConfigError(f"{key}: {given} can't be read: {_where(error)}") from None


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
            raise ConfigError(f"{source}: {section} is given as a value and as a section")
    if isinstance(value, dict) and isinstance(values.get(last), dict):
        values[last] = value | values[last]
    else:
        values[last] = value


def explain(detail: Any, layers: list[Layer]) -> str:
    """One line for a pydantic error: key, what is wrong, the value, and the source that the value came from."""
    parts = [str(part) for part in detail["loc"]]
    message, key = detail["msg"].removeprefix("Value error, "), ".".join(parts)
    if detail["type"] == "missing":
        return f"{key or 'the settings'}: {message}"
    of_section = isinstance(detail["input"], (dict, BaseModel))
    given = "" if of_section or describe.is_secret(key, layers[0].settings_cls) else f", not {detail['input']!r}"
    sources = _sources(_SETTING.findall(message), layers) if of_section else {}
    if not sources:
        # Drop what is no key of ours: pydantic adds list indexes and the names of union members at the end.
        keys = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        sources = next((found for key in keys if (found := _sources([key], layers))), {})
    if len(set(sources.values())) > 1:
        where = f" ({'; '.join(f'{key} from {source}' for key, source in sources.items())})"
    else:
        where = "".join(f" (from {source})" for source in set(sources.values()))
    return f"{key or 'the settings'}: {message}{hide_credentials(given)}{where}"


_SETTING: Final = re.compile(r"[a-z_]+(?:\.[a-z_]+)+")
"""A setting's name, in the words of an error that is about several."""


def _sources(keys: Iterable[str], layers: list[Layer]) -> dict[str, str]:
    """Where each key's value came from, of those that some layer gives: the first one's counts, of a section all."""
    found = {}
    for key in keys:
        holders = [layer for layer in layers if layer.holds(key)]
        if holders and not isinstance(holders[0].value(key), Mapping):
            holders = holders[:1]
        if holders:
            found[key] = " and ".join(layer.where(key) for layer in holders)
    return found
