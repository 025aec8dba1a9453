"""The OpenAPI page describes all that there is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from feedback.config import FeedbackConfig, JournalConfig, LakeConfig
from serve.api.openapi import openapi
from serve.app import create_app
from serve.config import ServeConfig


def page(home: Path) -> dict[str, Any]:
    serve = ServeConfig(policies=str(home / "policies"), replicas=str(home / "replicas"), keys=str(home / "keys.json"))
    journal, lake = JournalConfig(folder=str(home / "journal")), LakeConfig(uri=str(home / "lake"))
    return openapi(create_app(serve, FeedbackConfig(journal=journal, lake=lake)))


def test_every_property_and_parameter_of_the_openapi_page_is_described(tmp_path: Path) -> None:
    schema = page(tmp_path)
    missing = list(undescribed(schema, "#"))
    assert not missing, "\n".join(missing)


def undescribed(part: Any, where: str, *, names: bool = False) -> Iterator[str]:
    """Properties, parameters, headers and answers without a description; a reference has its target's.

    ``names``: the keys of ``part`` are fields' names, not words of OpenAPI.
    """
    if isinstance(part, list):
        for number, item in enumerate(part):
            yield from undescribed(item, f"{where}/{number}")
    if not isinstance(part, dict):
        return
    for name, below in part.items():
        at = f"{where}/{name}"
        if names:
            yield from undescribed(below, at)
            continue
        if name in ("oneOf", "anyOf") and "properties" in part:  # what holds between fields that are described above
            continue
        if name in ("properties", "responses", "headers", "securitySchemes") and isinstance(below, dict):
            for key, item in below.items():
                if "description" not in item and "$ref" not in item:
                    yield f"{at}/{key}"
        if name == "parameters":
            for item in below.values() if isinstance(below, dict) else below:
                if "description" not in item and "$ref" not in item:
                    yield f"{at}/{item.get('name')}"
        if name in ("get", "post") and where.startswith("#/paths") and not (below.get("description")):
            yield at
        yield from undescribed(below, at, names=name == "properties")


def test_the_openapi_page_names_keys_scopes_and_their_errors_and_every_reference_is_there(tmp_path: Path) -> None:
    schema = page(tmp_path)
    assert schema["components"]["securitySchemes"].keys() == {"bearer", "header"}
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            is_open = path in ("/health", "/ready")
            assert ("security" in operation) is not is_open
            assert ({"401", "403"} <= operation["responses"].keys()) is not is_open
    assert "429" in schema["paths"]["/generate"]["post"]["responses"]
    assert "`feedback`" in schema["paths"]["/feedback"]["post"]["description"]
    for reference in re.findall(r'"\$ref": "#/([^"]+)"', json.dumps(schema)):
        found = schema
        for part in reference.split("/"):
            found = found[part]


def test_the_openapi_page_has_the_session_header_of_the_routes_that_generate_with_its_bounds(tmp_path: Path) -> None:
    schema = page(tmp_path)
    parameters = schema["components"]["parameters"]
    by_route = {
        path: {
            parameters[item["$ref"].rpartition("/")[2]]["name"] for item in operation["parameters"] if "$ref" in item
        }
        for path, operations in schema["paths"].items()
        for operation in operations.values()
    }
    generating = {"/generate", "/v1/completions", "/v1/chat/completions"}
    assert {path for path, names in by_route.items() if "X-Session-Id" in names} == generating
    assert parameters["SessionId"]["schema"] == {"type": "string", "minLength": 1, "maxLength": 200}
