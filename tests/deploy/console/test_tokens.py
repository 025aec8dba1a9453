"""A response's tokens as the console shows them: which policy sampled each, and how likely each was."""

from __future__ import annotations

import math
import re
from typing import Any

from feedback_rows import append, interaction

from deploy.config.root import Settings
from deploy.console.pages.tokens import Token, tokens_of
from deploy.console.worker import respond
from feedback.journal.writer import Journal

VIEWER = {"tenant": "default", "name": "n", "scopes": ["read"], "token": "x", "keys": True}
# The test's model has a token a character: a is 2, b is 3, and so on.
PROBABILITIES = [0.95, 0.6, 0.3, 0.1, 0.01]
SWAPPED: dict[str, Any] = {
    "response": "abcde",
    "response_token_ids": [2, 3, 4, 5, 6],
    "logprobs": [math.log(one) for one in PROBABILITIES],
    "policy_spans": [{"start": 0, "policy_version": 1}, {"start": 3, "policy_version": 7}],
}


def test_each_token_has_the_policy_that_sampled_it_and_the_colour_of_its_probability(
    home_with_policy: Settings,
) -> None:
    found = tokens_of(interaction("swapped", **SWAPPED), home_with_policy.policy_store())
    assert found is not None
    assert [(one.text, one.policy, one.turn, one.unlikely) for one in found] == [
        ("a", 1, 0, 0),
        ("b", 1, 0, 1),
        ("c", 1, 0, 2),
        ("d", 7, 1, 3),
        ("e", 7, 1, 4),
    ]
    assert [round(one.probability or 0, 6) for one in found] == PROBABILITIES


def test_a_policy_that_comes_back_is_a_turn_of_its_own(home_with_policy: Settings) -> None:
    spans = [{"start": 0, "policy_version": 1}, {"start": 1, "policy_version": 7}, {"start": 4, "policy_version": 1}]
    found = tokens_of(interaction("swapped", **SWAPPED | {"policy_spans": spans}), home_with_policy.policy_store())
    assert found is not None
    assert [(one.policy, one.turn) for one in found] == [(1, 0), *[(7, 1)] * 3, (1, 2)]


def test_tokens_without_logprobs_have_a_policy_and_no_colour(home_with_policy: Settings) -> None:
    found = tokens_of(interaction("plain", **SWAPPED | {"logprobs": []}), home_with_policy.policy_store())
    assert found is not None
    assert found[4] == Token("e", None, 0, 7, 1)


def test_without_a_tokenizer_there_are_no_tokens(home_with_policy: Settings) -> None:
    spans = [{"start": 0, "policy_version": 98}, {"start": 3, "policy_version": 99}]
    assert tokens_of(interaction("gone", **SWAPPED | {"policy_spans": spans}), home_with_policy.policy_store()) is None


def test_the_page_underlines_the_tokens_of_each_policy_in_its_own_colour(home_with_policy: Settings) -> None:
    settings = home_with_policy
    journal = Journal(settings.path(settings.feedback.journal.folder), settings.feedback.journal, "replica-0")
    journal.open()
    append(journal, "interactions", interaction("swapped", **SWAPPED))
    journal.close()
    settings.lake().create()
    path = {"response_id": "swapped"}
    page = respond(settings, {"page": "interaction", "path": path, "query": {}, "form": None, "viewer": VIEWER})
    assert page.status == 200, page.body[-500:]
    shown = re.findall(r'<span class="lp(\d) p(\d)" title="([^"]+)">(.)</span>', page.body)
    assert [(lp, turn, text) for lp, turn, _, text in shown] == [
        ("0", "0", "a"), ("1", "0", "b"), ("2", "0", "c"), ("3", "1", "d"), ("4", "1", "e"),
    ]  # fmt: skip
    assert [title.partition(" · ")[2] for _, _, title, _ in shown] == ["policy 1"] * 3 + ["policy 7"] * 2
    assert "policy 7 from token 3" in page.body
