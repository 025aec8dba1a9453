"""How custom resources are checked: by published definitions where there are some, and by ours, which are part of them.

``CRDS`` names folders, with colons between them, that have the definitions which KubeRay (in its repository
``ray-operator/config/crd/bases``) and the Prometheus operator (``example/prometheus-operator-crd``) publish. With it,
the tests of this folder hold the manifests against those too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.deploy.packaging.conftest import CRDS, PUBLISHED
from tests.deploy.packaging.definitions import beyond, definitions

WHEEL = """
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: wheels.mill.example}
spec:
  group: mill.example
  names: {kind: Wheel}
  scope: Namespaced
  versions:
    - {name: v1alpha1, served: true, storage: false, schema: {openAPIV3Schema: {type: object}}}
    - name: v1
      served: true
      storage: true
      schema:
        openAPIV3Schema:
          type: object
          required: [spec]
          properties:
            apiVersion: {type: string}
            kind: {type: string}
            metadata: {type: object}
            spec:
              type: object
              required: [blades]
              properties:
                blades: {type: integer, minimum: 0, exclusiveMinimum: true}
                port: {x-kubernetes-int-or-string: true, anyOf: [{type: integer}, {type: string}]}
                owner: {type: string, nullable: true}
                labels: {type: object, additionalProperties: {type: string}}
                free: {type: object, x-kubernetes-preserve-unknown-fields: true}
                empty: {type: object}
                parts: {type: array, items: {type: object, properties: {wood: {enum: [oak, elm, =], type: string}}}}
"""


@pytest.fixture
def wheel(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "wheel.yaml").write_text(WHEEL)
    [(kind, schema)] = definitions([tmp_path]).items()
    assert kind == "Wheel"
    return schema


def manifest(**spec: Any) -> dict[str, Any]:
    metadata = {"name": "w", "labels": {"a": "b"}}
    return {"apiVersion": "mill.example/v1", "kind": "Wheel", "metadata": metadata, "spec": {"blades": 8, **spec}}


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"port": 80, "owner": None},
        {"port": "http", "owner": "ann", "labels": {"any": "word"}},
        {"free": {"what": {"ever": 1}}, "empty": {}, "parts": [{"wood": "oak"}, {"wood": "="}, {}]},
    ],
)
def test_what_a_definition_allows_is_allowed(wheel: dict[str, Any], spec: dict[str, Any]) -> None:
    jsonschema.Draft4Validator(wheel).validate(manifest(**spec))


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ({"blade": 8}, "'blade' was unexpected"),
        ({"blades": 0}, "less than or equal to the minimum"),
        ({"port": 1.5}, "1.5 is not"),
        ({"owner": 3}, "3 is not"),
        ({"labels": {"a": 1}}, "1 is not of type 'string'"),
        ({"empty": {"not": "so"}}, "'not' was unexpected"),
        ({"parts": [{"wood": "ash"}]}, "'ash' is not one of"),
        ({"parts": [{"iron": "much"}]}, "'iron' was unexpected"),
    ],
)
def test_what_a_definition_does_not_know_is_refused(wheel: dict[str, Any], spec: dict[str, Any], why: str) -> None:
    with pytest.raises(jsonschema.ValidationError, match=why):
        jsonschema.Draft4Validator(wheel).validate(manifest(**spec))
    for change in ({"kind": "Weel"}, {"apiVersion": "mill.example/v1alpha1"}, {"metadata": {"label": {}}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.Draft4Validator(wheel).validate(manifest() | change)


def test_what_our_schema_takes_beyond_a_definition_is_named(wheel: dict[str, Any]) -> None:
    own = yaml.safe_load("""
      type: object
      additionalProperties: false
      required: [spec]
      properties:
        kind: {const: Weel}
        spec:
          type: object
          additionalProperties: false
          properties:
            port: {}
            owner: {type: string}
            blade: {type: integer}
            labels: {$ref: "#/$defs/words"}
            parts: {type: array, items: {type: object, properties: {wood: {enum: [oak, ash]}}}}
    """)
    words = {"type": "object", "additionalProperties": {"type": "integer"}}
    assert sorted(beyond(own, wheel, {"words": words})) == [
        ".apiVersion is required",
        ".kind is required",
        ".kind: of ['Weel'] only ['Wheel'] are known",
        ".metadata is required",
        ".spec.blade is unknown",
        ".spec.blades is required",
        ".spec.labels[]: integer is string",
        ".spec.parts[].wood: of ['ash', 'oak'] only ['oak', 'elm', '='] are known",
    ]


@pytest.mark.skipif(not PUBLISHED, reason="CRDS names no folder with the definitions that KubeRay and others publish")
def test_our_schemas_are_part_of_the_published_definitions() -> None:
    kinds = CRDS.keys() - {"$defs"}
    assert kinds <= PUBLISHED.keys()
    found = {kind: list(beyond(CRDS[kind], PUBLISHED[kind], CRDS["$defs"])) for kind in kinds}
    assert found == {kind: [] for kind in kinds}
