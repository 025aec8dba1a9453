"""What a tree of pydantic settings says about itself: its keys, their meaning, the nearest right key, YAML."""

from __future__ import annotations

import difflib
import json
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined


@dataclass(frozen=True)
class Setting:
    """One leaf: dotted ``key``, meaning, default (None if it has none) and whether it is required."""

    key: str
    description: str
    default: Any
    required: bool


def settings_of(model: type[BaseModel], prefix: str = "") -> Iterator[Setting]:
    """Every setting of a model and of the models in it, in the order of their definition.

    Those below a mapping of sections have NAME where the key of one stands.
    """
    for name, field in fields_of(model).items():
        key = f"{prefix}{name}"
        if section := section_of(field.annotation):
            yield from settings_of(section, f"{key}.")
        else:
            default = field.get_default(call_default_factory=True, validated_data={})
            required = default is PydanticUndefined
            yield Setting(key, meaning(field.description or ""), None if required else default, required)
            if section := mapped_section(field.annotation):
                yield from settings_of(section, f"{key}.NAME.")


def fields_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields of a model by the names that settings have: ``class`` is no name that Python's could have."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The model of a field that is a section (``Model`` or ``Model | None``), else None."""
    models = [part for part in _members(annotation) if isinstance(part, type) and issubclass(part, BaseModel)]
    return models[0] if len(models) == 1 and not takes_text(annotation) else None


def mapped_section(annotation: Any) -> type[BaseModel] | None:
    """The model of a field that is a mapping of sections by name, else None."""
    for part in _members(annotation):
        if _is_mapping(part) and len(typing.get_args(part)) == 2:
            return section_of(typing.get_args(part)[1])
    return None


def annotation_of(key: str, model: type[BaseModel]) -> Any:
    """The type of a dotted key; that of a mapping's texts or Any below one; None if there is no such key."""
    annotation, is_below = _field_type(key, model)
    if not is_below:
        return annotation
    values = [typing.get_args(part)[1] for part in _members(annotation) if _is_mapping(part) and typing.get_args(part)]
    texts = next((value for value in values if takes_text(value)), Any)
    return texts if _is_mapping(annotation) else None


def _field_type(key: str, model: type[BaseModel]) -> tuple[Any, bool]:
    """The type of the field that a dotted key names or lies below, and whether it lies below; None for no field."""
    annotation: Any = model
    for part in key.split("."):
        section = section_of(annotation)
        if section is None and (mapped := mapped_section(annotation)):
            annotation = mapped
            continue
        if section is None:
            return annotation, True
        field = fields_of(section).get(part)
        if field is None:
            return None, False
        annotation = field.annotation
    return annotation, False


def takes_text(annotation: Any) -> bool:
    """Whether a text is a value of that type as it stands, so that it must not be read as YAML.

    A word among others that are lists (``rlhf``) is the same as YAML.
    """
    return not any(typing.get_origin(part) is list for part in _members(annotation)) and any(
        part is str
        or (isinstance(part, type) and issubclass(part, Path | SecretStr))
        or (typing.get_origin(part) is typing.Literal and all(isinstance(arg, str) for arg in typing.get_args(part)))
        for part in _members(annotation)
    )


def is_secret(key: str, model: type[BaseModel]) -> bool:
    """Whether a dotted key is that of a secret, or of what has secrets in it, such as the keys of a mapping."""
    annotation, _ = _field_type(key, model)
    return section_of(annotation) is None and _mentions(annotation, SecretStr)


def _mentions(annotation: Any, kind: type) -> bool:
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return issubclass(annotation, kind)
    return any(_mentions(part, kind) for part in typing.get_args(annotation))


def takes_none(annotation: Any) -> bool:
    return type(None) in _members(annotation)


def unknown_message(key: str, model: type[BaseModel], where: str) -> str:
    """``unknown setting serve.prot (in millrace.yaml); did you mean serve.port?``"""
    near = nearest(key, model)
    remedy = f"did you mean {near}?" if near else "`millrace config reference` lists all settings"
    return f"unknown setting {key} (in {where}); {remedy}"


def nearest(key: str, model: type[BaseModel], others: Iterable[str] = ()) -> str | None:
    """The setting, section or other name most like ``key``: the same last word elsewhere counts more than a typo."""
    keys = [setting.key for setting in settings_of(model)]
    sections = {key.rsplit(".", depth)[0] for key in keys for depth in range(1, key.count(".") + 1)}
    candidates = [*keys, *sorted(sections), *others]
    last = key.rsplit(".", 1)[-1]
    if moved := [candidate for candidate in candidates if candidate.rsplit(".", 1)[-1] == last]:
        return max(moved, key=lambda candidate: difflib.SequenceMatcher(None, key, candidate).ratio())
    by_whole = difflib.get_close_matches(key, candidates, n=1, cutoff=0.7)
    if by_whole:
        return by_whole[0]
    words = {candidate.rsplit(".", 1)[-1]: candidate for candidate in reversed(candidates)}
    by_word = difflib.get_close_matches(last, words, n=1, cutoff=0.75)
    return words[by_word[0]] if by_word else None


def drop_empty_sections(values: dict[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """``serve:`` with every line below it commented out reads as null; it means an empty section."""
    kept: dict[str, Any] = {}
    for name, value in values.items():
        field = fields_of(model).get(str(name))
        section = section_of(field.annotation) if field else None
        if section and field and value is None and not takes_none(field.annotation):
            continue
        kept[name] = drop_empty_sections(value, section) if section and isinstance(value, dict) else value
    return kept


def to_yaml(settings: BaseModel, *, comments: bool = False, secrets: bool = False) -> str:
    """The values as YAML; with ``comments``, each under its meaning (and the default where it differs).

    Secrets are masked unless ``secrets`` says that they are to be written in clear.
    """
    if not comments:
        values = settings.model_dump(mode="json", context={"secrets": secrets})
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    return "\n".join(_commented(type(settings), settings.model_dump(mode="json"), "")) + "\n"


def show(value: Any) -> str:
    """A value on one line, as it would be written in YAML's flow style."""
    if isinstance(value, Path):
        value = str(value)
    is_plain = isinstance(value, str) and value and value.isprintable()
    return "null" if value is None else value if is_plain else json.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    """What JSON has no word for, also inside lists and mappings: a model as its values, anything else as text."""
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else str(value)


def meaning(description: str) -> str:
    """A description on one line."""
    return " ".join(description.split())


def _commented(model: type[BaseModel], values: Any, indent: str) -> Iterator[str]:
    for name, field in fields_of(model).items():
        value = None if values is None else values[name]
        if section := section_of(field.annotation):
            if not indent:
                yield ""
            if field.description:
                yield f"{indent}# {meaning(field.description)}"
            if value is None:
                yield f"{indent}{name}: null"
            else:
                yield f"{indent}{name}:"
                yield from _commented(section, value, indent + "  ")
        else:
            default = field.get_default(call_default_factory=True, validated_data={})
            same = default is PydanticUndefined or default == value or show(default) == show(value)
            note = "" if same else f" (default: {show(default)})"
            yield f"{indent}# {meaning(field.description or name)}{note}"
            yield f"{indent}{name}: {scalar(value)}"


def scalar(value: Any) -> str:
    """A value of JSON on one line of YAML."""
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6).strip()
    return text.removesuffix("...").strip()


def _members(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, through Annotated; one type is its own only member."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _members(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return tuple(member for part in typing.get_args(annotation) for member in _members(part))
    return (annotation,)


def _is_mapping(annotation: Any) -> bool:
    return any((typing.get_origin(part) or part) in (dict, Mapping) for part in _members(annotation))
