"""A real Prometheus scrapes the server that the console's tests have running, and a scheduler of its home, under load.

Every expression of the dashboards and the alerts is asked for. It is here for that server's sake.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from feedback_rows import interaction, put, reward

from deploy.config import root
from deploy.config.root import child_environment
from deploy.loop import promotion, records
from deploy.loop.experiments import Controller
from deploy.loop.records import CycleRecord, Stage
from deploy.loop.wait_for_serving import wait_until_served
from deploy.monitoring.alerts import ALERTS, JOBS, rules, scrape_config
from deploy.monitoring.dashboards import dashboards
from deploy.notify.webhooks import FOLDER
from deploy.supervise.children import millrace
from loadtests.server import free_port
from tests.deploy.console.conftest import Site
from tests.paths import ROOT

HOOK = "gone"
# Series that a machine without a GPU is without.
OF_GPUS = {"millrace_loop_gpu_memory_used_bytes", "millrace_loop_gpu_memory_bytes", "millrace_loop_gpu_use_ratio"}
_SELECTOR = re.compile(r"\b(millrace_\w+|up)\b(?:\{[^}]*\})?")
PANELS = [
    target["expr"].replace("$home", ".*")
    for board in dashboards().values()
    for panel in board["panels"]
    for target in panel["targets"]
]


@dataclass
class Prometheus:
    """``log``: its own, and the scheduler's; ``processes``: the scheduler and Prometheus."""

    client: httpx.Client
    log: Path
    processes: list[subprocess.Popen[bytes]]

    def get(self, path: str, **parameters: str) -> Any:
        answer = self.client.get(f"/api/v1/{path}", params=parameters)
        if answer.status_code == 503:
            raise httpx.HTTPError("it still starts")
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return found

    def firing(self) -> list[str]:
        return [one["labels"]["alertname"] for one in self.get("alerts")["alerts"] if one["state"] == "firing"]

    def lacking(self) -> dict[str, str]:
        """Expressions that find no series, or have no number, and which they lack. All of them parse."""
        found = {}
        for expression in [*PANELS, *(alert.expression for alert in ALERTS)]:
            values = [float(one["value"][1]) for one in self.query(expression)]
            selectors = [match for match in _SELECTOR.finditer(expression) if match[1] not in OF_GPUS]
            if missing := [match[0] for match in selectors if not self.query(match[0])]:
                found[expression] = f"there is no {', '.join(missing)}"
            elif selectors and expression in PANELS and not (values and all(map(math.isfinite, values))):
                found[expression] = f"its values are {values}"
        return found


@pytest.fixture(scope="module")
def settings(site: Site, tmp_path_factory: pytest.TempPathFactory) -> root.Settings:
    suite = tmp_path_factory.mktemp("suite") / "suite.jsonl"
    suite.write_text("".join(f'{{"id": "{i}", "prompt": "{i}+1=", "answer": "{i + 1}"}}\n' for i in range(60)))
    options = {
        "evaluation.suite": suite,
        "feedback.scoring.rules.exact.ready": "exact_match",
        "train.rollout.max_tokens": 32,
        "schedule.first_after_seconds": 600,
        "schedule.metrics.port": free_port(),
        "schedule.metrics.lake_seconds": 0.5,
        "schedule.webhooks": json.dumps({HOOK: {"url": f"http://127.0.0.1:{free_port()}", "attempts": 1}}),
        "evaluation.experiment.block_seconds": 0.5,
        "evaluation.experiment.feedback_window_seconds": 0.5,
        "evaluation.experiment.phases": '[{"share": 0.5}]',
        "evaluation.experiment.look_seconds": 1,
        "evaluation.experiment.min_voices": 1,
        # It shall neither commit nor roll back.
        "evaluation.experiment.alpha_commit": 1e-9,
        "evaluation.experiment.alpha_rollback": 1e-9,
    }
    return root.load(site.settings.snapshot(), [(name, str(value)) for name, value in options.items()], {})


@pytest.fixture(scope="module")
def history(site: Site, model: Path, settings: root.Settings) -> Iterator[None]:
    """What the loop's series are of: a cycle that promoted a policy, rewards of today and last week, and an experiment
    that the server takes part in. At the end policy 1 serves, as before."""
    at = records.now() - timedelta(minutes=5)
    store = settings.policy_store()
    moved = store.promote(2, expected=1, who="cycle", why="test")
    stages = [Stage(name=name, started_at=at, seconds=2.0, ok=True) for name in ("score", "train")]
    settings.path(settings.cycle.folder).mkdir(exist_ok=True)
    record = CycleRecord(number=1, status="promoted", started_at=at, finished_at=at, stages=stages, candidate=2)
    records.write(settings, record)
    run = settings.path(settings.train.runs) / "cycle-000001"
    run.mkdir(parents=True)
    row = {"step": 1, "reward": 0.5, "kl_ref": 0.01, "entropy": 1.5}
    (run / "metrics.jsonl").write_text(f"{json.dumps(row)}\n")
    last_week = {name: at - timedelta(days=days) for name, days in (("monday", 5), ("tuesday", 4))}
    rows = [interaction(name, created_at=then, completed_at=then, tenant="past") for name, then in last_week.items()]
    put(settings.lake(), "interactions", rows)
    rewards = {"monday": 0.25, "tuesday": 0.5} | dict(zip(site.responses, (0.25, 0.75, 1.0), strict=False))
    put(settings.lake(), "rewards", [reward(name, value, scored_at=at) for name, value in rewards.items()])
    wait_until_served(settings, store, moved)
    store.publish(model, parent=2, lineage={}, metrics={})
    controller = Controller(settings)
    experiment = controller.start(3, who="tests", why="no gate in this test", override=True)
    yield
    store.experiments.stop(experiment.number, who="tests", why="the tests are done")
    controller.look()
    back = promotion.rollback(store, who="tests", why="the tests are done", to=1, override=True)
    wait_until_served(settings, store, back)


@pytest.fixture(scope="module")
def prometheus(
    site: Site, settings: root.Settings, history: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not on PATH: nothing scrapes (Debian: apt-get install prometheus)")
    folder = tmp_path_factory.mktemp("prometheus")
    site.make_key("prometheus", "admin")
    (folder / "key").write_text(site.secrets["prometheus"])
    (folder / "alerts.yaml").write_text(rules("docs"))
    config = scrape_config(settings, "alerts.yaml", folder / "key").replace("15s", "1s")
    (folder / "prometheus.yaml").write_text(config)
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
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            yield Prometheus(client, log, processes)
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            try:
                process.wait(180)
            finally:
                process.kill()


@contextmanager
def under_load(site: Site) -> Iterator[None]:
    """Within, two users ask, one of them for streams, and vote. At the end: nobody was refused anything."""
    site.make_key("load", "generate", "feedback", tenant="load")
    headers, stop = {"X-API-Key": site.secrets["load"]}, threading.Event()

    def ask(*, stream: bool) -> Counter[int]:
        statuses: Counter[int] = Counter()
        body = {"prompt": "2+3=", "max_tokens": 8, "user": f"streams: {stream}", "stream": stream}
        with httpx.Client(base_url=site.url, headers=headers, timeout=120) as client:
            while client.post("/generate", json=body).status_code == 401:
                time.sleep(0.1)  # the server reads new keys twice a second
            while not stop.is_set():
                answer = client.post("/generate", json=body)
                statuses[answer.status_code] += 1
                if not stream and answer.status_code == 200:
                    response = answer.json()["responses"][0]["response_id"]
                    vote = {"response_id": response, "kind": "thumb", "value": statuses[200] % 2}
                    statuses[client.post("/feedback", json=vote).status_code] += 1
                time.sleep(0.05)
        return statuses

    with ThreadPoolExecutor(2) as pool:
        users = [pool.submit(ask, stream=stream) for stream in (False, True)]
        try:
            yield
        finally:
            stop.set()
    statuses = [user.result() for user in users]
    assert [set(each) for each in statuses] == [{200, 201}, {200}], statuses


def until(condition: Callable[[], bool], prometheus: Prometheus, what: Callable[[], object] = lambda: "") -> None:
    deadline = time.monotonic() + 300
    while True:
        with suppress(httpx.HTTPError):
            if condition():
                return
        log = prometheus.log.read_text()[-4000:]
        assert all(process.poll() is None for process in prometheus.processes), log
        assert time.monotonic() < deadline, f"{what()}\n{log}"
        time.sleep(0.3)


def test_under_load_every_expression_of_dashboards_and_alerts_finds_its_series(
    site: Site, settings: root.Settings, prometheus: Prometheus
) -> None:
    stranger = httpx.post(f"{site.url}/generate", json={"prompt": "1+1="}, headers={"X-API-Key": "none"}, timeout=120)
    assert stranger.status_code == 401
    with under_load(site):
        until(lambda: {one["metric"]["job"] for one in prometheus.query("up == 1")} == set(JOBS), prometheus)
        # The webhook is told of what happens from now on, and its receiver is not there.
        until(lambda: (settings.path(FOLDER) / f"{HOOK}.json").exists(), prometheus)
        until(lambda: bool(prometheus.query("millrace_loop_webhook_failures_total == 0")), prometheus)
        at = records.now()
        records.write(settings, CycleRecord(number=2, status="failed", started_at=at, finished_at=at))
        until(lambda: not prometheus.lacking(), prometheus, prometheus.lacking)
        [tokens] = prometheus.query("sum(rate(millrace_response_tokens_total[1m]))")
        assert float(tokens["value"][1]) > 0
        until(lambda: "MillraceWebhookFails" in prometheus.firing(), prometheus)
        assert prometheus.firing() == ["MillraceWebhookFails"]
    assert {one["metric"]["home"] for one in prometheus.query("up")} == {str(site.settings.home)}
    assert len(prometheus.get("rules")["groups"][0]["rules"]) == len(ALERTS)


def test_the_schedulers_series_are_few(prometheus: Prometheus) -> None:
    (count,) = prometheus.query('count({__name__=~"millrace_loop_.*"})')
    assert int(count["value"][1]) < 150


def test_what_may_be_absent_is_a_gpus_and_is_shown_where_there_is_one() -> None:
    shown = {match[1] for expression in PANELS for match in _SELECTOR.finditer(expression)}
    assert shown >= OF_GPUS
