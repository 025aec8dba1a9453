"""What a run does about memory and generation where its settings leave it open: by the plan, once, when it starts.

What is set stays. What was decided is part of what the run was started with, so that it goes on with the same, on
whatever machine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from feedback.config import ScoringConfig
from serve.kv_cache import SERVER_SHARE, full_context, token_bytes
from serve.policies.folder import PolicyError, safetensors_header
from train.config.context_length import rollout_cache
from train.config.training import TrainConfig
from train.planner.machine import Machine
from train.planner.plan import KV_STEP, Models, NothingFits, Plan, Workload, candidates, choose, plan

_CHECKPOINTING: Final = "activation_checkpointing"
_REDUCE: Final = "fsdp.reduce_every_micro_batch"
_OFFLOAD: Final = "fsdp.offload_while_generating"
_EAGER: Final = "rollout.enforce_eager"
_KV_CACHE: Final = "rollout.kv_cache_bytes"

OPEN: Final = (_CHECKPOINTING, _REDUCE, _OFFLOAD, _EAGER, _KV_CACHE)
"""Settings of train that are decided so where they are unset (null)."""

PROMPT_TOKENS: Final = 512
"""Of a prompt, before any is known: what `millrace plan` takes, too."""

_BLOCK: Final = 128  # tokens, of vLLM's largest usual block


@dataclass(frozen=True)
class Decided:
    """``values``: of the settings in ``OPEN`` that were unset, by name; ``why``: one line."""

    config: TrainConfig
    values: dict[str, Any]
    why: str

    @property
    def saves(self) -> bool:
        """Whether anything is done for want of memory, or otherwise than on a CPU with plenty of it."""
        return any(value and name != _EAGER for name, value in self.values.items()) or self.values.get(_EAGER) is False

    @property
    def line(self) -> str:
        """For people."""
        shown = ", ".join(f"train.{name}={json.dumps(value)}" for name, value in self.values.items())
        return f"{self.why}: {shown}"


def decide(
    config: TrainConfig,
    policy: Path,
    machine: Machine | None,
    models: Models | None = None,
    reward: str | ScoringConfig | None = None,
) -> Decided:
    """The settings of a run from the policy in a folder, with nothing of ``OPEN`` left but a CPU's KV cache, which
    ``train.config.context_length`` sizes. Imports torch and transformers.

    Where the model can't be planned for, a GPU gets what needs least memory. ``machine``: None for GPUs of which the
    memory is not known. ``models``: of the run, if they are there; ``reward``: else, as of ``models_of``.
    """
    from train.planner.model_shape import models_of, read_config

    if not _unset(config):
        return Decided(config, {}, "all of it is set")
    if machine is not None and machine.kind == "cpu" and models is None and is_small(config, policy, machine):
        return _decided(config, unplanned(config, machine), "without a plan, as it is small")
    if machine is None:
        return _decided(config, unplanned(config, None), "without a plan, as the memory of the GPUs is not known")
    started = config
    if machine.kind == "cpu" and config.samples:
        started = with_values(config, {_KV_CACHE: rollout_cache(config, policy).size})
    try:
        models = models or models_of(read_config(policy), config, machine.kind, reward)
        context = context_of(config, policy)
        found = by_plan(started, models, machine, context)
        values = values_of(found)
        if machine.kind == "cuda" and config.samples:
            values[_KV_CACHE] = kv_cache(found, policy, context)
        why = f"by the plan for {machine.devices} x {machine.name}"
    except Exception as error:  # noqa: BLE001  whatever a model has in it: what can't be planned may work all the same
        values = unplanned(config, machine)
        why = f"without a plan ({(str(error).strip() or type(error).__name__).splitlines()[0]})"
    return _decided(config, values, why)


def is_small(config: TrainConfig, policy: Path, machine: Machine) -> bool:
    """Whether a CPU's memory is so much more than a step can take that a plan, which takes a second, says nothing.

    A layer of width h has at least 12 h² parameters, and keeps some 34 h values of a token for its gradient
    (Korthikanti et al., arXiv 2205.05198, section 4.1, without attention's scores): with 4 bytes a value and h of at
    least 32, less than half a byte a parameter and token.
    """
    try:
        headers = [safetensors_header(file) for file in policy.glob("*.safetensors")]
    except PolicyError:
        return False
    parameters = sum(math.prod(entry["shape"]) for header in headers for entry in header.values())
    most = parameters * (32 + config.micro_batch_tokens / 2)
    return 0 < most < machine.memory / 4


def by_plan(config: TrainConfig, models: Models, machine: Machine, context: int | None) -> Plan:
    """The plan of these settings with what is open chosen, and nothing else.

    On a GPU the fastest that fits; on a CPU, whose seconds are not known so well, the first that fits of those that
    compute least. If none fits, the one that needs least.
    """
    most = config.rollout.max_model_len or context or PROMPT_TOKENS + config.longest_response
    work = Workload.of(config, max(1, min(PROMPT_TOKENS, most - config.longest_response)))
    fixed = _fixed(config)
    if machine.kind == "cuda":
        try:
            return choose(fixed, models, machine, work)
        except NothingFits:
            pass
    plans = (plan(each, models, machine, work) for each in _by_work(candidates(fixed, models, machine, work)))
    tried = []
    for each in plans:
        if each.fits:
            return each
        tried.append(each)
    if not tried:
        raise NothingFits("the settings suit no number of ranks")
    room = machine.host_capacity
    return min(tried, key=lambda each: (each.host_bytes > room, each.peak.bytes))


def kv_cache(found: Plan, policy: Path, context: int | None) -> int:
    """Bytes for an engine on a GPU: what a step's sequences can use, and at least one response of the whole context, as
    far as there is room."""
    config = found.config
    each = token_bytes(policy, config.dtype, config.rollout.tensor_parallel_size)
    if each is None or context is None:
        return found.kv_bytes
    generate = next(phase for phase in found.phases if phase.name == "generate")
    room = (found.machine.usable - generate.bytes + found.kv_bytes) // KV_STEP * KV_STEP
    whole = (-(-context // _BLOCK) + 1) * _BLOCK * each
    return max(found.kv_bytes, min(whole, room))


def unplanned(config: TrainConfig, machine: Machine | None) -> dict[str, Any]:
    """What there is without a plan: on a CPU what computes least, on a GPU (None: of any size) what needs least."""
    gpu = machine is None or machine.kind == "cuda"
    eager = not gpu or config.rollout.backend == "hf"
    values: dict[str, Any] = {_CHECKPOINTING: gpu, _REDUCE: gpu, _OFFLOAD: False, _EAGER: eager}
    if machine is not None and gpu and config.samples:
        values[_KV_CACHE] = int(SERVER_SHARE * machine.memory)
    return values


def values_of(found: Plan) -> dict[str, Any]:
    config = found.config
    return {
        _CHECKPOINTING: bool(config.activation_checkpointing),
        _REDUCE: bool(config.fsdp.reduce_every_micro_batch),
        _OFFLOAD: bool(config.fsdp.offload_while_generating),
        _EAGER: found.is_eager or config.rollout.backend == "hf",
    }


def with_values(config: TrainConfig, values: Mapping[str, Any]) -> TrainConfig:
    """``config`` with these values for settings that are unset. ``values``: by name, as in ``OPEN``."""
    for name, value in values.items():
        section, _, field = name.rpartition(".")
        own = getattr(config, section) if section else config
        if getattr(own, field) is not None or value is None:
            continue
        changed = own.model_copy(update={field: value})
        config = config.model_copy(update={section: changed}) if section else changed
    return config


def as_begun(config: TrainConfig, begun: Mapping[str, Any]) -> TrainConfig:
    """``config`` with what a run has begun with, where it leaves that open. ``begun``: the dump of its settings."""

    def value(name: str) -> Any:
        found: Any = begun
        for part in name.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found

    return with_values(config, {name: value(name) for name in OPEN})


def context_of(config: TrainConfig, policy: Path) -> int | None:
    """Tokens that prompt and response may have; None if neither settings nor config.json say."""
    known = full_context(json.loads((policy / "config.json").read_text()))
    return config.rollout.max_model_len or known


def _decided(config: TrainConfig, values: Mapping[str, Any], why: str) -> Decided:
    decided = {name: value for name, value in values.items() if name in _unset(config)}
    return Decided(with_values(config, decided), decided, why)


def _unset(config: TrainConfig) -> list[str]:
    def value(name: str) -> Any:
        section, _, field = name.rpartition(".")
        return getattr(getattr(config, section) if section else config, field)

    return [name for name in OPEN if value(name) is None]


def _fixed(config: TrainConfig) -> TrainConfig:
    """The same, with all that ``choose`` would choose as set, but for what is unset here."""
    set_ = ("cpu_offload", "offload_optimizer", "tensor_parallel", "sequence_parallel", "replicas")
    fsdp = {name: getattr(config.fsdp, name) for name in set_}
    rollout = {"tensor_parallel_size": config.rollout.tensor_parallel_size}
    whole = {name: getattr(config, name) for name in ("micro_batch_tokens", "ranks")}
    parts = {
        "fsdp": config.fsdp.model_copy(update=fsdp),
        "rollout": config.rollout.model_copy(update=rollout),
    }
    return config.model_copy(update=whole | parts)


def _by_work(open_: Iterator[TrainConfig]) -> list[TrainConfig]:
    """Those that compute and move least first."""
    return sorted(
        open_,
        key=lambda config: (
            bool(config.fsdp.offload_while_generating),
            bool(config.activation_checkpointing),
            bool(config.fsdp.reduce_every_micro_batch),
        ),
    )
