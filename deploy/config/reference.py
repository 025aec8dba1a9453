"""The reference of the settings on a terminal: groups of them by topic, and all of them as YAML."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from functools import cache
from typing import Any, Final

from pydantic import BaseModel
from pydantic_core import PydanticUndefined, to_jsonable_python

from deploy.config import describe, json_schema
from deploy.config.describe import Setting
from deploy.config.root import ConfigError, Settings

_WIDTH: Final = 110


@cache
def topics() -> dict[str, str]:
    """The meaning of each section of the settings, by dotted name."""
    return dict(json_schema.sections(_schema()))


def settings_in(topic: str) -> list[Setting]:
    """The settings of a section, those of sections in it left out; of a setting's name that one."""
    own = [one for one in describe.settings_of(Settings) if one.key == topic]
    return own or [one for one in describe.settings_of(Settings) if one.key.rpartition(".")[0] == topic]


def type_of(key: str) -> str:
    """The type of a setting in a few words."""
    return json_schema.type_of(json_schema.at(_schema(), key), _schema()).replace("`", "")


def as_yaml(name: str = "") -> str:
    """Every setting with its meaning, type and default, or those of one section, or one setting.

    It loads as the defaults. What has no default, or lies below a name of your own, is commented out. Raises
    ConfigError, which names the nearest one, if there is no such section or setting.
    """
    if name and name not in topics() and not settings_in(name):
        near = describe.nearest(name, Settings)
        raise ConfigError(
            f"there is no section or setting {name}"
            + (f"; did you mean {near}?" if near else "; `millrace help` lists the sections")
        )
    return "\n".join(_yaml(Settings, "", name, off=False)).strip() + "\n"


def _yaml(model: type[BaseModel], prefix: str, wanted: str, *, off: bool) -> Iterator[str]:
    """The lines of a section. ``off``: commented out, as one that is not there by default."""
    indent = "  " * prefix.count(".")
    for name, field in describe.fields_of(model).items():
        key = f"{prefix}{name}"
        is_shown = f"{key}.".startswith(f"{wanted}.") or not wanted
        if not is_shown and not f"{wanted}.".startswith(f"{key}."):
            continue
        default = field.get_default(call_default_factory=True, validated_data={})
        section, mapped = describe.section_of(field.annotation), describe.mapped_section(field.annotation)
        if is_shown:
            kind = "" if section else f" ({type_of(key)})"
            text = f"{describe.meaning(field.description or '')}{kind}"
            if not prefix:
                yield ""
            yield from textwrap.wrap(text, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
        is_off = off or default is PydanticUndefined or (section is not None and default is None)
        yield f"{indent}{'#' if is_off else ''}{name}:{'' if section else f' {_value(default)}'}".rstrip()
        if section:
            yield from _yaml(section, f"{key}.", wanted, off=is_off)
        elif mapped:
            yield f"{indent}  #NAME:"
            yield from _yaml(mapped, f"{key}.NAME.", wanted, off=True)


def _value(default: Any) -> str:
    return "" if default is PydanticUndefined else describe.scalar(to_jsonable_python(default))


@cache
def _schema() -> json_schema.Schema:
    return Settings.model_json_schema()
