"""The report: a page that stands alone, with and without data."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import duckdb
import pyarrow as pa
import pytest
from pydantic import ValidationError

from evaluation.report.page import PolicyRow, ReportData, SwapRow, build, traffic
from evaluation.results import BestOf, BestOfPoint, Evaluation, Interval, PolicyResult
from feedback.schema import INTERACTIONS

START = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
VOID = {"meta", "link", "img", "br", "hr", "input"}


class Page(HTMLParser):
    """Text and tags of a page; fails on tags that don't nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.words.append(data.strip())

    @property
    def text(self) -> str:
        return " ".join(word for word in self.words if word)

    def pictures(self) -> list[str | None]:
        return [attrs.get("aria-label") for tag, attrs in self.tags if tag == "svg"]


def interaction(number: int, **changes: Any) -> dict[str, Any]:
    at = START + timedelta(seconds=number)
    row: dict[str, Any] = {
        "response_id": f"r{number}", "request_id": f"q{number}", "tenant": "default", "endpoint": "/generate",
        "replica": "replica-0", "created_at": at, "completed_at": at, "prompt_token_ids": [1], "response": "x",
        "response_token_ids": [1, 2, 3], "logprobs": [0.0] * 3, "policy_spans": [{"start": 0, "policy_version": 1}],
        "sampling": {}, "status": "complete", "timings": {"total_ms": 10.0 + number}, "metadata": [],
    }  # fmt: skip
    return {**row, **changes}


def connection(rows: list[dict[str, Any]]) -> duckdb.DuckDBPyConnection:
    con = duckdb.connect()
    con.register("interactions", pa.Table.from_pylist(rows, schema=INTERACTIONS))
    return con


def interval(value: float) -> Interval:
    return Interval(value=value, low=value - 0.1, high=value + 0.1)


@pytest.fixture
def data() -> ReportData:
    gate = {"candidate": 2, "incumbent": 1, "difference": 0.2, "ci_low": 0.1, "ci_high": 0.3, "verdict": "pass"}
    refused = {"candidate": 3, "incumbent": 2, "difference": -0.1, "ci_low": -0.2, "ci_high": 0.0, "verdict": "refuse"}
    policies = [
        {"version": 1, "accuracy": interval(0.4), "reward": interval(0.4), "n": 300},
        {"version": 2, "parent": 1, "accuracy": interval(0.6), "reward": interval(0.6), "n": 300},
        {"version": 3, "parent": 2, "accuracy": interval(0.5), "reward": interval(0.5), "n": 300},
    ]
    swap = {"at": START.isoformat(), "from": 1, "to": 2, "hold_ms": 28.4, "in_flight": 31, "generation": 2}
    failure = {"at": (START + timedelta(seconds=30)).timestamp(), "from": 2, "to": 3, "ok": False, "error": "bad hash"}
    moves = [
        {
            "at": START.isoformat(),
            "version": 1,
            "previous": None,
            "who": "init",
            "why": "init",
            "served": True,
            "fate": "replaced",
        },
        {
            "at": START.isoformat(),
            "version": 2,
            "previous": 1,
            "who": "cycle",
            "why": "passed",
            "served": True,
            "fate": "serves",
        },
    ]
    return ReportData(
        title="A loop & its <turns>",
        metric="accuracy",
        policies=policies,
        moves=moves,
        training={
            "cycle 1": [{"step": i, "reward": 0.1 * i, "kl_ref": 0.01 * i, "entropy": None} for i in range(6)],
            "cycle 2": [{"step": 0, "reward": float("nan"), "kl_ref": 0.0}],
        },
        gates=[{**gate, "reasons": ["shown"], "metric": "accuracy"}, {**refused, "reasons": ["it is worse"]}],
        samples=[
            {"id": "1", "prompt": "<script>1+1", "answer": "2", "incumbent": "3", "candidate": "2",
             "incumbent_score": 0, "candidate_score": 1},
            {"id": "2", "prompt": "hi", "answer": None, "incumbent": "a", "candidate": "b",
             "incumbent_score": None, "candidate_score": 0.25},
        ],
        samples_between=(1, 2),
        traffic=traffic(connection([interaction(i) for i in range(60)])),
        swaps=[swap, failure],
        totals={
            "requests": 1200, "failed_requests": 0, "interactions_acknowledged": 1200, "interactions_in_lake": 1200,
            "feedback_acknowledged": 800, "feedback_in_lake": 799, "promoted": 1,
        },
        stages={"train": 118.4, "evaluate": 31.0},
    )  # fmt: skip


def test_a_report_shows_every_picture_and_every_number(data: ReportData, tmp_path: Path):
    page = Page(build(data, tmp_path / "out" / "report.html").read_text())
    assert len(page.pictures()) == 6
    assert all(page.pictures())
    for words in (
        "A loop & its <turns>",
        "policy v2 answers 60.0% right; v1, which the loop started from, 40.0%.",
        "Of 2 candidates, 1 passed the gate. 1 swap under traffic, and no request failed.",
        "+20.0",
        "acknowledged, all in the lake",
        "acknowledged, 799 in the lake",
        "it is worse",
        "28 ms",
        "bad hash",
        "<script>1+1",
        "0.25",
        "12:00:00",
    ):
        assert words in page.text, words


def test_a_report_needs_nothing_but_its_file(data: ReportData, tmp_path: Path):
    text = build(data, tmp_path / "report.html").read_text()
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in page.tags}
    assert not re.search(r"url\((?!#)|@import", text)
    loads = [value for _, attrs in page.tags for name, value in attrs.items() if name in ("src", "href", "xlink:href")]
    assert all(str(value).startswith("#") for value in loads)


def test_pictures_are_whole_svg_and_share_no_id(data: ReportData, tmp_path: Path):
    text = build(data, tmp_path / "report.html").read_text()
    ids: list[str] = []
    for svg in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL):
        root = ElementTree.fromstring(svg)
        ids += [element.attrib["id"] for element in root.iter() if "id" in element.attrib]
        for link in re.findall(r'(?:url\(|href=")#([^")]+)', svg):
            assert link in ids
    assert len(ids) == len(set(ids))


def test_the_same_data_gives_the_same_file(data: ReportData, tmp_path: Path):
    assert build(data, tmp_path / "a").read_bytes() == build(data, tmp_path / "b").read_bytes()


def test_without_data_the_page_says_what_is_not_there(tmp_path: Path):
    page = Page(build(ReportData(title="Nothing"), tmp_path / "report.html").read_text())
    assert page.pictures() == []
    for words in ("no policy yet", "No candidate", "No training", "No traffic", "No swap", "no two evaluated", "timed"):
        assert words in page.text


def test_the_best_of_n_stands_beside_the_incumbent_and_the_candidate(data: ReportData, tmp_path: Path):
    page = Page(build(data.model_copy(update={"best_of": (evaluation(),)}), tmp_path / "report.html").read_text())
    (table,) = re.findall(r"Chosen by (.*?) Training", page.text)
    for words in ("v1 0.400", "0.350", "n = 4: 0.550 0.450 – 0.650", "0.64", "v2 0.600", "human"):
        assert words in table, (words, table)
    assert "human@" not in table
    assert "Best of n" not in Page(build(data, tmp_path / "without.html").read_text()).text


def test_policies_that_a_judge_scored_have_no_accuracy(data: ReportData, tmp_path: Path):
    judged = tuple(row.model_copy(update={"accuracy": None}) for row in data.policies)
    gates = tuple(gate.model_copy(update={"metric": "reward"}) for gate in data.gates)
    page = Page(
        build(
            data.model_copy(update={"policies": judged, "gates": gates, "metric": "reward"}), tmp_path / "report.html"
        ).read_text()
    )
    assert "ccuracy" not in page.text
    assert "Held-out reward by policy" in page.pictures()
    assert "Held-out accuracy by policy" not in page.pictures()
    assert "v2 v1 0.600 0.500 – 0.700 300 serves" in page.text


def evaluation() -> Evaluation:
    def result(version: int, value: float) -> PolicyResult:
        return PolicyResult(
            version=version, sha256="0", n=100, missing=0, reward=interval(value), accuracy=interval(value),
            distinct_1=0, distinct_2=0, length_mean=1, length_p95=1, truncated=0,
        )  # fmt: skip

    points = [
        BestOfPoint(k=k, reward=interval(value), accuracy=interval(value), kl_bound=bound)
        for k, value, bound in ((1, 0.35, 0.0), (4, 0.55, 0.6363))
    ]
    return Evaluation(
        candidate=result(2, 0.6), incumbent=result(1, 0.4), n=100, missing=0, reward=interval(0.2),
        accuracy=interval(0.2), kl=None, kl_missing="none", confidence=0.95, resamples=100, seed=0, suite="s",
        suite_sha256="0", suite_items=100, scorer="s", settings="s", created_at="2026-11-22T00:00:00", seconds={},
        samples=(), best_of=BestOf(by="human@0123", n=4, items=100, missing=0, points=tuple(points)),
    )  # fmt: skip


def test_each_part_renders_alone(data: ReportData, tmp_path: Path):
    for name in ("policies", "training", "gates", "samples", "traffic", "swaps", "totals", "stages"):
        Page(build(ReportData(title=name, **{name: getattr(data, name)}), tmp_path / name).read_text())


def test_a_policy_without_an_evaluation_is_listed(tmp_path: Path):
    page = Page(build(ReportData(title="x", policies=[{"version": 7}]), tmp_path / "report.html").read_text())
    assert "No policy has been evaluated yet" in page.text
    assert "v7" in page.text


def test_a_hundred_cycles_still_give_a_page(tmp_path: Path):
    policies = [{"version": i, "accuracy": interval(i / 200), "reward": interval(1.0)} for i in range(1, 101)]
    gates = [
        {"candidate": i, "incumbent": 1, "difference": 0, "ci_low": 0, "ci_high": 0, "verdict": "refuse"}
        for i in range(2, 101)
    ]
    training = {f"cycle {i}": [{"reward": 1.0}] for i in range(100)}
    data = ReportData(title="x", policies=policies, gates=gates, training=training)
    assert len(Page(build(data, tmp_path / "report.html").read_text()).pictures()) == 4


def test_a_row_of_results_carries_its_intervals():
    half = Interval(value=0.5, low=0.4, high=0.6)
    result = PolicyResult(
        version=2, sha256="0", n=100, missing=0, reward=half, accuracy=half, distinct_1=0, distinct_2=0,
        length_mean=1, length_p95=1, truncated=0,
    )  # fmt: skip
    row = PolicyRow.model_validate({**result.model_dump(), "parent": 1})
    assert (row.version, row.parent, row.accuracy, row.reward) == (2, 1, half, half)


def test_unknown_report_fields_are_refused():
    with pytest.raises(ValidationError, match="swap"):
        ReportData(title="x", swap=[])


def test_a_swap_reads_both_kinds_of_time_and_the_servers_names():
    assert SwapRow.model_validate({"at": START.isoformat(), "from": 1, "to": 2}).time == START.timestamp()
    assert SwapRow.model_validate({"at": START.timestamp(), "from": None, "to": 2}).time == START.timestamp()


def test_traffic_counts_every_request_and_token_once_and_keeps_empty_bins():
    rows = [interaction(i) for i in (0, 1, 2, 3, 90, 100)]
    rows.append(interaction(3, response_id="r3b"))  # a second response of the same request
    rows.append(interaction(4, status="error", response_token_ids=[]))
    bins = traffic(connection(rows), bins=10)
    assert bins is not None
    assert sum(bins.column("requests").to_pylist()) == 7
    assert sum(bins.column("tokens").to_pylist()) == 21
    assert bins.column("time")[0].as_py() == START.timestamp()
    assert bins.column("seconds")[0].as_py() == 10.0
    assert 0 in bins.column("requests").to_pylist()
    assert bins.column("p50_ms")[0].as_py() == 12.0
    assert None in bins.column("p50_ms").to_pylist()


def test_no_traffic_is_none_and_one_request_is_one_bin():
    assert traffic(connection([])) is None
    bins = traffic(connection([interaction(0)]))
    assert bins is not None
    assert bins.column("requests").to_pylist() == [1]


def test_a_verdict_has_its_level_its_evidence_and_what_the_levels_promise(tmp_path: Path):
    known = {
        "incumbent": 1,
        "level": 0.0219,
        "budget": "false discovery rate at most 0.05 (e_lond)",
        "e_value": 78.2,
        "items": 150,
        "n": 140,
    }
    gates = [
        {**known, "candidate": 2, "difference": 0.1, "ci_low": 0.0, "ci_high": 0.2, "verdict": "pass",
         "levels_given": 0.0219},
        {**known, "candidate": 3, "difference": 0.01, "ci_low": -0.1, "ci_high": 0.1, "verdict": "undecided",
         "reasons": ["needs about 300 more items"], "levels_given": 0.0363, "learned": ["a", "b"]},
        {**known, "candidate": 4, "difference": None, "ci_low": None, "ci_high": None, "verdict": "refuse",
         "reasons": ["the error budget is spent"], "items": 0, "levels_given": 0.0363},
    ]  # fmt: skip
    policies = [{"version": i} for i in range(1, 5)]
    page = Page(build(ReportData(title="x", gates=gates, policies=policies), tmp_path / "report.html").read_text())
    for words in (
        "Of 3 candidates, 1 passed the gate, 1 undecided.",
        "passed, 1 refused, 1 undecided",
        "Levels given so far add up to 0.0363; what that comes to: false discovery rate at most 0.05 (e_lond).",
        "0.022",
        "78.2",
        "150",
        "needs about 300 more items 2 items refused, which it has learned from",
        "the error budget is spent",
    ):
        assert words in page.text, words
