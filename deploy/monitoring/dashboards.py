"""Grafana's dashboards, as plain JSON: what the server does, and what the loop does."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 3
_METRIC: Final = re.compile(r"(millrace_\w+)(\{)?")


@dataclass(frozen=True)
class Panel:
    """One chart. ``lines``: (expression, legend with labels in double braces); ``unit``: Grafana's name of it."""

    title: str
    lines: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: Literal["timeseries", "stat"] = "timeseries"


def _quantiles(metric: str) -> tuple[tuple[str, str], ...]:
    return tuple(
        (f"histogram_quantile({q}, sum by (le) (rate({metric}_bucket[5m])))", name)
        for q, name in ((0.5, "median"), (0.95, "95 %"))
    )


SERVER: Final = (
    Panel("Policy that serves", (("max by (home, replica) (millrace_policy_version)", "{{home}} {{replica}}"),)),
    Panel(
        "Requests per second, by status", (("sum by (code) (rate(millrace_requests_total[5m]))", "{{code}}"),), "reqps"
    ),
    Panel(
        "What requests for responses came to",
        (("sum by (outcome) (rate(millrace_outcomes_total[5m]))", "{{outcome}}"),),
        "reqps",
    ),
    Panel("Time to answer", _quantiles("millrace_request_seconds"), "s"),
    Panel("Time to the first token", _quantiles("millrace_first_token_seconds"), "s"),
    Panel("Time between tokens", _quantiles("millrace_inter_token_seconds"), "s"),
    Panel(
        "Tokens per second",
        (
            ("sum(rate(millrace_prompt_tokens_total[5m]))", "prompts"),
            ("sum(rate(millrace_response_tokens_total[5m]))", "responses"),
        ),
    ),
    Panel(
        "Requests in the engine",
        (("sum(millrace_engine_running)", "running"), ("sum(millrace_engine_waiting)", "waiting")),
    ),
    Panel("Feedback per second, by kind", (("sum by (kind) (rate(millrace_feedback_total[5m]))", "{{kind}}"),)),
    Panel(
        "Journal, sealer and ledger (1: healthy)",
        (
            ("min(millrace_journal_healthy)", "journal"),
            ("min(millrace_sealer_healthy)", "sealer"),
            ("min(millrace_ledger_healthy)", "ledger"),
        ),
    ),
    Panel("Refused keys", (("sum by (reason) (rate(millrace_auth_failures_total[5m]))", "{{reason}}"),)),
    Panel("No token during a swap", _quantiles("millrace_swap_hold_seconds"), "s"),
)

LOOP: Final = (
    Panel("Policy that serves", (("millrace_loop_serving_policy", "{{home}}"),), kind="stat"),
    Panel(
        "Time since a cycle ended", (("time() - millrace_loop_last_cycle_timestamp_seconds", "{{home}}"),), "s", "stat"
    ),
    Panel("Time to the next cycle", (("millrace_loop_due_timestamp_seconds - time()", "{{home}}"),), "s", "stat"),
    Panel(
        "Cycles of the last day, by outcome",
        (("sum by (outcome) (increase(millrace_loop_cycles_total[1d]))", "{{outcome}}"),),
    ),
    Panel(
        "Mean time of a stage",
        (
            (
                "sum by (stage) (millrace_loop_stage_seconds_sum) / sum by (stage) (millrace_loop_stage_seconds_count)",
                "{{stage}}",
            ),
        ),
        "s",
    ),
    Panel(
        "Cycles in a row",
        (
            ("millrace_loop_cycles_failed_in_a_row", "failed"),
            ("millrace_loop_cycles_without_candidate", "trained, published nothing"),
            ("millrace_loop_cycle_running", "running now"),
        ),
    ),
    Panel("Verdicts of the gate", (("sum by (verdict) (millrace_loop_verdicts_total)", "{{verdict}}"),)),
    Panel(
        "Error budget",
        (
            ("millrace_loop_error_budget_left", "left"),
            ("millrace_loop_error_budget", "whole"),
            ("millrace_loop_error_budget_next_level", "next candidate's level"),
        ),
    ),
    Panel("Moves of the pointer", (("sum by (kind) (millrace_loop_moves_total)", "{{kind}}"),)),
    Panel("State of the last experiment", (("millrace_loop_experiment_state", "{{state}}"),)),
    Panel("Experiment: e-values", (("millrace_loop_experiment_wealth", "{{outcome}}, {{shows}}"),)),
    Panel("Experiment: candidate less control", (("millrace_loop_experiment_difference", "{{outcome}}, {{bound}}"),)),
    Panel("Mean reward by policy", (("millrace_loop_reward_mean", "policy {{policy}}"),)),
    Panel(
        "Mean reward: last 24 hours, and the week before",
        (("millrace_loop_reward_recent_mean", "24 hours"), ("millrace_loop_reward_before_mean", "week before")),
    ),
    Panel("Share of responses with feedback", (("millrace_loop_feedback_rate", "{{home}}"),), "percentunit"),
    Panel(
        "From feedback to the policy that serves",
        (
            ("millrace_loop_feedback_lag_seconds", "newest feedback it learned from, to its promotion"),
            ("time() - millrace_loop_learned_until_timestamp_seconds", "age of that feedback"),
        ),
        "s",
    ),
    Panel("Training: reward", (("millrace_loop_training_reward", "{{home}}"),)),
    Panel("Training: KL to the reference", (("millrace_loop_training_kl", "{{home}}"),)),
    Panel("Training: entropy", (("millrace_loop_training_entropy", "{{home}}"),)),
    Panel("Rows of the lake", (("millrace_loop_lake_rows", "{{table}}"),)),
    Panel("Disk: free", (("millrace_loop_disk_free_bytes", "{{folder}}"),), "bytes"),
    Panel(
        "GPU: memory in use",
        (("millrace_loop_gpu_memory_used_bytes / millrace_loop_gpu_memory_bytes", "{{gpu}}"),),
        "percentunit",
    ),
    Panel("GPU: at work", (("millrace_loop_gpu_use_ratio", "{{gpu}}"),), "percentunit"),
)

BOARDS: Final = {"millrace-server": ("Millrace: server", SERVER), "millrace-loop": ("Millrace: loop", LOOP)}


def dashboards() -> dict[str, dict[str, Any]]:
    """The dashboards by the name of their file, as Grafana imports or provisions them."""
    return {name: _dashboard(name, title, panels) for name, (title, panels) in BOARDS.items()}


def _dashboard(uid: str, title: str, panels: Sequence[Panel]) -> dict[str, Any]:
    return {
        "uid": uid,
        "title": title,
        "tags": ["millrace"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [_DATASOURCE, _HOME]},
        "panels": [_panel(number, panel) for number, panel in enumerate(panels)],
    }


_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_DATASOURCE: Final = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
_HOME: Final = {
    "name": "home",
    "type": "query",
    "datasource": _SOURCE,
    "query": "label_values(millrace_journal_healthy, home)",
    "refresh": 2,
    "includeAll": True,
    "allValue": ".*",
    "multi": True,
    "current": {"text": "All", "value": "$__all"},
}


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(number, _COLUMNS)
    return {
        "id": number + 1,
        "type": panel.kind,
        "title": panel.title,
        "datasource": _SOURCE,
        "gridPos": {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": _SOURCE, "expr": of_home(expression), "legendFormat": legend}
            for i, (expression, legend) in enumerate(panel.lines)
        ],
    }


def of_home(expression: str) -> str:
    """An expression about the homes that are chosen in the dashboard."""
    return _METRIC.sub(lambda found: f'{found[1]}{{home=~"$home"' + (", " if found[2] else "}"), expression)
