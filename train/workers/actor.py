"""The policy in training."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from serve.policies.folder import WrittenFile
from train.algorithms.base import Loss
from train.batch.packed import PackedBatch
from train.controller.dispatch import answer_and_per_token, by_tokens, dispatch, per_token, to_all
from train.export.model_folder import export
from train.model.fsdp import build, token_log_probs
from train.model.lora import export_adapter, require_publishable
from train.own_model.model_class import maker
from train.own_model.separation import require_apart
from train.workers.model_worker import TrainedWorker, forward_per_token


class ActorWorker(TrainedWorker):
    """One FSDP rank of the policy in training, with its optimizer."""

    all_patterns_fit = True

    def build(self) -> nn.Module:
        model = build(self.policy, lora=self.config.lora, make=maker(self.config.model), **self.build_options)
        require_apart(model, self.build_options["dtype"])
        if self.config.lora is not None and self.config.lora.publish == "adapter":
            require_publishable(model)
        return model

    @property
    def updates_of_run(self) -> int:
        return self.config.updates_of_policy

    @dispatch(per_token)
    def log_probs(self, batch: PackedBatch) -> Tensor:
        """float32 [T]: logprobs of the response tokens under the weights as they are."""
        return forward_log_probs(self.model, batch, self.config.micro_batch_tokens)

    @dispatch(by_tokens)
    def update(self, batch: PackedBatch, *, kl_coefficient: float | None = None) -> dict[str, float]:
        """One optimizer step on the batch, with the algorithm's loss over all ranks.

        Args:
            kl_coefficient: the adapted one; the config's if None.
        """
        return self.learn(batch, kl_coefficient=kl_coefficient)[0]

    @dispatch(answer_and_per_token)
    def learn(self, batch: PackedBatch, *, kl_coefficient: float | None = None) -> tuple[dict[str, float], Tensor]:
        """``update``, and what ``log_probs`` would have given before it, at no cost: float32 [T]."""
        if kl_coefficient is not None:
            self.algorithm.kl_coefficient = kl_coefficient

        def loss_of(micro: PackedBatch) -> tuple[Loss, Tensor]:
            log_probs, entropy = token_log_probs(self.model, micro)
            loss, health = self.algorithm.loss(log_probs, micro.with_(entropy=entropy))
            if loss.shape != ():
                raise ValueError(
                    f"train.algorithm.name={self.config.algorithm.name}: loss gave a tensor of shape "
                    f"{list(loss.shape)}; it is the sum over the micro-batch, without dimensions"
                )
            return (loss, {"entropy": entropy, **health}), log_probs

        return self.take_step(batch, loss_of, self.algorithm.count(batch))

    @dispatch(to_all)
    def export(self, folder: Path) -> dict[str, WrittenFile]:
        """Write a Hugging Face model to ``folder``, or with ``train.lora.publish: adapter`` what peft needs beside one;
        and next to it ``adapter``, with ``train.lora.publish_adapter``.

        Returns:
            The files of weights in ``folder``, by name; none of an adapter, which is small enough to be read again.
        """
        lora = self.config.lora
        written: dict[str, WrittenFile] = {}
        if lora is None or lora.publish == "merged":
            written = export(self.model, self.policy, folder)
        else:
            export_adapter(self.model, lora, self.policy, folder)
        if lora is not None and lora.publish_adapter:
            export_adapter(self.model, lora, self.policy, folder.with_name("adapter"))
        return written


def forward_log_probs(model: nn.Module, batch: PackedBatch, micro_batch_tokens: int) -> Tensor:
    """float32 [T], without gradient, in micro-batches that every rank has the same number of."""
    return forward_per_token(model, batch, micro_batch_tokens, lambda m, micro: token_log_probs(m, micro)[0])
