"""Learn from responses: fresh ones to prompts of traffic or of one's own, logged ones, or both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pydantic import TypeAdapter

from feedback.datasets import Prompt
from feedback.lake.tables import Lake
from train import algorithms
from train.batch.packed import PackedBatch, Rollout, Sample
from train.checkpoint.random_state import seed_of
from train.config.training import TrainConfig, check_baseline
from train.context import TrainingStopped
from train.controller.worker_group import Pending
from train.data import pass_rates
from train.data.prompts import TrainingData
from train.data.rewards import Rewards, check_rewards, commonest
from train.data.samples import Informative, Scored, score, table_of
from train.dataflows.base import Dataflow, Run
from train.objectives.kl import adapted_coefficient
from train.observe.health import Drawn, at_end, health
from train.observe.progress import say

Samples = list[list[Sample]]
"""Of each prompt; the last one is the greedy one, if the algorithm needs it."""

_ORDER: Final = 1
"""Tells the seed of minibatches from that of samples, which step and round name."""

_AHEAD = TypeAdapter(Samples | None)


class Online(Dataflow):
    """Sample, score, learn, reshard."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.ahead: Samples | None = None
        """Responses to the next step's prompts, where they are sampled while this step learns."""
        self.pending: Pending | None = None
        """The call that samples them."""
        self.solved: pass_rates.Counts = {}
        """Of the prompts of one's own, where they are counted."""
        self.own = {id(prompt) for of in run.data.own for prompt in of.prompts} if run.config.data.pass_rate else set()

    @classmethod
    def read(
        cls, lake: Lake, versions: Mapping[str, int], config: TrainConfig, policy: Path, seed: int
    ) -> TrainingData:
        algorithm = algorithms.load(config.algorithm)
        check_baseline(config, compares_groups=algorithm.compares_groups, needs_greedy=algorithm.needs_greedy)
        singleton_baseline = config.algorithm.lone_baseline if algorithm.compares_groups else None
        return TrainingData.of(lake, versions, config, policy, seed, singleton_baseline)

    def state(self) -> Any:
        return {
            "ahead": _AHEAD.dump_python(self.ahead, mode="json"),
            "kl_coefficient": self.algorithm.kl_coefficient,
            "solved": self.solved,
        }

    def resume(self, state: Any) -> None:
        self.ahead = _AHEAD.validate_python(state["ahead"])
        self.algorithm.kl_coefficient = state["kl_coefficient"]
        self.solved = state.get("solved", {})
        self.run.groups.reshard()

    def step(self, step: int) -> dict[str, float]:
        at_start = self.measure(step, "held_out_at_start") if step == 0 else {}
        fresh = self.fresh(step)
        drawn = self.select(fresh, self.logged(step, fresh))
        whole_groups = self.algorithm.whole_groups
        batch = PackedBatch.pack(drawn.rollouts).with_(whole_groups=whole_groups) if drawn.rollouts else None
        self.run.timer.record("score")
        updates: list[dict[str, float]] = []
        if batch is not None and self.is_enough(batch):
            batch, updates = self.learn(step, self.values(self.log_probs(batch)))
        else:
            say(f"{self.run.context.run}: step {step + 1} makes no update: {drawn}")
        metrics = health(drawn, batch, updates) | {"traffic_left_out": float(self.run.data.left_out)}
        metrics |= self.run.data.prompts_left_out
        if batch is not None and updates and step + 1 == self.run.config.steps:
            metrics |= at_end(batch, self.run.groups.actor.log_probs(batch))
        self.reshard()
        if self.own and step + 1 == self.run.config.steps:
            assert self.run.config.data.pass_rate is not None
            pass_rates.keep(self.run.context.folder, self.run.config.data.pass_rate, self.solved)
        due = (step + 1) % self.run.config.evaluate_every == 0 or step + 1 == self.run.config.steps
        return metrics | self.adapt_kl(metrics) | at_start | (self.measure(step, "held_out") if due else {})

    # ------------------------------------------------------------------------------------------ what is learned from

    def fresh(self, step: int) -> Scored:
        """Sample responses and reward them; more of them, where too few groups teach anything (dynamic sampling)."""
        groups, timer, config = self.run.groups, self.run.timer, self.run.config
        if groups.rollout is None:
            return Scored()
        sampled = self.ahead if self.ahead is not None else self.generate(step, groups.rollout.generate)
        timer.record("generate")
        if config.rollout.staleness > 0 and step + 1 < config.steps:
            groups.reshard()  # the next batch is sampled with the weights of now, while they are trained on this one
            timer.record("reshard")
            self.pending = self.generate(step + 1, groups.rollout.generate.start)
        scored = self.score(step, sampled)
        for again in range(1, config.algorithm.resample_rounds + 1):
            if self.informative(scored.rollouts).groups >= self.run.data.prompts.count:
                break
            sampled = self.generate(step, groups.rollout.generate, again)
            timer.record("generate")
            scored += self.score(step, sampled, again)
        if self.pending is None:
            groups.sleep()
        return scored

    def logged(self, step: int, fresh: Scored) -> list[Rollout]:
        """Responses that were served, as groups numbered on from the fresh ones."""
        taken = 1 + max((rollout.group for rollout in fresh.rollouts), default=-1)
        groups = enumerate(self.run.data.traffic.at(step), start=taken)
        return [replace(rollout, group=number) for number, group in groups for rollout in group]

    def select(self, fresh: Scored, logged: list[Rollout]) -> Drawn:
        """Leave out what has nothing to be compared with, where responses are compared with their group.

        With ``algorithm.filter_groups`` also groups of equal rewards, and what was sampled beyond the groups wanted.
        """
        rollouts = fresh.rollouts + logged
        if not self.algorithm.compares_groups:
            return Drawn(fresh, logged, rollouts)
        found = self.informative(rollouts)
        wanted = sorted({r.group for r in found.rollouts if r.fresh})[: self.run.data.prompts.count]
        kept = [r for r in found.rollouts if not r.fresh or r.group in wanted]
        return Drawn(fresh, logged, kept, found.uninformative, found.left_alone)

    def informative(self, rollouts: list[Rollout]) -> Informative:
        algorithm = self.run.config.algorithm
        return Informative.of(rollouts, algorithm.lone_baseline, filter_groups=algorithm.filter_groups)

    def is_enough(self, batch: PackedBatch) -> bool:
        """Whether every rank gets a part of the batch."""
        return len(batch.units()) >= self.run.config.data_parallel_ranks

    def measure(self, step: int, name: str) -> dict[str, float]:
        """The rewards of greedy responses to the prompts of ``train.evaluate_suite``, of the policy as it is."""
        prompts, groups = self.run.data.held_out, self.run.groups
        if not prompts or groups.rollout is None:
            return {}
        if self.ahead is not None:  # then generation has the weights of before this step
            groups.reshard()
        sampled: Samples = groups.rollout.generate([p.prompt_token_ids for p in prompts], n=0, greedy=True)
        samples = [(prompt, of[0]) for prompt, of in zip(prompts, sampled, strict=True)]
        found = self.rewards(step, table_of(samples))
        rewards = [reward for reward in found.values if reward is not None]
        self.run.timer.record("held_out")
        return {
            **({f"{name}/reward": sum(rewards) / len(rewards)} if rewards else {}),
            f"{name}/response_length": sum(len(sample.token_ids) for _, sample in samples) / len(samples),
            f"{name}/unrewarded": float(len(samples) - len(rewards)),
        }

    # ------------------------------------------------------------------------------------------------------ learning

    def log_probs(self, batch: PackedBatch) -> PackedBatch:
        """With the logprobs that the algorithm reads before it learns."""
        groups, config = self.run.groups, self.run.config
        if groups.reference is not None:
            batch = batch.with_(ref_log_probs=groups.reference.log_probs(batch))
        if config.old_log_probs_first:
            batch = batch.with_(old_log_probs=groups.actor.log_probs(batch))
        self.run.timer.record("log_probs")
        return batch

    def values(self, batch: PackedBatch) -> PackedBatch:
        """With what the critic expects, and what it is to learn, if there is a critic."""
        critic = self.run.groups.critic
        if critic is None:
            return batch
        batch = batch.with_(values=critic.values(batch))
        batch = batch.with_(returns=self.algorithm.returns(batch))
        self.run.timer.record("values")
        return batch

    def learn(self, step: int, batch: PackedBatch) -> tuple[PackedBatch, list[dict[str, float]]]:
        """Advantages, then the updates: the batch with its old logprobs, and the metrics of each update."""
        actor, critic, weight = self.run.groups.actor, self.run.groups.critic, self.algorithm.kl_coefficient
        batch = batch.with_(advantages=self.algorithm.checked_advantages(batch))
        if self.run.config.algorithm.mask_truncated:
            whole = batch.select((~batch.truncated).nonzero().flatten())
            if not self.is_enough(whole):
                truncated = int(batch.truncated.sum())
                say(
                    f"{self.run.context.run}: step {step + 1} makes no update: {truncated} of {len(batch)} responses "
                    "are truncated, and train.algorithm.mask_truncated leaves them out"
                )
                return batch, []
            batch = whole
        minibatches = [part for epoch in range(self.run.config.epochs) for part in self.minibatches(batch, step, epoch)]
        of_critic = [] if critic is None else [critic.update.start(minibatch) for minibatch in minibatches]
        updates: list[dict[str, float]]
        if critic is not None and step < self.run.config.algorithm.critic.warmup_steps:  # the critic alone learns
            updates = [{} for _ in minibatches]
            if batch.old_log_probs is None:
                batch = batch.with_(old_log_probs=actor.log_probs(batch))
        elif batch.old_log_probs is not None:
            updates = [actor.update(minibatch, kl_coefficient=weight) for minibatch in minibatches]
        else:  # the only update computes them in its forward pass
            update, before = actor.learn(batch, kl_coefficient=weight)
            updates, batch = [update], batch.with_(old_log_probs=before)
        for update, pending in zip(updates, of_critic, strict=False):  # as many, or none without a critic
            update.update(pending.result())
        self.run.timer.record("update")
        return batch, updates

    def minibatches(self, batch: PackedBatch, step: int, epoch: int) -> list[PackedBatch]:
        """As many as configured, or fewer where the batch is too small for all ranks to have a part of each.

        Groups are shuffled, by seed, step and epoch alone, so that a run that goes on has the same minibatches.
        """
        seed = seed_of(self.run.seed, step, epoch, _ORDER)
        for count in range(self.run.config.minibatches, 1, -1):
            parts = list(batch.minibatches(count, seed))
            if all(self.is_enough(part) for part in parts):
                return parts
        return [batch]

    def adapt_kl(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Bring the KL's weight of the next step nearer to where the KL is at its target; what it was in this one."""
        kl, weight = self.run.config.algorithm.kl, self.algorithm.kl_coefficient
        if kl.target is None:
            return {}
        if "kl_ref" in metrics:
            self.algorithm.kl_coefficient = adapted_coefficient(
                weight,
                metrics["kl_ref"],
                target=kl.target,
                horizon=kl.horizon,
                minimum=kl.min_coefficient,
                maximum=kl.max_coefficient,
            )
        return {"kl_coefficient": weight}

    # ------------------------------------------------------------------------------------------------------ sampling

    def generate(self, step: int, call: Callable[..., Any], again: int = 0) -> Any:
        """Sample for a step's prompts, of round ``again``; ``call`` is the rollout's ``generate``, or its ``start``."""
        return call(
            [prompt.prompt_token_ids for prompt in self.prompts_of(step, again)],
            n=self.run.config.algorithm.group_size,
            seed=seed_of(self.run.seed, step, again),
            greedy=self.algorithm.needs_greedy,
        )

    def score(self, step: int, sampled: Samples, again: int = 0) -> Scored:
        config, prompts = self.run.config, self.prompts_of(step, again)
        scored = score(
            prompts,
            sampled,
            partial(self.rewards, step),
            config,
            first_group=again * len(prompts),
            greedy=self.algorithm.needs_greedy,
        )
        self.run.timer.record("score")
        self.count_solved(prompts, again * len(prompts), scored)
        if not scored.rollouts and not again:
            raise TrainingStopped(f"step {step + 1}: none of {scored.unrewarded} sampled responses got a reward")
        return scored

    def rewards(self, step: int, rows: pa.Table) -> Rewards:
        """The rewards of what a step sampled. Raises TrainingStopped if it can't learn from them."""
        reward = self.run.groups.reward
        assert reward is not None
        found = reward(rows)
        most, per_token = self.run.config.reward_max_missing, self.algorithm.takes_token_rewards
        where = f"step {step + 1}"
        try:
            check_rewards(found, max_missing=most, per_token=per_token)
        except TrainingStopped as stopped:
            raise TrainingStopped(f"{where}: {stopped}") from None
        if whys := [f"{name}: {why}" for name, reasons in found.reasons.items() for why in reasons if why]:
            say(f"{self.run.context.run}: {where}: missing in the rewards of {len(rows)}: {commonest(whys)}")
        return found

    def count_solved(self, prompts: list[Prompt], first_group: int, scored: Scored) -> None:
        """Count how often one's own prompts were solved, for ``train.data.pass_rate``."""
        if not self.own:
            return
        assert self.run.config.data.pass_rate is not None
        enough = self.run.config.data.pass_rate.solved_reward
        for rollout, reward in zip(scored.rollouts, scored.rewards, strict=True):
            if id(prompts[rollout.group - first_group]) in self.own:
                count = self.solved.setdefault(pass_rates.key(rollout.prompt), [0, 0])
                count[0] += 1
                count[1] += reward >= enough

    def prompts_of(self, step: int, again: int) -> list[Prompt]:
        """The prompts of a round of a step: a function of both alone. A round that isn't needed skips its own."""
        return self.run.data.prompts.at(step * (1 + self.run.config.algorithm.resample_rounds) + again)

    def reshard(self) -> None:
        """Generate with the weights as they are from here on; or have what was sampled ahead."""
        if self.pending is not None:
            self.ahead, self.pending = self.pending.result(), None
            self.run.timer.record("wait")
        else:
            self.ahead = None
            self.run.groups.reshard()
            self.run.timer.record("reshard")
