"""How many tokens a prompt and its response may have. Imports no torch, so that a cycle may ask before it begins."""

from __future__ import annotations

import json
from pathlib import Path

from serve.kv_cache import BATCH_SHARE, KVCache, fit, full_context, machine_memory
from train.config.sections import RolloutConfig
from train.config.training import TrainConfig


def rollout_cache(config: TrainConfig, policy: Path) -> KVCache:
    """The context and the KV cache of an engine for rollouts, where every rank has its part of a machine's memory.

    Raises:
        serve.kv_cache.ContextRefused: the settings don't fit together, or are more than the model has.
    """
    return fit(
        policy,
        dtype=config.dtype,
        max_model_len=config.rollout.max_model_len,
        kv_cache_bytes=config.rollout.kv_cache_bytes,
        max_num_seqs=config.rollout.max_num_seqs,
        share=BATCH_SHARE,
        section="train.rollout",
        devices=config.rollout.tensor_parallel_size,
        memory=machine_memory() // config.ranks,
    )


def with_context(config: TrainConfig, policy: Path, max_model_len: int | None = None) -> TrainConfig:
    """``config`` with a number for the context of its rollouts, if it has any and their KV cache decides it.

    ``max_model_len``: what a run began with, if it goes on. Raises as ``rollout_cache``.
    """
    if not config.samples or config.rollout.max_model_len is not None:
        return config
    length = max_model_len or rollout_cache(config, policy).max_model_len
    if length < 0:  # a model of which no size is known
        return config
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"max_model_len": length})})


def longest_context(rollout: RolloutConfig, policy: Path) -> int:
    """Tokens that prompt and response may have together: the setting's, or the model's own.

    Raises:
        ValueError: the setting is more than the model has, or neither has a number.
    """
    model = full_context(json.loads((policy / "config.json").read_text()))
    length = rollout.max_model_len or model
    if length is None:
        raise ValueError(
            f"{policy}/config.json doesn't say what context the model has; say how long a prompt and its response may "
            "be together with train.rollout.max_model_len"
        )
    if model is not None and length > model:
        raise ValueError(
            f"train.rollout.max_model_len={length} is more than the {model} tokens of context of the model in "
            f"{policy}; use at most {model}"
        )
    return length


def longest_prompt(rollout: RolloutConfig, policy: Path) -> int:
    """Tokens that a prompt may have beside a response of ``max_tokens``.

    Raises:
        ValueError: there is no room for any.
    """
    length = longest_context(rollout, policy)
    room = length - rollout.max_tokens
    if room < 1:
        raise ValueError(
            f"train.rollout.max_tokens={rollout.max_tokens} leaves no room for a prompt in {length} tokens of context; "
            f"use at most {length - 1}, less what prompts need"
        )
    return room
