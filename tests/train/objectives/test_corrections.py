"""Off-policy corrections, against plain loops in float64 and exact expectations."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.train.policy_batches import batches, by_response, flat, responses_of, some_responses
from train.batch.packed import PackedBatch, Rollout
from train.config.algorithms import CorrectionConfig
from train.objectives.corrections import importance_weights

FORMS = st.fixed_dictionaries(
    {
        "form": st.sampled_from(["none", "truncate", "mask"]),
        "level": st.sampled_from(["auto", "token", "sequence"]),
        "cap": st.sampled_from([1.1, 2.0]),
        "floor": st.sampled_from([0.0, 0.9]),
        "geometric_low": st.sampled_from([None, 0.95]),
        "geometric_high": st.sampled_from([None, 1.05]),
        "proximal": st.sampled_from(["old", "behaviour"]),
    }
)


@settings(max_examples=200)
@given(batches(), FORMS)
def test_weights_and_what_is_logged_of_them_are_what_a_loop_gives(batch: PackedBatch, form: dict[str, Any]) -> None:
    c = CorrectionConfig(**form)
    batch = batch.with_(fresh=torch.arange(len(batch)) % 2 == 0)
    assert batch.old_log_probs is not None
    weights, health = importance_weights(batch.old_log_probs, batch, c)
    expected, capped, masked = [], [], []
    for r, fresh in zip(responses_of(batch), batch.fresh.tolist(), strict=True):
        logs = [old - mu for old, mu in zip(r.old, r.behaviour, strict=True)]
        geometric = math.exp(sum(logs) / len(logs))
        rejected = (c.geometric_low is not None and geometric < c.geometric_low) or (
            c.geometric_high is not None and geometric > c.geometric_high
        )
        for log in logs:
            ratio = math.exp(log if c.level == "token" or (c.level == "auto" and fresh) else sum(logs))
            corrects = c.form != "none" and c.proximal == "old"
            outside = corrects and c.form == "mask" and not c.floor <= ratio <= c.cap
            capped.append(corrects and c.form == "truncate" and ratio > c.cap and not rejected)
            masked.append(rejected or outside)
            weight = 1.0 if not corrects else min(ratio, c.cap) if c.form == "truncate" else ratio
            expected.append(0.0 if masked[-1] else weight)
    mask = batch.response_mask
    assert weights[mask].tolist() == pytest.approx(expected)
    assert health["importance_weight"] is weights
    assert health["capped_fraction"][mask].tolist() == capped
    assert health["masked_fraction"][mask].tolist() == masked
    squares = sum(w**2 for w in expected)
    size = sum(expected) ** 2 / (len(expected) * squares) if squares else 0.0
    assert float(health["effective_sample_size"]) == pytest.approx(size)
    assert all(h.shape == mask.shape for name, h in health.items() if name != "effective_sample_size")


@given(batches(), FORMS)
def test_a_correction_of_equal_policies_is_none(batch: PackedBatch, form: dict[str, Any]) -> None:
    weights, health = importance_weights(batch.behaviour_log_probs, batch, CorrectionConfig(**form))
    assert set(flat(by_response(batch, weights))) == {1.0}, "exactly"
    assert float(health["effective_sample_size"]) == 1.0
    assert not (health["capped_fraction"] + health["masked_fraction"]).any()


def test_weights_have_no_gradient() -> None:
    batch = some_responses(1)
    assert batch.old_log_probs is not None
    old = batch.old_log_probs.clone().requires_grad_()
    for form in ("truncate", "mask"):
        weights, _ = importance_weights(old, batch, CorrectionConfig(form=form))
        assert not weights.requires_grad


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weighed_samples_of_one_policy_average_to_what_another_policy_would_give(level: str) -> None:
    """Over all responses of two tokens of two kinds. By sequences exactly; by tokens, what the first token decides."""
    behaviour = torch.tensor([0.7, 0.3], dtype=torch.float64)
    policy = torch.tensor([0.4, 0.6], dtype=torch.float64)
    worth = torch.tensor([[1.0, -2.0], [3.0, 0.5]], dtype=torch.float64)
    responses = [(a, b) for a in range(2) for b in range(2)]
    batch = PackedBatch.pack([Rollout([9], list(r), [0.0, 0.0], 0.0, 0) for r in responses])
    chosen = torch.tensor([[0, a, b] for a, b in responses])
    old, sampled = (p[chosen.flatten()].log() * batch.response_mask for p in (policy, behaviour))
    batch = batch.with_(behaviour_log_probs=sampled)
    weights, _ = importance_weights(old, batch, CorrectionConfig(level=level, cap=1e9))
    seen = torch.tensor([behaviour[a] * behaviour[b] for a, b in responses])
    value = torch.tensor([worth[a, b] if level == "sequence" else worth[a, 0] for a, b in responses])
    wanted = torch.tensor([policy[a] * policy[b] for a, b in responses])
    at_the_first_token = weights[batch.cu_seqlens[:-1] + 1]
    assert float((seen * at_the_first_token * value).sum()) == pytest.approx(float((wanted * value).sum()))


def test_a_product_over_a_long_response_overflows_into_its_bounds_and_not_into_nan() -> None:
    batch = PackedBatch.pack([Rollout([1], [2] * 1000, [-5.0] * 1000, 0.0, 0)] * 2)
    old = torch.cat([torch.where(batch.response_mask[:1001], x, 0.0) for x in (-0.5, -9.5)])
    truncated, _ = importance_weights(old, batch, CorrectionConfig(level="sequence"))
    masked, health = importance_weights(old, batch, CorrectionConfig(level="sequence", form="mask", floor=0.5))
    assert truncated[batch.response_mask].unique().tolist() == [0.0, 2.0]
    assert not masked[batch.response_mask].any()
    assert float(health["effective_sample_size"]) == 0.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"floor": 3.0}, r"correction\.floor=3\.0 is above train\.algorithm\.correction\.cap=2\.0"),
        ({"geometric_low": 2, "geometric_high": 1}, r"correction\.geometric_low=2\.0 is above"),
    ],
)
def test_bounds_that_no_ratio_can_meet_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        CorrectionConfig.model_validate(settings)
