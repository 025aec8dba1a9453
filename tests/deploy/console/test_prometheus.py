"""A real Prometheus scrapes the server that the console's tests have running, and a scheduler of its home.

Every expression of the dashboards and the alerts is asked for. It is here for that server's sake.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.config import root
from deploy.config.root import child_environment
from deploy.loop import records
from deploy.loop.records import CycleRecord, Stage
from deploy.monitoring.alerts import ALERTS, JOBS, rules, scrape_config
from deploy.monitoring.dashboards import dashboards
from deploy.supervise.children import millrace
from loadtests.server import free_port
from tests.deploy.console.conftest import Site
from tests.paths import ROOT

# Series that a home may be without, and why this one is.
ABSENT = {
    "millrace_loop_experiment_wealth": "no experiment runs",
    "millrace_loop_experiment_difference": "no experiment runs",
    "millrace_loop_reward_recent_mean": "nothing was scored",
    "millrace_loop_reward_before_mean": "nothing was scored a day ago",
    "millrace_loop_reward_change_standard_error": "there is nothing to compare",
    "millrace_loop_reward_mean": "nothing was scored",
    "millrace_loop_feedback_lag_seconds": "no cycle has trained the policy that serves",
    "millrace_loop_learned_until_timestamp_seconds": "no cycle has trained the policy that serves",
    "millrace_loop_gpu_memory_used_bytes": "the machine has no GPU",
    "millrace_loop_gpu_memory_bytes": "the machine has no GPU",
    "millrace_loop_gpu_use_ratio": "the machine has no GPU",
    "millrace_loop_webhook_failures_total": "no webhook is set",
    "millrace_auth_failures_total": "every request so far may have had a good key",
}
_METRIC = re.compile(r"\b(millrace_\w+)")


@dataclass
class Prometheus:
    """``log``: its own, and the scheduler's; ``processes``: the scheduler and Prometheus."""

    url: str
    log: Path
    processes: list[subprocess.Popen[bytes]]

    def get(self, path: str, **parameters: str) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=60)
        if answer.status_code == 503:
            raise httpx.HTTPError("it still starts")
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return found


@pytest.fixture(scope="module")
def prometheus(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not on PATH: nothing scrapes (Debian: apt-get install prometheus)")
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "suite.jsonl").write_text(
        "".join(f'{{"id": "{i}", "prompt": "{i}+1=", "answer": "{i + 1}"}}\n' for i in range(60))
    )
    options = {
        "evaluation.suite": folder / "suite.jsonl",
        "feedback.scoring.rules.exact.ready": "exact_match",
        "train.rollout.max_tokens": 32,
        "schedule.first_after_seconds": 600,
        "schedule.metrics.port": free_port(),
        "schedule.metrics.lake_seconds": 0.5,
    }
    settings = root.load(site.settings.snapshot(), [(name, str(value)) for name, value in options.items()], {})
    site.make_key("prometheus", "admin")
    (folder / "key").write_text(site.secrets["prometheus"])
    (folder / "alerts.yaml").write_text(rules("docs"))
    config = scrape_config(settings, "alerts.yaml", folder / "key").replace("15s", "1s")
    (folder / "prometheus.yaml").write_text(config)
    _history(settings)
    port, log = free_port(), folder / "log"
    commands = [
        millrace("--config", settings.snapshot(), "schedule"),
        [
            program, f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
    ]  # fmt: skip
    with log.open("wb") as output:
        processes = [
            subprocess.Popen(command, stdout=output, stderr=output, env=child_environment({"PYTHONPATH": str(ROOT)}))
            for command in commands
        ]
    try:
        yield Prometheus(f"http://127.0.0.1:{port}", log, processes)
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            try:
                process.wait(180)
            finally:
                process.kill()


def _history(settings: root.Settings) -> None:
    """A cycle that failed while it trained, and what its run has measured."""
    at = records.now() - timedelta(minutes=5)
    stages = [Stage(name=name, started_at=at, seconds=2.0, ok=True) for name in ("score", "train")]
    settings.path(settings.cycle.folder).mkdir(exist_ok=True)
    record = CycleRecord(number=1, status="skipped", started_at=at, finished_at=at, stages=stages, candidate=None)
    records.write(settings, record)
    run = settings.path(settings.train.runs) / "cycle-000001"
    run.mkdir(parents=True)
    row = {"step": 1, "reward": 0.5, "kl_ref": 0.01, "entropy": 1.5}
    (run / "metrics.jsonl").write_text(f"{json.dumps(row)}\n")


def until(condition: Callable[[], bool], prometheus: Prometheus) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert all(process.poll() is None for process in prometheus.processes), prometheus.log.read_text()[-4000:]
        assert time.monotonic() < deadline, prometheus.log.read_text()[-4000:]
        time.sleep(0.3)


def test_prometheus_scrapes_server_and_scheduler_with_a_key_and_every_expression_finds_its_series(
    site: Site, prometheus: Prometheus
) -> None:
    with site.client() as client:
        vote = {"response_id": site.responses[0], "kind": "thumb", "value": 1}
        headers = {"X-API-Key": site.secrets["ann"]}
        assert client.post("/feedback", json=vote, headers=headers).status_code == 201

    def scraped() -> bool:
        with suppress(httpx.HTTPError):
            found = {one["metric"]["job"] for one in prometheus.query("count_over_time(up[1m]) > 3 and up == 1")}
            return found == set(JOBS) and bool(prometheus.query("millrace_loop_lake_rows"))
        return False

    until(scraped, prometheus)
    names = set(prometheus.get("label/__name__/values"))
    expressions = [
        target["expr"].replace("$home", ".*")
        for board in dashboards().values()
        for panel in board["panels"]
        for target in panel["targets"]
    ]
    for expression in [*expressions, *(alert.expression for alert in ALERTS)]:
        found = prometheus.query(expression)  # it parses
        missing = {name for name in _METRIC.findall(expression) if name not in names}
        assert missing <= ABSENT.keys(), f"{expression}: there is no {missing - ABSENT.keys()}"
        if expression in expressions and not missing:
            assert found, f"{expression} has no value"
    assert {one["metric"]["home"] for one in prometheus.query("up")} == {str(site.settings.home)}
    alerts = prometheus.get("alerts")["alerts"]
    assert [one["labels"]["alertname"] for one in alerts if one["state"] == "firing"] == []
    assert len(prometheus.get("rules")["groups"][0]["rules"]) == len(ALERTS)


def test_the_schedulers_series_are_few(prometheus: Prometheus) -> None:
    (count,) = prometheus.query('count({__name__=~"millrace_loop_.*"})')
    assert int(count["value"][1]) < 150


def test_what_is_said_to_be_absent_is_the_collectors_or_the_servers() -> None:
    used = {name for alert in ALERTS for name in _METRIC.findall(alert.expression)}
    boards = json.dumps(dashboards())
    assert all(name in used or name in boards for name in ABSENT)
