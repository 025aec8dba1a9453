"""The images' Dockerfile: its linter, its steps beside `make setup`, its pins, its health check."""

from __future__ import annotations

import http.server
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deploy.packaging.conftest import DEPLOY, PATHS, check_command
from tests.paths import ROOT

DOCKERFILE = DEPLOY / "images" / "Dockerfile"
STEPS = [
    step
    for line in re.sub(r"\\\n(#.*\n)*", " ", DOCKERFILE.read_text()).splitlines()
    if (step := re.sub(r"\s+", " ", line).strip()) and not step.startswith("#")
]
UNUSED = {"torchvision", "torchaudio", "torchcodec", "triton"}  # beside a CPU torch; so has the Makefile


def steps(kind: str) -> list[str]:
    return [step.removeprefix(f"{kind} ") for step in STEPS if step.startswith(f"{kind} ")]


def pins(file: Path) -> dict[str, str]:
    return {name: version for name, _, version in (line.partition("==") for line in file.read_text().split())}


def test_hadolint_has_nothing_to_say_of_the_dockerfile() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    said = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True, timeout=60)
    assert said.returncode == 0, said.stdout + said.stderr


def test_yamllint_has_nothing_to_say_of_the_files() -> None:
    command = [sys.executable, "-m", "yamllint", "--strict", "--config-file", ".yamllint.yaml", "deploy"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert said.returncode == 0, said.stdout + said.stderr


def test_an_image_installs_by_the_commands_of_make_setup() -> None:
    flags = re.compile(r"python -m pip install (.*)")
    ignored = {"--quiet", "--disable-pip-version-check", "--no-cache-dir", "--editable", "requirements.txt", "$(LOCK)"}

    def installs(lines: list[str]) -> list[set[str]]:
        return [set(shlex.split(found[1])) - ignored for line in lines if (found := flags.search(line))]

    made = installs((ROOT / "Makefile").read_text().split("\n.PHONY")[1].split("\n# What tests")[0].splitlines())
    assert len(made) == 2
    assert installs(steps("RUN")) == made


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_an_image_has_pins_of_the_lock_and_nothing_that_only_development_needs(device: str) -> None:
    image, lock = pins(DEPLOY / "images" / f"requirements-{device}.txt"), pins(ROOT / f"requirements-{device}.txt")
    assert image.items() <= lock.items(), "run `make lock`"
    assert not {"pytest", "ruff", "mypy", "moto", "locust", "playwright", "mkdocs"} & image.keys()


def test_an_image_has_all_that_the_product_requires() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(text) for text in project["dependencies"] + project["optional-dependencies"]["cpu"]]
    found: set[tuple[str, frozenset[str]]] = set()
    while wanted:
        requirement = wanted.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if name in UNUSED or (name, extras) in found:
            continue
        found.add((name, extras))
        try:
            further = [Requirement(text) for text in requires(name) or []]
        except PackageNotFoundError:
            pytest.fail(f"{name} is required and not installed: run `make setup`")
        marks = [{"extra": extra} for extra in (extras or {""})]
        wanted += [one for one in further if one.marker is None or any(one.marker.evaluate(mark) for mark in marks)]
    assert {name for name, _ in found} == pins(DEPLOY / "images" / "requirements-cpu.txt").keys(), "run `make lock`"


def test_what_is_copied_is_in_the_build_context_and_no_home_is() -> None:
    lines = (ROOT / ".dockerignore").read_text().split()
    let_in = {line[1:] for line in lines if line.startswith("!")}
    assert "*" in lines
    sources = [source for step in steps("COPY") if "--from" not in step for source in step.split()[:-1]]
    assert {source.split("/")[0] for source in sources} == let_in
    assert all((ROOT / source.replace("${DEVICE}", "gpu")).exists() for source in sources)
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {package.removesuffix("*") for package in packages} <= let_in


def test_what_compose_keeps_secret_gets_neither_into_a_build_nor_into_git() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines.index("deploy/compose") > lines.index("!deploy")  # the last line that matches decides
    kept = [".env", "secrets/metrics_key", "secrets/grafana_password", "model/model.safetensors"]
    ignored = subprocess.run(
        ["git", "check-ignore", *(f"deploy/compose/{name}" for name in kept)], cwd=ROOT, capture_output=True, text=True
    )
    assert len(ignored.stdout.splitlines()) == len(kept)


def test_an_image_runs_the_server_as_nobody_in_particular_and_stops_it_by_sigterm() -> None:
    assert steps("USER") == ["10001:0"]
    assert steps("STOPSIGNAL") == ["SIGTERM"]
    entry, command = json.loads(steps("ENTRYPOINT")[0]), json.loads(steps("CMD")[0])
    assert entry == ["tini", "--", "millrace"]
    variables = dict(pair.split("=", 1) for step in steps("ENV") for pair in shlex.split(step))
    check_command(command, environment=variables)
    assert variables["MILLRACE__SERVE__HOST"] == "0.0.0.0"
    assert {variables["HOME"], *steps("WORKDIR")[-1:]} <= set(json.loads(steps("VOLUME")[0]))
    assert steps("EXPOSE") == ["8000"]


class _Health(http.server.BaseHTTPRequestHandler):
    status = 200
    asked: list[str] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_the_health_check_asks_the_server_whether_it_can_go_on(status: int, code: int) -> None:
    check = json.loads(next(step for step in STEPS if step.startswith("HEALTHCHECK")).split(" CMD ")[1])
    handler = type("Handler", (_Health,), {"status": status, "asked": []})
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        variables = {**os.environ, "MILLRACE__SERVE__PORT": str(server.server_port), "http_proxy": "http://127.0.0.1:9"}
        said = subprocess.run([sys.executable, *check[1:]], env=variables, capture_output=True, timeout=60)
        server.shutdown()
    assert (said.returncode, handler.asked) == (code, ["/health"])
    assert set(handler.asked) <= PATHS
