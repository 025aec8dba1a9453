from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from deploy.config import describe, root
from deploy.config.root import ConfigError, Settings


def test_the_command_line_beats_the_environment_which_beats_the_file_which_beats_the_default(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("serve: {port: 1001, host: file, replica_name: file}\n")
    environment = {"MILLRACE__SERVE__PORT": "1002", "MILLRACE__SERVE__HOST": "environment"}
    settings = root.load(file, [("serve.port", "1003")], environment)
    assert (settings.serve.port, settings.serve.host) == (1003, "environment")
    assert settings.serve.replica_name == "file"
    assert settings.serve.tenant == "default"


def test_a_millrace_yaml_of_the_working_folder_is_read_without_being_named(tmp_path: Path) -> None:
    Path("millrace.yaml").write_text("schedule: {interval_seconds: 5}\n")
    assert root.load().schedule.interval_seconds == 5


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("serve.prot", "serve.port"),
        ("servee.port", "serve.port"),
        ("port", "serve.port"),
        ("serve.engine.max_seqs", "serve.engine.max_num_seqs"),
        ("train.algorithm.groupsize", "train.algorithm.group_size"),
        ("schedul.cron", "schedule.cron"),
        ("evalution", "evaluation"),
        ("hom", "home"),
    ],
)
def test_an_unknown_key_is_an_error_that_names_the_nearest_right_one_and_the_source(
    key: str, near: str, tmp_path: Path
) -> None:
    file = tmp_path / "my.yaml"
    value: object = 1
    for part in reversed(key.split(".")):
        value = {part: value}
    file.write_text(yaml.safe_dump(value))
    for load, source in (
        (lambda: root.load(file), str(file)),
        (lambda: root.load(None, [(key, "1")]), f"--{key}"),
        (lambda: root.load(None, [], {name: "1"}), name := f"MILLRACE__{key.upper().replace('.', '__')}"),
    ):
        with pytest.raises(ConfigError) as error:
            load()
        assert f"unknown setting {key} " in str(error.value)
        assert f"did you mean {near}?" in str(error.value)
        assert source in str(error.value)


def test_every_unknown_key_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        root.load(None, [("serve.prot", "1")], {"MILLRACE__TRAIN__STEP": "1"})
    assert "serve.port" in str(error.value)
    assert "train.steps" in str(error.value)


@pytest.mark.parametrize(
    ("key", "text", "parts"),
    [
        ("serve.port", "abc", ["serve.port", "'abc'", "--serve.port"]),
        ("serve.port", "70000", ["serve.port", "70000"]),
        ("train.algorithm.kl.estimator", "k9", ["train.algorithm.kl.estimator", "'k9'", "'k3'"]),
        ("train.optimizer.betas", "[0.9]", ["train.optimizer.betas"]),
        ("schedule.interval_seconds", "-1", ["schedule.interval_seconds", "-1"]),
        ("feedback.scoring.rules.mine.function", "no colon", ["feedback.scoring.rules.mine.function", "no colon"]),
    ],
)
def test_a_bad_value_is_named_with_its_key_and_source(key: str, text: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        root.load(None, [(key, text)])
    for part in parts:
        assert part in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("in_file", "in_environment", "on_the_line", "where"),
    [
        ({"ranks": 3, "rollout": {"tensor_parallel_size": 2}}, "STEPS", "train.seed", "(from {file})"),
        (
            {"rollout": {"tensor_parallel_size": 2}},
            "STEPS",
            "train.ranks",
            "(train.rollout.tensor_parallel_size from {file}; train.ranks from the command line (--train.ranks))",
        ),
        (
            {"rollout": {"tensor_parallel_size": 2}},
            "RANKS",
            "train.steps",
            "(train.rollout.tensor_parallel_size from {file}; train.ranks from the environment "
            "(MILLRACE__TRAIN__RANKS))",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_named_with_where_they_came_from_and_no_others(
    in_file: dict[str, object], in_environment: str, on_the_line: str, where: str, tmp_path: Path
) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(yaml.safe_dump({"train": in_file}))
    with pytest.raises(ConfigError) as error:
        root.load(file, [(on_the_line, "3")], {f"MILLRACE__TRAIN__{in_environment}": "3"})
    assert "train.rollout.tensor_parallel_size=2 does not divide train.ranks=3" in str(error.value)
    assert str(error.value).endswith(where.format(file=file))


def test_text_becomes_the_type_of_its_setting() -> None:
    settings = root.load(
        None,
        [
            ("train.optimizer.betas", "[0.8, 0.9]"),
            ("train.optimizer.learning_rate", "3e-4"),
            ("serve.engine.enforce_eager", "false"),
            ("serve.engine.max_model_len", "null"),
            ("serve.replica_name", "1"),
            ("serve.engine.extra.block_size", "16"),
        ],
    )
    assert settings.train.optimizer.betas == (0.8, 0.9)
    assert settings.train.optimizer.learning_rate == 3e-4
    assert settings.serve.engine.enforce_eager is False
    assert settings.serve.engine.max_model_len is None
    assert settings.serve.replica_name == "1"
    assert settings.serve.engine.extra == {"block_size": 16}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("serve:\n  port: 1\nserve:\n  host: a\n", "line 3: the key serve stands in line 1 already"),
        ("serve: {port: 1, port: 2}\n", "line 1: the key port stands in line 1 already"),
        (
            "feedback:\n  scoring:\n    rules:\n      no:\n        function: m:f\n",
            'line 4: YAML reads the key no as true or false, and keys are texts: quote it, "no"',
        ),
        ("evaluation:\n  suites:\n    7: {path: a}\n", "line 3: YAML reads the key 7 as a number"),
        ("serve: {on: 1}\n", "line 1: YAML reads the key on as true or false"),
    ],
)
def test_a_key_that_yaml_would_read_otherwise_or_that_stands_twice_is_named_with_its_line(
    content: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError) as error:
        root.load(file)
    assert f"the config file {file}, {message}" in str(error.value)


def test_a_mapping_on_the_command_line_may_have_no_key_twice() -> None:
    with pytest.raises(ConfigError, match=r"^serve.engine.extra: line 1: the key a stands in line 1 already"):
        root.load(None, [("serve.engine.extra", "{a: 1, a: 2}")])


def test_anchors_and_merges_are_taken_as_ever(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("serve:\n  engine: {extra: {a: &x {b: 1}, c: *x, d: {<<: *x, e: 2}}}\n")
    assert root.load(file).serve.engine.extra == {"a": {"b": 1}, "c": {"b": 1}, "d": {"b": 1, "e": 2}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("serve: {port: abc}", "serve.port: must be a whole number, not 'abc' (from"),
        ("serve: {port: 70000}", "serve.port: must be 65535 or less, not 70000 (from"),
        ("serve: {access_log: maybe}", "serve.access_log: must be true or false, not 'maybe' (from"),
        ("serve: {host: 1}", "serve.host: must be a text, not 1 (from"),
        (
            "serve: {host: no}",
            "must be a text (YAML reads no, off, on and yes as true or false: quote them), not False",
        ),
        ("serve: {swap: {mode: fast}}", "serve.swap.mode: must be 'keep' or 'wait', not 'fast' (from"),
        ("serve: {engine: 3}", "serve.engine: must be a section, with settings below it, not 3 (from"),
        ("serve: {model_name: ''}", "serve.model_name: must be a text that is not empty, not '' (from"),
        ("train: {optimizer: {betas: 3}}", "train.optimizer.betas: must be a list, not 3 (from"),
        ("serve: {proxies: [here]}", "'here' is no address or network, such as 10.0.0.7 or 10.1.0.0/16"),
    ],
)
def test_what_a_setting_must_be_is_said_in_our_words(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError) as error:
        root.load(file)
    assert message in str(error.value)


@pytest.mark.parametrize("content", ["- a list", "a: [", "just text"])
def test_a_config_file_that_is_no_mapping_is_named(content: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"bad\.yaml"):
        root.load(file)


def test_a_config_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        root.load(Path("nowhere.yaml"))


def test_a_section_whose_lines_are_all_commented_out_is_empty() -> None:
    Path("millrace.yaml").write_text("serve:\n  # port: 1\n  engine:\n    # seed: 1\n")
    assert root.load().serve.port == Settings().serve.port


def test_paths_are_relative_to_home_unless_absolute(tmp_path: Path) -> None:
    settings = root.load(
        None, [("home", "there"), ("feedback.lake.uri", "s3://bucket/lake"), ("train.runs", "/elsewhere")]
    )
    assert settings.home == tmp_path / "there"
    resolved = settings.resolved()
    assert resolved.serve.policies == str(tmp_path / "there" / "policies")
    assert resolved.feedback.journal.folder == str(tmp_path / "there" / "journal")
    assert resolved.feedback.lake.uri == "s3://bucket/lake"
    assert resolved.train.runs == Path("/elsewhere")


def test_the_gates_engine_is_as_the_servers_unless_it_is_set_itself() -> None:
    served = [("serve.engine.dtype", "bfloat16"), ("serve.engine.extra.quantization", "fp8")]
    judging = root.load(None, served).resolved().evaluation.engine
    assert (judging.dtype, judging.extra) == ("bfloat16", {"quantization": "fp8"})
    own = [("evaluation.engine.dtype", "float32"), ("evaluation.engine.extra", "{}")]
    judging = root.load(None, [*served, *own]).resolved().evaluation.engine
    assert (judging.dtype, judging.extra) == ("float32", {})
    assert root.load(None, []).resolved().evaluation.engine.dtype == "auto"


def test_a_setting_of_the_servers_engine_has_no_second_place_among_the_extra_ones() -> None:
    with pytest.raises(ConfigError, match=r"dtype is a setting of its own: set serve\.engine\.dtype"):
        root.load(None, [("serve.engine.extra.dtype", "bfloat16")])


def test_a_snapshot_holds_everything_and_a_child_reads_the_same_from_it(tmp_path: Path) -> None:
    settings = root.load(None, [("home", "h"), ("serve.port", "1"), ("train.optimizer.betas", "[0.1, 0.2]")])
    assert root.load(settings.snapshot(), [], {}) == settings
    assert settings.snapshot() == settings.snapshot()


def test_a_child_is_given_no_settings_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE__SERVE__PORT", "1")
    monkeypatch.setenv("OTHER", "stays")
    environment = root.child_environment({"MORE": "x"})
    assert "MILLRACE__SERVE__PORT" not in environment
    assert (environment["OTHER"], environment["MORE"]) == ("stays", "x")


def test_the_printed_config_loads_as_the_same_settings(tmp_path: Path) -> None:
    settings = root.load(None, [("serve.port", "1234"), ("evaluation.scorer", "a:b")])
    file = tmp_path / "printed.yaml"
    file.write_text(describe.to_yaml(settings, comments=True))
    assert root.load(file, [], {}) == settings
    assert "# Port to listen on. (default: 8000)\n  port: 1234" in file.read_text()


def test_every_setting_says_what_it_means() -> None:
    assert [setting.key for setting in describe.settings_of(Settings) if not setting.description] == []


@given(st.text(min_size=1).filter(lambda text: not text.startswith("MILLRACE")))
def test_any_text_given_for_a_text_setting_stays_itself(text: str) -> None:
    expected = None if text in ("null", "none") else text
    assert root.load(None, [("train.reward", text)], {}).train.reward == expected


JUDGE = [
    (f"feedback.scoring.judge.{name}", value)
    for name, value in {"url": "http://127.0.0.1:9/v1", "model": "m", "rubric": "{response}?"}.items()
]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([("evaluation.scorer", "judge")], r"evaluation\.scorer=judge needs a judge: set feedback\.scoring\.judge"),
        ([("evaluation.scorer", "pairwise")], r"evaluation\.scorer=pairwise needs a judge"),
        (
            [("evaluation.scorer", "reward_model")],
            r"evaluation\.holdout is 0: set it, such as to 0\.1, or set feedback",
        ),
        (
            [("evaluation.scorer", "reward_model"), ("feedback.scoring.model.name", "trained")],
            r"evaluation\.holdout is 0",
        ),
        ([*JUDGE, ("evaluation.scorer", "judge"), ("evaluation.gate.metric", "accuracy")], "set gate.metric to reward"),
        ([("evaluation.holdout", "1")], r"evaluation\.holdout"),
    ],
)
def test_a_scorer_that_lacks_what_it_needs_is_refused_by_name(options: list[tuple[str, str]], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        root.load(None, options, {})


def test_a_scorer_with_what_it_needs_is_taken(tmp_path: Path) -> None:
    home = ("home", str(tmp_path))
    for scorer in ("judge", "pairwise"):
        settings = root.load(None, [home, *JUDGE, ("evaluation.scorer", scorer)], {})
        judge = settings.evaluation_sources().judge
        assert judge is not None
        assert judge.cache == str(tmp_path / "judge")
    held_out = root.load(None, [home, ("evaluation.scorer", "reward_model"), ("evaluation.holdout", "0.1")], {})
    assert held_out.trains_reward_model_to_evaluate
    assert held_out.evaluation_sources().none_yet == "train it: millrace train --reward-model --held-out"
    own = [("evaluation.scorer", "reward_model"), ("feedback.scoring.model.name", "some/model")]
    with pytest.raises(ConfigError, match=r"rewards training too.*set feedback\.scoring\.model\.weight to 0"):
        root.load(None, [home, *own], {})
    assert not root.load(None, [home, *own, ("train.algorithm.name", "dpo")], {}).trains_reward_model_to_evaluate
    fixed = root.load(None, [home, *own, ("feedback.scoring.model.weight", "0")], {})
    assert not fixed.trains_reward_model_to_evaluate
    model = fixed.evaluation_sources().reward_model
    assert model is not None
    assert (model.name, fixed.evaluation_sources().version) == ("some/model", None)


def test_the_reward_model_to_evaluate_by_learns_from_the_slice_and_no_other_run_does(tmp_path: Path) -> None:
    (tmp_path / "suite.jsonl").write_text('{"id": "1", "prompt": "x"}\n')
    settings = root.load(None, [("home", str(tmp_path)), ("evaluation.holdout", "0.25")], {})
    policy, proxy = settings.training(), settings.training(reward_model=True)
    judge = settings.training(reward_model=True, held_out=True)
    assert [(c.data.holdout, c.data.holdout_side) for c in (policy, proxy, judge)] == [
        (0.25, "rest"),
        (0.25, "rest"),
        (0.25, "slice"),
    ]
    assert [c.data.exclude_suites for c in (policy, proxy, judge)] == [[tmp_path / "suite.jsonl"]] * 2 + [[]]
    assert judge.algorithm.name == "reward_model"


OF_THE_SLICE = "{algorithm: {name: reward_model}, data: {holdout_side: slice}}"
FIXED = [("evaluation.scorer", "reward_model"), ("feedback.scoring.model.name", "./judge")]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            [("feedback.scoring.model.weight", "0"), ("feedback.scoring.human.model.name", "judge")],
            r"feedback\.scoring\.human\.model rewards training too.* set feedback\.scoring\.human\.weight to 0",
        ),
        (
            [("train.algorithm.name", "dpo"), ("cycle.recipe", "[{stage: train, set: {algorithm: {name: grpo}}}]")],
            r"feedback\.scoring\.model rewards training too",
        ),
    ],
)
def test_a_model_that_rewards_any_stage_is_refused_as_the_gates_whatever_names_it(
    tmp_path: Path, options: list[tuple[str, str]], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        root.load(None, [("home", str(tmp_path)), *FIXED, *options], {})


def test_stages_that_are_not_rewarded_by_the_gates_model_load_in_their_processes_too(tmp_path: Path) -> None:
    recipe = "[{stage: reward-model}, {stage: train, set: {reward_weights: {model: 0}}}]"
    settings = root.load(None, [("home", str(tmp_path)), *FIXED, ("cycle.recipe", recipe)], {})
    for stage in settings.cycle.stages:
        child = root.load(settings.of_stage(stage).snapshot(), [], {})
        assert child.train == settings.of_stage(stage).train


def test_where_the_judge_that_rewards_training_decides_in_the_gate_the_evaluation_says_so(tmp_path: Path) -> None:
    same = [("home", str(tmp_path)), *JUDGE, ("evaluation.scorer", "judge")]
    note = root.load(None, [*same, ("cycle.recipe", "rlaif")], {}).evaluation_sources().note
    assert note is not None
    assert note.endswith(" it rewards training by the same rubric: the gate measures what is optimised")
    for other in (
        ("evaluation.scorer", "pairwise"),
        ("feedback.scoring.judge.weight", "0"),
        ("train.reward", "a:b"),
        ("train.algorithm.name", "dpo"),
    ):
        assert root.load(None, [*same, other], {}).evaluation_sources().note is None


@pytest.mark.parametrize(
    "options",
    [
        [("train.data.holdout_side", "slice"), ("train.algorithm.name", "reward_model")],
        [("cycle.recipe", f"[{{stage: reward-model, set: {OF_THE_SLICE}}}, {{stage: train}}]")],
    ],
)
def test_only_the_reward_model_to_evaluate_by_may_be_set_to_learn_from_the_slice(
    tmp_path: Path, options: list[tuple[str, str]]
) -> None:
    with pytest.raises(ConfigError, match=r"train\.data\.holdout_side=slice: the reward model that evaluation scores"):
        root.load(None, [("home", str(tmp_path)), ("evaluation.holdout", "0.2"), *options], {})


def test_a_cycle_trains_a_reward_model_to_compare_by_where_feedback_rewards_training(tmp_path: Path) -> None:
    def compares(*options: tuple[str, str]) -> bool:
        settings = root.load(None, [("home", str(tmp_path)), *options], {})
        assert settings.compares_by_held_out_feedback == settings.trains_reward_model_to_evaluate
        return settings.compares_by_held_out_feedback

    rlhf, share = ("cycle.recipe", "rlhf"), ("evaluation.holdout", "0.2")
    assert compares(rlhf, share)
    assert not compares(rlhf)
    assert not compares(("cycle.recipe", "offline"), share)
    assert not compares(rlhf, share, ("evaluation.gate.guardrails.holdout_reward", "null"))
