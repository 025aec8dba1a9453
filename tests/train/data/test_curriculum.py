"""Which prompts a run draws by what it has solved: pure Python."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from feedback.datasets import Prompt
from train.batch.packed import Rollout
from train.config.sections import CurriculumConfig
from train.config.training import TrainConfig
from train.context import JobContext
from train.data.curriculum import Curriculum
from train.data.own_prompts import OwnPrompts
from train.data.prompts import Cycled, Mixed, TrainingData
from train.data.samples import Scored
from train.dataflows.base import Run
from train.dataflows.online import Online
from train.observe.progress import StepTimer

PROMPTS = [Prompt(None, None, [i]) for i in range(40)]


def curriculum(prompts: int = 40, count: int = 8, **settings: Any) -> Curriculum:
    return Curriculum(CurriculumConfig(**settings), Cycled(PROMPTS[:prompts], count, "1"), 3)


def numbers(prompts: list[Prompt]) -> list[int]:
    return [prompt.prompt_token_ids[0] for prompt in prompts]


def play(of: Curriculum, steps: range, rates: dict[int, float], responses: int = 8) -> list[list[int]]:
    """What the steps draw, where so large a share of the responses to each prompt solves it; 1/2 if not named."""
    drawn = []
    for step in steps:
        drawn.append(numbers(of.at(step)))
        solved = [round(rates.get(number, 0.5) * responses) for number in drawn[-1]]
        of.count(step, 0, {i: [True] * n + [False] * (responses - n) for i, n in enumerate(solved)})
    return drawn


def test_by_default_there_is_none() -> None:
    assert TrainConfig().data.curriculum is None


def test_without_a_preference_and_bounds_it_draws_what_is_drawn_without_it() -> None:
    drawn = play(curriculum(prefer="all", low=None, high=None), range(12), {})
    plain = Cycled(PROMPTS, 8, "1")
    assert drawn == [numbers(plain.at(step)) for step in range(12)]


def test_what_is_always_or_never_solved_rests_and_is_looked_at_again() -> None:
    of = curriculum(prefer="all", rest_steps=10)
    drawn = play(of, range(30), {0: 1.0, 1: 0.0, 2: 0.125})
    steps = {number: [step for step, prompts in enumerate(drawn) if number in prompts] for number in range(40)}
    for out in (0, 1):
        gaps = [b - a for a, b in zip(steps[out], steps[out][1:], strict=False)]
        assert gaps, "it comes again"
        assert min(gaps) > 10
    assert len(steps[2]) > 1.5 * max(len(steps[0]), len(steps[1]))
    assert of.metrics(29)["curriculum/counted"] == 1.0
    assert of.metrics(29)["curriculum/resting"] == sum(last + 10 >= 29 for last in (steps[0][-1], steps[1][-1]))


def test_what_it_has_learned_to_solve_partly_rests_no_longer() -> None:
    of = curriculum(prompts=8, prefer="all", rest_steps=3, window=8)
    play(of, range(1), dict.fromkeys(range(8), 0.0))
    assert of.metrics(1)["curriculum/resting"] == 8
    play(of, range(4, 5), {})
    assert of.metrics(5) == {"curriculum/counted": 1.0, "curriculum/resting": 0.0, "curriculum/pass_rate": 0.5}


def test_prompts_are_drawn_in_proportion_to_what_their_results_can_teach() -> None:
    rates = {number: (0.5, 0.0, 1.0, 0.25)[number % 4] for number in range(40)}
    of = curriculum(low=None, high=None)
    play(of, range(20), rates)  # until all have been counted
    drawn = Counter(number % 4 for prompts in play(of, range(20, 420), rates) for number in prompts)
    # Of sixteen responses: E[p(1-p)] with (1 + s, 1 + f) of (9, 9), (1, 17), (17, 1) and (5, 13).
    expected = [81 / 342, 17 / 342, 17 / 342, 65 / 342]
    for kind, share in enumerate(expected):
        assert drawn[kind] / (400 * 8) == pytest.approx(share / sum(expected), rel=0.1)


def test_a_step_is_full_and_has_no_prompt_twice_even_where_all_rest() -> None:
    of = curriculum(prompts=10, rest_steps=100)
    drawn = play(of, range(6), dict.fromkeys(range(10), 1.0))
    assert [len(set(prompts)) for prompts in drawn] == [8] * 6
    assert [len(prompts) for prompts in play(curriculum(prompts=3), range(3), {})] == [8] * 3
    assert curriculum(prompts=0).at(0) == []


def test_a_step_that_passes_over_most_prompts_shuffles_and_lists_them_no_more_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shuffled, listed, sample, items = [], [], random.Random.sample, Mixed.items.fget
    monkeypatch.setattr(random.Random, "sample", lambda self, *a: shuffled.append(a) or sample(self, *a))
    monkeypatch.setattr(Mixed, "items", property(lambda self: listed.append(self) or items(self)))
    sources = [Cycled(PROMPTS[:20], 1, "shuffled"), Cycled(PROMPTS[20:], 1, "listed")]
    of = Curriculum(CurriculumConfig(), Mixed(sources, [1.0, 1.0], 2), 3)
    of.rests_until = dict.fromkeys(of.known, 100)
    assert len(numbers(of.at(0))) == 2
    assert of.position == 80, "it has looked at each twice"
    assert len(shuffled) <= 4
    assert len(listed) <= 2


def test_a_run_that_goes_on_draws_what_it_would_have_drawn() -> None:
    rates = {number: number / 40 for number in range(40)}
    whole, broken = curriculum(rest_steps=4), curriculum(rest_steps=4)
    expected = play(whole, range(20), rates)
    play(broken, range(7), rates)
    ahead = broken.at(7)  # drawn and not counted yet
    again = curriculum(rest_steps=4)
    again.resume(json.loads(json.dumps(broken.state())))
    assert numbers(again.at(7)) == numbers(ahead)
    assert play(again, range(7, 20), rates) == expected[7:]
    assert again.state() == whole.state()


def test_sources_keep_their_weights() -> None:
    own = [OwnPrompts(Path(name), "", 20, weight, PROMPTS[a:b], {}) for name, weight, a, b in FILES]
    mixed = Mixed.of(Cycled([], 8, "1"), 1.0, own)
    of = Curriculum(CurriculumConfig(low=None, high=None), mixed, 3)
    drawn = Counter(number < 20 for prompts in play(of, range(200), {}) for number in prompts)
    assert drawn[True] / drawn[False] == pytest.approx(3, rel=0.1)


FILES = (("a", 3.0, 0, 20), ("b", 1.0, 20, 40))


def test_the_dataflow_counts_each_round_and_keeps_it_in_its_state() -> None:
    config = TrainConfig.model_validate(
        {
            "data": {"prompts_per_step": 4, "curriculum": {"min_responses": 2, "solved_reward": 0.5}},
            "algorithm": {"resample_rounds": 1, "group_size": 2},
        }
    )
    context = JobContext(run="r", runs=Path(), policies=Path(), reward_models=Path(), lake_uri="")
    data = TrainingData(Cycled(PROMPTS, 4, "1"), Cycled([], 0, "1"), "", 0, "")

    def flow() -> Online:
        return Online(
            Run(
                config,
                context,
                SimpleNamespace(reshard=lambda version: None),
                data,
                1,
                StepTimer(),
                lambda step, answers: {},
            )
        )  # type: ignore[arg-type]

    one = flow()
    assert one.curriculum is not None
    first, second = one.prompts_of(0, 0), one.prompts_of(0, 1)
    assert len({*numbers(first), *numbers(second)}) == 8
    rollouts = [Rollout([1], [2], [0.0], 0.0, group) for group in (0, 0, 1, 1, 3, 3)]
    one.count_results(one.curriculum, 0, 0, Scored(rollouts, [1.0, 0.5, 1.0, 0.0, 0.0, 0.0]))
    one.count_results(one.curriculum, 0, 4, Scored([Rollout([1], [2], [0.0], 0.0, 4 + 2)], [1.0]))
    results = sorted(one.curriculum.results.values())
    assert results == ["", "", "", "", "00", "1", "10", "11"]
    assert one.curriculum.metrics(1)["curriculum/resting"] == 2
    again = flow()
    again.resume(json.loads(json.dumps(one.state())))
    assert numbers(again.prompts_of(1, 0)) == numbers(one.prompts_of(1, 0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": {"curriculum": {"low": 0.5, "high": 0.5}}}, r"low \(0\.5\) must be less than high"),
        ({"data": {"curriculum": {"window": 4}}}, r"min_responses \(8\) is more than the window has \(4\)"),
        ({"data": {"curriculum": {}}, "algorithm": {"name": "sft"}}, r"take out train\.data\.curriculum="),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainConfig.model_validate(settings)
