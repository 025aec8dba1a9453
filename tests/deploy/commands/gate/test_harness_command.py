"""`millrace evaluate --harness`: what it refuses, the server that it starts, and what it shows of what was kept.

lm-eval and Inspect themselves run in `make harness`: they take minutes to install.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy import cli
from deploy.commands.gate.harness import Live, own_server, run_harness
from deploy.config.root import ConfigError, Settings
from deploy.display.report_data import gather
from evaluation.harness.results import HarnessFailed, HarnessResult, Metric
from evaluation.report.page import build
from feedback.config import FeedbackConfig
from serve.api.feedback import _require_recording
from serve.config import ServeConfig
from serve.http import Problem
from serve.runtime import Server

RESULT = HarnessResult(
    version=1,
    sha256="ab" * 32,
    server="own",
    harness="lm-eval",
    harness_version="0.4.13",
    tasks=("sums",),
    limit="8",
    model_args=None,
    arguments=(),
    metrics=(Metric(task="sums", metric="bits_per_byte", value=9.1247, stderr=None, n=8),),
    created_at="2026-11-24T18:41:56+00:00",
    seconds=3.0,
)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--tasks", "a"], "--tasks is of --harness"),
        (["--", "--num_fewshot", "5"], "-- is of --harness"),
        (["--json"], "--json is of --harness-results"),
        (["--harness", "lm-eval"], "name what lm-eval is to run: --tasks A,B"),
        (["--harness", "lm-eval", "--tasks", "a", "--incumbent", "1"], "leave --incumbent out"),
        (["--harness", "inspect", "--tasks", "a", "--include-path", "b"], "a file, such as my_task.py@name"),
        (["--harness", "helm", "--tasks", "a"], "'helm' is not one of 'lm-eval', 'inspect'"),
    ],
)
def test_options_that_do_not_fit_are_refused_by_name(
    options: list[str], says: str, settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["evaluate", "--home", str(settings.home), *options]) == 2
    assert says in capsys.readouterr().err


def test_without_an_environment_the_error_has_the_commands_that_make_one(
    settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["evaluate", "--harness", "lm-eval", "--tasks", "a", "--home", str(settings.home)]) == 1
    folder = settings.home / "harnesses" / "lm-eval"
    error = capsys.readouterr().err
    assert f"python3 -m venv {folder} && {folder}/bin/pip install 'lm-eval[api]==0.4.13'" in error
    here = ["--evaluation.harness.inspect", sys.prefix]
    assert cli.run(["evaluate", "--harness", "inspect", "--tasks", "a", "--home", str(settings.home), *here]) == 1
    assert "-m pip install 'inspect-ai" in capsys.readouterr().err


def test_a_harness_that_fails_or_takes_too_long_says_where_its_output_is(
    tmp_path: Path, nothing_left: Callable[[], list[str]]
) -> None:
    log = tmp_path / "output.log"
    failing = [sys.executable, "-c", "import sys; print('no such task'); sys.exit(3)"]
    with pytest.raises(HarnessFailed, match=r"lm-eval ended with code 3.*output\.log(?s:.*)no such task"):
        run_harness("lm-eval", failing, {}, log, 60)
    with pytest.raises(HarnessFailed, match=r"longer than evaluation\.harness\.timeout_s=0\.5 s and was stopped"):
        run_harness("lm-eval", [sys.executable, "-c", "import time; time.sleep(600)"], {}, log, 0.5)
    assert nothing_left() == []


def test_a_harness_has_its_key_in_its_environment_and_none_of_our_packages_or_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE__SERVE__PORT", "1")
    log = tmp_path / "output.log"
    shows = "import json, os; print(json.dumps(dict(os.environ)))"
    run_harness("lm-eval", [sys.executable, "-c", shows], {"OPENAI_API_KEY": "mrk_secret"}, log, 60)
    seen = json.loads(log.read_text())
    assert seen["OPENAI_API_KEY"] == "mrk_secret"
    assert "PYTHONPATH" not in seen
    assert "MILLRACE__SERVE__PORT" not in seen
    assert seen["PATH"] == os.environ["PATH"]


def test_the_server_of_one_policy_answers_its_key_alone_and_nothing_of_it_is_recorded(
    home_with_policy: Settings, model: Path, nothing_left: Callable[[], list[str]]
) -> None:
    settings, store = home_with_policy, home_with_policy.policy_store()
    store.publish(model, parent=1, lineage={"test": True}, metrics={})
    before = store.serving(), store.outcomes(), settings.lake().versions()
    with own_server(settings, store.get(2)) as server:
        at = server.endpoint
        assert (at.model, at.context, at.folder) == ("millrace", 128, store.get(2).path)
        assert httpx.get(f"{at.url}/ready", timeout=60).json() == {"status": "ready", "policy_version": 2}

        def post(path: str, body: dict[str, Any], key: str | None = at.key) -> httpx.Response:
            headers = {"X-API-Key": key} if key else {}
            return httpx.post(f"{at.url}{path}", json=body, headers=headers, timeout=60)

        scored = {"prompt": [[5, 6, 7, 8]], "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0}
        answer = post("/v1/completions", scored)
        assert len(answer.json()["choices"][0]["logprobs"]["token_logprobs"]) == 5
        named = post("/generate", {"prompt": "1+1=", "user": "harness"}).json()["responses"][0]["response_id"]
        assert named.startswith("unstored-")
        assert post("/generate", {"prompt": "1+1="}, key=None).status_code == 401
        assert post("/feedback", {"response_id": "any", "kind": "thumb", "value": 1}).status_code == 403
        server.check()
    assert (store.serving(), store.outcomes(), settings.lake().versions()) == before
    assert not settings.path("journal").exists()
    assert not settings.path("keys.json").exists()
    assert nothing_left() == []


def test_a_server_that_does_not_record_records_nobodys_responses_and_takes_no_feedback(tmp_path: Path) -> None:
    config = ServeConfig(policies=str(tmp_path / "policies"), replicas=str(tmp_path), keys=str(tmp_path / "keys.json"))
    lake = {"lake": {"uri": str(tmp_path / "lake")}, "journal": {"folder": str(tmp_path / "journal")}}
    server = Server(config, FeedbackConfig.model_validate(lake), recording=False)
    anybody = server.keyring.anonymous
    assert anybody.capture
    assert not server.records(anybody, store=True)
    assert server.recorder_for(anybody, store=True) is not server.recorder
    with pytest.raises(Problem, match="records nothing"):
        _require_recording(server)


def test_an_endpoint_on_which_two_policies_answer_has_none_to_evaluate() -> None:
    serving = {"version": 3, "generation": 7, "experiment": None}
    assert Live.alone(serving) == Live(3, 7)
    assert Live.alone(serving | {"generation": 9}) != Live(3, 7)  # it went to another policy and came back
    assert Live.alone(serving | {"experiment": {"number": 1}}) is None
    assert Live.alone(serving | {"rollout": {"phase": "canary"}}) is None


def test_an_endpoint_without_a_server_is_refused(settings: Settings) -> None:
    with pytest.raises(ConfigError, match=r"no server of this home answers at .*: leave --endpoint out"):
        Live.of(settings, None)


def test_what_was_kept_is_listed_and_stands_in_the_report(
    settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    home = ["--home", str(settings.home)]
    assert cli.run(["evaluate", "--harness-results", *home]) == 0
    assert "no harness has run" in capsys.readouterr().out
    assert "Other harnesses" not in build(gather(settings, title="t"), settings.path("empty.html")).read_text()

    folder = settings.resolved().evaluation.harness_folder / "v1-abab-lm-eval-sums-20261124T184156"
    folder.mkdir(parents=True)
    RESULT.save(folder)
    assert cli.run(["evaluate", "--harness-results", *home]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[1].split() == [
        *("1", "lm-eval", "0.4.13", "sums", "(limit", "8)", "bits_per_byte", "9.1247", "-", "8", "2026-11-24T18:41:56")
    ]
    assert "decides nothing" in out
    assert cli.run(["evaluate", "--harness-results", "--json", *home]) == 0
    [found] = json.loads(capsys.readouterr().out)
    assert found.pop("folder") == str(folder)
    assert HarnessResult.model_validate(found) == RESULT
    page = build(gather(settings, title="t"), settings.path("report.html")).read_text()
    assert "Other harnesses" in page
    assert "9.1247" in page
