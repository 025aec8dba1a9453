"""``millrace score``, and the settings of reward sources as the command line, the environment and files give them."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from feedback_rows import interaction, put, said, table_of, thumb

from deploy import cli
from deploy.config import describe, root
from deploy.config.root import ConfigError, Settings
from deploy.loop.preflight import check
from feedback.config import ScoringConfig
from feedback.events import session_rows
from feedback.lake.tables import Lake

JUDGE = {"url": "http://x/v1", "model": "m", "rubric": "{response}"}


@pytest.fixture
def lake(settings: Settings) -> Lake:
    made = Lake(settings.resolved().feedback.lake.uri, settings.feedback.lake)
    made.create()
    put(made, "interactions", [interaction("a"), interaction("b", metadata={}), interaction("c", response="5")])
    put(made, "feedback", [thumb("a", 1)])
    return made


def run(settings: Settings, *arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = cli.run(["--config", str(settings.snapshot()), "score", *arguments])
    output = capsys.readouterr()
    return code, output.out, output.err


def test_score_says_what_each_source_gave_and_why_the_rest_is_missing(
    settings: Settings, lake: Lake, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    code, printed, _ = run(settings, "--json-out", str(out), capsys=capsys)
    assert code == 0
    assert printed.startswith("scored 3 responses in ")
    assert "  human: 1, missing: 2 no vote\n" in printed
    assert "  exact: 2, missing: 1 no 'answer' in the response's metadata\n" in printed
    result = json.loads(out.read_text())
    assert (result["scored"], result["missing"], result["retried"]) == (3, 1, 0)
    assert result["components"] == {"human": 1, "exact": 2}
    assert result["reasons"]["human"] == {"no vote": 2}
    assert result["counts"]["rewards"] == 3
    assert run(settings, capsys=capsys)[1].startswith("scored 0 responses")


def test_scoring_can_give_way_to_what_somebody_waits_for(
    settings: Settings, lake: Lake, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []
    monkeypatch.setattr("os.nice", given.append)  # of the tests' own process it could not be taken back
    assert run(settings, "--nice", "7", capsys=capsys)[0] == 0
    assert given == [7]
    assert run(settings, "--nice", "20", capsys=capsys)[0] == 2


def test_feedback_on_a_session_counts_once_however_many_responses_it_is_on(
    settings: Settings, lake: Lake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    click = said("click", "", "thumb", value=1)
    put(lake, "feedback", [*session_rows(click, ["r1", "r2", "r3"]), said("single~turn", "r1", "thumb", value=1)])
    assert lake.counts()["feedback"] == 5
    out = tmp_path / "out.json"
    assert run(settings, "--json-out", str(out), capsys=capsys)[0] == 0
    assert json.loads(out.read_text())["counts"]["feedback"] == 3


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--feedback.scoring.rules.mine.function", "no_such_module:f"], "error: rule no_such_module:f"),
        (["--feedback.scoring.rules.mine.sql", "length(respnse)"], "error: rule mine: DuckDB can't use"),
        (["--feedback.scoring.rules.mine.sql", "1", "--feedback.scoring.rules.mine.ready", "regex"], "exactly one of"),
        (["--feedback.scoring.rules.mine.raedy", "regex"], "did you mean feedback.scoring.rules.NAME.ready?"),
        (["--feedback.scoring.rules.judge.sql", "1"], "a rule can't be called 'judge'"),
        (["--feedback.scoring.model.name", "./nowhere/at/all"], "reward model ./nowhere/at/all"),
        (["--feedback.scoring.judge.url", "http://x/v1"], "feedback.scoring.judge.rubric"),
        (["--feedback.scoring.human.weight", "0", "--feedback.scoring.rules.exact.weight", "0"], "no reward source"),
    ],
)
def test_what_can_not_work_is_an_error_that_names_it_and_nothing_is_written(
    settings: Settings, lake: Lake, capsys: pytest.CaptureFixture[str], options: list[str], says: str
) -> None:
    code, _, err = run(settings, *options, capsys=capsys)
    assert code != 0
    assert says in err
    assert lake.counts()["rewards"] == 0


def test_rules_are_given_by_the_line_the_environment_and_the_file_and_come_together(tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text("feedback: {scoring: {rules: {a: {ready: exact_match, weight: 2}, b: {sql: '1'}}}}\n")
    environment = {
        "MILLRACE__FEEDBACK__SCORING__RULES": "{c: {ready: json_schema, json_schema: {type: object}}}",
        "MILLRACE__FEEDBACK__SCORING__RULES__A__REFERENCE": "gold",
    }
    line = [("feedback.scoring.rules.d.ready", "regex"), ("feedback.scoring.rules.d.pattern", "[0-9]+")]
    scoring = root.load(file, line, environment).feedback.scoring
    assert sorted(scoring.rules) == ["a", "b", "c", "d"]
    assert (scoring.rules["a"].weight, scoring.rules["a"].reference) == (2.0, "gold")
    assert scoring.rules["c"].json_schema == {"type": "object"}
    assert scoring.rules["d"].pattern == "[0-9]+"


def test_a_bad_rule_is_named_with_its_key_its_value_and_its_source(tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text("feedback: {scoring: {rules: {mine: {ready: regex, pattern: '('}}}}\n")
    with pytest.raises(ConfigError) as error:
        root.load(file)
    assert "feedback.scoring.rules.mine.pattern: no regular expression" in str(error.value)
    assert str(file) in str(error.value)


def test_training_is_rewarded_by_its_own_function_or_else_by_the_rules_that_have_a_weight(settings: Settings) -> None:
    reward = settings.rollout_reward()
    assert isinstance(reward, ScoringConfig)
    assert reward.for_rollouts == {"exact": 1.0}
    own = root.load(settings.snapshot(), [("train.reward", "deploy.examples.demo.task:reward")], {})
    assert own.rollout_reward() == "deploy.examples.demo.task:reward"
    check(own)
    none = root.load(settings.snapshot(), [("feedback.scoring.rules.exact.weight", "0")], {})
    assert none.rollout_reward() is None
    weighed = root.load(settings.snapshot(), [("train.reward_weights", "{exact: 3.0}")], {})
    assert weighed.rollout_reward().for_rollouts == {"exact": 3.0}  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"train\.reward_weights\.exakt: .*there are: exact"):
        check(root.load(settings.snapshot(), [("train.reward_weights", "{exakt: 3.0}")], {}))
    broken = root.load(settings.snapshot(), [("feedback.scoring.rules.mine.sql", "no_column")], {})
    with pytest.raises(ConfigError, match=r"feedback\.scoring\.rules\.mine: .*no_column"):
        check(broken)


def test_training_weighs_every_source_by_itself_and_no_source_that_is_not_there(settings: Settings) -> None:
    judge = [(f"feedback.scoring.judge.{key}", value) for key, value in JUDGE.items()]
    lines = [("feedback.scoring.model.name", "org/model"), *judge, ("feedback.scoring.human.model.name", "m")]
    weights = ("train.reward_weights", "{exact: 0, judge: 2, human: 0.5}")
    mixed = root.load(settings.snapshot(), [*lines, weights], {})
    reward = mixed.rollout_reward()
    assert isinstance(reward, ScoringConfig)
    assert reward.for_rollouts == {"human": 0.5, "exact": 0.0, "model": 1.0, "judge": 2.0}
    assert mixed.feedback.scoring.for_rollouts == {"human": 1.0, "exact": 1.0, "model": 1.0, "judge": 1.0}
    assert reward.judge == mixed.resolved().feedback.scoring.judge.model_copy(update={"weight": 2.0})  # type: ignore[union-attr]
    for name in ("human", "model", "judge"):
        alone = root.load(settings.snapshot(), [("train.reward_weights", f"{{{name}: 1}}")], {})
        with pytest.raises(ConfigError, match=rf"train\.reward_weights\.{name}: .* fresh responses; there are: exact$"):
            check(alone)


def test_the_rules_reach_a_training_job_by_its_file(settings: Settings, tmp_path: Path) -> None:
    from train.data.rewards import Reward
    from train.job import JobContext

    reward = settings.rollout_reward()
    context = JobContext(
        run="r", runs=tmp_path, policies=tmp_path, reward_models=tmp_path, lake_uri=str(tmp_path), reward=reward
    )
    there = JobContext.model_validate(json.loads(json.dumps(context.model_dump(mode="json"))))
    rows = table_of("interactions", [interaction("a"), interaction("b", response="5")])
    assert there.reward == reward is not None
    assert Reward(reward, 60)(rows).values == [1.0, 0.0]


def test_an_api_key_is_masked_where_settings_are_shown_and_reaches_children_by_a_file_of_this_users_alone(
    tmp_path: Path,
) -> None:
    key = "feedback.scoring.judge"
    judge = [(f"{key}.url", "http://x/v1"), (f"{key}.model", "m"), (f"{key}.rubric", "{response}")]
    settings = root.load(None, [("home", "h"), *judge], {f"MILLRACE__{key}.api_key".upper().replace(".", "__"): "123"})
    for shown in (describe.to_yaml(settings), describe.to_yaml(settings, comments=True)):
        assert "123" not in shown
    snapshot = settings.snapshot()
    assert stat.S_IMODE(snapshot.stat().st_mode) == 0o600
    assert root.load(snapshot, [], {}) == settings
    secret = root.load(snapshot, [], {}).feedback.scoring.judge
    assert secret is not None
    assert secret.api_key is not None
    assert secret.api_key.get_secret_value() == "123"
    printed = tmp_path / "printed.yaml"
    printed.write_text(describe.to_yaml(settings, comments=True))
    with pytest.raises(ConfigError, match=r"judge\.api_key: this is the mask"):
        root.load(printed, [], {})
    assert settings.resolved().feedback.scoring.judge.cache == str(tmp_path / "h" / "judge")  # type: ignore[union-attr]
