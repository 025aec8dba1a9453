"""What a model is made of, from its config.json alone: parameters by kind and by FSDP unit, and what a layer keeps.

The model is made by transformers without memory, on torch's meta device, so its parameters are counted and not
estimated, whatever the architecture. What a pass keeps for its gradient is traced: one layer is run, on meta tensors
too, while every storage that comes and goes is counted.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from feedback.config import ScoringConfig
from feedback.trusted_code import UntrustedCode
from serve.config import AdaptersConfig
from serve.kv_cache import full_context
from serve.vllm.adapters.slots import RANKS
from train.algorithms import load
from train.batch.prompt_rows import take_rows
from train.config.sections import AdapterConfig, PolicyModelConfig
from train.config.training import TrainConfig
from train.model.attention.packed import flash_takes, sdpa_takes, use_packed_attention
from train.model.attention.tiled import ROWS
from train.model.attention.tiled import TILE as SCORES
from train.model.fsdp import Make, causal_lm, decoder_layers, training_mode
from train.model.fused_log_probs import TILE, log_probs_and_entropy
from train.model.lora import add_adapters
from train.model.scalar_head import UNSTORED, with_one_output
from train.model.shard_dimensions import placement_for
from train.model.tensor_parallel import can_share
from train.optimizers.build import body_matrices
from train.optimizers.muon import orthogonalisation_flops
from train.own_model import overrides
from train.own_model.model_class import maker
from train.planner.plan import TENSOR_PARALLEL, Models, TracedModel
from train.planner.reward_models import scorers_of
from train.planner.sizes import Activations, Batch, ModelShape, Operations, PassOperations, Unit

TRACED: Final = "traced"
"""Name, with transformers, of the attention that a trace runs."""

_SHARDS: Final = 2  # with which dimension a weight is sharded on is found out: any number that divides most sizes


_AS_IT_IS: Final = PolicyModelConfig()


class ModelNotPlanned(ValueError):
    """The model can't be planned for; the text says why."""


def read_config(model: Path, settings: PolicyModelConfig = _AS_IT_IS) -> PretrainedConfig:
    """The config of a model's folder, or of a config.json, with the overrides of ``settings``.

    Raises:
        ModelNotPlanned: there is none, transformers does not know the architecture, or the overrides are not of it.
        feedback.trusted_code.UntrustedCode: it comes with code that may not run.
    """
    file = model / "config.json" if model.is_dir() else model
    if not file.is_file():
        raise ModelNotPlanned(f"{model}: there is no {file}; name a model's folder, or its config.json")
    try:
        return overrides.read_config(file, settings)
    except UntrustedCode:
        raise
    except (OSError, ValueError, KeyError) as error:
        raise ModelNotPlanned(f"{model}: transformers can't read {file}: {error}") from error


def models_of(
    policy: PretrainedConfig, config: TrainConfig, device: str, reward: str | ScoringConfig | None = None
) -> Models:
    """The models of a run that starts from ``policy``; ``device``: "cuda" or "cpu".

    ``reward``: what rewards what it samples, of which reward models count.

    Raises:
        ModelNotPlanned: as ``shape_of``; or no policy is trained; or attention keeps what nothing here counts.
    """

    def traced(of: PretrainedConfig, make: Make, lora: AdapterConfig | None = None) -> TracedModel:
        tracer = Tracer(of, dtype=config.dtype, device=device, lora=lora, make=make)
        return TracedModel(shape_of(of, lora, make), tracer)

    if not config.algorithm.trains_policy:
        raise ModelNotPlanned(
            f"train.algorithm.name={config.algorithm.name} trains no policy, and only policies are planned for; choose "
            "the algorithm of the policy that it is for"
        )
    if config.fsdp.attention == "eager":
        raise ModelNotPlanned(
            "train.fsdp.attention=eager keeps a score for each pair of tokens, which no plan counts; plan with auto, "
            "which keeps none"
        )
    make = maker(config.model)
    plain = traced(policy, make)
    critic, algorithm = config.algorithm.critic, load(config.algorithm)
    return Models(
        policy=plain,
        actor=plain if config.lora is None else traced(policy, make, config.lora),
        critic=traced(policy if critic.model is None else read_config(critic.model), with_one_output, critic.lora)
        if algorithm.needs_critic
        else None,
        has_reference=config.has_reference or algorithm.needs_reference,
        scorers=scorers_of(reward, device) if config.rewards_responses else (),
    )


def slot_parameters(policy: PretrainedConfig, room: AdaptersConfig, settings: PolicyModelConfig) -> int:
    """Parameters of all slots for adapters that an engine has, which vLLM makes for ranks that it has kernels for."""
    rank = next((size for size in RANKS if size >= room.rank), room.rank)
    shape = shape_of(policy, AdapterConfig(rank=rank), maker(settings))
    return room.count * shape.kinds["adapters"]


def shape_of(
    config: PretrainedConfig,
    lora: AdapterConfig | None = None,
    make: Make = causal_lm,
    layers_of: list[str] | str | None = None,
) -> ModelShape:
    """Count the parameters.

    Args:
        layers_of: what ``train.model.fsdp.decoder_layers`` finds them by.

    Raises:
        ModelNotPlanned: transformers has no causal language model of this architecture, or training would refuse it.
    """
    model = _meta_model(config, make)
    text = config.get_text_config()
    layers = _layers(model, layers_of)
    head = model.get_output_embeddings()
    if lora is not None:
        with torch.random.fork_rng(devices=[]):  # a run counts amid its own random numbers, and adapters draw some
            add_adapters(model, lora, whole=_trained_whole(make))
    placed = placement_for(model, _SHARDS)
    nf4 = lora is not None and lora.base == "nf4"
    matrices = {id(parameter) for parameter in body_matrices(model)}
    inside = [list(layer.named_parameters()) for layer in layers]
    owned = {id(parameter) for layer in inside for _, parameter in layer}
    root = [(name, p) for name, p in model.named_parameters() if id(p) not in owned]
    hidden = model.get_input_embeddings().weight.shape[1]
    heads = getattr(text, "num_attention_heads", 1)  # a class of one's own may call them otherwise
    tied = head is not None and head.weight is model.get_input_embeddings().weight
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 1
    routed = getattr(text, "num_experts_per_tok", None) or 1
    head_size, latent = getattr(text, "head_dim", None) or hidden // heads, 0
    if rank := getattr(text, "kv_lora_rank", None):  # heads of latent attention, as DeepSeek's configs name their sizes
        head_size = (text.qk_nope_head_dim + text.qk_rope_head_dim + text.v_head_dim) // 2
        latent = rank + text.qk_rope_head_dim
    kinds: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        kind = _kind(name, parameter, model)
        kinds[kind] = kinds.get(kind, 0) + parameter.numel()
    return ModelShape(
        architecture=type(model).__name__,
        layers=tuple(_unit(parameters, placed, matrices, nf4) for parameters in inside),
        root=_unit(root, placed, matrices, nf4),
        kinds=kinds,
        active=sum(kinds.values()) - round(kinds.get("experts", 0) * (1 - routed / experts)),
        vocabulary=model.get_input_embeddings().weight.shape[0],
        hidden=hidden,
        heads=heads,
        key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_size=head_size,
        tied=tied,
        stored=str(getattr(config, "dtype", None) or torch.float32).removeprefix("torch."),
        context=full_context(json.loads(config.to_json_string(use_diff=False))),
        tensor_parallel=tuple(t for t in TENSOR_PARALLEL if t == 1 or can_share(model, t)),
        shares_sequences=_shares_sequences(model),
        latent=latent,
    )


class Tracer:
    """Bytes that a pass over a micro-batch keeps and needs for a while, beside the parameters, on meta tensors."""

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        dtype: str,
        device: str,
        lora: AdapterConfig | None = None,
        make: Make = causal_lm,
    ) -> None:
        """``device``: "cuda" or "cpu", which decides what attention keeps and how large a tile of logits is."""
        self.config, self.device, self.make = config, device, make
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.lora = lora
        self._models: dict[int, list[PreTrainedModel]] = {}
        self._known: dict[tuple[Batch, int], Activations] = {}
        self._operations: dict[tuple[Batch, int], PassOperations] = {}

    def __call__(self, batch: Batch, slices: int = 1, /) -> Activations:
        if (batch, slices) not in self._known:
            self._known[batch, slices] = self._trace(batch, slices)
        return self._known[batch, slices]

    def operations(self, batch: Batch, slices: int = 1, /) -> PassOperations:
        """What a pass over a micro-batch runs on each of ``slices`` ranks that share the layers."""
        if (batch, slices) not in self._operations:
            one, two = (run_body(model, batch, self.device) for model in self._cut(slices))
            head = self._head(_slice_of(self.config, slices), batch)
            layers = self.config.get_text_config().num_hidden_layers
            forward, backward = two.forward - one.forward, two.backward - one.backward
            self._operations[batch, slices] = PassOperations(
                forward=one.forward + forward * (layers - 1) + head.forward,
                backward=one.backward + backward * (layers - 1) + head.backward,
                again=forward * layers,
            )
        return self._operations[batch, slices]

    def _cut(self, slices: int) -> list[PreTrainedModel]:
        """The model with one and with two layers, as each of so many ranks has it."""
        if slices not in self._models:
            two = cut_model(_slice_of(self.config, slices), 2, self.dtype, self.lora, self.make)
            one = deepcopy(two)
            keep_layers(one, 1)
            self._models[slices] = [one, two]
        return self._models[slices]

    def _head(self, config: PretrainedConfig, batch: Batch) -> _Run:
        if self.make is with_one_output:
            return _run_scalar_head(config, batch, self.dtype)
        return _run_head(config, batch, self.dtype, self.device, trained=self.lora is None)

    def _trace(self, batch: Batch, slices: int) -> Activations:
        config = _slice_of(self.config, slices)
        one, two = self._cut(slices)
        try:
            body, kept_by_two = run_body(one, batch, self.device), kept_by(two, batch, self.device)
        except (AttributeError, TypeError) as error:
            if type(one).__module__.startswith("transformers."):
                raise
            raise ModelNotPlanned(
                f"{type(config).__name__}: what a pass keeps is traced by the model's body, which must take "
                f"inputs_embeds and position_ids as those of transformers do: {error}"
            ) from error
        layer = kept_by_two - body.kept
        head = self._head(config, batch)
        return Activations(
            layer=layer,
            outside=body.kept - layer,
            layer_input=batch.rows * self.config.get_text_config().hidden_size * self.dtype.itemsize,
            forward=body.forward_peak - body.kept,
            backward=body.backward_peak - body.kept,
            inference=body.inference_peak,
            head_kept=head.kept,
            head_forward=head.forward_peak,
            head_backward=head.backward_peak,
        )


def _slice_of(config: PretrainedConfig, slices: int) -> PretrainedConfig:
    """Of a model that computes what each of so many ranks does that share its layers."""
    if slices == 1:
        return config
    config = deepcopy(config)
    text = config.get_text_config()
    text.head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        setattr(text, name, getattr(text, name) // slices)
    text.vocab_size = -(-text.vocab_size // slices)
    return config


# ------------------------------------------------------------------------------------------------------ counting


def _meta_model(config: PretrainedConfig, make: Make) -> PreTrainedModel:
    try:
        with torch.device("meta"):
            return make(deepcopy(config))
    except ValueError as error:
        raise ModelNotPlanned(f"{type(config).__name__}: {error}; name a model that answers in text") from error


def _shares_sequences(model: PreTrainedModel) -> bool:
    try:
        return use_packed_attention(model)
    except ValueError:  # its layers carry a state
        return False


def _trained_whole(make: Make) -> frozenset[str]:
    """What is trained itself of a model with adapters."""
    return UNSTORED if make is with_one_output else frozenset()


def _layers(model: PreTrainedModel, classes: list[str] | str | None = None) -> list[nn.Module]:
    try:
        return decoder_layers(model, classes)
    except ValueError as error:
        raise ModelNotPlanned(str(error)) from error


def _unit(
    parameters: list[tuple[str, nn.Parameter]],
    placed: Callable[[nn.Parameter], Any],
    matrices: set[int],
    nf4: bool,
) -> Unit:
    for_muon = [parameter for _, parameter in parameters if id(parameter) in matrices]
    under = [p.numel() for name, p in parameters if nf4 and name.endswith(".base_layer.weight")]
    sizes = [(p.numel(), p.requires_grad, placed(p) is not None) for _, p in parameters]
    return Unit(
        trained=sum(n for n, trained, _ in sizes if trained),
        frozen=sum(n for n, trained, _ in sizes if not trained),
        by_columns=sum(n for n, _, columns in sizes if columns),
        largest=max((n for n, _, _ in sizes), default=0),
        largest_trained=max((n for n, trained, _ in sizes if trained), default=0),
        matrices=sum(parameter.numel() for parameter in for_muon),
        orthogonalisation=sum(orthogonalisation_flops(*parameter.shape) for parameter in for_muon),
        packed=sum(under),
        largest_packed=max(under, default=0),
    )


def _kind(name: str, parameter: Tensor, model: PreTrainedModel) -> str:
    """embedding, output, adapters, experts, norm, attention or mlp."""
    if parameter is model.get_input_embeddings().weight or "wpe" in name:
        return "embedding"
    if (head := model.get_output_embeddings()) is not None and parameter is head.weight:
        return "output"
    words = name.lower()
    if "lora_" in words:
        return "adapters"
    if ".experts" in words:
        return "experts"
    if "norm" in words or ".ln_" in words:
        return "norm"
    return "attention" if "attn" in words or "attention" in words else "mlp"


# ------------------------------------------------------------------------------------------------------- tracing


@dataclass(frozen=True)
class _Run:
    """Bytes that a forward pass kept, that it, its backward pass and a pass without gradient had at most."""

    kept: int
    forward_peak: int
    backward_peak: int
    forward: Operations
    backward: Operations
    inference_peak: int = 0


PRODUCTS: Final = {
    getattr(torch.ops.aten, name) for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "_grouped_mm", "addmv")
}
_EMPTY: Final = {getattr(torch.ops.aten, name) for name in ("empty", "new_empty", "empty_like", "empty_strided")}


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that are made within and are still there: ``live`` and the most, ``peak``; and
    all operations, with the bytes that those which are neither views nor matrix products read and write. Memory that is
    made alone stands for what a kernel writes there and reads."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.operations = Operations()
        self._seen: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        given = {tensor.untyped_storage()._cdata for tensor in tensors}
        result = func(*args, **kwargs or {})
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        new = [leaf for leaf in made if leaf.untyped_storage()._cdata not in given]
        for leaf in new:
            self._add(leaf.untyped_storage())
        written = made if func._schema.is_mutable else new
        passed = 0
        if written and func.overloadpacket not in PRODUCTS:
            read = written if func.overloadpacket in _EMPTY else tensors
            passed = sum(leaf.nbytes for leaf in (*read, *written))
        self.operations += Operations(1, passed)
        return result

    def _add(self, storage: Any) -> None:
        if (key := storage._cdata) in self._seen or not (size := storage.nbytes()):
            return

        def gone(_: Any) -> None:
            self.live -= size
            del self._seen[key]

        self._seen[key] = weakref.ref(storage, gone)
        self.live += size
        self.peak = max(self.peak, self.live)


def cut_model(
    config: PretrainedConfig, layers: int, dtype: torch.dtype, lora: AdapterConfig | None = None, make: Make = causal_lm
) -> PreTrainedModel:
    """The model with so many of its layers, on the meta device."""
    model = _meta_model(config, make)
    keep_layers(model, layers)
    if lora is not None:
        add_adapters(model, lora, whole=_trained_whole(make))
    model.to(dtype)
    if use_packed_attention(model):
        model.set_attn_implementation(TRACED)
    return model


def run_body(model: PreTrainedModel, batch: Batch, device: str) -> _Run:
    """A pass of a cut model's body, on the hidden states that embeddings give it."""
    run = _pass_of(model, batch, device)
    model.eval()
    with torch.no_grad(), LiveBytes() as inference:
        run()
    training_mode(model)
    with LiveBytes() as counted:
        hidden = run()
        kept, forward_peak, forward = counted.live, counted.peak, counted.operations
        gradient = torch.empty_like(hidden)
        counted.peak = counted.live
        hidden.backward(gradient)
    model.zero_grad()
    return _Run(kept, forward_peak, counted.peak, forward, counted.operations - forward, inference.peak)


def kept_by(model: PreTrainedModel, batch: Batch, device: str) -> int:
    """Bytes that a forward pass of a cut model's body keeps for its gradient."""
    run = _pass_of(model, batch, device)
    training_mode(model)
    with LiveBytes() as counted:
        hidden = run()
        kept = counted.live
        del hidden
    return kept


def _pass_of(model: PreTrainedModel, batch: Batch, device: str) -> Callable[[], Tensor]:
    body, dtype = model.base_model, model.dtype
    inputs = torch.empty(1, batch.rows, model.config.get_text_config().hidden_size, dtype=dtype, device="meta")
    inputs.requires_grad_()
    places = torch.zeros(1, batch.rows, dtype=torch.int64, device="meta")
    extra = {"traced": _Traced(batch, device)} if model.config._attn_implementation == TRACED else {}

    def run() -> Tensor:
        hidden: Tensor = body(inputs_embeds=inputs, position_ids=places, use_cache=False, **extra).last_hidden_state
        return hidden

    return run


def keep_layers(model: PreTrainedModel, count: int) -> None:
    """Leave the model its first layers, of a mixture whose first ones are dense the first with experts."""
    first, text = _layers(model)[0], model.config.get_text_config()
    name = next(name for name, module in model.named_modules() if module is first)
    parent, _, of_layers = name.rpartition(".")[0].rpartition(".")
    holder = model.get_submodule(parent)
    layers = list(getattr(holder, of_layers))
    mixed = [any(".experts." in f".{name}." for name, _ in layer.named_parameters()) for layer in layers]
    start = next((at for at in range(len(layers) - count + 1) if all(mixed[at : at + count])), 0)
    setattr(holder, of_layers, nn.ModuleList(layers[start : start + count]))
    if start:
        for name, value in vars(text).items():
            if isinstance(value, list | tuple) and len(value) == len(layers):  # has an entry for each layer
                setattr(text, name, value[start:])
    text.num_hidden_layers = count


def _run_head(config: PretrainedConfig, batch: Batch, dtype: torch.dtype, device: str, *, trained: bool) -> _Run:
    """The projection to the vocabulary, tile by tile, as training computes it."""
    text, tile = config.get_text_config(), TILE[device]
    entries = min(text.vocab_size, 2 * tile[1])  # those that follow take the place of these; but for the gradient
    rest = (text.vocab_size - entries) * text.hidden_size * dtype.itemsize if trained else 0
    with torch.device("meta"):
        hidden = torch.empty(batch.rows, text.hidden_size, dtype=dtype, requires_grad=True)
        weight = torch.empty(entries, text.hidden_size, dtype=dtype, requires_grad=trained)
        places = torch.zeros(batch.scored, dtype=torch.int64)
        temperatures = torch.empty(batch.scored)
    with LiveBytes() as counted:
        scores = log_probs_and_entropy(take_rows(hidden, places), weight, None, places, temperatures, tile=tile)
        kept, forward_peak, forward = counted.live, counted.peak, counted.operations
        counted.peak = counted.live
        torch.stack(scores).sum().backward()
    whole = text.vocab_size / entries
    return _Run(kept, forward_peak, counted.peak + rest, forward * whole, (counted.operations - forward) * whole)


def _run_scalar_head(config: PretrainedConfig, batch: Batch, dtype: torch.dtype) -> _Run:
    """The head of one output, as ``train.model.scalar_head`` computes it."""
    width = config.get_text_config().hidden_size
    hidden = torch.empty(batch.rows, width, dtype=dtype, requires_grad=True, device="meta")
    weight = torch.empty(width, dtype=dtype, requires_grad=True, device="meta")
    with LiveBytes() as counted:
        picked = take_rows(hidden, torch.zeros(batch.scored, dtype=torch.int64, device="meta"))
        values = torch.mv(picked.float(), weight.float())
        del picked
        kept, forward_peak, forward = counted.live, counted.peak, counted.operations
        counted.peak = counted.live
        values.sum().backward()
    return _Run(kept, forward_peak, counted.peak, forward, counted.operations - forward)


@dataclass(frozen=True)
class _Traced:
    """What the attention of a trace is called with. Not a tensor, so that transformers hands it on as it is."""

    batch: Batch
    device: str

    def calls(self) -> list[tuple[int, int, int]]:
        """(spans, length, prefix) that are computed at once, one for each kind: responses prompt by prompt."""
        spans = self.batch.spans
        prompts = sum(count for count, _, prefix in spans if not prefix)
        return [
            (-(-count // prompts) if prefix and prompts else count, length, prefix) for count, length, prefix in spans
        ]

    def responses(self) -> int:
        """Rows that attend to a prefix."""
        return sum(count * length for count, length, prefix in self.batch.spans if prefix)


class _Fused(torch.autograd.Function):
    """The shapes of fused attention: beside its inputs it keeps its output and a logsumexp per query and head.

    FlashAttention, arXiv 2205.14135, section 3.1; FlashAttention-2, arXiv 2307.08691, algorithm 1. torch's kernels, on
    a CPU too, are of this kind.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:2], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        q, k, v, *_ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class _Tiled(torch.autograd.Function):
    """The shapes of ``train.model.attention.tiled``: it keeps its inputs; call by call it has rows in the layout in
    which they are multiplied, and some tiles of scores."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, traced: _Traced) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.traced = traced
        out = q.new_empty(*q.shape[:2], v.shape[2])
        for call in traced.calls():
            parts = _call_rows(call, traced, (q, k, v, out))
            tiles = _tiles(call, traced, q, 3)
            del parts, tiles
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        dq, dk, dv = (
            torch.empty_like(q),
            torch.empty_like(k, dtype=torch.float32),
            torch.empty_like(v, dtype=torch.float32),
        )
        for call in ctx.traced.calls():
            parts = _call_rows(call, ctx.traced, (q, k, v, gradient, q, k.float(), v.float()))
            tiles = _tiles(call, ctx.traced, q, 5)
            del parts, tiles
        return dq, dk.to(k.dtype), dv.to(v.dtype), None


class _SharedOnCpu(torch.autograd.Function):
    """The shapes of ``train.model.attention.shared`` with a CPU's kernel: it keeps its inputs, and its output and
    logsumexps in float32."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, traced: _Traced) -> Tensor:
        out = torch.empty_like(q, dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:2], dtype=torch.float32))
        ctx.traced = traced
        for call in traced.calls():
            _call_rows(call, traced, (q, k, v, out))
        responses = traced.responses()
        some = [q.new_empty(responses, *q.shape[1:]), *(q.new_empty(responses, *q.shape[1:]).float() for _ in range(3))]
        del some
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, _ = ctx.saved_tensors
        totals = [torch.empty_like(x, dtype=torch.float32) for x in (q, k, v)]
        for call in ctx.traced.calls():
            _call_rows(call, ctx.traced, (q, k, v, out, gradient, *totals))
        responses = ctx.traced.responses()
        some = [x.new_empty(responses, *x.shape[1:]) for x in (gradient, q, out, totals[0])]
        del some
        return *(total.to(q.dtype) for total in totals), None


def _call_rows(call: tuple[int, int, int], traced: _Traced, of: tuple[Tensor, ...]) -> list[Tensor]:
    count, length, prefix = call
    dtype = torch.float32 if traced.device == "cpu" else of[0].dtype
    rows = [x.new_empty(count * length, *x.shape[1:], dtype=torch.promote_types(x.dtype, dtype)) for x in of]
    copied = prefix if dtype != of[0].dtype else 0
    return [*rows, *(x.new_empty(copied, *x.shape[1:], dtype=dtype) for x in of[1:3])]


def _tiles(call: tuple[int, int, int], traced: _Traced, q: Tensor, tiles: int) -> Tensor:
    count, length, prefix = call
    every = q.shape[1] * (prefix + length)
    scores = min(count * length * every, max(SCORES[traced.device], min(length, ROWS[0]) * every))
    return q.new_empty(tiles * scores, dtype=torch.float32)


def _traced_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    traced: _Traced,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """As ``train.model.attention.packed.packed_attention``, with the shapes of its kernels in their place."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    batch, device, dtype = traced.batch, traced.device, q.dtype
    shared, widths = batch.keys > batch.rows, (q.shape[-1], v.shape[-1])
    window = sliding_window is not None and sliding_window < max(prefix + length for _, length, prefix in batch.spans)
    plain = softcap is None and s_aux is None
    if plain and flash_takes(device, dtype, *widths):
        if shared and window:  # the prompt's, once for each response
            keys = torch.zeros(batch.keys, dtype=torch.int64, device="meta")
            k, v = (take_rows(x, keys) for x in (k, v))
        return _Fused.apply(q, k, v)[None], None
    if not plain or window or not sdpa_takes(device, *widths) or (shared and device != "cpu"):
        return _Tiled.apply(q, k, v, traced)[None], None
    if shared:
        return _SharedOnCpu.apply(q, k, v, traced)[None], None
    rows = torch.zeros(batch.rows, dtype=torch.int64, device="meta")
    q, k, v = (take_rows(x, rows) for x in (q, k, v))  # in order of length, and back
    if device == "cpu":
        q, k, v = (x.float() for x in (q, k, v))
    return take_rows(_Fused.apply(q, k, v).to(dtype), rows)[None], None


ALL_ATTENTION_FUNCTIONS.register(TRACED, _traced_attention)
