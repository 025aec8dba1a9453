"""`millrace up` with a real server: vLLM, journal, lake and scheduler."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from deploy import cli, devices, initialise, memory_check, status
from deploy.config import root
from deploy.config.root import Settings, child_environment
from deploy.loop import promotion, records, wait_for_serving
from deploy.loop.wait_for_serving import NotServed
from deploy.supervise.children import millrace
from deploy.up import switches
from evaluation.decisions.ledger import Ledger
from feedback.files import locked
from feedback.lake.tables import Lake
from loadtests.server import free_port
from serve.gpus import Gpu
from serve.policies.store import PolicyStore
from tests.paths import ROOT


@pytest.fixture
def small(home_with_policy: Settings) -> Settings:
    return root.load(
        home_with_policy.snapshot(),
        [
            ("serve.engine.kv_cache_bytes", str(16 << 20)),
            ("serve.engine.threads", "1"),
            ("serve.engine.dtype", "float32"),
            ("feedback.journal.segment_seconds", "0.5"),
            ("feedback.lake.seal_seconds", "0.5"),
            ("schedule.first_after_seconds", "600"),
            ("cycle.swap_timeout_s", "30"),
        ],
        {},
    )


def start(settings: Settings, log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            millrace("--config", settings.snapshot(), "up", *arguments),
            stdout=output,
            stderr=output,
            env=child_environment({"PYTHONPATH": str(ROOT)}),
        )


def test_a_model_is_all_that_an_empty_folder_needs_to_be_served_with_the_loop_open(
    model: Path, tmp_path: Path, nothing_left: Callable[[], list[str]]
) -> None:
    (tmp_path / "mine").symlink_to(model)
    port, log = free_port(), tmp_path / "up.log"
    small = {"kv_cache_bytes": 16 << 20, "threads": 1, "dtype": "float32"}
    options = [f"--serve.engine.{name}={value}" for name, value in small.items()]
    with log.open("wb") as output:
        process = subprocess.Popen(
            millrace("up", "./mine", "--serve.port", str(port), "--train.rollout.max_tokens", "32", *options),
            stdout=output,
            stderr=output,
            env=child_environment({"PYTHONPATH": str(ROOT)}),
        )
    try:
        _until(lambda: "first cycle in" in log.read_text(), process, log)
        settings = root.load(Path("millrace.yaml"), [], {})
        assert (settings.cycle.recipe, settings.serve.port) == ("auto", port)
        with httpx.Client(base_url=settings.server_url, timeout=60) as client:
            # The model has no chat template: prompts are answered, messages are refused in one line.
            answer = client.post("/generate", json={"prompt": "1+1=", "max_tokens": 4})
            assert answer.status_code == 200, answer.text
            messages = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
            for path in ("/generate", "/v1/chat/completions"):
                refused = client.post(path, json={"model": "millrace"} | messages if "/v1" in path else messages)
                assert refused.status_code in (400, 422), refused.text
                assert "chat template" in refused.text
                assert "Traceback" not in refused.text
        found = status.look(settings)
        assert found.problems == []
        assert found.runs == {"serve": True, "up": True, "schedule": True, "cycle": False}
        assert found.server is not None
        assert (found.server["version"], found.server["ready"]) == (1, True)
        assert found.next_cycle is not None
        assert found.next_cycle > records.now().isoformat()
        process.send_signal(signal.SIGINT)
        assert process.wait(180) == 0, log.read_text()
    finally:
        process.kill()
    assert nothing_left() == []
    printed = log.read_text()
    assert "looking at the model ./mine" in printed.splitlines()[0]
    assert "policy 1 is ./mine" in printed
    assert "wrote millrace.yaml" in printed
    assert (
        "gate: a suite drawn from traffic (30% of the prompts are never trained on), scored by reward_model" in printed
    )
    for off in ("rules: off; ", "judge: off; ", "chat: off, ", "keys: off, "):
        assert printed.count(off) == 1
    assert "Traceback" not in printed
    # Another model is refused in one line; the same one, by another path to it, is not.
    other = subprocess.run(millrace("up", str(tmp_path)), capture_output=True, text=True, timeout=60)
    assert (other.returncode, other.stdout) == (1, "")
    assert f"was made from {tmp_path / 'mine'}, not from {tmp_path}" in other.stderr
    assert len(other.stderr.splitlines()) == 1
    initialise.require_made_from(settings, str(model))


@pytest.mark.parametrize("command", ["up", "serve"])
def test_a_server_that_can_not_fit_is_refused_before_it_starts(
    command: str, home_with_policy: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot = str(home_with_policy.snapshot())
    code = cli.run([command, "--config", snapshot, "--serve.engine.kv_cache_bytes", str(2**50)])
    shown = capsys.readouterr()
    assert (code, shown.out) == (2, "")
    assert shown.err.startswith("error: serve does not fit into memory: ")
    assert "and at least 1048576.0 GiB of KV cache" in shown.err
    assert shown.err.endswith("or start all the same with serve.plan=warn\n")
    assert not home_with_policy.path("logs").exists()


def test_a_training_that_can_not_fit_is_refused_before_the_server_starts(
    home_with_policy: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot = str(home_with_policy.snapshot())
    greedy = ["--train.rollout.kv_cache_bytes", str(2**50)]
    code = cli.run(["up", "--schedule", "--config", snapshot, *greedy])
    shown = capsys.readouterr()
    assert (code, shown.out) == (2, "")
    assert shown.err.startswith("error: train does not fit into memory: actor update needs 1048576.0 GiB on each rank")
    assert "these settings would fit: train.rollout.kv_cache_bytes=" in shown.err
    assert shown.err.endswith("or start all the same with train.plan=warn\n")
    assert not home_with_policy.path("logs").exists()


def test_an_evaluation_that_can_not_fit_keeps_the_loop_off_before_anything_is_trained(
    home_with_policy: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--config", str(home_with_policy.snapshot()), "--evaluation.engine.kv_cache_bytes", str(2**50)]
    store = home_with_policy.policy_store()
    other = store.publish(store.get(1).path, parent=1, lineage={}, metrics={})
    for command in (["up", "--schedule"], ["cycle"], ["evaluate", str(other.version)]):
        assert cli.run([*command, *options]) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: evaluation does not fit into memory: ")
        assert "and 1048576.0 GiB of KV cache, where there are the " in said
        assert said.endswith("or start all the same with evaluation.plan=warn\n")
    assert not home_with_policy.path("logs").exists()


def test_each_stage_that_trains_is_looked_at_as_its_own_settings_say_and_without_torch_in_this_process(
    home_with_policy: Settings,
) -> None:
    greedy = {"rollout": {"kv_cache_bytes": 2**50}}
    sets: dict[str, dict[str, Any]] = {"small": {}, "greedy": greedy, "warned": greedy | {"plan": "warn"}}
    stages = [{"stage": "train", "name": name, "set": own} for name, own in sets.items()]
    recipe = root.load(home_with_policy.snapshot(), [("cycle.recipe", json.dumps(stages))], {})
    look = (
        "import sys; from pathlib import Path; from deploy import memory_check; from deploy.config import root;"
        "print(*memory_check.refused_training(root.load(Path(sys.argv[1]), [], {})), sep='\\n');"
        "assert 'torch' not in sys.modules"
    )
    found = subprocess.run(
        [sys.executable, "-c", look, recipe.snapshot()],
        capture_output=True,
        text=True,
        timeout=120,
        env=child_environment({"PYTHONPATH": str(ROOT)}),
    )
    assert found.returncode == 0, found.stderr
    [line] = found.stdout.splitlines()
    assert line.startswith("train-greedy does not fit into memory: actor update needs 1048576.0 GiB on each rank")
    assert memory_check.refused_training(home_with_policy) == []


def test_what_is_no_reason_to_refuse_is_printed_as_the_setting_says(home_with_policy: Settings) -> None:
    options = [("serve.engine.kv_cache_bytes", str(2**50)), ("serve.plan", "warn")]
    lines: list[str] = []
    memory_check.require_server(root.load(home_with_policy.snapshot(), options, {}), None, lines.append)
    [line] = lines
    assert line.startswith("warning: serve does not fit into memory: ")
    memory_check.require_server(root.load(home_with_policy.snapshot(), [*options, ("serve.plan", "off")], {}), 1, _fail)
    memory_check.require_server(home_with_policy, 1, _fail)
    extra = root.load(home_with_policy.snapshot(), [("serve.engine.extra", '{"cpu_offload_gb": 1}')], {})
    memory_check.require_server(extra, None, lines.append)
    assert lines[1:] == ["whether serve fits into memory is not planned: serve.engine.extra has cpu_offload_gb"]
    memory_check.require_server(home_with_policy, 7, _fail)  # no such policy, of which the server itself complains


def test_a_gpu_whose_memory_can_not_be_read_is_not_planned_for_and_stops_nothing(
    home_with_policy: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> list[Gpu]:
        raise RuntimeError("Not Supported")

    lines: list[str] = []
    monkeypatch.setattr(devices, "installed", lambda _: {"vllm": "1"})  # its build for GPUs
    for found in (fails, lambda: []):
        monkeypatch.setattr(devices, "gpus", found)
        memory_check.require_server(home_with_policy, 1, lines.append)
    assert "is not planned: Not Supported" in lines[0]
    assert "NVML shows no GPU" in lines[1]
    monkeypatch.setattr(devices, "gpus", lambda: [Gpu(index, 0, 80 * 2**30, 0.0) for index in range(4)])
    for visible, count, kind in (("2,3", 2, "cuda"), ("0", 1, "cuda"), ("", 1, "cpu")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        machine = memory_check.this_machine()
        assert (machine.devices, machine.kind) == (count, kind)


def _fail(line: str) -> None:
    pytest.fail(line)


def test_a_home_is_of_the_model_that_what_serves_goes_back_to_and_not_of_what_a_killed_init_left(
    settings: Settings, model: Path, tmp_path: Path
) -> None:
    store = settings.policy_store()
    store.publish(model, parent=None, lineage={"source": str(tmp_path / "first")}, metrics={})  # and it was killed
    initialise.initialise(settings, str(model), revision=None, who="tests")
    initialise.require_made_from(settings, str(model))
    trained = store.publish(model, parent=2, lineage={}, metrics={})
    store.promote(trained.version, expected=2, who="t", why="t")
    initialise.require_made_from(settings, str(model))
    with pytest.raises(initialise.NotAModel, match=f"was made from {model}, not from {tmp_path / 'first'}"):
        initialise.require_made_from(settings, str(tmp_path / "first"))


def test_options_that_contradict_the_file_it_would_write_are_refused_before_anything_is_written(
    model: Path, tmp_path: Path
) -> None:
    command = millrace("up", str(model), "--evaluation.holdout", "0")
    for _ in range(2):
        refused = subprocess.run(command, capture_output=True, text=True, timeout=120, env=child_environment())
        assert refused.returncode == 2, refused.stderr
        assert "evaluation.scorer=reward_model" in refused.stderr
        assert "evaluation.holdout is 0" in refused.stderr
    assert not Path("millrace.yaml").exists()
    assert not Path("home").exists()


def test_what_is_off_is_listed_with_how_to_switch_it_on_and_what_is_on_is_not(home_with_policy: Settings) -> None:
    rule = ("feedback.scoring.rules.exact.weight", "0")
    off = root.load(home_with_policy.snapshot(), [("evaluation.suite", "none.jsonl"), rule], {})
    lines = dict(line.split(":", 1) for line in switches(off))
    assert list(lines) == ["learning", "gate", "rules", "judge", "chat", "keys"]
    assert "evaluation.holdout" in lines["gate"]
    assert "feedback.scoring.judge.url" in lines["judge"]
    judge = '{"url": "http://127.0.0.1:9/v1", "model": "m", "rubric": "{prompt}{response}"}'
    on = root.load(home_with_policy.snapshot(), [("feedback.scoring.judge", judge)], {})
    (on.path("policies") / "v000001" / "chat_template.jinja").write_text("{{ messages }}")
    on.path("keys.json").write_text("{}")
    assert [line.split(":")[0] for line in switches(on)] == ["learning", "gate"]


@pytest.mark.long
def test_where_no_cycle_can_work_it_serves_watches_experiments_and_says_why_or_is_refused_if_it_must_have_one(
    small: Settings, model: Path, tmp_path: Path, nothing_left: Callable[[], list[str]]
) -> None:
    (small.path("suite.jsonl")).unlink()
    log = tmp_path / "up.log"
    assert start(small, log, "--schedule").wait(180) == 2
    assert "error: evaluation.suite: there is no file" in log.read_text()
    for named, sign in (([], "schedule: no cycles; it looks at"), ([str(model)], "Waiting for application startup")):
        process = start(small, log, *named)
        try:
            _until(lambda sign=sign: sign in log.read_text(), process, log)
            found = status.look(small)
            assert "evaluation.suite: there is no file" in str(found.loop_off)
            assert ("loop", "off") in list(status.lines(found))
            assert any("the loop is off: evaluation.suite" in problem.what for problem in found.problems)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(180)
        why = "loop: off, mend this and start `millrace up` again: evaluation.suite: there is no file"
        assert why in log.read_text()
    assert status.look(small).loop_off is None  # nothing runs


def test_it_serves_records_swaps_and_stops_without_a_trace(
    small: Settings, model: Path, tmp_path: Path, nothing_left: Callable[[], list[str]]
) -> None:
    log = tmp_path / "up.log"
    process = start(small, log)
    try:
        _until(lambda: "first cycle in" in log.read_text(), process, log)
        with httpx.Client(base_url=small.server_url, timeout=60) as client:
            answer = client.post("/generate", json={"prompt": "1+1=", "max_tokens": 4})
            assert answer.status_code == 200, answer.text
            vote = {"response_id": answer.json()["responses"][0]["response_id"], "kind": "thumb", "value": 1}
            assert client.post("/feedback", json=vote).status_code == 201

        store = PolicyStore(small.path(small.serve.policies))
        store.publish(model, parent=1, lineage={}, metrics={})
        pointer = promotion.promote(
            store, Ledger(store.root.parent / "decisions"), 2, who="tests", why="test", override=True
        )
        served = wait_for_serving.wait_until_served(small, store, pointer)
        assert served["replica"] == small.serve.replica_name
        assert _policy(small)["version"] == 2

        # A policy that the server can't load: it keeps the old one, and so does the pointer.
        store.publish(model, parent=1, lineage={}, metrics={})
        file = store.get(3).path / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"\xff")
        pointer = store.promote(3, expected=2, who="tests", why="a broken one")
        with pytest.raises(NotServed, match=r"could not load policy 3.*the pointer is (back )?at 2"):
            wait_for_serving.wait_until_served(small, store, pointer)
        _until(lambda: _policy(small)["generation"] == 4, process, log)
        assert _policy(small)["version"] == 2

        # Back to what really served before, which the command waits for.
        back = subprocess.run(
            millrace("--config", small.snapshot(), "rollback"), capture_output=True, text=True, timeout=300
        )
        assert back.stdout == "policy 1 serves (before: 2)\n", back.stderr
        assert _policy(small)["version"] == 1

        # What was recorded can be scored while the server runs.
        scored = subprocess.run(
            millrace("--config", small.snapshot(), "score"), capture_output=True, text=True, timeout=300
        )
        assert scored.returncode == 0, scored.stderr
        process.send_signal(signal.SIGINT)
        assert process.wait(180) == 0, log.read_text()
    finally:
        process.kill()
    assert nothing_left() == []
    printed = log.read_text()
    assert printed.index("stopping schedule") < printed.index("stopping serve")
    assert "killed" not in printed
    assert "leaked" not in printed
    resolved = small.resolved()
    counts = Lake(resolved.feedback.lake.uri, resolved.feedback.lake).counts()
    assert (counts["interactions"], counts["feedback"]) == (1, 1)


def _engines(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):  # one has ended meanwhile: look again
        return [one for one in psutil.Process(process.pid).children(recursive=True) if "EngineCore" in one.name()]
    return []


@pytest.mark.long
def test_a_server_that_dies_ends_it_with_its_last_words_and_nothing_is_restarted(
    small: Settings, tmp_path: Path, nothing_left: Callable[[], list[str]]
) -> None:
    log = tmp_path / "up.log"
    process = start(small, log)
    try:
        _until(lambda: "first cycle in" in log.read_text(), process, log)
        _until(lambda: len(_engines(process)) == 1, process, log)
        _engines(process)[0].kill()
        assert process.wait(180) != 0
    finally:
        process.kill()
    assert "error: serve ended with code" in log.read_text()
    assert "serve.log" in log.read_text()
    assert nothing_left() == []


def test_nothing_survives_a_kill_of_it(small: Settings, tmp_path: Path, nothing_left: Callable[[], list[str]]) -> None:
    log = tmp_path / "up.log"
    impatient = root.load(small.snapshot(), [("up.stop_grace_s", "2")], {})
    process = start(impatient, log, "--no-schedule")
    _until(lambda: "Waiting for application startup" in log.read_text(), process, log)
    assert len(nothing_left()) >= 3  # up, a subreaper, the server
    process.kill()
    process.wait(120)
    deadline = time.monotonic() + 120
    while nothing_left() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert nothing_left() == []


def test_a_server_that_can_not_start_is_reported_with_its_reason(
    small: Settings, tmp_path: Path, nothing_left: Callable[[], list[str]]
) -> None:
    (small.path("policies") / "v000001" / "model.safetensors").write_bytes(b"short")
    log = tmp_path / "up.log"
    assert start(small, log).wait(180) != 0
    assert "error: serve ended with code" in log.read_text()
    assert "model.safetensors has 5 bytes" in log.read_text()
    assert nothing_left() == []


def test_two_never_run_in_one_home(small: Settings, tmp_path: Path, nothing_left: Callable[[], list[str]]) -> None:
    with locked(small.path(".up.lock"), 0.0):
        log = tmp_path / "up.log"
        assert start(small, log).wait(120) == 1
    assert "another `millrace up` runs" in log.read_text()


def _policy(settings: Settings) -> dict[str, Any]:
    return wait_for_serving.server_policy(settings) or {}


def _until(condition: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline, log.read_text()
        assert process.poll() is None, log.read_text()
        time.sleep(0.1)


def test_options_that_made_the_file_count_from_then_on(model: Path, tmp_path: Path) -> None:
    options = [
        ("home", str(tmp_path / "elsewhere")),
        ("schedule.interval_seconds", "20"),
        ("serve.engine.threads", "1"),
        ("serve.engine.dtype", "float32"),
        ("feedback.lake.seal_seconds", "7"),
    ]
    before = root.load(None, options, {})
    assert initialise.write_config(before, Path("millrace.yaml"), options)
    assert not initialise.write_config(before, Path("millrace.yaml"), options)
    written = root.load(None, [], {})
    assert (written.home, written.schedule.interval_seconds) == (tmp_path / "elsewhere", 20.0)
    assert (written.serve.port, written.serve.engine.threads, written.serve.engine.dtype) == (8000, 1, "float32")
    assert written.feedback.lake.seal_seconds == 7.0
    text = Path("millrace.yaml").read_text()
    assert text.count("interval_seconds") == 1
    assert text.count("port:") == 1


def test_a_short_context_leaves_room_for_prompts(model: Path, tmp_path: Path) -> None:
    made = root.load(None, [("home", str(tmp_path / "short"))], {})
    initialise.initialise(made, str(model), revision=None, who="tests")  # a context of 128
    assert initialise.write_config(made, Path("millrace.yaml"), [("train.rollout.temperature", "0.5")])
    assert initialise.fit_responses(made, Path("millrace.yaml")) == 64
    written = root.load(None, [], {})
    assert written.train.rollout.temperature == 0.5
    assert (written.train.rollout.max_tokens, written.evaluation.max_tokens) == (64, 64)
    assert initialise.fit_responses(written, Path("millrace.yaml")) is None


def test_a_port_that_another_program_has_is_refused_before_anything_starts(
    small: Settings, tmp_path: Path, nothing_left: Callable[[], list[str]]
) -> None:
    with socket.create_server(("127.0.0.1", small.serve.port)):
        process = start(small, tmp_path / "up.log")
        assert process.wait(180) == 1
    output = (tmp_path / "up.log").read_text()
    assert f"error: can't listen on 127.0.0.1:{small.serve.port}: Address already in use: another program" in output
    assert "serving on" not in output
    assert "error: error:" not in output
