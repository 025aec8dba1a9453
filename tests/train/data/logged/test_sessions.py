"""Logged sessions: which responses are one conversation, what is learned of it, and what keeps it from that."""

from __future__ import annotations

import itertools
import json
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from evaluation.suites.held_out import HeldOut
from feedback.config import LakeConfig, ScoringConfig
from feedback.datasets import STALE
from feedback.events import FeedbackIn, session_rows
from feedback.lake.tables import Lake
from feedback.maintenance.erasure import Target, erase
from feedback.scoring.run import score
from tests.feedback.feedback_rows import NOON, interaction, put, reward
from train.algorithms.grpo import GRPO
from train.batch.packed import PackedBatch, Rollout
from train.config.algorithms import AlgorithmConfig
from train.config.training import TrainConfig
from train.data.logged.sessions import NOTHING_BETWEEN, OTHER_TEMPERATURE, REWRITTEN, Turn, conversations
from train.data.logged.traffic import ALONE, BELOW_FULL_SUPPORT, BESIDE, MISSING_TURN, SPLIT, TWICE, Traffic

SAMPLED: Final = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": 8, "n": 1, "stop": []}
MARK: Final = 90  # begins what the user says


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    made = Lake(str(tmp_path / "lake"), LakeConfig())
    made.create()
    return made


class Talk:
    """A user's conversation, as a client of chat sends it: each request has all that was said before."""

    def __init__(self, session: str | None = "s", *, user: str = "ann", opening: int = 1, **columns: Any) -> None:
        self.columns = {"session_id": session, "user": user} | columns
        self.name = f"{session}-{user}-{opening}-{columns.get('tenant', '')}"
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": str(opening)}]
        self.tokens = [MARK, opening]
        self.rows: list[dict[str, Any]] = []

    def turn(self, *said: int, **columns: Any) -> dict[str, Any]:
        """The assistant says these tokens."""
        number = len(self.rows)
        row = interaction(
            f"{self.name}-{number}",
            prompt_token_ids=list(self.tokens),
            response=" ".join(map(str, said)),
            response_token_ids=list(said),
            logprobs=[-token / 16 for token in said],
            sampling=SAMPLED,
            messages=json.dumps(self.messages),
            created_at=NOON + timedelta(minutes=number),
        )
        row |= self.columns | columns
        self.rows.append(row)
        self.messages = [*self.messages, {"role": "assistant", "content": row["response"]}]
        self.tokens += said
        return row

    def say(self, word: int) -> None:
        """The user says something."""
        self.messages = [*self.messages, {"role": "user", "content": str(word)}]
        self.tokens += [MARK, word]


def talk(*turns: tuple[int, ...], **options: Any) -> Talk:
    """One whose user says 50, 51, … between the turns."""
    made = Talk(**options)
    for number, said in enumerate(turns):
        if number:
            made.say(49 + number)
        made.turn(*said)
    return made


def read(lake: Lake, rows: list[dict[str, Any]], rewards: dict[int, float], **options: Any) -> Traffic:
    """``rewards``: of the rows with these numbers."""
    put(lake, "interactions", rows)
    put(lake, "rewards", [reward(rows[number]["response_id"], value) for number, value in rewards.items()])
    return Traffic.read(lake, lake.versions(), range, **options)


def only(traffic: Traffic) -> Rollout:
    [[rollout]] = traffic.groups
    return rollout


# ------------------------------------------------------------------------------------------- what is learned from


def test_the_turns_of_a_session_are_one_sequence_of_the_tokens_that_were_captured(lake: Lake) -> None:
    traffic = read(lake, talk((11, 12), (13,), (14, 15)).rows, {2: 1.0})
    rollout = only(traffic)
    assert rollout.prompt == [MARK, 1]
    assert rollout.response == [11, 12, MARK, 50, 13, MARK, 51, 14, 15]
    assert rollout.sampled == [True, True, False, False, True, False, False, True, True]
    assert rollout.log_probs == [-11 / 16, -12 / 16, 0, 0, -13 / 16, 0, 0, -14 / 16, -15 / 16]
    assert (rollout.reward, rollout.token_rewards, rollout.turns, rollout.fresh) == (1.0, None, 3, False)
    assert (traffic.conversations, traffic.left_out, traffic.split) == (1, {}, {})
    assert str(traffic) == "0 groups and 1 lone responses of traffic, 1 conversations among them"
    batch = PackedBatch.pack([rollout])
    mask = batch.response_mask.tolist()
    assert [t for t, counts in zip(batch.tokens.tolist(), mask, strict=True) if counts] == [11, 12, 13, 14, 15]


def test_by_turn_each_reward_comes_with_its_turn_and_by_episode_all_come_with_the_last(lake: Lake) -> None:
    rows = talk((11, 12), (13,), (14,)).rows
    by_turn = only(read(lake, rows, {0: 0.5, 2: 1.0}, by_turn=True))
    assert by_turn.token_rewards == [0, 0.25, 0, 0, 0, 0, 0, 0.5]
    assert by_turn.reward == 0.75, "the mean of the rewards that there are"
    whole = only(Traffic.read(lake, lake.versions(), range))
    assert (whole.reward, whole.token_rewards) == (0.75, None)
    added = only(Traffic.read(lake, lake.versions(), range, by_turn=True, mean=False))
    assert (added.reward, added.token_rewards) == (1.5, [0, 0.5, 0, 0, 0, 0, 0, 1.0])


@pytest.mark.parametrize(("shared", "expected"), [("last", [0, 0, 1.0]), ("equal", [1 / 3] * 3)])
def test_feedback_on_a_session_is_its_reward_and_with_all_of_its_turns_or_with_the_last(
    shared: str, expected: list[float], lake: Lake
) -> None:
    rows = talk((11,), (12,), (13,)).rows
    put(lake, "interactions", rows)
    vote = FeedbackIn(session_id="s", kind="thumb", value=1).to_row("default")
    put(lake, "feedback", session_rows(vote, [row["response_id"] for row in rows]))
    score(lake, ScoringConfig.model_validate({"human": {"sessions": shared}}))
    rollout = only(Traffic.read(lake, lake.versions(), range, by_turn=True))
    assert rollout.reward == pytest.approx(1.0)
    assert rollout.token_rewards is not None
    assert rollout.sampled is not None
    earned = [reward for reward, own in zip(rollout.token_rewards, rollout.sampled, strict=True) if own]
    assert earned == pytest.approx(expected)


def test_turns_of_several_sessions_are_compared_as_those_of_episodes_are(lake: Lake) -> None:
    talks = [talk((11,), (12 + i,), session=f"s{i}") for i in range(2)]
    rows = [row for of in talks for row in of.rows]
    traffic = read(lake, rows, {0: 1.0, 1: 0.0, 2: 0.0, 3: 0.0}, by_turn=True)
    [group] = traffic.groups
    assert [r.reward for r in group] == [0.5, 0.0], "sessions that begin with the same prompt are a group"
    batch = PackedBatch.pack(group)
    advantages = GRPO(AlgorithmConfig(name="grpo", credit="turn")).advantages(batch)
    first, second = (advantages[batch.tokens == token].tolist() for token in (11, 13))
    assert first[0] == pytest.approx(-first[1])
    assert first[0] > 0
    assert second == [0.0], "the second turns earned alike, whatever the first ones did"


def test_a_prompt_that_has_earlier_turns_otherwise_begins_a_sequence_of_the_same_episode(lake: Lake) -> None:
    of = talk((11, 12), (13,), (14,))
    for row in of.rows[1:]:  # the template renders the first turn without its first token
        row["prompt_token_ids"].remove(11)
    traffic = read(lake, of.rows, {2: 1.0})
    rollout = only(traffic)
    assert (rollout.prompt, rollout.response) == ([MARK, 1, 12, MARK, 50], [13, MARK, 51, 14])
    [before] = rollout.earlier
    assert (before.prompt, before.response, before.log_probs) == ([MARK, 1], [11, 12], [-11 / 16, -12 / 16])
    assert traffic.split == {REWRITTEN: 1}
    assert f"turns in sequences of their own: 1 {REWRITTEN}" in str(traffic)
    batch = PackedBatch.pack([rollout.in_group(7)])
    assert (batch.episodes.tolist(), batch.groups.tolist()) == ([0, 0], [7, 7])
    assert batch.episode_lengths.tolist() == [4, 4]
    assert Traffic.read(lake, lake.versions(), range, splits=False).left_out == {SPLIT: 3}


def test_a_turn_at_another_temperature_or_with_nothing_before_it_begins_a_sequence(lake: Lake) -> None:
    of = Talk()
    of.turn(11)
    of.say(50)
    of.turn(12, sampling=SAMPLED | {"temperature": 0.5})
    of.messages = of.messages[:-1]  # no message between: a completion that goes on with its own text
    of.turn(13, sampling=SAMPLED | {"temperature": 0.5}, messages=None)
    traffic = read(lake, of.rows, {2: 1.0})
    rollout = only(traffic)
    assert [part.temperature for part in (*rollout.earlier, rollout)] == [1.0, 0.5, 0.5]
    assert [part.response for part in (*rollout.earlier, rollout)] == [[11], [12], [13]]
    assert traffic.split == {OTHER_TEMPERATURE: 1, NOTHING_BETWEEN: 1}


def test_prompts_of_text_are_joined_by_their_tokens(lake: Lake) -> None:
    of = talk((11,), (12,))
    for row in of.rows:
        row.update(messages=None, prompt="text")
    assert only(read(lake, of.rows, {1: 1.0})).response == [11, MARK, 50, 12]


def test_who_answers_again_does_not_count_the_turns_before_twice(lake: Lake) -> None:
    """Of two answers to one prompt the one that the user went on from is the conversation's."""
    first = talk((11,), (12,), (13,))
    again = talk((11,))
    again.say(50)
    other = again.turn(19, response_id="again", created_at=NOON + timedelta(minutes=1, seconds=1))
    groups = read(lake, [*first.rows, other], {2: 1.0, 3: 0.0}).groups
    found = {tuple(r.prompt): (r.response, r.reward) for [r] in groups}
    assert found == {(MARK, 1): ([11, MARK, 50, 12, MARK, 51, 13], 1.0), (MARK, 1, 11, MARK, 50): ([19], 0.0)}


def test_several_answers_to_one_request_and_prompts_that_have_nothing_to_do_with_each_other_stay_as_they_were(
    lake: Lake,
) -> None:
    both = [talk((11 + i,)).rows[0] | {"response_id": f"choice-{i}"} for i in range(2)]
    rows = [*both, *talk((13,), opening=2).rows]
    groups = read(lake, rows, {0: 0.0, 1: 1.0, 2: 1.0}).groups
    assert [[(r.response, r.reward, r.sampled) for r in group] for group in groups] == [
        [([11], 0.0, None), ([12], 1.0, None)],
        [([13], 1.0, None)],
    ]
    assert groups[0] == Traffic.read(lake, lake.versions(), range, sessions=False).groups[0]


def test_a_long_prompt_that_nothing_comes_before_costs_in_proportion_to_its_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of a client that tells the time in its first message, and so never sends the same beginning twice."""
    written = []
    dumps = json.dumps
    monkeypatch.setattr(json, "dumps", lambda *a, **how: written.append(text := dumps(*a, **how)) or text)
    for count in (200, 400):
        prompts = [
            dumps([{"role": "system", "content": now}] + [{"role": "assistant", "content": "word"}] * count)
            for now in ("9:00", "9:01", "9:02")
        ]
        rows = [
            {"messages": prompt, "response": "x", "prompt_token_ids": [number, 1], "response_token_ids": [2]}
            for number, prompt in enumerate(prompts)
        ]
        written.clear()
        assert len(conversations([Turn(row) for row in rows])) == 3
        assert sum(map(len, written)) <= 2 * sum(map(len, prompts))


def test_sessions_are_of_one_tenant_and_one_user(lake: Lake) -> None:
    mine, others = talk((11,), (12,)), talk((11,), (12,), user="bob")
    rows = [mine.rows[0], others.rows[1], talk((11,), tenant="acme").rows[0]]
    traffic = read(lake, rows, {0: 1.0, 1: 1.0, 2: 0.0})
    assert [[r.response for r in group] for group in traffic.groups] == [[[11], [11]]]
    assert traffic.left_out == {MISSING_TURN: 1}, "bob's second turn has a first one that is not bob's"


def test_each_turn_is_a_response_of_its_own_on_request(lake: Lake) -> None:
    traffic = read(lake, talk((11,), (12,)).rows, {0: 1.0, 1: 0.0}, sessions=False)
    assert [[(r.prompt, r.response, r.reward) for r in group] for group in traffic.groups] == [
        [([MARK, 1], [11], 1.0)],
        [([MARK, 1, 11, MARK, 50], [12], 0.0)],
    ]


# ------------------------------------------------------------------------------------------- what keeps it from that


@pytest.mark.parametrize("gone", [0, 1])
def test_over_an_erased_turn_nothing_is_learned(gone: int, lake: Lake, tmp_path: Path) -> None:
    rows = [*talk((11,), (12,), (13,)).rows, *talk((14,), (15,), session="t").rows]
    assert len(read(lake, rows, {0: 1.0, 1: 1.0, 2: 1.0, 4: 1.0}).groups[0]) == 2
    erase(lake, tmp_path / "journal", Target(response_id=rows[gone]["response_id"]))
    traffic = Traffic.read(lake, lake.versions(), range)
    assert only(traffic).response == [14, MARK, 50, 15]
    assert traffic.left_out == {MISSING_TURN: 2}


@pytest.mark.parametrize("what", ["redacted", "aborted", "not stored"])
def test_over_a_turn_that_was_redacted_cut_off_or_not_stored_nothing_is_learned(what: str, lake: Lake) -> None:
    rows = talk((11,), (12,), (13,)).rows
    if what == "not stored":
        del rows[1]
    else:
        rows[1].update(status=what)
    last = len(rows) - 1
    traffic = read(lake, rows, {0: 1.0, last: 1.0})
    assert len(traffic.groups) == 0
    assert traffic.left_out == {MISSING_TURN: 2}


def test_a_session_whose_only_response_has_others_before_it_is_left_out(lake: Lake) -> None:
    rows = [talk((11,), (12,)).rows[1], talk((11,), (13,), session=None).rows[1]]
    traffic = read(lake, rows, {0: 1.0, 1: 1.0})
    assert only(traffic).response == [13], "without a session it is a prompt like any other"
    assert traffic.left_out == {MISSING_TURN: 1}


def test_a_conversation_with_a_turn_that_can_not_be_learned_from_is_left_out_whole(lake: Lake) -> None:
    cut, stale = talk((11,), (12,), (13,)), talk((14,), (15,), session="t")
    cut.rows[1]["sampling"] = SAMPLED | {"top_p": 0.5}
    stale.rows[0]["policy_spans"] = [{"start": 0, "policy_version": 1}]
    stale.rows[1]["policy_spans"] = [{"start": 0, "policy_version": 4}]
    for row in cut.rows:
        row["policy_spans"] = [{"start": 0, "policy_version": 4}]
    traffic = read(lake, [*cut.rows, *stale.rows], {2: 1.0, 4: 1.0}, parent=4, max_staleness=2)
    assert len(traffic.groups) == 0
    assert traffic.left_out == {BELOW_FULL_SUPPORT: 1, STALE: 1, BESIDE: 3}


def test_a_conversation_one_of_whose_ids_another_response_has_is_left_out_whole(lake: Lake) -> None:
    rows = talk((11,), (12,)).rows
    twin = talk((13,), session=None, opening=2, tenant="acme").rows[0] | {"response_id": rows[1]["response_id"]}
    traffic = read(lake, [*rows, twin], {0: 1.0, 1: 1.0})
    assert len(traffic.groups) == 0
    assert traffic.left_out == {TWICE: 2, BESIDE: 1}


def test_a_conversation_without_a_reward_is_not_there_and_one_alone_is_counted_by_its_responses(lake: Lake) -> None:
    rows = [*talk((11,), (12,)).rows, *talk((13,), session="t").rows]
    traffic = read(lake, rows, {0: 1.0}, singleton_baseline="leave_out")
    assert (len(traffic.groups), traffic.left_out) == (0, {ALONE: 2})


def test_what_is_held_out_keeps_a_conversation_out_and_of_what_is_drawn_all_prompts_are_learned(lake: Lake) -> None:
    class Second(HeldOut):
        def reason(self, row: Any) -> str | None:
            return "held out" if row["prompt_token_ids"][1] == 2 else None

    rows = [*talk((11,), (12,)).rows, *talk((13,), (14,), session="t", opening=2).rows]
    traffic = read(lake, rows, {0: 1.0, 2: 1.0}, held_out=Second())
    assert only(traffic).response == [11, MARK, 50, 12]
    assert traffic.left_out == {"held out": 2}
    assert len(traffic.learned_prompts) == len(Second().keys(rows[0]) | Second().keys(rows[1]))


def test_credit_by_turn_needs_an_environment_or_sessions() -> None:
    by_turn = {"algorithm": {"name": "grpo", "credit": "turn"}}
    TrainConfig.model_validate(by_turn | {"data": {"traffic_share": 1.0}})
    for data in ({}, {"traffic_share": 1.0, "sessions": "responses"}):
        with pytest.raises(
            ValidationError, match=r"credit=turn is of turns with an environment, or of logged sessions"
        ):
            TrainConfig.model_validate(by_turn | {"data": data})


# ------------------------------------------------------------------------------------------------------- in general


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(2, 4), st.booleans()), min_size=1, max_size=8))
def test_each_response_is_in_one_conversation_behind_its_own_context(
    shape: list[tuple[int, int, bool]],
) -> None:
    """Of any tree of requests, each of which goes on from an earlier one or begins anew."""
    turns: list[Turn] = []
    for number, (parent, said, with_messages) in enumerate(shape):
        messages, tokens = [{"role": "user", "content": "0"}], [MARK, 0]
        if number and parent < number:
            row = turns[parent].row
            before = json.loads(row["said"])
            messages = [*before, {"role": "assistant", "content": row["response"]}, {"role": "user", "content": "9"}]
            tokens = [*turns[parent].tokens, MARK, 9]
        row = {
            "prompt_token_ids": tokens,
            "response_token_ids": [number + 10] * said,
            "response": str(number),
            "said": json.dumps(messages),
            "messages": json.dumps(messages) if with_messages else None,
            "sampling": {"temperature": 1.0},
        }
        turns.append(Turn(row))
    found = conversations(turns)
    assert sorted(id(turn) for of in found for turn in of.turns) == sorted(map(id, turns))
    for of in found:
        assert not of.missing
        assert of.splits == ["", *[None] * (len(of.turns) - 1)]
        for before, after in itertools.pairwise(of.turns):
            assert after.prompt[: len(before.tokens)] == before.tokens
