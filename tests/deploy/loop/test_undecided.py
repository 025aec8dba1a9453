"""An undecided candidate stays in the race: by real cycles, real evaluations, and a real ledger."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from deploy import cli
from deploy.config import root
from deploy.config.root import Settings
from deploy.display.report_data import gather
from deploy.loop import records
from deploy.loop.cycle import run_cycle
from deploy.loop.records import CycleRecord
from deploy.loop.recovery.killed_runs import judged_before
from evaluation.config import EvaluationConfig
from evaluation.decisions.history import History
from evaluation.evaluate import Scoring
from evaluation.results import Evaluation
from tests.evaluation.decisions.worlds import config, items, judged, rewrite, seen
from tests.feedback.feedback_rows import interaction, put

FAST = {
    "evaluation.kl_samples": "0",
    "evaluation.max_tokens": "4",
    "evaluation.engine.kv_cache_bytes": str(2**25),
}


@pytest.fixture
def home(home_with_policy: Settings, model: Path, tmp_path: Path) -> Settings:
    """Policies 1, which serves, 2 and 3, all with the same weights; cycle 1 has trained policy 2."""
    settings = root.load(home_with_policy.snapshot(), list(FAST.items()), {})
    store = settings.policy_store()
    for number in (2, 3):
        folder = Path(shutil.copytree(model, tmp_path / f"model-{number}"))
        (folder / "generation_config.json").write_text(json.dumps({"number": number}))
        store.publish(folder, parent=1, lineage={}, metrics={})
    settings.path("cycles").mkdir()
    ended(settings, "undecided")
    return settings


def ended(settings: Settings, status: str, number: int = 1, **fields: Any) -> None:
    """A cycle that trained policy 2 and ended so."""
    stage = records.Stage(name="train", started_at=datetime.now(UTC), run="cycle-000001", ok=True)
    about: dict[str, Any] = {"incumbent": 1, "candidate": 2, "run": "cycle-000001", "rewards": 7, **fields}
    record = CycleRecord(number=number, status=status, started_at=datetime.now(UTC), stages=[stage], **about)  # type: ignore[arg-type]
    records.write(settings, record)


def on_record(
    settings: Settings, observed: tuple[Any, ...], by: EvaluationConfig | None = None, killed: bool = False
) -> str | None:
    """A verdict on policy 2, as an evaluation would leave it; none of one that was killed before it."""
    store = settings.policy_store()
    scorer = Scoring(settings.resolved().evaluation, settings.evaluation_sources()).name
    shas = store.get(2).sha256, store.get(1).sha256
    entry = judged(settings.ledger(), 2, observed, shas=shas, scorer=scorer, settings=by, killed=killed)
    verdict: str | None = entry.body.get("verdict")
    return verdict


def still(settings: Settings, number: int = 2, incumbent: int = 1) -> str | None:
    """Why policy 2 is let go; empty if it is in the race, None if it is not the question."""
    last, why = judged_before(settings, History.of(settings.ledger().entries()), number, incumbent)
    return None if last is None else why


@pytest.mark.long
def test_it_goes_on_with_fresh_items_waits_without_any_and_is_refused_in_the_end(
    home: Settings, nothing_left: Callable[[], list[str]]
) -> None:
    assert on_record(home, tuple(seen(f"s{i}", 1.0, 1.0) for i in range(50))) == "undecided"
    said: list[str] = []
    record = run_cycle(home, say=said.append)
    assert (record.status, record.candidate, record.rewards) == ("undecided", 2, 7), said
    assert [stage.name for stage in record.stages] == ["score", "train", "evaluate"]
    assert (record.verdict or {})["items"] == 110, "50 were looked at before, and 60 are in the suite"
    assert any("policy 2 is undecided since cycle 1: 60 fresh items go on with it" in line for line in said)

    waits = run_cycle(home, say=said.append)
    assert (waits.status, waits.candidate, [stage.name for stage in waits.stages]) == ("skipped", None, ["score"])
    assert str(waits.reason).startswith("policy 2 is undecided and needs about ")
    assert "`millrace suite add FILE` adds some" in str(waits.reason)

    with home.path("suite.jsonl").open("a") as suite:
        suite.writelines(f'{{"id": "m{i}", "prompt": "{i}+2=", "answer": "{i + 2}"}}\n' for i in range(400))
    last = run_cycle(home, say=said.append)
    assert (last.status, last.candidate) == ("refused", 2), said
    assert "no worthwhile gain" in str(last.reason)
    assert (last.verdict or {})["fresh"] > 0
    assert cli.run(["--config", str(home.snapshot()), "decisions", "verify"]) == 0
    assert nothing_left() == []


def test_evaluate_measures_kl_to_the_first_policy_and_says_of_whose_training_nothing_is_known(
    home: Settings, capfd: pytest.CaptureFixture[str]
) -> None:
    options = {"evaluation.kl_samples": "1", "evaluation.gate.guardrails.kl_v1": "0.5"}
    config = root.load(home.snapshot(), list(options.items()), {}).snapshot()
    assert cli.run(["--config", str(config), "evaluate", "3", "--incumbent", "2"]) == 0
    printed = capfd.readouterr().out
    assert "what policy 3 has learned from is not all known: not what went into policy 3" in printed
    verdict = home.ledger().entries()[-1]
    looks = home.ledger().evidence(verdict.body["evidence"])["looks"]
    assert all(one["kl_v1"] == pytest.approx(0, abs=1e-4) for look in looks for one in look["fresh"])
    assert verdict.body["plan"]["margins"]["kl_v1"] == 0.5


@pytest.mark.long
def test_evaluate_shows_and_keeps_a_watched_suite_by_itself_and_nothing_of_it_decides(
    home: Settings, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    home.path("math.jsonl").write_text(
        "".join(f'{{"id": "w{i}", "prompt": "{i}+3=", "answer": "{i + 3}"}}\n' for i in range(20))
    )
    options = {f"evaluation.suites.math.{name}": value for name, value in (("path", "math.jsonl"), ("role", "watch"))}
    settings = root.load(home.snapshot(), list(options.items()), {})
    assert home.path("math.jsonl") in settings.training().data.exclude_suites
    out, lake = tmp_path / "out.json", settings.lake()
    lake.create()
    warm = {"temperature": 0.7, "top_p": 0.9, "max_tokens": 8, "n": 1, "stop": []}
    put(lake, "interactions", [interaction("as users ask", sampling=warm)])
    command = ["evaluate", "3", "--incumbent", "2", "--json-out", str(out)]
    assert cli.run(["--config", str(settings.snapshot()), *command]) == 0
    printed = capfd.readouterr().out
    assert "answered sampled at temperature 0.7, top_p 0.9, as requests of traffic are" in printed
    assert "policy 3, greedy: accuracy" in printed
    assert "suite math (watch), 20 items:" in printed
    written = json.loads(out.read_text())
    assert written["verdict"]["sampling"]["sets"][0]["requests"] == 1
    assert written["greedy"]["n"] == written["verdict"]["items"]
    found = written["suites"]["math"]
    assert found["greedy"]["n"] == 20
    assert (found["role"], found["n"]) == ("watch", 20)
    kept = Evaluation.load(Path(found["evaluation"]))
    assert (kept.name, kept.role, kept.suite_items) == ("math", "watch", 20)
    entry = home.ledger().entries()[-1]
    assert entry.body["plan"]["suites"] == {}
    assert "latency" not in entry.body["plan"]["margins"], "both have one shape, though not one generation_config.json"
    assert not any("math" in row["metric"] for row in entry.body["standings"])
    shown = {row.name: (row.role, row.items) for row in gather(settings, title="a report").suites}
    assert shown["math (watch)"] == ("watch", 20)
    assert len(shown) == 2


def test_a_refusal_that_is_on_record_is_seen_by_the_cycle_after_the_one_that_was_killed_behind_it(
    home: Settings, nothing_left: Callable[[], list[str]]
) -> None:
    ended(home, "failed")
    assert on_record(home, items(500, gain=-0.3)) == "refuse"
    said: list[str] = []
    record = run_cycle(home, say=said.append)
    assert (record.status, record.candidate) == ("refused", 2), said
    assert len([entry for entry in home.ledger().entries() if entry.kind == "verdict"]) == 1, "nothing decides twice"
    assert any("policy 2 was judged in cycle 1, which ended before it could say so" in line for line in said)


def test_it_is_let_go_when_another_policy_serves_or_it_can_not_be_judged_on(home: Settings) -> None:
    assert still(home) == "", "the suite was used up before the first look"
    assert on_record(home, items(50, gain=0.0)) == "undecided"
    assert still(home) == ""
    assert still(home, incumbent=3) == "it was compared with policy 1, and policy 3 serves"
    other = root.load(home.snapshot(), [("evaluation.scorer", "repetition_penalty")], {})
    assert str(still(other)).startswith("it was scored by exact_match@")
    for number in (2, 3):
        ended(home, "failed", number)
        assert still(home, number + 1) == ""
    ended(home, "failed", 4)
    assert still(home, 5) == "3 cycles in a row have failed at it"
    ended(home, "refused", 5)
    assert still(home, 6) is None
    ended(home, "undecided", 6)
    home.policy_store().record_erasure(2, certainty="yes", why="w", retrain=True)
    assert still(home, 7) == "an erasure has reached policy 2"


def test_a_candidate_whose_evaluation_was_killed_is_in_the_race_until_cycles_have_failed_at_it_too_often(
    home: Settings,
) -> None:
    ended(home, "failed")
    on_record(home, tuple(seen(f"s{i}", 1.0, 1.0) for i in range(50)), killed=True)
    assert still(home) == ""
    assert still(home, incumbent=3) is None, "it is a new candidate against another policy"
    other = root.load(home.snapshot(), [("evaluation.scorer", "repetition_penalty")], {})
    assert str(still(other)).startswith("it was scored by exact_match@")
    for number in (2, 3):
        ended(home, "failed", number)
    assert still(home, 4) == "3 cycles in a row have failed at it"


@pytest.mark.long
def test_an_evaluation_that_was_killed_is_gone_on_with_by_the_next_cycle_though_no_item_is_left_for_another(
    home: Settings, nothing_left: Callable[[], list[str]]
) -> None:
    """All items of the suite were about to be looked at."""
    rows = [{"id": f"{i}", "prompt": f"{i}+1=", "answer": f"{i + 1}"} for i in range(60)]
    assert [json.loads(row) for row in home.path("suite.jsonl").read_text().splitlines()] == rows
    first = run_cycle(home)
    intents = [entry for entry in home.ledger().entries() if entry.kind == "intent"]
    assert (first.status, sum(len(entry.body["fresh"]) for entry in intents)) == ("undecided", 60)
    verdict = [entry.number for entry in home.ledger().entries() if entry.kind == "verdict"][-1]
    rewrite(
        home.ledger(), lambda entries: entries.__delitem__(slice(verdict - 1, None))
    )  # as a kill would have left it
    shutil.rmtree(home.path("cycles"))
    home.path("cycles").mkdir()
    ended(home, "failed")
    said: list[str] = []
    record = run_cycle(home, say=said.append)
    assert (record.status, record.candidate) == ("undecided", 2), said
    assert any("policy 2 is undecided since cycle 1: 60 fresh items go on with it" in line for line in said)
    assert record.verdict == {**(first.verdict or {}), "entry_sha256": (record.verdict or {})["entry_sha256"]}
    assert cli.run(["--config", str(home.snapshot()), "decisions", "verify"]) == 0
    assert nothing_left() == []


def test_a_scorer_that_can_not_be_loaded_ends_no_cycle_before_the_evaluation_says_so(
    home: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert on_record(home, items(50, gain=0.0)) == "undecided"
    (home.home / "failing_scorer.py").write_text("x = undefined")
    monkeypatch.syspath_prepend(home.home)
    home.path("judge").write_text("a file where verdicts are to be kept")
    judge = '{url: "http://127.0.0.1:1", model: m, rubric: "{response}"}'
    for options in (
        {"evaluation.scorer": "failing_scorer:f"},
        {"evaluation.scorer": "judge", "feedback.scoring.judge": judge},
    ):
        assert still(root.load(home.snapshot(), list(options.items()), {})) == ""


def test_a_cycle_that_ended_before_the_gate_said_anything_leaves_its_training_to_be_gone_on_with(
    home: Settings,
) -> None:
    ended(home, "failed")
    assert still(home) is None


def test_nothing_is_trained_that_could_not_be_judged(home: Settings) -> None:
    ended(home, "refused")
    settings = root.load(home.snapshot(), [("cycle.min_new_rewards", "0")], {})
    suite = home.path("suite.jsonl").read_text().splitlines(keepends=True)
    home.path("suite.jsonl").write_text("".join(suite[:40]))
    record = run_cycle(settings)
    assert (record.status, [stage.name for stage in record.stages]) == ("skipped", ["score"])
    assert str(record.reason).startswith(
        "40 of the suite's items are fresh, gate.min_items is 50: an item decides once"
    )
    home.path("suite.jsonl").write_text("".join(suite))
    spent = {"rule": "fixed_horizon", "horizon": 1}
    on_record(home, items(400, gain=-0.3), by=config(budget=spent))
    spent_options = [(f"evaluation.gate.budget.{name}", str(value)) for name, value in spent.items()]
    record = run_cycle(root.load(settings.snapshot(), spent_options, {}))
    assert (record.status, [stage.name for stage in record.stages]) == ("skipped", ["score"])
    assert str(record.reason).startswith("the error budget is spent")
