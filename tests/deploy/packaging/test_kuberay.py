"""The Ray cluster and job for KubeRay, and what makes their home."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from deploy.config import root
from tests.deploy.packaging.conftest import (
    DEPLOY,
    Manifest,
    check,
    check_command,
    check_restricted,
    commands_in,
    load,
    templates,
)
from tests.deploy.packaging.test_images import pins

FOLDER = DEPLOY / "kuberay"
SETTINGS = FOLDER / "millrace.yaml"


@pytest.fixture(scope="module")
def manifests(run: Callable[..., subprocess.CompletedProcess[str]]) -> list[Manifest]:
    built = run("kubectl", "kustomize", FOLDER)
    assert built.returncode == 0, built.stderr
    return load("\n---\n".join([built.stdout, *((FOLDER / name).read_text() for name in ("rayjob.yaml", "init.yaml"))]))


def of(kind: str, manifests: list[Manifest]) -> Manifest:
    return next(manifest for manifest in manifests if manifest["kind"] == kind)


def clusters(manifests: list[Manifest]) -> list[dict[str, Any]]:
    return [of("RayCluster", manifests)["spec"], of("RayJob", manifests)["spec"]["rayClusterSpec"]]


def test_manifests_are_kubernetes_and_kuberays_and_pods_are_restricted(manifests: list[Manifest]) -> None:
    for manifest in manifests:
        check(manifest)
        for template in templates(manifest):
            check_restricted(template["spec"])
            volumes = {volume["name"] for volume in template["spec"]["volumes"]}
            for container in [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]:
                assert {mount["name"] for mount in container["volumeMounts"]} == volumes


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_rays_version_is_that_of_the_lock(device: str, manifests: list[Manifest]) -> None:
    locked = pins(DEPLOY / "images" / f"requirements-{device}.txt")["ray"]
    assert {cluster["rayVersion"] for cluster in clusters(manifests)} == {locked}


def test_every_call_to_ray_needs_its_token(manifests: list[Manifest]) -> None:
    assert all(cluster["authOptions"] == {"mode": "token"} for cluster in clusters(manifests))
    cluster = of("RayCluster", manifests)
    for container in cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][1:]:
        token = {one["name"]: one for one in container["env"]}["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]
        assert token == {"name": cluster["metadata"]["name"], "key": "auth_token"}


def test_commands_and_settings_are_millraces(manifests: list[Manifest]) -> None:
    settings = root.load(SETTINGS, environment={})
    cluster = of("RayCluster", manifests)
    head = cluster["spec"]["headGroupSpec"]["template"]["spec"]
    _, serve, schedule = head["containers"]
    for container in (serve, schedule):
        check_command(container["args"], SETTINGS)
    [words] = commands_in(of("RayJob", manifests)["spec"]["entrypoint"])
    check_command(words, SETTINGS)
    mounts = {mount["mountPath"] for mount in serve["volumeMounts"]}
    assert settings.feedback.journal.folder in mounts
    assert str(settings.home.parent) in mounts
    # Ray's files are how a container finds the Ray of another one in its pod.
    assert {"/tmp", "/dev/shm"} <= mounts
    assert settings.serve.fleet.ray_address == "auto"
    assert settings.train.ray_address == "http://127.0.0.1:8265"


def test_what_makes_the_home_is_no_part_of_the_fleet_and_has_its_image_volume_and_settings(
    manifests: list[Manifest], run: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    assert "kind: Job" not in run("kubectl", "kustomize", FOLDER).stdout
    job = of("Job", manifests)["spec"]["template"]["spec"]
    head = of("RayCluster", manifests)["spec"]["headGroupSpec"]["template"]["spec"]
    for container in (*job["initContainers"], *job["containers"]):
        check_command(container["args"], SETTINGS)
        assert container["image"] == head["containers"][0]["image"]
    assert job["securityContext"] == head["securityContext"]
    named = [volume for volume in head["volumes"] if "emptyDir" not in volume]
    assert [volume for volume in job["volumes"] if "emptyDir" not in volume] == named


def test_workers_have_room_for_the_replicas_and_for_a_training_job(manifests: list[Manifest]) -> None:
    settings = root.load(SETTINGS, environment={})
    [group] = of("RayCluster", manifests)["spec"]["workerGroupSpecs"]
    [worker] = group["template"]["spec"]["containers"]
    limits = worker["resources"]["limits"]
    assert int(limits["nvidia.com/gpu"]) >= settings.serve.fleet.num_gpus
    assert group["replicas"] > settings.serve.fleet.replicas
    assert worker["ports"][0]["containerPort"] == settings.serve.port
    assert group["template"]["spec"]["terminationGracePeriodSeconds"] > settings.serve.limits.timeout_s + 30
    service = of("Service", manifests)["spec"]
    assert service["selector"]["ray.io/cluster"] == of("RayCluster", manifests)["metadata"]["name"]
    assert settings.serve.port in {port["targetPort"] for port in service["ports"]}


def test_a_network_policy_lets_clients_ask_and_nobody_else_reach_ray(manifests: list[Manifest]) -> None:
    policy, settings = of("NetworkPolicy", manifests)["spec"], root.load(SETTINGS, environment={})
    label = policy["podSelector"]["matchLabels"]
    pods = [
        group["template"]
        for cluster in clusters(manifests)
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])
    ]
    assert len(pods) == 4
    assert all(label.items() <= pod["metadata"]["labels"].items() for pod in pods)
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert all(rule["from"] for rule in policy["ingress"])
    everything, *limited = policy["ingress"]
    assert everything["from"] == [{"podSelector": {"matchLabels": label}}]
    ports = [port["port"] for rule in limited for port in rule["ports"]]
    assert ports == [settings.serve.port, 8265]
    assert settings.train.ray_address.endswith(f":{ports[1]}")


def test_a_job_may_take_as_long_as_a_cycle_gives_training(manifests: list[Manifest]) -> None:
    job = of("RayJob", manifests)["spec"]
    assert job["activeDeadlineSeconds"] > root.load(SETTINGS, environment={}).cycle.train_timeout_s
    assert job["shutdownAfterJobFinishes"] is True
