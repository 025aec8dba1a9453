"""Command lines of lm-eval and Inspect, and the result files that lm-eval 0.4.13 and Inspect 0.3.285 wrote.

The files are of real runs of a tiny policy, without the tasks' configs and the samples.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from evaluation.harness.inspect import Inspect
from evaluation.harness.lm_eval import LmEval
from evaluation.harness.results import HarnessFailed, HarnessResult, Metric, load_all
from evaluation.harness.run import Endpoint, HarnessRequest, interpreter, version_of

HERE = Path(__file__).parent
SERVER = Endpoint("http://127.0.0.1:8000", "mrk_secret", "millrace", 1024, Path("/policies, all/v000002"))


def result(**changes: object) -> HarnessResult:
    metric = Metric(task="sums", metric="acc", value=0.75, stderr=None, n=8)
    known = {
        "version": 2, "sha256": "ab", "server": "own", "harness": "lm-eval", "harness_version": "0.4.13",
        "tasks": ("sums",), "limit": "8", "model_args": None, "arguments": (), "metrics": (metric,),
        "created_at": "2026-11-24T18:41:56+00:00", "seconds": 3.0,
    }  # fmt: skip
    return HarnessResult.model_validate(known | changes)


def test_lm_eval_gets_the_server_the_tokenizer_and_the_users_own_options_and_never_the_key() -> None:
    request = HarnessRequest(
        ("arc_easy", "mmlu"), "0.1", Path("mine"), "num_concurrent=64,seed=1", ("--num_fewshot", "5")
    )
    command = LmEval().command(request, SERVER, Path("out"))
    first = command.index("--model_args")
    assert json.loads(command[first + 1]) == {
        "base_url": "http://127.0.0.1:8000/v1/completions",
        "model": "millrace",
        "tokenizer": "/policies, all/v000002",
        "tokenizer_backend": "huggingface",
        "max_length": 1024,
        "num_concurrent": 16,
    }
    assert command[first + 2 : first + 4] == ["--model_args", "num_concurrent=64,seed=1"]  # lm-eval merges the two
    assert command[first + 4 :] == [
        *("--tasks", "arc_easy,mmlu", "--output_path", "out", "--log_samples", "--include_path", "mine"),
        *("--limit", "0.1", "--num_fewshot", "5"),
    ]
    assert "mrk_secret" not in str(command)
    assert LmEval().environment(SERVER) == {"OPENAI_API_KEY": "mrk_secret"}


def test_inspect_gets_its_tasks_and_the_users_own_options_and_never_the_key() -> None:
    request = HarnessRequest(("a.py@one", "b"), "5-10", model_args="emulate_tools=true", arguments=("--epochs", "2"))
    command = Inspect().command(request, SERVER, Path("out"))
    assert command == [
        *("-m", "inspect_ai", "eval", "a.py@one", "b", "--model", "openai-api/millrace/millrace"),
        *("-M", "emulate_tools=true", "--limit", "5-10", "--log-dir", "out", "--log-format", "json"),
        *("--display", "plain", "--epochs", "2"),
    ]
    assert Inspect().environment(SERVER) == {
        "MILLRACE_API_KEY": "mrk_secret",
        "MILLRACE_BASE_URL": "http://127.0.0.1:8000/v1",
    }


def test_what_a_harness_can_not_be_asked_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no folder .*nowhere"):
        LmEval().check(HarnessRequest(("a",), include_path=tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"lm-eval's: to Inspect .* my_task.py@name"):
        Inspect().check(HarnessRequest(("a",), include_path=tmp_path))


def test_the_results_of_lm_eval_are_read_with_groups_filters_and_standard_errors() -> None:
    stderr = 0.16366341767699427
    assert LmEval().metrics(HERE / "lm_eval") == (
        Metric(task="sums_choice", metric="acc", value=0.75, stderr=stderr, n=8),
        Metric(task="sums_choice", metric="acc_norm", value=0.375, stderr=0.18298126367784995, n=8),
        Metric(task="sums_generate", metric="exact_match (first-word)", value=0.0, stderr=0.0, n=8),
        Metric(task="sums_perplexity", metric="bits_per_byte", value=9.12472210725244, stderr=None, n=8),
        Metric(task="sums", metric="acc", value=0.75, stderr=stderr, n=8),  # of those of its tasks that have it
    )


def test_the_logs_of_inspect_are_read_and_one_that_failed_gives_no_results() -> None:
    [metric] = Inspect().metrics(HERE / "inspect")
    assert metric == Metric(task="sums", metric="includes accuracy", value=0.0, stderr=0.0, n=4)
    with pytest.raises(HarnessFailed, match="task sums ended as error: RetryError"):  # its exit code was 0
        Inspect().metrics(HERE / "inspect_failed")


@pytest.mark.parametrize("harness", [LmEval(), Inspect()])
def test_a_run_without_result_files_failed(harness: LmEval | Inspect, tmp_path: Path) -> None:
    with pytest.raises(HarnessFailed, match="left no"):
        harness.metrics(tmp_path)


def test_a_missing_environment_is_an_error_with_the_commands_that_make_one(tmp_path: Path) -> None:
    where = tmp_path / "lm"
    with pytest.raises(HarnessFailed) as missing:
        interpreter(LmEval(), where, "evaluation.harness.lm_eval")
    make = f"python3 -m venv {where} && {where}/bin/pip install 'lm-eval[api]==0.4.13' 'transformers'"
    assert make in str(missing.value)
    assert "evaluation.harness.lm_eval" in str(missing.value)
    environment = Path(sys.prefix)
    python = interpreter(LmEval(), environment, "evaluation.harness.lm_eval")
    assert python == interpreter(LmEval(), environment / "bin" / "python", "")
    with pytest.raises(HarnessFailed, match=r"has no lm-eval; install it with:\n.*-m pip install 'lm-eval\[api\]"):
        version_of(LmEval(), python)


def test_results_come_back_oldest_first_and_a_run_that_did_not_end_is_left_out(tmp_path: Path) -> None:
    later, earlier = result(), result(version=1, created_at="2026-11-23T00:00:00+00:00")
    for name, one in (("a", later), ("b", earlier)):
        (tmp_path / name).mkdir()
        one.save(tmp_path / name)
    (tmp_path / "killed").mkdir()
    assert load_all(tmp_path) == [(tmp_path / "b", earlier), (tmp_path / "a", later)]
    row = ["2", "lm-eval 0.4.13", "sums (limit 8)", "acc", "0.7500", "-", "8", "2026-11-24T18:41:56"]
    assert later.lines() == [row]
    (tmp_path / "a" / "result.json").write_text("{}")
    with pytest.raises(ValueError, match=r"a/result\.json is no result of a harness"):
        load_all(tmp_path)
