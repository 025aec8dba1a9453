"""Groups over several steps: what begins, what a step takes, what a checkpoint has.

Engines here are counters of tokens; real ones are in ``test_worker_group`` and ``test_stale_runs``.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feedback.datasets import Prompt
from feedback.scoring.sources.rules import PerToken
from train.batch.packed import Rollout, Sample
from train.controller.worker_group import WorkerError
from train.data.rewards import RewardError, Rewards
from train.environments.episode import Episode, TrainedSequence
from train.observe.health import of_policies
from train.rollouts.group import Group
from train.rollouts.request import Request, requests_of
from train.rollouts.schedule import Schedule
from train.rollouts.stream import RolloutStream

SIZE = 2


class Engines:
    """What engines would sample: responses of so many tokens, each labelled with the version of then."""

    def __init__(self, count: int, length_of: Any) -> None:
        self.length_of, self.version = length_of, 0
        self.under_way: list[dict[str, list[int]]] = [{} for _ in range(count)]
        self.asked: list[str] = []
        self.inside = threading.Lock()

    def advance(self, requests: list[list[Request]], *, steps: int) -> list[list[tuple[str, Sample]]]:
        assert self.inside.acquire(blocking=False), "two calls at once"
        ended: list[list[tuple[str, Sample]]] = []
        for responses, new in zip(self.under_way, requests, strict=True):
            self.asked += [request.key for request in new]
            responses |= {request.key: [] for request in new}
            for _ in range(steps):
                for key, labels in responses.items():
                    if len(labels) < self.length_of(key):
                        labels.append(self.version)
            done = [key for key, labels in responses.items() if len(labels) >= self.length_of(key)]
            ended.append([(key, sample_of(key, responses.pop(key))) for key in done])
        self.inside.release()
        return ended


def sample_of(key: str, labels: list[int]) -> Sample:
    changes = [i for i, label in enumerate(labels) if i == 0 or labels[i - 1] != label]
    return Sample([1] * len(labels), key, [-1.0] * len(labels), "stop", [(i, labels[i]) for i in changes])


def stream(engines: Engines, schedule: Schedule, *, beside: bool = False, **options: Any) -> RolloutStream:
    def requests(number: int, prompt: Prompt) -> list[Request]:
        assert prompt.prompt_token_ids == [number]
        step, place = divmod(number, schedule.per_step)
        how: dict[str, Any] = {"n": SIZE, "greedy": False, "seed": step, "episodes": False}
        return requests_of(str(step), [[number]], [place], **how)

    given: dict[str, Any] = {
        "reward": lambda rows: Rewards([float(len(s.token_ids)) for _, s in rows]),
        "timeout_s": 60,
    }
    return RolloutStream(
        schedule,
        engines=len(engines.under_way),
        size=SIZE,
        prompt_of=lambda number: Prompt(None, None, [number]),
        requests_of=requests,
        advance=engines.advance,
        beside=beside,
        **given | options,
    )


def lengths(seed: int) -> Any:
    """Of each response, by its key: log-normal, now and then very long."""
    return lambda key: min(400, int(random.Random(f"{seed} {key}").lognormvariate(2.5, 1.2)) + 1)


def learn(flow: RolloutStream, engines: Engines, steps: range) -> list[list[Group]]:
    taken = []
    for step in steps:
        taken.append(flow.take(step))
        with flow.updating(step + 1):
            engines.version = step + 1
    return taken


runs = st.tuples(st.integers(1, 3), st.integers(0, 4), st.integers(1, 12), st.integers(1, 3), st.integers(0, 99))


@settings(deadline=None, max_examples=40)
@given(runs, st.booleans())
def test_every_group_is_learned_from_once_and_no_token_is_older_than_allowed(run: Any, beside: bool) -> None:
    per_step, staleness, steps, count, seed = run
    engines = Engines(count, lengths(seed))
    flow = stream(engines, Schedule(per_step, staleness, steps), beside=beside)
    try:
        taken = learn(flow, engines, range(steps))
    finally:
        flow.close()
    assert [len(groups) for groups in taken] == [per_step] * steps
    assert sorted(group.number for groups in taken for group in groups) == list(range(per_step * steps))
    assert max(Counter(engines.asked).values()) == 1, "nothing is sampled twice"
    for step, groups in enumerate(taken):
        for group in groups:
            for index, sample in enumerate(group.sampled):
                assert sample.text == f"{group.number // per_step}-{group.number % per_step}-{index}"
                assert all(step - staleness <= version <= step for _, version in sample.policies)
                assert group.rewarded[index].values == [float(len(sample.token_ids))]


@settings(deadline=None, max_examples=30)
@given(runs, st.data())
def test_a_run_that_goes_on_uses_what_had_ended_and_nothing_twice(run: Any, data: Any) -> None:
    per_step, staleness, steps, count, seed = run
    broken = data.draw(st.integers(0, steps))
    engines, schedule = Engines(count, lengths(seed)), Schedule(per_step, staleness, steps)
    first = stream(engines, schedule)
    before = learn(first, engines, range(broken))
    state = json.loads(json.dumps(first.state()))
    first.close()
    kept = {one["text"] for of in state["groups"] for one in of["ended"].values()}
    again = Engines(count, lengths(seed))
    again.version = broken
    second = stream(again, schedule)
    second.resume(state, step=broken, episodes=False)
    after = learn(second, again, range(broken, steps))
    second.close()
    numbers = [group.number for groups in before + after for group in groups]
    assert sorted(numbers) == list(range(per_step * steps))
    assert not kept & set(again.asked)
    learned = {sample.text: sample for groups in after for group in groups for sample in group.sampled}
    assert kept <= learned.keys()
    oldest = [step - v for step, of in enumerate(after, broken) for g in of for s in g.sampled for _, v in s.policies]
    assert not oldest or 0 <= min(oldest) <= max(oldest) <= staleness


def test_a_long_response_does_not_hold_the_steps_until_its_last_one() -> None:
    engines = Engines(1, lambda key: 200 if key == "0-0-0" else 4)
    flow = stream(engines, Schedule(1, 3, 8), reward=None)
    taken = [groups[0].number for groups in learn(flow, engines, range(8))]
    flow.close()
    assert taken[:3] == [1, 2, 3]
    assert taken.index(0) == 3, "the last step that may learn from it waits for it"


def test_with_no_staleness_a_step_has_its_own_groups_of_its_own_policy() -> None:
    engines = Engines(2, lengths(1))
    flow = stream(engines, Schedule(3, 0, 4))
    for step, groups in enumerate(learn(flow, engines, range(4))):
        assert [group.number for group in groups] == list(range(3 * step, 3 * step + 3))
        assert {version for g in groups for s in g.sampled for _, version in s.policies} == {step}
    flow.close()


def test_what_waits_for_a_reward_is_not_taken_and_holds_up_nothing_else() -> None:
    asked, may_answer = [], threading.Event()

    def reward(rows: list[tuple[Prompt, Sample]]) -> Rewards:
        asked.append({sample.text for _, sample in rows})
        assert may_answer.wait(60)
        return Rewards([0.0] * len(rows))

    engines = Engines(1, lambda key: 4 if key == "0-0-0" else 40 if asked else 10**9)
    flow = stream(engines, Schedule(1, 1, 2), beside=True, reward=reward)
    taker = threading.Thread(target=flow.take, args=(0,))
    taker.start()
    deadline = time.monotonic() + 60
    while any(engines.under_way) or not asked:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert asked == [{"0-0-0"}], "it was asked for while the others were sampled"
    assert (taker.is_alive(), flow.queued) == (True, 0)
    may_answer.set()
    taker.join(60)
    assert not taker.is_alive()
    flow.close()


@pytest.mark.parametrize("beside", [False, True])
def test_what_fails_in_a_thread_is_raised_where_a_step_waits(beside: bool) -> None:
    def reward(rows: list[tuple[Prompt, Sample]]) -> Rewards:
        raise RewardError("the judge is gone")

    flow = stream(Engines(1, lengths(0)), Schedule(1, 1, 2), beside=beside, reward=reward)
    with pytest.raises(RewardError, match="the judge is gone"):
        flow.take(0)
    flow.close()


def test_an_engine_that_fails_fails_the_step_and_the_exchange_of_weights() -> None:
    class Broken(Engines):
        def advance(self, *_: Any, **__: Any) -> Any:
            raise WorkerError("rank 0 died", died=True)

    flow = stream(Broken(1, lengths(0)), Schedule(1, 1, 2), beside=True)
    for _ in range(2):
        with pytest.raises(WorkerError, match="rank 0 died"):
            flow.take(0)
    with pytest.raises(WorkerError, match="rank 0 died"), flow.updating(1):
        raise AssertionError("no weights are exchanged with a broken engine")
    flow.close()


def test_a_step_whose_responses_do_not_end_says_what_it_waits_for() -> None:
    flow = stream(Engines(1, lambda key: 10**9), Schedule(2, 1, 2), timeout_s=0.2)
    with pytest.raises(WorkerError, match=r"step 1 has waited .*=0\.2 s: 0 of the 4 groups under way have ended"):
        flow.take(0)
    flow.close()


def test_a_checkpoint_has_episodes_and_rewards_of_tokens_as_they_are() -> None:
    sequence = TrainedSequence([1])
    sequence.add([2, 3], [-0.5, -1.5], sampled=True, policies=[(0, 4), (1, 5)])
    sequence.add([9], [0.0], sampled=False)
    sequence.add([4], [-2.5], sampled=True, policies=[(0, 6)])
    assert sequence.trimmed().policies == [(0, 4), (1, 5), (3, 6)]
    prompt, rewards = (
        Prompt(None, None, [1]),
        Rewards([PerToken.of([0.25, 0.5], 2)], {"a": [0.75]}, {"a": [None]}, [[0.25, 0.5]]),
    )
    for ended in (Episode([sequence], [0.5], truncated=True), Sample([2, 3], "ab", [-1.0, -2.0], "stop", [(0, 4)])):
        group = Group(7, prompt, 4, 2, {1: ended}, {1: rewards.row(0)})
        kept = json.loads(json.dumps(group.kept()))
        again = Group.of_kept(kept, prompt, 2, version=9, episodes=isinstance(ended, Episode))
        assert (again.number, again.began, again.rewards) == (7, 4, group.rewards)
        assert json.dumps(again.kept()) == json.dumps(group.kept())
    nothing = Group(8, prompt, 4, 2)
    assert Group.of_kept(nothing.kept(), prompt, 2, version=9, episodes=False).began == 9


def test_metrics_say_how_old_the_tokens_are_that_are_learned_from() -> None:
    of_turns = [True, True, False, False, True]
    rollouts = [
        Rollout([1], [2] * 4, [0.0] * 4, 1.0, 0, policies=[(0, 5), (3, 6)]),
        Rollout([1], [2] * 5, [0.0] * 5, 1.0, 0, sampled=of_turns, policies=[(0, 6), (4, 7)]),
        Rollout([1], [2] * 9, [0.0] * 9, 1.0, 1, fresh=False),
        Rollout([1], [2], [0.0], 1.0, 1, policies=[(0, 7)]),
    ]
    found = of_policies(7, rollouts)
    assert found == {"staleness_mean": (3 * 2 + 3 * 1) / 8, "staleness_max": 2.0, "partial_fraction": 2 / 3}
