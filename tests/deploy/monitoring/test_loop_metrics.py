"""The loop's metrics, from what a home has on record."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pyarrow as pa
import pytest
from feedback_rows import append, interaction, reward, thumb
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from deploy.config import root
from deploy.config.root import Settings
from deploy.loop import promotion, records
from deploy.loop.records import CycleRecord, Stage
from deploy.monitoring import listener
from deploy.monitoring.loop import PREFIX, LoopMetrics
from deploy.monitoring.traffic import POLICIES, TrafficReader, read
from deploy.notify.webhooks import FAILED, FOLDER
from feedback.files import locked
from feedback.ingest.seal import seal
from feedback.journal.writer import Journal
from feedback.schema import TABLES
from loadtests.server import free_port
from serve.gpus import gpus
from serve.middleware.api_keys import create_key
from serve.middleware.keyring import NeedsKeys
from serve.policies.experiments import Experiments
from tests.deploy.display.test_live_report import begin
from tests.evaluation.decisions.worlds import config, items, judged
from train.run.recovery.restarts import Restart, add_restart

NOW = datetime(2026, 3, 10, 12, tzinfo=UTC)
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(text: str) -> Samples:
    """(name without its prefix, sorted labels) -> value."""
    found = (one for family in text_string_to_metric_families(text) for one in family.samples)
    return {(one.name.removeprefix(PREFIX), tuple(sorted(one.labels.items()))): one.value for one in found}


def collected(settings: Settings, traffic: TrafficReader | None = None, *, cycles: bool = True) -> Samples:
    registry = CollectorRegistry()
    registry.register(LoopMetrics(settings, traffic or TrafficReader(settings), NOW, cycles=cycles))
    return samples(generate_latest(registry).decode())


def of(found: Samples, name: str, **labels: str) -> float:
    return found[name, tuple(sorted(labels.items()))]


def cycle(settings: Settings, number: int, status: str, *stages: tuple[str, float | None], **more: object) -> None:
    """A record of a cycle that began ``number`` hours after NOW."""
    at = NOW + timedelta(hours=number)
    done = [Stage(name=n, started_at=at, seconds=s, ok=None if s is None else True) for n, s in stages]
    ended = None if status == "running" else at + timedelta(minutes=1)
    settings.path(settings.cycle.folder).mkdir(exist_ok=True)
    record = {"number": number, "status": status, "started_at": at, "finished_at": ended, "stages": done, **more}
    records.write(settings, CycleRecord.model_validate(record))


def test_cycles_are_counted_by_outcome_and_their_stages_timed(home_with_policy: Settings) -> None:
    settings = home_with_policy
    cycle(settings, 1, "promoted", ("score", 2.0), ("train", 30.0), candidate=2)
    cycle(settings, 2, "skipped", ("score", 4.0))
    for number in (3, 4):
        cycle(settings, number, "failed", ("score", 3.0), ("train", 10.0))
    cycle(settings, 5, "running", ("score", 1.0), ("train", None))
    found = collected(settings)
    outcomes = {labels[0][1]: n for (name, labels), n in found.items() if name == "cycles_total" and n}
    assert outcomes == {"promoted": 1, "skipped": 1, "failed": 2}
    assert (of(found, "stage_seconds_sum", stage="score"), of(found, "stage_seconds_count", stage="score")) == (12, 4)
    assert of(found, "stage_seconds_sum", stage="train") == 50
    assert of(found, "cycles_failed_in_a_row") == of(found, "cycles_without_candidate") == 2
    assert of(found, "last_cycle_timestamp_seconds") == (NOW + timedelta(hours=4, minutes=1)).timestamp()
    assert of(found, "due_timestamp_seconds") == (NOW + timedelta(hours=6)).timestamp()  # an hour after the last one
    # It runs only while its process does.
    assert of(found, "cycle_running") == 0
    assert not [name for name, _ in found if name == "stage_started_timestamp_seconds"]
    with locked(settings.path(settings.cycle.folder) / ".lock", 5):
        found = collected(settings)
    assert of(found, "cycle_running") == 1
    assert of(found, "stage_started_timestamp_seconds", stage="train") == (NOW + timedelta(hours=5)).timestamp()
    found = collected(settings, cycles=False)
    assert of(found, "enabled") == 0
    assert ("due_timestamp_seconds", ()) not in found


@pytest.mark.parametrize(
    ("options", "minutes", "due"),
    [
        ({"interval_seconds": "3600"}, 50, 60),
        ({"interval_seconds": "3600"}, 65, 120),  # what was due after an hour became one with it
        ({"interval_seconds": "3600", "jitter_seconds": "1800"}, 65, 150),
        ({"cron": "0 * * * *"}, 50, 60),
        ({"cron": "0 * * * *"}, 125, 180),
    ],
)
def test_what_was_due_while_a_cycle_was_at_work_is_not_late(
    home_with_policy: Settings, options: dict[str, str], minutes: float, due: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "UTC")  # crontab lines are in local time
    layers = [(f"schedule.{name}", value) for name, value in options.items()]
    settings = root.load(home_with_policy.snapshot(), layers, {})
    cycle(settings, 0, "promoted", finished_at=NOW + timedelta(minutes=minutes))
    assert of(collected(settings), "due_timestamp_seconds") == (NOW + timedelta(minutes=due)).timestamp()


def test_what_changes_between_two_scrapes_is_seen_and_a_restart_changes_nothing(home_with_policy: Settings) -> None:
    settings, registry = home_with_policy, CollectorRegistry()
    registry.register(LoopMetrics(settings, TrafficReader(settings), NOW, cycles=True))
    cycle(settings, 1, "running", ("score", None))
    assert of(samples(generate_latest(registry).decode()), "cycles_total", outcome="refused") == 0
    cycle(settings, 1, "refused", ("score", 1.5))
    later = samples(generate_latest(registry).decode())
    assert of(later, "cycles_total", outcome="refused") == 1
    disk = "disk_free_bytes"
    assert {k: v for k, v in later.items() if k[0] != disk} == {
        k: v for k, v in collected(settings).items() if k[0] != disk
    }


def test_the_gate_shows_its_verdicts_and_what_is_left_of_the_error_budget(home_with_policy: Settings) -> None:
    before = collected(home_with_policy)
    assert of(before, "error_budget_left") == of(before, "error_budget") == 0.05
    ledger = home_with_policy.ledger()
    budget = {"rule": "fixed_horizon", "alpha": 0.05, "horizon": 2}
    judged(ledger, 2, items(500, gain=0.3, differing=0.4), settings=config(budget=budget))
    settings = root.load(
        home_with_policy.snapshot(), [(f"evaluation.gate.budget.{k}", str(v)) for k, v in budget.items()], {}
    )
    found = collected(settings)
    assert of(found, "verdicts_total", verdict="pass") == 1
    assert of(found, "error_budget_left") == pytest.approx(0.025)
    assert of(found, "error_budget_next_level") == pytest.approx(0.025)
    judged(ledger, 3, items(500, gain=-0.3, differing=0.4, name="other"), settings=config(budget=budget))
    found = collected(settings)
    assert of(found, "verdicts_total", verdict="refuse") == 1
    assert (of(found, "error_budget_left"), of(found, "error_budget_next_level")) == pytest.approx((0, 0))


def test_the_gates_series_go_on_with_the_ledger_and_begin_anew_behind_an_entry_that_is_none(
    home_with_policy: Settings,
) -> None:
    ledger, registry = home_with_policy.ledger(), CollectorRegistry()
    registry.register(LoopMetrics(home_with_policy, TrafficReader(home_with_policy), records.now(), cycles=True))
    for i, name in enumerate(("first", "second"), start=2):
        judged(ledger, i, items(500, gain=0.3, differing=0.4, name=name), settings=config())
        found = samples(generate_latest(registry).decode())
        assert of(found, "verdicts_total", verdict="pass") == i - 1
        assert found == samples(generate_latest(registry).decode()) | {
            key: value for key, value in found.items() if key[0] == "disk_free_bytes"
        }
    ledger.append("verdict", {"no": "verdict"}, who="me")
    for _ in range(2):
        assert of(samples(generate_latest(registry).decode()), "readable", part="gate") == 0


def test_the_lag_is_from_the_newest_feedback_that_the_serving_policy_could_learn_from(
    home_with_policy: Settings, model: Path
) -> None:
    settings, store = home_with_policy, home_with_policy.policy_store()
    assert of(collected(settings), "serving_policy") == 1
    assert ("feedback_lag_seconds", ()) not in collected(settings)  # nobody taught it
    store.publish(model, parent=1, lineage={}, metrics={})
    moved = store.promote(2, expected=1, who="cycle", why="test")
    scored = datetime.fromisoformat(moved.at) - timedelta(seconds=90)
    cycle(settings, 1, "promoted", candidate=2)
    record = records.load_all(settings)[0]
    records.write(settings, record.model_copy(update={"stages": [Stage(name="score", started_at=scored, seconds=2)]}))
    found = collected(settings)
    assert (of(found, "serving_policy"), of(found, "feedback_lag_seconds")) == (2, pytest.approx(90))
    assert of(found, "learned_until_timestamp_seconds") == pytest.approx(scored.timestamp())
    store.record_outcome(moved, served=True, by="replica-0")
    promotion.rollback(store, who="tests", why="test", to=1, override=True)
    found = collected(settings)
    assert of(found, "moves_total", kind="rollback") == 1
    assert of(found, "moves_total", kind="promotion") == 2


def test_an_experiment_shows_its_state_its_wealth_and_its_confidence_sequence(home_with_policy: Settings) -> None:
    store = Experiments(home_with_policy.policy_store().root)
    difference = {"name": "feedback", "observed": 0.2, "low": -0.1, "high": None, "gain": 7.5, "harm": 0.5}
    begin(store, latest={"differences": [difference]})
    found = collected(home_with_policy)
    assert of(found, "experiment_state", state="running") == 1
    assert of(found, "experiment_wealth", outcome="feedback", shows="gain") == 7.5
    assert of(found, "experiment_difference", outcome="feedback", bound="low") == -0.1
    assert ("experiment_difference", (("bound", "high"), ("outcome", "feedback"))) not in found  # not known yet
    store.change(1, lambda one: replace(one, state="ended", end={"decision": "roll back"}))
    found = collected(home_with_policy)
    assert of(found, "experiment_state", state="ended") == of(found, "experiments_total", decision="roll back") == 1
    assert not [name for name, _ in found if name == "experiment_wealth"]


def test_training_shows_the_newest_whole_step_and_leaves_out_what_is_no_number(home_with_policy: Settings) -> None:
    run = home_with_policy.path(home_with_policy.train.runs) / "cycle-000001"
    run.mkdir(parents=True)
    rows = [{"step": 3, "reward": 0.25, "kl_ref": 0.5}, {"step": 4, "reward": 0.5, "kl_ref": math.nan, "entropy": 1.5}]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows) + '{"step": 5, "rew')
    found = collected(home_with_policy)
    assert [of(found, f"training_{name}") for name in ("step", "reward", "entropy")] == [4, 0.5, 1.5]
    assert ("training_kl", ()) not in found


def test_rewards_and_feedback_are_the_lakes_with_few_policies_and_nobodys_name(home_with_policy: Settings) -> None:
    settings, lake = home_with_policy, home_with_policy.lake()
    lake.create()
    rewarded = [("new", 15, 0.25, 1), ("newer", 15, 0.75, 2), ("old", 3, 1.0, 40), ("older", 2, 0.5, 41)]
    rewarded += [(f"r{version}", version, 1.0, 1000) for version in range(4, 14)]  # too old for both windows
    rows = []
    for name, version, value, hours in rewarded:
        at = NOW - timedelta(hours=hours)
        spans = [{"start": 0, "policy_version": 1}, {"start": 1, "policy_version": version}]
        rows.append(interaction(name, created_at=at, completed_at=at, policy_spans=spans, user="ann", tenant="acme"))
        lake.append("rewards", pa.Table.from_pylist([reward(name, value)], schema=TABLES["rewards"]))
    journal = Journal(Path(settings.resolved().feedback.journal.folder), settings.feedback.journal, "replica-0")
    journal.open()
    for row in [*rows, interaction("aborted", status="aborted"), interaction("unrated")]:
        append(journal, "interactions", row)
    append(journal, "feedback", thumb("new", 1.0, tenant="acme"))
    journal.close()
    seal(lake, Path(settings.resolved().feedback.journal.folder))

    traffic = TrafficReader(settings)
    traffic.latest = read(settings, NOW)
    found = collected(settings, traffic)
    assert of(found, "lake_rows", table="interactions") == len(rewarded) + 2
    assert of(found, "feedback_rate") == 1 / (len(rewarded) + 1)
    means = {labels[0][1]: value for (name, labels), value in found.items() if name == "reward_mean"}
    assert len(means) == POLICIES
    assert (means["15"], min(map(int, means))) == (0.5, 5)
    assert (of(found, "reward_recent_mean"), of(found, "reward_before_mean")) == (0.5, 0.75)
    assert of(found, "reward_change_standard_error") == pytest.approx(math.sqrt(0.125 / 2 + 0.125 / 2))
    assert not any("acme" in str(key) or "ann" in str(key) for key in found)


def test_a_part_that_can_not_be_read_is_said_and_hides_no_other(
    home_with_policy: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    folder = home_with_policy.path(home_with_policy.cycle.folder)
    folder.mkdir()
    (folder / "000001.json").write_text("{")
    found = collected(home_with_policy)
    assert of(found, "readable", part="cycles") == 0
    assert of(found, "readable", part="gate") == 1
    assert of(found, "error_budget_left") == 0.05
    assert "metrics of cycles can't be read" in caplog.text


def test_without_a_gpu_there_are_no_series_of_one(home_with_policy: Settings) -> None:
    expected = {(name, (("gpu", str(one.index)),)) for one in gpus() for name in ("gpu_use_ratio",)}
    assert {key for key in collected(home_with_policy) if key[0] == "gpu_use_ratio"} == expected


@contextmanager
def listening(settings: Settings, **options: str) -> Iterator[tuple[Settings, str]]:
    port = str(free_port())
    named = [("schedule.metrics.port", port), *((f"schedule.metrics.{name}", value) for name, value in options.items())]
    changed = root.load(settings.snapshot(), named, {})
    with listener.serving(changed, cycles=True):
        yield changed, f"http://127.0.0.1:{port}"


def test_the_scheduler_listens_only_where_a_setting_says_so(home_with_policy: Settings) -> None:
    with listener.serving(home_with_policy, cycles=True):
        pass  # no port, no listener
    with listening(home_with_policy) as (settings, url):
        answer = httpx.get(f"{url}/metrics", timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert of(samples(answer.text), "serving_policy") == 1
        assert httpx.get(f"{url}/policy", timeout=60).status_code == 404
        assert httpx.post(f"{url}/metrics", timeout=60).status_code == 405
        with pytest.raises(OSError, match="can't listen on"), listener.serving(settings, cycles=True):
            pass
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/metrics", timeout=60)


def test_a_page_of_another_host_reads_no_metrics(home_with_policy: Settings) -> None:
    with listening(home_with_policy) as (_, url):
        refused = httpx.get(f"{url}/metrics", headers={"Host": "rebound.example"}, timeout=60)
        assert refused.status_code == 421
        assert "millrace_loop" not in refused.text
        assert (
            httpx.get(f"{url}/metrics", headers={"Origin": "http://elsewhere.example"}, timeout=60).status_code == 403
        )


def test_metrics_need_an_admins_key_as_soon_as_there_are_keys_and_are_for_this_machine_until_then(
    home_with_policy: Settings,
) -> None:
    with (
        pytest.raises(NeedsKeys, match=r"schedule\.metrics\.host is 0\.0\.0\.0"),
        listening(home_with_policy, host="0.0.0.0"),
    ):
        pass
    keys = home_with_policy.path(home_with_policy.serve.keys)
    with listening(home_with_policy) as (_, url):
        _, admin = create_key(keys, name="prometheus", tenant="ops", scopes=("admin",))
        _, user = create_key(keys, name="app", tenant="acme", scopes=("generate", "feedback"))
        codes = [
            httpx.get(f"{url}/metrics", headers=headers, timeout=60).status_code
            for headers in ({}, {"Authorization": f"Bearer {user}"}, {"Authorization": f"Bearer {admin}"})
        ]
        assert codes == [401, 403, 200]
    with listening(home_with_policy, host="0.0.0.0") as (_, url):
        assert httpx.get(f"{url}/metrics", timeout=60).status_code == 401


def test_a_client_that_sends_nothing_holds_nobody_up(home_with_policy: Settings) -> None:
    with listening(home_with_policy) as (settings, url):
        port = settings.schedule.metrics.port
        assert port is not None
        with socket.create_connection(("127.0.0.1", port)):
            assert httpx.get(f"{url}/metrics", timeout=60).status_code == 200


def test_events_that_a_webhook_was_not_told_of_are_counted(home_with_policy: Settings) -> None:
    hook = ("schedule.webhooks.chat.url", "https://hooks.example/x")
    settings = root.load(home_with_policy.snapshot(), [hook], {})
    assert of(collected(settings), "webhook_failures_total", webhook="chat") == 0
    settings.path(FOLDER).mkdir()
    (settings.path(FOLDER) / f"chat{FAILED}").write_text('{"id": "cycle-1"}\n{"id": "cycle-2"}\n')
    assert of(collected(settings), "webhook_failures_total", webhook="chat") == 2


def test_restarts_of_all_runs_are_counted_by_what_had_happened(home_with_policy: Settings) -> None:
    settings = home_with_policy
    assert of(collected(settings), "training_restarts_total", kind="lost") == 0
    for run, kinds in {"a": ("lost", "hung"), "b": ("lost",)}.items():
        folder = settings.path(settings.train.runs) / run
        folder.mkdir(parents=True)
        for kind in kinds:
            add_restart(folder, Restart(at=NOW, kind=kind, cause="it", failed_after=2, step=1))
    found = collected(settings)
    assert of(found, "training_restarts_total", kind="lost") == 2
    assert of(found, "training_restarts_total", kind="hung") == 1
