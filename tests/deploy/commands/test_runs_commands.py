"""`millrace runs`: one run from all that is in its folder, several side by side."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

import pytest

from deploy import cli
from deploy.display.run_records import sparkline
from train.config.training import TrainConfig
from train.context import JobResult

RUNS = Path("home/runs")
RANK = {"pool": "all", "rank": 0, "host": "node-1", "device": "NVIDIA X", "index": "3", "peak_memory": 2**31}
RESOURCES = {"architecture": "TinyForCausalLM", "parameters": 12345, "trained": 12000, "peak_flops": 1e12}


def run(*arguments: str) -> int:
    return cli.run(["runs", *arguments, "--home", "home"])


def make_run(name: str, rewards: list[float], *, config: dict[str, Any] | None = None, **result: Any) -> Path:
    """As training leaves it; without a ``result`` as one that was killed and has no checkpoint."""
    folder = RUNS / name
    folder.mkdir(parents=True)
    settings = TrainConfig.model_validate({"steps": 4, **(config or {})})
    (folder / "job.json").write_text(json.dumps({"config": settings.model_dump(mode="json")}))
    start = {
        "parent": 1,
        "lake_versions": {"interactions": 7, "rewards": 5},
        "config": settings.model_dump(mode="json"),
    }
    (folder / "start.json").write_text(json.dumps(start))
    (folder / "data.json").write_text(json.dumps({"data": "20 usable prompts (2 duplicates)", "usable": 20}))
    (folder / "resources.json").write_text(json.dumps({**RESOURCES, "ranks": [RANK]}))
    steps = [
        {"step": i, "reward": reward, "entropy": 2.0, "kl_ref": float("nan"), "tokens": 300.0, "mfu": 0.25}
        | {"seconds": 2.0, "seconds_generate": 1.5, "seconds_update": 0.5, "tokens_per_s": 150.0}
        for i, reward in enumerate(rewards)
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(step)}\n" for step in steps) + '{"step": 9, "rew')
    if result:
        common = {"run": name, "parent": 1, "steps": len(rewards), "reason": None, "metrics": {}, "seconds": 9.0}
        (folder / "result.json").write_text(JobResult(**common | result).model_dump_json())
    return folder


def test_a_run_is_shown_with_what_it_learned_from_what_it_took_and_what_it_reached(
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_run("good", [0.1, 0.5, 0.9, 0.7], candidate=2)
    assert run("show", "good") == 0
    printed = capsys.readouterr().out
    lines = dict(line.split(":", 1) for line in printed.split("\n\n")[0].splitlines())
    found = {name: value.strip() for name, value in lines.items()}
    assert found.pop("state").startswith("ended, last at work ")
    assert found == {
        "run": "good",
        "algorithm": "grpo",
        "parent": "policy 1",
        "published": "policy 2",
        "learned from": "20 usable prompts (2 duplicates)",
        "lake": "interactions 7, rewards 5",
        "model": "TinyForCausalLM, 12,345 parameters, 12,000 trained",
        "ranks": "all: 0 on GPU 3 (NVIDIA X) of node-1, 2.00 GiB",
        "steps": "4 of 4 in 8 s",
        "of a step": "generate 1.50 s (75%), update 0.50 s (25%)",
        "tokens/s": "150",
        "peak memory": "2.00 GiB",
        "MFU": "25.0%",
        "best": "step 3, reward 0.9",
        "reward": "▁▅█▆  0.1 → 0.7",
    }
    table = [line.split() for line in printed.split("\n\n")[1].splitlines()]
    assert ["reward", "0.7", "0.9"] in table
    assert not any("kl_ref" in line or "seconds_update" in line for line in table)
    assert run("show", "good", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["candidate"], record["usable"], record["best"]["step"], record["wrong"]) == (2, 20, 3, None)
    assert (record["tokens_per_s"], record["peak_memory"]) == (150.0, 2**31)
    assert record["config"]["steps"] == 4


def test_what_went_wrong_is_the_reason_the_error_or_the_kill(capsys: pytest.CaptureFixture[str]) -> None:
    def wrong(name: str) -> str | None:
        capsys.readouterr()
        assert run("show", name, "--json") == 0
        found: str | None = json.loads(capsys.readouterr().out)["wrong"]
        return found

    make_run("stopped", [0.1], candidate=None, reason="step 1: KL passed train.max_kl=1", stopped=True)
    (make_run("failed", [0.1]) / "error.txt").write_text("WorkerError: rank 1 died")
    make_run("gone", [0.1, 0.2])
    (make_run("killed", [0.1, 0.2]) / "checkpoints" / "step-1").mkdir(parents=True)
    assert wrong("stopped") == "step 1: KL passed train.max_kl=1"
    assert wrong("failed") == "WorkerError: rank 1 died"
    assert wrong("gone") == "it ended after step 2 without a result: it was killed, and can't go on"
    assert wrong("killed") == (
        "it ended after step 2 without a result: it was killed, and goes on with: millrace train --run killed"
    )
    with (RUNS / "killed" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("pid 5 on node-1")
        lock.flush()
        assert wrong("killed") is None
        assert run("show", "killed") == 0
        assert "state:        at work, pid 5 on node-1\n" in capsys.readouterr().out


def test_runs_are_compared_by_results_curves_on_one_scale_and_settings_that_differ(
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_run("a", [0.0, 0.2, 0.3, 0.5], candidate=2)
    make_run("b", [0.0, 1.0], config={"algorithm": {"name": "rloo"}, "optimizer": {"learning_rate": 1e-5}})
    assert run("compare", "a", "b") == 0
    facts, last, curves, settings = capsys.readouterr().out.split("\n\n")
    assert [line.split() for line in facts.splitlines()[:3]] == [
        ["a", "b"],
        ["state", "ended", "ended"],
        ["algorithm", "grpo", "rloo"],
    ]
    assert ["published", "policy", "2", "-"] in [line.split() for line in facts.splitlines()]
    assert ["reward", "0.5", "1"] in [line.split() for line in last.splitlines()]
    assert curves.splitlines() == ["reward, from 0 to 1", "a  ▁▂▃▅  0 → 0.5", "b  ▁█  0 → 1"]
    rows = {line.split()[0]: line.split()[1:] for line in settings.splitlines()}
    assert rows["train.algorithm.name"] == ["grpo", "rloo"]
    assert rows["train.optimizer.learning_rate"][1] == "1e-05"
    assert "train.steps" not in rows
    assert run("compare", "a", "b", "--metric", "entropy", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["curves"] == {"a": [2.0] * 4, "b": [2.0] * 2}
    assert found["settings"]["train.algorithm.name"] == ["grpo", "rloo"]
    assert [record["run"] for record in found["runs"]] == ["a", "b"]


def test_a_crash_of_the_machine_costs_the_damaged_lines_alone(capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run("torn", [0.1, 0.9, 0.5], candidate=None, reason="r")
    first, _, third, _ = (folder / "metrics.jsonl").read_bytes().split(b"\n")
    (folder / "metrics.jsonl").write_bytes(b"\n".join([first, b"\0" * 300, third, b"[]", b'{"reward": "x"}', b""]))
    (folder / "data.json").write_bytes(b"[]")
    (folder / "error.txt").write_bytes(b"boom \xff")
    assert run("show", "torn", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["steps"], record["best"]["step"], record["best"]["value"]) == (5, 3, 0.5)
    assert (record["data"], record["wrong"]) == (None, "boom \ufffd")


def test_a_damaged_record_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run("damaged", [0.1], candidate=2)
    for name, text in (("resources.json", '{"architecture": "X"}'), ("start.json", '{"config": "x"}')):
        (folder / name).write_text(text)
        assert run("show", "damaged") == 1
        assert "resources.json in " in capsys.readouterr().err


def test_what_a_run_says_does_not_act_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    make_run("good", [0.1], candidate=2)
    text = "rank 1:\n\x1b]0;owned\x07\x9b2J\r"
    (make_run("hostile", [0.1], candidate=None, reason=text) / "error.txt").write_text(text)
    for arguments in (["show", "hostile"], ["compare", "hostile", "good"], ["list"]):
        assert run(*arguments) == 0
        printed = capsys.readouterr().out
        assert "\\x1b]0;owned\\x07\\x9b2J" in printed
        assert printed.replace("\n", "").isprintable()


def test_runs_and_metrics_that_there_are_not_are_refused_with_those_that_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_run("a", [0.5])
    make_run("b", [0.5])
    for arguments, words in (
        (["show", "c"], "there is no run c in "),
        (["show", "c"], "the newest are: a, b"),
        (["compare", "a"], "name at least two runs; `millrace runs show RUN` shows one"),
        (["compare", "a", "b", "--metric", "x"], "--metric x: none of these runs has it; they have: entropy, "),
        (["--json", "show", "a"], "--json stands behind the command: millrace runs show … --json"),
    ):
        assert run(*arguments) == 2
        assert words in capsys.readouterr().err


def test_runs_are_listed_by_the_group_alone_and_by_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    make_run("a", [0.5], candidate=2)
    outputs = []
    for arguments in ([], ["list"], ["--json"], ["list", "--json"]):
        assert run(*arguments) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    assert outputs[2] == outputs[3]
    assert json.loads(outputs[2])[0]["result"] == "policy 2"


def test_a_run_that_has_just_begun_has_little_to_show(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("new", "newer"):
        (RUNS / name).mkdir(parents=True)
        (RUNS / name / "job.json").write_text("{}")
    assert run("show", "new") == 0
    assert "steps:        0 of ? in 0 s\n" in capsys.readouterr().out
    assert run("compare", "new", "newer") == 0
    assert "their settings are the same" in capsys.readouterr().out


def test_a_curve_longer_than_its_width_shows_means() -> None:
    assert sparkline([0, 0, 1, 1], 0, 1, width=2) == "▁█"
    assert sparkline([0, 1, 1], 0, 1, width=2) == "▁█"
    assert sparkline([2, 2], 2, 2) == "▁▁"
    assert sparkline([], 0, 1) == ""
