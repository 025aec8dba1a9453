"""What reward models that score fresh responses take of a device and of a step. By their files alone: no model is made.

They are models of any architecture (``feedback.scoring.sources.reward_model``), so that what is traced of a policy is
estimated of them.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from feedback.config import ClassifierConfig, ScoringConfig
from serve.policies.folder import PolicyError, compute_dtype
from serve.standby_room import weight_bytes
from train.planner.sizes import ITEMSIZE

_FIRST: Final = ("auto", "cuda", "cuda:0")
"""Devices that are the first that a process sees."""

_HIDDEN: Final = ("hidden_size", "n_embd", "d_model", "dim", "emb_dim")
_INNER: Final = ("intermediate_size", "n_inner", "d_ff", "encoder_ffn_dim", "hidden_dim")
"""What configs call the width of a hidden state, and of an MLP."""

_WIDE: Final = 4  # hidden states beside an MLP's two products: residual, norm, attention's input and output


@dataclass(frozen=True)
class Scorer:
    """One reward model. ``weights``: bytes; ``itemsize``: of its type; ``token_bytes``: of a pass, for each of the
    ``batch_tokens`` that it has at most."""

    weights: int
    itemsize: int
    token_bytes: int
    batch_tokens: int

    def flops(self, tokens: float) -> float:
        """Of so many tokens; embeddings are counted as if they were multiplied by."""
        return 2.0 * self.weights / self.itemsize * tokens


def scorers_of(reward: str | ScoringConfig | None, device: str) -> tuple[Scorer, ...]:
    """The reward models of what rewards a run that are on its devices (``device``: "cuda" or "cpu").

    One on another device is left out, and one that can't be looked at, as it is a name on the hub, or will be trained
    first, or is broken, which the run says itself.
    """
    if not isinstance(reward, ScoringConfig):
        return ()
    sources = ((reward.human.weight, reward.human.model), (reward.model and reward.model.weight, reward.model))
    models = [model for weight, model in sources if weight and model is not None]
    found = [_scorer(model) for model in models if device == "cpu" or model.device in _FIRST]
    return tuple(scorer for scorer in found if scorer is not None)


def _scorer(model: ClassifierConfig) -> Scorer | None:
    folder = Path(model.name)
    with suppress(OSError, ValueError, TypeError, AttributeError, KeyError, PolicyError):
        itemsize = ITEMSIZE[compute_dtype(folder, model.dtype)]
        weights, _ = weight_bytes(folder, model.dtype)
        config = json.loads((folder / "config.json").read_text())
        text = config.get("text_config", config)
        hidden = next((text[name] for name in _HIDDEN if text.get(name)), 0)
        inner = next((text[name] for name in _INNER if text.get(name)), 4 * hidden)
        return Scorer(weights, itemsize, itemsize * (2 * inner + _WIDE * hidden), model.batch_tokens)
    return None
