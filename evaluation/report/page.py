"""The report: one HTML file that needs nothing else, for people."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal

import jinja2
import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field

from evaluation.harness.results import HarnessResult
from evaluation.report import charts
from evaluation.report.evidence import Race, Spending, Style
from evaluation.report.rows import ExperimentRow, MoveRow, PolicyRow, Row, RunRow, ShadowRow, SuiteRow
from evaluation.results import Evaluation, Interval, Sample
from evaluation.suites.decoding import GREEDY, Decoding
from feedback.files import replace_file

_MEASURES: Final = (
    ("reward", "reward", charts.REWARD),
    ("kl_ref", "KL to reference", charts.KL),
    ("k2_ref", "k2 to reference", charts.KL),
    ("kl_behaviour", "KL to behaviour", charts.KL),
    ("entropy", "entropy", charts.GOOD),
    ("response_length", "length, tokens", charts.MUTED),
)
_STYLE_NAMES: Final = (
    ("length", "Length, tokens"),
    ("truncation", "Cut off"),
    ("distinct_n", "Distinct-2"),
    ("repetition", "Repetition"),
    ("latency", "A token’s time"),
    ("kl", "KL, nats/token"),
    ("kl_v1", "KL to the first"),
)
_BINS: Final = 120
_GATES: Final = 30  # the last verdicts, which are drawn; the table has all
_RACES: Final = 12  # the last candidates whose confidence sequences are drawn
_SUITES: Final = 8  # the last suites, of which results are drawn
_EXPERIMENTS: Final = 4  # the last experiments, which are drawn


class GateRow(Row):
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
    sampling: Decoding = GREEDY


class SwapRow(Row):
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
    that ``samples`` compares, ``samples_by`` how they answered. ``traffic`` is what ``traffic()`` returns. ``totals``
    are counts by name; ``X_acknowledged`` and ``X_in_lake`` are shown as a pair. ``stages`` are seconds by name.
    ``reward_model`` is the version that ``proxy`` of the policies is by, and ``agreement`` how often it says what the
    scorer says. ``best_of`` are evaluations whose incumbent had the best of several responses scored, ``judged`` those
    in which a judge compared answers, ``rankings`` all policies on each judge's scale (``Ranking.to_json``). ``metric``
    is the gate's. ``first`` is the policy that the lineage began with, ``feedback`` the mean of people's by policy.
    ``suites`` are results by suite, oldest first; without any, those of ``policies`` are of one. ``moves`` are the
    serving pointer's. ``harnesses`` are runs of other harnesses, oldest first. ``damaged`` are names of evaluations'
    files that can't be read.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    title: str
    metric: Literal["reward", "accuracy"] = "reward"
    policies: tuple[PolicyRow, ...] = ()
    suites: tuple[SuiteRow, ...] = ()
    harnesses: tuple[HarnessResult, ...] = ()
    moves: tuple[MoveRow, ...] = ()
    spending: Spending | None = None
    races: tuple[Race, ...] = ()
    experiments: tuple[ExperimentRow, ...] = ()
    shadows: tuple[ShadowRow, ...] = ()
    runs: tuple[RunRow, ...] = ()
    judged: tuple[Evaluation, ...] = ()
    rankings: tuple[dict[str, Any], ...] = ()
    training: dict[str, list[dict[str, Any]]] = {}
    gates: tuple[GateRow, ...] = ()
    best_of: tuple[Evaluation, ...] = ()
    samples: tuple[Sample, ...] = ()
    samples_between: tuple[int, int] | None = None
    samples_by: Decoding = GREEDY
    first: int | None = None
    feedback: dict[int, Interval] = {}
    traffic: pa.Table | None = None
    swaps: tuple[SwapRow, ...] = ()
    totals: dict[str, Any] = {}
    stages: dict[str, float] = {}
    reward_model: int | None = None
    agreement: Interval | None = None
    confidence: float = 0.95
    damaged: tuple[str, ...] = ()
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
    def segmented(self) -> list[Race]:
        """The last candidates whose items have segments."""
        return [race for race in self.races if race.segments][-_RACES:]

    @cached_property
    def styled(self) -> list[Race]:
        """The last candidates of whose answers something is known."""
        return [race for race in self.races if race.style][-_GATES:]

    @cached_property
    def compared(self) -> list[Race]:
        """The last candidates that were compared by training's reward and by one that it did not see."""
        return [race for race in self.races if race.over_optimisation is not None][-_GATES:]

    @cached_property
    def moved(self) -> list[charts.Moved]:
        """The policies whose KL from the first is known, the first one at 0."""
        found: dict[int, charts.Moved] = {}
        for race in self.compared:
            rewards = race.over_optimisation
            assert rewards is not None
            sides = [(race.candidate, rewards.sqrt_kl_v1, rewards.candidate)]
            sides += [(race.incumbent, 0.0, rewards.incumbent)] if race.incumbent == self.first else []
            for version, at, means in sides:
                if at is not None:
                    of = {"proxy": means.proxy, "holdout": means.holdout, "people": self.feedback.get(version)}
                    found[version] = charts.Moved(version, at, version in self.refused, of)
        return list(found.values())

    @cached_property
    def diverse(self) -> bool:
        """Whether the diversity of any policy's answers is known."""
        return any(row.distinct_1 is not None for row in self.policies)

    @cached_property
    def beside(self) -> bool:
        """Whether greedy answers of any policy stand beside sampled ones."""
        return any(row.greedy is not None for row in self.policies)

    def gate_of(self, candidate: int | None) -> GateRow | None:
        """The last verdict on a candidate."""
        return next((gate for gate in reversed(self.gates) if gate.candidate == candidate), None)

    @cached_property
    def drawn_experiments(self) -> list[tuple[ExperimentRow, str]]:
        """The last experiments of which a block has closed, with their pictures."""
        return [
            (one, charts.experiment(one.paths, label=f"Experiment {one.number}, difference over closed blocks"))
            for one in self.experiments
            if one.paths
        ][-_EXPERIMENTS:]

    @cached_property
    def drawn_shadows(self) -> list[tuple[ShadowRow, str]]:
        """The last shadows with any request, with their pictures."""
        return [
            (one, charts.experiment(one.paths, label=f"Shadow of policy {one.candidate}", over="requests"))
            for one in self.shadows
            if one.paths
        ][-_EXPERIMENTS:]

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
    def measures(self) -> list[Literal["reward", "accuracy"]]:
        """What is known of policies, the gate's metric first."""
        names: list[Literal["reward", "accuracy"]] = ["accuracy", "reward"]
        known = [name for name in names if any(getattr(row, name) for of in self.results for row in of.policies)]
        return sorted(known, key=lambda name: name != self.metric)

    @cached_property
    def results(self) -> tuple[SuiteRow, ...]:
        """Results by suite, oldest first."""
        if self.suites or not any(row.reward or row.accuracy for row in self.policies):
            return self.suites
        items = max((row.n or 0 for row in self.policies), default=0)
        return (SuiteRow(name="suite", items=items, policies=tuple(self.ranked)),)

    @cached_property
    def letters(self) -> dict[int, str]:
        """The letter of the newest suite that each policy has results of; empty while there is one suite only."""
        if len(self.results) < 2:
            return {}
        deciding = [(i, of) for i, of in enumerate(self.results) if of.role == "success"]
        return {row.version: _letter(i) for i, of in deciding for row in of.policies}

    @cached_property
    def met(self) -> list[int]:
        """The policies that users met, in the order in which they came to serve; the first one before any move."""
        if not self.moves:
            return [row.version for row in self.ranked[:1]]
        return list(dict.fromkeys(move.version for move in self.moves if move.served))

    @cached_property
    def current(self) -> int | None:
        """The policy that serves, or is to serve."""
        if self.moves:
            return self.moves[-1].version
        return self.ranked[0].version if self.ranked else None

    @cached_property
    def progress(self) -> list[tuple[int, float]]:
        """(version, the gate's metric) of the policy that serves, and before it that of the first one which users met
        and which answered the same items; of the newest items that there are both of."""
        best: list[tuple[int, float]] = []
        for suite in (one for one in self.results if one.role == "success"):
            known = {row.version: found.value for row in suite.policies if (found := getattr(row, self.metric))}
            if self.current not in known:
                continue
            before = [version for version in self.met if version in known and version != self.current][:1]
            if before or len(best) < 2:
                best = [(version, known[version]) for version in (*before, self.current)]
        return best

    def tags(self, version: int) -> list[tuple[str, str]]:
        """What became of a policy, with the tone of each word: good, bad or plain."""
        moves = [move for move in self.moves if move.version == version]
        found = [("first", "")] if self.ranked and version == self.ranked[0].version else []
        if any(move.override for move in moves):
            found.append(("override", ""))
        if moves:
            found += _FATES.get(moves[-1].fate, [(moves[-1].fate, "")])
        elif version in self.refused:
            found.append(("refused", "bad"))
        elif version in self.undecided:
            found.append(("undecided", ""))
        elif version in self.passed:
            found.append(("passed, not promoted", ""))
        elif not found:
            found.append(("not judged", ""))
        if any(one.candidate == version and one.decision == "harm" for one in self.shadows):
            found.append(("shadow: harm", "bad"))
        for tried in (one for one in self.experiments if one.candidate == version and not one.committed):
            if tried.decision is None:
                found.append((f"in experiment {tried.number}", ""))
            elif tried.decision != "kept":
                found.append((f"experiment {tried.number}: {tried.decision}", "bad" * (tried.decision == "roll back")))
        return found

    def since(self, version: int) -> bool:
        """Whether anything became of a policy behind its verdict."""
        return any(move.version == version for move in self.moves) or any(
            tried.candidate == version for tried in self.experiments
        )

    @cached_property
    def undone(self) -> list[MoveRow]:
        """Promotions that were taken back: by a server that refused the policy, an experiment, or a person."""
        return [move for move in self.moves if not move.back and move.fate in ("rolled back", "refused by the server")]


_FATES: Final[dict[str, list[tuple[str, str]]]] = {
    "serves": [("serves", "good")],
    "replaced": [("promoted", "good"), ("replaced", "")],
    "rolled back": [("rolled back", "bad")],
    "refused by the server": [("refused by the server", "bad")],
}


def _letter(number: int) -> str:
    """A, B, ..., Z, AA, AB, ..."""
    return (_letter(number // 26 - 1) if number >= 26 else "") + chr(ord("A") + number % 26)


def build(data: ReportData, path: Path) -> Path:
    """Write the report to ``path``, whole or not at all, and return it."""
    page = _template().render(
        data=data,
        headline=_headline(data),
        tiles=_tiles(data),
        pictures=_pictures(data),
        totals=_plain_totals(data.totals),
        style_names=_style_names(data),
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
    if data.progress:
        last, after = data.progress[-1]
        since = ""
        if len(data.progress) > 1:
            first, before = data.progress[0]
            origin = "which the loop started from, " if first == data.ranked[0].version else "on the same ones, "
            since = f"; v{first}, {origin}{_score(data, before)}"
        says = "answers {} right" if data.metric == "accuracy" else "has a mean reward of {}"
        parts.append(f"On held-out prompts, policy v{last} {says.format(_score(data, after))}{since}.")
    if data.gates:
        waits = f", {len(data.undecided)} undecided" if data.undecided else ""
        parts.append(f"Of {_count(len(data.gates), 'candidate')}, {_passes(data)} passed the gate{waits}.")
    if data.undone:
        count = sum(not move.back and move.previous is not None for move in data.moves)
        parts.append(f"Of {_count(count, 'promotion')}, {len(data.undone)} did not last.")
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

    if len(data.progress) > 1:
        (first, before), (last, after) = data.progress
        gain = after - before
        shown, unit = (f"{100 * gain:+.1f}", "points, ") if data.metric == "accuracy" else (f"{gain:+.3f}", "")
        tone = "good" if gain > 0 else "bad" if gain < 0 else ""
        add(f"Held-out {data.metric}", shown.replace("-", "−"), f"{unit}v{first} to v{last}, same items", tone)
    if data.gates:
        passed, undecided = _passes(data), sum(gate.verdict == "undecided" for gate in data.gates)
        waits = f", {undecided} undecided" if undecided else ""
        refused = len(data.gates) - passed - undecided
        add("Candidates", f"{passed} of {len(data.gates)}", f"passed, {refused} refused{waits}")
    if data.spending is not None:
        last_budget = data.spending.budgets[-1]
        share = f"{last_budget.spent / last_budget.alpha:.0%}"
        add("Error budget spent", share, f"of {last_budget.alpha:g}; {data.spending.promise}")
    elif (budget := data.budget) is not None and budget.levels_given is not None:
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
    pictures: dict[str, str | None] = dict.fromkeys(
        (
            "accuracy",
            "reward",
            "gates",
            "spending",
            "races",
            "segments",
            "over_optimisation",
            "training",
            "serving",
            "stages",
        )
    )
    for name in data.measures:
        colour = charts.GOOD if name == "accuracy" else charts.REWARD
        suites = [(name_of, points) for name_of, of in _drawn_suites(data) if (points := _points(data, of, name))]
        label = f"Held-out {name} by policy"
        pictures[name] = charts.by_policy(suites, colour=colour, percent=name == "accuracy", label=label)
    if data.drawn_gates:
        percent = all(gate.metric == "accuracy" for gate in data.gates)
        label = "Difference and interval at each gate"
        pictures["gates"] = charts.gates(data.drawn_gates, percent=percent, label=label)
    if data.spending is not None and data.spending.candidates:
        pictures["spending"] = charts.spending(data.spending.candidates, label="Error budget spent by candidate")
    if drawn := [race for race in data.races if len(race.gains)][-_RACES:]:
        pictures["races"] = charts.races(drawn, label="Mean gain over items, with its bounds, by candidate")
    if (segmented := data.segmented) and segmented[-1].segments:
        pictures["segments"] = charts.segments(segmented[-1], label="Gain of each segment")
    if data.moved:
        label = "Rewards over the root of KL from the first policy"
        pictures["over_optimisation"] = charts.over_optimisation(data.moved, label=label)
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


def _drawn_suites(data: ReportData) -> list[tuple[str, SuiteRow]]:
    """The last suites with what is written under them: nothing while there is one only."""
    named = [(f"{_letter(i)} · {_number(of.items)}", of) for i, of in enumerate(data.results)]
    return named[-_SUITES:] if len(named) > 1 else [("", of) for _, of in named]


def _points(data: ReportData, suite: SuiteRow, name: str) -> list[charts.Point]:
    """The policies of a suite that have this measure. Without moves of the pointer, all that no gate refused count as
    having served."""
    refused = data.refused - set(data.met)
    served = set(data.met) if data.moves else {row.version for row in suite.policies} - refused
    return [
        charts.Point(row.version, found, row.version in refused, row.version in served)
        for row in suite.policies
        if (found := getattr(row, name)) is not None
    ]


def _score(data: ReportData, value: float) -> str:
    return f"{value:.1%}" if data.metric == "accuracy" else f"{value:.3f}"


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("evaluation.report"), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["percent"] = lambda value: f"{value:.1%}"
    environment.filters["number"] = _number
    environment.filters["clock"] = lambda at: datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S")
    environment.filters["moment"] = lambda at: datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")
    environment.filters["style"] = _style
    environment.filters["signed2"] = lambda value: f"{value:+.2f}".replace("-", "−")
    environment.filters["signed"] = lambda value: f"{value:+.3f}".replace("-", "−")
    return environment.get_template("report.html.jinja")


def _style_names(data: ReportData) -> list[tuple[str, str]]:
    """The figures of answers that are known of any candidate, with their titles."""
    known = {found.name for race in data.races for found in race.style}
    return [(name, title) for name, title in _STYLE_NAMES if name in known]


def _style(found: Style) -> str:
    """A figure of both policies' answers, the incumbent's first."""
    forms = {"length": "{:.1f}", "truncation": "{:.1%}", "latency": "{:.3g} s"}
    form = forms.get(found.name, "{:.3f}")
    pair = [form.format(value) for value in (found.incumbent, found.candidate) if value is not None]
    return " → ".join(pair)


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else re.sub(r"\.?0+$", "", f"{value:,.3f}")


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"
