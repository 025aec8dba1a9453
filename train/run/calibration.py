"""The scores of a reward model as log odds that people find a response good, and how often they are right.

What a reward model gives after training is stretched by how long it was trained, and its zero is anywhere if it learned
from pairs alone. A line through the held-out judgements (Platt 1999, "Probabilistic outputs for support vector
machines") gives every version the same unit and the same zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from train.algorithms.offline.reward_model import vote_loss


@dataclass(frozen=True)
class Judged:
    """Scores of a response and the vote on it, from 0 to 1; or of two, of which people found the first better.

    A score is None where the model can't read the response. ``weight``: as in training.
    """

    scores: tuple[float | None, ...]
    vote: float
    weight: float = 1.0

    @property
    def log_odds(self) -> float | None:
        """What the vote is on: the score, or the first's over the second's; None without them."""
        if None in self.scores:
            return None
        first, *second = self.scores
        assert first is not None
        return first - second[0] if second and second[0] is not None else first


def agreement(judged: Sequence[Judged], line: Mapping[str, float] | None = None) -> list[float]:
    """Of each judgement that is for or against: 1 if the scores say the same, 0 if the opposite, 0.5 if neither.

    ``line``: as of ``calibrate``, where the scores are not calibrated yet.
    """
    shift = line["shift"] / line["scale"] if line else 0.0
    found = []
    for one in judged:
        if one.vote != 0.5:
            log_odds = 0.0 if one.log_odds is None else one.log_odds + shift * (len(one.scores) == 1)
            found.append(0.5 if log_odds == 0 else float((log_odds > 0) == (one.vote > 0.5)))
    return found


def calibrate(judged: Sequence[Judged], noise: float) -> dict[str, float]:
    """{scale, shift}: the log odds of a response are scale * score + shift.

    The likeliest line under ``train.algorithms.offline.reward_model.vote_loss``, with log(scale) and shift normal
    around 0 (of deviation 1 and 3) beforehand, so that a few judgements that all agree stretch it by no more than they
    can tell. As in training, only the ratios of the weights matter. Without votes on single responses, which alone tell
    the shift, it is where the mean score becomes 0.
    """
    known = [(one, one.log_odds) for one in judged if one.log_odds is not None]
    if not known:
        return {"scale": 1.0, "shift": 0.0}
    x = torch.tensor([log_odds for _, log_odds in known], dtype=torch.float64)
    votes = torch.tensor([one.vote for one, _ in known], dtype=torch.float64)
    single = torch.tensor([len(one.scores) == 1 for one, _ in known], dtype=torch.float64)
    weights = torch.tensor([one.weight for one, _ in known], dtype=torch.float64)
    weights /= weights.mean()
    line = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([line], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        log_scale, shift = line
        likelihood = weights @ vote_loss(log_scale.exp() * x + shift * single, votes, noise)
        loss = likelihood + log_scale**2 / 2 + shift**2 / 18
        loss.backward()
        return loss

    optimizer.step(closure)
    scale, shift = float(line[0].detach().exp()), float(line[1].detach())
    if not single.any():
        scores = [score for one, _ in known for score in one.scores if score is not None]
        shift = -scale * sum(scores) / len(scores)
    return {"scale": scale, "shift": shift}
