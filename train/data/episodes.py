"""Episodes as what an algorithm learns from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from feedback.datasets import Prompt
from train.config.training import TrainConfig
from train.context import TrainingStopped
from train.data.episode_rollouts import rollout_of
from train.data.rewards import commonest
from train.data.samples import Scored
from train.environments.episode import REASONS, Episode
from train.objectives.shaping import soft_overlong_punishment


def scored(
    prompts: Sequence[Prompt],
    played: Sequence[Sequence[Episode]],
    config: TrainConfig,
    *,
    first_group: int = 0,
    greedy: bool = False,
) -> Scored:
    """The episodes with their rewards, of which length may cost some; one group per prompt. See ``samples.score``.

    What its length costs an episode comes with its last turn.

    Raises:
        TrainingStopped: more are dropped than train.environment.max_dropped lets be.
    """
    check_dropped([episode for of in played for episode in of], config)
    found = Scored(dropped=dict(Counter(e.dropped for of in played for e in of if e.dropped)))
    for group, of in enumerate(played, start=first_group):
        baseline = 0.0
        if greedy:
            *of, last = of
            if last.dropped:
                found.dropped["without_baseline"] = found.dropped.get("without_baseline", 0) + len(of)
                continue
            baseline = sum(last.rewards) + _overlong(last, config)
        for episode in of:
            if not episode.dropped:
                cost = _overlong(episode, config)
                made = rollout_of(
                    replace(episode, rewards=[*episode.rewards[:-1], episode.rewards[-1] + cost]),
                    [config.rollout.temperature] * len(episode.sequences),
                    by_turn=config.algorithm.credit == "turn",
                    group=group,
                    baseline=baseline,
                )
                found.rollouts.append(made)
                found.rewards.append(sum(episode.rewards))
                found.overlong.append(cost)
    return found


def check_dropped(episodes: Sequence[Episode], config: TrainConfig) -> None:
    """Raises TrainingStopped if too many of them were dropped, with the commonest reason."""
    assert config.environment is not None
    dropped, most = [episode for episode in episodes if episode.dropped], config.environment.max_dropped
    if len(dropped) <= most * len(episodes):
        return
    [(reason, count)] = Counter(episode.dropped for episode in dropped).most_common(1)
    details = commonest(episode.detail for episode in dropped if episode.dropped == reason)
    raise TrainingStopped(
        f"{len(dropped)} of {len(episodes)} episodes were dropped, a larger share than train.environment.max_dropped="
        f"{most:g}; most of them, {count}, because {REASONS[reason]} ({details}); nothing is published"
    )


def _overlong(episode: Episode, config: TrainConfig) -> float:
    """What its length costs; of tokens that were sampled."""
    cost = soft_overlong_punishment(
        torch.tensor([episode.sampled_tokens]),
        max_tokens=config.longest_response,
        overlong_buffer=config.algorithm.overlong_buffer,
        overlong_penalty=config.algorithm.overlong_penalty,
    )
    return float(cost)
