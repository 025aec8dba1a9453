"""Which rows say that a policy on trial made them."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

from serve.generation.interaction_rows import build_rows
from serve.generation.request import GenerationProgress, GenerationRequest, Sampling
from serve.generation.variant import CanaryVariants


class Replica:
    """What serves, and what is tried out."""

    def __init__(self) -> None:
        self.version = 1
        self.variants = CanaryVariants(lambda: self.version)


def test_a_response_is_the_canarys_if_one_of_its_tokens_is_whenever_it_was_asked_for() -> None:
    replica = Replica()
    before = time.monotonic()
    replica.variants.set(2, "canary")
    assert replica.variants.label is None  # it does not serve yet
    replica.version = 2
    assert replica.variants.label == "canary"
    assert replica.variants.label_of(before, {1, 2}) == "canary"
    assert replica.variants.label_of(before, {1}) is None
    assert replica.variants.label_of(before, ()) == "canary"  # it failed, under the canary


def test_what_a_refused_policy_made_is_labelled_when_the_old_one_is_back() -> None:
    replica = Replica()
    replica.variants.set(2, "canary")
    during = time.monotonic()
    replica.variants.set(None)
    assert replica.variants.label is None
    assert replica.variants.label_of(during, {2, 1}) == "canary"
    replica.variants.set(3, "canary")
    assert replica.variants.label_of(during, {2}) == "canary"


def test_a_policy_that_passed_its_trial_is_no_canary() -> None:
    replica = Replica()
    replica.variants.set(2, "canary")
    replica.version = 2
    replica.variants.set(None)
    after = time.monotonic() + 1e-6
    assert replica.variants.label is None
    assert replica.variants.label_of(after, {2}) is None
    assert replica.variants.label_of(after, ()) is None


def test_a_trial_that_is_ordered_again_goes_on_and_a_second_one_begins_anew() -> None:
    replica = Replica()
    replica.version = 2
    replica.variants.set(2, "canary")
    replica.variants.set(2, "canary")
    assert replica.variants.label == "canary"
    replica.variants.set(None)
    replica.variants.set(None)
    replica.variants.set(2, "canary")
    later = time.monotonic() + 1
    assert replica.variants.label_of(later, {2}) == "canary"


def test_what_is_asked_after_a_trial_is_no_canarys_also_when_the_clock_is_set_back() -> None:
    replica = Replica()
    replica.variants.set(2, "canary")
    replica.version = 2
    replica.variants.set(None)
    hour_ago = datetime.now(UTC) - timedelta(hours=1)
    sampling = Sampling(n=1, max_tokens=1, temperature=1, top_p=1, top_k=0, min_p=0, stop=(), stop_token_ids=(), seed=0)
    request = GenerationRequest(
        "request", "/generate", "replica-0", "acme", [1], sampling, variants=replica.variants, created_at=hour_ago
    )
    (row,) = build_rows(request, GenerationProgress(1).generation())
    assert row["variant"] is None
    assert row["timings"]["total_ms"] < 3_000_000
