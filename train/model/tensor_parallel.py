"""Tensor parallelism in training (Megatron-LM, arXiv 1909.08053): the ranks of a group share each layer.

Which layers are cut by columns (of the output) and which by rows (of the input) is what the model's own plan says. The
cutting and the collectives are PyTorch's styles. What attention or an MLP does to its input's gradient is added up over
the ranks once, where the input comes in, and not by each of its layers. All other parameters are whole on each rank, as
replicated DTensors, so that FSDP2 puts every parameter on one mesh. The output layer and the input embedding are cut
over the vocabulary; what is made of the former's logits is in ``fused_log_probs``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn import functional
from transformers import PreTrainedModel

from train.model.hf_io import ADAPTER, plain_name

FAMILIES: Final = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text")
"""The ``model_type`` of those whose layers compute with whatever heads a rank has, as the tests show."""

_PER_HEAD: Final = "replicated_with_grad_allreduce"  # transformers' name for norms of each head


def share_layers(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Cut the layers of ``model`` over the ranks of ``mesh``, in place. It may be on the meta device, with adapters.

    Raises:
        ValueError: the model is of no known family, or something in it can't be cut in so many; the message names it.
    """
    require_divisible(model, mesh.size())
    styles = {_pattern(name): style for name, style in model.tp_plan.items()}
    blocks: dict[str, None] = {}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is not None and type(head) is not nn.Linear:
        raise ValueError(_refusal(model, mesh.size(), f"its output layer has adapters ({type(head).__name__})"))
    tied = head is not None and head.weight is embedding.weight
    for name, module in list(model.named_modules()):
        if not module._parameters:
            continue
        layer, _, side = name.partition(ADAPTER)
        style = next((s for p, s in styles.items() if p.fullmatch(plain_name(f"{layer}.weight"))), None)
        if module is embedding:
            how: ParallelStyle = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
        elif module is head:
            how = Cut(Shard(0))
        elif side:
            how = _of_adapter(style, side[0])
        elif style == "colwise":
            how = Columns()
            blocks[plain_name(f"{name}.weight").rpartition(".")[0].rpartition(".")[0]] = None
        elif style == "rowwise":
            how = RowwiseParallel()
        else:
            how = Replicated(partial_gradient=style == _PER_HEAD)
        parallelize_module(module, mesh, how, src_data_rank=None)
    for block in blocks:
        model.get_submodule(block).register_forward_pre_hook(partial(_enter, mesh), with_kwargs=True)
    if tied:
        head.weight = embedding.weight
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Dropout) and module.p > 0 and ADAPTER in name:
            layer = name.partition(ADAPTER)[0]
            if any(s == "rowwise" and p.fullmatch(plain_name(f"{layer}.weight")) for p, s in styles.items()):
                parent, _, own = name.rpartition(".")
                model.get_submodule(parent)[own] = SlicedDropout(module.p, mesh)


def require_divisible(model: PreTrainedModel, size: int) -> None:
    """Raise ValueError with the reason if ``size`` ranks can't share the layers of ``model``."""
    config = model.config.get_text_config()
    if model.config.model_type not in FAMILIES:
        mixture = " and mixtures of experts are not" if _experts(config) else ""
        raise ValueError(
            _refusal(
                model, size, f"model_type {model.config.model_type!r} is not one of {', '.join(FAMILIES)}{mixture}"
            )
        )
    known = {"colwise", "rowwise", _PER_HEAD, "colwise_gather_output", "embedding_rowwise"}
    if other := sorted(set(model.tp_plan.values()) - known):
        raise ValueError(_refusal(model, size, f"transformers' plan has styles that are not known: {', '.join(other)}"))
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if (count := getattr(config, name)) % size:
            raise ValueError(_refusal(model, size, f"it does not divide {name}={count}"))


def can_share(model: PreTrainedModel, size: int) -> bool:
    """Whether so many ranks can share the layers of ``model``."""
    try:
        require_divisible(model, size)
    except ValueError:
        return False
    return True


def share_random_state(mesh: DeviceMesh) -> None:
    """Have the ranks of the group draw the same random numbers from here on; every rank of it must call it."""
    seed = torch.randint(2**62, ())
    group = mesh.get_group()
    device = "cuda" if torch.distributed.get_backend(group) == "nccl" else "cpu"
    sent = seed.to(device)
    torch.distributed.broadcast(sent, group=group, group_src=0)
    torch.manual_seed(int(sent))


def local(parameter: Tensor) -> Tensor:
    """A parameter of a model within its forward pass as this rank computes with it: its slice, or all of it."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class Columns(ColwiseParallel):
    """``ColwiseParallel`` within a block whose input's gradient is added up by ``_enter``, and by this not yet."""

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Any, desired_input_layouts: Any, mod: nn.Module, inputs: Any, device_mesh: DeviceMesh
    ) -> DTensor:
        whole, partial_gradient = [Replicate()], [Partial()]
        return DTensor.from_local(inputs[0], device_mesh, whole, run_check=False, grad_placements=partial_gradient)


class Cut(ParallelStyle):
    """Places the parameters, and leaves the computation to who calls the module."""

    def __init__(self, placement: Placement) -> None:
        super().__init__()
        self.placement = placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            placed = distribute_tensor(parameter, device_mesh, [self.placement], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(placed, requires_grad=parameter.requires_grad))
        return module


class Replicated(Cut):
    """Every rank has the parameters whole, and computes on plain tensors.

    ``partial_gradient``: each rank applies them to heads of its own, so that the gradient is the sum of theirs; else
    all compute the same, and so does the backward pass.
    """

    def __init__(self, *, partial_gradient: bool = False) -> None:
        super().__init__(Replicate())
        self.gradient: Placement = Partial() if partial_gradient else Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh)
        module.forward = partial(self._forward, module, module.forward)
        return module

    def _forward(self, module: nn.Module, plain: Any, *args: Any, **options: Any) -> Any:
        with self._local(module):
            return plain(*args, **options)

    @contextmanager
    def _local(self, module: nn.Module) -> Iterator[None]:
        kept = dict(module._parameters)
        for name, parameter in kept.items():
            if isinstance(parameter, DTensor):
                module._parameters[name] = parameter.to_local(grad_placements=[self.gradient])
        try:
            yield
        finally:
            module._parameters.update(kept)


class SlicedDropout(nn.Module):
    """Dropout of a tensor that each rank has a slice of (in its last dimension), as of the whole: all ranks draw the
    whole mask, from the same random state, and take their part of it."""

    def __init__(self, p: float, mesh: DeviceMesh) -> None:
        super().__init__()
        self.p, self.rank, self.size = p, mesh.get_local_rank(), mesh.size()

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        mask = functional.dropout(
            torch.ones(*x.shape[:-1], x.shape[-1] * self.size, dtype=x.dtype, device=x.device), self.p
        )
        return x * mask.tensor_split(self.size, -1)[self.rank]


def _enter(mesh: DeviceMesh, block: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The input of attention or an MLP, with the sum over the ranks for a gradient (Megatron-LM's *f*)."""

    def entered(x: Tensor) -> Tensor:
        whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        return whole.to_local(grad_placements=[Partial()])

    if args:
        return (entered(args[0]), *args[1:]), options
    return args, {**options, "hidden_states": entered(options["hidden_states"])}


def _of_adapter(style: str | None, side: str) -> ParallelStyle:
    """For A and B of a layer: B is cut where the layer is cut by columns, A where it is by rows."""
    if style == "colwise":
        return Columns() if side == "B" else Replicated(partial_gradient=True)
    if style == "rowwise":
        return RowwiseParallel() if side == "A" else Replicated()
    return Replicated()


def _pattern(layer: str) -> re.Pattern[str]:
    return re.compile(re.escape(layer).replace(r"\*", r"\d+") + r"\.weight")


def _experts(config: Any) -> bool:
    return any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def _refusal(model: PreTrainedModel, size: int, why: str) -> str:
    return f"train.fsdp.tensor_parallel={size} is not for {type(model).__name__}: {why}; use 1, and more ranks for FSDP"
