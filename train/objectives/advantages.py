"""Advantage estimators: pure functions of rewards, of responses [S] or of tokens [T].

Where responses are compared with their group, responses without one (groups of one, as traffic brings them) are
compared with each other: together they are one group, whatever their prompts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from train.batch.packed import PackedBatch
from train.objectives.kl import ESTIMATORS

# ------------------------------------------------------------------------------------------------- per response


def group_relative(rewards: Tensor, groups: Tensor, *, normalise_by_std: bool) -> Tensor:
    """How much better each response is than its group's mean (GRPO, arXiv 2402.03300, section 4.1.2), float [S].

    Responses to one prompt share a number in ``groups``, int [S]. With ``normalise_by_std`` it is divided by the
    group's standard deviation (unbiased); without it: Dr.GRPO, arXiv 2503.20783. Zero where the rewards that are
    compared are all equal.
    """
    index, size = _compared(groups)
    centred = rewards.double() - (_sums(rewards, index, size) / size)[index]
    if normalise_by_std:
        variance = _sums(centred**2, index, size) / (size - 1).clamp(min=1)
        centred = centred / (variance.sqrt()[index] + _EPSILON)
    return centred.to(rewards.dtype)


def leave_one_out(rewards: Tensor, groups: Tensor) -> Tensor:
    """How much better each response is than the mean of the others of its group (RLOO, arXiv 2402.14740).

    It is ``group_relative`` without the standard deviation, times k / (k - 1) in a group of k. All [S].
    """
    index, size = _compared(groups)
    others = (_sums(rewards, index, size)[index] - rewards.double()) / (size - 1)[index]
    return torch.where(size[index] > 1, rewards - others, 0.0).to(rewards.dtype)


def greedy_baseline(rewards: Tensor, baselines: Tensor) -> Tensor:
    """How much better each response is than the greedy one to its prompt (ReMax, arXiv 2310.10505). All float [S]."""
    return rewards - baselines


def response_rewards(batch: PackedBatch, kl_coefficient: float = 0.0, estimator: str = "k1") -> Tensor:
    """The sum of ``token_rewards`` of each response, with an environment of its whole episode: float32 [S]."""
    sums = batch.response_sums(token_rewards(batch, kl_coefficient, estimator))
    _, index = batch.episodes.unique_consecutive(return_inverse=True)
    return torch.zeros_like(sums).index_add(0, index, sums)[index]


# ---------------------------------------------------------------------------------------------------- per token


def token_rewards(batch: PackedBatch, kl_coefficient: float = 0.0, estimator: str = "k1") -> Tensor:
    """The response's reward at its last token, less the KL at each (InstructGPT, arXiv 2203.02155, eq. 2).

    Where the batch has rewards of tokens (process rewards, arXiv 2305.20050), each is at its own token.
    Float32 [T], without gradient; 0 at prompts.

    Args:
        batch: with ``old_log_probs`` and ``ref_log_probs``, unless the coefficient is 0.
        estimator: of the KL, one of ``train.objectives.kl.ESTIMATORS``; the papers have k1.
    """
    if batch.token_rewards is not None:
        rewards = batch.token_rewards
    else:
        rewards = torch.zeros_like(batch.behaviour_log_probs)
        rewards[batch.cu_seqlens[1:] - 1] = batch.rewards
    if kl_coefficient == 0:
        return rewards
    if batch.old_log_probs is None or batch.ref_log_probs is None:
        raise ValueError("a KL in the reward needs old_log_probs and ref_log_probs of the batch")
    kl = ESTIMATORS[estimator](batch.old_log_probs, batch.ref_log_probs)
    return rewards - kl_coefficient * kl * batch.response_mask


def returns_to_go(token_rewards: Tensor, batch: PackedBatch, gamma: float = 1.0) -> Tensor:
    """Rewards from each token to the end of its episode, discounted by gamma per token. [T] → [T], 0 at prompts.

    Only tokens that were sampled count: what an environment said between two turns takes no time.
    """
    mask = batch.response_mask
    returns = token_rewards[mask]
    left = _episode_ends(batch) - torch.arange(len(returns))  # the tokens from each to its episode's end
    reach = 1  # each return has so many rewards; with the return that many tokens later it has twice as many
    while reach < int(left.max()):
        returns = returns + torch.where(left > reach, gamma**reach * returns.roll(-reach), 0.0)
        reach *= 2
    return torch.zeros_like(token_rewards).masked_scatter(mask, returns)


def gae(token_rewards: Tensor, values: Tensor, batch: PackedBatch, gamma: float, lam: float) -> Tensor:
    """Generalised advantage estimation (arXiv 1506.02438, eq. 16): the sum of (gamma lam)^l delta_(t+l) over l.

    delta_t = r_t + gamma V_(t+1) - V_t, and after the last token of an episode, cut off or not, V is 0. Tokens are
    those that were sampled: after the last of a turn comes the first of the next, whose value has seen what the
    environment said. What the critic is to learn, the return, is the advantage plus the value. All [T]; ``values`` are
    of the state before each token, advantages are 0 at prompts.
    """
    mask = batch.response_mask
    own = values[mask]
    following = own.roll(-1)
    following[_episode_ends(batch) - 1] = 0.0
    deltas = token_rewards[mask] + gamma * following - own
    return returns_to_go(torch.zeros_like(token_rewards).masked_scatter(mask, deltas), batch, gamma * lam)


def whiten(advantages: Tensor, mask: Tensor) -> Tensor:
    """Shifted and scaled to mean 0 and standard deviation 1 over a batch (REINFORCE++, arXiv 2501.03262).

    All [T]. ``mask``: the tokens that count, which are the response tokens of the whole step; 0 outside it, and
    everywhere if all are equal.
    """
    counted = advantages[mask].double()
    centred = counted - counted.mean()
    whitened = centred / (centred.square().mean().sqrt() + _EPSILON)
    return torch.zeros_like(advantages).masked_scatter_(mask, whitened.to(advantages.dtype))


# --------------------------------------------------------------------------------------------------- by credit


@dataclass(frozen=True)
class Credited:
    """What gets a reward of its own and is compared with others: an episode, or a turn of one.

    ``rewards``: float [N]; ``groups``: int64 [N], of what is compared; ``of_token``: int64 [T], which of the N a token
    belongs to, where it was sampled.
    """

    rewards: Tensor
    groups: Tensor
    of_token: Tensor


def by_episode(token_rewards: Tensor, batch: PackedBatch) -> Credited:
    """Each episode with the sum of its rewards, among those of its prompt."""
    _, index = batch.episodes.unique_consecutive(return_inverse=True)
    count = int(index[-1]) + 1
    rewards = token_rewards.new_zeros(count).index_add(0, index, batch.response_sums(token_rewards))
    groups = batch.groups.new_zeros(count).index_copy(0, index, batch.groups)
    return Credited(rewards, groups, batch.per_token(index))


def by_turn(token_rewards: Tensor, batch: PackedBatch) -> Credited:
    """Each turn with the rewards from it to its episode's end, among the turns of its number to the same prompt.

    Those that no other episode of the group got to belong to the last one before them that another got to: what came
    from them on is compared with it.
    """
    mask = batch.response_mask
    begins = mask & ~mask.roll(1)  # a sequence begins with its prompt
    turn = begins.cumsum(0) - 1
    _, index = batch.per_token(batch.episodes)[begins].unique_consecutive(return_inverse=True)
    first = torch.searchsorted(index, torch.arange(int(index[-1]) + 1))
    number = torch.arange(len(index)) - first[index]
    pairs = torch.stack([batch.per_token(batch.groups)[begins], number])
    _, groups, counts = pairs.unique(dim=1, return_inverse=True, return_counts=True)
    compared = (counts[groups] > 1) | (number == 0)
    unit = compared.cumsum(0) - 1
    rewards = returns_to_go(token_rewards, batch)[begins]
    return Credited(rewards[compared], groups[compared], unit[turn.clamp(min=0)])


# ------------------------------------------------------------------------------------------------------ helpers

_EPSILON = 1e-6
"""Added to a standard deviation that something is divided by."""


def _compared(groups: Tensor) -> tuple[Tensor, Tensor]:
    """(int64 [S]: what each response is compared in, groups of one being one; float64 [G]: how many are in each)."""
    _, index, count = groups.unique(return_inverse=True, return_counts=True)
    _, index, count = torch.where(count[index] > 1, index, -1).unique(return_inverse=True, return_counts=True)
    return index, count.double()


def _episode_ends(batch: PackedBatch) -> Tensor:
    """int64 [tokens that were sampled]: where, among them, the episode of each ends; one more than its last."""
    _, index = batch.episodes.unique_consecutive(return_inverse=True)
    lengths = torch.zeros_like(batch.episodes).index_add(0, index, batch.response_lengths)
    return lengths.cumsum(0)[index].repeat_interleave(batch.response_lengths)


def _sums(values: Tensor, index: Tensor, size: Tensor) -> Tensor:
    """[S] → float64 [G]. In float64, so that equal rewards are equal to their mean."""
    return torch.zeros_like(size).index_add_(0, index, values.double())
