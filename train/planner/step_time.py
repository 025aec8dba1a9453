"""Seconds of a step and bytes that a rank sends in it, from a machine's rates: plain arithmetic.

Each is the larger of what computing and what moving bytes takes (a roofline), where the two overlap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from train.planner.engine_memory import engine_bytes
from train.planner.machine import Machine
from train.planner.memory import MASTER, Sharding, optimizer_state
from train.planner.sizes import ModelShape, Operations, PassOperations

UNPACKED = 33
"""Bytes read and written to unpack a value of 4 bits, by torchao's operations one by one: a shift or a mask of a byte
(2), an index of 8 bytes made of it (9), the value that it names (10), its scale (2), their product (6), and its place
among the others (4)."""


@dataclass(frozen=True)
class Cost:
    """``seconds``; ``moved``: bytes that a rank sends; ``bound``: what takes that long."""

    seconds: float
    moved: int = 0
    bound: str = "compute"

    def times(self, count: int) -> Cost:
        """Of as many."""
        return Cost(self.seconds * count, self.moved * count, self.bound)

    def after(self, passed: int, rate: float) -> Cost:
        """With so many more bytes, at a rate a second, that nothing overlaps."""
        return self.and_then(Cost(passed / rate, passed))

    def and_then(self, sent: Cost) -> Cost:
        """With what is sent beside, that nothing overlaps."""
        bound = "communication" if sent.seconds > self.seconds else self.bound
        return Cost(self.seconds + sent.seconds, self.moved + sent.moved, bound)


class Counts(Protocol):
    """What of a batch decides the operations of a pass; as of ``Batch``."""

    @property
    def rows(self) -> int: ...

    @property
    def scored(self) -> int: ...

    @property
    def pairs(self) -> float: ...


def forward_flops(shape: ModelShape, batch: Counts) -> float:
    """Of one pass over a micro-batch: 2 a parameter and token (Kaplan et al., arXiv 2001.08361, section 2.1), the
    output layer for scored tokens alone, and 4 · width of all heads for each pair of a query and a key."""
    inside, output = weights(shape)
    return 2.0 * inside * batch.rows + 2.0 * output * batch.scored + attention_flops(shape, batch)


def weights(shape: ModelShape) -> tuple[float, float]:
    """Parameters that a token is multiplied by: (in the layers, in the output layer)."""
    output = shape.vocabulary * shape.hidden
    return shape.active - output - (0 if shape.tied else shape.kinds.get("embedding", 0)), output


def attention_flops(shape: ModelShape, batch: Counts) -> float:
    """What of a pass is in no layer's weights: the scores, and the sums of values by them."""
    return 4 * shape.heads * shape.head_size * len(shape.layers) * batch.pairs


def products_seconds(shape: ModelShape, how: Sharding, batch: Counts, machine: Machine) -> float:
    """A forward pass' matrix products; those of attention are in float32 on a CPU, and in fp8 those of linear layers,
    which experts are none of (``train.model.low_precision.float8``)."""
    inside, output = weights(shape)
    rate = machine.matrix_flops(how.itemsize)
    experts = shape.active - (sum(shape.kinds.values()) - shape.kinds.get("experts", 0))  # that a token goes to
    linear = 2.0 * (inside - experts) * batch.rows / (rate * (machine.fp8_gain if how.fp8 else 1))
    of_attention = machine.matrix_flops(MASTER if machine.kind == "cpu" else how.itemsize)
    whatever_rows = machine.parameter_s * (inside + output)
    return (
        linear
        + 2.0 * experts * batch.rows / rate
        + 2.0 * output * batch.scored / rate
        + attention_flops(shape, batch) / of_attention
        + whatever_rows
    )


def update_passes(shape: ModelShape) -> float:
    """What an update computes, in forward passes: a backward pass is two of them, one with frozen weights."""
    return 3.0 if shape.trained > shape.frozen else 2.0


def gathered_bytes(shape: ModelShape, how: Sharding, *, root: bool = True) -> int:
    """That a rank receives to have all parameters once: the other ranks' shares, (w - 1)/w of the model in the compute
    type (ZeRO stage 3, arXiv 1910.02054, section 7.2.2). ``root``: with those that are in no layer."""
    whole = shape.whole(how.itemsize) - (0 if root else shape.root.whole(how.itemsize))
    return int(whole * (how.shards - 1) / how.shards)


def passed_bytes(shape: ModelShape, how: Sharding, batch: Counts, *, learns: bool) -> int:
    """That a rank sends in one micro-batch to those that share its layers (train.fsdp.tensor_parallel).

    All-reduces of hidden states: two a layer forward and two backward (Megatron-LM, arXiv 1909.08053, section 3), one
    of the embedding's output, and one of the gradient that the output layer gives, in float32. A ring's all-reduce
    moves 2 (t - 1)/t of the bytes. What checkpointing computes again stops before a layer's last product, and so before
    its second all-reduce (but where a norm follows that, as in Gemma 2).
    """
    each, layers = batch.rows * shape.hidden * how.itemsize, len(shape.layers)
    total = (2 * layers + 1) * each
    if learns:
        total += layers * (2 + how.checkpointing) * each + MASTER * batch.scored * shape.hidden
    return int(2 * (how.slices - 1) / how.slices * total)


def operations_seconds(operations: Operations, machine: Machine) -> float:
    """Of what a pass runs beside its matrix products, which are counted by their own."""
    return operations.count * machine.operation_s + operations.moved / machine.touched


def unpacking_seconds(shape: ModelShape, machine: Machine) -> float:
    """Of one pass in which layers unpack their weights of 4 bits, for each product anew."""
    rate = min(machine.touched, machine.bandwidth * machine.bandwidth_share)
    return UNPACKED * shape.packed / rate


def exchanged_bytes(shape: ModelShape, how: Sharding, batch: Counts, *, learns: bool) -> int:
    """That a rank sends in one micro-batch to those that share its sequences (train.fsdp.sequence_parallel).

    Around attention two all-to-alls a layer, of which (w - 1)/w goes to others: queries, keys and values there, what
    attention made of them back; and their gradients the other way (Ulysses, arXiv 2309.14509, section 3). Keys and
    values are repeated where their heads don't divide (``train.model.ulysses``). ``batch``: of this rank.
    """
    sharers = how.sharers
    repeated = sharers // math.gcd(shape.key_value_heads, sharers)
    heads = 2 * shape.heads + 2 * repeated * shape.key_value_heads
    passes = 1 + learns * (1 + how.checkpointing)
    each = batch.rows * heads * shape.head_size * how.itemsize
    return int(passes * len(shape.layers) * each * (sharers - 1) / sharers)


def _within_layers(shape: ModelShape, how: Sharding, batch: Counts, machine: Machine, *, learns: bool) -> Cost:
    """What ranks that share layers or sequences send each other in all micro-batches: computing waits for it."""
    passed = how.micro_batches * passed_bytes(shape, how, batch, learns=learns)
    exchanged = how.micro_batches * exchanged_bytes(shape, how, batch, learns=learns)
    apart = machine.slowest_link(how.slices * how.sharers)  # groups that share layers are neighbours
    layers, again = len(shape.layers), how.checkpointing
    sums = (how.slices > 1) * (layers * (2 + learns * (2 + again)) + 1 + learns)
    exchanges = (how.sharers > 1) * 2 * layers * (1 + learns * (1 + again))
    waits = how.micro_batches * (sums + exchanges) * machine.wait_s
    return Cost(waits + passed / machine.slowest_link(how.slices) + exchanged / apart, passed + exchanged)


def update_cost(
    shape: ModelShape, how: Sharding, batch: Counts, machine: Machine, beside: PassOperations | None = None
) -> Cost:
    """An optimizer step of so many micro-batches.

    Computing: a backward pass is twice a forward one (once with frozen weights, whose gradients nobody needs), and
    checkpointing adds a forward pass. Moved: parameters are gathered for either pass (those in no layer are kept from
    one to the other), and gradients reduced in float32, (w - 1)/w of 4 bytes each, once or with every micro-batch, and
    then, of c copies of the model, each slice over all copies, 2 (c - 1)/c of its bytes; what ranks that share layers
    or sequences send each other (``passed_bytes``, ``exchanged_bytes``) waits for computing, and computing for it.
    AdamW reads and writes 28 bytes a parameter: weight, gradient (read alone) and two moments; another optimizer, what
    its state has. With parameters in the host's memory each gather first copies a rank's slice, and it is the host that
    does the optimizer's step. Without resharding between a layer's passes it is gathered once for both. State that
    waits in the host's memory comes and goes. For Muon every rank receives all matrices in float32 and the updates of
    all, and computes its share of these. On a CPU nothing overlaps, and what it does beside matrix products counts.

    Args:
        beside: what else a pass runs, on a machine whose rates know what that takes.
    """
    again = how.checkpointing * machine.again_share
    passes = update_passes(shape) + again
    count = how.micro_batches
    compute = count * passes * products_seconds(shape, how, batch, machine)
    if beside is not None:
        logits_again = 2 * weights(shape)[1] * batch.scored
        compute += count * logits_again / machine.matrix_flops(how.itemsize)
        compute += count * operations_seconds(beside.forward + beside.backward + beside.again * again, machine)
    compute += count * (2 + how.checkpointing) * unpacking_seconds(shape, machine)
    reductions = count if how.reduce_every_micro_batch else 1
    reduced = MASTER * shape.trained * (how.shards - 1) / how.shards
    gathers = count * (1 + how.resharded)
    gathered = gathered_bytes(shape, how) + how.resharded * gathered_bytes(shape, how, root=False)
    moved = int(count * gathered + reductions * reduced)
    together = how.shards * how.slices  # neighbours, with the ranks that share their layers
    wire = moved / machine.slowest_link(together)
    if how.copies > 1:
        added = reductions * 2 * MASTER * shape.trained // how.shards * (how.copies - 1) // how.copies
        wire += added / machine.slowest_link(together * how.copies)
        moved += added
    if machine.kind == "cpu":
        compute += _sharding_seconds(shape, how, machine, gathers=gathers, reductions=reductions)
    if how.host:
        wire += gathers * MASTER * shape.trained / how.shards / machine.host
    memory_rate = machine.host_memory if how.host else machine.bandwidth * machine.bandwidth_share
    state = optimizer_state(shape, how)
    optimizer = (3 * MASTER * shape.trained / how.shards + 2 * state) / memory_rate
    if how.waits:
        optimizer += 2 * state / machine.host
    if how.muon:
        ranks = how.shards * how.slices
        whole = 2 * MASTER * how.slices * shape.matrices * (ranks - 1) // ranks
        optimizer += shape.orthogonalisation / how.shards / machine.matrix_flops(2)
        optimizer += whole / machine.slowest_link(ranks)
        moved += whole
    within = _within_layers(shape, how, batch, machine, learns=True)
    return _slower(compute, wire, moved, optimizer, overlaps=machine.kind != "cpu").and_then(within)


def inference_cost(
    shape: ModelShape, how: Sharding, batch: Counts, machine: Machine, beside: PassOperations | None = None
) -> Cost:
    """A pass without gradient over so many micro-batches; parameters are gathered for each. ``beside``: as of
    ``update_cost``."""
    count = how.micro_batches
    compute = count * products_seconds(shape, how, batch, machine)
    if beside is not None:
        compute += count * operations_seconds(beside.forward, machine)
    compute += count * unpacking_seconds(shape, machine)
    if machine.kind == "cpu":
        compute += _sharding_seconds(shape, how, machine, gathers=count, reductions=0)
    moved = count * gathered_bytes(shape, how)
    wire = moved / machine.slowest_link(how.shards * how.slices)
    within = _within_layers(shape, how, batch, machine, learns=False)
    return _slower(compute, wire, moved, overlaps=machine.kind != "cpu").and_then(within)


def _sharding_seconds(shape: ModelShape, how: Sharding, machine: Machine, *, gathers: int, reductions: int) -> float:
    """What a CPU's processor does for FSDP2 beside sending; gradients that are kept for the next micro-batch are added
    in float32 (10 bytes of each)."""
    kept = how.micro_batches - reductions if reductions else 0
    units = len(shape.layers) + 1
    sizes = (shape.parameters, shape.trained, how.shards, how.itemsize)
    moved = copied_bytes(*sizes, gathers=gathers, reductions=reductions) + kept * 10 * shape.trained
    return (gathers + reductions) * units * machine.unit_s + moved / (machine.bandwidth * machine.bandwidth_share)


def copied_bytes(parameters: int, trained: int, shards: int, itemsize: int, *, gathers: int, reductions: int) -> float:
    """That FSDP2 reads and writes in memory, beside what is sent: of each parameter that is gathered a rank casts its
    slice (6 bytes) and copies all slices to where they are read; of each gradient that is reduced it makes a copy in
    float32 (6), and adds the slice (8)."""
    return gathers * (6 / shards + 2 * itemsize) * parameters + reductions * (6 + 8 / shards) * trained


def sync_bytes(shape: ModelShape, ranks: int, tensor_parallel: int, itemsize: int) -> int:
    """That a rank receives when weights go to generation by plan: (N - t)/(tN) of the tensors, which is what it lacks
    of its slice of 1/t (docs/guide/train.md; measured by ``make bench-reshard``)."""
    return int(itemsize * shape.parameters * (ranks - tensor_parallel) / (tensor_parallel * ranks))


@dataclass(frozen=True)
class Generation:
    """What an engine generates in a step. ``concurrent``: sequences that it decodes at once; ``prefills``: prompts that
    it computes."""

    sequences: int
    concurrent: int
    prefills: int
    prompt_tokens: int
    response_tokens: int


def generation_cost(
    shape: ModelShape,
    work: Generation,
    machine: Machine,
    *,
    tensor_parallel: int,
    itemsize: int,
    eager: bool,
    in_fp8: int = 0,
) -> Cost:
    """Prefill computes; decoding reads all weights and the keys and values of all sequences for each token.

    Pope et al., arXiv 2211.05102, section 2: the time of a step of decoding is the larger of its products and of what
    it reads. Under tensor parallelism two all-reduces a layer pass 2 (t - 1)/t of a token's hidden state (Megatron-LM,
    arXiv 1909.08053, section 3). ``eager``: kernels are started one by one. ``in_fp8``: parameters that are read, and
    multiplied, in fp8.
    """
    t, rate = tensor_parallel, machine.matrix_flops(itemsize)
    rate /= 1 - in_fp8 / shape.parameters * (1 - 1 / machine.fp8_gain)
    prefill = 2.0 * shape.active * work.prompt_tokens * work.prefills / t / rate
    waves = -(-work.sequences // max(1, work.concurrent))
    at_once = -(-work.sequences // waves)
    length = work.prompt_tokens + work.response_tokens / 2
    stored = engine_bytes(shape.parameters, in_fp8, itemsize=itemsize, tensor_parallel_size=t)
    read = stored + at_once * length * shape.key_value_bytes(itemsize, t)
    reading = read / (machine.bandwidth * machine.bandwidth_share)
    computing = 2.0 * shape.active * at_once / t / rate
    starting = len(shape.layers) * (machine.layer_s if eager else machine.graph_layer_s)
    passed = 4 * len(shape.layers) * shape.hidden * itemsize * (t - 1) / t
    sending = at_once * passed / machine.slowest_link(t)
    token = max(reading, computing, starting) + sending
    moved = int(passed * (work.prompt_tokens * work.prefills + work.response_tokens * work.sequences))
    names = {reading: "memory bandwidth", computing: "compute", starting: "starting kernels"}
    return Cost(prefill + waves * work.response_tokens * token, moved, names[max(names)])


def _slower(compute: float, wire: float, moved: int, optimizer: float = 0.0, *, overlaps: bool = True) -> Cost:
    together = max(compute, wire) if overlaps else compute + wire
    return Cost(together + optimizer, moved, "compute" if compute >= wire else "communication")
