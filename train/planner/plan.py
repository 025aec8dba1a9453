"""A training step on a machine: what each phase takes of a rank's memory and time, and the settings that suit."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from train.config.training import TrainConfig
from train.planner import memory, step_time
from train.planner.machine import Machine
from train.planner.memory import Memory, Sharding
from train.planner.sizes import GIB, ITEMSIZE, Activations, Batch, ModelShape
from train.planner.step_time import Cost, Generation

MICRO_BATCHES: Final = (65536, 32768, 16384, 8192, 4096, 2048, 1024)
TENSOR_PARALLEL: Final = (1, 2, 4, 8)
KV_STEP: Final = GIB // 4
_PREFILLED: Final = 8192  # tokens that vLLM computes in a step, and is started with once to see what that takes
_KV_LEAST: Final = 16 * 2**20


class NothingFits(ValueError):
    """No settings fit on the machine; the text says by how much, and which machine would do."""


@dataclass(frozen=True)
class Workload:
    """A step's prompts and their lengths, the longest that are expected."""

    prompts: int
    group_size: int
    prompt_tokens: int
    response_tokens: int


@dataclass(frozen=True)
class TracedModel:
    """A model's sizes, and what a pass over a micro-batch keeps of it."""

    shape: ModelShape
    trace: Callable[[Batch], Activations]


@dataclass(frozen=True)
class Models:
    """The models of a run. ``policy``: as it is stored; ``actor``: with its adapters, if it has any."""

    policy: TracedModel
    actor: TracedModel
    critic: TracedModel | None


@dataclass(frozen=True)
class Phase:
    """A part of a step on the ranks of a pool. ``memory``: bytes of a rank, by role and use; ``cost``: of it."""

    name: str
    pool: str
    memory: dict[str, int]
    cost: Cost

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

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.bytes)

    @property
    def fits(self) -> bool:
        return self.peak.bytes <= self.machine.usable

    @property
    def seconds(self) -> float:
        return sum(phase.cost.seconds for phase in self.phases)

    @property
    def slowest(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.cost.seconds)


def micro_batches(work: Workload, ranks: int, tokens: int) -> tuple[int, Batch]:
    """How many a rank makes of its part of a batch, and the largest; as ``PackedBatch.micro_batches`` groups them."""
    prompts, n = -(-work.prompts // ranks), work.group_size
    whole = work.prompt_tokens + n * work.response_tokens
    if whole <= tokens or n == 1:
        count = -(-prompts // max(1, tokens // whole))
        return count, Batch.of(-(-prompts // count), n, work.prompt_tokens, work.response_tokens)
    together = max(1, (tokens - work.prompt_tokens) // work.response_tokens)
    parts = -(-n // together)
    return prompts * parts, Batch.of(1, -(-n // parts), work.prompt_tokens, work.response_tokens)


def plan(config: TrainConfig, models: Models, machine: Machine, work: Workload) -> Plan:
    """The plan of these settings, whether they fit or not. ``config.rollout.kv_cache_bytes`` None: what is free."""
    return _Planner(config, models, machine, work).plan()


def choose(config: TrainConfig, models: Models, machine: Machine, work: Workload) -> Plan:
    """The fastest plan that fits, of the settings that ``config`` leaves open (those that it sets stay).

    Chosen are micro-batch, activation checkpointing, when gradients are reduced, offload, and generation's tensor
    parallelism; of what is as fast, what needs less.

    Raises:
        NothingFits: none does.
    """
    plans = [plan(candidate, models, machine, work) for candidate in candidates(config, models, machine, work)]
    if not plans:
        raise NothingFits(
            f"no settings suit {machine.devices} devices: train.rollout.tensor_parallel_size="
            f"{config.rollout.tensor_parallel_size} must divide them; leave it unset, or plan for another number"
        )
    if fitting := [found for found in plans if found.fits]:
        return min(fitting, key=lambda found: (round(found.seconds, 2), found.peak.bytes))
    least = min(plans, key=lambda found: found.peak.bytes)
    over = least.peak.bytes - machine.usable
    what, most = max(least.peak.memory.items(), key=lambda item: item[1])
    raise NothingFits(
        f"nothing fits on {machine.devices} x {machine.name}: with the least memory, {least.peak.name} needs "
        f"{least.peak.bytes / GIB:.1f} GiB of a device's {machine.usable / GIB:.1f}, {over / GIB:.1f} too many; most "
        f"of it is {what}, {most / GIB:.1f} GiB"
    )


def candidates(config: TrainConfig, models: Models, machine: Machine, work: Workload) -> Iterator[TrainConfig]:
    """All settings to choose from."""
    longest = work.prompt_tokens + work.response_tokens
    rollout, fsdp = config.rollout, config.fsdp
    cpu = machine.kind == "cpu"
    tensor_parallel = [
        t
        for t in TENSOR_PARALLEL
        if machine.devices % t == 0 and models.policy.shape.heads % t == 0 and t <= machine.node_devices
    ]
    choices = (
        _open(config, "micro_batch_tokens", [n for n in MICRO_BATCHES if n >= longest] or [longest]),
        _open(config, "activation_checkpointing", [False, True]),
        _open(fsdp, "reduce_every_micro_batch", [False, True]),
        _open(fsdp, "cpu_offload", [False] if cpu else [False, True]),
        _open(rollout, "tensor_parallel_size", tensor_parallel),
    )
    for tokens, checkpointing, reduce, offload, t in itertools.product(*choices):
        if config.placement.rollout == config.placement.actor and (machine.devices // fsdp.replicas) % t:
            continue
        yield config.model_copy(
            update={
                "ranks": machine.devices,
                "micro_batch_tokens": tokens,
                "activation_checkpointing": checkpointing,
                "fsdp": fsdp.model_copy(update={"reduce_every_micro_batch": reduce, "cpu_offload": offload}),
                "rollout": rollout.model_copy(update={"tensor_parallel_size": t}),
            }
        )


def _open(section: Any, name: str, values: list[Any]) -> list[Any]:
    """What to choose from: the values, or what the section has where somebody set it."""
    return [getattr(section, name)] if name in section.model_fields_set else values


class _Planner:
    """One plan in the making."""

    def __init__(self, config: TrainConfig, models: Models, machine: Machine, work: Workload) -> None:
        self.config, self.models, self.machine, self.work = config, models, machine, work
        self.itemsize = ITEMSIZE[config.dtype]
        self.t = config.rollout.tensor_parallel_size
        on = config.placement
        self.pools = {
            "actor": on.actor,
            **({"reference": on.reference} if config.has_reference else {}),
            **({"critic": on.critic or on.actor} if models.critic is not None else {}),
            **({"rollout": on.rollout} if config.samples else {}),
        }
        self.shares_actor = config.lora is not None and on.reference == on.actor
        minibatch = replace(work, prompts=-(-work.prompts // config.minibatches))
        parallel = config.fsdp.sequence_parallel
        self.count, batch = micro_batches(minibatch, config.data_parallel_ranks, config.micro_batch_tokens)
        rows = (-(-n // parallel) for n in (batch.rows, batch.scored, batch.keys))
        self.batch = Batch(*rows, spans=batch.spans)
        self.held = {role: self._held(role) for role in self.pools if role != "rollout"}

    def plan(self) -> Plan:
        phases = list(self._training())
        kv = 0
        if "rollout" in self.pools:
            kv = self._kv_bytes()
            if self.machine.kind == "cpu" or self._own_pool:  # an engine that doesn't sleep
                phases = [self._beside_engine(phase, kv) for phase in phases]
            phases = [*self._sampling(kv), *phases]
        share = min(1.0, 1.1 * (self._engine_weights + kv) / self.machine.memory)
        return Plan(self.machine, self.config, tuple(phases), self.count, kv, share)

    # ------------------------------------------------------------------------------------------------- training

    def _training(self) -> Iterator[Phase]:
        once = self.config.epochs * self.config.minibatches
        if "reference" in self.pools:
            model = self.models.actor if self.shares_actor else self.models.policy
            how = self._how("actor" if self.shares_actor else "reference")
            took = memory.inference(model.shape, how, model.trace(self.batch))
            cost = step_time.inference_cost(model.shape, how, self.batch, self.machine)
            beside = self._beside("reference", self.pools["reference"], "actor" if self.shares_actor else "")
            own = _slices(self.held["actor" if self.shares_actor else "reference"])
            yield self._phase("reference", beside, own + took, _times(cost, self.config.minibatches))
        if self.config.old_log_probs_first:
            yield self._inference("actor", "log_probs", self.config.minibatches)
        if self.models.critic is not None:
            yield self._inference("critic", "values", self.config.minibatches)
            yield self._update("critic", once)
        yield self._update("actor", once)

    def _inference(self, role: str, name: str, times: int) -> Phase:
        model, how = self._model(role), self._how(role)
        took = memory.inference(model.shape, how, model.trace(self.batch))
        cost = step_time.inference_cost(model.shape, how, self.batch, self.machine)
        beside = self._beside(role, self.pools[role])
        return self._phase(role, beside, self.held[role] + took, _times(cost, times), name)

    def _update(self, role: str, times: int) -> Phase:
        model, how = self._model(role), self._how(role)
        took = memory.update(model.shape, how, model.trace(self.batch))
        cost = step_time.update_cost(model.shape, how, self.batch, self.machine)
        return self._phase(role, self._beside(role, self.pools[role]), took, _times(cost, times), "update")

    def _phase(self, role: str, beside: Counter[str], own: Memory, cost: Cost, name: str = "log_probs") -> Phase:
        return Phase(f"{role} {name}", self.pools[role], dict(beside + _named(role, own)), cost)

    def _beside(self, role: str, pool: str, *others: str) -> Counter[str]:
        """What the pool's other roles hold meanwhile."""
        held = [_named(r, m) for r, m in self.held.items() if self.pools[r] == pool and r not in (role, *others)]
        return sum(held, Counter[str]())

    def _model(self, role: str) -> TracedModel:
        if role == "critic":
            assert self.models.critic is not None
            return self.models.critic
        return self.models.actor if role == "actor" else self.models.policy

    def _how(self, role: str) -> Sharding:
        config, stored = self.config, self.models.policy.shape.stored
        frozen = self.itemsize if role == "reference" or stored == config.dtype else memory.MASTER
        return Sharding(
            shards=config.ranks_of(self.pools[role]) // config.fsdp.replicas,
            itemsize=self.itemsize,
            frozen_itemsize=frozen,
            checkpointing=config.activation_checkpointing,
            reduce_every_micro_batch=config.fsdp.reduce_every_micro_batch,
            micro_batches=self.count,
            host=config.fsdp.cpu_offload and self.machine.kind != "cpu",
        )

    def _held(self, role: str) -> Memory:
        how = self._how(role)
        if role == "reference":
            if self.shares_actor:
                return Counter()
            held = memory.held_frozen(self.models.policy.shape, how)
            return Counter(unsharded=held["unsharded"]) if how.host else held
        return Counter() if how.host else memory.held(self._model(role).shape, how)

    # ------------------------------------------------------------------------------------------------- sampling

    @property
    def _own_pool(self) -> bool:
        return self.pools["rollout"] != self.pools["actor"]

    @property
    def _engine_weights(self) -> int:
        return self.itemsize * self.models.policy.shape.parameters // self.t

    @property
    def _engine_buffers(self) -> int:
        """What vLLM computes a step in: a layer's tensors of the tokens of a prefill, as training's without gradient,
        and logits of all sequences in float32, with their copy sorted and their logprobs."""
        shape = self.models.policy.shape
        rows = self.models.policy.trace(self.batch).inference / self.batch.rows
        logits = 3 * 4 * shape.vocabulary * min(self.config.rollout.max_num_seqs, self._sequences)
        return int(rows * min(_PREFILLED, self._sequences * self.work.prompt_tokens)) // self.t + logits // self.t

    @property
    def _sequences(self) -> int:
        """That an engine samples in a step."""
        engines = max(1, self.config.ranks_of(self.pools["rollout"]) // self.t)
        return -(-self.work.prompts * self.work.group_size // engines)

    def _token_bytes(self) -> int:
        return self.models.policy.shape.key_value_bytes(self.itemsize, self.t)

    def _kv_bytes(self) -> int:
        """The setting; or what all sequences of the step need at once, as far as there is room for it."""
        if self.config.rollout.kv_cache_bytes is not None:
            return self.config.rollout.kv_cache_bytes
        at_once = min(self._sequences, self.config.rollout.max_num_seqs)
        length = self.work.prompt_tokens + self.work.response_tokens + 128  # vLLM's blocks are not shared
        useful = int(1.05 * at_once * length * self._token_bytes())
        free = self.machine.usable - self._engine_phase(0).total()
        least = (length + 128) * self._token_bytes()  # one sequence at a time
        return max(least, _KV_LEAST, min(useful, free // KV_STEP * KV_STEP))

    def _engine_phase(self, kv: int) -> Counter[str]:
        engine = Counter(weights=self._engine_weights, kv_cache=kv, buffers=self._engine_buffers)
        return self._beside("rollout", self.pools["rollout"]) + _named("rollout", engine)

    def _sampling(self, kv: int) -> Iterable[Phase]:
        pool, shape = self.pools["rollout"], self.models.policy.shape
        tokens = self.work.prompt_tokens + self.work.response_tokens
        concurrent = min(self.config.rollout.max_num_seqs, kv // (tokens * self._token_bytes()))
        work = Generation(self._sequences, concurrent, self.work.prompt_tokens, self.work.response_tokens)
        cost = step_time.generation_cost(shape, work, self.machine, tensor_parallel=self.t, itemsize=self.itemsize)
        yield Phase("generate", pool, dict(self._engine_phase(kv)), cost)
        ranks = self.config.ranks_of(self.pools["actor"])
        if self._own_pool:  # every actor rank gathers float32, and rank 0 sends all of it to all
            moved = int(memory.MASTER * shape.parameters)
        elif self.config.rollout.reshard == "gather":
            moved = int(memory.MASTER * shape.parameters * (ranks - 1) / ranks)
        else:
            moved = step_time.sync_bytes(shape, ranks, self.t, self.itemsize)
        bucket = self.config.rollout.reshard_bucket_bytes
        largest = max(unit.largest for unit in (*shape.layers, shape.root))
        if self.config.rollout.reshard == "gather" or self._own_pool:
            bucket += (memory.MASTER + self.itemsize) * largest
        sync = _named("rollout", Counter(weights=self._engine_weights, buffers=bucket))
        seconds = moved / self.machine.slowest_link(max(ranks, self.config.ranks_of(pool)))
        beside = self._beside("rollout", pool)
        yield Phase("weight sync", pool, dict(beside + sync), Cost(seconds, moved, "communication"))

    def _beside_engine(self, phase: Phase, kv: int) -> Phase:
        if phase.pool != self.pools["rollout"]:
            return phase
        engine = _named("rollout", Counter(weights=self._engine_weights, kv_cache=kv))
        return replace(phase, memory=dict(Counter(phase.memory) + engine))


def _named(role: str, of: Memory) -> Counter[str]:
    return Counter({f"{role} {use}": count for use, count in of.items() if count})


def _slices(held: Memory) -> Memory:
    """Without the root's whole parameters, which a pass counts itself."""
    return Counter({use: count for use, count in held.items() if use != "unsharded"})


def _times(cost: Cost, times: int) -> Cost:
    return Cost(cost.seconds * times, cost.moved * times, cost.bound)
