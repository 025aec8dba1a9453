"""Alert rules and dashboards: Prometheus' own tools on them, and their sections in the documentation."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy import cli
from deploy.monitoring.alerts import ALERTS, PAGE, rules
from deploy.monitoring.dashboards import dashboards, of_home
from tests.paths import ROOT

GIB = 2**30
A, B = (f'millrace_policy_version{{home="h",replica="{name}"}}' for name in "ab")
FAILED, COMPLETE, REFUSED = (
    f'millrace_outcomes_total{{home="h",outcome="{outcome}"}}' for outcome in ("failed", "complete", "refused")
)
LOOP = "millrace_loop_"
DUE = f"{LOOP}due_timestamp_seconds"
BEFORE, RECENT, ERROR = (f"{LOOP}reward_{name}" for name in ("before_mean", "recent_mean", "change_standard_error"))
FREE = LOOP + 'disk_free_bytes{folder="home"}'
LAKE = LOOP + 'readable{part="lake"}'

Series = dict[str, str]
"""As promtool writes them: a value a minute."""

FIRES: dict[str, tuple[Series, int, Series]] = {
    "MillraceDown": (
        {'up{job="millrace-server"}': "1 0x20"},
        8,
        {'up{job="other"}': "0x20", 'up{job="millrace-server"}': "1x20"},
    ),
    "MillraceJournalRefuses": ({"millrace_journal_healthy": "1 0x20"}, 4, {"millrace_journal_healthy": "1 0 1x20"}),
    "MillraceSealingStopped": (
        {"millrace_sealer_healthy": "1x30", "millrace_ledger_healthy": "0x30"},
        12,
        {"millrace_sealer_healthy": "1x30", "millrace_ledger_healthy": "1x30"},
    ),
    "MillraceRequestsFail": (
        {FAILED: "0+1x30", COMPLETE: "0+9x30"},
        15,
        {FAILED: "0x30", COMPLETE: "0+9x30", REFUSED: "0+90x30"},
    ),
    "MillraceReplicasDiffer": (
        {A: "1x40", B: "2x40"},
        20,
        {
            A: "1x40",
            B: "2x40",
            LOOP + 'experiment_state{home="h",state="running",job="millrace-schedule"}': "1x40",
            'millrace_policy_version{home="another"}': "5x40",
        },
    ),
    "MillraceLoopStuck": (
        {f"{LOOP}enabled": "1x40", f"{LOOP}cycle_running": "0x40", DUE: "60x40"},
        25,
        {f"{LOOP}enabled": "1x40", f"{LOOP}cycle_running": "1x40", DUE: "60x40"},
    ),
    "MillraceCyclesFail": ({f"{LOOP}cycles_failed_in_a_row": "3x20"}, 3, {f"{LOOP}cycles_failed_in_a_row": "2x20"}),
    "MillraceTrainingRestarts": (
        {'millrace_loop_training_restarts_total{kind="lost", home="h"}': "0x5 2x300"},
        10,
        {'millrace_loop_training_restarts_total{kind="lost", home="h"}': "0x5 1x300"},
    ),
    "MillraceLearnsNothing": (
        {f"{LOOP}cycles_without_candidate": "4x20"},
        3,
        {f"{LOOP}cycles_without_candidate": "2x20"},
    ),
    "MillraceErrorBudgetSpent": (
        {f"{LOOP}error_budget_next_level": "0x20"},
        3,
        {f"{LOOP}error_budget_next_level": "0.001x20"},
    ),
    "MillraceRewardDrop": (
        {BEFORE: "0.8x90", RECENT: "0.6x90", ERROR: "0.05x90"},
        70,
        {BEFORE: "0.8x90", RECENT: "0.7x90", ERROR: "0.05x90"},
    ),
    "MillraceDiskFills": (
        {FREE: f"{100 * GIB}-{GIB}x90"},  # gone within the four hours
        80,
        {FREE: f"{100 * GIB}x90"},
    ),
    "MillraceWebhookFails": (
        {LOOP + 'webhook_failures_total{webhook="chat"}': "0 1x20"},
        5,
        {LOOP + 'webhook_failures_total{webhook="chat"}': "7x20"},
    ),
    "MillraceMetricsUnreadable": ({LAKE: "0x20"}, 12, {LAKE: "1x20"}),
}
"""By alert: series, the minute at which they make it fire, and series that never do."""


@pytest.fixture(scope="module")
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not on PATH: Prometheus' rules are not checked (Debian: apt-get install prometheus)")
    return found


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_command_writes_files_that_prometheus_takes(
    promtool: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "key"
    key.write_text("secret")
    options = ["--schedule.metrics.port", "9201", "--key-file", str(key), "--docs", "https://docs.example/"]
    assert cli.run(["monitoring", "--out", str(tmp_path / "out"), *options]) == 0
    run(promtool, "check", "rules", str(tmp_path / "out" / "alerts.yaml"))
    run(promtool, "check", "config", str(tmp_path / "out" / "prometheus.yaml"))
    jobs = yaml.safe_load((tmp_path / "out" / "prometheus.yaml").read_text())["scrape_configs"]
    assert [job["static_configs"][0]["targets"] for job in jobs] == [["127.0.0.1:8000"], ["127.0.0.1:9201"]]
    assert {job["authorization"]["credentials_file"] for job in jobs} == {str(key)}
    assert json.loads((tmp_path / "out" / "millrace-loop.json").read_text())["title"] == "Millrace: loop"
    assert "shows no metrics" not in capsys.readouterr().out
    assert cli.run(["monitoring", "--out", str(tmp_path / "out")]) == 0
    assert "schedule.metrics.port is not set" in capsys.readouterr().out


def check(promtool: str, folder: Path, name: str, *cases: tuple[Series, int, bool]) -> None:
    """Have promtool see whether an alert fires: series, the minute, whether it does."""
    (folder / "alerts.yaml").write_text(rules("docs"))
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
            "promql_expr_test": [
                {
                    "expr": f'count(ALERTS{{alertname="{name}", alertstate="firing"}}) or vector(0)',
                    "eval_time": f"{minute}m",
                    "exp_samples": [{"labels": "{}", "value": float(fires)}],
                }
            ],
        }
        for series, minute, fires in cases
    ]
    file = folder / "test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": ["alerts.yaml"], "evaluation_interval": "1m", "tests": tests}))
    run(promtool, "test", "rules", str(file))


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_an_alert_fires_when_it_should_and_not_when_it_should_not(promtool: str, alert: Any, tmp_path: Path) -> None:
    firing, minute, quiet = FIRES[alert.name]
    check(promtool, tmp_path, alert.name, (firing, minute, True), (firing, 0, False), (quiet, minute, False))


def test_a_target_that_is_gone_altogether_is_down_and_one_that_came_back_elsewhere_is_not(
    promtool: str, tmp_path: Path
) -> None:
    pod = 'up{job="millrace-schedule", home="h", instance="%s"}'
    check(
        promtool,
        tmp_path,
        "MillraceDown",
        ({pod % "10.0.0.1:9201": "1x10 stale"}, 20, True),
        ({pod % "10.0.0.1:9201": "1x10 stale", pod % "10.0.0.2:9201": "_x12 1x20"}, 20, False),
    )


def test_rewards_that_are_all_the_same_have_not_dropped_by_the_rounding_of_their_mean(
    promtool: str, tmp_path: Path
) -> None:
    same: Series = {BEFORE: "0.33333333333333354x90", RECENT: "0.3333333333333333x90", ERROR: "0x90"}
    check(promtool, tmp_path, "MillraceRewardDrop", (same, 70, False))


def test_every_alert_leads_to_a_section_that_says_what_to_do() -> None:
    page = (ROOT / "docs" / PAGE).with_suffix(".md").read_text()
    sections = {title.lower(): text for title, text in re.findall(r"^### (\w+)\n(.*?)(?=^#|\Z)", page, re.M | re.S)}
    for rule in yaml.safe_load(rules("https://docs.example/"))["groups"][0]["rules"]:
        address, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert address == f"https://docs.example/{PAGE}"
        assert len(sections[anchor].split()) > 15, f"{rule['alert']} has no runbook"
    assert sections.keys() == {alert.anchor for alert in ALERTS}


def test_panels_of_a_dashboard_do_not_overlap_and_follow_the_chosen_home() -> None:
    for board in dashboards().values():
        places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
        assert len(set(places)) == len({panel["id"] for panel in board["panels"]}) == len(places)
        for target in (target for panel in board["panels"] for target in panel["targets"]):
            assert target["expr"].count("millrace_") == target["expr"].count('home=~"$home"')
    assert of_home('rate(millrace_a_total{b="c"}[5m]) / millrace_d') == (
        'rate(millrace_a_total{home=~"$home", b="c"}[5m]) / millrace_d{home=~"$home"}'
    )
