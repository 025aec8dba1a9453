"""No setting that opens somebody's store can be seen: in prints, files, messages, process lists."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from deploy import cli
from deploy.config import describe, root
from deploy.config.root import ConfigError
from feedback.config import FeedbackConfig, LakeConfig
from feedback.lake.tables import Lake, LakeError
from train.config.training import TrainConfig
from train.context import JUDGE_KEY, TEACHER_KEY, JobContext, api_keys, with_judge_key, with_teacher_key, write_job
from train.launch import read, run_job

KEY = "wJalrXUtnFEMI-K7MDENG"
JUDGES = "sk-judge-5b2f9c1d"
TEACHERS = "sk-of-the-teacher"
OPTIONS = {"aws_access_key_id": f"AKIA{KEY}", "aws_secret_access_key": KEY, "aws_region": f"region-{KEY}"}
LINE = ["--feedback.lake.storage_options", json.dumps(OPTIONS)]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_print_config_masks_every_option_of_the_store(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--print-config", *LINE]) == 0
    printed = capsys.readouterr().out
    assert KEY not in printed
    assert "aws_secret_access_key: '**********'" in printed


def test_inits_yaml_has_none_of_them_and_is_its_users_alone(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["init", "--model", str(model), "--home", "h", *LINE]) == 0, capsys.readouterr().err
    file = Path("millrace.yaml")
    assert "storage_options" not in file.read_text()
    assert mode(file) == 0o600
    assert holders(Path()) == set()


def test_what_a_command_makes_is_nothing_to_others_and_to_its_group_what_the_umask_says(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[int] = []
    monkeypatch.setattr(cli, "end_process", ends.append)
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # main() sets it for good, and the tests after this one may not keep it
    before = os.umask(0o022)
    try:
        for arguments in (["init", "--model", str(model), "--home", "h"], ["monitoring", "--home", "h", "--out", "m"]):
            monkeypatch.setattr("sys.argv", ["millrace", *arguments])
            cli.main()
    finally:
        os.umask(before)
    assert ends == [0, 0]
    made = [Path("h"), *Path("h").rglob("*")]
    assert [path for path in made if mode(path) & 0o007] == []
    assert mode(Path("h")) == 0o750
    assert {mode(path) for path in Path("m").iterdir()} == {0o644}
    assert mode(Path("m")) == 0o755


def test_a_snapshot_hands_them_to_children_and_is_its_users_alone() -> None:
    settings = root.load(None, [("home", "h"), ("feedback.lake.storage_options", json.dumps(OPTIONS))], {})
    snapshot = settings.snapshot()
    assert root.load(snapshot, [], {}).feedback.lake.store_options == OPTIONS
    assert mode(snapshot) == 0o600


@pytest.mark.parametrize("text", ["true", "0123456", "*x: [", "a: b"])
def test_an_option_of_the_store_is_the_text_that_the_environment_has(text: str) -> None:
    """Not what YAML would make of it."""
    loaded = root.load(None, [], {"MILLRACE__FEEDBACK__LAKE__STORAGE_OPTIONS__AWS_SECRET_ACCESS_KEY": text})
    assert loaded.feedback.lake.store_options == {"aws_secret_access_key": text}


def test_a_printed_mask_is_refused_as_an_option(tmp_path: Path) -> None:
    settings = root.load(None, [("feedback.lake.storage_options", json.dumps(OPTIONS))], {})
    printed = tmp_path / "printed.yaml"
    printed.write_text(describe.to_yaml(settings, comments=True))
    with pytest.raises(ConfigError, match=r"storage_options\.aws_secret_access_key: this is the mask"):
        root.load(printed, [], {})


def test_the_file_of_a_job_has_them_for_its_user_alone_and_nothing_else_of_the_run_has(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from serve.policies.store import PolicyStore

    store = PolicyStore(tmp_path / "policies")
    store.promote(store.publish(model, parent=None, lineage={}, metrics={}).version, who="a", why="b", expected=None)
    lake = Lake(str(tmp_path / "lake"), LakeConfig())
    lake.create()
    context = JobContext.model_validate(
        {
            "run": "r",
            "runs": tmp_path / "runs",
            "policies": store.root,
            "reward_models": tmp_path / "reward_models",
            "lake_uri": lake.uri,
            "lake": {"storage_options": OPTIONS},
            "reward": {"judge": {"url": "http://x/v1", "model": "m", "rubric": "{response}", "api_key": JUDGES}},
        }
    )
    context.folder.mkdir(parents=True)
    spec = context.folder / "job.json"
    spec.write_text("of an older version")
    spec.chmod(0o644)
    result = run_job(TrainConfig(launcher="torchrun"), context)  # in a process of its own, which reads the file
    assert "0 usable prompts" in str(result.reason)
    monkeypatch.delenv(JUDGE_KEY, raising=False)
    assert read(spec)[1] == with_judge_key(context, None)
    monkeypatch.setenv(JUDGE_KEY, JUDGES)
    assert read(spec)[1] == context
    assert read(spec)[1].lake.store_options == OPTIONS
    assert holders(tmp_path, JUDGES) == set(), "the judge's key goes by the environment alone"
    assert mode(spec) == 0o600
    assert holders(tmp_path) == {spec}

    teacher = {"url": "http://x/v1", "model": "m", "api_key": TEACHERS}
    config = TrainConfig.model_validate({"algorithm": {"name": "distill", "teacher": teacher}})
    assert api_keys(config, context) == {JUDGE_KEY: JUDGES, TEACHER_KEY: TEACHERS}
    assert write_job(config, context) == spec
    assert holders(tmp_path, TEACHERS) == set(), "so does the teacher's"
    assert read(spec)[0] == with_teacher_key(config, None)
    monkeypatch.setenv(TEACHER_KEY, TEACHERS)
    assert read(spec)[0] == config


@pytest.mark.parametrize(
    "load",
    [
        lambda: root.load(None, [("feedback.lake.storage_options", f"aws_secret_access_key={KEY}")], {}),
        lambda: root.load(None, [("feedback.lake.storage_options", f"{{aws_secret_access_key: [{KEY}")], {}),
        lambda: root.load(None, [("feedback.lake.storage_options", f"{{aws_secret_access_key: *{KEY}}}")], {}),
        lambda: root.load(None, [("feedback.lake.storage_options", f"{{aws_secret_access_key: [{KEY}]}}")], {}),
        lambda: root.load(None, [], {"MILLRACE__FEEDBACK__SCORING__JUDGE__API_KEY__X": KEY}),
        lambda: root.load(None, [("feedback.lake.uri", f"s3://me:{KEY}@bucket/lake")], {}),
        lambda: root.load(None, [("train.ray_address", f"http://me:{KEY}@head:8265")], {}),
        lambda: root.load(None, [("serve.fleet.ray_address", f"ray://me:{KEY}@head:10001")], {}),
        lambda: root.load(
            None, [(f"feedback.scoring.judge.{n}", v) for n, v in {"url": f"http://:{KEY}@x", "model": "m"}.items()], {}
        ),
    ],
)
def test_no_error_about_a_setting_shows_what_was_given_for_a_secret(load: Callable[[], object]) -> None:
    with pytest.raises(ConfigError) as error:
        load()
    assert KEY not in str(error.value)


@pytest.mark.parametrize("text", [f"storage_options: {{key: '{KEY}", f"api_key: !{KEY} x", f"api_key: *{KEY}"])
def test_a_config_file_that_is_not_yaml_is_named_without_the_text_around_the_fault(text: str, tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"my\.yaml is not YAML: .*line \d") as error:
        root.load(file, [], {})
    assert KEY not in str(error.value)


@pytest.mark.parametrize("where", [{"lake": {"storage_options": OPTIONS, "threads": 0}}, {"lake_uri": 1}])
def test_a_job_that_is_not_valid_is_refused_without_its_credentials(where: dict[str, object]) -> None:
    job = {
        "run": "r",
        "runs": "/r",
        "policies": "/p",
        "reward_models": "/m",
        "lake_uri": "/l",
        "reward": "",
        "lake": {},
    } | where
    with pytest.raises(ValidationError) as error:
        JobContext.model_validate({**job, "python_path": OPTIONS})
    assert KEY not in str(error.value)


def test_they_are_in_no_repr_of_the_settings_and_survive_a_pickle() -> None:
    import cloudpickle

    judge = {"url": "http://x/v1", "model": "m", "rubric": "{response}", "api_key": KEY}
    made = FeedbackConfig.model_validate({"lake": {"storage_options": OPTIONS}, "scoring": {"judge": judge}})
    assert KEY not in f"{made!r} {made} {made.model_dump()} {made.model_dump_json()}"
    assert cloudpickle.loads(cloudpickle.dumps(made)) == made  # as Ray hands it to a replica


def test_an_error_of_the_store_does_not_quote_a_key() -> None:
    options = OPTIONS | {"aws_session_token": "us-west-2", "aws_skip_signature": "us-west-2"}  # no boolean: quoted
    with pytest.raises(LakeError, match="can't be read") as error:
        Lake("s3://bucket/lake", LakeConfig.model_validate({"storage_options": options})).table("feedback")
    assert "us-west-2" not in str(error.value)
    assert KEY not in str(error.value)


def holders(root: Path, key: str = KEY) -> set[Path]:
    return {path for path in root.rglob("*") if path.is_file() and key.encode() in path.read_bytes()}


def test_a_key_is_changed_and_revoked_by_its_secret_which_gets_into_no_log(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["keys", "create", "--home", "h", "--name", "app", "--json"]) == 0
    secret = json.loads(capsys.readouterr().out)["secret"]
    assert cli.run(["keys", "scope", "--home", "h", "--scope", "read", secret]) == 0
    assert cli.run(["keys", "revoke", "--home", "h", secret]) == 0
    assert cli.run(["keys", "revoke", "--home", "h", f"mrk_x{secret[5:]}"]) != 0
    output = capsys.readouterr()
    assert "of app is revoked" in output.out
    assert secret[-24:] not in Path("h/audit.jsonl").read_text() + output.out + output.err
