"""Definitions of custom resources, as their projects publish them, as JSON schemas that refuse unknown fields."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

Schema = dict[str, Any]

_WORDS: Final[Schema] = {"type": "object", "additionalProperties": {"type": "string"}}
_METADATA: Final[Schema] = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string"},
        "generateName": {"type": "string"},
        "namespace": {"type": "string"},
        "labels": _WORDS,
        "annotations": _WORDS,
    },
}
"""What a manifest says of itself; definitions leave it to Kubernetes."""


class _Loader(yaml.CSafeLoader):
    """Takes a plain ``=`` for the text that it is to Kubernetes; PyYAML has a tag for it and builds nothing of that."""


_Loader.add_constructor("tag:yaml.org,2002:value", yaml.CSafeLoader.construct_yaml_str)


def definitions(folders: Iterable[Path]) -> dict[str, Schema]:
    """The kinds that the folders' YAML files define, each with a schema, of draft 4, of the version that is stored."""
    found = {}
    for file in sorted(file for folder in folders for file in folder.glob("*.yaml")):
        for manifest in yaml.load_all(file.read_text(), _Loader):
            if manifest and manifest["kind"] == "CustomResourceDefinition":
                kind, schema = _defined(manifest["spec"])
                found[kind] = schema
    return found


def _defined(spec: Mapping[str, Any]) -> tuple[str, Schema]:
    kind: str = spec["names"]["kind"]
    [version] = (version for version in spec["versions"] if version["storage"])
    schema = strict(version["schema"]["openAPIV3Schema"])
    schema["properties"] |= {
        "apiVersion": {"enum": [f"{spec['group']}/{version['name']}"]},
        "kind": {"enum": [kind]},
        "metadata": _METADATA,
    }
    return kind, schema | {"required": ["apiVersion", "kind", "metadata", *schema.get("required", [])]}


def strict(schema: Mapping[str, Any]) -> Schema:
    """A structural schema in which a field is an error that the API server would prune, or refuse if it is strict.

    Rules in CEL (``x-kubernetes-validations``) are left out.
    """
    made = {name: value for name, value in schema.items() if not name.startswith("x-kubernetes-")}
    if "properties" in made:
        made["properties"] = {name: strict(one) for name, one in made["properties"].items()}
    if "items" in made:
        made["items"] = strict(made["items"])
    if isinstance(made.get("additionalProperties"), dict):
        made["additionalProperties"] = strict(made["additionalProperties"])
    elif made.get("type") == "object" and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        made["type"] = ["integer", "string"]
    if made.pop("nullable", False):
        made = {"anyOf": [{"type": "null"}, made]}
    return made


def beyond(own: Mapping[str, Any], theirs: Mapping[str, Any], refs: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """What a schema of ours takes, and theirs does not: unknown fields, other types and values, what they require.

    ``refs``: ours by the names that ``$ref`` has.
    """
    if "$ref" in own:
        own = refs[own["$ref"].rpartition("/")[2]]
    types = theirs.get("type", own.get("type"))
    if "type" in own and own["type"] not in (types if isinstance(types, list) else [types]):
        yield f"{path}: {own['type']} is {types}"
    values = {own["const"]} if "const" in own else set(own.get("enum", ()))
    if "enum" in theirs and not (values and values <= set(theirs["enum"])):
        yield f"{path}: of {sorted(values)} only {theirs['enum']} are known"
    fields = theirs.get("properties", {})
    for name, one in own.get("properties", {}).items():
        if name not in fields:
            yield f"{path}.{name} is unknown"
        else:
            yield from beyond(one, fields[name], refs, f"{path}.{name}")
    if own.get("additionalProperties") is False:
        required = set(theirs.get("required", ())) - set(own.get("required", ()))
        yield from (f"{path}.{name} is required" for name in required)
    for inner in ("items", "additionalProperties"):
        if isinstance(own.get(inner), dict):
            yield from beyond(own[inner], theirs.get(inner) or {}, refs, f"{path}[]")
