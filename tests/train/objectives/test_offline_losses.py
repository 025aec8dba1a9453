"""DPO, IPO, cDPO, KTO and SFT: against plain loops in float64, worked numbers, and finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from train.algorithms import load
from train.algorithms.base import Algorithm
from train.batch.packed import PackedBatch, Rollout
from train.config.algorithms import AlgorithmConfig
from train.dataflows.offline import mismatched
from train.objectives.preferences import pairs

FORMS: dict[str, dict[str, Any]] = {
    "dpo": {"name": "dpo", "beta": 0.3},
    "cdpo": {"name": "dpo", "beta": 0.3, "label_smoothing": 0.2},
    "ipo": {"name": "dpo", "beta": 0.3, "preference_loss": "ipo"},
    "kto": {"name": "kto", "beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.7},
    "sft": {"name": "sft"},
}


def algorithm(**settings: Any) -> Algorithm:
    return load(AlgorithmConfig.model_validate(settings))


def batch_of(lengths: list[tuple[int, int]], seed: int = 0, *, z0: float = 0.25) -> tuple[PackedBatch, Tensor]:
    """Responses of (prompt, response) tokens, two to a group, the better one now first, now second; and logprobs."""
    generator = torch.Generator().manual_seed(seed)
    rollouts = []
    for i, (prompt, response) in enumerate(lengths):
        better = float((i + i // 2) % 2 == 0)
        rollouts.append(Rollout([1] * prompt, [2] * response, [0.0] * response, better, i // 2))
    batch = PackedBatch.pack(rollouts).with_(whole_groups=True)

    def some() -> Tensor:
        return -3 * torch.rand(len(batch.tokens), generator=generator, dtype=torch.float64) * batch.response_mask

    z = torch.full((len(batch),), z0, dtype=torch.float64)
    return batch.with_(ref_log_probs=some(), baselines=z), some()


LENGTHS = [(2, 3), (2, 1), (1, 4), (1, 2), (3, 2), (3, 5)]


def by_hand(batch: PackedBatch, log_probs: Tensor, settings: dict[str, Any]) -> float:
    """The loss of the whole batch, by the papers' formulas, a number at a time."""
    beta, e = settings.get("beta", 0.1), settings.get("label_smoothing", 0.0)
    assert batch.ref_log_probs is not None
    logp, ref, starts = log_probs.tolist(), batch.ref_log_probs.tolist(), batch.cu_seqlens.tolist()
    ratio, policy = [], []
    for s, prompt in enumerate(batch.prompt_lengths.tolist()):
        own = range(starts[s] + prompt, starts[s + 1])
        ratio.append(sum(logp[t] for t in own) - sum(ref[t] for t in own))
        policy.append(sum(logp[t] for t in own))
    if settings["name"] == "sft":
        return -sum(policy) / sum(int(n) for n in batch.response_lengths)
    if settings["name"] == "kto":
        total = 0.0
        for r, up, z in zip(ratio, batch.rewards.tolist(), batch.baselines.tolist(), strict=True):
            if up:
                total += 1.5 - 1.5 * sigmoid(beta * (r - z))
            else:
                total += 0.7 - 0.7 * sigmoid(beta * (z - r))
        return total / len(ratio)
    total = 0.0
    for group in range(len(ratio) // 2):
        first, second = 2 * group, 2 * group + 1
        h = ratio[first] - ratio[second]
        h = h if batch.rewards[first] == 1 else -h
        if settings.get("preference_loss") == "ipo":
            total += (h - 1 / (2 * beta)) ** 2
        else:
            total -= (1 - e) * math.log(sigmoid(beta * h)) + e * math.log(1 - sigmoid(beta * h))
    return total / (len(ratio) / 2)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("form", FORMS)
def test_a_loss_is_what_the_paper_says_computed_a_number_at_a_time(form: str) -> None:
    batch, log_probs = batch_of(LENGTHS)
    loss, _ = algorithm(**FORMS[form]).loss(log_probs, batch)
    mean = float(loss) / algorithm(**FORMS[form]).count(batch)
    assert mean == pytest.approx(by_hand(batch, log_probs, FORMS[form]), rel=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_a_gradient_is_that_of_finite_differences(form: str) -> None:
    batch, log_probs = batch_of(LENGTHS, seed=1)
    loss: Callable[[Tensor], Tensor] = lambda x: algorithm(**FORMS[form]).loss(x, batch)[0]  # noqa: E731
    assert torch.autograd.gradcheck(loss, log_probs.requires_grad_())


@pytest.mark.parametrize("form", FORMS)
def test_prompts_get_no_gradient(form: str) -> None:
    batch, log_probs = batch_of(LENGTHS, seed=2)
    gradient = gradient_of(algorithm(**FORMS[form]), log_probs, batch)
    assert (gradient[~batch.response_mask] == 0).all()
    assert (gradient[batch.response_mask] != 0).all()


@pytest.mark.parametrize("form", ["dpo", "cdpo", "ipo", "kto"])
def test_at_the_reference_the_better_response_gets_likelier_and_the_worse_one_less(form: str) -> None:
    batch, log_probs = batch_of(LENGTHS, z0=0.0)
    gradient = gradient_of(algorithm(**FORMS[form]), log_probs, batch.with_(ref_log_probs=log_probs.clone()))
    better = batch.per_token(batch.rewards) > 0.5
    assert (gradient[better & batch.response_mask] < 0).all()
    assert (gradient[~better & batch.response_mask] > 0).all()


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("dpo", math.log(2)),  # -log sigmoid(0)
        ("cdpo", math.log(2)),
        ("ipo", (1 / 0.6) ** 2),  # the square of 1 / (2 beta)
        ("kto", (3 * 1.5 + 3 * 0.7) / 2 / 6),  # half of each lambda: three up and three down
    ],
)
def test_a_policy_that_is_its_reference_has_a_known_loss(form: str, expected: float) -> None:
    batch, log_probs = batch_of(LENGTHS, z0=0.0)
    loss, found = algorithm(**FORMS[form]).loss(log_probs, batch.with_(ref_log_probs=log_probs.clone()))
    assert float(loss) / algorithm(**FORMS[form]).count(batch) == pytest.approx(expected, rel=1e-9)
    assert all((value == 0).all() for name, value in found.items() if name.startswith("reward"))


def test_ipo_wants_a_gap_of_half_over_beta_and_no_more() -> None:
    rollouts = [Rollout([1], [2], [0.0], 1.0, 0), Rollout([1], [2], [0.0], 0.0, 0)]
    log_probs = torch.tensor([0.0, -1.0, 0.0, -1.0 - 1 / (2 * 0.25)], requires_grad=True)
    batch = PackedBatch.pack(rollouts).with_(ref_log_probs=torch.tensor([0.0, -1.0, 0.0, -1.0]))
    loss, found = algorithm(name="dpo", beta=0.25, preference_loss="ipo").loss(log_probs, batch)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert log_probs.grad is not None
    assert (log_probs.grad == 0).all()
    assert found["margin"].tolist() == [0.5]  # beta times the gap of 2
    assert found["accuracy"].tolist() == [1.0]


def test_label_smoothing_is_the_share_of_pairs_that_are_the_other_way_round() -> None:
    batch, log_probs = batch_of(LENGTHS, seed=3)
    turned = batch.with_(rewards=1 - batch.rewards)
    plain = algorithm(name="dpo", beta=0.3)
    mixed = 0.8 * plain.loss(log_probs, batch)[0] + 0.2 * plain.loss(log_probs, turned)[0]
    assert float(algorithm(**FORMS["cdpo"]).loss(log_probs, batch)[0]) == pytest.approx(float(mixed), rel=1e-12)


def test_label_smoothing_of_ipo_is_refused() -> None:
    with pytest.raises(ValueError, match=r"label_smoothing=0\.1 .*preference_loss=sigmoid"):
        AlgorithmConfig.model_validate({"name": "dpo", "preference_loss": "ipo", "label_smoothing": 0.1})


def test_an_algorithm_of_the_users_own_that_learns_from_feedback_is_to_be_said_so() -> None:
    with pytest.raises(ValueError, match=r"learns from feedback \(pairs\); set train\.algorithm\.offline to true"):
        algorithm(name="train.algorithms.offline.dpo:DPO")
    assert algorithm(name="train.algorithms.offline.dpo:DPO", offline=True).dataset == "pairs"


@pytest.mark.parametrize(
    ("up", "down", "weights"),
    [(10, 10, (1.0, 1.0)), (15, 10, (1.0, 1.0)), (1, 10, (10.0, 1.0)), (30, 10, (1.0, 2.0)), (0, 10, (None, None))],
)
def test_the_rarer_kind_of_thumb_is_weighed_up_into_the_papers_range_unless_a_weight_is_set(
    up: int, down: int, weights: tuple[float | None, float | None]
) -> None:
    rewards = [1.0] * up + [0.0] * down
    settled = algorithm(name="kto").settled(rewards)
    assert (settled.desirable_weight, settled.undesirable_weight) == weights
    given = algorithm(name="kto", undesirable_weight=3.0).settled(rewards)
    assert (given.desirable_weight, given.undesirable_weight) == (None, 3.0)


def test_kto_measures_gains_from_the_point_of_reference() -> None:
    batch, log_probs = batch_of(LENGTHS, z0=0.5)
    kto = algorithm(**FORMS["kto"])
    higher = float(kto.loss(log_probs, batch.with_(baselines=batch.baselines + 1))[0])
    assert batch.ref_log_probs is not None
    one_less = batch.response_mask & (batch.position_ids == batch.per_token(batch.prompt_lengths))
    assert higher == pytest.approx(float(kto.loss(log_probs - one_less.double(), batch)[0]), rel=1e-12)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=30)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 6)), min_size=2, max_size=6),
    budget=st.integers(2, 24),
    seed=st.integers(0, 99),
)
def test_order_and_micro_batches_change_no_loss(
    form: str, lengths: list[tuple[int, int, int]], budget: int, seed: int
) -> None:
    batch, log_probs = batch_of([(p, r) for p, *both in lengths for r in both], seed)
    loss = algorithm(**FORMS[form])
    whole = float(loss.loss(log_probs, batch)[0])
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))
    shuffled, total, count = batch.select(order), 0.0, 0.0
    probs = log_probs[batch.token_index(order)]
    for sequences in shuffled.micro_batches(budget):
        micro = shuffled.select(sequences)
        total += float(loss.loss(probs[shuffled.token_index(sequences)], micro)[0])
        count += loss.count(micro)
    assert total == pytest.approx(whole, rel=1e-9, abs=1e-12)
    assert count == loss.count(batch)


def test_what_is_no_pair_is_refused() -> None:
    batch, _ = batch_of(LENGTHS)
    torn = batch.with_(whole_groups=False).select([0, 1, 2])
    with pytest.raises(ValueError, match="3 sequences in 2 groups are not pairs"):
        pairs(torn)
    with pytest.raises(ValueError, match="not pairs"):
        pairs(batch.with_(rewards=torch.ones(6)))


def test_mismatched_responses_are_of_another_prompt_and_no_longer_than_the_batch() -> None:
    responses = [Rollout(p, r, [0.0] * len(r), 1.0, i) for i, (p, r) in enumerate([
        ([1, 2], [10, 11, 12]), ([1, 2], [20]), ([3], [30, 31, 32]), ([4, 4, 4], [40]),
    ])]  # fmt: skip
    found = mismatched(PackedBatch.pack(responses))
    assert found is not None
    sequences = [s.tolist() for s in found.tokens.tensor_split(found.cu_seqlens[1:-1])]
    assert sequences == [[1, 2, 30, 31, 32], [1, 2, 30, 31, 32], [3, 40], [4, 4, 4, 10, 11]]
    assert mismatched(PackedBatch.pack(responses[:2])) is None


def gradient_of(algorithm: Algorithm, log_probs: Tensor, batch: PackedBatch) -> Tensor:
    x = log_probs.clone().requires_grad_()
    algorithm.loss(x, batch)[0].backward()
    assert x.grad is not None
    return x.grad
