"""The report: one HTML file that needs nothing else, for people."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, Final

import jinja2
import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field

from evaluation.report import charts
from evaluation.results import PolicyResult
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
    """A policy and what the held-out suite says of it; accuracy in [0, 1], intervals (low, high)."""

    version: int
    parent: int | None = None
    heldout_accuracy: float | None = None
    accuracy_ci: tuple[float, float] | None = None
    reward: float | None = None
    reward_ci: tuple[float, float] | None = None
    n: int | None = None

    @classmethod
    def of(cls, result: PolicyResult, *, parent: int | None) -> PolicyRow:
        """The row of an evaluated policy."""
        return cls(
            version=result.version,
            parent=parent,
            heldout_accuracy=result.accuracy.value,
            accuracy_ci=(result.accuracy.low, result.accuracy.high),
            reward=result.reward.value,
            reward_ci=(result.reward.low, result.reward.high),
            n=result.n,
        )


class GateRow(_Row):
    """A verdict of the gate (``Verdict.model_dump()`` fits)."""

    candidate: int
    incumbent: int
    difference: float
    ci_low: float
    ci_high: float
    verdict: str
    metric: str = "accuracy"
    min_difference: float = 0.0
    reasons: tuple[str, ...] = ()
    n: int | None = None
    kl: float | None = None


class SampleRow(_Row):
    """One held-out prompt, answered before and after. A score of 1 is shown as right, of 0 as wrong."""

    prompt: str
    answer: str | None = None
    before: str
    after: str
    before_score: float | None = None
    after_score: float | None = None


class SwapRow(_Row):
    """One swap in a replica; ``at`` is ISO 8601 or seconds since 1970."""

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)

    at: datetime | float
    source: int | None = Field(None, alias="from")
    target: int = Field(alias="to")
    hold_ms: float | None = None
    ok: bool = True
    in_flight: int | None = None
    error: str | None = None
    replica: str | None = None

    @property
    def time(self) -> float:
        """Seconds since 1970; a time without zone is UTC."""
        if isinstance(self.at, float):
            return self.at
        return (self.at if self.at.tzinfo else self.at.replace(tzinfo=UTC)).timestamp()


class ReportData(BaseModel):
    """Everything that a report shows; what is left out is shown as missing.

    ``training`` maps a run (a cycle) to the rows of its metrics.jsonl, in order. ``samples_between`` names the versions
    that ``samples`` compares. ``traffic`` is what ``traffic()`` returns. ``totals`` are counts by name;
    ``X_acknowledged`` and ``X_in_lake`` are shown as a pair. ``stages`` are seconds by name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    title: str
    policies: tuple[PolicyRow, ...] = ()
    training: dict[str, list[dict[str, Any]]] = {}
    gates: tuple[GateRow, ...] = ()
    samples: tuple[SampleRow, ...] = ()
    samples_between: tuple[int, int] | None = None
    traffic: pa.Table | None = None
    swaps: tuple[SwapRow, ...] = ()
    totals: dict[str, Any] = {}
    stages: dict[str, float] = {}
    confidence: float = 0.95
    created_at: datetime = Field(default_factory=lambda: datetime.now(UTC))


def build(data: ReportData, path: Path) -> Path:
    """Write the report to ``path``, whole or not at all, and return it."""
    page = _template().render(
        data=data,
        headline=_headline(data),
        tiles=_tiles(data),
        pictures=_pictures(data),
        refused=_refused(data),
        passed=_passed(data),
        totals=_plain_totals(data.totals),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, page.encode())
    return path


def traffic(connection: Any, *, bins: int = _BINS) -> pa.Table | None:
    """Traffic over time from a DuckDB connection with a view ``interactions``; None if there was none.

    One row a time bin, empty bins too: ``time`` (its start, seconds since 1970), ``seconds`` (its width), ``requests``,
    ``tokens``, ``p50_ms``, ``p95_ms`` (of complete responses, null if none), ``failed`` (responses with status error).
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
                   quantile_cont(timings.total_ms, 0.95) FILTER (status = 'complete') AS p95_ms,
                   count(*) FILTER (status = 'error') AS failed
            FROM interactions GROUP BY 1
        )
        SELECT $low + b * $width AS time, $width::DOUBLE AS seconds, coalesce(requests, 0)::BIGINT AS requests,
               coalesce(tokens, 0)::BIGINT AS tokens, p50_ms::DOUBLE AS p50_ms, p95_ms::DOUBLE AS p95_ms,
               coalesce(failed, 0)::BIGINT AS failed
        FROM range($count) AS bins(b) LEFT JOIN binned ON bin = b ORDER BY b
        """,
        params={"low": low, "width": width, "count": count},
    ).to_arrow_table()


def _refused(data: ReportData) -> frozenset[int]:
    """Versions that a gate refused and none passed."""
    return frozenset(gate.candidate for gate in data.gates if gate.verdict != "pass") - _passed(data)


def _passed(data: ReportData) -> frozenset[int]:
    return frozenset(gate.candidate for gate in data.gates if gate.verdict == "pass")


def _served(data: ReportData) -> list[PolicyRow]:
    """First policy and those that a gate let through, by version: what users met."""
    passed = _passed(data)
    rows = sorted(data.policies, key=lambda row: row.version)
    return [row for i, row in enumerate(rows) if i == 0 or row.version in passed]


def _headline(data: ReportData) -> str:
    parts = []
    served = [row for row in _served(data) if row.heldout_accuracy is not None]
    if len(served) > 1:
        first, last = served[0], served[-1]
        parts.append(
            f"On held-out prompts, policy v{last.version} answers {last.heldout_accuracy:.1%} right; "
            f"v{first.version}, which the loop started from, {first.heldout_accuracy:.1%}."
        )
    elif served:
        parts.append(
            f"On held-out prompts, policy v{served[0].version} answers {served[0].heldout_accuracy:.1%} right."
        )
    if data.gates:
        passed = sum(gate.verdict == "pass" for gate in data.gates)
        parts.append(f"Of {_count(len(data.gates), 'candidate')}, {passed} passed the gate.")
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

    served = [row for row in _served(data) if row.heldout_accuracy is not None]
    if len(served) > 1:
        assert served[0].heldout_accuracy is not None
        assert served[-1].heldout_accuracy is not None
        gain = 100 * (served[-1].heldout_accuracy - served[0].heldout_accuracy)
        note = f"points, v{served[0].version} to v{served[-1].version}"
        add("Held-out accuracy", f"{gain:+.1f}", note, "good" if gain > 0 else "bad")
    if data.gates:
        passed = sum(gate.verdict == "pass" for gate in data.gates)
        add("Candidates", f"{passed} of {len(data.gates)}", f"passed, {len(data.gates) - passed} refused")
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


def _pairs(totals: Mapping[str, Any]) -> list[str]:
    names = [name.removesuffix("_acknowledged") for name in totals if name.endswith("_acknowledged")]
    return [name for name in names if f"{name}_in_lake" in totals]


def _plain_totals(totals: Mapping[str, Any]) -> dict[str, str]:
    """The counts that no tile shows."""
    shown = {"requests", "failed_requests"} | {f"{n}_{s}" for n in _pairs(totals) for s in ("acknowledged", "in_lake")}
    return {
        name.replace("_", " ").capitalize(): _number(value)
        for name, value in totals.items()
        if name not in shown and not isinstance(value, Mapping | list | tuple)
    }


def _pictures(data: ReportData) -> dict[str, str | None]:
    """SVG by name, None where there is no data."""
    pictures: dict[str, str | None] = dict.fromkeys(("accuracy", "reward", "gates", "training", "serving", "stages"))
    out, policies = _refused(data), sorted(data.policies, key=lambda row: row.version)
    accuracy: list[charts.Point] = [
        (row.version, row.heldout_accuracy, row.accuracy_ci, row.version in out)
        for row in policies
        if row.heldout_accuracy is not None
    ]
    reward: list[charts.Point] = [
        (row.version, row.reward, row.reward_ci, row.version in out) for row in policies if row.reward is not None
    ]
    if accuracy:
        pictures["accuracy"] = charts.by_policy(
            accuracy, colour=charts.GOOD, percent=True, label="Held-out accuracy by policy"
        )
    if reward:
        pictures["reward"] = charts.by_policy(
            reward, colour=charts.REWARD, percent=False, label="Held-out reward by policy"
        )
    if data.gates:
        percent = all(gate.metric == "accuracy" for gate in data.gates)
        rows = [gate.model_dump() for gate in data.gates[-_GATES:]]
        pictures["gates"] = charts.gates(rows, percent=percent, label="Difference and interval at each gate")
    runs = {name: rows for name, rows in data.training.items() if rows}
    measures = [measure for measure in _MEASURES if any(row.get(measure[0]) is not None for row in _rows(runs))]
    if any(key == "kl_ref" for key, _, _ in measures):
        measures = [measure for measure in measures if measure[0] != "kl_behaviour"]
    if measures:
        pictures["training"] = charts.training(runs, measures, label="Reward and KL over training steps")
    if data.traffic is not None and data.traffic.num_rows:
        bins = {
            name: _floats(data.traffic.column(name))
            for name in ("time", "seconds", "requests", "tokens", "p50_ms", "p95_ms")
        }
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


def _rows(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Mapping[str, Any]]:
    return [row for rows in runs.values() for row in rows]


def _floats(column: pa.ChunkedArray) -> list[float]:
    return [float("nan") if value is None else float(value) for value in column.to_pylist()]


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


def _number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else re.sub(r"\.?0+$", "", f"{value:,.3f}")


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"
