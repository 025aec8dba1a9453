"""How many tokens a prompt and its response may have. Imports no torch, so that a cycle may ask before it begins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from train.config.sections import RolloutConfig

_NAMES: Final = ("max_position_embeddings", "n_positions", "max_seq_len")


def longest_context(rollout: RolloutConfig, policy: Path) -> int:
    """Tokens that prompt and response may have together: the setting's, or the model's own.

    Raises:
        ValueError: the setting is more than the model has, or neither has a number.
    """
    model = _of_model(policy)
    length = rollout.max_model_len or model
    if length is None:
        raise ValueError(
            f"{policy}/config.json has none of {', '.join(_NAMES)}; say how long a prompt and its response may be "
            "together with train.rollout.max_model_len"
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


def _of_model(policy: Path) -> int | None:
    config = json.loads((policy / "config.json").read_text())
    sections = [config, config.get("text_config") or {}]
    found = [section[name] for section in sections for name in _NAMES if isinstance(section.get(name), int)]
    return found[0] if found else None
