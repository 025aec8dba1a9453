"""What a JSON Schema of pydantic's says: the sections in it, and types in a few words of Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]


def sections(schema: Schema) -> Iterator[tuple[str, str]]:
    """(dotted name, meaning) of each section of settings, in order."""
    return _sections(schema, schema)


def _sections(part: Schema, schema: Schema, prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, field in part.get("properties", {}).items():
        for found in _branches(field, schema):
            if "properties" in found:
                key = f"{prefix}{name}"
                yield key, text(field.get("description") or found.get("description", ""))
                yield from _sections(found, schema, f"{key}.")
            elif below := _values(found):
                for one in _branches(below, schema):
                    if "properties" in one:
                        yield f"{prefix}{name}.NAME", text(one.get("description", ""))
                        yield from _sections(one, schema, f"{prefix}{name}.NAME.")


def at(schema: Schema, key: str) -> Schema:
    """The schema of a dotted key."""
    part: Schema = schema
    for name in key.split("."):
        for found in _branches(part, schema):
            if name in found.get("properties", {}):
                part = found["properties"][name]
                break
            if name == "NAME" and (below := _values(found)):
                part = below
                break
        else:
            raise KeyError(f"{key} is not in the schema of the settings")
    return part


def type_of(part: Schema, schema: Schema) -> str:
    """The type of a JSON Schema in a few words, with its bounds."""
    if "$ref" in part:
        target = _resolve(part["$ref"], schema)
        if "$defs" in schema and "properties" not in target:
            return type_of(target, schema)
        return "mapping" if "$defs" in schema else link(part["$ref"])
    if "const" in part:
        return code(json.dumps(part["const"]))
    if "enum" in part:
        return ", ".join(code(str(value)) for value in part["enum"])
    for key in ("anyOf", "oneOf", "allOf"):
        if key in part and "type" not in part:
            kinds = [type_of(one, schema) for one in part[key] if one.get("type") != "null"]
            return "; or ".join(dict.fromkeys(kind for kind in kinds if kind)) + _or_null(part[key], schema)
    match part.get("type"):
        case "array":
            return f"list of {type_of(part.get('items', {}), schema) or 'any'}{_count(part)}"
        case "object":
            below = _values(part)
            inside = type_of(below, schema) if below else ""
            return f"mapping to {inside}" if inside and inside != "mapping" else "mapping"
        case "string":
            return "secret" if part.get("format") == "password" else "path" if part.get("format") == "path" else "text"
        case "integer" | "number" as kind:
            return f"{kind}{_bounds(part)}"
        case "boolean":
            return "true, false"
    return ""


def _bounds(part: Schema) -> str:
    low, high = part.get("minimum"), part.get("maximum")
    above, below = part.get("exclusiveMinimum"), part.get("exclusiveMaximum")
    if low is not None and high is not None:
        return f", {_number(low)} to {_number(high)}"
    words = [
        f"{sign} {_number(bound)}"
        for sign, bound in (("≥", low), (">", above), ("≤", high), ("<", below))
        if bound is not None
    ]
    return f", {' and '.join(words)}" if words else ""


def _count(part: Schema) -> str:
    return f", at most {part['maxItems']:,}" if "maxItems" in part else ""


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:g}"


def _or_null(parts: Iterable[Schema], schema: Schema) -> str:
    """Of a setting, whether it may be null; in HTTP null says the same as leaving the field out."""
    is_setting = "$defs" in schema
    return "; or null" if is_setting and any(part.get("type") == "null" for part in parts) else ""


def _branches(part: Schema, schema: Schema) -> Iterator[Schema]:
    """A schema, or what it refers to, or what it is any of."""
    if "$ref" in part:
        yield from _branches(_resolve(part["$ref"], schema), schema)
    elif "properties" not in part and "anyOf" in part:
        for one in part["anyOf"]:
            yield from _branches(one, schema)
    elif "properties" not in part and len(part.get("allOf", ())) == 1:
        yield from _branches(part["allOf"][0], schema)
    else:
        yield part


def _values(part: Schema) -> Schema | None:
    """The schema of a mapping's values, None if it has none, or is no mapping."""
    by_pattern = list(part.get("patternProperties", {}).values())
    below = by_pattern[0] if by_pattern else part.get("additionalProperties")
    return below if isinstance(below, Mapping) else None


def _resolve(reference: str, schema: Schema) -> Schema:
    found = schema
    for name in reference.removeprefix("#/").split("/"):
        found = found[name]
    return found


def link(reference: str) -> str:
    """A link to an object of the same page."""
    name = reference.rsplit("/", 1)[-1]
    return f"[{name}](#{name.lower()})"


def text(words: str) -> str:
    """A docstring or description as one line of Markdown."""
    return " ".join(words.replace("``", "`").split())


def code(words: str) -> str:
    """Words in a fixed-width font, inside a table."""
    return f"`{words}`".replace("|", "\\|") if words else '`""`'
