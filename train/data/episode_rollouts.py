"""An episode of several turns, played or logged, as the rollout that an algorithm learns from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from train.batch.packed import Rollout
from train.environments.episode import Episode


def rollout_of(
    episode: Episode,
    temperatures: Sequence[float],
    *,
    by_turn: bool,
    group: int = 0,
    baseline: float = 0.0,
    fresh: bool = True,
) -> Rollout:
    """Its last sequence, with those before. Its reward is the sum of those of its turns.

    Args:
        temperatures: that each sequence was sampled at.
        by_turn: each reward comes with its turn's last token, else all with the episode's.
    """
    rewards, total = list(episode.rewards), sum(episode.rewards)
    if not by_turn:
        rewards = [*[0.0] * (len(rewards) - 1), total]
    places = [(s, end) for s, sequence in enumerate(episode.sequences) for end in sequence.turn_ends]
    tokens = [[0.0] * len(sequence.token_ids) for sequence in episode.sequences]
    for (s, end), reward in zip(places, rewards, strict=True):
        tokens[s][end] = reward
    parts = [
        Rollout(
            prompt=sequence.prompt,
            response=sequence.token_ids,
            log_probs=sequence.log_probs,
            reward=total,
            group=group,
            temperature=temperature,
            truncated=episode.truncated,
            fresh=fresh,
            baseline=baseline,
            token_rewards=of_tokens if by_turn or len(tokens) > 1 else None,
            sampled=sequence.sampled,
            policies=sequence.policies,
        )
        for sequence, temperature, of_tokens in zip(episode.sequences, temperatures, tokens, strict=True)
    ]
    return replace(parts[-1], earlier=tuple(parts[:-1]))
