"""A training step on a machine: what each phase takes of a rank's memory and time, and the settings that suit."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from serve.config import EngineConfig, SwapConfig
from serve.kv_cache import SERVER_SHARE, device_share
from serve.standby_room import SLACK, WORKSPACE, Needs, decide, never_standby
from train.batch.packing import EVEN
from train.config.training import TrainConfig
from train.planner import memory, step_time
from train.planner.engine_memory import ADAPTER_COPIES, engine_bytes
from train.planner.machine import Machine, better_presets
from train.planner.memory import Memory, Sharding
from train.planner.reward_models import Scorer
from train.planner.sizes import GIB, ITEMSIZE, Activations, Batch, ModelShape, PassOperations
from train.planner.step_time import Cost, Counts, Generation

MICRO_BATCHES: Final = (65536, 32768, 16384, 8192, 4096, 2048, 1024)
TENSOR_PARALLEL: Final = (1, 2, 4, 8)
SEQUENCE_PARALLEL: Final = (1, 2, 4, 8)
LONG: Final = 8192
"""Tokens of a sequence from which on it may be worth while that ranks share it."""

MEMORY_SIZES: Final = (24, 40, 48, 80, 96, 141, 192, 288)
"""Of devices that there are, GB."""

KV_STEP: Final = GIB // 4
GRAPHS: Final = GIB // 2
"""That CUDA graphs take on a device, also while the engine sleeps; an estimate."""

_PREFILLED: Final = 8192
_PREFILLED_BY_LARGE: Final = 16384
_LARGE: Final = 70 * GIB
"""Tokens that vLLM computes in a step, and once as it starts: twice as many on GPUs of so much memory
(``EngineArgs.get_batch_defaults``), but for the A100."""

_KV_LEAST: Final = 16 * 2**20


class NothingFits(ValueError):
    """No settings fit on the machine; the text says by how much, and which machine would do."""


@dataclass(frozen=True)
class Workload:
    """A step's prompts and their lengths, the longest that are expected. ``whole_groups``: none is split over ranks."""

    prompts: int
    group_size: int
    prompt_tokens: int
    response_tokens: int
    whole_groups: bool = False

    @classmethod
    def of(cls, config: TrainConfig, prompt_tokens: int) -> Workload:
        """A step as train says, with responses of the greatest length."""
        group = config.algorithm.group_size if config.samples else 2 if config.algorithm.name == "dpo" else 1
        response, context = config.longest_response, config.rollout.max_model_len
        if config.environment is not None and context is not None:  # turns end where the context does
            response = max(1, min(response, context - prompt_tokens))
        return cls(config.data.prompts_per_step, group, prompt_tokens, response, config.algorithm.name == "dpo")


class Trace(Protocol):
    """What a pass over a micro-batch keeps on each of ``slices`` ranks that share the layers."""

    def __call__(self, batch: Batch, slices: int = 1, /) -> Activations: ...

    def operations(self, batch: Batch, slices: int = 1, /) -> PassOperations:
        """What a pass runs beside its matrix products."""


@dataclass(frozen=True)
class TracedModel:
    """A model's sizes, and what a pass over a micro-batch keeps of it."""

    shape: ModelShape
    trace: Trace
    slices: int = 1
    _slices: dict[int, TracedModel] = field(default_factory=dict, init=False, compare=False, repr=False)

    def slice_of(self, slices: int) -> TracedModel:
        """What each of so many ranks has of it, and keeps, that share its layers."""
        if slices == 1:
            return self
        if slices not in self._slices:
            self._slices[slices] = TracedModel(self.shape.slice_of(slices), self.trace, slices)
        return self._slices[slices]

    def activations(self, batch: Batch) -> Activations:
        """What a pass over a micro-batch keeps of it."""
        return self.trace(batch, self.slices)

    def operations(self, batch: Batch) -> PassOperations:
        """What a pass over a micro-batch runs beside its matrix products."""
        return self.trace.operations(batch, self.slices)


@dataclass(frozen=True)
class Models:
    """The models of a run. ``policy``: as it is stored; ``actor``: with its adapters, if it has any.

    ``has_reference``: whether the run needs the parent's logprobs. ``scorers``: reward models.
    """

    policy: TracedModel
    actor: TracedModel
    critic: TracedModel | None
    has_reference: bool
    scorers: tuple[Scorer, ...] = ()


@dataclass(frozen=True)
class Phase:
    """A part of a step on the ranks of a pool. ``memory``: bytes of a rank, by role and use; ``cost``: of it.

    ``apart``: on a pool that nothing of the policy is on, so that no setting that is chosen changes its memory.
    """

    name: str
    pool: str
    memory: dict[str, int]
    cost: Cost
    apart: bool = False

    @property
    def bytes(self) -> int:
        return sum(self.memory.values())


@dataclass(frozen=True)
class Plan:
    """What a step takes with the settings ``config`` on ``machine``."""

    machine: Machine
    config: TrainConfig
    phases: tuple[Phase, ...]
    micro_batches: int
    kv_bytes: int
    engine_share: float
    offloaded: int

    @property
    def settings(self) -> dict[str, Any]:
        """Those that decide about memory, by name."""
        config = self.config
        rollout = {"train.rollout.kv_cache_bytes": self.kv_bytes}
        if config.rollout.backend == "vllm":
            rollout = {
                "train.rollout.tensor_parallel_size": config.rollout.tensor_parallel_size,
                "train.rollout.enforce_eager": self.is_eager,
                "train.fsdp.offload_while_generating": bool(config.fsdp.offload_while_generating),
            } | rollout
        return {
            "train.ranks": config.ranks,
            "train.micro_batch_tokens": config.micro_batch_tokens,
            "train.activation_checkpointing": bool(config.activation_checkpointing),
            "train.fsdp.reduce_every_micro_batch": bool(config.fsdp.reduce_every_micro_batch),
            "train.fsdp.cpu_offload": config.fsdp.cpu_offload,
            "train.fsdp.offload_optimizer": config.fsdp.offload_optimizer,
            "train.fsdp.tensor_parallel": config.fsdp.tensor_parallel,
            "train.fsdp.sequence_parallel": config.fsdp.sequence_parallel,
            "train.fsdp.replicas": config.fsdp.replicas,
            **(rollout if config.samples else {}),
        }

    @property
    def is_eager(self) -> bool:
        return is_eager(self.config, self.machine)

    @property
    def peak(self) -> Phase:
        """Of the phases that settings can change, the one with most."""
        return max((phase for phase in self.phases if not phase.apart), key=lambda phase: phase.bytes)

    @property
    def fits(self) -> bool:
        return self.peak.bytes <= self.machine.usable and self.host_bytes <= self.machine.host_capacity

    @property
    def host_bytes(self) -> int:
        """That the ranks of a node keep in the host's memory, by train.fsdp's settings of offload."""
        return self.offloaded * min(self.machine.devices, self.machine.node_devices)

    @property
    def seconds(self) -> float:
        return sum(phase.cost.seconds for phase in self.phases)

    @property
    def slowest(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.cost.seconds)


def is_eager(config: TrainConfig, machine: Machine) -> bool:
    """Whether vLLM captures no CUDA graphs: on a CPU, or if it is set."""
    eager = config.rollout.enforce_eager
    return machine.kind == "cpu" if eager is None else eager


def micro_batches(work: Workload, ranks: int, tokens: int) -> tuple[int, Batch, Batch]:
    """How many a rank makes of its part of a batch, as ``PackedBatch.micro_batches`` groups them.

    Returns:
        (count, the usual micro-batch, the largest): where responses are shorter than the longest, or uneven, more of
        them share one, up to the ``tokens`` that a micro-batch may have.
    """
    prompts, n = _part_of_a_rank(work, ranks)
    whole = work.prompt_tokens + n * work.response_tokens
    if whole <= tokens or n == 1:
        count = -(-prompts // max(1, tokens // whole))
        each, together = -(-prompts // count), n
    else:
        parts = -(-n // max(1, (tokens - work.prompt_tokens) // work.response_tokens))
        count, each, together = prompts * parts, 1, -(-n // parts)
    usual = Batch.of(each, together, work.prompt_tokens, work.response_tokens)
    used = each * (work.prompt_tokens + together * work.response_tokens)
    return count, usual, usual.scaled(max(1.0, min(tokens, prompts * whole) / used))


def _part_of_a_rank(work: Workload, ranks: int) -> tuple[int, int]:
    """(groups, responses in each) of the rank that has most, as ``PackedBatch.balanced`` deals them out: whole groups,
    halves, quarters, down to single responses, the first that is even, or else the evenest."""
    response, best, pieces = work.response_tokens, None, 1
    even = work.prompts * (work.prompt_tokens + work.group_size * response) / ranks
    while True:
        n = -(-work.group_size // pieces)
        groups = -(-work.prompts * pieces // ranks)
        cost = groups * (work.prompt_tokens + n * response)
        if best is None or cost < best[0]:
            best = cost, groups, n
        if cost <= EVEN * even or n == 1 or work.whole_groups:
            return best[1:]
        pieces *= 2


def plan(config: TrainConfig, models: Models, machine: Machine, work: Workload) -> Plan:
    """The plan of these settings, whether they fit or not. ``config.rollout.kv_cache_bytes`` None: what is free."""
    return _Planner(config, models, machine, work).plan()


def choose(config: TrainConfig, models: Models, machine: Machine, work: Workload) -> Plan:
    """The fastest plan that fits, of the settings that ``config`` leaves open (those that it sets stay).

    Chosen are micro-batch, activation checkpointing, when gradients are reduced, offload, what waits in the host's
    memory while the policy generates, the tensor parallelism of training and of generation, how many ranks share a
    sequence, and whether each node holds the whole model; of what is as fast, what needs less.

    Raises:
        NothingFits: none does.
    """
    _require_devices(config, machine)
    planners = [_Planner(open_, models, machine, work) for open_ in candidates(config, models, machine, work)]
    if not planners:
        raise NothingFits(
            f"no settings suit {machine.devices} devices: train.rollout.tensor_parallel_size="
            f"{config.rollout.tensor_parallel_size} and train.fsdp.replicas={config.fsdp.replicas} must divide them, "
            f"and each takes one of the {config.sequences_per_step} responses of a step at least, in "
            f"train.minibatches={config.minibatches}; leave them unset, or plan for another number"
        )
    if (fastest := _fastest(planners)) is not None:
        return fastest
    plans = [planner.plan() for planner in planners]
    least = min(plans, key=lambda found: found.peak.bytes)
    if (over := least.peak.bytes - machine.usable) <= 0:
        host = min(found.host_bytes for found in plans if found.peak.bytes <= machine.usable)
        raise NothingFits(
            f"nothing fits on {machine.devices} x {machine.name}: {host / GIB:.1f} GiB at least wait in the host's "
            f"memory, and a node has {machine.host_capacity / GIB:.1f}"
        )
    what, most = max(least.peak.memory.items(), key=lambda item: item[1])
    raise NothingFits(
        f"nothing fits on {machine.devices} x {machine.name}: with the least memory, {least.peak.name} needs "
        f"{least.peak.bytes / GIB:.1f} GiB of a device's {machine.usable / GIB:.1f}, {over / GIB:.1f} too many; most "
        f"of it is {what}, {most / GIB:.1f} GiB"
    )


def _fastest(planners: list[_Planner]) -> Plan | None:
    """Of the plans that fit, the fastest; of those within 0.01 s, the one that needs least; of equal ones the first.

    What a plan takes of memory is traced, and its seconds follow from the settings. So plans are made in the order of
    the least seconds that they may take, and none that can't be the fastest any more.
    """
    generation: dict[int, float] = {}  # by tensor parallelism, the only one of the choices that decides about it
    least = []
    for planner in planners:
        if planner.t not in generation:
            generation[planner.t] = planner.least_generation()
        least.append(planner.least_seconds(generation[planner.t]))
    best: tuple[float, int, int] | None = None
    fastest = None
    for index in sorted(range(len(planners)), key=least.__getitem__):
        if best is not None and round(least[index], 2) > best[0]:
            break
        found = planners[index].plan()
        order = (round(found.seconds, 2), found.peak.bytes, index)
        if found.fits and (best is None or order < best):
            best, fastest = order, found
    return fastest


def _require_devices(config: TrainConfig, machine: Machine) -> None:
    on = config.placement
    pools = {on.actor, on.reference, on.rollout, on.critic or on.actor}
    needed = {pool: config.ranks_of(pool) for pool in sorted(pools)}
    if sets_ranks(config) and sum(needed.values()) > machine.devices:
        ranks = ", ".join(f"{pool}: {count}" for pool, count in needed.items())
        raise NothingFits(
            f"train.ranks and train.placement.pools want {sum(needed.values())} devices ({ranks}), and there are "
            f"{machine.devices}; lower them, or plan for more devices"
        )


def sets_ranks(config: TrainConfig) -> bool:
    """Whether the settings say how many ranks there are; if not, there is one for each device."""
    return "ranks" in config.model_fields_set or len(config.placement.pools) > 1


def faster_machine(config: TrainConfig, models: Models, found: Plan, work: Workload) -> Plan | None:
    """The plan of the next better preset of devices, as many of them, on which a step takes less; None if none is."""
    for machine in better_presets(found.machine):
        with suppress(NothingFits):
            other = choose(config, models, machine, work)
            if round(other.seconds, 2) < round(found.seconds, 2):
                return other
    return None


def fitting_machines(config: TrainConfig, models: Models, machine: Machine, work: Workload) -> Iterator[Plan]:
    """Plans of the smallest machines that would do: with more of these devices, and with as many larger ones."""
    more = (replace(machine, devices=machine.devices * 2**power) for power in range(1, 9))
    sizes = (size for size in MEMORY_SIZES if size * GIB > machine.memory)
    larger = (replace(machine, name=f"{size}GB", memory=int(size * 0.985 * GIB)) for size in sizes)
    for machines in (more, larger):
        for other in machines:
            with suppress(NothingFits):
                yield choose(config, models, other, work)
                break


@dataclass(frozen=True)
class Serving:
    """A replica of the server on devices of its own, in bytes of each. ``standby``: left for a second set of weights.

    ``weights``: of one set, with its slots for adapters. ``in_place``: it has no second set, and a swap loads in place;
    ``reason``: why, or what the second set takes. ``utilization``: of a device, that vLLM is started with.
    """

    devices: int
    weights: int
    kv_cache: int
    standby: int
    utilization: float
    in_place: bool
    reason: str


def serving(shape: ModelShape, engine: EngineConfig, swap: SwapConfig, machine: Machine, adapters: int = 0) -> Serving:
    """A replica as serve.engine says, on as many devices as one copy needs where it doesn't say.

    ``adapters``: parameters of all slots for adapters, which each device has whole. Whether there is a second set of
    weights is what the server itself decides (``serve.standby_room``).
    """
    itemsize = ITEMSIZE.get(shape.stored if engine.dtype == "auto" else engine.dtype, 2)
    gpu, share = machine.kind != "cpu", engine.gpu_memory_utilization
    sizes = [t for t in TENSOR_PARALLEL if shape.heads % t == 0]
    if "tensor_parallel_size" in engine.model_fields_set:
        sizes = [engine.tensor_parallel_size]
    least = engine.max_model_len or min(shape.context or _PREFILLED, _PREFILLED)  # tokens of KV cache
    for t in sizes:
        one_set, each = itemsize * shape.parameters // t, shape.key_value_bytes(itemsize, t)
        weights = one_set + itemsize * adapters
        cache = engine.kv_cache_bytes or int(share * machine.memory) - weights - WORKSPACE
        if t == sizes[-1] or cache >= least * each:
            break
    used = engine.max_num_seqs * (engine.max_model_len or shape.context or swap.least_kv_tokens)
    tokens = max(engine.max_model_len or 0, min(swap.least_kv_tokens, used))
    wanted = engine.kv_cache_bytes if gpu or engine.kv_cache_bytes else int(SERVER_SHARE * machine.memory)
    needs = Needs(weights, int(SLACK * one_set), wanted, tokens * each)
    unsupported = never_standby(engine, gpu=gpu, quantized=False)
    room = decide(
        needs, engine, swap, gpu=gpu, memory=machine.memory, reserved=machine.reserved, unsupported=unsupported
    )
    cache = room.kv_cache_bytes or int(room.utilization * machine.memory) - weights - WORKSPACE
    return Serving(t, weights, max(0, cache), room.second, room.utilization, room.in_place, room.reason)


def candidates(config: TrainConfig, models: Models, machine: Machine, work: Workload) -> Iterator[TrainConfig]:
    """All settings to choose from."""
    longest = work.prompt_tokens + work.response_tokens
    rollout, fsdp = config.rollout, config.fsdp
    cpu = machine.kind == "cpu"
    own = config.placement.pools if len(config.placement.pools) > 1 else {}
    ranks = config.ranks if sets_ranks(config) else machine.devices
    engines = own[config.placement.rollout].ranks or ranks if own else ranks
    heads = models.policy.shape.heads
    most = min(machine.node_devices, engines)
    tensor_parallel = [t for t in TENSOR_PARALLEL if engines % t == 0 and heads % t == 0 and t <= most]
    slices = _slices(config, models, machine, ranks)
    packs = any(lora is not None and lora.base is not None for lora in (config.lora, config.algorithm.critic.lora))
    if packs or (config.fp8 is not None and config.fp8.training is not None):
        slices = [1]  # as the settings are checked
    in_turns = config.samples and rollout.backend == "vllm" and config.placement.rollout == config.placement.actor
    sharers, replicas = _sharers(config, models, machine, work), _replicas(config, models, machine, ranks)
    if config.samples and rollout.backend == "hf":  # which shares no layer, and no sequence
        tensor_parallel = slices = sharers = [1]
    choices = (
        _open(config, "micro_batch_tokens", [n for n in MICRO_BATCHES if n >= longest] or [longest]),
        _open(config, "activation_checkpointing", [False, True]),
        _open(fsdp, "reduce_every_micro_batch", [False, True]),
        _open(fsdp, "cpu_offload", [False] if cpu or fsdp.offload_optimizer or packs else [False, True]),
        _open(rollout, "tensor_parallel_size", tensor_parallel),
        _open(fsdp, "tensor_parallel", slices),
        _open(fsdp, "offload_while_generating", [False, True] if in_turns and not cpu else [False]),
        _open(fsdp, "replicas", replicas),
        _open(fsdp, "sequence_parallel", sharers),
        _open(fsdp, "offload_optimizer", [False] if cpu else [False, True]),
    )
    for tokens, checkpointing, reduce, offload, t, cut, away, copies, share, waits in itertools.product(*choices):
        if offload and (away or waits):
            continue  # all of it is in the host's memory at all times
        if engines % t or (config.placement.rollout == config.placement.actor and (ranks // copies) % t):
            continue  # an engine would cross replicas
        if share > 1 and not _can_share(config, models, machine, ranks, share, cut):
            continue
        if (ranks // copies) % cut:
            continue  # ranks that share layers would cross replicas
        if config.placement.rollout == config.placement.actor and t % cut and cut % t:
            continue  # they share ranks
        found = config.model_copy(
            update={
                "ranks": ranks,
                "micro_batch_tokens": tokens,
                "activation_checkpointing": checkpointing,
                "fsdp": fsdp.model_copy(
                    update={
                        "reduce_every_micro_batch": reduce,
                        "cpu_offload": offload,
                        "tensor_parallel": cut,
                        "offload_while_generating": away,
                        "replicas": copies,
                        "sequence_parallel": share,
                        "offload_optimizer": waits,
                    }
                ),
                "rollout": rollout.model_copy(update={"tensor_parallel_size": t}),
            }
        )
        if found.sequences_per_step >= found.data_parallel_ranks * found.minibatches:
            yield found


def _slices(config: TrainConfig, models: Models, machine: Machine, ranks: int) -> list[int]:
    """In how many slices training may cut the layers: of ranks of one node, that can still share out a step."""
    fsdp, traced = config.fsdp, _trained(models)
    return [
        t
        for t in TENSOR_PARALLEL
        if t <= machine.node_devices
        and all(t in model.shape.tensor_parallel for model in traced)
        and all(
            n // fsdp.replicas % t == 0 and n % (t * fsdp.sequence_parallel) == 0
            for n in _training_ranks(config, ranks)
        )
    ]


def _sharers(config: TrainConfig, models: Models, machine: Machine, work: Workload) -> list[int]:
    """How many ranks may share a sequence: several where sequences are long."""
    fsdp = config.fsdp
    if work.prompt_tokens + work.response_tokens < LONG or fsdp.compile_layers is not None or fsdp.attention != "auto":
        return [1]
    if not all(model.shape.shares_sequences for model in _trained(models)):
        return [1]
    return [n for n in SEQUENCE_PARALLEL if n <= machine.node_devices]


def _can_share(config: TrainConfig, models: Models, machine: Machine, ranks: int, sharers: int, slices: int) -> bool:
    """Whether so many ranks can share sequences, and so many layers, on one node (``_ranks_divide``)."""
    together = sharers * slices
    return (
        together <= machine.node_devices
        and all(model.shape.heads % together == 0 for model in _trained(models))
        and all(n % together == 0 for n in _training_ranks(config, ranks))
    )


def _replicas(config: TrainConfig, models: Models, machine: Machine, ranks: int) -> list[int]:
    """How many copies of the model there may be: one for each node, where the network between nodes is slower than
    what joins a node's devices, and a node holds what is kept from step to step; or one in all."""
    nodes, rest = divmod(ranks, machine.node_devices)
    if nodes < 2 or rest or machine.network >= machine.link or set(_training_ranks(config, ranks)) != {ranks}:
        return [1]
    alone = Sharding(1, ITEMSIZE[config.dtype], ITEMSIZE[config.dtype], state=memory.state_bytes(config.optimizer))
    kept = sum(memory.held(model.shape, alone).total() for model in _trained(models))
    return [nodes, 1] if kept < machine.usable * machine.node_devices else [1]


def _trained(models: Models) -> list[TracedModel]:
    return [model for model in (models.actor, models.critic) if model is not None]


def _training_ranks(config: TrainConfig, ranks: int) -> list[int]:
    """Of each pool that trains, or has the reference; ``ranks``: of those that do not say how many."""
    on = config.placement
    return [on.pools[pool].ranks or ranks for pool in {on.actor, on.reference, on.critic or on.actor}]


def _open(section: Any, name: str, values: list[Any]) -> list[Any]:
    """What to choose from: the values, or what the section has where somebody set it."""
    value = getattr(section, name)
    return values if value is None or name not in section.model_fields_set else [value]


@dataclass(frozen=True)
class _Pass:
    """A pass over a batch by the ranks of a role. ``took``: bytes of a rank, its own model's part alone."""

    name: str
    role: str
    cost: Cost
    took: Callable[[], Memory]


class _Planner:
    """One plan in the making."""

    def __init__(self, config: TrainConfig, models: Models, machine: Machine, work: Workload) -> None:
        self.config, self.models, self.machine, self.work = config, models, machine, work
        self.itemsize = ITEMSIZE[config.dtype]
        self.t = config.rollout.tensor_parallel_size
        self.slices = config.fsdp.tensor_parallel
        on = config.placement
        self.pools = {
            "actor": on.actor,
            **({"reference": on.reference} if models.has_reference else {}),
            **({"critic": on.critic or on.actor} if models.critic is not None else {}),
            **({"rollout": on.rollout} if config.samples else {}),
        }
        self.eager = is_eager(config, machine)
        self.shares_actor = config.lora is not None and on.reference == on.actor
        minibatch = replace(work, prompts=-(-work.prompts // config.minibatches))
        sharers = config.fsdp.sequence_parallel
        self.count, usual, full = micro_batches(minibatch, config.data_parallel_ranks, config.micro_batch_tokens)
        self.batch, self.full = usual.scaled(1 / sharers), full.scaled(1 / sharers)
        self.computed: Counts = usual.share(sharers)
        self.held = {role: self._held(role) for role in self.pools if role != "rollout"}
        # Without a pool they are in the driver, on its first device, which the first pool has.
        self.rewards_on = on.reward or next((pool for pool in on.pools if pool in self.pools.values()), on.actor)
        self.scorers = models.scorers if self._has_rewards(set(self.pools.values())) else ()
        self.passes = list(self._training())

    def plan(self) -> Plan:
        phases = [*self._rewarding(), *(self._phase(each) for each in self.passes)]
        kv = 0
        if "rollout" in self.pools:
            stays = self._is_engine and (self.machine.kind == "cpu" or self._own_pool)  # an engine that doesn't sleep
            beside = phases if stays else []
            kv = self._kv_bytes([phase for phase in beside if phase.pool == self.pools["rollout"]])
            if beside:
                phases = [self._beside_engine(phase, kv) for phase in phases]
            phases = [*self._sampling(kv), *phases]
            if self._graphs:
                phases = [self._beside_graphs(phase) for phase in phases]
        share = device_share(self._engine_weights, kv, self.machine.memory)
        return Plan(self.machine, self.config, tuple(phases), self.count, kv, share, self._offloaded())

    def least_seconds(self, generation: float) -> float:
        """That the plan may take, if generation takes so many."""
        sync = [self._sync_cost().seconds] if "rollout" in self.pools and self._is_engine else []
        away = self._parked_bytes() * 2 / self.machine.host
        costs = [each.cost for each in self._rewarding()] + [each.cost for each in self.passes]
        return sum([generation, away, *sync, *(cost.seconds for cost in costs)])

    def least_generation(self) -> float:
        """Seconds of generation, whatever room there is for a KV cache; 0 if nothing is sampled."""
        if "rollout" not in self.pools:
            return 0
        most = min(self.config.rollout.max_num_seqs, self._sequences)
        return min(self._generation_cost(at_once).seconds for at_once in range(1, most + 1))

    # ------------------------------------------------------------------------------------------------- training

    def _training(self) -> Iterator[_Pass]:
        once = self.config.minibatches  # a pass over the step's batch
        times = self.config.epochs * once
        if "reference" in self.pools:
            yield self._inference("actor" if self.shares_actor else "reference", "reference log_probs", once)
        if self.config.old_log_probs_first:
            yield self._inference("actor", "actor log_probs", once)
        if self.models.critic is not None:
            yield self._inference("critic", "critic values", once)
            yield self._update("critic", times)
        yield self._update("actor", times)

    def _inference(self, role: str, name: str, times: int) -> _Pass:
        model, how = self._model(role), self._how(role)
        cost = step_time.inference_cost(model.shape, how, self.computed, self.machine, self._operations(model))
        return _Pass(
            name,
            role,
            cost.times(times),
            lambda: self.held[role] + memory.inference(model.shape, how, model.activations(self.full)),
        )

    def _update(self, role: str, times: int) -> _Pass:
        model, how = self._model(role), self._how(role)
        cost = step_time.update_cost(model.shape, how, self.computed, self.machine, self._operations(model))
        return _Pass(
            f"{role} update",
            role,
            cost.times(times),
            lambda: memory.update(model.shape, how, model.activations(self.full)),
        )

    def _operations(self, model: TracedModel) -> PassOperations | None:
        """What a pass runs beside matrix products, on a machine whose rates know what that takes."""
        return model.operations(self.batch) if self.machine.operation_s else None

    def _phase(self, each: _Pass) -> Phase:
        pool = self.pools[each.role]
        return Phase(each.name, pool, dict(self._beside(each.role, pool) + _named(each.role, each.took())), each.cost)

    def _beside(self, role: str, pool: str) -> Counter[str]:
        """What the pool's other roles hold meanwhile."""
        held = [_named(r, m) for r, m in self.held.items() if self.pools[r] == pool and r != role]
        return sum(held, self._rewards_held(pool))

    def _model(self, role: str) -> TracedModel:
        """What a rank has of it."""
        model = {"critic": self.models.critic, "actor": self.models.actor}.get(role, self.models.policy)
        assert model is not None
        return model.slice_of(self.slices)

    def _how(self, role: str) -> Sharding:
        config, stored = self.config, self._model(role).shape.stored
        frozen = self.itemsize if role == "reference" or stored == config.dtype else memory.MASTER
        return Sharding(
            shards=config.ranks_of(self.pools[role]) // config.fsdp.replicas // self.slices,
            slices=self.slices,
            itemsize=self.itemsize,
            frozen_itemsize=frozen,
            checkpointing=bool(config.activation_checkpointing),
            reduce_every_micro_batch=bool(config.fsdp.reduce_every_micro_batch),
            micro_batches=self.count,
            host=config.fsdp.cpu_offload and self.machine.kind != "cpu",
            gloo=self.machine.kind == "cpu",
            resharded=config.fsdp.reshard_after_forward or role == "reference",
            ahead=config.fsdp.prefetch_layers or 1,
            state=memory.state_bytes(config.optimizer),
            waits=config.fsdp.offload_optimizer and self.machine.kind != "cpu",
            muon=config.optimizer.name == "muon",
            copies=config.fsdp.replicas,
            sharers=config.fsdp.sequence_parallel,
            fp8=config.fp8 is not None and config.fp8.training is not None,
        )

    def _held(self, role: str) -> Memory:
        how = self._how(role)
        if how.host or (role == "reference" and self.shares_actor):
            return Counter()
        held = memory.held_frozen if role == "reference" else memory.held
        return held(self._model(role).shape, how)

    def _offloaded(self) -> int:
        """Bytes of a rank in the host's memory: weights, gradients and moments, or these alone; or what waits there."""
        total = self._parked_bytes()
        for role in self.held:
            shape, how = self._model(role).shape, self._how(role)
            if not how.host:
                total += memory.optimizer_state(shape, how) if how.waits and role != "reference" else 0
            elif role == "reference":
                total += 0 if self.shares_actor else memory.held_frozen(shape, how).total()
            else:
                total += memory.held(shape, how).total() + memory.MASTER * shape.trained // how.shards
        return total

    @property
    def _parks(self) -> bool:
        """Whether training's models wait in the host's memory while the same devices generate."""
        in_turns = "rollout" in self.pools and self._is_engine and not self._own_pool
        return bool(self.config.fsdp.offload_while_generating) and in_turns and self.machine.kind != "cpu"

    def _parked_bytes(self) -> int:
        """Of a rank, that go to the host's memory before generation and come back."""
        if not self._parks:
            return 0
        pool = self.pools["rollout"]
        return sum(held.total() for role, held in self.held.items() if self.pools[role] == pool)

    # ------------------------------------------------------------------------------------------------- sampling

    @property
    def _is_engine(self) -> bool:
        """Whether vLLM generates, with weights of its own; else the actor does, and holds its cache only meanwhile."""
        return self.config.rollout.backend == "vllm"

    @property
    def _own_pool(self) -> bool:
        return self.pools["rollout"] != self.pools["actor"]

    @property
    def _engine_weights(self) -> int:
        if not self._is_engine:
            return 0
        copies = ADAPTER_COPIES if self.config.generates_beside_adapters else 0
        adapters = int(copies * self.itemsize * self._adapters)
        return engine_bytes(
            self.models.policy.shape.parameters,
            self._in_fp8,
            itemsize=self.itemsize,
            tensor_parallel_size=self.t,
            adapters=adapters,
        )

    @property
    def _in_fp8(self) -> int:
        """Parameters that the engine has in fp8: vLLM's, all linear layers but the output layer."""
        kinds, fp8 = self.models.policy.shape.kinds, self.config.fp8
        if not self._is_engine or fp8 is None or fp8.rollout is None:
            return 0
        return sum(kinds.get(kind, 0) for kind in ("attention", "mlp", "experts"))

    @property
    def _adapters(self) -> float:
        """Parameters of the adapters in training."""
        return self.models.actor.shape.kinds.get("adapters", 0)

    @property
    def _engine_buffers(self) -> int:
        """What vLLM computes a step in: a layer's tensors of the tokens of a prefill, as training's without gradient,
        and logits of all sequences in float32, with their copy sorted and their logprobs."""
        shape = self.models.policy.shape
        rows = self.models.policy.activations(self.batch).inference / self.batch.rows
        logits = 3 * 4 * shape.vocabulary * min(self.config.rollout.max_num_seqs, self._sequences)
        large = self.machine.kind != "cpu" and self.machine.memory >= _LARGE and "a100" not in self.machine.name.lower()
        prefilled = _PREFILLED_BY_LARGE if large else _PREFILLED
        return int(rows * min(prefilled, self._sequences * self.work.prompt_tokens)) // self.t + logits // self.t

    @property
    def _sequences(self) -> int:
        """That an engine samples in a step."""
        engines = max(1, self.config.ranks_of(self.pools["rollout"]) // self.t)
        return -(-self.work.prompts * self.work.group_size // engines)

    def _token_bytes(self) -> int:
        return self._generating.key_value_bytes(self.itemsize, self.t)

    @property
    def _generating(self) -> ModelShape:
        """The policy as it generates: but for vLLM, latent attention has all heads' keys and values in its cache."""
        shape = self.models.policy.shape
        return shape if self._is_engine else replace(shape, latent=0)

    def _kv_bytes(self, beside: list[Phase]) -> int:
        """The setting; or what all sequences of the step need at once, as far as there is room for it.

        ``beside``: training's phases that the cache stays for.
        """
        if self.config.rollout.kv_cache_bytes is not None:
            return self.config.rollout.kv_cache_bytes
        at_once = min(self._sequences, self.config.rollout.max_num_seqs)
        length = self.work.prompt_tokens + self.work.response_tokens + 128  # vLLM's blocks are not shared
        useful = int(1.05 * at_once * length * self._token_bytes())
        taken = [self._engine_phase(0).total(), *(self._beside_engine(phase, 0).bytes for phase in beside)]
        free = self.machine.usable - max(taken) - self._graphs
        least = (length + 128) * self._token_bytes()  # one sequence at a time
        return max(least, _KV_LEAST, min(useful, free // KV_STEP * KV_STEP))

    @property
    def _graphs(self) -> int:
        return GRAPHS if self._is_engine and not self.eager and self.machine.kind != "cpu" else 0

    def _beside_graphs(self, phase: Phase) -> Phase:
        if phase.pool != self.pools["rollout"]:
            return phase
        return replace(phase, memory={**phase.memory, "rollout graphs": self._graphs})

    def _engine_phase(self, kv: int) -> Counter[str]:
        engine = Counter(weights=self._engine_weights, kv_cache=kv, buffers=self._engine_buffers)
        pool = self.pools["rollout"]
        beside = self._rewards_held(pool) if self._parks else self._beside("rollout", pool)
        held = beside + _named("rollout", engine)
        if self._is_engine:
            return held + self._passing(pool)  # it is awake until rewards are there
        shape, how = self._model("actor").shape, self._how("actor")
        whole = shape.root.parameters + shape.largest_layer.parameters * (1 + how.gathers)
        return held + _named("actor", Counter(unsharded=self.itemsize * whole))

    def _sampling(self, kv: int) -> Iterable[Phase]:
        pool, shape = self.pools["rollout"], self.models.policy.shape
        tokens = self.work.prompt_tokens + self.work.response_tokens
        concurrent = min(self.config.rollout.max_num_seqs, kv // (tokens * self._token_bytes()))
        cost = self._generation_cost(concurrent)
        if self._parks:
            cost = cost.after(2 * self._parked_bytes(), self.machine.host)
        yield Phase("generate", pool, dict(self._engine_phase(kv)), cost)
        if not self._is_engine:
            return
        bucket = self.config.rollout.reshard_bucket_bytes
        largest = max(unit.largest for unit in (*shape.layers, shape.root))
        if self.config.generates_beside_adapters:
            bucket = int(2 * self.itemsize * self._adapters)  # as they are gathered, and as vLLM keeps them
        elif self.config.rollout.reshard == "gather":
            bucket += 2 * self.itemsize * largest  # as it is gathered, and put together
        sync = _named("rollout", Counter(weights=self._engine_weights, buffers=bucket))
        beside = self._beside("rollout", pool)
        if self._parks:  # but for the weights that are read
            weights = _named("actor", Counter(weights=self.held["actor"]["weights"]))
            beside = weights + self._rewards_held(pool)
        yield Phase("weight sync", pool, dict(beside + sync), self._sync_cost())

    def _has_rewards(self, others: set[str]) -> bool:
        """Whether reward models are on the devices that are planned for: not in a driver that is on a cluster's head,
        nor in a pool of their own for which no device is left. ``others``: the pools of the other roles."""
        on, machine = self.config.placement, self.machine
        if machine.kind == "cpu" or on.reward is None:
            return machine.kind == "cpu" or self.config.ray_address is None
        if on.reward in others or (gpus := on.pools[on.reward].gpus):
            return True
        return gpus is None and machine.devices >= sum(map(self.config.ranks_of, {*others, on.reward}))

    def _rewards_held(self, pool: str) -> Counter[str]:
        """What reward models take of a rank's device from one step to the next, in the pool's processes or the driver,
        which keeps what a pass took."""
        if pool != self.rewards_on:
            return Counter()
        held = sum(each.weights for each in self.scorers)
        if self.config.placement.reward is None:
            held += self._scoring
            if self.machine.kind == "cpu":
                held //= self.config.ranks_of(pool)  # of a memory that all of them share
        return _named("reward", Counter(models=held))

    @property
    def _scoring(self) -> int:
        """Bytes that a reward model's pass takes, at most."""
        passes = [min(each.batch_tokens, self._scored_tokens) * each.token_bytes for each in self.scorers]
        return int(max(passes, default=0))

    @property
    def _scored_tokens(self) -> float:
        """Of a step, in each process that scores."""
        work, own = self.work, self.config.placement.reward
        tokens = work.prompts * work.group_size * (work.prompt_tokens + work.response_tokens)
        return tokens / (1 if own is None else self.config.ranks_of(own))

    def _rewarding(self) -> Iterator[Phase]:
        """The reward models' pass over what was sampled, in each process of their pool or in the driver alone."""
        if not self.scorers:
            return
        pool, rates = self.rewards_on, [self.machine.matrix_flops(each.itemsize) for each in self.scorers]
        flops = [each.flops(self._scored_tokens) for each in self.scorers]
        seconds = sum(of / rate for of, rate in zip(flops, rates, strict=True))
        held = self._beside("rewards", pool) + self._passing(pool)
        yield Phase("rewards", pool, dict(held), Cost(seconds), apart=pool not in self.pools.values())

    def _passing(self, pool: str) -> Counter[str]:
        """What a reward model's pass takes in a pool's processes, while it lasts."""
        in_them = pool == self.config.placement.reward
        return _named("reward", Counter(activations=self._scoring if in_them else 0))

    def _generation_cost(self, concurrent: int) -> Cost:
        """Of a step's sequences, so many of which are decoded at once."""
        shape = self._generating
        once = self._is_engine and self.config.rollout.enable_prefix_caching
        prefills = -(-self._sequences // self.work.group_size) if once else self._sequences
        work = Generation(self._sequences, concurrent, prefills, self.work.prompt_tokens, self.work.response_tokens)
        cost = step_time.generation_cost(
            shape,
            work,
            self.machine,
            tensor_parallel=self.t,
            itemsize=self.itemsize,
            eager=self.eager,
            in_fp8=self._in_fp8,
        )
        if self._is_engine:
            return cost
        how = self._how("actor")  # each token's pass gathers all weights
        passes = -(-self._sequences // max(1, concurrent)) * self.work.response_tokens
        moved = passes * step_time.gathered_bytes(self._model("actor").shape, how)
        return cost.after(moved, self.machine.slowest_link(how.shards))

    def _sync_cost(self) -> Cost:
        """Of weights that go from training to the engines."""
        shape = self.models.policy.shape
        ranks = self.config.ranks_of(self.pools["actor"])
        if not self._own_pool:  # what a rank lacks, its own replica has
            ranks //= self.config.fsdp.replicas
        whole = self.itemsize * shape.parameters
        if self.config.generates_beside_adapters:  # from rank 0 to all, or gathered by each
            moved = int(self.itemsize * self._adapters * (1 if self._own_pool else (ranks - 1) / ranks))
        elif self._own_pool and self.config.rollout.reshard == "gather":  # rank 0 sends all of it to all
            moved = whole
        elif self._own_pool:  # an engine's rank gets its slice, and those that train share what all engines get
            engines = self.config.ranks_of(self.pools["rollout"]) // self.t
            moved = int(max(whole / self.t, engines * whole / ranks))
        elif self.config.rollout.reshard == "gather":
            moved = int(whole * (ranks - 1) / ranks)
        else:
            moved = step_time.sync_bytes(shape, ranks, self.t, self.itemsize)
        apart = ranks if not self._own_pool else max(ranks, self.config.ranks_of(self.pools["rollout"]))
        return Cost(moved / self.machine.slowest_link(apart), moved, "communication")

    def _beside_engine(self, phase: Phase, kv: int) -> Phase:
        if phase.pool != self.pools["rollout"]:
            return phase
        engine = _named("rollout", Counter(weights=self._engine_weights, kv_cache=kv))
        return replace(phase, memory=dict(Counter(phase.memory) + engine))


def _named(role: str, of: Memory) -> Counter[str]:
    return Counter({f"{role} {use}": count for use, count in of.items() if count})
