"""Prometheus' alert rules, and the file that tells it what to scrape. Both as YAML, which `millrace monitoring` writes.

A platform with several homes tells them apart by the label ``home``, which the scrape configuration sets.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import yaml

from deploy.config.root import Settings

PAGE: Final = "guide/monitor.html"
"""Of the documentation, with a section for each alert."""
JOBS: Final = ("millrace-server", "millrace-schedule")


@dataclass(frozen=True)
class Alert:
    """One rule. ``lasts``: for how long ``expression`` must hold; ``summary``: with Prometheus' templates."""

    name: str
    expression: str
    lasts: str
    severity: Literal["critical", "warning"]
    summary: str

    @property
    def anchor(self) -> str:
        """Its section's, in ``PAGE``."""
        return self.name.lower()


_UP: Final = 'up{job=~"millrace-.*"}'
_EXPERIMENT: Final = 'max by (home) (millrace_loop_experiment_state{state=~"running|committed"}) == 1'

ALERTS: Final = (
    Alert(
        "MillraceDown",
        # In Kubernetes a pod that is nowhere is no target: its series ends, and is never 0.
        f"{_UP} == 0 or (max by (home, job) (max_over_time({_UP}[1h])) unless max by (home, job) ({_UP}))",
        "5m",
        "critical",
        "{{ $labels.job }} of {{ $labels.home }} does not answer, or has been there within the hour and is not.",
    ),
    Alert(
        "MillraceJournalRefuses",
        "millrace_journal_healthy == 0",
        "1m",
        "critical",
        "The journal's disk refuses writes: requests get 503.",
    ),
    Alert(
        "MillraceSealingStopped",
        "millrace_sealer_healthy == 0 or millrace_ledger_healthy == 0",
        "10m",
        "warning",
        "What is recorded does not reach the lake.",
    ),
    Alert(
        "MillraceRequestsFail",
        'sum by (home) (rate(millrace_outcomes_total{outcome="failed"}[5m]))'
        " / sum by (home) (rate(millrace_outcomes_total[5m])) > 0.05",
        "5m",
        "critical",
        "{{ $value | humanizePercentage }} of the requests for responses fail.",
    ),
    Alert(
        "MillraceReplicasDiffer",
        "max by (home) (millrace_policy_version) != min by (home) (millrace_policy_version)"
        f" unless on (home) ({_EXPERIMENT})",
        "15m",
        "warning",
        "Replicas serve different policies, and no experiment runs.",
    ),
    Alert(
        "MillraceLoopStuck",
        "millrace_loop_enabled == 1 and millrace_loop_cycle_running == 0"
        " and time() - millrace_loop_due_timestamp_seconds > 900",
        "5m",
        "critical",
        "A cycle has been due for more than 15 minutes, and none runs.",
    ),
    Alert(
        "MillraceCyclesFail",
        "millrace_loop_cycles_failed_in_a_row >= 3",
        "1m",
        "critical",
        "The last {{ $value }} cycles failed.",
    ),
    Alert(
        "MillraceTrainingRestarts",
        "sum by (home) (increase(millrace_loop_training_restarts_total[6h])) >= 2",
        "0m",
        "warning",
        "Training lost processes and went on by itself about {{ $value | humanize }} times within six hours.",
    ),
    Alert(
        "MillraceLearnsNothing",
        "millrace_loop_cycles_without_candidate >= 3",
        "1m",
        "warning",
        "The last {{ $value }} cycles that trained published nothing.",
    ),
    Alert(
        "MillraceErrorBudgetSpent",
        "millrace_loop_error_budget_next_level == 0",
        "1m",
        "warning",
        "The gate's error budget is spent: no candidate can pass.",
    ),
    Alert(
        "MillraceRewardDrop",
        "millrace_loop_reward_before_mean - millrace_loop_reward_recent_mean"
        " > 3 * millrace_loop_reward_change_standard_error + 1e-9",  # equal rewards have no error, and rounded means
        "1h",
        "warning",
        "The mean reward of the last 24 hours is {{ $value }} below that of the week before.",
    ),
    Alert(
        "MillraceDiskFills",
        "millrace_loop_disk_free_bytes < 5 * 2^30 or predict_linear(millrace_loop_disk_free_bytes[2h], 4 * 3600) < 0",
        "15m",
        "warning",
        "The disk of {{ $labels.folder }} has less than 5 GiB free, or will be full within four hours.",
    ),
    Alert(
        "MillraceWebhookFails",
        "increase(millrace_loop_webhook_failures_total[1h]) > 0",
        "0m",
        "warning",
        "Webhook {{ $labels.webhook }} was not told of what the loop has done.",
    ),
    Alert(
        "MillraceMetricsUnreadable",
        "millrace_loop_readable == 0",
        "10m",
        "warning",
        "The scheduler can't read {{ $labels.part }} of what is on record.",
    ),
)


def rules(docs: str) -> str:
    """The rules, as YAML. ``docs``: where the documentation is, a URL, to which runbooks are linked."""
    group = [
        {
            "alert": alert.name,
            "expr": alert.expression,
            "for": alert.lasts,
            "labels": {"severity": alert.severity},
            "annotations": {
                "summary": alert.summary,
                "runbook_url": f"{docs.rstrip('/')}/{PAGE}#{alert.anchor}",
            },
        }
        for alert in ALERTS
    ]
    return _yaml({"groups": [{"name": "millrace", "rules": group}]})


def scrape_config(settings: Settings, rules_file: str, key_file: Path | None) -> str:
    """Prometheus' configuration for one home, as YAML. ``key_file``: has an admin's key, if one is needed."""
    metrics = settings.schedule.metrics
    ports = (settings.serve.port, metrics.port)
    hosts = (settings.serve.host, metrics.host)
    jobs = [
        {
            "job_name": job,
            "static_configs": [{"targets": [_target(host, port)], "labels": {"home": str(settings.home)}}],
            **({"authorization": {"credentials_file": str(key_file)}} if key_file else {}),
        }
        for job, host, port in zip(JOBS, hosts, ports, strict=True)
        if port is not None
    ]
    every = {"scrape_interval": "15s", "evaluation_interval": "15s"}
    return _yaml({"global": every, "rule_files": [rules_file], "scrape_configs": jobs})


def _target(host: str, port: int) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, sort_keys=False, width=120, allow_unicode=True)
