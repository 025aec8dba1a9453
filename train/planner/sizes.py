"""What the other modules compute with: sizes of a model, of a micro-batch, of what a pass keeps. Plain numbers."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Final

ITEMSIZE: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
GIB: Final = 2**30
NF4: Final = 1 / 2 + 1 / 64 + 2 / (64 * 256)
"""Bytes of a value in NF4: half a byte, of 64 values' scale, and of 256 scales' own (arXiv 2305.14314, section 3)."""


@dataclass(frozen=True)
class Unit:
    """The parameters that FSDP gathers and frees together: a decoder layer, or all that is in none (the root).

    ``by_columns``: of those in weights that are sharded on their second dimension, which are copied once more.
    ``largest``: of the largest tensor; ``largest_trained``: of the largest that is trained. ``matrices``: of those that
    are trained, in the matrices that Muon is for; ``orthogonalisation``: operations that their update takes.
    ``packed``: of those that are frozen, in weights of 4 bits; ``largest_packed``: in the largest of them.
    """

    trained: int
    frozen: int
    by_columns: int
    largest: int
    largest_trained: int
    matrices: int = 0
    orthogonalisation: int = 0
    packed: int = 0
    largest_packed: int = 0

    @property
    def parameters(self) -> int:
        return self.trained + self.frozen

    def whole(self, itemsize: int) -> int:
        """Bytes once gathered, in a compute type of that size; what is in 4 bits stays so."""
        return itemsize * (self.parameters - self.packed) + int(NF4 * self.packed)

    def slice_of(self, slices: int) -> Unit:
        """A slice of each of the tensors."""
        return Unit(*(getattr(self, field.name) // slices for field in fields(self)))


@dataclass(frozen=True)
class ModelShape:
    """A model's parameters, exactly, and the sizes that formulas need.

    ``kinds``: parameters by kind; they add up to all. ``active``: those that compute a token (a mixture's experts that
    are not routed to don't). ``stored``: the type in config.json. ``context``: tokens; None if it doesn't say.
    ``tensor_parallel``: how many ranks may share each layer in training. ``shares_sequences``: whether its attention
    lets ranks share sequences. ``latent``: values that multi-head latent attention (arXiv 2405.04434, section 2.1)
    caches of a token in a layer, in place of all heads' keys and values; ``head_size`` is then the mean of a key's and
    a value's.
    """

    architecture: str
    layers: tuple[Unit, ...]
    root: Unit
    kinds: dict[str, int]
    active: int
    vocabulary: int
    hidden: int
    heads: int
    key_value_heads: int
    head_size: int
    tied: bool
    stored: str
    context: int | None
    tensor_parallel: tuple[int, ...] = (1,)
    shares_sequences: bool = False
    latent: int = 0

    def slice_of(self, slices: int) -> ModelShape:
        """What each of so many ranks has that share the layers (train.fsdp.tensor_parallel).

        Norms, which each has whole, are counted as the rest is: they are less than a thousandth of a layer.
        """
        return replace(
            self,
            layers=tuple(unit.slice_of(slices) for unit in self.layers),
            root=self.root.slice_of(slices),
            kinds={kind: count // slices for kind, count in self.kinds.items()},
            active=self.active // slices,
            vocabulary=-(-self.vocabulary // slices),
            heads=self.heads // slices,
            key_value_heads=self.key_value_heads // slices,
        )

    @cached_property
    def parameters(self) -> int:
        """All but adapters."""
        return sum(self.kinds.values()) - self.kinds.get("adapters", 0)

    @cached_property
    def trained(self) -> int:
        return self.root.trained + sum(unit.trained for unit in self.layers)

    @cached_property
    def matrices(self) -> int:
        return self.root.matrices + sum(unit.matrices for unit in self.layers)

    @cached_property
    def orthogonalisation(self) -> int:
        return self.root.orthogonalisation + sum(unit.orthogonalisation for unit in self.layers)

    @cached_property
    def frozen(self) -> int:
        return self.root.frozen + sum(unit.frozen for unit in self.layers)

    @cached_property
    def packed(self) -> int:
        return self.root.packed + sum(unit.packed for unit in self.layers)

    def whole(self, itemsize: int) -> int:
        """Bytes of all of it in a compute type of that size, as of ``Unit.whole``."""
        return self.root.whole(itemsize) + sum(unit.whole(itemsize) for unit in self.layers)

    @cached_property
    def largest_layer(self) -> Unit:
        return max(self.layers, key=lambda unit: unit.parameters)

    def key_value_bytes(self, itemsize: int, devices: int = 1) -> int:
        """Of a token's keys and values in all layers, on each of the devices that share a model.

        What is latent belongs to all heads, and each device has it whole.
        """
        if self.latent:
            return len(self.layers) * self.latent * itemsize
        return 2 * len(self.layers) * max(1, self.key_value_heads // devices) * self.head_size * itemsize


@dataclass(frozen=True)
class Share:
    """Rows, those of them that are scored, and pairs of a query and a key, of a part of a ``Batch``."""

    rows: int
    scored: int
    pairs: float


@dataclass(frozen=True)
class Batch:
    """The rows of a micro-batch as ``train.batch.prompt_rows`` makes them: a prompt once for all its responses.

    ``rows``: that the model computes. ``scored``: of them, those whose next token was sampled. ``keys``: that attention
    reads, where each response has its prompt's again. ``spans``: (how many, length, length of prefix).
    """

    rows: int
    scored: int
    keys: int
    spans: tuple[tuple[int, int, int], ...]

    @property
    def pairs(self) -> float:
        """Pairs of a query and a key that it attends to: causal attention computes half of a span's own."""
        return sum(count * length * (prefix + length / 2) for count, length, prefix in self.spans)

    @classmethod
    def of(cls, prompts: int, responses: int, prompt_tokens: int, response_tokens: int) -> Batch:
        """``prompts`` with as many ``responses`` each, of these lengths. The last token of each is not computed."""
        computed = response_tokens - 1
        if responses == 1:
            rows = prompts * (prompt_tokens + computed)
            return cls(rows, prompts * response_tokens, rows, ((prompts, prompt_tokens + computed, 0),))
        spans = ((prompts * responses, computed, prompt_tokens), (prompts, prompt_tokens, 0))
        rows = prompts * (prompt_tokens + responses * computed)
        keys = rows + prompts * responses * prompt_tokens
        return cls(rows, prompts * responses * response_tokens, keys, spans)

    def share(self, ranks: int) -> Share:
        """What each of so many ranks computes that share every sequence (Ulysses)."""
        return Share(-(-self.rows // ranks), -(-self.scored // ranks), self.pairs / ranks)

    def scaled(self, factor: float) -> Batch:
        """With as many times the sequences."""
        rows, scored, keys = (round(factor * n) for n in (self.rows, self.scored, self.keys))
        # Rounded down: they are whole, and must lie within the rows.
        spans = tuple((max(1, int(factor * count + 1e-6)), length, prefix) for count, length, prefix in self.spans)
        return Batch(rows, scored, keys, spans)


@dataclass(frozen=True)
class Activations:
    """Bytes of a pass over one micro-batch beside parameters and their unsharded copies, as traced.

    ``layer``: what a decoder layer keeps for its gradient; ``outside``: what is kept once; ``layer_input``: what
    checkpointing keeps of a layer. ``forward``, ``backward``: what a layer needs beyond what is kept, at most; the
    gradients of its weights are in ``backward``. ``inference``: a pass without gradient, at most. ``head_kept``,
    ``head_forward``, ``head_backward``: the projection to the vocabulary, what it keeps and has at most; the gradient
    of its weight is in ``head_backward``.
    """

    layer: int
    outside: int
    layer_input: int
    forward: int
    backward: int
    inference: int
    head_kept: int
    head_forward: int
    head_backward: int


@dataclass(frozen=True)
class Operations:
    """What a pass runs beside matrix products: how many operations in all, and the bytes that these read and write."""

    count: float = 0
    moved: float = 0

    def __add__(self, other: Operations) -> Operations:
        return Operations(self.count + other.count, self.moved + other.moved)

    def __sub__(self, other: Operations) -> Operations:
        return Operations(self.count - other.count, self.moved - other.moved)

    def __mul__(self, times: float) -> Operations:
        return Operations(self.count * times, self.moved * times)


@dataclass(frozen=True)
class PassOperations:
    """Of one micro-batch, in the whole model. ``again``: of the forward pass, what checkpointing runs once more."""

    forward: Operations
    backward: Operations
    again: Operations
