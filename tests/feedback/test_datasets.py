from __future__ import annotations

from datetime import timedelta

import pytest
from feedback_rows import NOON, interaction, put, thumb

from feedback.config import ScoringConfig
from feedback.datasets import ROLLOUTS, prompts, rollouts
from feedback.scoring import score


@pytest.fixture
def asked(lake):
    """Prompt [1] asked twice (one request had two responses), [2] last, [3] only in an aborted response."""
    at = [NOON + timedelta(minutes=minute) for minute in range(5)]
    put(
        lake,
        "interactions",
        [
            interaction("a", prompt_token_ids=[1], created_at=at[0], prompt="one", metadata={"answer": "old"}),
            interaction("b", prompt_token_ids=[1], created_at=at[2], prompt="one", request_id="twice"),
            interaction("c", prompt_token_ids=[1], created_at=at[2], prompt="one", request_id="twice"),
            interaction("d", prompt_token_ids=[2], created_at=at[3], prompt=None, messages='[{"role": "user"}]'),
            interaction("e", prompt_token_ids=[3], created_at=at[4], status="aborted"),
        ],
    )
    return lake


def test_a_prompt_stands_once_the_latest_first_with_its_latest_metadata(asked):
    second, first = prompts(asked)
    assert (second.prompt_token_ids, second.prompt, second.messages) == ([2], None, '[{"role": "user"}]')
    assert (first.prompt_token_ids, first.prompt, first.asked) == ([1], "one", 2)
    assert first.metadata == {"answer": "four"}


def test_a_cap_above_one_repeats_prompts_as_often_as_they_were_asked(asked):
    assert [prompt.prompt_token_ids for prompt in prompts(asked, max_per_prompt=5)] == [[2], [1], [1]]
    assert [prompt.prompt_token_ids for prompt in prompts(asked, max_per_prompt=5, limit=2)] == [[2], [1]]
    assert [prompt.prompt_token_ids for prompt in prompts(asked, limit=1)] == [[2]]


@pytest.mark.parametrize("bad", [{"limit": 0}, {"max_per_prompt": 0}])
def test_sizes_below_one_are_refused(asked, bad):
    with pytest.raises(ValueError, match="at least 1"):
        prompts(asked, **bad)


def test_the_same_versions_give_the_same_data_whatever_came_after(asked):
    versions = asked.versions()
    before = prompts(asked)
    put(asked, "interactions", [interaction("f", prompt_token_ids=[1], created_at=NOON + timedelta(days=1))])
    assert prompts(asked) != before
    assert prompts(asked, versions=versions) == before


def test_rollouts_are_rewarded_responses_with_what_their_policy_did(lake):
    spans = [{"start": 0, "policy_version": 1}, {"start": 1, "policy_version": 2}]
    put(
        lake,
        "interactions",
        [
            interaction("b", created_at=NOON + timedelta(seconds=1), policy_spans=spans),
            interaction("a"),
            interaction("unrated"),
            interaction("aborted", status="aborted"),
        ],
    )
    assert rollouts(lake).num_rows == 0
    put(lake, "feedback", [thumb("a", 1), thumb("b", 0), thumb("aborted", 1)])
    score(lake, ScoringConfig())
    versions = lake.versions()
    table = rollouts(lake)
    assert table.schema == ROLLOUTS
    assert table.column("response_id").to_pylist() == ["a", "b"]
    assert table.column("reward").to_pylist() == [1.0, 0.0]
    assert table.column("logprobs").to_pylist() == [[-0.25, -0.5]] * 2
    assert table.column("policy_spans").to_pylist()[1] == spans
    assert rollouts(lake, policy_version=1).column("response_id").to_pylist() == ["a"]
    assert rollouts(lake, policy_version=2).num_rows == 0
    put(lake, "feedback", [thumb("a", 0), thumb("unrated", 1)])
    score(lake, ScoringConfig())
    assert rollouts(lake).column("reward").to_pylist() == [0.0, 1.0, 0.0]
    assert rollouts(lake, versions=versions).equals(table)
