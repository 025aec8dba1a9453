"""Losses and advantages over episodes of several turns, against plain loops and against turns as sequences, float64."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import gpt_neox

from train.algorithms import load
from train.batch.packed import PackedBatch, Rollout
from train.config.algorithms import ONLINE, AlgorithmConfig
from train.objectives.advantages import by_episode, by_turn, gae, returns_to_go, token_rewards
from train.objectives.kl import k3

GROUPS, SIZE = 2, 3


def episodes(seed: int = 0, *, by_turn: bool = True) -> list[Rollout]:
    """Episodes of one to three turns, each one sequence, with what an environment said between the turns."""
    draw, found = random.Random(seed), []
    for i in range(GROUPS * SIZE):
        response: list[int] = []
        sampled: list[bool] = []
        rewards: list[float] = []
        for turn in range(1 + (i + seed) % 3):
            for said, most in (((False, 3),) if turn else ()) + ((True, 4),):
                tokens = [draw.randrange(1, 60) for _ in range(draw.randint(1, most))]
                response += tokens
                sampled += [said] * len(tokens)
                rewards += [0.0] * len(tokens)
            rewards[-1] = draw.uniform(-1, 1)
        log_probs = [draw.uniform(-3, -0.5) if s else 0.0 for s in sampled]
        prompt, total = [draw.randrange(1, 60) for _ in range(draw.randint(1, 4))], sum(rewards)
        if not by_turn:
            rewards = [0.0] * (len(rewards) - 1) + [total]
        episode = Rollout(prompt, response, log_probs, total, i // SIZE, token_rewards=rewards, sampled=sampled)
        found.append(replace(episode, baseline=draw.uniform(-1, 1)))
    return found


def turn_by_turn(episode: Rollout) -> Rollout:
    """The same as sequences of one turn each, with the context that the policy saw."""
    assert episode.sampled is not None
    assert episode.token_rewards is not None
    parts, at = [], 0
    for sampled, run in itertools.groupby(episode.sampled):
        end = at + len(list(run))
        if sampled:
            own = slice(at, end)
            prompt = episode.prompt + episode.response[:at]
            of = {"response": episode.response[own], "log_probs": episode.log_probs[own], "sampled": None}
            parts.append(replace(episode, prompt=prompt, token_rewards=episode.token_rewards[own], **of))
        at = end
    return replace(parts[-1], earlier=tuple(parts[:-1]))


def packed(rollouts: list[Rollout], old: list[float], ref: list[float], values: list[float]) -> PackedBatch:
    """In float64. ``old``, ``ref``, ``values``: of each token that was sampled, in order."""
    batch = PackedBatch.pack(rollouts)
    doubles = {name: getattr(batch, name).double() for name in ("rewards", "baselines", "behaviour_log_probs")}
    batch = batch.with_(token_rewards=batch.token_rewards.double(), **doubles)  # type: ignore[union-attr]

    def at_sampled(numbers: list[float]) -> torch.Tensor:
        zeros = torch.zeros(len(batch.tokens), dtype=torch.float64)
        return zeros.masked_scatter(batch.response_mask, torch.tensor(numbers, dtype=torch.float64))

    return batch.with_(old_log_probs=at_sampled(old), ref_log_probs=at_sampled(ref), values=at_sampled(values))


def both(rollouts: list[Rollout]) -> tuple[PackedBatch, PackedBatch]:
    """As whole episodes, and turn by turn."""
    draw, tokens = random.Random(9), sum(r.sampled_tokens for r in rollouts)
    numbers = [[draw.uniform(-3, -0.5) for _ in range(tokens)] for _ in range(3)]
    return packed(rollouts, *numbers), packed([turn_by_turn(r) for r in rollouts], *numbers)


def log_probs(model: Any, batch: PackedBatch) -> torch.Tensor:
    """float64 [T], by transformers' own forward pass of each sequence, with gradient."""
    found = []
    for start, end in itertools.pairwise(batch.cu_seqlens.tolist()):
        tokens = batch.tokens[start:end]
        scores = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        found += [scores.new_zeros(1), scores.gather(1, tokens[1:, None])[:, 0]]
    return torch.cat(found) * batch.response_mask


def settings(name: str, credit: str, **others: Any) -> AlgorithmConfig:
    kl = {"coefficient": 0.1, "placement": "loss", "estimator": "k3"}
    group = {"group_size": SIZE} if name not in ("reinforce_pp", "remax", "ppo") else {}
    credits = {} if name == "remax" else {"credit": credit}
    overlong = {"overlong_buffer": 0} if name == "dapo" else {}
    return AlgorithmConfig.model_validate(
        {"name": name, "kl": kl, **group, **credits, **overlong, **others}
    ).with_lengths(32)


@pytest.mark.parametrize("credit", ["episode", "turn"])
@pytest.mark.parametrize("name", [name for name in ONLINE if name != "gspo"])  # its ratio is of a sequence
def test_the_loss_of_episodes_is_that_of_their_turns_one_by_one(name: str, credit: str) -> None:
    algorithm = load(settings(name, credit))
    torch.manual_seed(1)
    model = gpt_neox().double()  # a Qwen3 computes its norms in float32, whatever its weights are
    losses, gradients = [], []
    for batch in both(episodes(by_turn=credit == "turn")):
        batch = batch.with_(advantages=algorithm.checked_advantages(batch))
        model.zero_grad()
        loss, _ = algorithm.loss(log_probs(model, batch), batch)
        (loss / algorithm.count(batch)).backward()
        losses.append(float(loss.detach()) / algorithm.count(batch))
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert abs(losses[0]) > 1e-4
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    assert gradients[0].abs().max() > 1e-3
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=1e-12)


def test_grpos_loss_of_episodes_is_the_papers_with_sampled_tokens_alone() -> None:
    batch, _ = both(rollouts := episodes(by_turn=False))
    algorithm = load(settings("grpo", "episode", correction={"form": "none"}))
    batch = batch.with_(advantages=algorithm.checked_advantages(batch))
    assert batch.old_log_probs is not None
    assert batch.ref_log_probs is not None
    now = torch.where(batch.response_mask, batch.old_log_probs - 0.1, 0.0)
    loss, _ = algorithm.loss(now, batch)
    expected = 0.0
    for s, rollout in enumerate(rollouts):
        group = torch.tensor([r.reward for r in rollouts if r.group == rollout.group], dtype=torch.float64)
        advantage = (rollout.reward - group.mean()) / (group.std() + 1e-6)
        start = int(batch.cu_seqlens[s]) + len(rollout.prompt)
        terms = []
        for t, sampled in enumerate(rollout.sampled or []):
            if sampled:
                ratio = torch.exp(now[start + t] - batch.old_log_probs[start + t])
                clipped = torch.minimum(advantage * ratio, advantage * ratio.clamp(0.8, 1.2))
                terms.append(0.1 * ratio * k3(now[start + t], batch.ref_log_probs[start + t]) - clipped)
        expected += float(torch.stack(terms).mean()) / len(rollouts)
    assert float(loss) / algorithm.count(batch) == pytest.approx(expected, rel=1e-6)  # advantages are made in float32


@pytest.mark.parametrize("whole", [True, False])
def test_gae_goes_from_the_last_token_of_a_turn_to_the_first_of_the_next(whole: bool) -> None:
    batch = both(rollouts := episodes())[0 if whole else 1]
    assert batch.values is not None
    found = gae(token_rewards(batch), batch.values, batch, 0.9, 0.8)
    values, rewards = iter(batch.values[batch.response_mask].tolist()), []
    expected: list[float] = []
    for rollout in rollouts:
        assert rollout.token_rewards is not None
        rewards = [r for r, s in zip(rollout.token_rewards, rollout.sampled or [], strict=True) if s]
        own, advantage, backwards = [next(values) for _ in rewards], 0.0, []
        for t in reversed(range(len(own))):
            after = own[t + 1] if t + 1 < len(own) else 0.0
            advantage = rewards[t] + 0.9 * after - own[t] + 0.9 * 0.8 * advantage
            backwards.append(advantage)
        expected += reversed(backwards)
    torch.testing.assert_close(found[batch.response_mask], torch.tensor(expected, dtype=torch.float64))
    assert not found[~batch.response_mask].any()


@pytest.mark.parametrize("whole", [True, False])
def test_a_turn_is_compared_with_the_turns_of_its_number_by_what_came_from_it_on(whole: bool) -> None:
    batch = both(rollouts := episodes())[0 if whole else 1]
    credited = by_turn(token_rewards(batch), batch)
    turns = []
    for rollout in rollouts:
        own = [r for r in rollout.token_rewards or [] if r]
        turns += [(rollout.group, number, sum(own[number:])) for number in range(len(own))]
    # A turn that no other episode of the group got to belongs to the one before it.
    names = [turn[:2] for turn in turns]
    units = [number == 0 or names.count((group, number)) > 1 for group, number, _ in turns]
    assert not all(units)
    turns = [turn for turn, own_unit in zip(turns, units, strict=True) if own_unit]
    assert credited.rewards.tolist() == pytest.approx([go for _, _, go in turns])
    named = [(group, number) for group, number, _ in turns]
    same = [[a == b for b in named] for a in named]
    assert (credited.groups[:, None] == credited.groups[None]).tolist() == same
    assert credited.of_token[batch.response_mask].unique().tolist() == list(range(len(turns)))


def test_an_episode_counts_once_whether_it_is_one_sequence_or_several() -> None:
    for batch in both(rollouts := episodes()):
        credited = by_episode(token_rewards(batch), batch)
        assert credited.rewards.tolist() == pytest.approx([r.reward for r in rollouts])
        assert credited.groups.tolist() == [r.group for r in rollouts]


def test_returns_skip_what_the_environment_said() -> None:
    episode = Rollout(
        [1], [2, 9, 9, 3], [0.0] * 4, 1.0, 0, token_rewards=[0.0, 0, 0, 1], sampled=[True, False, False, True]
    )
    batch = PackedBatch.pack([episode])
    assert returns_to_go(token_rewards(batch), batch, 0.5).tolist() == [0, 0.5, 0, 0, 1]


def test_what_the_environment_said_is_in_no_count_of_sampled_tokens() -> None:
    rollouts = episodes()
    for batch in both(rollouts):
        assert int(batch.response_lengths.sum()) == sum(r.sampled_tokens for r in rollouts)
        assert not batch.behaviour_log_probs[~batch.response_mask].any()
    assert [r.turns for r in rollouts] == [1, 2, 3, 1, 2, 3] == [turn_by_turn(r).turns for r in rollouts]


def test_an_episode_must_end_with_a_token_that_was_sampled() -> None:
    with pytest.raises(ValueError, match="the last must be sampled"):
        PackedBatch.pack([Rollout([1], [2, 3], [0.0, 0.0], 1.0, 0, sampled=[True, False])])
