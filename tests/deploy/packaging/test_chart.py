"""The chart, rendered by Helm: Kubernetes' schemas, the restricted profile, and that what it says of Millrace is so."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy import cli
from deploy.config import root
from deploy.config.root import Settings
from deploy.monitoring.alerts import JOBS
from serve.config import ServeConfig
from serve.middleware.api_keys import create_key, revoke_key
from serve.middleware.keyring import Keyring, Refused
from tests.deploy.packaging.conftest import (
    DEPLOY,
    PATHS,
    Manifest,
    check,
    check_command,
    check_restricted,
    commands_in,
    load,
    templates,
)

CHART = DEPLOY / "chart"
Run = Callable[..., subprocess.CompletedProcess[str]]
KEYS = {"keys": {"existingSecret": "millrace-keys"}}
EVERYTHING: dict[str, Any] = {
    **KEYS,
    "model": "/models/mine",
    "imagePullSecrets": [{"name": "registry"}],
    "settings": {
        "serve": {"drain_timeout_s": 120, "engine": {"start_timeout_s": 1800}, "allowed_hosts": ["chat.example.com"]},
        "feedback": {"lake": {"uri": "s3://lake/millrace", "storage_options": {"aws_region": "eu-west-1"}}},
        "cycle": {"stop_grace_s": 30},
    },
    "env": [{"name": "HF_HUB_OFFLINE", "value": "1"}],
    "envFrom": [{"secretRef": {"name": "lake"}}],
    "extraVolumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}],
    "extraVolumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
    "server": {
        "resources": {"limits": {"nvidia.com/gpu": "1", "memory": "32Gi"}},
        "nodeSelector": {"gpu": "h100"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "priorityClassName": "serving",
        "podAnnotations": {"team": "ml"},
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {}}
        ],
    },
    "scheduler": {
        "nodeSelector": {"gpu": "h100"},
        "tolerations": [{"operator": "Exists"}],
        "podAnnotations": {"a": "b"},
    },
    "persistence": {"existingClaim": "home", "accessMode": "ReadWriteMany", "storageClassName": "nfs"},
    "service": {"port": 80, "annotations": {"a": "b"}},
    "serviceAccount": {"annotations": {"role": "lake"}},
    "monitoring": {"serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}}},
}
LEAST: dict[str, Any] = {
    "settings": {"serve": {"auth": False}},  # what YAML makes of off
    "scheduler": {"enabled": False},
    "networkPolicy": {"enabled": False},
    "podDisruptionBudget": {"enabled": False},
    "serviceAccount": {"create": False},
    "persistence": {"storageClassName": "fast"},
}


@pytest.fixture
def render(run: Run, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    def call(values: dict[str, Any], *options: str) -> subprocess.CompletedProcess[str]:
        file = tmp_path / "values.yaml"
        file.write_text(yaml.safe_dump(values))
        return run("helm", "template", "millrace", CHART, "--namespace", "ml", "--values", file, *options)

    return call


def rendered(done: subprocess.CompletedProcess[str]) -> dict[tuple[str, str], Manifest]:
    assert done.returncode == 0, done.stderr
    return {(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in load(done.stdout)}


def settings_of(found: dict[tuple[str, str], Manifest], tmp_path: Path, environment: dict[str, str]) -> Settings:
    file = tmp_path / "millrace.yaml"
    file.write_text(found["ConfigMap", "millrace"]["data"]["millrace.yaml"])
    return root.load(file, environment=environment)


def variables(container: Manifest) -> dict[str, str]:
    return {one["name"]: one.get("value", "from elsewhere") for one in container.get("env", [])}


def test_helms_linter_has_nothing_to_say(run: Run) -> None:
    said = run("helm", "lint", CHART, "--strict", "--set", "keys.existingSecret=k")
    assert said.returncode == 0, said.stdout + said.stderr


@pytest.mark.parametrize("values", [KEYS, EVERYTHING, LEAST], ids=["defaults", "everything", "least"])
def test_manifests_are_kubernetes_and_pods_are_restricted(values: dict[str, Any], render: Run, tmp_path: Path) -> None:
    found = rendered(render(values))
    for manifest in found.values():
        check(manifest)
        for template in templates(manifest):
            spec = template["spec"]
            check_restricted(spec)
            volumes = {volume["name"] for volume in spec["volumes"]}
            volumes |= {claim["metadata"]["name"] for claim in manifest["spec"].get("volumeClaimTemplates", [])}
            for container in [*spec["initContainers"], *spec["containers"]]:
                assert {mount["name"] for mount in container["volumeMounts"]} <= volumes, container["name"]
    pods = [kind for (kind, _), manifest in found.items() if list(templates(manifest))]
    with_scheduler = values.get("scheduler", {}).get("enabled", True)
    assert sorted(pods) == ["Deployment"] * with_scheduler + ["StatefulSet"]


@pytest.mark.parametrize("values", [KEYS, EVERYTHING, LEAST], ids=["defaults", "everything", "least"])
def test_commands_settings_and_probes_are_millraces(values: dict[str, Any], render: Run, tmp_path: Path) -> None:
    found = rendered(render(values))
    server = found["StatefulSet", "millrace"]["spec"]["template"]["spec"]
    container, home = server["containers"][0], server["initContainers"][0]
    settings = settings_of(found, tmp_path, variables(container))
    check_command(container["args"], tmp_path / "millrace.yaml")
    assert commands_in(home["command"][-1])
    for words in commands_in(home["command"][-1]):
        check_command(words, tmp_path / "millrace.yaml")
    assert settings.path(settings.serve.policies) == Path("/var/lib/millrace/home/policies")
    assert settings.path(settings.serve.keys) == Path("/var/lib/millrace/home/keys.json")
    probes = [container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")]
    assert {probe["path"] for probe in probes} == {"/health", "/ready"} <= PATHS
    assert {probe["port"] for probe in probes} == {"http"}
    assert container["ports"] == [{"name": "http", "containerPort": settings.serve.port, "protocol": "TCP"}]
    assert {"/var/lib/millrace", "/var/cache/millrace", "/tmp", "/dev/shm"} <= {
        mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")
    }
    starts = container["startupProbe"]
    assert starts["failureThreshold"] * starts["periodSeconds"] > settings.serve.engine.start_timeout_s
    least = settings.serve.drain_timeout_s + settings.serve.engine.stop_timeout_s
    assert server["terminationGracePeriodSeconds"] > least + 30
    if (scheduler := found.get(("Deployment", "millrace-schedule"))) is None:
        return
    spec = scheduler["spec"]["template"]["spec"]
    [container] = spec["containers"]
    check_command(container["args"], tmp_path / "millrace.yaml", variables(container))
    own = settings_of(found, tmp_path, variables(container))
    service = found["Service", "millrace"]["spec"]["ports"][0]["port"]
    assert own.server_url == f"http://millrace:{service}"
    assert container["ports"][0]["containerPort"] == own.schedule.metrics.port
    assert own.schedule.metrics.host == "0.0.0.0"
    assert spec["terminationGracePeriodSeconds"] > 2 * own.cycle.stop_grace_s
    assert own.home == settings.home


def test_the_scheduler_has_the_servers_volume_and_its_node_where_nodes_cant_share_it(render: Run) -> None:
    for values, claim, affinity in ((KEYS, "home-millrace-0", True), (EVERYTHING, "home", False)):
        found = rendered(render(values))
        spec = found["Deployment", "millrace-schedule"]["spec"]["template"]["spec"]
        homes = [volume["persistentVolumeClaim"]["claimName"] for volume in spec["volumes"] if volume["name"] == "home"]
        assert homes == [claim]
        assert ("affinity" in spec) is affinity
        claims = found["StatefulSet", "millrace"]["spec"].get("volumeClaimTemplates", [])
        assert [f"{one['metadata']['name']}-millrace-0" for one in claims] == ([claim] if affinity else [])


def test_who_may_call_the_server_is_named_and_services_find_its_pods(render: Run) -> None:
    found = rendered(render(EVERYTHING))
    labels = {
        kind: found[kind, name]["spec"]["template"]["metadata"]["labels"]
        for kind, name in (("StatefulSet", "millrace"), ("Deployment", "millrace-schedule"))
    }
    for name, kind in (("millrace", "StatefulSet"), ("millrace-schedule", "Deployment")):
        service = found["Service", name]["spec"]
        assert service["selector"].items() <= labels[kind].items()
        ports = found[kind, name]["spec"]["template"]["spec"]["containers"][0]["ports"]
        assert [port["targetPort"] for port in service["ports"]] == [port["name"] for port in ports]
    budget = found["PodDisruptionBudget", "millrace"]["spec"]["selector"]["matchLabels"]
    assert budget.items() <= labels["StatefulSet"].items()
    assert not budget.items() <= labels["Deployment"].items()
    policy = found["NetworkPolicy", "millrace"]["spec"]
    assert all(policy["podSelector"]["matchLabels"].items() <= of.items() for of in labels.values())
    assert all(rule["from"] for rule in policy["ingress"])
    assert policy["policyTypes"] == ["Ingress", "Egress"]


def test_the_service_monitor_scrapes_both_with_a_key(render: Run) -> None:
    found = rendered(render(EVERYTHING))
    spec = found["ServiceMonitor", "millrace"]["spec"]
    wanted = spec["selector"]["matchLabels"]
    ports = {
        port["name"]
        for (kind, _), manifest in found.items()
        if kind == "Service"
        and wanted.items() <= manifest["metadata"]["labels"].items()
        and spec["jobLabel"] in manifest["metadata"]["labels"]
        for port in manifest["spec"]["ports"]
    }
    assert {endpoint["port"] for endpoint in spec["endpoints"]} == ports == {"http", "metrics"}
    assert {endpoint["path"] for endpoint in spec["endpoints"]} == {"/metrics"} <= PATHS
    keys = [endpoint["authorization"]["credentials"] for endpoint in spec["endpoints"]]
    assert keys == [{"name": "millrace-keys", "key": "metrics"}] * 2
    jobs = {found["Service", name]["metadata"]["labels"]["millrace/job"] for name in ("millrace", "millrace-schedule")}
    assert jobs == set(JOBS)


def test_alert_rules_and_dashboards_are_those_that_millrace_writes(render: Run, tmp_path: Path) -> None:
    assert cli.run(["monitoring", "--out", str(tmp_path / "written"), "--schedule.metrics.port", "9201"]) == 0
    boards = {file.stem: file for file in (tmp_path / "written").glob("*.json")}
    options = [f"--set-file=monitoring.alertRules={tmp_path}/written/alerts.yaml"]
    options += [f"--set-file=monitoring.dashboards.{name}={file}" for name, file in boards.items()]
    found = rendered(render(KEYS, *options))
    rules = found["PrometheusRule", "millrace"]
    check(rules)
    assert rules["spec"] == yaml.safe_load((tmp_path / "written" / "alerts.yaml").read_text())
    data = found["ConfigMap", "millrace-dashboards"]["data"]
    assert sorted(data.values()) == sorted(file.read_text() for file in boards.values())


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "keys.existingSecret is empty"),
        ({**KEYS, "settings": {"home": "/elsewhere"}}, "/settings"),
        ({**KEYS, "settings": {"serve": {"host": "127.0.0.1"}}}, "/settings/serve"),
        (KEYS | {"settings": {"feedback": {"lake": {"storage_options": {"aws_secret_access_key": ""}}}}}, "lake"),
        ({**KEYS, "networkPolicy": {"form": []}}, "form"),
        ({**KEYS, "persistence": {"size": "much"}}, "/persistence/size"),
    ],
)
def test_values_that_cant_work_are_refused(values: dict[str, Any], said: str, render: Run) -> None:
    refused = render(values)
    assert refused.returncode != 0
    assert said in refused.stderr


def test_the_server_follows_a_secret_through_the_link_to_its_key_file(tmp_path: Path) -> None:
    """As kubelet has it: files are links into a folder that is a link itself, and moves as a whole."""
    secret, home = tmp_path / "secret", tmp_path / "home"
    home.mkdir()
    for version in ("1", "2"):
        (secret / version).mkdir(parents=True)
    created, key = create_key(secret / "1" / "keys.json", name="app", tenant="t", scopes=["generate"])
    shutil.copy(secret / "1" / "keys.json", secret / "2")
    revoke_key(secret / "2" / "keys.json", created.id)
    (secret / "..data").symlink_to("1")
    (secret / "keys.json").symlink_to("..data/keys.json")
    (home / "keys.json").symlink_to(secret / "keys.json")

    keyring = Keyring(ServeConfig(keys=str(home / "keys.json")))
    keyring.load()
    assert keyring.authenticate(key.encode()).key == created.id
    (secret / "..new").symlink_to("2")
    (secret / "..new").rename(secret / "..data")
    keyring.refresh()
    with pytest.raises(Refused, match="revoked"):
        keyring.authenticate(key.encode())
    assert {file.name for file in home.iterdir()} > {"keys.json", "keys.json.local"}  # beside the link, not the Secret


def test_the_servers_defaults_are_those_that_the_chart_counts_with() -> None:
    serve = ServeConfig()
    assert (serve.drain_timeout_s, serve.engine.stop_timeout_s, serve.engine.start_timeout_s) == (20, 15, 600)
    assert Settings().cycle.stop_grace_s == 10
