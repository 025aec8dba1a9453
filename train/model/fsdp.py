"""Build a Hugging Face model and shard it with FSDP2, by decoder layer; run it on packed batches."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.modules.dropout import _DropoutNd
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import is_flash_attn_2_available

from feedback.trusted_code import trusted
from train.batch.packed import PackedBatch
from train.batch.prompt_rows import Rows, all_rows, fewest_rows
from train.import_object import import_object
from train.model.attention.calls import Packing
from train.model.attention.packed import IMPLEMENTATION, packed, share_sequences, use_packed_attention
from train.model.fused_log_probs import scored_by_head
from train.model.hf_io import (
    ADAPTER,
    common_dtype,
    load,
    remember_names,
    stored_dtypes,
)
from train.model.lora import add_adapters, initialise
from train.model.low_precision import nf4
from train.model.mesh import Meshes, make_meshes
from train.model.shard_dimensions import placement_for
from train.model.tensor_parallel import share_layers
from train.model.ulysses import Ulysses, sequence_parallel_group

if TYPE_CHECKING:
    from train.config.fp8 import Fp8Config
    from train.config.sections import AdapterConfig, FsdpConfig

log = logging.getLogger(__name__)

Make = Callable[[PretrainedConfig], PreTrainedModel]
"""The model of a config, in float32."""


def causal_lm(config: PretrainedConfig) -> PreTrainedModel:
    """A body with its projection to the vocabulary."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, trust_remote_code=brings_code(config)
    )
    return model


def training_mode(model: nn.Module) -> None:
    """As ``model.train()``, with nothing at random that a policy has not when it is sampled from: transformers' own
    modules stay as they are in evaluation (some drop what their config says, Phi-MoE draws its experts), and so does
    dropout, but for that of adapters (``train.lora.dropout``)."""
    model.train()
    for name, module in model.named_modules():
        made_in = next((of.__module__ for of in type(module).__mro__ if not of.__module__.startswith("torch.")), "")
        drops = isinstance(module, _DropoutNd) and ADAPTER not in name
        if drops or made_in.startswith("transformers."):
            module.training = False


def brings_code(config: PretrainedConfig) -> bool:
    """``trust_remote_code`` for making the model of a config that was read from a folder. Raises UntrustedCode."""
    return bool(getattr(config, "auto_map", None)) and trusted(config.name_or_path)


def build(
    policy: Path,
    *,
    dtype: torch.dtype,
    meshes: Meshes | None = None,
    options: FsdpConfig | None = None,
    fp8: Fp8Config | None = None,
    activation_checkpointing: bool = False,
    lora: AdapterConfig | None = None,
    lora_setting: str = "train.lora",
    frozen: bool = False,
    make: Make = causal_lm,
    unstored: frozenset[str] = frozenset(),
) -> nn.Module:
    """Make the model of ``policy``, sharded: float32 master weights, ``dtype`` compute, float32 reduction.

    It is made without memory, sharded, and then each rank reads its own slices. Weights that are never trained are
    held in ``dtype`` where that loses nothing: a frozen model's, which only compute, and the base of a LoRA run that is
    stored in ``dtype``. Every rank must call it.

    Args:
        policy: a Hugging Face folder with safetensors weights.
        dtype: of parameters and activations in the forward and backward pass.
        meshes: the ranks to shard over; all, flat, if None.
        options: the defaults of the settings if None.
        fp8: multiply in fp8, where ``training`` of it is set.
        lora: train adapters, and of the rest what is ``unstored`` alone; ``frozen``: nothing at all.
        lora_setting: what messages call ``lora``.
        make: builds the model from the policy's config.
        unstored: parameters that ``policy`` need not store; those that it does not stay on the meta device.

    Raises:
        ValueError: no module is of the classes to shard by, the policy's weights don't fit its config, or ``lora``
            fits no layer, or one that can't have an adapter; ``fp8`` can't be computed.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    meshes = meshes or make_meshes(device.type)
    if options is None:
        from train.config.sections import FsdpConfig  # this module is imported where there is torch alone

        options = FsdpConfig()
    config = AutoConfig.from_pretrained(policy, trust_remote_code=trusted(policy))
    stored = common_dtype(stored_dtypes(policy).values())
    model = skeleton(config, make)
    remember_names(model, policy)
    choose_attention(model, options.attention, dtype, device)
    if meshes.sp is not None:
        share_sequences(model, meshes.sp, 1 if meshes.tp is None else meshes.tp.size())
    if fp8 is not None and fp8.training is not None:
        from train.model.low_precision.float8 import convert_layers  # reads settings, as above

        converted = convert_layers(decoder_layers(model, options.layers), fp8)
        log_once(f"fp8 ({fp8.training}) in {type(model).__name__}: {', '.join(converted)}")
    if lora is not None:
        add_adapters(model, lora, whole=unstored, setting=lora_setting)
    if frozen:
        model.requires_grad_(False)
    packed: nf4.Named = {}
    if lora is not None and lora.base == "nf4":
        packed = nf4.base_weights(model, meshes.fsdp.size(-1), f"{lora_setting}.base=nf4")
    by_rows = {id(parameter) for parameter in packed.values()}
    for parameter in model.parameters():
        if not parameter.requires_grad and (frozen or stored == dtype or id(parameter) in by_rows):
            parameter.data = parameter.data.to(dtype)
    if meshes.tp is not None:
        share_layers(model, meshes.tp)
    layers = decoder_layers(model, options.layers)
    if activation_checkpointing:
        apply_activation_checkpointing(model, check_fn=lambda module: module in layers)
    offload = options.cpu_offload and device.type != "cpu"
    if options.cpu_offload and not offload:
        log_once(f"train.fsdp.cpu_offload does nothing: the compute device is {device}")
    placed = placement_for(model, meshes.fsdp.size(-1))
    how: dict[str, Any] = {
        "mesh": meshes.fsdp,
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.promote_types(dtype, torch.float32)),
        "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
        "shard_placement_fn": lambda parameter: None if id(parameter) in by_rows else placed(parameter),
        # On one rank torch 2.13's FSDP2 has no way for a tensor that is gathered in several parts.
        "ignored_params": set(packed.values()) if meshes.fsdp.size(-1) == 1 else None,
    }
    if options.compile_layers is not None:
        require_backend(options.compile_layers)
        for layer in layers:
            layer.compile(backend=options.compile_layers)
    for layer in reversed(layers):
        fully_shard(layer, reshard_after_forward=frozen or options.reshard_after_forward, **how)
    fully_shard(model, **how)
    if options.prefetch_layers is not None:
        prefetch(layers, options.prefetch_layers)
    home = torch.device("cpu") if offload else device
    load(model, policy, home, unstored, packed)
    if packed:
        nf4.load(model, packed, policy, home)
    if lora is not None:
        initialise(model, home)
    return model.eval()


def empty_on_cpu(buffer: Tensor) -> Tensor:
    """As ``buffer``, with any values."""
    return torch.empty_like(buffer, device="cpu")


def skeleton(
    config: PretrainedConfig, make: Make = causal_lm, buffer: Callable[[Tensor], Tensor] = empty_on_cpu
) -> PreTrainedModel:
    """The model of a config: its parameters on the meta device, its buffers on the CPU with their values.

    ``buffer``: what a buffer, on the meta device, is on the CPU until transformers gives it values.
    """
    with torch.device("meta"):
        model = make(config)
    for module in model.modules():
        for name, empty in module.named_buffers(recurse=False):
            module._buffers[name] = buffer(empty)
    # What is computed, not stored (rotary frequencies), is made by transformers' own rule; on meta it does nothing.
    model.initialize_weights()
    return model


def require_backend(name: str) -> None:
    """Raise ValueError if torch.compile has no backend of this name."""
    if name not in torch.compiler.list_backends(exclude_tags=()):
        usual = ", ".join(torch.compiler.list_backends())
        raise ValueError(f"train.fsdp.compile_layers={name!r} is no backend of torch.compile; use one of {usual}")


def prefetch(layers: list[nn.Module], count: int) -> None:
    """Have each of the sharded ``layers`` gather so many that come after it, in the forward and the backward pass."""
    for i, layer in enumerate(layers):
        assert isinstance(layer, FSDPModule)
        layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 1 + count])
        layer.set_modules_to_backward_prefetch(layers[max(0, i - count) : i][::-1])


def decoder_layers(model: nn.Module, classes: list[str] | str | None) -> list[nn.Module]:
    """The modules to shard by, in the model's order: of the classes named, or those that ``module:name`` returns, or
    those that the model itself declares indivisible.

    Raises:
        ValueError: there is no such module, and the message lists the classes that there are; or what a function
            returns can't be sharded by.
    """
    if isinstance(classes, str):
        return chosen_layers(model, classes)
    wanted = set(classes if classes is not None else model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in wanted]
    missing = wanted - {type(module).__name__ for module in layers}
    if not layers or (classes is not None and missing):
        which = f"of class {', '.join(sorted(missing))}" if missing else "that it declares indivisible"
        there = sorted({type(module).__name__ for module in model.modules()})
        raise ValueError(
            f"{type(model).__name__} has no modules {which} to shard by; set train.fsdp.layers to the class of its "
            f"decoder layers, out of: {', '.join(there)}"
        )
    return layers


def chosen_layers(model: nn.Module, name: str) -> list[nn.Module]:
    """As ``decoder_layers``, by the function that ``train.fsdp.layers`` names."""
    setting = f"train.fsdp.layers={name!r}"
    wanted = {id(module) for module in import_object("train.fsdp.layers", name, "function")(model)}
    found = [(path, module) for path, module in model.named_modules() if id(module) in wanted]
    if not found or len(found) < len(wanted):
        raise ValueError(
            f"{setting} returned {len(wanted)} modules, of which {len(found)} are {type(model).__name__}'s"
        )
    users = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    for path, module in found:
        inside = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
        if not path:
            raise ValueError(f"{setting} returned the model itself, which is sharded anyway; leave it out")
        if inner := next((other for other, _ in found if other.startswith(f"{path}.")), None):
            raise ValueError(f"{setting} returned {path} and {inner}, which is inside it; choose one")
        if any(count < users[p] for p, count in inside.items()):
            raise ValueError(f"{setting} returned {path}, whose weight is tied to one outside it; leave it out")
    return [module for _, module in found]


def choose_attention(model: PreTrainedModel, requested: str, dtype: torch.dtype, device: torch.device) -> None:
    """Set the implementation of attention, and log which it is.

    Raises:
        ValueError: the model does not have the requested one.
    """
    flash = device.type == "cuda" and dtype != torch.float32
    if requested != "auto":
        model.set_attn_implementation(requested)
    elif not use_packed_attention(model) and flash and is_flash_attn_2_available():
        model.set_attn_implementation("flash_attention_2")
    chosen = model.config._attn_implementation
    if requested not in ("auto", chosen):
        raise ValueError(
            f"train.fsdp.attention={requested!r} is not for {type(model).__name__}; it kept {chosen!r}: use auto"
        )
    if chosen == IMPLEMENTATION:
        chosen += f" ({'flash attention' if flash else 'SDPA'}, sequence by sequence)"
    log_once(f"attention of {type(model).__name__}: {chosen}")


@cache
def log_once(message: str) -> None:
    """Log a message on rank 0, the first time that it comes."""
    if torch.distributed.get_rank() == 0:
        log.warning(message)


def token_log_probs(model: nn.Module, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """Log-probability of each response token at its sequence's temperature, and the entropy where it was sampled.

    Float32 [T] each, nats, with gradient; zero at prompt tokens. The logits are never held whole.
    """
    sampled = batch.response_mask.nonzero().flatten()
    temperatures = batch.per_token(batch.temperatures)

    def head(chosen: Tensor, places: Tensor) -> AbstractContextManager[None]:
        targets = sampled[chosen]
        return scored_by_head(model, places, *(x[targets].to(places.device) for x in (batch.tokens, temperatures)))

    # Each sampled token is scored where the token before it is.
    log_probs, entropy = outputs_at(model, batch, sampled - 1, head).unbind(-1)
    zeros = log_probs.new_zeros(len(batch.tokens))
    at = (sampled.to(log_probs.device),)
    return zeros.index_put(at, log_probs).cpu(), zeros.index_put(at, entropy).cpu()


def outputs_at(
    model: nn.Module,
    batch: PackedBatch,
    places: Tensor,
    head: Callable[[Tensor, Tensor], AbstractContextManager[None]],
) -> Tensor:
    """The output of the model's head at some tokens of a packed batch; attention never crosses sequences.

    It runs as few rows as that takes (``train.batch.prompt_rows``). Under sequence parallelism every rank of a group
    passes the same batch, runs its slice of the rows, and gets the same answer.

    Args:
        places: int64 [K], K > 0: indices of tokens of the batch.
        head: called with which of the ``places`` lie in what this rank runs (int64 [k], indices of ``places``), and
            where (int64 [k], on the device): a context within which ``model(…).logits`` is [k, …], the head's
            output there.

    Returns:
        [K, …], on the device of the model, with gradient.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    group = sequence_parallel_group(model)
    packs = model.config._attn_implementation == IMPLEMENTATION
    rows = rows_for(model, batch, places)
    by_row = rows.of_token[places].argsort(stable=True)
    at = rows.of_token[places][by_row]
    ulysses = None if group is None else Ulysses(group, len(rows.tokens))
    own = run = slice(0, len(rows.tokens))
    if ulysses is not None:
        own, run = ulysses.own, ulysses.run
    first, last = torch.searchsorted(at, torch.tensor([own.start, own.stop])).tolist()
    with ExitStack() as stack:
        extra = {}
        if packs:
            extra = stack.enter_context(packed(Packing(rows.spans, device, ulysses)))
        stack.enter_context(head(by_row[first:last], (at[first:last] - own.start).to(device)))
        outputs: Tensor = model(
            input_ids=batch.tokens[rows.tokens[run]][None].to(device),
            position_ids=batch.position_ids[rows.tokens[run]][None].to(device),
            use_cache=False,
            **extra,
        ).logits
    if ulysses is not None:
        bounds = torch.tensor(ulysses.counts).cumsum(0)
        owner = torch.searchsorted(bounds, at, right=True)
        outputs = ulysses.everywhere(outputs, owner.bincount(minlength=ulysses.size).tolist())
    return outputs[by_row.argsort().to(device)]


def rows_for(model: nn.Module, batch: PackedBatch, places: Tensor) -> Rows:
    """The rows that the model runs for its output at some tokens of a batch; ``places`` as of ``outputs_at``."""
    if model.config._attn_implementation == IMPLEMENTATION:
        return fewest_rows(batch.tokens, batch.cu_seqlens, batch.prompt_lengths, places)
    return all_rows(batch.lengths.tolist())
