"""Learn from responses: fresh ones to prompts of traffic or of one's own, logged ones, or both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from feedback.datasets import Prompt
from feedback.lake.tables import Lake
from train import algorithms
from train.batch.packed import PackedBatch, Rollout
from train.checkpoint.folders import CheckpointError
from train.checkpoint.random_state import seed_of
from train.config.training import TrainConfig, check_baseline
from train.context import TrainingStopped
from train.data import episodes, pass_rates
from train.data.curriculum import Curriculum
from train.data.episodes import check_dropped
from train.data.prompts import TrainingData
from train.data.rewards import Rewards, check_rewards, commonest
from train.data.samples import Informative, Scored, score, table_of
from train.dataflows.base import Dataflow, Run
from train.objectives.kl import adapted_coefficient
from train.observe.health import Drawn, at_end, health, of_policies
from train.observe.hooks import Answer
from train.observe.progress import say
from train.rollouts.request import Request, requests_of
from train.rollouts.schedule import Schedule
from train.rollouts.stream import RolloutStream

Sampled = list[list[Any]]
"""Samples, or with an environment episodes, of each prompt; the last is the greedy one, if the algorithm needs it."""

_ORDER: Final = 1
"""Tells the seed of minibatches from that of samples, which step and round name."""


class Online(Dataflow):
    """Sample, score, learn, reshard."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.version = 0
        """Steps that the weights have behind them that generation has."""
        self.stream = self.open_stream() if run.config.samples and run.config.rollout.staleness > 0 else None
        """What is sampled over several steps, where that is allowed."""
        self.solved: pass_rates.Counts = {}
        """Of the prompts of one's own, where they are counted."""
        self.own = {id(prompt) for of in run.data.own for prompt in of.prompts} if run.config.data.pass_rate else set()
        by = run.config.data.curriculum
        self.curriculum = None if by is None else Curriculum(by, run.data.prompts, run.seed)

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
            "version": self.version,
            "sampled": None if self.stream is None else self.stream.state(),
            "kl_coefficient": self.algorithm.kl_coefficient,
            "solved": self.solved,
            "curriculum": None if self.curriculum is None else self.curriculum.state(),
        }

    def resume(self, state: Any) -> None:
        self.version = state.get("version", 0)
        self.algorithm.kl_coefficient = state["kl_coefficient"]
        self.solved = state.get("solved", {})
        if self.curriculum is not None:
            self.curriculum.resume(state["curriculum"])
        self.run.groups.reshard(self.version)
        if self.stream is not None:
            if state.get("sampled") is None:
                raise CheckpointError(
                    "the checkpoint is of an earlier version of Millrace, and does not say what was sampled: finish "
                    "the run with that version, or give this one another name (--run)"
                )
            self.stream.resume(state["sampled"], step=self.version, episodes=self.run.config.environment is not None)

    def close(self) -> None:
        if self.stream is not None:
            self.stream.close()

    def step(self, step: int) -> dict[str, float]:
        lora = self.run.config.lora
        if step == 0 and lora is not None and lora.base is not None:
            self.run.groups.reshard(self.version)  # generation has the parent's files, training what they round to
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
        metrics |= self.run.data.prompts_left_out | self.run.data.conversations_split
        if self.curriculum is not None:
            metrics |= self.curriculum.metrics(step)
        if self.stream is not None:
            metrics |= of_policies(step, drawn.rollouts) | {"queued_groups": float(self.stream.queued)}
        if step + 1 == self.run.config.steps:
            metrics |= self.at_end(batch if updates else None, fresh.rollouts + drawn.logged)
        self.reshard(step + 1)
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
        if self.stream is not None:
            taken = self.stream.take(step)
            groups.sleep()
            timer.record("generate" if groups.rendezvous is None else "wait")
            known = None
            if groups.reward is not None:
                known = Rewards.joined([rewards for group in taken for rewards in group.rewarded])
            return self.score(step, [group.prompt for group in taken], [group.sampled for group in taken], known)
        scored = self.score(step, prompts := self.prompts_of(step, 0), self.generate(step, prompts))
        for again in range(1, config.algorithm.resample_rounds + 1):
            if self.informative(scored.rollouts).groups >= self.run.data.prompts.count:
                break
            sampled = self.generate(step, prompts := self.prompts_of(step, again), again)
            scored += self.score(step, prompts, sampled, first_group=again * len(prompts))
        groups.sleep()
        return scored

    def logged(self, step: int, fresh: Scored) -> list[Rollout]:
        """Responses that were served, as groups numbered on from the fresh ones."""
        taken = 1 + max((rollout.group for rollout in fresh.rollouts), default=-1)
        groups = enumerate(self.run.data.traffic.at(step), start=taken)
        return [rollout.in_group(number) for number, group in groups for rollout in group]

    def select(self, fresh: Scored, logged: list[Rollout]) -> Drawn:
        """Leave out what has nothing to be compared with, where responses are compared with their group.

        With ``algorithm.filter_groups`` also groups of equal rewards, and what was sampled beyond the groups wanted.
        """
        rollouts = fresh.rollouts + logged
        if not self.algorithm.compares_groups:
            return Drawn(fresh, logged, self.algorithm.kept(rollouts))
        found = self.informative(rollouts)
        wanted = sorted({r.group for r in found.rollouts if r.fresh})[: self.run.data.prompts.count]
        kept = [r for r in found.rollouts if not r.fresh or r.group in wanted]
        return Drawn(fresh, logged, self.algorithm.kept(kept), found.uninformative, found.left_alone)

    def informative(self, rollouts: list[Rollout]) -> Informative:
        algorithm = self.run.config.algorithm
        return Informative.of(
            rollouts,
            algorithm.lone_baseline,
            filter_groups=algorithm.filter_groups,
            by_turn=algorithm.credit == "turn",
        )

    def is_enough(self, batch: PackedBatch) -> bool:
        """Whether every rank gets a part of the batch."""
        return len(batch.units()) >= self.run.config.data_parallel_ranks

    def measure(self, step: int, name: str) -> dict[str, float]:
        """The rewards of greedy responses to the prompts of ``train.evaluate_suite``, of the policy as it is."""
        prompts, groups = self.run.data.held_out, self.run.groups
        if not prompts or groups.rollout is None:
            return {}
        sampled = groups.rollout.generate(self.sampled_for(prompts), n=0, seed=self.run.seed, greedy=True)
        if self.run.config.environment is None:
            samples = [(prompt, of[0]) for prompt, of in zip(prompts, sampled, strict=True)]
            found = self.checked(step, self.reward(table_of(samples)))
            answers = [
                Answer(prompt, sample, reward) for (prompt, sample), reward in zip(samples, found.values, strict=True)
            ]
            lengths = [len(sample.token_ids) for _, sample in samples]
        else:
            check_dropped(played := [of[0] for of in sampled], self.run.config)
            answers = [
                Answer(prompt, episode, None if episode.dropped else sum(episode.rewards))
                for prompt, episode in zip(prompts, played, strict=True)
            ]
            lengths = [episode.sampled_tokens for episode in played]
        rewards = [answer.reward for answer in answers if answer.reward is not None]
        more = self.run.evaluation(step, answers)
        self.run.timer.record("held_out")
        return {
            **{f"{name}/{key}": value for key, value in more.items()},
            **({f"{name}/reward": sum(rewards) / len(rewards)} if rewards else {}),
            f"{name}/response_length": sum(lengths) / len(lengths),
            f"{name}/unrewarded": float(len(lengths) - len(rewards)),
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

    def at_end(self, batch: PackedBatch | None, drawn: list[Rollout]) -> dict[str, float]:
        """What of the policy that would be published no later step can measure, by what the last step learned from.

        If that was nothing (None), by all that it drew: a policy whose responses are all alike may have collapsed.
        """
        reference = self.run.groups.reference
        if batch is None and drawn:
            batch = PackedBatch.pack(drawn)
            if self.is_enough(batch) and reference is not None:
                batch = batch.with_(ref_log_probs=reference.log_probs(batch))
        if batch is None or not self.is_enough(batch):
            return {}
        return at_end(batch, self.run.groups.actor.log_probs(batch))

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

    def open_stream(self) -> RolloutStream:
        """What samples the groups of all steps, in order."""
        config, groups = self.run.config, self.run.groups
        assert groups.rollout is not None
        each, greedy = config.algorithm.group_size, self.algorithm.needs_greedy
        per_step = config.data.fresh_prompts_per_step
        prompts_of = lru_cache(maxsize=4)(lambda step: self.prompts_of(step, 0))

        def requests(number: int, prompt: Prompt) -> list[Request]:
            step, place = divmod(number, per_step)
            how: dict[str, Any] = {"n": each, "greedy": greedy, "episodes": config.environment is not None}
            return requests_of(
                str(step), self.sampled_for([prompt]), [place], seed=seed_of(self.run.seed, step, 0), **how
            )

        return RolloutStream(
            Schedule(per_step, config.rollout.staleness, config.steps),
            engines=config.ranks_of(config.placement.rollout) // config.rollout.tensor_parallel_size,
            size=each + greedy,
            prompt_of=lambda number: prompts_of(number // per_step)[number % per_step],
            requests_of=requests,
            advance=groups.rollout.advance,
            reward=None if groups.reward is None else lambda samples: self.reward(table_of(samples)),
            beside=groups.rendezvous is not None,
            timeout_s=config.step_timeout_s,
        )

    def sampled_for(self, prompts: Sequence[Prompt]) -> Sequence[Any]:
        """What is sampled for: token ids; an environment needs all there is of the prompts."""
        return prompts if self.run.config.environment is not None else [p.prompt_token_ids for p in prompts]

    def generate(self, step: int, prompts: list[Prompt], again: int = 0) -> Sampled:
        """Sample for prompts of a step, of round ``again``."""
        rollout = self.run.groups.rollout
        assert rollout is not None
        how: dict[str, Any] = {"n": self.run.config.algorithm.group_size, "greedy": self.algorithm.needs_greedy}
        sampled: Sampled = rollout.generate(self.sampled_for(prompts), seed=seed_of(self.run.seed, step, again), **how)
        self.run.timer.record("generate")
        return sampled

    def score(
        self, step: int, prompts: list[Prompt], sampled: Sampled, known: Rewards | None = None, first_group: int = 0
    ) -> Scored:
        """What was sampled, with its rewards: ``known`` ones, or else those that the reward gives it."""
        config = self.run.config
        how: dict[str, Any] = {"first_group": first_group, "greedy": self.algorithm.needs_greedy}
        if config.environment is None:

            def rewards(rows: pa.Table) -> Rewards:
                return self.checked(step, self.reward(rows) if known is None else known)

            scored = score(prompts, sampled, rewards, config, **how)
        else:
            scored = self.played(step, prompts, sampled, how)
        self.run.timer.record("score")
        self.count_solved(prompts, first_group, scored)
        if self.curriculum is not None:
            self.count_results(self.curriculum, step, first_group, scored)
        if not scored.rollouts and not first_group:
            raise TrainingStopped(f"step {step + 1}: none of {scored.unrewarded} sampled responses got a reward")
        return scored

    def played(self, step: int, prompts: list[Prompt], sampled: Sampled, how: dict[str, Any]) -> Scored:
        """The episodes of a step. Raises TrainingStopped if it can't learn from them."""
        where = f"step {step + 1}"
        try:
            scored = episodes.scored(prompts, sampled, self.run.config, **how)
        except TrainingStopped as stopped:
            raise TrainingStopped(f"{where}: {stopped}") from None
        if details := [f"{e.dropped}: {e.detail}" for of in sampled for e in of if e.dropped]:
            say(f"{self.run.context.run}: {where}: dropped of {sum(map(len, sampled))} episodes: {commonest(details)}")
        return scored

    def reward(self, rows: pa.Table) -> Rewards:
        """The rewards of rows of responses."""
        reward = self.run.groups.reward
        assert reward is not None
        return reward(rows)

    def checked(self, step: int, found: Rewards) -> Rewards:
        """The rewards of what a step sampled. Raises TrainingStopped if it can't learn from them."""
        most, per_token = self.run.config.reward_max_missing, self.algorithm.takes_token_rewards
        where = f"step {step + 1}"
        try:
            check_rewards(found, max_missing=most, per_token=per_token)
        except TrainingStopped as stopped:
            raise TrainingStopped(f"{where}: {stopped}") from None
        if whys := [f"{name}: {why}" for name, reasons in found.reasons.items() for why in reasons if why]:
            count = len(found.values)
            say(f"{self.run.context.run}: {where}: missing in the rewards of {count}: {commonest(whys)}")
        return found

    def count_solved(self, prompts: list[Prompt], first_group: int, scored: Scored) -> None:
        """Count how often one's own prompts were solved, for ``train.data.pass_rate``."""
        if not self.own:
            return
        assert self.run.config.data.pass_rate is not None
        enough = self.run.config.data.pass_rate.solved_reward
        for rollout, reward in zip(scored.rollouts, scored.rewards, strict=True):
            prompt = prompts[rollout.group - first_group]
            if id(prompt) in self.own:
                count = self.solved.setdefault(pass_rates.key(prompt.prompt_token_ids), [0, 0])
                count[0] += 1
                count[1] += reward >= enough

    def count_results(self, curriculum: Curriculum, step: int, first_group: int, scored: Scored) -> None:
        """Count what a round came to, for ``train.data.curriculum``."""
        again, enough = first_group // self.run.data.prompts.count, curriculum.config.solved_reward
        solved: dict[int, list[bool]] = {}
        for rollout, reward in zip(scored.rollouts, scored.rewards, strict=True):
            solved.setdefault(rollout.group - first_group, []).append(reward >= enough)
        curriculum.count(step, again, solved)

    def prompts_of(self, step: int, again: int) -> list[Prompt]:
        """The prompts of a round of a step: a function of both alone. A round that isn't needed skips its own.

        With a curriculum also of what was counted before it was drawn, and no round skips any.
        """
        if self.curriculum is not None:
            return self.curriculum.at(step, again)
        return self.run.data.prompts.at(step * (1 + self.run.config.algorithm.resample_rounds) + again)

    def reshard(self, version: int) -> None:
        """Generate with the weights as they are, of so many steps; what is under way goes on with them."""
        with nullcontext() if self.stream is None else self.stream.updating(version):
            self.run.groups.reshard(version)
        self.version = version
        self.run.timer.record("reshard")
