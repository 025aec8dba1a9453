"""The demo's books: every figure counted from two sides, what the users noted and what the lake and the store hold."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from deploy.config.root import Settings
from deploy.display import report_data
from deploy.loop import records
from evaluation.report.page import build
from evaluation.results import Evaluation, PolicyResult
from feedback.files import replace_file
from feedback.lake.tables import Lake
from serve.policies.store import PolicyStore

LEAST_GAIN = 0.25


def write(settings: Settings, folder: Path, account: list[dict[str, Any]], seconds: dict[str, float]) -> dict[str, Any]:
    """Count, and leave summary.json and report.html in ``folder``; the summary's figures.

    Args:
        account: the users' entries, one a request.
        seconds: of each stage so far.
    """
    figures = {**learning(settings), **books(settings, account), "seconds": {**seconds, **stage_seconds(settings)}}
    replace_file(folder / "summary.json", json.dumps(figures, indent=2).encode() + b"\n")
    build(report_data.gather(settings, title="Millrace: the demo"), folder / "report.html")
    return figures


def learning(settings: Settings) -> dict[str, Any]:
    """What the evaluations and the gate said of each policy."""
    store = PolicyStore(settings.path(settings.serve.policies))
    evaluations = [Evaluation.load(f) for f in settings.path(settings.evaluation.folder).glob("*-vs-*.json")]
    results: dict[int, PolicyResult] = {}
    for evaluation in evaluations:
        for result in (evaluation.candidate, evaluation.incumbent):
            results[result.version] = result
    policies = [store.get(version) for version in store.versions()]
    judged = [r for r in records.load_all(settings) if r.verdict is not None]
    served = [pointer.version for pointer in store.history()]
    fields = ("candidate", "incumbent", "difference", "ci_low", "ci_high", "verdict")
    return {
        "policies": [
            {
                "version": p.version,
                "parent": p.parent,
                "heldout_accuracy": results[p.version].accuracy.value,
                "n": results[p.version].n,
            }
            for p in policies
            if p.version in results
        ],
        "promoted": [p.version for p in policies if p.version in served],
        "refused": [r.candidate for r in judged if r.status == "refused"],
        "gate": [{field: r.verdict[field] for field in fields} for r in judged if r.verdict],
    }


def books(settings: Settings, account: list[dict[str, Any]]) -> dict[str, Any]:
    """What the users were acknowledged, against what DuckDB finds in the lake."""
    resolved = settings.resolved()
    lake = Lake(resolved.feedback.lake.uri, resolved.feedback.lake)
    connection = lake.connect()
    answered = [entry for entry in account if entry["ok"]]
    figures: dict[str, Any] = {
        "swaps": sum(swap["ok"] for swap in swaps(settings)),
        "requests": len(account),
        "failed_requests": len(account) - len(answered),
    }
    for table, kind, key in (("interactions", "generate", "response_id"), ("feedback", "feedback", "feedback_id")):
        acknowledged = Counter(i for entry in answered if entry["kind"] == kind for i in entry["ids"])
        kept = Counter(i for (i,) in connection.execute(f"SELECT {key} FROM {table}").fetchall())
        figures[f"{table}_acknowledged"] = acknowledged.total()
        figures[f"{table}_in_lake"] = kept.total()
        figures[f"{table}_lost"] = (acknowledged - kept).total()
        figures[f"{table}_not_acknowledged"] = (kept - acknowledged).total()
    connection.close()
    return figures


def swaps(settings: Settings) -> list[dict[str, Any]]:
    """The swaps that the server recorded."""
    files = sorted(settings.path(settings.serve.replicas).glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def stage_seconds(settings: Settings) -> dict[str, float]:
    """Seconds of each stage of each cycle, as ``cycle 2: train``."""
    return {
        f"cycle {record.number}: {name}": seconds
        for record in records.load_all(settings)
        if record.status != "skipped"
        for name, seconds in record.seconds.items()
    }


def problems(figures: dict[str, Any], *, least_policies: int) -> list[str]:
    """Which of the demo's promises these figures break, each in a sentence."""
    accuracy = {p["version"]: p["heldout_accuracy"] for p in figures["policies"]}
    promoted, refused = figures["promoted"], figures["refused"]
    found = []
    if len(promoted) < least_policies:
        return [f"only policies {promoted} were ever promoted"]
    gain = accuracy[promoted[-1]] - accuracy[promoted[0]]
    if gain < LEAST_GAIN:
        found.append(f"held-out accuracy rose by {gain:.1%} only, from {accuracy[promoted[0]]:.1%}")
    if not refused:
        found.append("no candidate was refused, though one was trained to be worse")
    if figures["failed_requests"]:
        found.append(f"{figures['failed_requests']} of {figures['requests']} requests failed")
    if figures["swaps"] != len(promoted) - 1:
        found.append(f"{figures['swaps']} swaps took place for {len(promoted) - 1} promotions")
    for kind in ("interactions", "feedback"):
        for what in ("lost", "not_acknowledged"):
            if figures[f"{kind}_{what}"]:
                found.append(f"{figures[f'{kind}_{what}']} {kind} were {what.replace('_', ' ')}")
    return found
