"""A reward model: one score r per response, the log odds that people find it good.

Of two responses to a prompt people choose one with probability sigmoid(r_chosen - r_rejected) (Bradley and Terry 1952;
InstructGPT's reward model, arXiv 2203.02155, eq. 1). A response by itself is voted good with probability sigmoid(r): a
thumb is one such vote, and a rating at share v of its scale is v votes for and 1 - v against, as in the binomial model
of ordinal ratings (D'Elia and Piccolo 2005, shifted to begin at 0). Pairs alone leave the zero of the scores open;
votes set it.

People err: with ``vote_noise`` e, what was meant as good is given as bad with probability e and the other way round, so
that a vote of good has probability (1 - e) sigmoid(r) + e sigmoid(-r). One that contradicts all others then pulls with
a bounded weight. The loss is the mean over judgements, by the weights of what they came from.

Nothing is sampled and no policy is trained: what is trained is the policy's body with a head of one output.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from train.algorithms.base import Algorithm, Loss
from train.batch.packed import PackedBatch


class RewardModel(Algorithm):
    dataset = "judgements"
    whole_groups = True

    def loss(self, scores: Tensor, batch: PackedBatch) -> Loss:
        """scores: float32 [T]; that of a sequence stands at its last token."""
        r = scores[batch.cu_seqlens[1:] - 1]
        better, worse, voted = judgements(batch)
        log_odds = torch.cat([r[better] - r[worse], r[voted]])
        votes = torch.cat([torch.ones(len(better)), batch.rewards[voted]])
        right = torch.where(votes > 0.5, log_odds.sign(), -log_odds.sign())
        weights = torch.cat([batch.weights[better], batch.weights[voted]])
        return (weights * vote_loss(log_odds, votes, self.config.vote_noise)).sum(), {
            "accuracy": ((right + 1) / 2)[votes != 0.5],  # equal scores are a guess; a vote of neither tells nothing
            "margin": r[better] - r[worse],
            "reward_chosen": torch.cat([r[better], r[voted][batch.rewards[voted] > 0.5]]),
            "reward_rejected": torch.cat([r[worse], r[voted][batch.rewards[voted] < 0.5]]),
        }

    def count(self, batch: PackedBatch) -> float:
        better, _, voted = judgements(batch)
        return float(batch.weights[better].sum() + batch.weights[voted].sum())


def judgements(batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
    """(better, worse, voted): int64 [P], [P] and [V], sequences; a group of two is a pair, a group of one has a vote.

    Raises:
        ValueError: a group is neither: of two, one has reward 1 and the other 0.
    """
    by_group = batch.groups.argsort(stable=True)
    groups, counts = batch.groups[by_group].unique_consecutive(return_counts=True)
    size = counts.repeat_interleave(counts)
    paired, voted = by_group[size == 2], by_group[size == 1]
    good = batch.rewards[paired] > 0.5
    better, worse = paired[good], paired[~good]
    if (
        not torch.equal(batch.groups[better], groups[counts == 2])
        or not torch.equal(batch.groups[worse], groups[counts == 2])
        or bool((counts > 2).any())
    ):
        raise ValueError(
            f"{len(batch)} sequences in {len(groups)} groups are neither pairs nor votes: a group has one response, or "
            "two of rewards 1 and 0, in the same micro-batch"
        )
    return better, worse, voted


def vote_loss(log_odds: Tensor, votes: Tensor, noise: float) -> Tensor:
    """Negative log likelihood of votes under noise, of any shape.

    Args:
        log_odds: that what is voted on is good.
        votes: from 0 (bad) to 1 (good).
        noise: probability that a vote is the opposite of what was meant, below 0.5.
    """
    good, bad = logsigmoid(log_odds), logsigmoid(-log_odds)
    if noise > 0:
        right, wrong = math.log1p(-noise), math.log(noise)
        good, bad = torch.logaddexp(right + good, wrong + bad), torch.logaddexp(right + bad, wrong + good)
    return -(votes * good + (1 - votes) * bad)
