"""What every algorithm is: what a response is worth, and what follows from it for the policy.

An algorithm of your own is a subclass, named in the config as ``train.algorithm.name: my_package.mine:Mine``. Of
``PolicyGradient`` override ``advantages``, ``ratio`` or ``surrogate``; of ``Algorithm``, ``advantages`` and ``loss``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

from torch import Tensor

from train.batch.packed import PackedBatch, Rollout
from train.config.algorithms import AlgorithmConfig
from train.objectives.advantages import by_episode, by_turn, response_rewards, token_rewards
from train.objectives.corrections import importance_weights
from train.objectives.kl import ESTIMATORS
from train.objectives.losses import AGGREGATIONS, clipped_surrogate, token_ratio

Loss = tuple[Tensor, dict[str, Tensor]]
"""The loss, summed (float32, no dimensions); and what to log of it: [T], of which the mean over response tokens is
taken, or of any other shape, of which the mean over all is."""


def logged_values(value: Tensor, response_mask: Tensor) -> Tensor:
    """[n]: what the mean of a logged tensor is taken over."""
    return value[response_mask] if value.shape == response_mask.shape else value.flatten()


class Algorithm:
    """Base of all algorithms."""

    needs_critic: ClassVar[bool] = False
    """``advantages`` and ``returns`` read ``values`` of the batch, which a critic predicts."""
    needs_greedy: ClassVar[bool] = False
    """``advantages`` reads ``baselines`` of the batch: the reward of the greedy response to each prompt."""
    needs_reference: ClassVar[bool] = False
    """``loss`` reads ``ref_log_probs`` of the batch, whatever the KL settings."""
    compares_groups: ClassVar[bool] = False
    """``advantages`` compares responses to one prompt: where all have one reward, they teach nothing."""
    takes_token_rewards: ClassVar[bool] = False
    """``advantages`` reads ``token_rewards``, so that what a token was worth by itself counts where it stands. Where it
    does not, a reward of tokens or steps is refused."""
    clips: ClassVar[bool] = True
    """The ratio to the policy that a response is compared with is bounded in ``loss``. Where it is not,
    ``train.algorithm.correction.proximal: behaviour`` is refused."""
    whole_groups: ClassVar[bool] = False
    """``loss`` compares responses of a group: none is split over ranks or micro-batches."""
    needs_mismatched: ClassVar[bool] = False
    """``loss`` reads ``baselines`` of the batch: the mean log ratio to the reference of responses to other prompts than
    their own, over all of an update; 0 at least. Offline only."""
    dataset: ClassVar[Literal["pairs", "thumbs", "demonstrations", "judgements"] | None] = None
    """The feedback that an offline algorithm learns from; None: responses and their rewards."""

    def __init__(self, config: AlgorithmConfig) -> None:
        self.config = config
        self.kl_coefficient = config.kl.coefficient
        """Weight of the KL: the config's, or what it was adapted to."""

    def settled(self, rewards: Sequence[float]) -> AlgorithmConfig:
        """The settings, with those set that are unset and follow from the rewards of what is learned from; offline."""
        return self.config

    def kept(self, rollouts: list[Rollout]) -> list[Rollout]:
        """Of rewarded responses those that are learned from; the others are not computed."""
        return rollouts

    def advantages(self, batch: PackedBatch) -> Tensor:
        """float32 [T]: how much better each response token was than expected. ``batch`` is that of the whole step."""
        raise NotImplementedError

    def checked_advantages(self, batch: PackedBatch) -> Tensor:
        """``advantages``. Raises ValueError if they are not one number per token."""
        found = self.advantages(batch)
        if not isinstance(found, Tensor) or found.shape != batch.tokens.shape:
            what = (
                f"a tensor of shape {list(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
            )
            raise ValueError(
                f"train.algorithm.name={self.config.name}: advantages gave {what} for {len(batch.tokens)} tokens of "
                f"{len(batch)} responses; it is one number per token, batch.per_token(…) of one per response"
            )
        return found

    def returns(self, batch: PackedBatch) -> Tensor:
        """float32 [T]: what the critic is to learn, if there is one. ``batch`` is that of the whole step."""
        raise NotImplementedError

    def loss(self, log_probs: Tensor, batch: PackedBatch) -> Loss:
        """What to minimise, summed over a micro-batch, and what to log.

        Args:
            log_probs: float32 [T], of the policy in training, with gradient.
            batch: with ``advantages``; with ``old_log_probs``, unless they are those of ``log_probs``; with
                ``ref_log_probs``, if there is a reference; with ``entropy`` where responses are learned from.
        """
        raise NotImplementedError

    def count(self, batch: PackedBatch) -> float:
        """What the sum of the losses over all micro-batches and ranks is divided by: this part's share of it."""
        return float(batch.response_mask.sum())


class PolicyGradient(Algorithm):
    """Responses that were better than expected get likelier, in proportion, as far as a surrogate lets them.

    Its parts make an algorithm of it: ``advantages``, ``ratio`` and ``surrogate``, and by config the aggregation, the
    correction for what other policies sampled, and the KL.
    """

    def rewards(self, batch: PackedBatch) -> Tensor:
        """float32 [S]: what each response, or its whole episode, was worth, less its KL if that is in the reward."""
        return response_rewards(batch, *self._kl_in_the_reward())

    def compared(self, batch: PackedBatch, compare: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """float32 [T]: what ``compare`` makes of the rewards and groups, [N] each, of episodes, or of turns.

        A response without an environment is an episode of one turn; ``train.algorithm.credit`` decides.
        """
        credited = (by_turn if self.config.credit == "turn" else by_episode)(self.token_rewards(batch), batch)
        return compare(credited.rewards, credited.groups)[credited.of_token]

    def token_rewards(self, batch: PackedBatch) -> Tensor:
        """float32 [T]: what came with each token, or all with the last, less each one's KL if that is in it."""
        return token_rewards(batch, *self._kl_in_the_reward())

    def ratio(self, log_probs: Tensor, old_log_probs: Tensor, batch: PackedBatch) -> Tensor:
        """float32 [T]: how much likelier a token has become since the step began."""
        return token_ratio(log_probs, old_log_probs)

    def surrogate(self, ratio: Tensor, log_probs: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """(loss of each token, float32 [T]; where the ratio was clipped, bool [T])."""
        c = self.config
        return clipped_surrogate(ratio, advantages, clip_low=c.clip_low, clip_high=c.clip_high, dual_clip=c.dual_clip)

    def loss(self, log_probs: Tensor, batch: PackedBatch) -> Loss:
        c = self.config
        assert batch.advantages is not None
        old = log_probs.detach() if batch.old_log_probs is None else batch.old_log_probs
        proximal = batch.behaviour_log_probs if c.correction.proximal == "behaviour" else old
        loss, clipped = self.surrogate(self.ratio(log_probs, proximal, batch), log_probs, batch.advantages)
        if self.kl_coefficient and c.kl.placement == "loss":
            assert batch.ref_log_probs is not None
            kl = ESTIMATORS[c.kl.estimator](log_probs, batch.ref_log_probs)
            # Of the policy as it is, which did not sample these tokens: by the weights that train/objectives/kl.py
            # speaks of.
            ratio = token_ratio(log_probs.detach(), proximal)
            if c.correction.proximal == "behaviour":  # no clip bounds it, and the correction's weights are 1
                ratio = ratio.clamp(max=c.correction.cap)
            loss = loss + self.kl_coefficient * ratio * kl
        if c.entropy_coefficient:
            assert batch.entropy is not None
            loss = loss - c.entropy_coefficient * batch.entropy
        weight, health = importance_weights(old, batch, c.correction)
        weights, _ = self._aggregation(batch)
        return (weight * loss * weights).sum(), {"clip_fraction": clipped.float(), **health}

    def count(self, batch: PackedBatch) -> float:
        return self._aggregation(batch)[1]

    def _aggregation(self, batch: PackedBatch) -> tuple[Tensor, float]:
        return AGGREGATIONS[self.config.aggregation](batch, self.config.max_tokens)

    def _kl_in_the_reward(self) -> tuple[float, str]:
        kl = self.config.kl
        return (self.kl_coefficient if kl.placement == "reward" else 0.0), kl.estimator
