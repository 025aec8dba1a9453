"""What came of the demo: requests and feedback counted from two sides, what users noted and what the lake holds; and
what the evaluations and the gate found.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from deploy.config.root import Settings
from deploy.display import proxy_reward, report_data
from deploy.display.proxy_reward import ProxyReward
from deploy.examples.demo import SEED
from deploy.loop import records
from evaluation.report.page import ReportData, build
from feedback.files import replace_file

LEAST_GAIN, LEAST_GAIN_OF_OTHERS = 0.25, 0.15
"""Held-out accuracy that is gained with the demo's own seed; and with others, whose seed policies may have less to
gain, or in a single cycle, which learns from what users have asked until then."""


def write(settings: Settings, folder: Path, account: list[dict[str, Any]], seconds: dict[str, float]) -> dict[str, Any]:
    """Count, and leave summary.json and report.html in ``folder``; the summary's figures.

    ``account``: the users' entries, one per request. ``seconds``: of each stage so far.
    """
    counts = both_sides(settings, account)
    proxy = proxy_reward.measure(settings)
    data = report_data.gather(settings, title="Millrace: the demo", totals=counts, proxy=proxy)
    swaps = sum(swap.ok for swap in data.swaps)
    seconds = {**seconds, **stage_seconds(settings)}
    figures: dict[str, Any] = {
        "recipe": settings.cycle.recipe,
        "seed": settings.train.seed,
        "cycles": settings.schedule.max_cycles,
        "reward_model_agreement": agreement(proxy),
    }
    figures |= {**learning(settings, data), "swaps": swaps, **counts, "seconds": seconds}
    replace_file(folder / "summary.json", json.dumps(figures, indent=2).encode() + b"\n")
    build(data, folder / "report.html")
    return figures


def agreement(proxy: ProxyReward | None) -> dict[str, Any] | None:
    """How often the last reward model says what is true, of the policies' answers to prompts that no training saw."""
    if proxy is None or proxy.agreement is None:
        return None
    return {"version": proxy.version, **proxy.agreement.model_dump(), "answers": proxy.answers}


def learning(settings: Settings, data: ReportData) -> dict[str, Any]:
    """The evaluations' and the gate's findings on each policy."""
    served = {pointer.version for pointer in settings.policy_store().history()}
    fields = {"candidate", "incumbent", "difference", "ci_low", "ci_high", "verdict"}
    return {
        "policies": [
            {"version": row.version, "parent": row.parent, "heldout_accuracy": row.accuracy.value, "n": row.n}
            for row in data.policies
            if row.accuracy is not None
        ],
        "promoted": [policy.version for policy in data.policies if policy.version in served],
        "refused": [record.candidate for record in records.load_all(settings) if record.status == "refused"],
        "gate": [gate.model_dump(include=fields) for gate in data.gates],
    }


def both_sides(settings: Settings, account: list[dict[str, Any]]) -> dict[str, Any]:
    """Requests and feedback that the users were acknowledged, against the rows that DuckDB finds in the lake."""
    acknowledged = [entry for entry in account if entry["ok"]]
    figures = {"requests": len(account), "failed_requests": len(account) - len(acknowledged)}
    with settings.lake().connect() as connection:
        for table, kind, key in (("interactions", "generate", "response_id"), ("feedback", "feedback", "feedback_id")):
            users = Counter(i for entry in acknowledged if entry["kind"] == kind for i in entry["ids"])
            lake = Counter(i for (i,) in connection.execute(f"SELECT {key} FROM {table}").fetchall())
            figures[f"{table}_acknowledged"] = users.total()
            figures[f"{table}_in_lake"] = lake.total()
            figures[f"{table}_lost"] = (users - lake).total()
            figures[f"{table}_not_acknowledged"] = (lake - users).total()
    return figures


def stage_seconds(settings: Settings) -> dict[str, float]:
    """Seconds of each stage of each cycle, as ``cycle 2: train``."""
    return {
        f"cycle {record.number}: {name}": seconds
        for record in records.load_all(settings)
        if record.status != "skipped"
        for name, seconds in record.seconds.items()
    }


def problems(figures: dict[str, Any]) -> list[str]:
    """The demo's promises that these figures break, each in a sentence."""
    accuracy = {p["version"]: p["heldout_accuracy"] for p in figures["policies"]}
    promoted, refused = figures["promoted"], figures["refused"]
    found = []
    if len(promoted) < 2:
        return [f"only policies {promoted} were ever promoted"]
    gain = accuracy[promoted[-1]] - accuracy[promoted[0]]
    if gain < (LEAST_GAIN if figures["seed"] == SEED and figures["cycles"] > 1 else LEAST_GAIN_OF_OTHERS):
        found.append(f"held-out accuracy rose by {gain:.1%} only, from {accuracy[promoted[0]]:.1%}")
    if not refused:
        found.append("no candidate was refused, though one was trained to be worse")
    if figures["recipe"] == "rlhf" and figures["reward_model_agreement"] is None:
        found.append("no reward model was trained, or none was asked about the held-out answers")
    if figures["failed_requests"]:
        found.append(f"{figures['failed_requests']} of {figures['requests']} requests failed")
    if figures["swaps"] != len(promoted) - 1:
        found.append(f"{figures['swaps']} swaps took place for {len(promoted) - 1} promotions")
    for kind in ("interactions", "feedback"):
        for what in ("lost", "not_acknowledged"):
            if figures[f"{kind}_{what}"]:
                found.append(f"{figures[f'{kind}_{what}']} {kind} were {what.replace('_', ' ')}")
    return found
