"""The report: one HTML file that needs nothing else, for people."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, Final

import jinja2
import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field

from evaluation.report import charts
from evaluation.results import Evaluation, Interval, Sample
from feedback.files import replace_file

_MEASURES: Final = (
    ("reward", "reward", charts.REWARD),
    ("kl_ref", "KL to reference", charts.KL),
    ("k2_ref", "k2 to reference", charts.KL),
    ("kl_behaviour", "KL to behaviour", charts.KL),
    ("entropy", "entropy", charts.GOOD),
    ("response_length", "length, tokens", charts.MUTED),
)
_BINS: Final = 120
_GATES: Final = 30  # the last verdicts, which are drawn; the table has all


class _Row(BaseModel):
    # A row may carry more than the report shows: callers pass whole records.
    model_config = ConfigDict(frozen=True, extra="ignore")


class PolicyRow(_Row):
    """A policy and what the held-out suite says of it, if it was evaluated (a ``PolicyResult`` fits)."""

    version: int
    parent: int | None = None
    accuracy: Interval | None = None
    reward: Interval | None = None
    n: int | None = None
    proxy: float | None = None
    """What the reward model says of the same answers: the mean probability that people find one good."""


class GateRow(_Row):
    """A verdict of the gate (``Verdict.model_dump()`` fits). The interval is a picture; ``e_value`` decides, by
    ``level``."""

    candidate: int
    incumbent: int
    difference: float | None
    ci_low: float | None
    ci_high: float | None
    verdict: str
    items: int | None = None
    level: float | None = None
    e_value: float | None = None
    budget: str | None = None
    levels_given: float | None = None
    learned: tuple[str, ...] = ()
    metric: str = "accuracy"
    min_difference: float = 0.0
    reasons: tuple[str, ...] = ()
    n: int | None = None
    kl: float | None = None


class SwapRow(_Row):
    """One swap in a replica, as its server notes it."""

    at: datetime
    source: int | None = Field(None, alias="from")
    target: int = Field(alias="to")
    hold_ms: float | None = None
    ok: bool = True
    in_flight: int | None = None
    error: str | None = None

    @property
    def time(self) -> float:
        """Seconds since 1970; a time without zone is UTC."""
        return (self.at if self.at.tzinfo else self.at.replace(tzinfo=UTC)).timestamp()


class ReportData(BaseModel):
    """Everything that a report shows; what is left out is shown as missing.

    ``training`` maps a run (a cycle) to the rows of its metrics.jsonl, in order. ``samples_between`` names the versions
    that ``samples`` compares. ``traffic`` is what ``traffic()`` returns. ``totals`` are counts by name;
    ``X_acknowledged`` and ``X_in_lake`` are shown as a pair. ``stages`` are seconds by name. ``reward_model`` is the
    version that ``proxy`` of the policies is by, and ``agreement`` how often it says what the scorer says.
    ``best_of`` are evaluations whose incumbent had the best of several responses scored.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    title: str
    policies: tuple[PolicyRow, ...] = ()
    training: dict[str, list[dict[str, Any]]] = {}
    gates: tuple[GateRow, ...] = ()
    best_of: tuple[Evaluation, ...] = ()
    samples: tuple[Sample, ...] = ()
    samples_between: tuple[int, int] | None = None
    traffic: pa.Table | None = None
    swaps: tuple[SwapRow, ...] = ()
    totals: dict[str, Any] = {}
    stages: dict[str, float] = {}
    reward_model: int | None = None
    agreement: Interval | None = None
    confidence: float = 0.95
    created_at: datetime = Field(default_factory=lambda: datetime.now(UTC))

    @cached_property
    def passed(self) -> frozenset[int]:
        """Versions that a gate let through."""
        return frozenset(gate.candidate for gate in self.gates if gate.verdict == "pass")

    @cached_property
    def refused(self) -> frozenset[int]:
        """Versions that a gate refused and none passed."""
        return frozenset(gate.candidate for gate in self.gates if gate.verdict == "refuse") - self.passed

    @cached_property
    def undecided(self) -> frozenset[int]:
        """Versions that are still in the race."""
        return frozenset(gate.candidate for gate in self.gates) - self.passed - self.refused

    @cached_property
    def drawn_gates(self) -> list[GateRow]:
        """The last verdicts that have a difference to draw."""
        return [gate for gate in self.gates if None not in (gate.difference, gate.ci_low, gate.ci_high)][-_GATES:]

    @cached_property
    def budget(self) -> GateRow | None:
        """The verdict by which most levels had been given."""
        known = [gate for gate in self.gates if gate.levels_given is not None]
        return max(known, key=lambda gate: gate.levels_given or 0.0, default=None)

    @cached_property
    def ranked(self) -> list[PolicyRow]:
        """The policies by version."""
        return sorted(self.policies, key=lambda row: row.version)

    @cached_property
    def served(self) -> list[tuple[int, float]]:
        """(version, held-out accuracy) of what users met, if it is known: the first policy and those that passed."""
        met = [row for i, row in enumerate(self.ranked) if i == 0 or row.version in self.passed]
        return [(row.version, row.accuracy.value) for row in met if row.accuracy]


def build(data: ReportData, path: Path) -> Path:
    """Write the report to ``path``, whole or not at all, and return it."""
    page = _template().render(
        data=data,
        headline=_headline(data),
        tiles=_tiles(data),
        pictures=_pictures(data),
        totals=_plain_totals(data.totals),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, page.encode())
    return path


def traffic(connection: Any, *, bins: int = _BINS) -> pa.Table | None:
    """Traffic over time from a DuckDB connection with a view ``interactions``; None if there was none.

    One row a time bin, empty bins too: ``time`` (its start, seconds since 1970), ``seconds`` (its width), ``requests``,
    ``tokens``, ``p50_ms``, ``p95_ms`` (of complete responses, null if none).
    """
    # fetchall, not fetchone: an unfinished result blocks the connection's next query.
    [(low, high)] = connection.execute(
        "SELECT epoch(min(completed_at)), epoch(max(completed_at)) FROM interactions"
    ).fetchall()
    if low is None:
        return None
    width = max((high - low) / bins, 0.5)
    count = int((high - low) / width) + 1
    return connection.sql(
        """
        WITH binned AS (
            SELECT least(floor((epoch(completed_at) - $low) / $width)::INT, $count - 1) AS bin,
                   count(DISTINCT request_id) AS requests,
                   sum(len(response_token_ids)) AS tokens,
                   quantile_cont(timings.total_ms, 0.50) FILTER (status = 'complete') AS p50_ms,
                   quantile_cont(timings.total_ms, 0.95) FILTER (status = 'complete') AS p95_ms
            FROM interactions WHERE status <> 'imported' GROUP BY 1
        )
        SELECT $low + b * $width AS time, $width::DOUBLE AS seconds, coalesce(requests, 0)::BIGINT AS requests,
               coalesce(tokens, 0)::BIGINT AS tokens, p50_ms::DOUBLE AS p50_ms, p95_ms::DOUBLE AS p95_ms
        FROM range($count) AS bins(b) LEFT JOIN binned ON bin = b ORDER BY b
        """,
        params={"low": low, "width": width, "count": count},
    ).to_arrow_table()


def _headline(data: ReportData) -> str:
    parts = []
    if data.served:
        (first, before), (last, after) = data.served[0], data.served[-1]
        since = f"; v{first}, which the loop started from, {before:.1%}" if len(data.served) > 1 else ""
        parts.append(f"On held-out prompts, policy v{last} answers {after:.1%} right{since}.")
    if data.gates:
        waits = f", {len(data.undecided)} undecided" if data.undecided else ""
        parts.append(f"Of {_count(len(data.gates), 'candidate')}, {_passes(data)} passed the gate{waits}.")
    failed = data.totals.get("failed_requests")
    if data.swaps and failed is not None:
        swaps = sum(swap.ok for swap in data.swaps)
        failures = "no request failed" if failed == 0 else f"{_count(failed, 'request')} failed"
        parts.append(f"{_count(swaps, 'swap').capitalize()} under traffic, and {failures}.")
    return " ".join(parts)


def _tiles(data: ReportData) -> list[dict[str, str]]:
    """The figures on top: name, value, small print, and tone (good, bad or plain)."""
    tiles: list[dict[str, str]] = []

    def add(name: str, value: str, note: str = "", tone: str = "") -> None:
        tiles.append({"name": name, "value": value, "note": note, "tone": tone})

    if len(data.served) > 1:
        (first, before), (last, after) = data.served[0], data.served[-1]
        gain = 100 * (after - before)
        add("Held-out accuracy", f"{gain:+.1f}", f"points, v{first} to v{last}", "good" if gain > 0 else "bad")
    if data.gates:
        passed, undecided = _passes(data), sum(gate.verdict == "undecided" for gate in data.gates)
        waits = f", {undecided} undecided" if undecided else ""
        refused = len(data.gates) - passed - undecided
        add("Candidates", f"{passed} of {len(data.gates)}", f"passed, {refused} refused{waits}")
    if (budget := data.budget) is not None and budget.levels_given is not None:
        add("Levels given", f"{budget.levels_given:.3g}", str(budget.budget))
    if data.swaps:
        holds = [swap.hold_ms for swap in data.swaps if swap.ok and swap.hold_ms is not None]
        failures = sum(not swap.ok for swap in data.swaps)
        note = f"held {median(holds):.0f} ms each (median)" if holds else ""
        add(
            "Swaps", str(len(data.swaps) - failures), f"{failures} failed" if failures else note, "bad" * bool(failures)
        )
    if (requests := data.totals.get("requests")) is not None:
        failed = data.totals.get("failed_requests")
        note = "" if failed is None else f"{_number(failed)} failed"
        add("Requests", _number(requests), note, "bad" if failed else "")
    for name in _pairs(data.totals):
        acknowledged, kept = data.totals[f"{name}_acknowledged"], data.totals[f"{name}_in_lake"]
        note = "acknowledged, all in the lake" if acknowledged == kept else f"acknowledged, {_number(kept)} in the lake"
        add(name.replace("_", " ").capitalize(), _number(acknowledged), note, "good" if acknowledged == kept else "bad")
    return tiles


def _passes(data: ReportData) -> int:
    return sum(gate.verdict == "pass" for gate in data.gates)


def _pairs(totals: Mapping[str, Any]) -> list[str]:
    names = [name.removesuffix("_acknowledged") for name in totals if name.endswith("_acknowledged")]
    return [name for name in names if f"{name}_in_lake" in totals]


def _plain_totals(totals: Mapping[str, Any]) -> dict[str, str]:
    """The counts that no tile shows."""
    shown = {"requests", "failed_requests"} | {f"{n}_{s}" for n in _pairs(totals) for s in ("acknowledged", "in_lake")}
    return {name.replace("_", " ").capitalize(): _number(value) for name, value in totals.items() if name not in shown}


def _pictures(data: ReportData) -> dict[str, str | None]:
    """SVG by name; None where there is nothing to draw."""
    pictures: dict[str, str | None] = dict.fromkeys(("accuracy", "reward", "gates", "training", "serving", "stages"))
    for name, colour in (("accuracy", charts.GOOD), ("reward", charts.REWARD)):
        if points := [
            (row.version, found, row.version in data.refused) for row in data.ranked if (found := getattr(row, name))
        ]:
            label = f"Held-out {name} by policy"
            pictures[name] = charts.by_policy(points, colour=colour, percent=name == "accuracy", label=label)
    if data.drawn_gates:
        percent = all(gate.metric == "accuracy" for gate in data.gates)
        label = "Difference and interval at each gate"
        pictures["gates"] = charts.gates(data.drawn_gates, percent=percent, label=label)
    runs = {name: rows for name, rows in data.training.items() if rows}
    known = {key for rows in runs.values() for row in rows for key, value in row.items() if value is not None}
    if "kl_ref" in known:
        known.discard("kl_behaviour")
    measures = [measure for measure in _MEASURES if measure[0] in known]
    if measures:
        pictures["training"] = charts.training(runs, measures, label="Reward and KL over training steps")
    if data.traffic is not None and data.traffic.num_rows:
        bins = {name: data.traffic.column(name).to_numpy() for name in data.traffic.column_names}
        end = bins["time"][-1] + bins["seconds"][-1]
        swaps = [
            (swap.time, f"v{swap.target}" + ("" if swap.ok else " failed"))
            for swap in data.swaps
            if bins["time"][0] <= swap.time <= end
        ]
        pictures["serving"] = charts.serving(bins, swaps, label="Throughput and latency over time, swaps marked")
    if data.stages:
        pictures["stages"] = charts.stages(data.stages, label="Seconds by stage")
    return pictures


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("evaluation.report"), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["percent"] = lambda value: f"{value:.1%}"
    environment.filters["number"] = _number
    environment.filters["clock"] = lambda at: datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S")
    environment.filters["signed"] = lambda value: f"{value:+.3f}".replace("-", "−")
    return environment.get_template("report.html.jinja")


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else re.sub(r"\.?0+$", "", f"{value:,.3f}")


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"
