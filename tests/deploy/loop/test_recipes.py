"""Recipes: what they say of other settings, what they refuse, and the stage that trains a reward model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.config import root
from deploy.config.root import ConfigError, RecipeStage, Settings
from deploy.loop import recipes, records
from deploy.loop.cycle import run_cycle
from deploy.loop.recovery.killed_runs import unfinished_training
from evaluation.suites.held_out import position
from evaluation.suites.suite import Suite
from feedback.config import TRAINED
from feedback.events import session_rows
from tests.feedback.feedback_rows import interaction, put, said


def load(*options: tuple[str, str]) -> Settings:
    return root.load(None, options, environment={})


def test_rlhf_has_the_trained_reward_model_stand_in_for_people() -> None:
    settings = load(("cycle.recipe", "rlhf"))
    assert settings.feedback.scoring.human.model is not None
    assert settings.feedback.scoring.human.model.name == TRAINED
    own = load(("cycle.recipe", "rlhf"), ("feedback.scoring.human.model.name", "votes"))
    assert own.feedback.scoring.human.model is not None
    assert own.feedback.scoring.human.model.name == "votes"
    assert load().feedback.scoring.human.model is None


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (
            [("cycle.recipe", "rlhf"), ("train.algorithm.name", "dpo")],
            r"cycle\.recipe=rlhf .*train\.algorithm\.name=dpo",
        ),
        ([("cycle.recipe", "rlvr")], r"cycle\.recipe=rlvr: there is no rule: set feedback\.scoring\.rules"),
        ([("cycle.recipe", "rlaif")], r"cycle\.recipe=rlaif: feedback\.scoring\.judge is not set"),
        (
            [("cycle.recipe", "rlhf"), ("feedback.scoring.human.weight", "0")],
            r"cycle\.recipe=rlhf: feedback\.scoring\.human\.weight is not set, or has no weight",
        ),
        ([("cycle.recipe", "magic")], r"^cycle\.recipe: must be 'auto'.*not 'magic'"),
        (
            [("cycle.recipe", "rlhf"), ("train.reward", "a:b")],
            r"cycle\.recipe=rlhf and train\.reward=a:b both say what rewards",
        ),
        (
            [("cycle.recipe", "rlhf"), ("train.reward_weights", '{"human": 0}')],
            r"cycle\.recipe=rlhf rewards by human, and train\.reward_weights\.human is 0",
        ),
    ],
)
def test_what_a_recipe_can_not_work_with_is_refused_by_name(options: list[tuple[str, str]], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load(*options)


@pytest.mark.parametrize("folder", ["reward_models", "./reward_models", "other/../reward_models"])
def test_evaluation_never_scores_by_the_reward_model_that_rewards_training(folder: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"evaluation\.reward_model_folder=.*reward_models.* are one folder"):
        load(
            ("home", str(tmp_path)),
            ("train.reward_model.folder", "reward_models"),
            ("evaluation.reward_model_folder", folder),
        )


OWN = """
- {stage: train, name: sft, set: {algorithm: {name: sft, thumbs_up: true}, steps: 7}}
- {stage: reward-model, set: {reward_model: {steps: 9}}}
- {stage: train, set: {optimizer: {learning_rate: 0.5}}}
"""


def test_each_stage_of_ones_own_has_its_settings_and_those_of_all(tmp_path: Path) -> None:
    settings = load(("home", str(tmp_path)), ("train.algorithm.group_size", "16"), ("cycle.recipe", OWN))
    sft, reward_model, rest = (settings.of_stage(stage).train for stage in settings.cycle.stages)
    assert [stage.label for stage in settings.cycle.stages] == ["train-sft", "reward-model", "train"]
    assert (sft.algorithm.name, sft.algorithm.thumbs_up, sft.steps, sft.algorithm.group_size) == ("sft", True, 7, 8)
    assert reward_model.of_reward_model().steps == 9
    assert (rest.algorithm.name, rest.algorithm.group_size, rest.steps) == ("grpo", 16, 20)
    assert (rest.optimizer.learning_rate, sft.optimizer.learning_rate) == (0.5, settings.train.optimizer.learning_rate)
    assert settings.feedback.scoring.human.model is not None
    assert settings.feedback.scoring.human.model.name == TRAINED
    for stage in (settings, *map(settings.of_stage, settings.cycle.stages)):  # as child processes read them
        assert root.load(stage.snapshot(), environment={}) == stage


@pytest.mark.parametrize(
    ("algorithm", "outer", "own", "lengths"),
    [
        ("{name: dr_grpo}", 64, "{rollout: {max_tokens: 512}}", (512, 0)),
        ("{name: rloo}", 64, "{rollout: {max_tokens: 512}}", (512, 0)),
        ("{name: remax}", 64, "{rollout: {max_tokens: 512}}", (512, 0)),
        ("{aggregation: constant_length}", 64, "{rollout: {max_tokens: 512}}", (512, 0)),
        ("{name: dapo}", 1000, "{rollout: {max_tokens: 100}}", (None, 20)),
        ("{name: dr_grpo}", 64, "{steps: 3}", (64, 0)),
        ("{name: dr_grpo, max_tokens: 50}", 64, "{rollout: {max_tokens: 512}}", (50, 0)),
        ("{name: dr_grpo}", 64, "{rollout: {max_tokens: 512}, algorithm: {max_tokens: 64}}", (64, 0)),
        ("{name: dapo, overlong_buffer: 0}", 1000, "{rollout: {max_tokens: 100}}", (None, 0)),
    ],
)
def test_lengths_that_nobody_set_follow_from_the_longest_response_of_the_stage(
    tmp_path: Path, algorithm: str, outer: int, own: str, lengths: tuple[int | None, int]
) -> None:
    settings = load(
        ("home", str(tmp_path)),
        ("train.algorithm", algorithm),
        ("train.rollout.max_tokens", str(outer)),
        ("cycle.recipe", f"[{{stage: train, set: {own}}}]"),
    )
    for each in (settings, root.load(settings.snapshot(), environment={})):
        found = each.of_stage(each.cycle.stages[0]).train.algorithm
        assert (found.max_tokens, found.overlong_buffer) == lengths


@pytest.mark.parametrize(
    ("algorithm", "own", "filters"),
    [
        ("{resample_rounds: 2}", "{algorithm: {resample_rounds: 0}}", False),
        ("{resample_rounds: 2}", "{data: {traffic_share: 1}, algorithm: {resample_rounds: 0}}", False),
        ("{resample_rounds: 2}", "{algorithm: {name: ppo}}", False),
        ("{resample_rounds: 2}", "{steps: 3}", True),
        ("{filter_groups: true}", "{steps: 3}", True),
        ("{name: dapo}", "{algorithm: {resample_rounds: 0}}", True),
    ],
)
def test_a_stage_leaves_groups_out_for_the_sake_of_its_own_resampling_alone(
    tmp_path: Path, algorithm: str, own: str, filters: bool
) -> None:
    recipe = f"[{{stage: train, set: {own}}}]"
    settings = load(("home", str(tmp_path)), ("train.algorithm", algorithm), ("cycle.recipe", recipe))
    for each in (settings, root.load(settings.snapshot(), environment={})):
        assert each.of_stage(each.cycle.stages[0]).train.algorithm.filter_groups is filters


@pytest.mark.parametrize(
    ("own", "named"),
    [
        ("[{stage: trian}]", r"^cycle\.recipe\.0\.stage: must be 'train' or 'reward-model', not 'trian'"),
        ("[{stage: train, sett: {}}]", r"^unknown setting cycle\.recipe\.0\.sett "),
        ("[{stage: train, name: 'A b'}]", r"^cycle\.recipe\.0\.name: .*'A b'"),
        (
            "[{stage: train, name: a}, {stage: train, set: {stepz: 3}}]",
            r"unknown setting train\.stepz \(in cycle\.recipe\.1\.set\); did you mean train\.steps\?",
        ),
        ("[{stage: train, set: {steps: many}}]", r"train\.steps: .*, not 'many' \(from cycle\.recipe\.0\.set\)"),
        (
            "[{stage: train, set: {algorithm: {name: sft, group_size: 4}}}]",
            r"train\.algorithm\.group_size=4: sft does not read it .*\(from cycle\.recipe\.0\.set\)",
        ),
        (
            "[{stage: reward-model, set: {reward_model: {steps: 0}}}, {stage: train}]",
            r"train\.reward_model\.steps: .*not 0 \(from cycle\.recipe\.0\.set\)",
        ),
        ("[{stage: train}, {stage: train}]", r"more than one stage train: give each a name"),
        ("[{stage: reward-model}]", r"no stage that trains a policy"),
        ("[]", r"no stage that trains a policy"),
        (
            "[{stage: train, set: {algorithm: {name: reward_model}}}]",
            r"cycle\.recipe\.0\.set: train\.algorithm\.name=reward_model trains no policy: use stage: reward-model",
        ),
        ("[{stage: train, set: {runs: other}}]", r"cycle\.recipe\.0\.set: train\.runs, .* outside the recipe"),
    ],
)
def test_a_stage_that_can_not_work_is_refused_with_its_place(own: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load(("cycle.recipe", own))


@pytest.mark.parametrize(
    ("own", "new"),
    [
        ("[{stage: train, set: {algorithm: {name: sft}}}]", "0 new feedback"),
        (
            "[{stage: train, name: a, set: {algorithm: {name: sft}}}, {stage: train}]",
            "0 new rewards and 0 new feedback",
        ),
    ],
)
def test_a_cycle_waits_for_what_its_stages_learn_from(home_with_policy: Settings, own: str, new: str) -> None:
    record = run_cycle(changed(home_with_policy, ("cycle.recipe", own)))
    assert record.reason == f"{new} since the last cycle that trained, cycle.min_new_rewards is 1"


TWO = "[{stage: train, name: sft, set: {algorithm: {name: sft}%s}}, {stage: train, set: {epochs: 2%s}}]"


def test_of_a_killed_recipe_what_is_done_is_kept_up_to_the_first_stage_that_would_differ(
    home_with_policy: Settings, model: Path
) -> None:
    settings = changed(home_with_policy, ("cycle.recipe", TWO % ("", "")))
    settings.policy_store().publish(model, parent=1, lineage={}, metrics={})
    stages = []
    for stage, parent, done in zip(settings.cycle.stages, (1, 2), (True, False), strict=True):
        run = settings.path("runs") / f"run-of-{stage.label}"
        (run / "checkpoints" / "step-00000010").mkdir(parents=True)
        config = settings.of_stage(stage).training().model_dump(mode="json")
        suites = {str(path): Suite.load(path).sha256 for path in [settings.path("suite.jsonl")]}
        (run / "start.json").write_text(json.dumps({"config": config, "parent": parent, "suites": suites}))
        how: dict[str, Any] = {"ok": done, "killed": not done, "result": {"candidate": 2} if done else None}
        stages.append(records.Stage(name=stage.label, started_at=records.now(), run=run.name, **how))
    fields: dict[str, Any] = {"number": 1, "status": "failed", "started_at": records.now(), "incumbent": 1}
    record = records.CycleRecord(stages=stages, run=stages[-1].run, **fields)
    settings.path("cycles").mkdir()
    records.write(settings, record)

    def kept(own: str) -> list[str]:
        now = changed(settings, ("cycle.recipe", own))
        found, _ = unfinished_training(now, 2, 1, 1)
        return [stage.name for stage in found.stages] if found else []

    assert kept(TWO % ("", "")) == ["train-sft", "train"]
    assert kept(TWO % ("", ", seed: 5")) == ["train-sft"]
    assert kept(TWO % (", seed: 5", "")) == []
    assert kept(f"[{{stage: train, name: first}}, {(TWO % ('', ''))[1:]}") == []
    assert kept(f"[{{stage: reward-model}}, {(TWO % ('', ''))[1:]}") == ["train-sft", "train"]
    stages[1].killed = False
    records.write(settings, record)
    assert kept(TWO % ("", "")) == [], "it failed by itself"


def test_trained_is_the_version_that_rewards_and_nothing_before_there_is_one(
    home_with_policy: Settings, model: Path
) -> None:
    settings = changed(home_with_policy, ("cycle.recipe", "rlhf"), ("feedback.scoring.model.name", TRAINED))
    scoring = settings.resolved().feedback.scoring
    assert (scoring.human.model, scoring.model) == (None, None)
    store = settings.stores().reward_models
    for version in (1, 2):
        store.publish(model, parent=None, lineage={}, metrics={})
        store.promote(version, expected=store.serving(), who="test", why="test")
    store.promote(1, expected=store.serving(), who="test", why="test")
    scoring = settings.resolved().feedback.scoring
    assert scoring.human.model is not None
    assert scoring.model is not None
    assert scoring.human.model.name == scoring.model.name == str(store.get(1).path)


@pytest.mark.parametrize(
    ("kinds", "algorithm"),
    [
        (["thumb", "thumb", "preference"], "kto"),
        (["thumb", "preference", "preference"], "dpo"),
        (["correction", "correction", "thumb"], "sft"),
        (["thumb", "preference"], "dpo"),
    ],
)
def test_offline_learns_by_the_kind_of_feedback_that_makes_most_items(
    home_with_policy: Settings, kinds: list[str], algorithm: str
) -> None:
    settings = changed(home_with_policy, ("cycle.recipe", "offline"))
    lake = settings.lake()
    lake.create()
    put(lake, "interactions", [interaction(f"r{i}", response=f"four {i}") for i in range(len(kinds) + 1)])
    of_kind: dict[str, dict[str, Any]] = {
        "thumb": {"value": 1},
        "preference": {"rejected_response_id": f"r{len(kinds)}"},
        "correction": {"text": "better"},
    }
    put(lake, "feedback", [said(f"f{i}", f"r{i}", kind, **of_kind[kind]) for i, kind in enumerate(kinds)])
    (stage,) = recipes.stages(settings)
    assert settings.of_stage(stage).train.algorithm.name == algorithm
    named = changed(settings, ("train.algorithm.name", "sft"))
    assert recipes.stages(named) == recipes.stages(home_with_policy) == [RecipeStage(stage="train")]


def test_offline_counts_responses_that_it_could_learn_from_and_a_session_once(home_with_policy: Settings) -> None:
    settings = changed(home_with_policy, ("cycle.recipe", "offline"))
    lake = settings.lake()
    lake.create()
    of_status = {"a": "complete", "b": "imported", "cut": "aborted", "hidden": "redacted"}
    put(lake, "interactions", [interaction(name, status=status) for name, status in of_status.items()])

    def algorithm() -> str:
        (stage,) = recipes.stages(settings)
        return str(stage.set["algorithm"]["name"])

    of_session = session_rows(said("talk", "", "thumb", value=1), ["gone", "a", "b"])  # two of the three are there
    put(lake, "feedback", [said("c", "b", "correction", text="x"), *of_session])
    assert algorithm() == "kto", "a thumb on the session's last response, and one correction"
    put(lake, "feedback", [said(f"t{i}", name, "thumb", value=1) for i, name in enumerate(("cut", "hidden"))])
    put(lake, "feedback", [said("d", "a", "correction", text="x"), said("d2", "a", "correction", text="y")])
    assert algorithm() == "sft", "corrections of two responses"
    put(lake, "feedback", [said(f"r{i}", "a", "rating", value=1, name="stars") for i in range(9)])
    put(lake, "interactions", [interaction("a", tenant="other")])
    put(lake, "feedback", [said(f"o{i}", "b", "thumb", value=1, tenant="other") for i in range(3)])
    assert algorithm() == "sft", "ratings teach none of the three, and another tenant has no such response"


def test_a_cycle_without_enough_feedback_for_a_reward_model_says_so_and_trains_nothing(
    home_with_policy: Settings, nothing_left: Callable[[], list[str]]
) -> None:
    settings = changed(home_with_policy, ("cycle.recipe", "rlhf"))
    lake = settings.lake()
    lake.create()
    put(lake, "interactions", [interaction("r1")])
    put(lake, "feedback", [said("f1", "r1", "thumb", value=1)])
    record = run_cycle(settings)
    assert record.status == "skipped"
    assert record.reason == "there is no reward model yet: it needs 64 pieces of feedback, and has 1"
    assert [stage.name for stage in record.stages] == ["score"]
    assert nothing_left() == []


@pytest.mark.parametrize(
    ("before", "now", "new"),
    [([], 5, 5), ([100], 160, 60), ([100_000], 40_000, 40_000), ([100, None], 130, 30), ([100, 50], 60, 10)],
)
def test_what_is_new_is_counted_from_the_last_time_also_where_rows_have_been_removed(
    before: list[int | None], now: int, new: int
) -> None:
    assert records.new_rows(now, before) == new


@pytest.mark.long
def test_a_reward_model_that_failed_to_be_trained_is_tried_again_with_the_same_feedback(
    home_with_policy: Settings,
) -> None:
    settings = changed(home_with_policy, ("cycle.recipe", "rlhf"), ("train.reward_model.min_new_feedback", "1"))
    lake = settings.lake()
    lake.create()
    put(lake, "interactions", [interaction("r1")])
    put(lake, "feedback", [said("f1", "r1", "thumb", value=1)])
    stage = records.Stage(name="reward-model", started_at=records.now(), seconds=1.0, ok=False)
    failed = records.CycleRecord(number=1, status="failed", started_at=records.now(), feedback=1, stages=[stage])
    settings.path("cycles").mkdir()
    records.write(settings, failed)
    record = run_cycle(settings)
    assert [stage.name for stage in record.stages] == ["score", "reward-model"]
    assert record.reason is not None
    assert "there is no reward model yet: 1 usable items of feedback" in record.reason


def test_a_reward_model_that_is_marked_for_retraining_rewards_nothing(home_with_policy: Settings, model: Path) -> None:
    settings = changed(home_with_policy, ("cycle.recipe", "rlhf"))
    store = settings.stores().reward_models
    store.publish(model, parent=None, lineage={}, metrics={})
    store.promote(1, expected=None, who="test", why="test")
    assert settings.resolved().feedback.scoring.human.model is not None
    store.record_erasure(1, certainty="yes", why="w", retrain=True)
    assert settings.resolved().feedback.scoring.human.model is None


def fill(settings: Settings, *kinds: str) -> None:
    """A lake with two responses to a prompt of its own for each of these kinds of feedback, and that feedback."""
    lake = settings.lake()
    lake.create()
    rows = []
    for i in range(len(kinds)):
        prompt = {"prompt": f"add {i}", "prompt_token_ids": [2, 2 + i // 20, 5 + i % 20]}
        rows += [interaction(f"r{i}", **prompt), interaction(f"r{i}-other", response="five", **prompt)]
    put(lake, "interactions", rows or [interaction("r")])
    of_kind: dict[str, dict[str, Any]] = {
        "thumb": {"value": 1},
        "rating": {"value": 4, "name": "stars"},
        "preference": {},
        "correction": {"text": "better"},
        "comment": {"text": "hm"},
    }
    feedback = [said(f"f{i}", f"r{i}", kind, **of_kind[kind]) for i, kind in enumerate(kinds)]
    for row in feedback:
        if row["kind"] == "preference":
            row["rejected_response_id"] = f"{row['response_id']}-other"
    put(lake, "feedback", feedback)


SMALL = (
    ("cycle.recipe", "auto"),
    ("train.data.min_prompts", "9"),  # and a tenth is held out: 10 are needed
    ("train.data.prompts_per_step", "4"),
    ("train.reward_model.min_items", "16"),  # and a fifth is held out: 20 are needed
    ("train.reward_model.min_new_feedback", "20"),
)


@pytest.mark.parametrize(
    ("kinds", "recipe", "algorithm", "says"),
    [
        (["thumb"] * 20, "rlhf", "grpo", "enough for a reward model: 16 items to learn from and 4 held out (20 votes)"),
        (["thumb"] * 12 + ["rating"] * 8, "rlhf", "grpo", "16 items to learn from and 4 held out (20 votes)"),
        (["thumb"] * 19, "offline", "kto", "kto, as there is no reward model yet: 17 items to learn from"),
        (["preference"] * 10 + ["thumb"] * 4, "offline", "dpo", "9 items to learn from and 1 held out (10 pairs by"),
        (["correction"] * 10, "offline", "sft", "sft, as there is no reward model yet: 9 items to learn from"),
        (["thumb"] * 9 + ["comment"] * 20, None, None, "; kto needs 9 items; there are 8 items to learn from and 1"),
        ([], None, None, "too little feedback to learn from: a reward model needs 16 items of feedback, and 20 new"),
    ],
)
def test_auto_is_rlhf_or_offline_by_how_much_feedback_of_which_kind_there_is(
    home_with_policy: Settings, kinds: list[str], recipe: str | None, algorithm: str | None, says: str
) -> None:
    settings = changed(home_with_policy, *SMALL, ("feedback.scoring.rules.exact.weight", "0"))
    fill(settings, *kinds)
    choice = recipes.choose(settings)
    assert choice.recipe == recipe
    assert says in choice.why
    if choice.settings is None:
        assert recipe is None
        return
    assert choice.settings.cycle.recipe == recipe
    assert choice.settings.train.algorithm.name == algorithm
    changed(choice.settings)  # the stages' processes read it


def test_auto_goes_on_by_the_reward_model_that_there_is_however_little_is_left_of_the_feedback(
    home_with_policy: Settings, model: Path
) -> None:
    settings = changed(home_with_policy, *SMALL, ("feedback.scoring.rules.exact.weight", "0"))
    fill(settings, "thumb")
    store = settings.stores().reward_models
    store.publish(model, parent=None, lineage={}, metrics={})
    store.promote(1, expected=None, who="test", why="test")
    assert recipes.choose(settings).recipe == "rlhf"
    store.record_erasure(1, certainty="yes", why="w", retrain=True)
    assert recipes.choose(settings).recipe is None


@pytest.mark.parametrize(
    "without",
    [
        ("train.reward_model.weights.thumb", "0"),
        ("feedback.scoring.human.thumbs", "0"),
        ("train.rollout.max_model_len", "7"),  # the reward model reads the prompt's text, of more tokens than its ids
    ],
)
def test_auto_learns_offline_from_feedback_that_makes_no_items_for_a_reward_model(
    home_with_policy: Settings, without: tuple[str, str]
) -> None:
    own = (("feedback.scoring.rules.exact.weight", "0"), ("train.rollout.max_tokens", "2"))
    settings = changed(home_with_policy, *SMALL, *own, without)
    fill(settings, *["thumb"] * 20)
    choice = recipes.choose(settings)
    assert (choice.recipe, choice.why.split(",")[0]) == ("offline", "kto"), choice.why


def test_auto_learns_offline_while_a_reward_model_that_was_not_kept_waits_for_more_feedback(
    home_with_policy: Settings,
) -> None:
    settings = changed(home_with_policy, *SMALL, ("feedback.scoring.rules.exact.weight", "0"))
    fill(settings, *["thumb"] * 39)
    assert recipes.choose(settings).recipe == "rlhf"
    stage = records.Stage(name="reward-model", started_at=records.now(), ok=True, result={"reward_model": 1})
    settings.path("cycles").mkdir()
    for feedback, recipe in ((39, "offline"), (20, "offline"), (19, "rlhf")):
        fields: dict[str, Any] = {"status": "skipped", "started_at": records.now(), "feedback": feedback}
        records.write(settings, records.CycleRecord(number=1, stages=[stage], **fields))
        assert recipes.choose(settings).recipe == recipe


def test_auto_trains_for_an_erasures_mark_once_and_learns_offline_where_that_model_was_not_kept(
    home_with_policy: Settings, model: Path
) -> None:
    settings = changed(home_with_policy, *SMALL, ("feedback.scoring.rules.exact.weight", "0"))
    fill(settings, *["thumb"] * 40)
    stage = records.Stage(name="reward-model", started_at=records.now(), ok=True)
    fields: dict[str, Any] = {"status": "skipped", "started_at": records.now(), "feedback": 40}
    settings.path("cycles").mkdir(exist_ok=True)
    records.write(settings, records.CycleRecord(number=1, stages=[stage], **fields))
    store = settings.stores().reward_models
    store.publish(model, parent=None, lineage={}, metrics={})
    store.promote(1, expected=None, who="test", why="test")
    store.record_erasure(1, certainty="yes", why="erased", retrain=True)
    assert recipes.choose(settings).recipe == "rlhf"
    store.publish(model, parent=None, lineage={}, metrics={})
    assert recipes.choose(settings).recipe == "offline"


def test_feedback_on_prompts_that_are_held_out_does_not_count(home_with_policy: Settings) -> None:
    settings = changed(home_with_policy, *SMALL)
    fill(settings, *["thumb"] * 40)
    assert "(40 votes)" in recipes.choose(settings).why
    held_out = sum(position(f"add {i}") < 0.3 for i in range(40))
    assert 0 < held_out < 20
    assert f"({40 - held_out} votes)" in recipes.choose(changed(settings, ("evaluation.holdout", "0.3"))).why
    settings.path("suite.jsonl").write_text('{"id": "1", "prompt": "add 7"}\n')
    assert "(39 votes)" in recipes.choose(settings).why


def test_auto_learns_by_a_rule_while_people_have_said_too_little_and_offline_by_an_algorithm_that_is_named(
    home_with_policy: Settings,
) -> None:
    settings = changed(home_with_policy, *SMALL)  # whose scoring has a rule
    fill(settings, *["thumb"] * 19)
    choice = recipes.choose(settings)
    assert (choice.recipe, "there is no reward model" in choice.why) == ("rlvr", True)
    choice = recipes.choose(changed(settings, ("train.algorithm.name", "dpo")))
    assert choice.recipe == "offline"
    assert choice.settings is not None
    assert choice.settings.train.algorithm.name == "dpo"


def test_auto_takes_settings_of_sampling_back_where_it_learns_offline(home_with_policy: Settings) -> None:
    of_sampling = [("train.algorithm.group_size", "4"), ("train.rollout.temperature", "0.9"), ("train.epochs", "2")]
    own = ("train.data.prompts", '[{"path": "own.jsonl"}]')
    rule = ("feedback.scoring.rules.exact.weight", "0")
    settings = changed(home_with_policy, *SMALL, rule, own, *of_sampling)
    fill(settings, *["thumb"] * 19)
    choice = recipes.choose(settings)
    assert choice.recipe == "offline"
    assert choice.settings is not None
    assert (choice.settings.train.algorithm.name, choice.settings.train.data.prompts) == ("kto", [])


def test_a_cycle_of_auto_with_too_little_feedback_is_skipped_with_the_counts_and_what_is_missing(
    home_with_policy: Settings, nothing_left: Callable[[], list[str]]
) -> None:
    settings = changed(home_with_policy, *SMALL, ("feedback.scoring.rules.exact.weight", "0"))
    fill(settings, "thumb", "correction")
    record = run_cycle(settings)
    assert (record.status, record.recipe) == ("skipped", None)
    assert record.reason == record.recipe_reason
    assert record.reason == (
        "too little feedback to learn from: a reward model needs 16 items of feedback, and 20 new feedbacks; there are "
        "2 new ones, and 1 items to learn from and 1 held out (1 pairs by correction, 1 votes); left out: none; kto "
        "needs 9 items; there are 1 items to learn from and 0 held out (1 thumbs up); left out: none"
    )
    assert records.load_all(settings)[-1].recipe_reason == record.reason
    assert nothing_left() == []


def changed(settings: Settings, *options: tuple[str, str]) -> Settings:
    return root.load(settings.snapshot(), options, environment={})
