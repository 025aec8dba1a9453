"""Asks the planner whether training, the server and evaluation of a home fit this machine, before any is started."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from deploy import devices
from deploy.config.root import ConfigError, Settings
from feedback.config import ScoringConfig
from feedback.trusted_code import UntrustedCode, trusted
from serve.kv_cache import machine_memory
from serve.policies.folder import PolicyError
from train.own_model.trial import as_trained
from train.planner.assignment import ASLEEP, Assignment, Role
from train.planner.check import Finding, check_evaluation, check_server, check_training, planned
from train.planner.defaults import is_small
from train.planner.machine import Machine, machine_of_gpus, this_cpu
from train.planner.reward_models import scorers_of

if TYPE_CHECKING:
    from train.config.training import TrainConfig


def require_training(settings: Settings, policy: int | None, say: Callable[[str], None]) -> None:
    """Raise ConfigError if training from that policy (None: the serving one) can't fit, as train.plan says, or can't
    be as train.model says, or has no devices to be on."""
    assignment = devices.assigned(settings)
    if (folder := policy_folder(settings, policy)) is None:
        return
    try:
        with as_trained(settings.train.model, folder):
            pass
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if settings.train.plan != "off":
        finding = training(settings.training(), folder, assignment, settings.rollout_reward())
        _require(finding, "train", settings.train.plan, say)


def refused_training(settings: Settings) -> list[str]:
    """Why stages of the recipe that train a policy can't fit, where their train.plan is to refuse that; one text each.

    What can't be told at a glance is worked out in a process of its own, as torch and transformers stay in memory.
    Raises ConfigError if there are no devices to be on.
    """
    assignment = devices.assigned(settings)
    if (folder := policy_folder(settings)) is None:
        return []
    stages = {stage.label: settings.of_stage(stage) for stage in settings.cycle.stages if stage.stage == "train"}
    asked = {
        label: (own.resolved().train, folder, assignment, own.rollout_reward())
        for label, own in stages.items()
        if own.train.plan == "refuse" and not _certainly_fits(own, folder, assignment)
    }
    if not asked:
        return []
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        planning = {label: process.submit(training, *of) for label, of in asked.items()}
        found = {label: planned(plan.result) for label, plan in planning.items()}
    return [_refusal(finding, label, "train") for label, finding in found.items() if finding.level == "refused"]


def require_server(settings: Settings, policy: int | None, say: Callable[[str], None]) -> None:
    """Raise ConfigError if serving that policy (None: the serving one) can't fit, as serve.plan says, or if it comes
    with code that may not run, or has no devices to be on."""
    assignment = devices.assigned(settings)
    if (folder := policy_folder(settings, policy)) is None:
        return
    try:
        trusted(folder)
    except UntrustedCode as error:
        raise ConfigError(str(error)) from error
    if settings.serve.plan != "off":
        _require(server(settings, folder, assignment), "serve", settings.serve.plan, say)


def require_evaluation(settings: Settings, policy: int | None, say: Callable[[str], None]) -> None:
    """Raise ConfigError if evaluating that policy (None: the serving one) can't fit, as evaluation.plan says.

    Raises it too if there are no devices to be on.
    """
    assignment = devices.assigned(settings)
    if settings.evaluation.plan != "off" and (folder := policy_folder(settings, policy)) is not None:
        _require(evaluation(settings, folder, assignment), "evaluation", settings.evaluation.plan, say)


def refused_evaluation(settings: Settings) -> list[str]:
    """Why evaluating the policy that serves can't fit, where evaluation.plan is to refuse that; one text, or none.

    Raises ConfigError if there are no devices to be on.
    """
    if settings.evaluation.plan != "refuse" or (folder := policy_folder(settings)) is None:
        return []
    finding = evaluation(settings, folder, devices.assigned(settings))
    return [_refusal(finding, "evaluation", "evaluation")] if finding.level == "refused" else []


def training(
    config: TrainConfig,
    policy: Path,
    assignment: Assignment | None = None,
    reward: str | ScoringConfig | None = None,
) -> Finding:
    """Whether training from the policy in a folder fits this machine, or the devices that it is assigned.

    ``reward``: what rewards what it samples; a reward model takes memory, too.
    """
    if config.ray_address is not None:
        return Finding("unplanned", f"it runs on the cluster of train.ray_address={config.ray_address}")
    ranks = sum(config.ranks_of(pool) for pool in config.placement.pools)
    return planned(
        lambda: check_training(
            config, policy, this_machine(ranks, assignment, "train"), host=machine_memory(), reward=reward
        )
    )


def server(settings: Settings, policy: Path, assignment: Assignment | None = None) -> Finding:
    """Whether the server, with the policy in a folder, fits this machine, or the devices that it is assigned."""
    serve, fleet = settings.serve, settings.serve.fleet
    if fleet.ray_address is not None:
        return Finding("unplanned", f"it runs on the cluster of serve.fleet.ray_address={fleet.ray_address}")
    replicas = fleet.least_replicas
    host = machine_memory() if assignment is not None and assignment.in_turns else None
    return planned(
        lambda: check_server(
            serve.engine, serve.swap, policy, this_machine(1, assignment, "serve"), replicas=replicas, sleeps=host
        )
    )


def evaluation(settings: Settings, policy: Path, assignment: Assignment | None = None) -> Finding:
    """Whether evaluation's engine, with the policy in a folder, fits this machine, or the devices it is assigned."""
    engine = settings.resolved().evaluation.engine
    return planned(lambda: check_evaluation(engine, policy, this_machine(1, assignment, "evaluate")))


def policy_folder(settings: Settings, version: int | None = None) -> Path | None:
    """The folder of a policy's weights, by default of the one that serves, of an adapter that of its base.

    None if there is none, which others complain of.
    """
    try:
        store = settings.policy_store()
        if version is None:
            pointer = store.serving()
            version = None if pointer is None else pointer.version
        if version is None:
            return None
        policy = store.get(version)
        return policy.path if policy.base is None else store.get(policy.base["version"]).path
    except (PolicyError, OSError):
        return None


def this_machine(ranks: int = 1, assignment: Assignment | None = None, role: Role = "serve") -> Machine:
    """Its GPUs, or those that a role is assigned, each as the largest of them, so that one which is hidden refuses
    nothing; or its memory in as many parts. Rates are a preset's, and mean nothing.

    A device that the role has in turns with the server is smaller by what that keeps of it. Raises ValueError if vLLM
    is its build for GPUs, and NVML shows none: a GPU's memory is not the machine's.
    """
    if devices.computes_on_cpu(devices.seen()):
        return this_cpu(ranks)
    if not (found := devices.gpus()):
        raise ValueError("vLLM's build for GPUs is installed, and NVML shows no GPU, whose memory it would be")
    own = () if assignment is None else assignment.of(role)
    largest = max(found, key=lambda gpu: gpu.total_bytes)
    visible = devices.names()
    count = len(own) or min(len(found), len(visible or found))
    asleep = ASLEEP if assignment is not None and role in assignment.waits_for else 0
    return machine_of_gpus(largest.name, count, largest.total_bytes - asleep)


def _require(
    finding: Finding, section: str, mode: Literal["refuse", "warn", "off"], say: Callable[[str], None]
) -> None:
    if finding.level == "unplanned":
        say(f"whether {section} fits into memory is not planned: {finding.found}")
    elif finding.level != "fits":
        if finding.level == "refused" and mode == "refuse":
            raise ConfigError(_refusal(finding, section, section))
        say(f"warning: {_problem(finding, section)}")


def _refusal(finding: Finding, what: str, section: str) -> str:
    return f"{_problem(finding, what)}; or start all the same with {section}.plan=warn"


def _problem(finding: Finding, what: str) -> str:
    return f"{what} does not fit into memory: {finding.found}; {finding.advice}"


def _certainly_fits(settings: Settings, policy: Path, assignment: Assignment | None) -> bool:
    """Whether a step takes a small part of what a rank has, by the models' sizes alone."""
    config = settings.train
    if config.ray_address is not None:
        return True  # as far as this machine goes
    if config.algorithm.critic.model is not None:
        return False  # it may be larger
    try:
        machine = this_machine(sum(config.ranks_of(pool) for pool in config.placement.pools), assignment, "train")
        scorers = scorers_of(settings.rollout_reward(), machine.kind)
        rewards = sum(each.weights + each.batch_tokens * each.token_bytes for each in scorers)
    except Exception:  # noqa: BLE001  whatever the driver has: what can't be told at a glance is planned
        return False
    cache, longest = config.rollout.kv_cache_bytes or 0, config.longest_response
    few = cache < machine.memory / 4 and longest < config.micro_batch_tokens
    return few and rewards < machine.memory / 4 and is_small(config, policy, machine)
