"""What differs between two snapshots of settings; that no secret is in it, and no file but a snapshot is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.config import root
from deploy.config.differences import Difference, defaults, differences, of_snapshot
from deploy.config.root import ConfigError, Settings

OPENS_A_DOOR = "wJalrXUtnFEMI-K7MDENG"


def snapshot(home: Path, *options: tuple[str, str]) -> str:
    return root.load(None, [("home", str(home)), *options], {}).snapshot().stem


def test_a_setting_that_differs_is_named_with_both_values_and_no_other_is(tmp_path: Path) -> None:
    settings = root.load(None, [("home", str(tmp_path))], {})
    before = of_snapshot(settings, snapshot(tmp_path, ("train.steps", "7"), ("serve.host", "localhost")))
    rule = ("feedback.scoring.rules.exact.ready", "exact_match")
    after = of_snapshot(settings, snapshot(tmp_path, ("train.steps", "9"), ("serve.host", "localhost"), rule))
    found = {one.key: one for one in differences(before, after)}
    assert found.pop("train.steps") == Difference("train.steps", "7", "9")
    assert found.pop("feedback.scoring.rules.exact.ready") == Difference(
        "feedback.scoring.rules.exact.ready", None, "exact_match"
    )
    assert found.pop("feedback.scoring.rules") == Difference("feedback.scoring.rules", "{}", None)
    assert all(key.startswith("feedback.scoring.rules.exact.") for key in found)
    assert differences(before, before) == []
    nothing_set = of_snapshot(settings, snapshot(tmp_path))
    assert differences(defaults(), nothing_set) == []


def test_no_secret_is_in_a_difference_wherever_it_stands(tmp_path: Path) -> None:
    settings = root.load(None, [("home", str(tmp_path))], {})

    def told(secret: str) -> str:
        return snapshot(
            tmp_path,
            ("feedback.lake.storage_options", f'{{"aws_secret_access_key": "{secret}"}}'),
            ("feedback.scoring.judge.url", "http://127.0.0.1:1/v1"),
            ("feedback.scoring.judge.model", "m"),
            ("feedback.scoring.judge.rubric", "Is {response} good?"),
            ("feedback.scoring.judge.api_key", secret),
            ("schedule.webhooks.team.url", f"https://hooks.example/{secret}"),
        )

    name = told(OPENS_A_DOOR)
    assert OPENS_A_DOOR in (tmp_path / "configs" / f"{name}.yaml").read_text()
    found = differences(defaults(), of_snapshot(settings, name))
    assert OPENS_A_DOOR not in str(found)
    after = {one.key: one.after for one in found}
    for secret in (
        "feedback.lake.storage_options.aws_secret_access_key",
        "feedback.scoring.judge.api_key",
        "schedule.webhooks.team.url",
    ):
        assert after[secret] == "**********"
    assert differences(of_snapshot(settings, name), of_snapshot(settings, told("another"))) == []


@pytest.mark.parametrize("name", ["../../etc/passwd", "0" * 16, "0123456789abcde/", "", None, 7, {"a": 1}])
def test_what_is_no_snapshot_of_this_home_is_said_to_be_none(settings: Settings, name: object) -> None:
    with pytest.raises(ConfigError, match=r"is no snapshot of settings|is not on this machine"):
        of_snapshot(settings, name)


@pytest.mark.parametrize("content", [f"serve:\n  of_another_release: {OPENS_A_DOOR}\n", f"{{: {OPENS_A_DOOR}", "[]"])
def test_a_snapshot_that_cannot_be_read_is_named_without_its_path_and_its_content(
    settings: Settings, content: str
) -> None:
    file = settings.path("configs") / f"{'a' * 16}.yaml"
    file.parent.mkdir()
    file.write_text(content)
    with pytest.raises(ConfigError) as error:
        of_snapshot(settings, "a" * 16)
    assert str(error.value) == f"configs/{'a' * 16}.yaml is not one that this version of Millrace reads"
