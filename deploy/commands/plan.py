"""plan: what a model takes on a machine, before anything is downloaded or started."""

from __future__ import annotations

import gc
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from deploy.commands.common import as_json_option, pass_settings
from deploy.config.root import Settings

if TYPE_CHECKING:
    from feedback.config import ScoringConfig
    from train.config.training import TrainConfig
    from train.planner.assignment import Assignment
    from train.planner.machine import Machine
    from train.planner.plan import Models, Plan, Serving, Workload
    from train.planner.sizes import ModelShape

GIB = 2**30


@click.command()
@click.option("--model", type=click.Path(path_type=Path), metavar="PATH", help="A model's folder, or its config.json.")
@click.option("--gpus", metavar="NxKIND", help="The devices: 8x80GB, 8xA100, 8xH100, 4xH200; cpu is this machine.")
@click.option(
    "--machine",
    "machine_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Devices of your own, in place of --gpus: YAML with rates that differ from a preset's.",
)
@click.option(
    "--prompt-tokens",
    type=click.IntRange(min=1),
    default=512,
    show_default=True,
    help="Tokens of a prompt; responses have train.rollout.max_tokens.",
)
@as_json_option
@pass_settings
def plan(
    settings: Settings,
    model: Path | None,
    gpus: str | None,
    machine_file: Path | None,
    prompt_tokens: int,
    as_json: bool,
) -> int:
    """Plan memory and time of training and serving a model, from its config.json alone.

    Settings of train that are set are kept; those of memory and parallelism that are not are chosen: micro-batch,
    activation checkpointing, reduction of gradients, offload, tensor and sequence parallelism, replicas, and the KV
    cache of generation. Without --model it is the policy that serves.

    Memory is counted as training allocates it. Seconds follow from the machine's rates and the share of its peak that
    runs usually reach: good for comparing, and not measured on it. A CPU's rates are measured.

    For one machine with GPUs it says, too, which devices the server, training and evaluation would have, each its own
    or in turns (the settings of devices).

    Exit code 1 if nothing fits; the message says by how much, and which machines would do.
    """
    from train.planner.machine import MachineUnknown, read_machine
    from train.planner.plan import NothingFits, Workload, choose, faster_machine, fitting_machines, serving, sets_ranks

    config = settings.train.resolved(settings.path)
    try:
        if (gpus is None) == (machine_file is None):
            raise MachineUnknown("name the machine by one of --gpus (8x80GB, 8xH100, cpu) and --machine FILE")
        work = Workload.of(config, prompt_tokens)
        machine = _machine(gpus or "", config) if machine_file is None else read_machine(machine_file)
    except MachineUnknown as error:
        raise click.UsageError(str(error)) from error
    with _garbage_left():
        from train.planner.model_shape import ModelNotPlanned, models_of, read_config, slot_parameters

    try:
        policy = read_config(model or _serving_folder(settings), config.model)
        models = models_of(policy, config, machine.kind, _reward(settings))
        if machine_file is None and machine.kind == "cpu":
            from train.own_model.model_class import maker
            from train.planner.cpu_rates import measure_cpu

            threads, make = config.threads_per_rank, maker(config.model)
            machine = measure_cpu(config.ranks, dtype=config.dtype, threads=threads, model=policy, make=make)
    except ModelNotPlanned as error:
        raise click.UsageError(str(error)) from error
    try:
        found = choose(config, models, machine, work)
    except NothingFits as error:
        would_do = [f"{p.machine.devices} x {p.machine.name}" for p in fitting_machines(config, models, machine, work)]
        remedy = f"; it would fit on {' or on '.join(would_do)}" if would_do else ""
        raise NothingFits(f"{error}{remedy}") from error
    twice = None
    if machine.kind != "cpu" and not sets_ranks(config):
        twice = choose(config, models, replace(machine, devices=2 * machine.devices), work)
    better = faster_machine(config, models, found, work)
    engine = settings.serve.engine
    slots = 0 if engine.adapters is None else slot_parameters(policy, engine.adapters, config.model)
    replica = serving(models.policy.shape, engine, settings.serve.swap, machine, slots)
    ways = _ways(settings, config, models, machine, work, found, replica)
    if as_json:
        click.echo(json.dumps(_as_json(found, models.policy.shape, work, replica, twice, better, ways), indent=2))
    else:
        for line in _lines(found, models.policy.shape, work, replica, {"more": twice, "better": better}):
            click.echo(line)
        for line in _devices(ways):
            click.echo(line)
    return 0


def _reward(settings: Settings) -> str | ScoringConfig | None:
    """What rewards rollouts; None also where the stores that know can't be read, which a plan needs nothing else of."""
    from serve.policies.folder import PolicyError

    try:
        return settings.rollout_reward()
    except (PolicyError, OSError):
        return None


@dataclass(frozen=True)
class Way:
    """One way to share out the devices of a machine: ``use`` as of the setting, with a training plan or why not."""

    use: Literal["own", "in_turns"]
    assignment: Assignment | None = None
    plan: Plan | None = None
    why_not: str = ""


def _ways(
    settings: Settings,
    config: TrainConfig,
    models: Models,
    machine: Machine,
    work: Workload,
    found: Plan,
    replica: Serving,
) -> list[Way]:
    """How the server, training and evaluation can share the devices of one machine; none of a CPU, or of several."""
    from train.planner.assignment import ASLEEP, CannotAssign, Need, assign
    from train.planner.plan import NothingFits, choose

    count = machine.devices
    if machine.kind == "cpu" or count > machine.node_devices:
        return []
    servers = replica.devices * max(settings.serve.fleet.replicas, settings.serve.fleet.max_replicas or 1)
    evaluates = settings.evaluation.engine.tensor_parallel_size
    ways = []
    uses: tuple[Literal["own", "in_turns"], ...] = ("own", "in_turns")
    for use in uses:
        left = count if use == "in_turns" else count - servers
        beside = machine.memory - (ASLEEP if use == "in_turns" else 0)
        try:
            if left < 1:
                has = "the only device" if count == 1 else f"{min(servers, count)} of {count} devices"
                raise NothingFits(f"the server has {has}")
            if use == "in_turns" and (why := settings.serve.never_sleeps):
                raise NothingFits(why)
            of_training = replace(machine, devices=left, memory=beside)
            fits = found.machine.devices == left and found.peak.bytes <= of_training.usable
            chosen = found if fits else choose(config, models, of_training, work)
            ranks = sum(map(chosen.config.ranks_of, chosen.config.placement.pools))
            needs = Need(servers, "its plan"), Need(ranks, "train.ranks"), Need(evaluates, "evaluation.engine")
            ways.append(Way(use, assign(count, *needs, use=use), chosen))
        except (NothingFits, CannotAssign) as error:
            ways.append(Way(use, why_not=str(error)))
    return ways


def _devices(ways: list[Way]) -> Iterator[str]:
    """What there is to say of them, one line each."""
    for way, named in zip(ways, ("own", "turns"), strict=True) if ways else ():
        if way.plan is None:
            yield f"{named:<10}no: {way.why_not}"
        else:
            yield f"{named:<10}{way.assignment}: {way.plan.seconds:.2f} s a step"


@contextmanager
def _garbage_left() -> Iterator[None]:
    """Within, no garbage is looked for: an import of torch and transformers makes a million objects that all stay, and
    spends a fifth of its time on going through them."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _machine(gpus: str, config: TrainConfig) -> Machine:
    """What --gpus says; a CPU's rates are still to be measured, at the width of the model's hidden states."""
    from train.planner.machine import parse_gpus, this_cpu

    return this_cpu(config.ranks) if gpus.strip().lower() == "cpu" else parse_gpus(gpus)


def _serving_folder(settings: Settings) -> Path:
    store = settings.policy_store()
    if (pointer := store.serving()) is None:
        raise click.UsageError("no policy serves: name a model's folder or its config.json (--model PATH)")
    return store.get(pointer.version).path


def _as_json(
    found: Plan,
    shape: ModelShape,
    work: Workload,
    replica: Serving,
    twice: Plan | None,
    better: Plan | None,
    ways: list[Way],
) -> dict[str, Any]:
    model = {"architecture": shape.architecture, "parameters": shape.parameters, "active": shape.active}
    machine = {name: None if value == math.inf else value for name, value in asdict(found.machine).items()}
    return {
        "model": {**model, "by_kind": shape.kinds, "stored": shape.stored},
        "machine": {**machine, "usable": found.machine.usable},
        "step": asdict(work),
        "settings": found.settings,
        "gpu_memory_utilization": round(found.engine_share, 3),
        "micro_batches": found.micro_batches,
        "phases": [{**asdict(phase), "bytes": phase.bytes} for phase in found.phases],
        "host_bytes": found.host_bytes,
        "seconds": found.seconds,
        "memory_limit": {"phase": found.peak.name, "bytes": found.peak.bytes, "largest": _most(found.peak.memory)},
        "time_limit": {"phase": found.slowest.name, "bound": found.slowest.cost.bound},
        "twice_the_devices": None if twice is None else {"seconds": twice.seconds, "settings": twice.settings},
        "next_machine": None
        if better is None
        else {"name": better.machine.name, "seconds": better.seconds, "settings": better.settings},
        "serving": asdict(replica),
        "devices": {way.use: _way_as_json(way) for way in ways},
    }


def _way_as_json(way: Way) -> dict[str, Any]:
    if way.plan is None or way.assignment is None:
        return {"why_not": way.why_not}
    return asdict(way.assignment) | {"seconds": way.plan.seconds, "settings": way.plan.settings}


def _lines(
    found: Plan, shape: ModelShape, work: Workload, replica: Serving, others: Mapping[str, Plan | None]
) -> Iterator[str]:
    """The plan for people. ``others``: of better machines, by what a line about them begins with."""
    from deploy.display.tables import table

    machine, usable = found.machine, _gib(found.machine.usable)
    kinds = ", ".join(f"{kind} {_count(count)}" for kind, count in shape.kinds.items())
    active = f", {_count(shape.active)} of them active" if shape.active != shape.parameters else ""
    yield f"model     {shape.architecture}, {_count(shape.parameters)} parameters{active}: {kinds}"
    yield f"machine   {machine.devices} x {machine.name}: {_gib(machine.memory)} GiB each, of which {usable} to fill"
    responses = f" x {work.group_size} responses" if work.group_size > 1 else ""
    lengths = f"{work.prompt_tokens} + {work.response_tokens} tokens"
    yield f"step      {work.prompts} prompts{responses} of {lengths}, in {found.micro_batches} micro-batches a rank"
    yield ""
    yield from (f"{name}: {json.dumps(value)}" for name, value in found.settings.items())
    yield ""
    rows = [
        [
            phase.name,
            _gib(phase.bytes),
            ", ".join(f"{name} {_gib(count)}" for name, count in Counter(phase.memory).most_common(4)),
            f"{phase.cost.seconds:.2f}",
            f"{phase.cost.moved / GIB:.1f}",
            phase.cost.bound,
        ]
        for phase in found.phases
    ]
    rows.append(["step", _gib(found.peak.bytes), "", f"{found.seconds:.2f}", "", ""])
    yield table(["phase of a rank", "GiB", "most of it", "seconds", "GiB moved", "bound by"], rows)
    yield ""
    what, most = _most(found.peak.memory)
    yield f"memory    {found.peak.name} has the most, and in it {what} ({_gib(most)} GiB)"
    yield f"time      {found.slowest.name} takes the longest, bound by {found.slowest.cost.bound}"
    for label, other in others.items():
        if other is not None:
            on = f"{other.machine.devices} x {other.machine.name}"
            yield f"{label:<10}{on}: {other.seconds:.2f} s a step instead of {found.seconds:.2f}"
    if found.host_bytes:
        yield f"host      {_gib(found.host_bytes)} GiB of a node's own memory, for what is offloaded"
    if found.config.samples and found.config.rollout.backend == "vllm" and machine.kind != "cpu":
        yield f"vllm      is started with gpu_memory_utilization {found.engine_share:.2f} for rollouts"
    if machine.kind != "cpu":
        yield f"serving   {_of_serving(replica)}"


def _of_serving(replica: Serving) -> str:
    what = (
        f"a replica on {replica.devices} device{'s' * (replica.devices > 1)} of its own has {_gib(replica.weights)} "
        f"GiB of weights and {_gib(replica.kv_cache)} of KV cache on each; "
    )
    if replica.in_place:
        return f"{what}a swap loads in place, while requests wait: {replica.reason}"
    return f"{what}{replica.reason} (gpu_memory_utilization {replica.utilization:g})"


def _most(memory: dict[str, int]) -> tuple[str, int]:
    return max(memory.items(), key=lambda item: item[1])


def _gib(count: int) -> str:
    return f"{count / GIB:.1f}"


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f}B" if parameters >= 1e9 else f"{parameters / 1e6:.2f}M"
