"""`millrace data export` and `millrace data import`, as a person types them."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from deploy import cli
from deploy.config.root import Settings
from feedback.lake.tables import Lake
from tests.feedback.feedback_rows import interaction, put, said

ROW = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}


@pytest.fixture
def lake(home_with_policy: Settings) -> Lake:
    made = home_with_policy.lake()
    made.create()
    return made


def data(settings: Settings, capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str]:
    code = cli.run(["data", *map(str, arguments), "--home", str(settings.home)])
    shown = capsys.readouterr()
    return code, shown.out + shown.err


def test_a_set_goes_in_and_comes_out_as_it_was(
    lake: Lake, home_with_policy: Settings, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps(ROW) + "\n")
    bring = ("import", tmp_path / "in.jsonl", "--format", "trl-preference", "--source", "team")
    code, printed = data(home_with_policy, capsys, *bring)
    assert (code, "1 rows; added 2 responses and 1 feedback of team" in printed) == (0, True), printed
    code, printed = data(home_with_policy, capsys, *bring)
    assert (code, "added 0 responses and 0 feedback of team (left out: 1 imported before)" in printed) == (0, True)
    for name in ("out.jsonl", "out.parquet"):
        code, printed = data(home_with_policy, capsys, "export", tmp_path / name, "--format", "trl-preference")
        assert (code, f"{name}: 1 rows of trl-preference, prompts as text" in printed) == (0, True), printed
    assert json.loads((tmp_path / "out.jsonl").read_text()) == ROW
    assert pq.read_table(tmp_path / "out.parquet").to_pylist() == [ROW]


def test_an_import_passes_the_redact_functions_of_the_settings(
    lake: Lake,
    home_with_policy: Settings,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps(ROW) + "\n" + json.dumps(ROW | {"chosen": "a@b.c"}) + "\n")
    bring = ("import", tmp_path / "in.jsonl", "--format", "trl-preference", "--source", "team")
    monkeypatch.setenv("MILLRACE__FEEDBACK__CAPTURE__REDACT", '["not_there:own"]')
    code, printed = data(home_with_policy, capsys, *bring)
    assert (code, "error: feedback.capture.redact: not_there:own: ModuleNotFoundError" in printed) == (1, True), printed
    assert lake.counts()["interactions"] == 0
    monkeypatch.setenv("MILLRACE__FEEDBACK__CAPTURE__REDACT", '["email"]')
    monkeypatch.setenv("MILLRACE__FEEDBACK__CAPTURE__REDACT_TIMEOUT_S", "60")
    code, printed = data(home_with_policy, capsys, *bring, "--json-out", tmp_path / "out.json")
    assert (code, "added 2 responses and 1 feedback of team (left out: 1 redacted)" in printed) == (0, True), printed
    assert json.loads((tmp_path / "out.json").read_text())["left_out"] == {"redacted": 1}


def test_prompts_have_the_token_ids_that_the_policys_tokenizer_gives_them(
    lake: Lake, home_with_policy: Settings, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    (tmp_path / "in.jsonl").write_text(json.dumps(ROW) + "\n")
    data(home_with_policy, capsys, "import", tmp_path / "in.jsonl", "--format", "trl-preference", "--source", "team")
    tokenizer = AutoTokenizer.from_pretrained(home_with_policy.policy_store().get(1).path)
    found = lake.read(lambda views: views.sql("SELECT DISTINCT prompt_token_ids FROM interactions").fetchall())
    assert found == [(tokenizer("1+1=").input_ids,)]


def test_filters_and_counts_are_in_what_is_printed(
    lake: Lake, home_with_policy: Settings, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    put(lake, "interactions", [interaction("a"), interaction("b", response="five")])
    put(lake, "feedback", [said("1", "a", "thumb", value=1.0), said("2", "b", "thumb", value=0.0, minute=2)])
    export = ("export", tmp_path / "out.jsonl", "--format", "trl-kto")
    code, printed = data(home_with_policy, capsys, *export, "--since", "2026-03-01T12:01:00")
    assert (code, "1 rows of trl-kto, prompts as text (left out: 1 of another time)" in printed) == (0, True), printed
    assert json.loads((tmp_path / "out.jsonl").read_text())["label"] is False


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["export", "out.csv", "--format", "trl-kto"], 2, "out.csv must end with .jsonl or .parquet"),
        (["export", "no/out.jsonl", "--format", "trl-kto"], 2, "there is no folder no"),
        (["export", "out.jsonl"], 2, "Missing option '--format'"),
        (["export", "out.jsonl", "--format", "csv"], 2, "'csv' is not one of"),
        (["import", "none.jsonl", "--format", "trl-sft", "--source", "x"], 1, "there is no file or folder none.jsonl"),
        (["import", "broken.jsonl", "--format", "trl-sft", "--source", "x"], 1, "broken.jsonl, line 2 is not JSON"),
        (["import", "chat.jsonl", "--format", "trl-sft", "--source", "x"], 1, "chat.jsonl, line 1: the prompt is chat"),
        (["import", "broken.jsonl", "--format", "trl-sft", "--source", "user"], 2, "'user' can't name an import"),
        (["import", "broken.jsonl", "--format", "trl-sft", "--source", "two words"], 2, "can't name an import"),
    ],
)
def test_what_can_not_be_is_one_line_that_says_why(
    lake: Lake,
    home_with_policy: Settings,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    Path("broken.jsonl").write_text('{"prompt": "1", "completion": "2"}\n{"prompt"\n')
    Path("chat.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}'
    )
    ended, printed = data(home_with_policy, capsys, *arguments)
    assert (ended, message in printed) == (code, True), printed
    assert lake.counts()["interactions"] == 0
    assert not list(Path().glob("out.*"))


def test_a_file_that_is_there_is_replaced_whole_or_stays(
    lake: Lake, home_with_policy: Settings, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "out.parquet"
    out.write_text("old")
    put(lake, "interactions", [interaction("a")])
    code, printed = data(home_with_policy, capsys, "export", out, "--format", "prompts")
    assert (code, pq.read_table(out).to_pylist()) == (0, [{"prompt": "two and two", "answer": "four"}]), printed
    assert list(tmp_path.glob(".out*")) == []


def test_without_a_lake_there_is_nothing_to_export_and_none_is_made(
    settings: Settings, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, printed = data(settings, capsys, "export", tmp_path / "out.jsonl", "--format", "prompts")
    assert (code, "no lake at" in printed) == (1, True), printed
    assert not (tmp_path / "out.jsonl").exists()
    assert not (settings.home / "lake").exists()


def test_without_a_policy_whose_tokenizer_prompts_need_nothing_is_imported(
    settings: Settings, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps(ROW) + "\n")
    bring = ("import", tmp_path / "in.jsonl", "--format", "trl-preference", "--source", "team")
    code, printed = data(settings, capsys, *bring)
    assert (code, "no policy serves, whose tokenizer prompts need" in printed) == (2, True), printed


@pytest.mark.parametrize("command", [["data"], ["data", "export"], ["data", "import"]])
def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    assert cli.run([*command, "--help"]) == 0
    assert "Usage: millrace data" in capsys.readouterr().out
