"""Train a reward model on what people said of responses; nothing is sampled and no policy is trained.

A response is read as scoring will read it (feedback/scoring/sources/reward_model.py): by its text and that of its
prompt, in the chat template or as a pair. So it reads traffic as it has learned.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from feedback.scoring.sources.reward_model import encode
from feedback.tokenizers import load_tokenizer
from train.batch.packed import PackedBatch, Rollout
from train.config.training import TrainConfig
from train.data.demonstrations import UnfitTextError
from train.data.feedback_items import TOO_LONG, Item, Reader, Response
from train.dataflows.offline import Offline


class ScoringReader(Reader):
    """Makes of responses what scoring will read of them.

    A sequence's last token alone is its "response": it is where the score is read, and nothing else of it is learned.
    """

    def __init__(self, policy: Path, config: TrainConfig) -> None:
        super().__init__(policy, config)
        self.tokenizer = load_tokenizer(policy)
        self.longest = min(self.longest, self.tokenizer.model_max_length)

    def item(self, row: Mapping[str, Any], responses: list[Response]) -> Item:
        read = [self.token_ids({**row, "response": text}) for _, text, _ in responses]
        if len({tuple(ids) for ids in read}) < len(read):
            raise UnfitTextError("the model reads the same of both responses")
        return [
            Rollout(ids[:-1], ids[-1:], [0.0], reward, group=0, fresh=False, weight=row.get("weight", 1.0))
            for ids, (_, _, reward) in zip(read, responses, strict=True)
        ]

    def token_ids(self, row: Mapping[str, Any]) -> list[int]:
        """The tokens that the score follows from: transformers reads it at the last that is not the padding token."""
        try:
            ids = encode(self.tokenizer, row)["input_ids"]
        except ValueError as error:
            raise UnfitTextError(str(error)) from error
        while ids and ids[-1] == self.tokenizer.pad_token_id:
            ids.pop()
        if len(ids) < 2:
            raise UnfitTextError("fewer than two tokens")
        if len(ids) > self.longest:
            raise UnfitTextError(TOO_LONG)
        return ids


class RewardModelTraining(Offline):
    """Draw judgements, learn which responses people find good."""

    reader = ScoringReader

    def step(self, step: int) -> dict[str, float]:
        metrics = super().step(step)
        del metrics["learned_length"]  # of what is a response to the packed batch, the last token
        return metrics

    def at_end(self, minibatches: list[PackedBatch]) -> dict[str, float]:
        """Nothing: a score is no logprob, and nothing is referred to."""
        return {}

    def predicted(self, batch: PackedBatch) -> Tensor:
        """float32 [T]: the score of each sequence, at its last token."""
        scores: Tensor = self.run.groups.actor.scores(batch)
        return scores
