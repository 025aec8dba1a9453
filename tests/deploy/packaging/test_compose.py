"""The compose file: its schema, and that what it says of Millrace is so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from compose_spec import PyCompose

from deploy import cli
from deploy.config import root
from serve.config import ServeConfig
from tests.deploy.packaging.conftest import DEPLOY, PATHS, check_command, commands_in

FOLDER = DEPLOY / "compose"
SETTINGS = FOLDER / "millrace.yaml"
VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")
TEXT = (FOLDER / "compose.yaml").read_text()


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    """The file, with defaults for variables, and "given" where there is none."""
    return yaml.safe_load(VARIABLE.sub(lambda found: found[3] if found[2] == "-" else "given", TEXT))


def own(project: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: service for name, service in project["services"].items() if service["image"].startswith("millrace")}


def test_the_file_is_of_the_compose_specification(project: dict[str, Any]) -> None:
    found = PyCompose.from_yaml(yaml.safe_dump(project))
    for part in ("volumes", "secrets", "configs", "networks"):
        getattr(found, f"validate_{part}")()


def test_commands_and_settings_are_millraces(project: dict[str, Any]) -> None:
    services = own(project)
    assert services.keys() == {"home", "server", "scheduler", "monitoring"}
    for service in services.values():
        if "entrypoint" in service:
            assert commands_in(service["command"][0])
            for words in commands_in(service["command"][0]):
                check_command(words, SETTINGS, service["environment"])
        else:
            check_command(service["command"], SETTINGS, service["environment"])
    settings = root.load(SETTINGS, environment=services["server"]["environment"])
    assert settings.schedule.metrics.port == 9201
    assert settings.feedback.lake.store_options["aws_endpoint_url"] == "http://s3:7070"
    assert root.load(SETTINGS, environment=services["scheduler"]["environment"]).server_url == "http://server:8000"


def test_no_secret_is_in_the_file() -> None:
    """Each has to be given, by a variable without a default or by a file."""
    project = yaml.safe_load(TEXT)
    for service in project["services"].values():
        for name, value in service.get("environment", {}).items():
            if re.search(r"key|secret|password|token", name, re.IGNORECASE):
                assert name.endswith("__FILE") or VARIABLE.fullmatch(value)[2] == "?", name  # type: ignore[index]
    assert all(secret.keys() == {"file"} for secret in project["secrets"].values())
    example = dict(line.split("=") for line in (FOLDER / "env.example").read_text().split("\n") if line[:1].isalpha())
    required = {name for name, kind, _ in VARIABLE.findall(TEXT) if kind == "?"}
    assert required <= example.keys()
    assert not any(example[name] for name in required)


def test_what_may_be_written_is_named_and_the_rest_is_read_only(project: dict[str, Any]) -> None:
    for service in own(project).values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["tmpfs"][0].startswith("/tmp:")
    assert {"home:/var/lib/millrace", "cache:/var/cache/millrace"} <= set(project["services"]["server"]["volumes"])


def test_a_server_has_longer_to_stop_than_it_drains_and_starts_are_in_order(project: dict[str, Any]) -> None:
    server, scheduler = project["services"]["server"], project["services"]["scheduler"]
    least = ServeConfig().drain_timeout_s + ServeConfig().engine.stop_timeout_s
    assert int(server["stop_grace_period"].removesuffix("s")) > least
    assert server["depends_on"] == {"home": {"condition": "service_completed_successfully"}}
    assert scheduler["depends_on"] == {"server": {"condition": "service_healthy"}}
    assert "/health" in PATHS


def test_prometheus_and_grafana_read_what_this_version_writes(
    project: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    services = project["services"]
    command = [
        str(tmp_path) if word == "/var/lib/monitoring" else str(SETTINGS) if word.endswith("millrace.yaml") else word
        for word in services["monitoring"]["command"]
    ]
    for name, value in services["monitoring"]["environment"].items():
        monkeypatch.setenv(name, value)
    assert cli.run(command) == 0
    scraped = yaml.safe_load((tmp_path / "prometheus.yaml").read_text())["scrape_configs"]
    assert [job["static_configs"][0]["targets"] for job in scraped] == [["server:8000"], ["scheduler:9201"]]
    assert {job["authorization"]["credentials_file"] for job in scraped} == {"/run/secrets/metrics_key"}
    assert "metrics_key" in services["prometheus"]["secrets"]
    assert "--config.file=/var/lib/monitoring/prometheus.yaml" in services["prometheus"]["command"]
    provider = yaml.safe_load(project["configs"]["grafana_dashboards"]["content"])["providers"][0]
    assert provider["options"]["path"] == "/var/lib/monitoring"
    assert list(tmp_path.glob("*.json"))
