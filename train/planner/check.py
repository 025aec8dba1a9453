"""Whether settings fit a machine: asked before `train`, `serve`, `evaluate`, `up` and a cycle start anything, and by
`doctor`.

A prediction that is a little off must keep nobody from what works. So prompts count as one token each, other
processes not at all, and what is refused is ``FAR`` beyond the memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal, TypeVar

from pydantic import BaseModel

from evaluation.config import EngineConfig as EvaluationEngineConfig
from feedback.config import ScoringConfig
from serve.config import EngineConfig, SwapConfig
from serve.kv_cache import BATCH_SHARE, GPU_BATCH_SHARE, SERVER_SHARE, fit_engine
from serve.standby_room import CHANGING_MEMORY, room_of, size_text, weight_bytes
from serve.vllm.adapters.slots import server_places_bytes
from train.config.context_length import rollout_cache
from train.config.sections import LoraConfig
from train.config.training import TrainConfig
from train.planner.defaults import decide, with_values
from train.planner.machine import Machine
from train.planner.plan import NothingFits, Phase, Workload, candidates, choose, plan

FAR: Final = {"cuda": 1.1, "cpu": 1.25}
"""Times a device's memory from which settings are refused. Predictions are checked to 10 %; a CPU's memory has room
beside it, pages of a KV cache that are never touched, and swap, which is added."""

_SHORT: Final = 8
"""Responses may turn out to be so many times shorter than the greatest length."""

_KV_CACHE: Final = "train.rollout.kv_cache_bytes"


class DoesNotFit(RuntimeError):
    """A run is planned not to fit on what it would compute on; the text says why, and what to change."""


Level = Literal["fits", "tight", "refused", "unplanned"]
_Section = TypeVar("_Section", bound=BaseModel)


@dataclass(frozen=True)
class Finding:
    """What was found. tight: it probably does not fit; refused: it certainly doesn't; unplanned: that can't be known.

    ``advice`` says what to change, and is empty where it fits or is not planned.
    """

    level: Level
    found: str
    advice: str = ""


def check_training(
    config: TrainConfig,
    policy: Path,
    machine: Machine,
    *,
    host: int,
    reward: str | ScoringConfig | None = None,
) -> Finding:
    """Whether a step of a run from the policy in a folder fits. Imports torch and transformers.

    ``machine``: on a CPU, with as many devices as there are ranks in all pools, which share its memory. ``host``: the
    memory beside GPUs, for what is offloaded, bytes. ``reward``: as of ``models_of``.
    """
    return planned(lambda: _training(config, policy, machine, host, reward))


def check_server(
    engine: EngineConfig,
    swap: SwapConfig,
    policy: Path,
    machine: Machine,
    *,
    replicas: int = 1,
    sleeps: int | None = None,
) -> Finding:
    """Whether a replica with the policy in a folder fits, and a second set of weights beside it. Imports no torch.

    ``machine``: one device, of those that a replica is split over; a CPU's whole memory, which all ``replicas`` share.
    ``sleeps``: the memory beside GPUs, in bytes, where its weights wait while it sleeps; None if it does not.
    """
    return planned(lambda: _server(engine, swap, policy, machine, replicas, sleeps))


def check_evaluation(engine: EvaluationEngineConfig, policy: Path, machine: Machine) -> Finding:
    """Whether an engine of evaluation's own fits with the policy in a folder. Imports no torch.

    ``engine``: its ``dtype`` resolved. ``machine``: one device of those that the engine is split over, or a CPU.
    """
    return planned(lambda: _evaluation(engine, policy, machine))


def planned(check: Callable[[], Finding]) -> Finding:
    """What ``check`` finds; "unplanned", with the reason in a line, if it raises."""
    try:
        return check()
    except Exception as error:  # noqa: BLE001  whatever a model has in it: what can't be planned may work all the same
        return Finding("unplanned", (str(error).strip() or type(error).__name__).splitlines()[0])


def _level(needed: int, room: int, most: float) -> Level:
    return "refused" if needed > most else "tight" if needed > room else "fits"


# ------------------------------------------------------------------------------------------------------ training


def _training(
    config: TrainConfig, policy: Path, machine: Machine, host: int, reward: str | ScoringConfig | None
) -> Finding:
    from train.own_model.overrides import model_folder
    from train.planner.model_shape import models_of, read_config

    if config.dataflow is not None:
        return Finding("unplanned", f"train.dataflow={config.dataflow} may hold other models than are planned for")
    if machine.kind == "cuda" and any(pool.gpus == 0 for pool in config.placement.pools.values()):
        return Finding("unplanned", "train.placement.pools has a pool without GPUs, beside others")
    if machine.kind == "cuda":
        machine = replace(machine, host_capacity=host)
    models = models_of(read_config(policy, config.model), config, machine.kind, reward)
    work = Workload.of(config, prompt_tokens=1)
    with TemporaryDirectory() as aside:
        folder = model_folder(config.model, policy, Path(aside))
        decided = decide(config, folder, machine, models)  # as the run does
        started = decided.config
        if config.samples:
            started = with_values(started, {"rollout.kv_cache_bytes": rollout_cache(started, folder).size})
    found = plan(started, models, machine, work)

    def share(phase: Phase, whole: int) -> int:
        """A rank's."""
        return whole if machine.kind == "cuda" else whole * machine.devices // config.ranks_of(phase.pool)

    def refused(phase: Phase) -> bool:
        return phase.bytes > FAR[machine.kind] * share(phase, machine.memory) + share(phase, machine.swap)

    kept = found.offloaded * config.ranks_of(config.placement.actor)
    if machine.kind == "cuda" and kept > host:
        offloads = ("offload_optimizer", "offload_while_generating")
        what = next((name for name in offloads if getattr(started.fsdp, name)), "cpu_offload")
        text = f"train.fsdp.{what} keeps {size_text(kept)} in the host's memory, which is {size_text(host)}"
        less = "" if config.lora else "train adapters (train.lora), or "
        return Finding(_level(kept, host, FAR["cpu"] * host), text, f"{less}use a machine with more memory")
    worst = max(found.phases, key=lambda phase: phase.bytes / share(phase, machine.memory))
    has = share(worst, machine.memory)
    usable = max(0, has - (machine.memory - machine.usable))
    what, most = max(worst.memory.items(), key=lambda item: item[1])
    text = (
        f"{worst.name} needs {size_text(worst.bytes)} on each rank, of which {size_text(most)} are {what}, and a "
        f"{'device' if machine.kind == 'cuda' else 'rank'} has {size_text(has)}, of which {size_text(usable)} can be "
        "filled"
    )
    level: Level = "refused" if refused(worst) else "tight" if worst.bytes > usable else "fits"
    if level == "refused":
        short = replace(work, response_tokens=-(-work.response_tokens // _SHORT))
        if not any(map(refused, plan(started, models, machine, short).phases)):
            level, text = "tight", f"{text}, if responses have train.rollout.max_tokens={work.response_tokens} tokens"
    if level == "fits":
        return Finding(level, text)
    if worst.apart:
        return Finding(level, text, "score by a smaller reward model, or one in a type of fewer bits")
    if level == "tight":  # the search takes seconds, and this may well run
        return Finding(level, text, "`millrace plan` names settings that need less")
    opened, machine = _opened(config), _as_wide_as_suits(config, machine)
    try:
        fitting = plan(opened, models, machine, work)  # with another KV cache alone
        if not fitting.fits:
            fitting = choose(opened, models, machine, work)
    except NothingFits as nothing:
        larger = "a machine with more memory" if machine.kind == "cpu" else "more or larger devices"
        adapters = "train adapters (train.lora), or " if _adapters_fit(config, policy, machine, work, reward) else ""
        return Finding(level, text, f"{nothing}: {adapters}use {larger}")
    now = found.settings
    settled = {f"train.{name}" for name in decided.values}  # by the run itself, again where the others are changed
    changed = {name: value for name, value in fitting.settings.items() if value != now[name] and name not in settled}
    if changed.get(_KV_CACHE, 0) > now.get(_KV_CACHE, 0):  # more is faster, and not what it lacks
        del changed[_KV_CACHE]
    shown = ", ".join(f"{name}={json.dumps(value)}" for name, value in changed.items())
    return Finding(level, text, f"these settings would fit: {shown}")


def _as_wide_as_suits(config: TrainConfig, machine: Machine) -> Machine:
    """With as many of its devices as train.ranks may be, which a step's responses and the ranks' groups bound."""
    if len(config.placement.pools) > 1:
        return machine
    given = config.model_copy(update={"rollout": _unset(config.rollout, "tensor_parallel_size")})
    values = given.model_dump(exclude_unset=True)
    for devices in range(machine.devices, 1, -1):
        with suppress(ValueError):
            TrainConfig.model_validate(values | {"ranks": devices})
            return replace(machine, devices=devices)
    return replace(machine, devices=1)


def _adapters_fit(
    config: TrainConfig, policy: Path, machine: Machine, work: Workload, reward: str | ScoringConfig | None
) -> bool:
    from train.planner.model_shape import models_of, read_config

    if config.lora is not None:
        return False
    adapted = config.model_copy(update={"lora": LoraConfig()})
    with suppress(ValueError):
        models = models_of(read_config(policy, config.model), adapted, machine.kind, reward)
        *_, least = candidates(_opened(adapted, offload=False), models, machine, work)  # of what is open, the least
        return plan(least, models, machine, work).fits
    return False


def _opened(config: TrainConfig, *, offload: bool = True) -> TrainConfig:
    """The same with all settings that decide about memory open, for ``choose``; ``offload``: that one too."""
    ranks = [] if len(config.placement.pools) > 1 else ["ranks"]
    none = {"cpu_offload": False, "offload_optimizer": False}
    fsdp = config.fsdp if offload else config.fsdp.model_copy(update=none)
    parts = {
        "fsdp": _unset(
            fsdp,
            "reduce_every_micro_batch",
            "offload_while_generating",
            "tensor_parallel",
            "sequence_parallel",
            "replicas",
            *(["cpu_offload", "offload_optimizer"] if offload else []),
        ),
        "rollout": _unset(config.rollout.model_copy(update={"kv_cache_bytes": None}), "tensor_parallel_size"),
    }
    return _unset(config.model_copy(update=parts), "micro_batch_tokens", "activation_checkpointing", *ranks)


def _unset(section: _Section, *names: str) -> _Section:
    copy = section.model_copy()
    copy.model_fields_set.difference_update(names)
    return copy


# ------------------------------------------------------------------------------------------------------ serving


def _server(
    engine: EngineConfig, swap: SwapConfig, policy: Path, machine: Machine, replicas: int, sleeps: int | None
) -> Finding:
    if unknown := _changing_memory(engine.extra, "serve.engine"):
        return unknown
    gpu, t, share = machine.kind == "cuda", engine.tensor_parallel_size, engine.gpu_memory_utilization
    whole, _ = weight_bytes(policy, engine.dtype)
    whole += t * (places := server_places_bytes(engine, policy))
    if gpu and sleeps is not None and whole > sleeps:
        waiting = f"{size_text(whole)} of weights wait in the host's memory while the server sleeps"
        advice = "give training devices of its own (devices.use=own), or use a machine with more memory"
        level = _level(whole, sleeps, FAR["cpu"] * sleeps)
        return Finding(level, f"{waiting}, and it has {size_text(sleeps)}", advice)
    least = 0.0 if gpu else SERVER_SHARE  # on a GPU the cache gets what is left
    cache = fit_engine(engine, policy, section="serve.engine", share=least, memory=machine.memory // (1 if gpu else t))
    size = cache.size or 0
    weights, kv = (whole // t, size) if gpu else (whole, t * size)  # on a CPU all of them are in one memory
    by_share = gpu and engine.kv_cache_bytes is None
    limit = int(share * machine.memory) if by_share else machine.memory
    needed = (1 if gpu else replicas) * (weights + kv)
    of = f"{size_text(machine.memory)} of {'a device' if gpu else 'this machine'}"
    within = (
        f"{size_text(limit)}, serve.engine.gpu_memory_utilization={share:g} of the {of}" if by_share else f"the {of}"
    )
    each = f"{replicas} times " if needed != weights + kv else ""
    text = f"{each}{size_text(weights)} of weights and at least {size_text(kv)} of KV cache, where there are {within}"
    if (level := _level(needed, limit, FAR[machine.kind] * limit + machine.swap)) != "fits":
        remedies = [
            "raise serve.engine.gpu_memory_utilization" if by_share and needed < machine.memory else "",
            "lower serve.engine.kv_cache_bytes or serve.engine.max_model_len" if kv > weights / 10 else "",
            f"split it over more devices than serve.engine.tensor_parallel_size={t}" if gpu else "",
            "lower serve.fleet.replicas" if each else "",
        ]
        return Finding(level, text, ", or ".join(filter(None, [*remedies, "serve a smaller model"])))
    ranks = 1 if gpu else t
    room = room_of(
        engine,
        swap,
        policy,
        gpu=gpu,
        memory=machine.memory // ranks,
        available=machine.memory // (ranks * (1 if gpu else replicas)),
        reserved=machine.reserved,
        adapters=places,
    )
    if room.in_place:
        return Finding("fits", f"{text}; a swap loads the next policy in place, while requests wait: {room.reason}")
    if not room.short:
        return Finding("fits", f"{text}; {room.reason}")
    advice = "take serve.swap.in_place=false out, and requests wait for the load"
    return Finding("tight", f"{text}; {room.reason}", advice)


# ---------------------------------------------------------------------------------------------------- evaluation


def _evaluation(engine: EvaluationEngineConfig, policy: Path, machine: Machine) -> Finding:
    if unknown := _changing_memory(engine.extra or {}, "evaluation.engine"):
        return unknown
    gpu, t = machine.kind == "cuda", engine.tensor_parallel_size
    whole, _ = weight_bytes(policy, engine.dtype)
    share, memory = (GPU_BATCH_SHARE, machine.memory) if gpu else (BATCH_SHARE, machine.memory // t)
    size = fit_engine(engine, policy, section="evaluation.engine", share=share, memory=memory).size or 0
    weights, kv = (whole // t, size) if gpu else (whole, t * size)
    text = (
        f"{size_text(weights)} of weights and {size_text(kv)} of KV cache, where there are the "
        f"{size_text(machine.memory)} of {'a device' if gpu else 'this machine'}"
    )
    level = _level(weights + kv, machine.memory, FAR[machine.kind] * machine.memory + machine.swap)
    remedies = [
        "lower evaluation.engine.kv_cache_bytes or evaluation.engine.max_model_len" if kv > weights / 10 else "",
        f"split it over more devices than evaluation.engine.tensor_parallel_size={t}" if gpu else "",
    ]
    advice = ", or ".join(filter(None, [*remedies, "evaluate a smaller model"]))
    return Finding(level, text, "" if level == "fits" else advice)


def _changing_memory(extra: Mapping[str, Any], section: str) -> Finding | None:
    other = [name for name in CHANGING_MEMORY if name in extra]
    return Finding("unplanned", f"{section}.extra has {', '.join(other)}") if other else None
