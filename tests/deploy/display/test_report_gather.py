"""The report of a home in which candidates were judged, promoted, tried and taken back, by what production calls."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.config.root import Settings
from deploy.display.report_data import gather
from deploy.loop import promotion
from deploy.loop.experiments import Controller, blocks_file
from evaluation.decisions.ledger import LedgerDamaged
from evaluation.experiments.blocks import Block
from evaluation.report.page import build
from evaluation.results import Evaluation, Interval, PolicyResult
from serve.policies.experiments import Phase
from tests.evaluation.decisions.worlds import items, judged

WHO = "ann@host"


@pytest.fixture
def used(home_with_policy: Settings) -> Settings:
    """Policy 2 passed and serves; 3 was refused, promoted by override and taken back; 4 passed and harmed people."""
    settings = home_with_policy
    store, ledger = settings.policy_store(), settings.ledger()
    for number in (2, 3, 4):
        store.publish(changed(store.get(1).path, number), parent=1, lineage={}, metrics={})
    sha = {version: store.get(version).sha256 for version in store.versions()}

    def race(candidate: int, incumbent: int, gain: float) -> None:
        shas = sha[candidate], sha[incumbent]
        judged(ledger, candidate, items(600, gain, name=f"{candidate}-"), incumbent=incumbent, shas=shas)
        evaluation(settings, (candidate, incumbent), shas)

    def serve() -> None:
        pointer = store.serving()
        assert pointer is not None
        store.record_outcome(pointer, served=True, by="replica-0")

    serve()
    race(2, 1, 0.2)
    promotion.promote(store, ledger, 2, who="cycle", why="cycle 1: passed the gate")
    serve()
    race(3, 2, -0.2)
    promotion.promote(store, ledger, 3, who=WHO, why="a demonstration", override=True)
    serve()
    promotion.rollback(store, who=WHO, why="users complain")
    serve()
    race(4, 2, 0.2)
    settings.lake().create()
    tried(Controller(settings, say=lambda _: None), 4)
    run = settings.path("runs") / "cycle-000001"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text(
        json.dumps({"step": 0, "time": time.time(), "reward": 0.5, "kl_ref": 0.1}) + "\n"
    )
    return settings


def changed(folder: Path, number: int) -> Callable[[Path], None]:
    """The same model under another name, which is another policy."""

    def write(into: Path) -> None:
        for file in folder.iterdir():
            if file.name not in ("policy.json", "gate.json"):
                shutil.copy(file, into)
        (into / "name.txt").write_text(str(number))

    return write


def evaluation(settings: Settings, versions: tuple[int, int], shas: tuple[str, str]) -> None:
    """An evaluation of items that no other candidate was looked at with."""
    at = Interval(value=0.5, low=0.4, high=0.6)
    results = [
        PolicyResult(
            version=version, sha256=sha, n=100, missing=0, reward=at, accuracy=at, distinct_1=0.1, distinct_2=0.2,
            length_mean=5, length_p95=9, truncated=0,
        )
        for version, sha in zip(versions, shas, strict=True)
    ]  # fmt: skip
    Evaluation(
        candidate=results[0], incumbent=results[1], n=100, missing=0, reward=at, accuracy=at, kl=None, kl_missing="no",
        confidence=0.95, resamples=100, seed=0, suite="suite.jsonl", suite_sha256=f"items of {versions[0]}",
        suite_items=100, scorer="exact_match", settings="s", created_at=f"2026-11-2{versions[0]}T00:00:00", seconds={},
        samples=(),
    ).save(settings.resolved().evaluation.folder)  # fmt: skip


def tried(controller: Controller, version: int) -> None:
    """An experiment whose blocks have closed, and which a look ends."""
    begun = controller.start(version, who=WHO, why="try it")
    ago = 100 * begun.block_s + 10_000
    drawn = controller.experiments.change(
        begun.number, lambda one: replace(one, started_at=one.started_at - ago, phases=(Phase(0, 0.5),))
    )
    turns = [drawn.turn(number) for number in range(100)]
    blocks = [
        Block(
            block=turn.block, candidate=turn.variant == "candidate", propensity=turn.propensity, requests=10, voices=5,
            responded=1.0, values={"feedback": 0.1 if turn.variant == "candidate" else 0.9, "errors": 0.0},
        )
        for turn in turns
    ]  # fmt: skip
    blocks_file(controller.experiments, begun.number).write_text("".join(f"{b.model_dump_json()}\n" for b in blocks))
    ended = controller.look()
    assert ended is not None
    assert ended.end is not None
    assert ended.end["decision"] == "roll back"


def test_what_became_of_each_policy_is_known(used: Settings) -> None:
    data = gather(used, title="T")
    words = {row.version: [word for word, _ in data.tags(row.version)] for row in data.policies}
    assert words == {
        1: ["first", "promoted", "replaced"],
        2: ["serves"],
        3: ["override", "rolled back"],
        4: ["passed, not promoted", "experiment 1: roll back"],
    }
    assert data.metric == "reward"
    assert [move.version for move in data.undone] == [3]


def test_what_the_ledger_knows_is_gathered(used: Settings) -> None:
    data = gather(used, title="T")
    assert [(race.candidate, race.incumbent, race.verdict) for race in data.races] == [
        (2, 1, "pass"), (3, 2, "refuse"), (4, 2, "pass"),
    ]  # fmt: skip
    assert data.spending is not None
    assert [one.candidate for one in data.spending.candidates] == [2, 3, 4]
    for gate, race in zip(data.gates, data.races, strict=True):
        assert gate.difference == pytest.approx(race.running_mean[-1])
        assert gate.ci_low is not None
        assert gate.ci_low < gate.difference
        assert (gate.level, gate.metric) == (race.level, "reward")
    (experiment,) = data.experiments
    assert (experiment.candidate, experiment.decision, experiment.requests) == (4, "roll back", 1000)
    assert [path.outcome for path in experiment.paths] == ["feedback", "errors"]
    assert [row.run for row in data.runs] == ["cycle-000001"]


def test_each_candidate_s_items_are_a_set_of_their_own(used: Settings) -> None:
    data = gather(used, title="T")
    assert [[row.version for row in of.policies] for of in data.suites] == [[1, 2], [2, 3], [2, 4]]
    assert data.letters == {1: "A", 2: "C", 3: "B", 4: "C"}


def test_evaluations_of_the_same_items_are_one_set_with_the_newest_results(used: Settings) -> None:
    folder = used.resolved().evaluation.folder
    for path in folder.glob("*.json"):
        found = Evaluation.load(path)
        found.model_copy(update={"suite_sha256": "all"}).save(folder)
    (suite,) = gather(used, title="T").suites
    assert [row.version for row in suite.policies] == [1, 2, 3, 4]


def test_another_scorer_is_another_set(used: Settings) -> None:
    folder = used.resolved().evaluation.folder
    for path in folder.glob("*.json"):
        found = Evaluation.load(path)
        scorer = "judge" if found.candidate.version == 4 else "exact_match"
        found.model_copy(update={"suite_sha256": "all", "scorer": scorer}).save(folder)
    assert [[row.version for row in of.policies] for of in gather(used, title="T").suites] == [[1, 2, 3], [2, 4]]


@pytest.mark.parametrize(
    "lost",
    ["evaluations", "decisions", "runs", "lake", "policies/experiments", "policies/outcomes.jsonl",
     "policies/history.jsonl", "policies/experiments/000001.blocks.jsonl"],
)  # fmt: skip
def test_a_home_that_lacks_a_part_has_a_report_of_the_rest(used: Settings, lost: str, tmp_path: Path) -> None:
    path = used.home / lost
    assert path.exists()
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert "v4" in build(gather(used, title="T"), tmp_path / "report.html").read_text()


def test_a_damaged_evaluation_is_named_and_the_report_has_the_others(used: Settings, tmp_path: Path) -> None:
    torn = used.resolved().evaluation.folder / "2-vs-1.json"
    torn.write_bytes(torn.read_bytes()[:-100])
    data = gather(used, title="T")
    assert data.damaged == ("2-vs-1.json",)
    assert [[row.version for row in of.policies] for of in data.suites] == [[2, 3], [2, 4]]
    page = build(data, tmp_path / "report.html").read_text()
    assert "<code>2-vs-1.json</code>" in page
    assert "v4" in page


def test_evidence_that_is_gone_is_named(used: Settings) -> None:
    shutil.rmtree(used.home / "decisions" / "evidence")
    with pytest.raises(LedgerDamaged, match="can't be read"):
        gather(used, title="T")
