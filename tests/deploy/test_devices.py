"""Which devices the processes of a home see."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy import cli, devices, doctor, memory_check, up
from deploy.config import root
from deploy.config.root import ConfigError, Settings
from deploy.supervise import resident
from deploy.supervise.children import Child
from serve.gpus import Gpu

GIB = 2**30


def changed(settings: Settings, *options: tuple[str, str]) -> Settings:
    return root.load(settings.snapshot(), options, {})


@pytest.fixture(autouse=True)
def _no_devices_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (devices.VISIBLE, devices.SEEN):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has the driver report so many GPUs of 80 GiB, with vLLM's build for them."""

    def there_are(count: int, gib: int = 80) -> None:
        monkeypatch.setattr(devices, "installed", lambda _: {"vllm": "1"})
        monkeypatch.setattr(devices, "gpus", lambda: [Gpu(index, 0, gib * GIB, 0.0) for index in range(count)])

    return there_are


def test_without_a_gpu_nothing_is_assigned_and_no_process_is_told_of_devices(settings: Settings) -> None:
    assert devices.assigned(settings) is None
    assert devices.environment(settings, "serve") == {}
    assert devices.with_sleep(settings, None) is settings
    turns = changed(settings, ("devices.use", "in_turns"))
    found = devices.assigned(turns)
    assert found is not None
    assert found.waits_for == ("train", "evaluate")
    assert devices.environment(turns, "train") == {}
    assert devices.with_sleep(turns, found).serve.sleep.allowed


def test_on_gpus_each_process_sees_its_own_and_one_gpu_is_had_in_turns(settings: Settings, gpus: Any) -> None:
    gpus(4)
    two = changed(settings, ("train.ranks", "2"))
    assert devices.environment(two, "serve") == {"CUDA_VISIBLE_DEVICES": "0", devices.SEEN: "all"}
    assert devices.environment(two, "train")["CUDA_VISIBLE_DEVICES"] == "1,2"
    assert devices.environment(two, "evaluate")["CUDA_VISIBLE_DEVICES"] == "3"
    gpus(1)
    found = devices.assigned(settings)
    assert found is not None
    assert found.waits_for == ("train", "evaluate")
    assert devices.with_sleep(settings, found).serve.sleep.allowed
    refused = changed(settings, ("serve.sleep.allowed", "false"))
    assert devices.with_sleep(refused, found).serve.sleep.allowed is False, "what is set stays"
    assert devices.assigned(changed(settings, ("devices.use", "any"))) is None


def test_a_stage_that_trains_on_more_devices_counts(settings: Settings, gpus: Any) -> None:
    gpus(8)
    stages = '[{"stage": "train", "name": "small"}, {"stage": "train", "name": "wide", "set": {"ranks": 4}}]'
    found = devices.assigned(changed(settings, ("cycle.recipe", stages)))
    assert found is not None
    assert found.train == (1, 2, 3, 4)
    pools = '{"all": {}, "rewards": {"ranks": 2}}'
    apart = changed(settings, ("train.placement.pools", pools), ("train.placement.reward", "rewards"))
    found = devices.assigned(apart)
    assert found is not None
    assert found.train == (1,), "a pool that rewards has a GPU where one is left"
    cluster = devices.assigned(changed(settings, ("train.ray_address", "http://127.0.0.1:1")))
    assert cluster is not None
    assert (cluster.train, cluster.evaluate) == ((), (1,))


def test_numbers_are_those_of_the_users_own_devices_in_every_process_below(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpus: Any
) -> None:
    gpus(8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,GPU-abc,4")
    assert devices.environment(settings, "serve")["CUDA_VISIBLE_DEVICES"] == "6"
    own = devices.environment(settings, "train")
    assert own == {"CUDA_VISIBLE_DEVICES": "GPU-abc", devices.SEEN: "6,GPU-abc,4"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", own["CUDA_VISIBLE_DEVICES"])  # as in the process that trains
    monkeypatch.setenv(devices.SEEN, own[devices.SEEN])
    assert devices.environment(settings, "train") == own
    assert devices.environment(settings, "evaluate")["CUDA_VISIBLE_DEVICES"] == "4"
    with pytest.raises(ConfigError, match=r"devices\.serve names device 3, and this machine has devices 0 to 2"):
        devices.assigned(changed(settings, ("devices.serve", "[3]")))


def test_a_real_child_sees_the_devices_of_its_command(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """``up`` and a cycle start their processes by ``children.start``; a settings' numbers count on a CPU too."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,3")
    chosen = changed(settings, ("devices.serve", "[0]"), ("devices.train", "[1,2]"))
    code = "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'))"
    for role, expected in (("serve", "7"), ("train", "5,3"), ("evaluate", "7,5,3")):
        own = devices.environment(chosen, role)  # type: ignore[arg-type]
        with Child(role, [sys.executable, "-c", code], log=tmp_path / role, grace=2.0, environment=own) as child:
            assert child.wait(60) == 0
            assert child.tail() == expected


@pytest.mark.parametrize(("command", "expected"), [("serve", "7"), ("train", "5"), ("evaluate", "3"), ("score", "3")])
def test_commands_that_are_started_by_others_get_their_devices(
    command: str, expected: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the command line alone is looked at what it is started with: this starts ``millrace COMMAND --help``."""
    from deploy.supervise import children

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,3")
    chosen = changed(settings, ("devices.serve", "[0]"), ("devices.train", "[1]"), ("devices.evaluate", "[2]"))
    started: list[Any] = []
    real = children.child_variables
    monkeypatch.setattr(children, "child_variables", lambda extra=None: started.append(extra) or real(extra))
    with children.start(chosen, "helps", [command, "--help"], log="help.log", grace=2.0) as child:
        assert child.wait(60) == 0
    assert started[0]["CUDA_VISIBLE_DEVICES"] == expected
    monkeypatch.undo()


def test_a_command_that_is_run_alone_takes_its_devices_too(settings: Settings, tmp_path: Path) -> None:
    chosen = changed(settings, ("devices.evaluate", "[2]"), ("devices.serve", "[0]"), ("devices.train", "[1]"))
    code = (
        "import os, sys; from deploy import cli; cli.run(sys.argv[1:]); print(os.environ.get('CUDA_VISIBLE_DEVICES'))"
    )
    command = [sys.executable, "-c", code, "--config", str(chosen.snapshot()), "train"]
    environment = {"PYTHONPATH": str(Path(cli.__file__).parents[1]), "PATH": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.stdout.splitlines()[-1] == "1", done.stderr


def test_no_workers_stay_between_trainings_where_the_server_has_their_devices_then(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, gpus: Any
) -> None:
    monkeypatch.delenv(resident.ADDRESS, raising=False)
    for count, there in ((2, True), (1, False)):
        gpus(count)
        with resident.serving(settings):  # they start once a training asks
            assert (resident.ADDRESS in os.environ) is there
    assert resident.ADDRESS not in os.environ


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ([("devices.serve", "[]")], "devices.serve"),
        ([("devices.serve", "[0, 0]")], "devices.serve names a device twice: 0, 0"),
        ([("devices.train", "[-1]")], "devices.train"),
        ([("devices.use", "any"), ("devices.train", "[1]")], "devices.use=any assigns none: take devices.train out"),
        ([("devices.use", "alone")], "devices.use"),
        ([("devices.lease_s", "1")], "devices.lease_s"),
        ([("serve.sleep.allowed", "true"), ("serve.fleet.replicas", "2")], "a fleet's replicas don't sleep"),
        ([("serve.sleep.allowed", "true"), ("serve.api_processes", "2")], "api_processes=2"),
        ([("serve.sleep.wait_s", "-1")], "serve.sleep.wait_s"),
    ],
)
def test_bad_values_are_refused_by_name(settings: Settings, options: list[tuple[str, str]], why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        changed(settings, *options)
    assert why in str(refused.value)


def test_the_model_of_logged_responses_scores_on_a_device_and_that_of_sampled_ones_does_not(
    settings: Settings, gpus: Any
) -> None:
    of_votes, own = ("feedback.scoring.human.model.name", "votes"), ("feedback.scoring.model.name", "own")
    gpus(1)
    assert not devices.scores_on_device(changed(settings, of_votes))
    assert devices.scores_on_device(changed(settings, own))
    for apart in (("feedback.scoring.model.device", "cpu"), ("feedback.scoring.model.weight", "0")):
        assert not devices.scores_on_device(changed(settings, own, apart))


def test_what_would_have_to_sleep_and_can_not_is_refused_before_anything_starts(
    home_with_policy: Settings, gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(2)
    fleet = changed(home_with_policy, ("serve.fleet.replicas", "2"))
    with pytest.raises(ConfigError, match=r"would have to sleep meanwhile: a fleet's replicas don't sleep"):
        devices.required(fleet)
    assert devices.assigned(fleet) is None, "where training is on another machine, as far as a command alone can tell"
    wide = changed(home_with_policy, ("train.ranks", "4"), ("train.data.prompts_per_step", "4"))
    with pytest.raises(ConfigError, match=r"training needs 4 devices \(train\.ranks\), and there are 2"):
        up.up(wide, say=lambda *_: None)
    assert not home_with_policy.path("logs").exists()
    own = changed(home_with_policy, ("devices.use", "own"), ("serve.engine.tensor_parallel_size", "2"))
    for require in (memory_check.require_server, memory_check.require_training):
        with pytest.raises(ConfigError, match=r"devices\.use=own, and 2 devices are too few"):
            require(own, None, print)
    [check] = doctor._assignment(own)
    assert (check.level, "too few" in check.found) == ("bad", True)


def test_plans_are_of_the_devices_that_each_has(home_with_policy: Settings, gpus: Any) -> None:
    gpus(4)
    two = changed(home_with_policy, ("train.ranks", "2"))
    found = devices.assigned(two)
    assert memory_check.this_machine(1, found, "serve").devices == 1
    machine = memory_check.this_machine(2, found, "train")
    assert (machine.devices, machine.memory) == (2, 80 * GIB)
    gpus(1)
    turns = devices.assigned(home_with_policy)
    assert memory_check.this_machine(1, turns, "serve").memory == 80 * GIB
    assert memory_check.this_machine(1, turns, "train").memory == 79 * GIB, "what a server that sleeps keeps"
    assert [check.found for check in doctor._assignment(home_with_policy)] == [
        "the server has device 0, training has device 0, evaluation has device 0; the server sleeps while training or "
        "evaluation works"
    ]
    plans = {check.name: check.level for check in doctor._plans(home_with_policy)}
    assert plans == {"plan of serve": "ok", "plan of train": "ok", "plan of evaluation": "ok"}
    [check] = doctor._assignment(changed(home_with_policy, ("devices.use", "any")))
    assert check.level == "warn"


def test_weights_that_the_host_has_no_memory_for_can_not_wait_there(
    home_with_policy: Settings, gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(1)
    monkeypatch.setattr(memory_check, "machine_memory", lambda: 1000)
    with pytest.raises(ConfigError, match="of weights wait in the host's memory while the server sleeps"):
        memory_check.require_server(home_with_policy, None, print)
