"""The critic: how good the state before each token is (PPO)."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn
from transformers import AutoConfig

from feedback.trusted_code import trusted
from train.algorithms.base import Loss
from train.batch.packed import PackedBatch
from train.controller.dispatch import by_tokens, dispatch, per_token
from train.model.fsdp import log_once
from train.model.scalar_head import build_with_scalar_head, token_values
from train.objectives.values import value_loss
from train.own_model.separation import require_apart, scalar_outputs
from train.workers.model_worker import TrainedWorker, forward_per_token


class CriticWorker(TrainedWorker):
    """One FSDP rank of the critic: the policy's body with a head of one output, and its own optimizer.

    With ``train.algorithm.critic.model`` it is that reward model in place of the policy's body with a head of zeros;
    with ``train.algorithm.critic.lora`` adapters of the body and the head are trained, and nothing else.
    """

    def build(self) -> nn.Module:
        critic = self.config.algorithm.critic
        if self.config.lora is not None and critic.lora is None:
            log_once(
                "train.lora is of the policy; without train.algorithm.critic.lora the critic trains all its weights"
            )
        if critic.model is not None:
            require_same_tokens(critic.model, self.policy)
        model = build_with_scalar_head(
            critic.model or self.policy,
            lora=critic.lora,
            lora_setting="train.algorithm.critic.lora",
            **self.build_options,
        )
        require_apart(model, self.build_options["dtype"], scalar_outputs)
        return model

    @property
    def learning_rate(self) -> float:
        return self.config.algorithm.critic.learning_rate

    @dispatch(per_token)
    def values(self, batch: PackedBatch) -> Tensor:
        """float32 [T]: the value of the state before each response token, zero at prompt tokens."""
        return forward_per_token(self.model, batch, self.config.micro_batch_tokens, token_values)

    @dispatch(by_tokens)
    def update(self, batch: PackedBatch) -> dict[str, float]:
        """One optimizer step towards ``returns`` of the batch, by the mean over the response tokens of all ranks.

        ``values`` of the batch are as they were when the step began.
        """
        metrics, _ = self.take_step(batch, self._loss, float(batch.response_mask.sum()))
        return {
            "value_loss": metrics["loss"],
            "value_clip_fraction": metrics["clipped"],
            "critic_grad_norm": metrics["grad_norm"],
            "critic_learning_rate": metrics["learning_rate"],
        }

    def _loss(self, micro: PackedBatch) -> tuple[Loss, Tensor]:
        assert micro.values is not None
        assert micro.returns is not None
        clip = self.config.algorithm.critic.value_clip
        values = token_values(self.model, micro)
        loss, clipped = value_loss(values, micro.values, micro.returns, clip=clip)
        return ((loss * micro.response_mask).sum(), {"clipped": clipped.float()}), values


def require_same_tokens(model: Path, policy: Path) -> None:
    """Raise ValueError if the critic would start from a model that reads other tokens than the policy writes."""
    if not (model / "config.json").is_file():
        raise ValueError(f"train.algorithm.critic.model={model} is not a model: it has no config.json")
    try:
        known, needed = (
            AutoConfig.from_pretrained(folder, trust_remote_code=trusted(folder)).get_text_config().vocab_size
            for folder in (model, policy)
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"train.algorithm.critic.model={model} can't be read as a model: {error}") from error
    if known != needed:
        raise ValueError(
            f"train.algorithm.critic.model={model} has {known} tokens, and the policy {needed}; use a reward model "
            "that was trained from a policy with the same tokenizer"
        )
