"""What reward models that score fresh responses take of a device and of a step. By their files alone: no model is made.

They are models of any architecture (``feedback.scoring.sources.reward_model``), so that what is traced of a policy is
estimated of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from feedback.config import ClassifierConfig, ScoringConfig
from serve.policies.folder import compute_dtype
from serve.standby_room import weight_bytes
from train.planner.sizes import ITEMSIZE

_WIDE: Final = 4  # hidden states beside an MLP's two products: residual, norm, attention's input and output


@dataclass(frozen=True)
class Scorer:
    """One reward model. ``weights``: bytes; ``itemsize``: of its type; ``token_bytes``: of a pass, for each of the
    ``batch_tokens`` that it has at most."""

    weights: int
    itemsize: int
    token_bytes: int
    batch_tokens: int

    @property
    def bytes(self) -> int:
        """Of the device that it scores on, for as long as the run lasts."""
        return self.weights + self.batch_tokens * self.token_bytes

    def flops(self, tokens: float) -> float:
        """Of so many tokens; embeddings are counted as if they were multiplied by."""
        return 2.0 * self.weights / self.itemsize * tokens


def scorers_of(reward: str | ScoringConfig | None, device: str) -> tuple[Scorer, ...]:
    """The reward models of what rewards a run that are on its devices (``device``: "cuda" or "cpu").

    One that has no folder here, as it is a name on the hub or will be trained first, is left out. Raises ValueError and
    PolicyError if its files can't be read.
    """
    if not isinstance(reward, ScoringConfig):
        return ()
    there = [model for model in (reward.human.model, reward.model) if model is not None and Path(model.name).is_dir()]
    return tuple(_scorer(model) for model in there if device == "cpu" or model.device != "cpu")


def _scorer(model: ClassifierConfig) -> Scorer:
    folder = Path(model.name)
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    hidden = text.get("hidden_size") or text.get("n_embd") or text["d_model"]
    inner = text.get("intermediate_size") or text.get("n_inner") or 4 * hidden
    itemsize = ITEMSIZE[compute_dtype(folder, model.dtype)]
    weights, _ = weight_bytes(folder, model.dtype)
    return Scorer(weights, itemsize, itemsize * (2 * inner + _WIDE * hidden), model.batch_tokens)
