"""Build a Hugging Face causal LM and shard it with FSDP2, by decoder layer."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from train.batch import PackedBatch


def build(policy: Path, *, dtype: torch.dtype, activation_checkpointing: bool = False) -> nn.Module:
    """Load ``policy`` and shard it over all ranks: float32 master weights, ``dtype`` compute, float32 reduction.

    Raises:
        ValueError: the model does not name its decoder layers, so that there is nothing to shard by.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32, attn_implementation="sdpa").to(device)
    names = set(model._no_split_modules or ())
    layers = [m for m in model.modules() if type(m).__name__ in names]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no modules named {sorted(names)} to shard by")
    if activation_checkpointing:
        apply_activation_checkpointing(model, check_fn=lambda m: type(m).__name__ in names)
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),), mesh_dim_names=("dp",))
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    return model


def token_log_probs(model: nn.Module, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """Log-probability of each response token at its sequence's temperature, and the entropy where it was sampled.

    Attention never crosses sequences: the model sees positions that start again at zero, and masks by them.

    Returns:
        (log_probs, entropy): float32 [T], nats; zero at prompt tokens.
    """
    device = next(model.parameters()).device
    sampled = batch.response_mask.nonzero().flatten()
    logits = model(
        input_ids=batch.tokens[None].to(device),
        position_ids=batch.position_ids[None].to(device),
        use_cache=False,
        logits_to_keep=(sampled - 1).to(device),
    ).logits[0]
    temperatures = batch.per_token(batch.temperatures)[sampled].to(device)
    distribution = torch.log_softmax(logits.float() / temperatures[:, None], dim=-1)
    chosen = distribution.gather(1, batch.tokens[sampled].to(device)[:, None])[:, 0]
    entropy = -(distribution.exp() * distribution).sum(-1)
    zeros = torch.zeros(len(batch.tokens), device=device)
    return zeros.index_put((sampled,), chosen).cpu(), zeros.index_put((sampled,), entropy.detach()).cpu()


def export(model: nn.Module, policy: Path, folder: Path) -> None:
    """Gather the weights and have rank 0 write them to ``folder`` as a Hugging Face model; every rank must call it.

    Args:
        model: what ``build(policy, …)`` made.
        policy: where the model came from; its config and type are kept.
    """
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if torch.distributed.get_rank() == 0:
        config = AutoConfig.from_pretrained(policy)
        stored = getattr(config, "dtype", None) or torch.float32
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(config)
        # A tied tensor has two names; a checkpoint holds it under the first.
        every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        tied = every - {name for name, _ in model.named_parameters()}
        weights = {name: tensor.to(stored) for name, tensor in state.items() if name not in tied}
        skeleton.save_pretrained(folder, state_dict=weights)
    torch.distributed.barrier()


def require_gradient_sync(model: nn.Module, sync: bool) -> None:
    """Reduce gradients in the next backward pass, or let them add up locally."""
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(sync)
