"""What a cycle exports, and its log as JSON."""

from __future__ import annotations

import json
import subprocess

from deploy.config import root
from deploy.config.root import Settings, child_environment
from deploy.loop.cycle import run_cycle
from deploy.supervise.children import millrace
from tests.otlp import collecting
from tests.paths import ROOT


def run(settings: Settings) -> list[str]:
    """The lines of a cycle of a process of its own."""
    done = subprocess.run(
        millrace("--config", settings.snapshot(), "cycle"),
        capture_output=True,
        text=True,
        timeout=300,
        env=child_environment({"PYTHONPATH": str(ROOT)}),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_cycle_is_a_trace_with_a_span_for_each_stage_and_its_log_is_json(home_with_policy: Settings) -> None:
    with collecting() as collector:
        options = [("serve.traces.endpoint", collector.url), ("serve.log_format", "json")]
        lines = [json.loads(line) for line in run(root.load(home_with_policy.snapshot(), options, {}))]
    assert {"time", "level", "logger", "message"} <= lines[0].keys()
    assert {line["logger"] for line in lines} == {"millrace.cycle"}
    assert lines[-1]["message"].startswith("cycle 1: skipped: 0 new rewards")
    found = {span.name: span for span in collector.spans}
    assert set(found) == {"cycle 1", "score"}
    whole, score = found["cycle 1"], found["score"]
    assert (whole.service, whole.parent, score.parent, score.trace) == ("millrace-cycle", "", whole.span, whole.trace)
    assert whole.start <= score.start < score.end <= whole.end
    assert whole.attributes == {"millrace.number": 1, "millrace.outcome": "skipped", "millrace.incumbent": 1}


def test_a_stage_that_fails_is_an_error_in_its_span_and_the_cycles_outcome(home_with_policy: Settings) -> None:
    with collecting() as collector:
        options = [("serve.traces.endpoint", collector.url), ("cycle.score_timeout_s", "0.01")]
        record = run_cycle(root.load(home_with_policy.snapshot(), options, {}))
    assert record.status == "failed"
    found = {span.name: span for span in collector.spans}
    assert (found["score"].error, found["score"].attributes["error.type"]) == (True, "StageFailed")
    assert record.reason is not None
    assert not any(record.reason[:20].encode() in body for body in collector.bodies)  # it may quote a prompt
    assert found["cycle 1"].attributes["millrace.outcome"] == "failed"
