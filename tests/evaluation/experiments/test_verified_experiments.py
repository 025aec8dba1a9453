"""Experiments in a ledger, recomputed: what is not as it was drawn and decided is named."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evaluation.config import ExperimentConfig, OutcomesConfig
from evaluation.decisions.ledger import Ledger
from evaluation.experiments import looks
from evaluation.experiments.blocks import Block, Observed
from evaluation.experiments.plan import ExperimentPlan
from evaluation.experiments.verification import verify
from feedback.config import HumanConfig, KindsConfig
from serve.policies.experiments import Experiment, Phase

PLAN = ExperimentPlan.of(
    ExperimentConfig(outcomes=OutcomesConfig(errors=None), feedback_window_seconds=0), HumanConfig(), KindsConfig()
).model_copy(update={"watch_s": 0.0})
CANDIDATE, CONTROL = {"version": 2, "sha256": "c" * 64}, {"version": 1, "sha256": "b" * 64}
PHASES = [{"from_block": 0, "share": 0.5}]
BLOCK_S = 1e-4  # all has closed when the next entry is written
DRAWN = Experiment(1, 2, 1, "seed", 0.0, BLOCK_S, (Phase(0, 0.5),), 1, "running", "test", "test", {})


def observed(likes: dict[str, float], blocks: int = 60) -> Observed:
    """Blocks as they were drawn, with the feedback that each variant gets."""
    turns = [DRAWN.turn(block) for block in range(blocks)]
    return Observed(
        blocks=tuple(
            Block(
                block=turn.block,
                candidate=turn.variant == "candidate",
                propensity=turn.propensity,
                requests=9,
                voices=3,
                responded=1.0,
                values={"feedback": likes[turn.variant]},
            )
            for turn in turns
        )
    )


LIKED = observed({"candidate": 0.9, "control": 0.3})
HARMFUL = observed({"candidate": 0.1, "control": 0.8})


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "decisions")


def start(ledger: Ledger, **changed: Any) -> None:
    body = {
        **{"number": 1, "event": "start", "candidate": CANDIDATE, "control": CONTROL, "phases": PHASES},
        **{"seed": "seed", "started_at": time.time() - 1, "block_s": BLOCK_S, "plan": PLAN.to_json(), "why": "test"},
        **{"verdict_entry": None, "override": True, "objection": "not evaluated"},
    }
    ledger.append("experiment", body | changed, who="test")


def add(ledger: Ledger, event: str, decision: str, seen: Observed | None, **changed: Any) -> None:
    evidence, why = None, "no reason"
    if seen is not None:
        evidence = ledger.keep({"experiment": 1, "observed": seen.model_dump(mode="json")})
        why = "; ".join(looks.look(PLAN, seen).reasons)
    body = {
        **{"number": 1, "event": event, "candidate": CANDIDATE, "control": CONTROL, "phases": PHASES},
        **{"decision": decision, "evidence": evidence, "why": why},
    }
    ledger.append("experiment", body | changed, who="experiment")


def test_what_was_drawn_and_decided_is_in_order(ledger: Ledger) -> None:
    start(ledger)
    add(ledger, "commit", "commit", LIKED)
    watched = [*PHASES, {"from_block": 80, "share": PLAN.watch_share}]
    add(ledger, "end", "kept", longer(LIKED), phases=watched)
    start(ledger, number=2)
    add(ledger, "end", "stopped", None, number=2)
    assert verify(ledger) == []


def test_who_is_kept_was_watched_for_as_long_as_planned(ledger: Ledger) -> None:
    start(ledger, plan=PLAN.model_copy(update={"watch_s": 3600.0, "window_s": 0.5}).to_json())
    add(ledger, "commit", "commit", LIKED)
    watched = [*PHASES, {"from_block": 80, "share": PLAN.watch_share}]
    add(ledger, "end", "kept", longer(LIKED), phases=watched)
    [problem] = verify(ledger)
    assert re.search(r"experiment 1 was kept 3\d{3} s before its watch and the feedback's window were over", problem)


def test_what_was_committed_did_begin_and_is_not_tried_again(ledger: Ledger) -> None:
    start(ledger)
    add(ledger, "commit", "commit", LIKED)
    add(ledger, "end", "not begun", None)
    start(ledger, number=2, override=False)
    assert verify(ledger) == [
        "entry 3: experiment 1 ended as not begun, and it has a commit",
        "entry 4: experiment 2 tried policy 2 without a passing verdict",
        "entry 4: experiment 2 tried a policy against another one for the second time",
    ]


@pytest.mark.parametrize(
    ("forge", "problem"),
    [
        (lambda ledger: add(ledger, "end", "stopped", HARMFUL), "came to stopped, and its evidence says roll back"),
        (lambda ledger: add(ledger, "end", "void", HARMFUL), "came to void, and its evidence says roll back"),
        (lambda ledger: add(ledger, "end", "not begun", LIKED), "ended as not begun, and it has evidence"),
        (lambda ledger: add(ledger, "end", "kept", LIKED), "experiment 1 was kept without a commit"),
        (lambda ledger: add(ledger, "end", "roll back", LIKED), "came to roll back, and its evidence says commit"),
        (lambda ledger: add(ledger, "commit", "commit", HARMFUL), "came to commit, and its evidence says roll back"),
        (lambda ledger: add(ledger, "commit", "commit", None), "came to commit without evidence"),
        (lambda ledger: add(ledger, "end", "kept", HARMFUL), "came to kept, and its evidence says roll back"),
        (lambda ledger: add(ledger, "commit", "commit", LIKED, why="it is good"), "its reason is 'it is good'"),
        (lambda ledger: add(ledger, "commit", "commit", LIKED, candidate=CONTROL), "is on other policies"),
        (
            lambda ledger: add(ledger, "commit", "commit", LIKED, phases=[{"from_block": 0, "share": 0.4}]),
            "its phases are not those that it started with",
        ),
        (lambda ledger: add(ledger, "commit", "commit", flipped(LIKED)), "block 7 was drawn for the"),
        (lambda ledger: add(ledger, "commit", "commit", twice(LIKED)), "blocks are not in order"),
        (lambda ledger: add(ledger, "commit", "commit", numbered(LIKED, -60)), "blocks are not in order"),
        (lambda ledger: add(ledger, "commit", "commit", numbered(LIKED, 10**9)), "had not closed when it was decided"),
        (lambda ledger: add(ledger, "commit", "kept", LIKED), "the commit of experiment 1 came to kept"),
        (
            lambda ledger: add(
                ledger, "end", "kept", LIKED, phases=[*PHASES, {"from_block": 60, "share": PLAN.watch_share}]
            ),
            "its phases are not those that it started with",
        ),
        (lambda ledger: start(ledger, number=2), "experiment 2 began before experiment 1 had ended"),
        (lambda ledger: start(ledger), "the start of experiment 1 stands in it twice"),
        (lambda ledger: add(ledger, "end", "stopped", None, number=3), "before its start"),
    ],
)
def test_what_was_forged_is_named(ledger: Ledger, forge: Callable[[Ledger], None], problem: str) -> None:
    start(ledger)
    forge(ledger)
    assert any(problem in found for found in verify(ledger)), verify(ledger)


def test_what_was_before_is_part_of_the_evidence(ledger: Ledger) -> None:
    """Evidence without the covariates that a commit was decided with gives other intervals, and is named."""
    blocks = [
        block.model_copy(
            update={"covariates": {"feedback": 0.1 * (block.block % 5 - 2)}, "values": {"feedback": value}}
        )
        for block in LIKED.blocks
        for value in [(0.7 if block.candidate else 0.3) + 0.1 * (block.block % 5 - 2)]
    ]
    adjusted = Observed(blocks=tuple(blocks))
    start(ledger)
    add(ledger, "commit", "commit", adjusted)
    assert verify(ledger) == []
    plain = Observed(blocks=tuple(block.model_copy(update={"covariates": {}}) for block in blocks))
    forged = Ledger(ledger.folder.parent / "forged")
    start(forged)
    add(forged, "commit", "commit", plain, why="; ".join(looks.look(PLAN, adjusted).reasons))
    [problem] = verify(forged)
    assert "its reason is 'feedback is shown to be better" in problem


def test_a_start_needs_a_passing_verdict_or_an_override_and_a_pair_is_tried_once(ledger: Ledger) -> None:
    start(ledger, override=False)
    add(ledger, "end", "stopped", None)
    start(ledger, number=2, override=False)
    assert verify(ledger) == [
        "entry 1: experiment 1 tried policy 2 without a passing verdict",
        "entry 3: experiment 2 tried policy 2 without a passing verdict",
        "entry 3: experiment 2 tried a policy against another one for the second time",
    ]


def test_what_a_commit_rests_on_stays_in_what_its_end_rests_on(ledger: Ledger) -> None:
    start(ledger)
    add(ledger, "commit", "commit", LIKED)
    watched = [*PHASES, {"from_block": 80, "share": PLAN.watch_share}]
    add(ledger, "end", "kept", observed({"candidate": 0.8, "control": 0.3}, 70), phases=watched)
    assert any("its blocks are not those of its commit, and later ones" in found for found in verify(ledger))


def test_a_start_at_another_time_is_named(ledger: Ledger) -> None:
    start(ledger, started_at=time.time() - 86400)
    assert verify(ledger) == ["entry 1: experiment 1 began at another time than it was declared"]


def test_after_a_commit_only_what_came_since_is_harm(ledger: Ledger) -> None:
    turned = observed({"candidate": 0.1, "control": 0.9}, 120)
    blocks = (*LIKED.blocks, *turned.blocks[60:])
    since = looks.look(PLAN, Observed(blocks=blocks), watched_from=60)
    assert since.decision == "roll back"
    assert sum(block.block >= 60 for block in blocks) == 60
    assert since.differences[0].candidates + since.differences[0].controls == 60


def test_a_sequence_of_looks_has_what_each_would_have_said_at_its_time() -> None:
    assert looks.sequence(PLAN, Observed(blocks=())) == []
    found = looks.sequence(PLAN, LIKED, points=7)
    assert [n for n, _ in found] == [1, 11, 21, 30, 40, 50, 60]
    for n, decision in found:
        assert decision == looks.look(PLAN, Observed(blocks=LIKED.blocks[:n]))
    assert [n for n, _ in looks.sequence(PLAN, LIKED, watched_from=55)] == [1, 2, 3, 4, 5]


def longer(seen: Observed) -> Observed:
    """With the next ten blocks."""
    return Observed(blocks=(*seen.blocks, *observed({"candidate": 0.9, "control": 0.3}, 70).blocks[60:]))


def numbered(seen: Observed, first: int) -> Observed:
    return Observed(blocks=tuple(block.model_copy(update={"block": block.block + first}) for block in seen.blocks))


def flipped(seen: Observed) -> Observed:
    blocks = list(seen.blocks)
    blocks[7] = blocks[7].model_copy(update={"candidate": not blocks[7].candidate})
    return Observed(blocks=tuple(blocks))


def twice(seen: Observed) -> Observed:
    return Observed(blocks=(*seen.blocks, seen.blocks[-1]))
