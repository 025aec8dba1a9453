"""Learn from responses: fresh ones to prompts that traffic brought, logged ones, or both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from feedback.lake import Lake
from train.batch import PackedBatch
from train.config import TrainConfig
from train.dataflows.base import Dataflow, Run
from train.health import health
from train.random_state import seed_of
from train.samples import TrainingData, regroup, score
from train.workers.rollout import Sample

_AHEAD = TypeAdapter(list[list[Sample]] | None)


class Online(Dataflow):
    """Sample, score, learn, reshard."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.ahead: list[list[Sample]] | None = None
        """Responses to the next step's prompts, where they are sampled while this step learns."""

    @classmethod
    def read(
        cls, lake: Lake, versions: Mapping[str, int], config: TrainConfig, policy: Path, seed: int
    ) -> TrainingData:
        return TrainingData.of(lake, versions, config, policy, seed)

    def state(self) -> Any:
        return {"ahead": _AHEAD.dump_python(self.ahead, mode="json")}

    def resume(self, state: Any) -> None:
        self.ahead = _AHEAD.validate_python(state["ahead"])
        self.run.groups.reshard()

    def step(self, step: int) -> dict[str, float]:
        config, groups, data, clock = self.run.config, self.run.groups, self.run.data, self.run.clock
        actor, reference, rollout = groups.actor, groups.reference, groups.rollout
        asked = data.prompts.at(step)
        sampled = self.ahead if self.ahead is not None else self.generate(step, rollout.generate)
        clock.lap("generate")
        overlaps = config.rollout.staleness > 0 and step + 1 < config.steps
        if overlaps:  # the next batch is sampled with the weights of now, while they are trained on this one
            groups.reshard()
            clock.lap("reshard")
            pending = self.generate(step + 1, rollout.generate.start)
        scored = score(asked, sampled, groups.reward, config.rollout)
        logged = regroup(data.traffic.at(step), first_group=len(asked))
        batch = PackedBatch.pack(scored + logged)
        clock.lap("score")
        if reference is not None:
            batch = batch.with_(ref_log_probs=reference.log_probs(batch))
        if config.old_log_probs_differ:
            batch = batch.with_(old_log_probs=actor.log_probs(batch))
        clock.lap("log_probs")
        batch = batch.with_(advantages=self.algorithm.advantages(batch))
        if config.old_log_probs_differ:
            updates = [actor.update(m) for m in batch.minibatches(config.minibatches)]
        else:
            update, before = actor.learn(batch)
            updates, batch = [update], batch.with_(old_log_probs=before)
        clock.lap("update")
        if overlaps:
            self.ahead = pending.result()
            clock.lap("wait")
        else:
            self.ahead = None
            groups.reshard()
            clock.lap("reshard")
        return health(batch, updates)

    def generate(self, step: int, call: Callable[..., Any]) -> Any:
        """Sample the responses of a step; ``call`` is the rollout's ``generate``, or its ``start``."""
        prompts = [p.prompt_token_ids for p in self.run.data.prompts.at(step)]
        return call(prompts, n=self.run.config.algorithm.group_size, seed=seed_of(self.run.seed, step))
