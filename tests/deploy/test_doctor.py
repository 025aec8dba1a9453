from __future__ import annotations

import socket
from datetime import UTC, datetime
from pathlib import Path

from packaging.requirements import Requirement

from deploy import doctor
from deploy.config import root
from deploy.config.root import Settings
from deploy.loop import records
from serve.middleware.api_keys import create_key


def found(settings: Settings) -> dict[str, doctor.Check]:
    return {check.name: check for check in doctor.examine(settings)}


def test_this_machine_can_run_millrace_and_every_complaint_says_what_to_do(home_with_policy: Settings) -> None:
    checks = found(home_with_policy)
    assert [check for check in checks.values() if check.level == "bad"] == []
    assert all(check.advice for check in checks.values() if check.level != "ok")
    assert {"python", "torch", "ray", "memory", "cores", "disk", "open files", "port", "home"} <= checks.keys()
    assert checks["home"].found.endswith("policy 1 serves")


def test_what_the_loop_still_lacks_is_found_before_it_is_started(settings: Settings) -> None:
    wrong = [
        ("schedule.cron", "0 99 * * *"),
        ("feedback.scoring.rules.task.function", "deploy.examples.demo.task:reward"),
    ]
    bare = root.load(None, [("home", str(settings.home / "elsewhere"))], {})
    missing = [check.found for check in doctor.examine(bare) if check.name == "loop"]
    assert any("evaluation.suite" in line for line in missing)
    suite = settings.home / "suite.jsonl"
    suite.parent.mkdir(parents=True, exist_ok=True)
    suite.write_text('{"id": "1", "prompt": "a", "answer": "b"}\n')
    configured = root.load(settings.snapshot(), [*wrong, ("evaluation.suite", str(suite))], {})
    assert "0 99 * * *" in found(configured)["loop"].found
    right = root.load(configured.snapshot(), [("schedule.cron", "0 9 * * *")], {})
    assert found(right)["loop"].level == "ok"
    suite.unlink()
    assert found(right)["loop"].level == "warn"
    drawn = root.load(right.snapshot(), [("evaluation.holdout", "0.1")], {})
    assert "exact_match needs each item's answer" in found(drawn)["loop"].found
    later = found(root.load(drawn.snapshot(), [("evaluation.scorer", "repetition_penalty")], {}))["loop"]
    assert (later.level, "a cycle draws the suite" in later.found) == ("ok", True)


def test_a_port_that_is_taken_is_found(settings: Settings) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", settings.serve.port))
        taken.listen()
        assert found(settings)["port"].level == "warn"


def test_a_server_that_would_not_start_for_want_of_keys_is_found(tmp_path: Path) -> None:
    own = root.load(None, [("home", str(tmp_path))], {})
    assert found(own)["keys"].level == "ok"
    others = root.load(None, [("home", str(tmp_path)), ("serve.host", "0.0.0.0")], {})
    assert found(others)["keys"].level == "bad"
    off = root.load(others.snapshot(), [("serve.auth", "off")], {})
    assert found(off)["keys"].level == "warn"
    create_key(tmp_path / "keys.json", name="one", tenant="t", scopes=["generate"])
    assert found(others)["keys"].found == f"1 of 1 in {tmp_path / 'keys.json'} are active"
    (tmp_path / "keys.json").write_text("{")
    assert "is not one" in found(own)["keys"].found


def test_a_gate_that_measures_what_is_optimised_is_told(settings: Settings) -> None:
    judge = {"url": "http://127.0.0.1:9/v1", "model": "m", "rubric": "{response}?"}
    options = [(f"feedback.scoring.judge.{name}", value) for name, value in judge.items()]
    settings = root.load(settings.snapshot(), [*options, ("evaluation.scorer", "judge")], {})
    [check] = [check for check in doctor._loop(settings) if check.name == "gate"]
    assert check.level == "warn"
    assert "the gate measures what is optimised" in check.found


def test_a_loop_whose_trainings_publish_nothing_is_found(settings: Settings) -> None:
    stages = [records.Stage(name="train", started_at=datetime.now(UTC), ok=True)]
    settings.path("cycles").mkdir()
    for number in (1, 2, 3):
        assert [check.name for check in doctor._loop(settings)] == ["loop"]
        record = records.CycleRecord(
            number=number, status="skipped", reason="equal rewards", started_at=datetime.now(UTC), stages=stages
        )
        records.write(settings, record)
    *_, check = doctor._loop(settings)
    assert (check.name, check.level) == ("training", "warn")
    assert check.found == "the last 3 cycles that trained published nothing; the last one: equal rewards"


def test_a_home_in_memory_is_found() -> None:
    assert found(root.load(None, [("home", "/dev/shm/nowhere")]))["fsync"].level == "bad"


def test_settings_that_ask_for_more_memory_than_there_is_are_found(settings: Settings) -> None:
    greedy = root.load(settings.snapshot(), [("serve.engine.kv_cache_bytes", str(2**50))], {})
    check = found(greedy)["memory"]
    assert check.level == "warn"
    assert "serve.engine.kv_cache_bytes" in check.advice


def test_the_plan_of_the_server_training_and_evaluation_is_part_of_it(home_with_policy: Settings) -> None:
    checks = found(home_with_policy)
    for name in ("plan of serve", "plan of train", "plan of evaluation"):
        assert (checks[name].level, checks[name].advice) == ("ok", "")
    assert "of weights and at least" in checks["plan of serve"].found
    assert " on each rank, of which " in checks["plan of train"].found
    greedy = [
        (f"{engine}.kv_cache_bytes", str(2**50)) for engine in ("serve.engine", "train.rollout", "evaluation.engine")
    ]
    checks = {check.name: check for check in doctor._plans(root.load(home_with_policy.snapshot(), greedy, {}))}
    assert {check.level for check in checks.values()} == {"bad"}
    assert "lower serve.engine.kv_cache_bytes" in checks["plan of serve"].advice
    assert "of which 1048576.0 GiB are rollout kv_cache" in checks["plan of train"].found
    assert "these settings would fit: train.rollout.kv_cache_bytes=" in checks["plan of train"].advice
    elsewhere = [("train.ray_address", "http://127.0.0.1:1"), ("serve.fleet.ray_address", "http://127.0.0.1:1")]
    for check in doctor._plans(root.load(home_with_policy.snapshot(), elsewhere, {})):
        if check.name == "plan of evaluation":  # which is where the cycle is
            continue
        assert check.level == "ok"
        assert check.found.startswith("not planned: it runs on the cluster of ")


def test_what_engines_get_of_the_models_context_is_told_and_what_can_not_be_is_bad(home_with_policy: Settings) -> None:
    small = [("serve.engine.kv_cache_bytes", str(2**20)), ("serve.engine.dtype", "float32")]
    checks = found(root.load(home_with_policy.snapshot(), [*small, ("train.ranks", "1")], {}))
    assert checks["context of serve.engine"].found == "128 tokens"
    assert checks["context of train.rollout"].level == "ok"
    assert checks["context of evaluation.engine"].level == "ok"
    longer = root.load(home_with_policy.snapshot(), [("serve.engine.max_model_len", "129")], {})
    check = found(longer)["context"]
    assert check.level == "bad"
    assert "serve.engine.max_model_len=129 is more than the 128 tokens of context of the model" in check.found


def test_the_disk_is_measured_and_nothing_is_left_on_it(tmp_path: Path) -> None:
    times = doctor.fsync_seconds(tmp_path, rounds=5)
    assert len(times) == 5
    assert min(times) > 0
    assert list(tmp_path.iterdir()) == []


def test_a_version_that_the_package_does_not_allow_is_bad() -> None:
    assert doctor._satisfies("2.60.1", Requirement("ray[default]==2.60.*"))
    assert doctor._satisfies("2.13.0+cpu", Requirement("torch==2.13.0"))
    assert not doctor._satisfies("2.61.0", Requirement("ray[default]==2.60.*"))
