from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from feedback_rows import append

from deploy.config.root import Settings
from deploy.display.report_data import ReportError, gather
from deploy.examples.demo import summary
from deploy.loop import records
from evaluation.report.page import build
from feedback.ids import uuid7
from feedback.ingest.seal import seal
from feedback.journal.writer import Journal
from serve.policies.store import PolicyStore

VERDICT = {
    "verdict": "pass",
    "candidate": 2,
    "incumbent": 1,
    "difference": 0.2,
    "ci_low": 0.1,
    "ci_high": 0.3,
    "reasons": [],
}


@pytest.fixture
def used(home_with_policy: Settings, model: Path) -> Settings:
    """A home after a cycle: two policies, a verdict, a run, a swap and a response that is still in the journal."""
    settings = home_with_policy
    store = PolicyStore(settings.path("policies"))
    store.publish(model, parent=1, lineage={}, metrics={})
    store.record_gate(2, VERDICT)
    at = datetime.now(UTC)
    stages = [records.Stage(name=name, started_at=at, seconds=2.0, ok=True) for name in ("score", "train")]
    for number, status in ((1, "promoted"), (2, "skipped")):
        verdict, candidate = (VERDICT, 2) if number == 1 else (None, None)
        record = records.CycleRecord(
            number=number, status=status, started_at=at, candidate=candidate, verdict=verdict, stages=stages
        )
        settings.path("cycles").mkdir(exist_ok=True)
        (settings.path("cycles") / f"{number:06d}.json").write_text(record.model_dump_json())
    for name, time in (("later", 20.0), ("earlier", 10.0)):
        run = settings.path("runs") / name
        run.mkdir(parents=True)
        rows = [{"step": step, "time": time + step, "reward": 0.5, "kl_ref": 0.01} for step in range(2)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 2, "rew')
    swap = {"at": at.isoformat(), "from": 1, "to": 2, "ok": True, "error": None, "hold_ms": 16.0, "in_flight": 3}
    settings.path("replicas").mkdir()
    (settings.path("replicas") / "replica-0.jsonl").write_text(json.dumps(swap) + "\n")
    resolved = settings.resolved()
    journal = Journal(Path(resolved.feedback.journal.folder), resolved.feedback.journal, "replica-0")
    journal.open()
    append(journal, "interactions", _interaction(at))
    journal.close()
    return settings


def test_what_a_home_holds_is_gathered(used: Settings) -> None:
    data = gather(used, title="T", totals={"failed_requests": 0})
    assert [(row.version, row.parent) for row in data.policies] == [(1, None), (2, 1)]
    assert [(gate.candidate, gate.verdict) for gate in data.gates] == [(2, "pass")]
    assert list(data.training) == ["earlier", "later"]
    assert [row["step"] for row in data.training["later"]] == [0, 1]  # the torn last line is left out
    assert [(swap.source, swap.target) for swap in data.swaps] == [(1, 2)]
    assert data.stages == {"score": 2.0, "train": 2.0}  # skipped cycles don't count
    assert data.traffic is not None
    totals = {"requests": 1, "responses": 1, "response_tokens": 2, "feedback": 0, "responses_with_reward": 0}
    assert data.totals == {**totals, "failed_requests": 0}


def test_the_demo_counts_from_both_sides_in_its_summary_and_in_its_report(used: Settings, tmp_path: Path) -> None:
    lake = used.lake()
    lake.create()
    seal(lake, Path(used.resolved().feedback.journal.folder))
    with lake.connect() as connection:
        [(kept,)] = connection.execute("SELECT response_id FROM interactions").fetchall()
    account = [
        {"kind": "generate", "ok": True, "ids": [kept]},
        {"kind": "generate", "ok": True, "ids": ["lost"]},
        {"kind": "feedback", "ok": False},
    ]
    figures = summary.write(used, tmp_path, account, {"seed": 1.0})
    assert (figures["requests"], figures["failed_requests"], figures["swaps"]) == (3, 1, 1)
    assert (figures["interactions_acknowledged"], figures["interactions_in_lake"]) == (2, 1)
    assert (figures["interactions_lost"], figures["interactions_not_acknowledged"]) == (1, 0)
    assert [gate["candidate"] for gate in figures["gate"]] == [2]
    assert figures["seconds"] == {"seed": 1.0, "cycle 1: score": 2.0, "cycle 1: train": 2.0}
    assert json.loads((tmp_path / "summary.json").read_text()) == figures
    assert "acknowledged, 1 in the lake" in (tmp_path / "report.html").read_text()


def test_the_page_is_built_from_a_used_home_and_from_an_empty_one(used: Settings, tmp_path: Path) -> None:
    assert "<svg" in build(gather(used, title="A used home"), tmp_path / "used.html").read_text()
    empty = used.model_copy(update={"home": tmp_path / "empty"})
    data = gather(empty, title="An empty home")
    assert (data.policies, data.gates, data.training, data.swaps, data.traffic) == ((), (), {}, (), None)
    assert "An empty home" in build(data, tmp_path / "empty.html").read_text()


def test_a_damaged_line_is_named(used: Settings) -> None:
    file = used.path("runs") / "later" / "metrics.jsonl"
    file.write_text('{"step": 0}\nnonsense\n{"step": 1}\n')
    with pytest.raises(ReportError, match=r"metrics\.jsonl, line 2"):
        gather(used, title="T")


def _interaction(at: datetime) -> dict[str, object]:
    return {
        "response_id": uuid7(),
        "request_id": uuid7(),
        "tenant": "default",
        "endpoint": "/generate",
        "replica": "replica-0",
        "created_at": at - timedelta(milliseconds=20),
        "completed_at": at,
        "prompt": "1+1=",
        "prompt_token_ids": [1, 2],
        "response": "2",
        "response_token_ids": [3, 1],
        "logprobs": [-0.5, -0.1],
        "policy_spans": [{"start": 0, "policy_version": 1}],
        "sampling": {"temperature": 1.0, "max_tokens": 8, "n": 1, "stop": []},
        "finish_reason": "stop",
        "status": "complete",
        "timings": {"queue_ms": 1.0, "first_token_ms": 5.0, "total_ms": 20.0},
        "metadata": [],
    }
