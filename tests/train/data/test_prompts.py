"""What a run draws from: logged groups that teach something, and every prompt before any comes again."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluation.suites.held_out import HeldOut, position
from feedback.config import LakeConfig
from feedback.datasets import STALE, TOO_LONG, UNKNOWN_POLICY, Prompt
from feedback.lake.tables import Lake
from tests.feedback.feedback_rows import interaction, put, reward
from train.batch.packed import PackedBatch, Rollout, Sample
from train.config.training import TrainConfig
from train.data.logged import traffic as traffic_module
from train.data.logged.traffic import ALL_EQUAL, ALONE, BELOW_FULL_SUPPORT, TWICE, LoggedGroups, Traffic
from train.data.prompts import Cycled, repr_pieces, sha256_of
from train.data.rewards import Rewards
from train.data.samples import Informative, score
from train.objectives.advantages import group_relative

Row = tuple[dict[str, Any], dict[str, Any]]
NUMBERS: Final = itertools.count()


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    made = Lake(str(tmp_path / "lake"), LakeConfig())
    made.create()
    return made


def row(prompt: list[int], value: float | None, *, metadata: dict[str, str] | None = None, **sampling: Any) -> Row:
    """A response, and its reward; of those made one after the other, each is the next one's elder."""
    name = f"r{next(NUMBERS):04}"
    sampled = {**interaction(name)["sampling"], "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, **sampling}
    response = interaction(
        name,
        prompt_token_ids=prompt,
        response_token_ids=[5, 6],
        logprobs=[-0.125, -0.25],
        sampling=sampled,
        metadata=list((metadata or {}).items()),
    )
    return response, reward(name, value)


def read(lake: Lake, *rows: Row, drawn: Callable[[int], Iterable[int]] = range, **options: Any) -> Traffic:
    put(lake, "interactions", [response for response, _ in rows])
    put(lake, "rewards", [worth for _, worth in rows])
    return Traffic.read(lake, lake.versions(), drawn, **options)


def again(lake: Lake, **options: Any) -> Traffic:
    return Traffic.read(lake, lake.versions(), range, **options)


def prompts_of(traffic: Traffic) -> list[list[int]]:
    return [group[0].prompt for group in traffic.groups]


# ------------------------------------------------------------------------------------------------ logged responses


def test_where_responses_are_compared_groups_with_equal_rewards_are_left_out_on_request_and_counted(lake: Lake) -> None:
    rows = [row([1], 0.0), row([1], 1.0), row([2], 1.0), row([2], 1.0), row([3], None), row([3], 1.0)]
    traffic = read(lake, *rows, singleton_baseline="leave_out", filter_groups=True)
    assert prompts_of(traffic) == [[1]]
    assert traffic.left_out == {ALL_EQUAL: 2, ALONE: 1}
    assert prompts_of(again(lake, singleton_baseline="batch", filter_groups=True)) == [[1], [3]]
    assert prompts_of(again(lake, singleton_baseline="leave_out")) == [[1], [2]]


def test_a_logged_response_that_ended_at_its_longest_length_is_truncated(lake: Lake) -> None:
    rows = [row([1], 0.0), row([1], 1.0)]
    rows[1][0]["finish_reason"] = "length"
    assert [r.truncated for r in read(lake, *rows).groups[0]] == [False, True]


def test_where_each_response_teaches_by_itself_none_is_left_out_for_its_group(lake: Lake) -> None:
    traffic = read(lake, row([2], 1.0), row([2], 1.0), row([3], 1.0))
    assert [len(group) for group in traffic.groups] == [2, 1]
    assert traffic.left_out == {}
    assert str(traffic) == "1 groups and 1 lone responses of traffic"


def test_groups_and_their_responses_are_in_the_order_of_time_however_they_lie_in_the_lake(lake: Lake) -> None:
    rows = [row([prompt], value) for prompt, value in ((1, 0.0), (2, 0.25), (1, 0.5), (3, 0.75), (2, 1.0))]
    traffic = read(lake, *rows[::-1])
    assert [[r.reward for r in group] for group in traffic.groups] == [[0.0, 0.5], [0.25, 1.0], [0.75]]
    assert traffic.digest == again(lake).digest
    put(lake, "rewards", [reward(rows[3][0]["response_id"], 0.5, minute=1)])
    assert traffic.digest != again(lake).digest


def test_of_groups_that_are_not_drawn_nothing_is_read_until_they_are_asked_for(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    read_tokens = traffic_module.logged_responses
    monkeypatch.setattr(
        traffic_module,
        "logged_responses",
        lambda lake, ids, *more, **options: (
            asked.append(sorted(ids.to_pylist())) or read_tokens(lake, ids, *more, **options)
        ),
    )
    rows = [row([prompt], 1.0) for prompt in (1, 2, 3, 2)]
    names = [response["response_id"] for response, _ in rows]
    traffic = read(lake, *rows, drawn=lambda groups: [groups - 2], held_out=HeldOut())
    assert asked == [[names[1], names[3]]]
    assert len(traffic.groups) == 3
    assert len(traffic.learned_prompts) == 1
    assert [r.prompt for r in traffic.groups[1]] == [[2], [2]]
    assert asked == [[names[1], names[3]]]
    assert [r.prompt for r in traffic.groups[-1]] == [[3]]
    assert asked[1:] == [[names[2]]]


def test_what_all_steps_draw_is_read_once_and_between_steps_memory_has_none_of_it(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    read_tokens = traffic_module.logged_responses
    monkeypatch.setattr(
        traffic_module,
        "logged_responses",
        lambda lake, ids, *more, **options: reads.append(len(ids)) or read_tokens(lake, ids, *more, **options),
    )
    rows = [row([prompt, *range(4000)], float(prompt % 3)) for prompt in range(200) for _ in range(2)]
    of_tokens = 4 * 4001 * len(rows)
    for response, _ in rows[::2]:
        response["response_token_ids"] = [7] * 9
        response["logprobs"] = [-0.5] * 9
    put(lake, "interactions", [response for response, _ in rows])
    put(lake, "rewards", [worth for _, worth in rows])
    before = pa.total_allocated_bytes()
    traffic = again(lake)
    assert pa.total_allocated_bytes() - before < of_tokens / 20
    assert reads == [400]
    steps = Cycled(traffic.groups, 7, "3")
    for step in range(60):  # each comes twice
        drawn = steps.at(step)
        assert [[len(r.response) for r in group] for group in drawn] == [[9, 2]] * 7
        assert all(r.prompt == group[0].prompt for group in drawn for r in group)
        assert pa.total_allocated_bytes() - before < of_tokens / 20
    assert reads == [400]
    assert prompts_of(traffic) == [[prompt, *range(4000)] for prompt in range(200)]


def test_a_run_draws_the_same_from_any_step_on_however_many_steps_it_has(lake: Lake) -> None:
    """What resuming after a kill needs; the batches are those of a plain loop over the rows of the lake."""
    rows = [row([prompt], float(prompt + n)) for n in range(3) for prompt in range(20)]
    drawn = {}
    for steps in (4, 11, 400):

        def of_steps(groups: int, steps: int = steps) -> Iterable[int]:
            return Cycled(range(groups), 5, "3:traffic").drawn_before(steps)

        traffic = read(lake, *rows, drawn=of_steps) if not drawn else Traffic.read(lake, lake.versions(), of_steps)
        cycled = Cycled(traffic.groups, 5, "3:traffic")
        drawn[steps] = [cycled.at(step) for step in range(1, 4)]
    assert drawn[4] == drawn[11] == drawn[400]
    order = random.Random("3:traffic:0").sample(range(20), 20)
    assert [[[r.reward for r in group] for group in step] for step in drawn[4]] == [
        [[float(prompt + n) for n in range(3)] for prompt in order[5 * step : 5 * step + 5]] for step in range(1, 4)
    ]


def test_a_response_that_is_gone_is_named(lake: Lake, tmp_path: Path) -> None:
    rows = [row([1], 0.0), row([2], 1.0)]
    index = read(lake, *rows).groups._index
    other = Lake(str(tmp_path / "other"), LakeConfig())
    other.create()
    put(other, "interactions", [rows[0][0]])

    def read_other(ids: pa.Array, take: Callable[[Iterable[pa.RecordBatch]], Any]) -> Any:
        columns = traffic_module._OF_TOKENS
        return traffic_module.logged_responses(other, ids, columns, take, versions=other.versions())

    missing = rows[1][0]["response_id"]
    with pytest.raises(LookupError, match=f"1 of 2 responses are not in the lake any more: {missing}, …"):
        LoggedGroups(index, read_other).spool([0, 1])
    with pytest.raises(LookupError, match=f"1 of 1 responses are not in the lake any more: {missing}, …"):
        LoggedGroups(index, read_other).spool([1])


def test_tokens_are_those_of_the_row_whatever_else_has_its_id(lake: Lake) -> None:
    """No server makes such rows; a lake that was put together from several might have them."""
    rows = [row([1], 0.0), row([2], 0.5), row([2], 1.0), row([1], 0.25)]
    rows[3][0]["response_id"] = rows[0][0]["response_id"]
    traffic = read(lake, *rows[:3], (rows[3][0], reward(rows[3][0]["response_id"], 0.0)))
    assert prompts_of(traffic) == [[2]]
    assert traffic.left_out == {TWICE: 2}


def test_a_twin_to_a_held_out_prompt_is_not_learned_from_in_a_rows_place(lake: Lake) -> None:
    texts = sorted(("two and two", "two and three"), key=position)
    held, kept = row([9], 1.0), row([1], 0.25)
    held[0].update(response_id=kept[0]["response_id"], prompt=texts[0])
    kept[0]["prompt"] = texts[1]
    put(lake, "interactions", [held[0], kept[0]])
    put(lake, "rewards", [kept[1]])
    groups = again(lake, held_out=HeldOut(share=position(texts[1]))).groups
    assert [[(one.prompt, one.reward) for one in group] for group in groups] == [[([1], 0.25)]]


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.125}, {"temperature": 0.0}])
def test_rows_sampled_below_full_support_are_refused_and_counted(lake: Lake, cut: dict[str, float]) -> None:
    traffic = read(lake, row([1], 0.0), row([1], 1.0, **cut), singleton_baseline="leave_out")
    assert len(traffic.groups) == 0
    assert traffic.left_out[BELOW_FULL_SUPPORT] == 1
    assert "left out: 1 alone for their prompt, 1 sampled below full support" in str(traffic)


def test_rows_whose_distribution_was_changed_otherwise_are_refused_but_not_for_a_stop_token(lake: Lake) -> None:
    penalty = {"millrace:sampling": '{"presence_penalty": 0.5}'}
    stop = {"millrace:sampling": '{"stop_token_ids": [7]}', "theirs": "x"}
    rows = [row([1], 0.0), row([1], 1.0, metadata=penalty), row([2], 0.0), row([2], 1.0, metadata=stop)]
    traffic = read(lake, *rows, singleton_baseline="leave_out")
    assert prompts_of(traffic) == [[2]]
    assert traffic.left_out == {BELOW_FULL_SUPPORT: 1, ALONE: 1}


def test_a_response_counts_by_that_of_its_policies_which_is_furthest_from_the_parent(lake: Lake) -> None:
    wanted = [
        ([7], None),
        ([5, 7], None),
        ([4, 7], STALE),
        ([7, 4, 7], STALE),
        ([9], None),
        ([10], STALE),
        ([], UNKNOWN_POLICY),
        ([7, None], UNKNOWN_POLICY),
    ]
    rows = []
    for prompt, (policies, _) in enumerate(wanted):
        rows.append(row([prompt], 0.0))
        spans = [{"start": at, "policy_version": policy} for at, policy in enumerate(policies)]
        rows[-1][0]["policy_spans"] = spans
    traffic = read(lake, *rows, parent=7, max_staleness=2)
    assert prompts_of(traffic) == [[prompt] for prompt, (_, reason) in enumerate(wanted) if reason is None]
    assert traffic.left_out == {STALE: 3, UNKNOWN_POLICY: 2}
    for unbound in ({"parent": 7}, {"max_staleness": 2}):
        assert again(lake, **unbound).left_out == {}, "without a bound every policy's responses are welcome"


def test_a_response_that_is_longer_than_the_context_is_left_out_and_counted(lake: Lake) -> None:
    traffic = read(lake, row([1, 2, 3], 0.0), row([1, 2], 1.0), longest=4)
    assert prompts_of(traffic) == [[1, 2]]
    assert traffic.left_out == {TOO_LONG: 1}


# ---------------------------------------------------------------------------------------- what a step learns from


def rollouts(*groups: list[float]) -> list[Rollout]:
    """Those that are alone in their group are logged ones."""
    return [
        Rollout([1], [2], [-0.5], reward, i, fresh=len(rewards) > 1)
        for i, rewards in enumerate(groups)
        for reward in rewards
    ]


def rewards_of(found: Informative) -> list[float]:
    return [rollout.reward for rollout in found.rollouts]


def test_groups_with_equal_rewards_are_counted_and_on_request_left_out() -> None:
    drawn = rollouts([0.0, 1.0], [1.0, 1.0], [0.0, 0.0, 0.5])
    found = Informative.of(drawn, "batch", filter_groups=True)
    assert rewards_of(found) == [0.0, 1.0, 0.0, 0.0, 0.5]
    assert (found.groups, found.uninformative, found.left_alone) == (2, 1, 0)
    kept = Informative.of(drawn, "batch")
    assert kept.rollouts == drawn
    assert (kept.groups, kept.uninformative, kept.left_alone) == (2, 1, 0)


def test_where_turns_are_compared_groups_are_equal_if_all_their_turns_are() -> None:
    def episode(first: float, second: float, group: int) -> Rollout:
        return Rollout(
            prompt=[3],
            response=[4, 5, 6, 7],
            log_probs=[-0.5, -0.5, 0.0, -0.5],
            reward=first + second,
            group=group,
            token_rewards=[0.0, first, 0.0, second],
            sampled=[True, True, False, True],
        )

    def apart(first: float, second: float, group: int) -> Rollout:
        turns = [Rollout([3], [4, 5], [-0.5] * 2, 1.0, group, token_rewards=[0.0, of]) for of in (first, second)]
        return replace(turns[1], earlier=(turns[0],))

    for made in (episode, apart):
        drawn = [made(1.0, 0.0, 0), made(0.0, 1.0, 0), made(1.0, 0.0, 1), made(1.0, 0.0, 1)]
        found = Informative.of(drawn, "batch", filter_groups=True, by_turn=True)
        assert found.rollouts == drawn[:2]
        assert (found.groups, found.uninformative) == (1, 1)
        assert Informative.of(drawn, "batch", filter_groups=True).rollouts == []


def test_where_no_group_has_different_rewards_nothing_is_learned_from() -> None:
    assert Informative.of(rollouts([1.0, 1.0], [0.0, 0.0], [0.5]), "batch").rollouts == []


def test_a_fresh_response_whose_companions_got_no_reward_is_compared_with_no_other_prompts() -> None:
    drawn = [
        *rollouts([0.0, 1.0], [0.25], [0.75]),
        Rollout([3], [4], [-0.5], 0.9, 3),
        Rollout([5], [6], [-0.5], 0.1, 4),
    ]
    found = Informative.of(drawn, "batch")
    assert rewards_of(found) == [0.0, 1.0, 0.25, 0.75]
    assert found.left_alone == 2


def test_lone_responses_are_compared_with_each_other_or_left_out_and_counted() -> None:
    drawn = rollouts([0.0, 1.0], [0.25], [0.75])
    assert rewards_of(Informative.of(drawn, "batch")) == [0.0, 1.0, 0.25, 0.75]
    left = Informative.of(drawn, "leave_out")
    assert (rewards_of(left), left.left_alone) == ([0.0, 1.0], 2)


@pytest.mark.parametrize("lone", [[[0.5]], [[0.5], [0.5]]])
def test_lone_responses_with_nothing_to_tell_them_apart_never_get_a_silent_zero(lone: list[list[float]]) -> None:
    found = Informative.of(rollouts([0.0, 1.0], *lone), "batch")
    assert (rewards_of(found), found.left_alone) == ([0.0, 1.0], len(lone))


@given(st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=4), min_size=1, max_size=6))
def test_nothing_that_is_left_out_had_an_advantage(groups: list[list[float]]) -> None:
    drawn = rollouts(*groups)
    batch = PackedBatch.pack(drawn)
    advantages = group_relative(batch.rewards, batch.groups, normalise_by_std=True).tolist()
    kept = Informative.of(drawn, "batch", filter_groups=True)
    names = {id(rollout) for rollout in kept.rollouts}
    assert all(a == 0 for rollout, a in zip(drawn, advantages, strict=True) if id(rollout) not in names)
    for group in {r.group if len(groups[r.group]) > 1 else None for r in kept.rollouts}:
        of_group = [a for r, a in zip(drawn, advantages, strict=True) if r.group == group or group is None]
        assert any(a != 0 for a in of_group), "a kept group teaches something"


# ------------------------------------------------------------------------------------------------------- rewards


PROMPTS = [Prompt("a", None, [1], {"answer": "4"}), Prompt("b", None, [2, 3])]


def sample(text: str, tokens: int = 2, finish_reason: str = "stop") -> Sample:
    return Sample([7] * tokens, text, [-0.5] * tokens, finish_reason)


def config(**settings: Any) -> TrainConfig:
    return TrainConfig.model_validate({"rollout": {"max_tokens": 10}, **settings})


def test_a_response_without_a_reward_is_left_out_and_counted() -> None:
    scored = score(
        PROMPTS, [[sample("4"), sample("")], [sample("x", 0)]], lambda _: Rewards([1.0, None, 2.0]), config()
    )
    assert (scored.rewards, scored.unrewarded) == ([1.0], 2)


def test_the_greedy_response_is_the_baseline_of_the_others_and_not_learned_from() -> None:
    sampled = [[sample("a"), sample("b"), sample("greedy")], [sample("c"), sample("greedy")]]
    scored = score(PROMPTS, sampled, lambda _: Rewards([1.0, 2.0, 0.5, 3.0, None]), config(), greedy=True)
    assert [(r.reward, r.baseline) for r in scored.rollouts] == [(1.0, 0.5), (2.0, 0.5)]
    assert scored.unrewarded == 1, "without a baseline the other prompt's response can't be judged"


def test_length_costs_reward_within_the_overlong_buffer() -> None:
    shaped = config(algorithm={"overlong_buffer": 4, "overlong_penalty": 2.0})
    sampled = [[sample("a", 6), sample("b", 8)], [sample("c", 10, "length")]]
    scored = score(PROMPTS, sampled, lambda _: Rewards([1.0, 1.0, 1.0]), shaped)
    assert [r.reward for r in scored.rollouts] == [1.0, 0.0, -1.0]
    assert (scored.rewards, scored.overlong) == ([1.0] * 3, [0.0, -1.0, -2.0])
    assert [r.truncated for r in scored.rollouts] == [False, False, True]


# --------------------------------------------------------------------------------------------------------- prompts


def test_every_item_comes_once_before_any_comes_again() -> None:
    cycled = Cycled(list(range(10)), 4, "3")
    drawn = [item for step in range(5) for item in cycled.at(step)]
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10))
    assert drawn[:10] != drawn[10:]


@given(st.integers(0, 30), st.integers(1, 9), st.integers(0, 12))
def test_what_steps_draw_is_known_without_drawing_it(size: int, count: int, steps: int) -> None:
    cycled = Cycled(range(size), min(count, size), "3")
    known = list(cycled.drawn_before(steps))
    assert len(set(known)) == len(known)
    assert set(known) == {item for step in range(steps) for item in cycled.at(step)}


NESTED = st.recursive(st.integers() | st.text(), lambda inner: st.lists(inner, max_size=4), max_leaves=20)


@given(st.lists(NESTED, max_size=4), st.integers(0, 4))
def test_a_digest_in_pieces_is_that_of_the_whole_text_which_checkpoints_of_before_have(
    value: list[Any], depth: int
) -> None:
    value = [*value, Rollout([1], [2, 3], [-0.5, -0.25], 1.0, 0), Prompt("a", None, [1, 2], {"k": "v"})]
    assert sha256_of(repr_pieces(value, depth)) == hashlib.sha256(repr(value).encode()).hexdigest()


def test_a_step_that_wants_more_items_than_there_are_gets_some_again() -> None:
    assert sorted(Cycled([1, 2, 3], 6, "3").at(1)) == [1, 1, 2, 2, 3, 3]
    assert Cycled([], 6, "3").at(1) == Cycled([1], 0, "3").at(1) == []
