from __future__ import annotations

import itertools
import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest

from deploy.config import root
from deploy.config.root import ConfigError, ScheduleConfig, Settings, child_environment
from deploy.loop import records, schedule
from deploy.supervise import resident
from deploy.supervise.children import millrace
from tests.deploy.conftest import scoring_waits
from tests.feedback.feedback_rows import interaction, put
from tests.paths import ROOT


def changed(settings: Settings, *options: tuple[str, str]) -> Settings:
    return root.load(settings.snapshot(), options, {})


def start(settings: Settings, log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            millrace("--config", settings.snapshot(), "schedule"),
            stdout=output,
            stderr=output,
            env=child_environment({"PYTHONPATH": str(ROOT)}),
        )


def test_runs_that_are_due_while_one_runs_become_one_and_none_overlap(
    home_with_policy: Settings, tmp_path: Path, nothing_left: Callable[[], list[str]]
) -> None:
    # A cycle on an empty lake takes a second or two, which is several intervals.
    log = tmp_path / "schedule.log"
    settings = changed(home_with_policy, ("schedule.interval_seconds", "0.3"), ("schedule.first_after_seconds", "0"))
    process = start(settings, log)
    _until(lambda: sum(r.status == "skipped" for r in records.load_all(settings)) >= 2, process, log)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 0, log.read_text()
    assert nothing_left() == []
    found = records.load_all(settings)
    for before, after in itertools.pairwise(found):
        assert before.finished_at is not None
        assert before.finished_at <= after.started_at
    assert "they become one" in log.read_text()


def test_a_cycle_that_was_killed_leaves_servers_no_candidate_to_prepare(
    home_with_policy: Settings, tmp_path: Path
) -> None:
    log, store = tmp_path / "schedule.log", home_with_policy.policy_store()
    settings = changed(home_with_policy, ("schedule.first_after_seconds", "0"))  # the next one is an hour away
    with scoring_waits(settings):
        process = start(settings, log)
        _until(lambda: any(record.stages for record in records.load_all(settings)), process, log)
        _until(lambda: any(True for _ in _cycles(settings)), process, log)
        store.announce(1)
        max(_cycles(settings), key=lambda one: (one.create_time(), one.pid)).kill()  # its subreaper has the same name
        _until(lambda: store.announced() is None, process, log)
    stop(process, log)


def test_it_ends_after_max_cycles_and_each_line_of_its_log_is_json_if_a_setting_says_so(
    settings: Settings, tmp_path: Path
) -> None:
    # Without a policy each cycle fails at once, which counts.
    log = tmp_path / "schedule.log"
    few = changed(
        settings,
        ("schedule.interval_seconds", "0.3"),
        ("schedule.first_after_seconds", "0"),
        ("schedule.max_cycles", "2"),
        ("serve.log_format", "json"),
    )
    began = datetime.now(UTC)
    assert start(few, log).wait(180) == 0, log.read_text()
    assert [record.status for record in records.load_all(few)] == ["failed", "failed"]
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    times = [datetime.fromisoformat(line["time"]) for line in lines]
    assert all(began <= time <= datetime.now(UTC) for time in times)
    own = [line["message"] for line in lines if line["logger"] == "millrace.schedule"]
    assert own[0] == "schedule: every 0.3 s, first cycle in 0 s"
    assert own[-1] == "schedule: 2 cycles done, schedule.max_cycles reached"
    cycles = [line["message"] for line in lines if line["logger"] == "millrace.cycle"]  # its children
    assert [message.partition(": no policy serves")[0] for message in cycles] == ["cycle 1: failed", "cycle 2: failed"]
    assert len(own) + len(cycles) == len(lines)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_cycles_of_a_schedule_train_and_are_judged_in_workers_that_stay_and_end_with_it(
    home_with_policy: Settings, tmp_path: Path, nothing_left: Callable[[], list[str]]
) -> None:
    options = {
        "schedule.interval_seconds": "0.5",
        "schedule.first_after_seconds": "0",
        "schedule.max_cycles": "2",
        "cycle.recipe": "rlvr",
        "cycle.min_new_rewards": "0",
        "feedback.scoring.rules.short.sql": "1 / (1 + len(response_token_ids))",
        "train.dtype": "float32",
        "train.ranks": "2",
        "train.steps": "2",
        "train.data.prompts_per_step": "4",
        "train.data.min_prompts": "4",
        "train.rollout.max_tokens": "4",
        "evaluation.max_tokens": "4",
        "evaluation.gate.min_items": "20",
        "evaluation.gate.max_items": "30",
    }
    for engine in ("train.rollout", "evaluation.engine"):
        options |= {f"{engine}.max_model_len": "64", f"{engine}.kv_cache_bytes": "16000000"}
    settings, log = changed(home_with_policy, *options.items()), tmp_path / "schedule.log"
    lake = settings.lake()
    lake.create()

    def ask(addend: int) -> None:
        """Log a response to each of ten prompts."""
        prompts = [{"prompt": f"{i}+{addend}=", "prompt_token_ids": [28 + i, 39, 28 + addend, 40]} for i in range(10)]
        said = {"response": "3", "response_token_ids": [31, 1]}
        put(lake, "interactions", [interaction(f"{i}+{addend}", **of, **said) for i, of in enumerate(prompts)])

    ask(2)
    process, starts = start(settings, log), set()

    def ended(cycles: int) -> bool:
        if (found := resident.residents(settings)) is not None:
            starts.add(found["since"])
        return len([record for record in records.load_all(settings) if record.candidate]) == cycles

    _until(lambda: ended(1), process, log)
    ask(3)  # without more the second cycle would train the first one's policy again
    _until(lambda: ended(2), process, log)
    assert process.wait(180) == 0, log.read_text()
    assert nothing_left() == []
    assert resident.residents(settings) is None
    assert not settings.path(resident.SHARED).exists()
    assert len(starts) == 1, "both cycles had the same workers"
    for record in records.load_all(settings):
        assert record.status in ("promoted", "refused", "undecided"), record.reason
        (file,) = settings.path("evaluations").glob(f"{record.candidate}-vs-*.json")
        engines = json.loads(file.read_text())["engines"]
        assert engines == {"candidate": "resident", "incumbent": "resident"}
    assert "anew" not in (settings.path(settings.up.logs) / "resident.log").read_text()


def test_a_crontab_line_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="'every now and then'"):
        schedule.trigger(ScheduleConfig(cron="every now and then"))


def test_a_crontab_line_is_followed(settings: Settings) -> None:
    due = schedule.trigger(ScheduleConfig(cron="*/5 * * * *"))
    at = schedule.first_run(settings, due)
    assert (at.minute % 5, at.second) == (0, 0)
    assert timedelta() < at - datetime.now(UTC) <= timedelta(minutes=5)


@pytest.mark.parametrize(
    ("cron", "last_ago", "wait"),
    [
        (None, None, 60.0),  # no history: one interval
        (None, 20.0, 40.0),  # a restart doesn't begin the interval anew
        (None, 1000.0, 0.0),  # missed ones: one, at once
        ("* * * * *", 1000.0, 0.0),
    ],
)
def test_a_scheduler_that_was_down_runs_what_it_missed_once_and_at_once(
    cron: str | None, last_ago: float | None, wait: float, settings: Settings
) -> None:
    started = datetime.now(UTC) - timedelta(seconds=last_ago or 0)
    if last_ago is not None:
        folder = settings.path("cycles")
        folder.mkdir()
        record = records.CycleRecord(number=1, status="skipped", started_at=started, finished_at=started)
        (folder / "000001.json").write_text(record.model_dump_json())
    options = [("schedule.interval_seconds", "60"), *([("schedule.cron", cron)] if cron else [])]
    later = changed(settings, *options)
    before = datetime.now(UTC)
    due = schedule.first_run(later, schedule.trigger(later.schedule))
    if last_ago is not None and wait:
        assert due == started + timedelta(seconds=last_ago + wait)
    else:
        assert before <= due - timedelta(seconds=wait) <= datetime.now(UTC)


def _cycles(settings: Settings) -> Iterator[psutil.Process]:
    """The processes of a cycle; they may be forked from what the session's tests share."""
    for each in psutil.process_iter():
        with suppress(psutil.NoSuchProcess):
            words = each.cmdline()
            if words[-1:] == ["cycle"] and any(str(settings.home) in word for word in words):
                yield each


def stop(process: subprocess.Popen[bytes], log: Path) -> None:
    process.send_signal(signal.SIGTERM)
    assert process.wait(180) == 0, log.read_text()


def _until(condition: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 400
    while not condition():
        assert time.monotonic() < deadline, log.read_text()
        assert process.poll() is None, log.read_text()
        time.sleep(0.1)
