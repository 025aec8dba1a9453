"""Bytes of a training rank, by phase and by what they are for: plain arithmetic on sizes.

A rank of FSDP2 holds a slice of every parameter (ZeRO stage 3, arXiv 1910.02054, section 5). What it has beside that
for a while is what torch 2.13's ``torch.distributed.fsdp._fully_shard`` allocates, in its order; each function says
when. What activations take is traced (``train.planner.model_shape``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from train.config.sections import OptimizerConfig
from train.planner.sizes import NF4, Activations, ModelShape

Memory = Counter[str]
"""Bytes by what they are for."""

MASTER = 4
"""Bytes of a trained parameter: float32, as is its gradient once it is reduced, and each of AdamW's two moments."""

ADAMW: Final = (8.0, 8.0)
EIGHT_BIT: Final = 2 * (1 + 4 / 256)
"""Bytes of two moments of a byte each, and a float32 scale for every 256 (arXiv 2110.02861; torchao's block size)."""


def state_bytes(config: OptimizerConfig) -> tuple[float, float]:
    """Bytes that an optimizer keeps of a parameter: in a matrix that Muon is for, and in others.

    One of the user's own is counted as AdamW.
    """
    if config.name == "adamw_8bit":
        return EIGHT_BIT, EIGHT_BIT
    if config.name == "muon":
        return MASTER, ADAMW[1]
    if config.name == "sgd":
        return (MASTER, MASTER) if config.momentum else (0.0, 0.0)
    return ADAMW


@dataclass(frozen=True)
class Sharding:
    """How one model is held by its ranks.

    ``shards``: ranks that share one copy, or one slice of it where ``slices`` ranks share each layer (tensor
    parallelism); the sizes that the functions here are called with are then of a slice. ``itemsize``: of the compute
    type. ``frozen_itemsize``: of parameters that are never trained. ``micro_batches``: of an optimizer step. ``host``:
    parameters, gradients and moments are in the host's memory (train.fsdp.cpu_offload). ``gloo``: collectives are
    gloo's, which reduces in a copy. ``resharded``: layers are freed between their passes. ``ahead``: layers that are
    gathered before their turn. ``state``: of ``state_bytes``; ``waits``: it is in the host's memory but for the
    optimizer's step (train.fsdp.offload_optimizer). ``muon``: matrices are gathered whole for their update.
    ``copies``: groups of ranks that each hold the whole model (train.fsdp.replicas). ``sharers``: ranks that share each
    sequence (train.fsdp.sequence_parallel). ``fp8``: layers multiply in fp8 (train.fp8.training).
    """

    shards: int
    itemsize: int
    frozen_itemsize: int
    checkpointing: bool = False
    reduce_every_micro_batch: bool = False
    micro_batches: int = 1
    host: bool = False
    gloo: bool = False
    slices: int = 1
    resharded: bool = True
    ahead: int = 1
    state: tuple[float, float] = ADAMW
    waits: bool = False
    muon: bool = False
    copies: int = 1
    sharers: int = 1
    fp8: bool = False

    def reduction(self, trained: int) -> Memory:
        """Of so many parameters: gradients in the compute type are copied to a buffer in float32, and then gone; the
        slice of the result comes beside it. Those of earlier micro-batches are in float32 already, and counted."""
        fresh = self.micro_batches == 1 or self.reduce_every_micro_batch
        copied = Counter(gradients=self.itemsize * trained * fresh, buffers=MASTER * trained)
        twice = 2 if self.gloo and self.gathers else 1
        return largest([copied, Counter(buffers=twice * MASTER * trained + MASTER * trained // self.shards)])

    @property
    def gathers(self) -> bool:
        """Whether other ranks hold anything; if not, FSDP2 copies, and has no buffers for a collective."""
        return self.shards > 1


def held(shape: ModelShape, how: Sharding) -> Memory:
    """What a rank holds of a model in training from one step to the next: 12 bytes a trained parameter over the ranks.

    float32 master weights (4) and AdamW's two moments (4 each; arXiv 1711.05101), or another optimizer's state, beside
    what is frozen.
    """
    weights = MASTER * shape.trained + how.frozen_itemsize * (shape.frozen - shape.packed) + int(NF4 * shape.packed)
    return Counter(weights=weights // how.shards, optimizer=0 if how.waits else optimizer_state(shape, how))


def optimizer_state(shape: ModelShape, how: Sharding) -> int:
    """A rank's bytes of the optimizer's state, wherever it is."""
    of_matrices, of_others = how.state
    return int(of_matrices * shape.matrices + of_others * (shape.trained - shape.matrices)) // how.shards


def held_frozen(shape: ModelShape, how: Sharding) -> Memory:
    """What a rank holds of a frozen model between its passes: its slice, in the compute type."""
    return Counter(weights=how.itemsize * shape.parameters // how.shards)


def update(shape: ModelShape, how: Sharding, kept: Activations) -> Memory:
    """The moment of an optimizer step at which a rank has most, its own model's part alone."""
    own = Counter[str]() if how.host else held(shape, how)
    moments = [*_forward(shape, how, kept), *_backward(shape, how, kept), _root_reduced(shape, how, kept)]
    return own + largest([*moments, _optimizer(shape, how)])


def inference(shape: ModelShape, how: Sharding, kept: Activations) -> Memory:
    """What a pass without gradient takes beside what is held: a layer's parameters and its tensors, or the logits."""
    layer = shape.largest_layer
    buffers = layer.whole(how.itemsize) * (1 + how.gathers * how.ahead)
    if not how.resharded:
        buffers = sum(unit.whole(how.itemsize) for unit in shape.layers) + layer.whole(how.itemsize) * how.gathers
    root = shape.root.whole(how.itemsize)
    through = Counter(unsharded=root + buffers + _unpacked(shape, how), activations=kept.inference)
    scored = Counter(unsharded=root, activations=kept.layer_input, logits=kept.head_forward)
    return largest([through, scored])


def largest(moments: Iterable[Memory]) -> Memory:
    """The one with the most bytes."""
    return max(moments, key=lambda memory: memory.total())


# ---------------------------------------------------------------------------------------- the moments of an update


def _kept(shape: ModelShape, how: Sharding, kept: Activations, layers: int) -> int:
    """What is kept while so many layers have their backward pass before them."""
    each = kept.layer_input if how.checkpointing else kept.layer
    return kept.outside + layers * each


def _gradients(shape: ModelShape, how: Sharding, done: int) -> int:
    """Gradients of the layers once so many had their backward pass in the last micro-batch.

    Until then they are whole, in float32, where they are not reduced with every micro-batch; else in slices.
    """
    layers = sorted((unit.trained for unit in shape.layers), reverse=True)
    reduced, waiting = sum(layers[:done]) // how.shards, sum(layers[done:])
    if how.micro_batches == 1:
        waiting = 0
    elif how.reduce_every_micro_batch:
        waiting //= how.shards
    if how.host:  # what is reduced goes there
        reduced, waiting = 0, 0 if how.reduce_every_micro_batch else waiting
    return MASTER * (reduced + waiting)


def _root_gradients(shape: ModelShape, how: Sharding) -> int:
    """Of the root before its backward pass ends: from earlier micro-batches, as those of the layers."""
    if how.micro_batches == 1 or (how.host and how.reduce_every_micro_batch):
        return 0
    return MASTER * shape.root.trained // (how.shards if how.reduce_every_micro_batch else 1)


def _forward(shape: ModelShape, how: Sharding, kept: Activations) -> Iterable[Memory]:
    """The last layer's forward pass, and the head's, forward and backward."""
    layer, root = (unit.whole(how.itemsize) for unit in (shape.largest_layer, shape.root))
    columns = how.itemsize * shape.largest_layer.by_columns
    gradients = _gradients(shape, how, 0) + _root_gradients(shape, how)
    saved = _kept(shape, how, kept, len(shape.layers))
    # The buffer of a gather is freed after the next one.
    flat = layer * how.gathers
    before = 0 if how.resharded else sum(unit.whole(how.itemsize) for unit in shape.layers) - layer
    extra = kept.inference if how.checkpointing else kept.forward
    yield Counter(
        unsharded=root + before + layer + flat * how.ahead + _unpacked(shape, how),
        activations=saved + max(extra, columns * how.gathers),
        gradients=gradients,
    )
    stays = root + flat * how.ahead if how.resharded else root + before + layer
    yield Counter(unsharded=stays, activations=saved, logits=kept.head_forward, gradients=gradients)
    yield Counter(unsharded=stays, activations=saved, logits=kept.head_backward, gradients=gradients)


def _backward(shape: ModelShape, how: Sharding, kept: Activations) -> Iterable[Memory]:
    """The backward passes of the last layer and of the first, and the reduction of their gradients.

    Then the next layer's parameters are gathered already, and the buffer of the reduction before is still there.
    """
    unit = shape.largest_layer
    layer, root = (u.whole(how.itemsize) for u in (unit, shape.root))
    flat = layer * how.gathers
    head = how.itemsize * shape.root.trained if shape.tied else how.itemsize * _head(shape)
    recomputed = kept.layer + max(0, kept.forward - kept.backward) if how.checkpointing else 0
    for left in (len(shape.layers), 1):
        done = len(shape.layers) - left
        gradients = _gradients(shape, how, done) + _root_gradients(shape, how) + head
        buffer = MASTER * unit.trained * (done > 0)
        next_ones = flat * min(how.ahead, left - 1)
        if not how.resharded:
            next_ones = sum(sorted(u.whole(how.itemsize) for u in shape.layers)[-left:]) - layer
        yield Counter(
            unsharded=root + layer + next_ones + _unpacked(shape, how),
            activations=_kept(shape, how, kept, left) + recomputed + kept.backward,
            gradients=gradients,
            buffers=buffer,
        )
        waiting = Counter(
            unsharded=root + next_ones, activations=_kept(shape, how, kept, left - 1), gradients=gradients
        )
        yield waiting + how.reduction(unit.trained)


def _unpacked(shape: ModelShape, how: Sharding) -> int:
    """What torchao makes of a weight in NF4 to multiply by it: its values' numbers, 8 bytes for two, and from them
    the weight itself, with and without its scales."""
    return (8 + 3 * how.itemsize) * max(unit.largest_packed for unit in shape.layers)


def _head(shape: ModelShape) -> int:
    """Trained parameters of the projection to the vocabulary."""
    return min(shape.root.trained, shape.vocabulary * shape.hidden)


def _root_reduced(shape: ModelShape, how: Sharding, kept: Activations) -> Memory:
    """The end of the backward pass: the embedding's gradient is made, and the root's gradients are reduced."""
    trained, layers = shape.root.trained, len(shape.layers)
    whole = how.itemsize * trained
    embedding = how.itemsize * min(trained, shape.vocabulary * shape.hidden)
    waiting = _gradients(shape, how, layers) + _root_gradients(shape, how)
    made = Counter(
        unsharded=shape.root.whole(how.itemsize),
        activations=kept.outside,
        gradients=waiting + (whole + embedding if shape.tied else whole),
        buffers=MASTER * shape.largest_layer.trained,
    )
    return largest([made, Counter(gradients=waiting) + how.reduction(trained)])


def _optimizer(shape: ModelShape, how: Sharding) -> Memory:
    """The optimizer's step, a tensor after the other, beside all gradients: AdamW's root of the second moment, twice.

    With Muon a rank has a whole matrix and what ``torch.optim.Muon`` makes of it: a parameter and its momentum in
    float32, and two matrices in bfloat16.
    """
    whole = 16 * how.slices * max(unit.largest_trained for unit in shape.layers) if how.muon else 0
    if how.host:
        return Counter(buffers=whole)
    largest_tensor = max(unit.largest_trained for unit in (*shape.layers, shape.root))
    back = optimizer_state(shape, how) if how.waits else 0
    buffers = max(whole, 2 * MASTER * largest_tensor // how.shards)
    return Counter(gradients=MASTER * shape.trained // how.shards, optimizer=back, buffers=buffers)
