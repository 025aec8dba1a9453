"""Each policy-gradient algorithm: what it makes of a batch, against plain loops that say it again."""

from __future__ import annotations

import importlib
import math
import random
import statistics
import sys
import types
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from tests.train.policy_batches import Response, batches, by_response, flat, moved, responses_of, some_responses
from train.algorithms import ALGORITHMS, load
from train.algorithms.base import PolicyGradient
from train.batch.packed import PackedBatch, Rollout
from train.config.algorithms import GROUPED, ONLINE
from train.config.training import TrainConfig
from train.data.samples import Informative
from train.objectives.losses import AGGREGATIONS as AGGREGATIONS_BY_NAME

MAX_TOKENS = 7
AGGREGATIONS = ("token_mean", "sequence_mean", "constant_length")
PAPERS = {
    "grpo": "2402.03300",
    "dr_grpo": "2503.20783",
    "dapo": "2503.14476",
    "gspo": "2507.18071",
    "cispo": "2506.13585",
    "rloo": "2402.14740",
    "reinforce_pp": "2501.03262",
    "reinforce_pp_baseline": "2501.03262",
    "remax": "2310.10505",
    "ppo": "1707.06347",
}


def algorithm(name: str, **options: Any) -> PolicyGradient:
    """The algorithm as a run has it, with responses of at most ``MAX_TOKENS``."""
    config = TrainConfig.model_validate(
        {"algorithm": {"name": name, **options}, "rollout": {"max_tokens": MAX_TOKENS}, "data": {"traffic_share": 0}}
    )
    made = load(config.algorithm)
    assert isinstance(made, PolicyGradient)
    return made


# -------------------------------------------------------------------------------------------------- the registry


@pytest.mark.parametrize("name", ONLINE)
def test_every_online_algorithm_loads_by_its_name_and_says_its_paper(name: str) -> None:
    module = importlib.import_module(ALGORITHMS[name].partition(":")[0])
    assert f"arXiv {PAPERS[name]}" in (module.__doc__ or "")
    assert algorithm(name).compares_groups == (name in GROUPED)


# --------------------------------------------------------------------------------------------------- advantages


def expected_advantages(name: str, responses: list[Response], kl: float) -> list[list[float]]:
    """By the papers' words, a response and a token at a time; ``kl`` is the weight of k1 in the reward."""
    costs = [[kl * (old - ref) for old, ref in zip(r.old, r.ref, strict=True)] for r in responses]
    worth = [r.reward - sum(cost) for r, cost in zip(responses, costs, strict=True)]
    found = []
    for i, r in enumerate(responses):
        mates = [w for other, w in zip(responses, worth, strict=True) if other.group == r.group]
        others = (sum(mates) - worth[i]) / (len(mates) - 1)
        match name:
            case "grpo" | "dapo" | "gspo" | "cispo":
                value = (worth[i] - statistics.fmean(mates)) / (statistics.stdev(mates) + 1e-6)
            case "dr_grpo" | "reinforce_pp_baseline":
                value = worth[i] - statistics.fmean(mates)
            case "rloo":
                value = worth[i] - others
            case "remax":
                value = worth[i] - r.baseline
            case "reinforce_pp":
                found.append([r.reward - sum(costs[i][t:]) for t in range(len(r.old))])
                continue
        found.append([value] * len(r.old))
    if name.startswith("reinforce_pp"):
        mean, deviation = statistics.fmean(flat(found)), statistics.pstdev(flat(found)) + 1e-6
        return [[(a - mean) / deviation for a in numbers] for numbers in found]
    return found


@pytest.mark.parametrize("name", [n for n in ONLINE if n != "ppo"])
@pytest.mark.parametrize("kl", [0.0, 0.3])
def test_advantages_are_those_of_the_paper(name: str, kl: float) -> None:
    batch = some_responses(11)
    made = algorithm(name, kl={"coefficient": kl, "placement": "reward", "estimator": "k1"})
    found = by_response(batch, made.advantages(batch))
    assert flat(found) == pytest.approx(flat(expected_advantages(name, responses_of(batch), kl)))


@pytest.mark.parametrize("name", ONLINE)
def test_a_kl_that_was_adapted_is_the_one_that_counts(name: str) -> None:
    batch = some_responses(12)
    made = algorithm(name, kl={"coefficient": 0.3, "placement": "reward", "estimator": "k1"})
    made.kl_coefficient = 0.1
    wanted = algorithm(name, kl={"coefficient": 0.1, "placement": "reward", "estimator": "k1"})
    torch.testing.assert_close(made.advantages(batch), wanted.advantages(batch))


@pytest.mark.parametrize("name", GROUPED)
def test_responses_that_are_alone_with_their_prompts_teach_by_comparison_with_each_other(name: str) -> None:
    batch = some_responses(13, groups=4, size=1)
    advantages = algorithm(name).advantages(batch)[batch.cu_seqlens[1:] - 1]
    assert (advantages > 0).tolist() == (batch.rewards > batch.rewards.mean()).tolist() or name.endswith("baseline")
    assert bool((advantages != 0).all())


# ------------------------------------------------------------------------------------------------------- losses


def expected_loss(
    made: PolicyGradient, responses: list[Response], now: list[list[float]], before: list[list[float]]
) -> float:
    """The loss, divided by its count, where ``before`` takes the place of ``now`` in all that has no gradient."""
    c = made.config
    sums = []
    for r, log_probs, still in zip(responses, now, before, strict=True):
        size = len(r.old)
        total = 0.0
        for t, log_prob in enumerate(log_probs):
            ratio, fixed = math.exp(log_prob - r.old[t]), math.exp(still[t] - r.old[t])
            if c.name == "gspo":  # the sequence's value, and each token's own gradient
                sequence = math.exp(sum(x - y for x, y in zip(still, r.old, strict=True)) / size)
                ratio = sequence * math.exp(log_prob - still[t])
            a = r.advantages[t]
            match c.name:
                case "cispo":
                    loss = -min(max(fixed, 1 - c.clip_low), 1 + c.clip_high) * a * log_prob
                case "rloo" | "remax":
                    loss = -fixed * a * log_prob
                case _:
                    objective = min(ratio * a, min(max(ratio, 1 - c.clip_low), 1 + c.clip_high) * a)
                    if c.dual_clip is not None and a < 0:
                        objective = max(objective, c.dual_clip * a)
                    loss = -objective
            if c.kl.placement == "loss":
                away = log_prob - r.ref[t]
                estimate = away**2 / 2 if c.kl.estimator == "k2" else math.exp(-away) - 1 + away
                loss += c.kl.coefficient * fixed * estimate
            loss *= min(math.exp(r.old[t] - r.behaviour[t]), c.correction.cap)
            total += loss / (size if c.aggregation == "sequence_mean" else 1)
        sums.append(total / (MAX_TOKENS if c.aggregation == "constant_length" else 1))
    return sum(sums) / (sum(len(r.old) for r in responses) if c.aggregation == "token_mean" else len(responses))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", ONLINE)
def test_the_loss_is_that_of_the_paper_and_its_gradient_that_of_finite_differences(name: str, aggregation: str) -> None:
    # So that some ratios are within, and some are not.
    bounds = {"gspo": {"clip_low": 0.02, "clip_high": 0.03}, "cispo": {"clip_high": 0.2}}.get(name, {})
    kl = {"coefficient": 0.3, "placement": "loss", "estimator": "k2" if name == "reinforce_pp_baseline" else "k3"}
    dual_clip = {} if name in ("cispo", "rloo", "remax") else {"dual_clip": 1.4}
    made = algorithm(name, aggregation=aggregation, correction={"cap": 1.2}, kl=kl, **bounds, **dual_clip)
    batch = some_responses(21)
    now = moved(batch, 22).requires_grad_()
    loss, health = made.loss(now, batch)
    (gradient,) = torch.autograd.grad(loss / made.count(batch), now)
    responses, still = responses_of(batch), by_response(batch, now)
    assert float(loss.detach()) / made.count(batch) == pytest.approx(expected_loss(made, responses, still, still))
    if dual_clip or name == "cispo":
        assert 0 < float(health["clip_fraction"][batch.response_mask].mean()) < 1
    step = 1e-6
    for s, numbers in enumerate(still):
        for t in range(len(numbers)):
            sides = []
            for d in (step, -step):
                nudged = [list(n) for n in still]
                nudged[s][t] += d
                sides.append(expected_loss(made, responses, nudged, still))
            place = int(batch.cu_seqlens[s] + batch.prompt_lengths[s]) + t
            assert float(gradient[place]) == pytest.approx((sides[0] - sides[1]) / (2 * step), abs=1e-7)
    assert not gradient[~batch.response_mask].any()


@pytest.mark.parametrize("name", ONLINE)
def test_the_better_response_gets_likelier_and_the_worse_one_less(name: str) -> None:
    rollouts = [
        Rollout([1, 2], [3] * length, [-1.0] * length, reward, group, baseline=0.5)
        for group in range(2)
        for length, reward in ((2, 1.0), (3, 0.0))
    ]
    batch = PackedBatch.pack(rollouts)
    batch = batch.with_(values=0.5 * batch.response_mask)
    made = algorithm(name)
    now = (-torch.ones(len(batch.tokens)) * batch.response_mask).requires_grad_()
    loss, _ = made.loss(now, batch.with_(advantages=made.advantages(batch)))
    (gradient,) = torch.autograd.grad(loss, now)
    for numbers, rollout in zip(by_response(batch, gradient), rollouts, strict=True):
        assert all(g < 0 if rollout.reward else g > 0 for g in numbers)


@settings(max_examples=8)
@given(batches(), st.integers(0, 99), st.randoms(use_true_random=False))
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", ONLINE)
def test_packing_order_and_micro_batches_do_not_change_a_loss(
    name: str, aggregation: str, batch: PackedBatch, seed: int, draw: random.Random
) -> None:
    made = algorithm(name, aggregation=aggregation, kl={"coefficient": 0.1, "placement": "loss", "estimator": "k3"})
    now = moved(batch, seed).requires_grad_()
    whole = made.loss(now, batch)[0] / made.count(batch)
    order = list(range(len(batch)))
    draw.shuffle(order)
    cuts = sorted({0, len(order), *(draw.randrange(len(order) + 1) for _ in range(2))})
    parts = [torch.tensor(order[a:b]) for a, b in pairwise(cuts)]
    losses = [made.loss(now[batch.token_index(part)], batch.select(part))[0] for part in parts]
    total = torch.stack(losses).sum() / sum(made.count(batch.select(part)) for part in parts)
    torch.testing.assert_close(total, whole)
    gradients = [torch.autograd.grad(x, now, retain_graph=True)[0] for x in (total, whole)]
    torch.testing.assert_close(*gradients)


def test_on_its_own_samples_rloo_is_dr_grpo_times_k_over_k_minus_one() -> None:
    batch = some_responses(31, size=4)
    batch = batch.with_(behaviour_log_probs=batch.old_log_probs)
    gradients = []
    for name in ("rloo", "dr_grpo"):
        made = algorithm(name)
        assert batch.old_log_probs is not None
        now = batch.old_log_probs.clone().requires_grad_()
        loss, _ = made.loss(now, batch.with_(advantages=made.advantages(batch)))
        gradients.append(torch.autograd.grad(loss, now)[0])
    torch.testing.assert_close(gradients[0], gradients[1] * 4 / 3)


def test_gspo_learns_from_all_tokens_of_a_response_or_from_none() -> None:
    batch = some_responses(32)
    made = algorithm("gspo", clip_low=0.05, clip_high=0.05)
    now = moved(batch, 33).requires_grad_()
    one_a_response = batch.per_token(batch.rewards) * batch.response_mask
    (gradient,) = torch.autograd.grad(made.loss(now, batch.with_(advantages=one_a_response))[0], now)
    moves = [{g != 0 for g in numbers} for numbers in by_response(batch, gradient)]
    assert all(len(found) == 1 for found in moves)
    assert {next(iter(found)) for found in moves} == {True, False}


def test_under_gspo_a_masked_token_does_not_learn_and_its_neighbour_learns_by_its_own_weight() -> None:
    batch = PackedBatch.pack([Rollout([1], [2, 3], [-1.0, -9.0], 1.0, 0)])
    old = torch.tensor([0.0, -1.0, -1.0])
    batch = batch.with_(old_log_probs=old, advantages=torch.tensor([0.0, 1.0, 1.0]))
    made = algorithm("gspo", correction={"form": "mask", "level": "token", "cap": 2.0})
    now = old.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(made.loss(now, batch)[0] / made.count(batch), now)
    assert gradient.tolist() == pytest.approx([0.0, -0.5, 0.0])


@pytest.mark.parametrize("name", ["rloo", "remax"])
def test_a_clip_that_is_not_there_is_refused_as_the_only_correction(name: str) -> None:
    with pytest.raises(ValidationError, match=rf"proximal=behaviour .* {name} has none: .*; set it to old"):
        algorithm(name, correction={"proximal": "behaviour"})


def test_an_algorithm_of_ones_own_without_a_clip_is_refused_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(PolicyGradient):
        clips = False

    module = types.ModuleType("mine_without_clip")
    module.Mine = Mine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(ValueError, match=r"mine_without_clip:Mine has none"):
        algorithm("mine_without_clip:Mine", correction={"proximal": "behaviour"})


@pytest.mark.parametrize("name", sorted(set(ONLINE) - {"rloo", "remax"}))
def test_of_what_another_policy_sampled_no_token_learns_beyond_the_bounds(name: str) -> None:
    batch = PackedBatch.pack([Rollout([1], [2], [-6.0], 1.0, 0)])
    old = torch.tensor([0.0, -1.0])
    batch = batch.with_(old_log_probs=old, ref_log_probs=old - 1, advantages=torch.tensor([0.0, 1.0]))
    kl = {"coefficient": 0.5, "placement": "loss", "estimator": "k2"}
    made = algorithm(name, correction={"proximal": "behaviour"}, kl=kl, aggregation="token_mean")
    now = old.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(made.loss(now, batch)[0], now)
    bound = 1 + made.config.clip_high + 0.5 * made.config.correction.cap
    assert abs(float(gradient[1])) <= bound, "e^5 would be 148"


def test_of_four_groups_with_one_that_tells_responses_apart_grpo_learns_a_quarter() -> None:
    """Rewards 1 and 0 of two tokens each: advantages ±1 / sqrt(2), over the 8 responses of all four groups."""
    rewards = [[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.5, 0.5]]
    rollouts = [Rollout([1], [2], [-1.0], r, g) for g, group in enumerate(rewards) for r in group]
    for filtered, expected in ((False, 1 / math.sqrt(2) / 8), (True, 1 / math.sqrt(2) / 2)):
        made = algorithm("grpo", filter_groups=filtered)
        kept = Informative.of(rollouts, "batch", filter_groups=made.config.filter_groups).rollouts
        batch = PackedBatch.pack(kept)
        now = (-1.0 * batch.response_mask).requires_grad_()
        loss, _ = made.loss(now, batch.with_(advantages=made.advantages(batch)))
        (gradient,) = torch.autograd.grad(loss / made.count(batch), now)
        assert float(gradient.abs().max()) == pytest.approx(expected, rel=1e-4), "0.088 of four groups, 0.354 of one"


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", ONLINE)
def test_an_entropy_bonus_is_taken_from_the_loss_by_its_weight_and_moves_the_policy(
    name: str, aggregation: str
) -> None:
    batch = some_responses(40)
    batch = batch.with_(behaviour_log_probs=batch.old_log_probs)  # so that every weight of a correction is 1
    entropy = (torch.rand(len(batch.tokens), dtype=torch.float64) * batch.response_mask).requires_grad_()
    now = moved(batch, 41)
    plain, bonus = (algorithm(name, aggregation=aggregation, entropy_coefficient=c) for c in (0.0, 0.25))
    without = plain.loss(now, batch.with_(entropy=entropy))[0]
    loss = bonus.loss(now, batch.with_(entropy=entropy))[0]
    (gradient,) = torch.autograd.grad(loss, entropy)
    weights, _ = AGGREGATIONS_BY_NAME[aggregation](batch, MAX_TOKENS)
    torch.testing.assert_close(gradient, -0.25 * weights.double())
    assert float(without.detach() - loss.detach()) == pytest.approx(0.25 * float((weights * entropy).sum().detach()))
    assert algorithm(name).config.entropy_coefficient == 0.0


def test_reinforce_pp_discounts_by_gamma_which_is_one_unless_set() -> None:
    batch = PackedBatch.pack([Rollout([1], [2, 3, 4], [-1.0] * 3, 1.0, 0), Rollout([1], [2], [-1.0], 0.0, 1)])
    found = algorithm("reinforce_pp", gamma=0.5).advantages(batch)[batch.response_mask]
    values = [0.25, 0.5, 1.0, 0.0]
    mean, deviation = statistics.fmean(values), statistics.pstdev(values)
    assert found.tolist() == pytest.approx([(v - mean) / (deviation + 1e-6) for v in values], rel=1e-5)
    assert algorithm("reinforce_pp").config.gamma == 1.0


@pytest.mark.parametrize("name", ONLINE)
def test_a_masked_response_has_no_gradient_and_the_others_keep_theirs(name: str) -> None:
    batch = some_responses(34)
    now = moved(batch, 35).requires_grad_()
    free = algorithm(name, correction={"form": "none"})
    strict = algorithm(name, correction={"form": "none", "geometric_low": 0.9, "geometric_high": 1.1})
    gradients = [by_response(batch, torch.autograd.grad(a.loss(now, batch)[0], now)[0]) for a in (free, strict)]
    kept = []
    for before, after, r in zip(*gradients, responses_of(batch), strict=True):
        mean = statistics.fmean(old - mu for old, mu in zip(r.old, r.behaviour, strict=True))
        kept.append(0.9 <= math.exp(mean) <= 1.1)
        assert after == (before if kept[-1] else [0.0] * len(before))
    assert set(kept) == {True, False}


def test_a_clip_around_the_behaviour_policy_is_the_loss_of_ppo_without_a_correction() -> None:
    batch = some_responses(36)
    now = moved(batch, 37)
    assert batch.old_log_probs is not None
    decoupled = algorithm("ppo", correction={"proximal": "behaviour"})
    plain = algorithm("ppo", correction={"form": "none"})
    two_policies = batch.with_(old_log_probs=batch.behaviour_log_probs)
    torch.testing.assert_close(decoupled.loss(now, batch)[0], plain.loss(now, two_policies)[0])


@pytest.mark.parametrize("name", ONLINE)
def test_without_old_logprobs_they_are_those_of_the_pass_itself(name: str) -> None:
    batch = some_responses(38)

    def gradient(batch: PackedBatch) -> Tensor:
        now = start.clone().requires_grad_()
        return torch.autograd.grad(algorithm(name).loss(now, batch)[0], now)[0]

    start = moved(batch, 39)
    torch.testing.assert_close(gradient(batch.with_(old_log_probs=None)), gradient(batch.with_(old_log_probs=start)))


# ----------------------------------------------------------------------------------------------- process rewards


def with_token_rewards(batch: PackedBatch, seed: int) -> PackedBatch:
    """The same with a reward of its own for each response token."""
    draw = random.Random(seed)
    given = torch.tensor([draw.uniform(-2, 2) for _ in batch.tokens], dtype=torch.float64) * batch.response_mask
    return batch.with_(token_rewards=given, rewards=batch.response_sums(given))


def whitened(rows: list[list[float]]) -> list[float]:
    numbers = flat(rows)
    mean, deviation = statistics.fmean(numbers), statistics.pstdev(numbers)
    return [(x - mean) / (deviation + 1e-6) for x in numbers]


@given(batches(), st.integers(0, 1000), st.floats(0.1, 1), st.floats(0, 0.5))
def test_reinforce_pp_returns_what_came_from_a_token_on_of_rewards_of_tokens(
    plain: PackedBatch, seed: int, gamma: float, kl: float
) -> None:
    batch = with_token_rewards(plain, seed)
    assert batch.token_rewards is not None
    expected = []
    for r, rewards in zip(responses_of(batch), by_response(batch, batch.token_rewards), strict=True):
        less = [x - kl * (old - ref) for x, old, ref in zip(rewards, r.old, r.ref, strict=True)]
        expected.append([sum(gamma**k * x for k, x in enumerate(less[t:])) for t in range(len(less))])
    placed = {"coefficient": kl, "placement": "reward", "estimator": "k1"}
    advantages = algorithm("reinforce_pp", gamma=gamma, kl=placed).advantages(batch)
    assert flat(by_response(batch, advantages)) == pytest.approx(whitened(expected), abs=1e-6)
    assert not advantages[~batch.response_mask].any()


@given(batches(), st.integers(0, 1000), st.floats(0.1, 1), st.floats(0, 1))
def test_ppo_estimates_advantages_and_returns_from_rewards_of_tokens(
    plain: PackedBatch, seed: int, gamma: float, lam: float
) -> None:
    batch = with_token_rewards(plain, seed)
    assert batch.token_rewards is not None
    expected, returns = [], []
    for r, rewards in zip(responses_of(batch), by_response(batch, batch.token_rewards), strict=True):
        n = len(rewards)
        after = [*r.values[1:], 0.0]
        delta = [rewards[t] + gamma * after[t] - r.values[t] for t in range(n)]
        expected.append([sum((gamma * lam) ** k * delta[t + k] for k in range(n - t)) for t in range(n)])
        returns.append([a + v for a, v in zip(expected[-1], r.values, strict=True)])
    ppo = algorithm("ppo", critic={"gamma": gamma, "lam": lam}, kl={"coefficient": 0})
    assert flat(by_response(batch, ppo.advantages(batch))) == pytest.approx(whitened(expected), abs=1e-6)
    assert flat(by_response(batch, ppo.returns(batch))) == pytest.approx(flat(returns))


@given(batches(), st.integers(0, 1000))
def test_rewards_of_tokens_that_come_with_the_last_one_are_those_of_responses(batch: PackedBatch, seed: int) -> None:
    last = torch.zeros_like(batch.behaviour_log_probs)
    last[batch.cu_seqlens[1:] - 1] = batch.rewards
    for name in ("reinforce_pp", "ppo"):
        made = algorithm(name)
        assert made.takes_token_rewards
        assert made.advantages(batch.with_(token_rewards=last)).equal(made.advantages(batch))


def test_rewards_of_tokens_stay_with_their_tokens_in_every_part_of_a_batch() -> None:
    batch = with_token_rewards(some_responses(3), 3)
    assert batch.token_rewards is not None
    rows = by_response(batch, batch.token_rewards)
    part = batch.select([4, 1])
    assert by_response(part, part.token_rewards) == [rows[4], rows[1]]


def test_an_algorithm_that_weighs_a_response_as_a_whole_takes_no_rewards_of_tokens() -> None:
    assert [name for name in ONLINE if algorithm(name).takes_token_rewards] == ["reinforce_pp", "ppo"]
