"""Learn from feedback; nothing is sampled.

Some of the items are held out. They are measured as the learned ones are, before the first step and after some: that
shows whether the policy learns what people want, or these items by heart.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from feedback.lake.tables import Lake
from train import algorithms
from train.algorithms.base import logged_values
from train.batch.packed import PackedBatch, Rollout
from train.config.training import TrainConfig
from train.data.feedback_items import Item, OfflineData, Reader, pack
from train.dataflows.base import Dataflow
from train.objectives.kl import k2
from train.observe.health import means


class Offline(Dataflow):
    """Draw items of feedback, learn from them."""

    reader: ClassVar[type[Reader]] = Reader
    """Makes items of the feedback."""

    @classmethod
    def read(cls, lake: Lake, versions: Mapping[str, int], config: TrainConfig, policy: Path, seed: int) -> OfflineData:
        dataset = algorithms.load(config.algorithm).dataset
        if dataset is None:
            raise ValueError(
                f"train.algorithm.name={config.algorithm.name!r} names no feedback to learn from; give the class a "
                "`dataset` (pairs, thumbs, demonstrations), or set train.dataflow to one that reads what it learns from"
            )
        return OfflineData.of(lake, versions, config, policy, seed, dataset, cls.reader)

    @classmethod
    def settled(cls, config: TrainConfig, data: OfflineData) -> TrainConfig:
        rewards = [rollout.reward for item in data.learned.items for rollout in item]
        return config.model_copy(update={"algorithm": algorithms.load(config.algorithm).settled(rewards)})

    def step(self, step: int) -> dict[str, float]:
        config, actor, timer = self.run.config, self.run.groups.actor, self.run.timer
        at_start = self.measure("held_out_at_start") if step == 0 else {}
        batch, minibatches, updates, before = self.packed(self.run.data.learned.at(step)), [], [], []
        for minibatch in batch.minibatches(config.minibatches):
            minibatches.append(self.with_mismatched(self.with_reference(minibatch)))
            timer.record("reference")
            update, log_probs = actor.learn(minibatches[-1])
            updates.append(update)
            before.append(log_probs)
            timer.record("update")
        done = step + 1
        due = done % config.data.held_out_every_steps == 0 or done == config.steps
        return {
            **means(updates),
            **k2_ref(minibatches, before),
            **(self.at_end(minibatches) if done == config.steps else {}),
            "learned_length": float(batch.response_lengths.float().mean()),
            "items": float(len(batch.groups.unique())),
            "tokens": float(len(batch.tokens)),
            **at_start,
            **(self.measure("held_out") if due else {}),
        }

    def at_end(self, minibatches: list[PackedBatch]) -> dict[str, float]:
        """What of the policy that would be published no later step can measure, by what the last step learned from."""
        log_probs = [self.run.groups.actor.log_probs(minibatch) for minibatch in minibatches]
        learned = torch.cat([x[m.response_mask] for m, x in zip(minibatches, log_probs, strict=True)])
        moved = {f"{name}_at_end": value for name, value in k2_ref(minibatches, log_probs).items()}
        return {"log_prob_at_end": float(learned.double().mean()), **moved}

    # ------------------------------------------------------------------------------------------ what a loss reads

    def packed(self, items: list[Item]) -> PackedBatch:
        return pack(items, whole_groups=self.algorithm.whole_groups)

    def with_reference(self, batch: PackedBatch) -> PackedBatch:
        """With the parent policy's logprobs, if anything needs them."""
        reference = self.run.groups.reference
        return batch if reference is None else batch.with_(ref_log_probs=reference.log_probs(batch))

    def with_mismatched(self, batch: PackedBatch) -> PackedBatch:
        """With the mean log ratio of responses to other prompts than their own, if the algorithm reads it."""
        if not self.algorithm.needs_mismatched:
            return batch
        other = mismatched(batch)
        z0 = torch.zeros(())
        if other is not None:
            other = self.with_reference(other)
            assert other.ref_log_probs is not None
            log_probs: Tensor = self.run.groups.actor.log_probs(other)
            z0 = other.response_sums(log_probs - other.ref_log_probs).mean().clamp(min=0)
        return batch.with_(baselines=z0.expand(len(batch)))

    # ------------------------------------------------------------------------------------------ held-out items

    @cached_property
    def held_out(self) -> PackedBatch | None:
        items = self.run.data.held_out
        return self.with_reference(self.packed(items)) if items else None

    def predicted(self, batch: PackedBatch) -> Tensor:
        """What the algorithm's loss is of, float32 [T]: the policy's logprobs as they are."""
        log_probs: Tensor = self.run.groups.actor.log_probs(batch)
        return log_probs

    def measure(self, name: str) -> dict[str, float]:
        """The loss of the held-out items, and what goes with it, under the policy as it is."""
        if self.held_out is None:
            return {}
        batch = self.with_mismatched(self.held_out)
        loss, found = self.algorithm.loss(self.predicted(batch), batch)
        metrics = {f"{name}/loss": float(loss) / self.algorithm.count(batch)}
        for what, value in found.items():
            if (values := logged_values(value, batch.response_mask)).numel():
                metrics[f"{name}/{what}"] = float(values.double().mean())
        self.run.timer.record("held_out")
        return metrics


def mismatched(batch: PackedBatch) -> PackedBatch | None:
    """Each prompt with the response of the next sequence that has another prompt; None if all have the same.

    A response is cut where it would make its sequence longer than the longest of the batch.
    """
    tokens, starts = batch.tokens.tolist(), batch.cu_seqlens.tolist()
    prompts, responses = [], []
    for start, end, length in zip(starts[:-1], starts[1:], batch.prompt_lengths.tolist(), strict=True):
        prompts.append(tokens[start : start + length])
        responses.append(tokens[start + length : end])
    longest, count, rollouts = int(batch.lengths.max()), len(batch), []
    for i, prompt in enumerate(prompts):
        others = (responses[j % count] for j in range(i + 1, i + count) if prompts[j % count] != prompt)
        if (response := next(others, None)) is None:
            return None
        response = response[: longest - len(prompt)]
        rollouts.append(Rollout(prompt, response, [0.0] * len(response), 0.0, group=i))
    return PackedBatch.pack(rollouts)


def k2_ref(minibatches: list[PackedBatch], before: list[Tensor]) -> dict[str, float]:
    """Half the squared log ratio of the policy to the reference, its mean over the tokens learned from.

    It says how far the policy has moved on what it learns from, and is no estimate of its KL: the policy
    that sampled the tokens is unknown (people write some), so they can't be weighed as the policy's own. Empty
    without a reference.
    """
    found = [
        k2(old, batch.ref_log_probs)[batch.response_mask]
        for batch, old in zip(minibatches, before, strict=True)
        if batch.ref_log_probs is not None
    ]
    return {"k2_ref": float(torch.cat(found).mean())} if found else {}
