"""Experiments as the report shows them, from their records and the blocks that looks have kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy.display.live import experiments
from deploy.loop.experiments import blocks_file
from evaluation.config import ExperimentConfig, OutcomesConfig
from evaluation.experiments import looks
from evaluation.experiments.blocks import Block, Observed
from evaluation.experiments.plan import ExperimentPlan
from feedback.config import HumanConfig, KindsConfig
from serve.policies.experiments import Experiment, Experiments, Phase

PLAN = ExperimentPlan.of(
    ExperimentConfig(outcomes=OutcomesConfig(), feedback_window_seconds=0), HumanConfig(), KindsConfig()
)
DRAWN = Experiment(
    1, 2, 1, "seed", 1000.0, 60.0, (Phase(0, 0.5),), 1, "running", "test", "test", PLAN.to_json()
)  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> Experiments:
    return Experiments(tmp_path / "policies")


def blocks(store: Experiments, likes: Callable[[bool, int], float], count: int = 120) -> list[Block]:
    """Blocks as they were drawn, kept as a look keeps them."""
    turns = [DRAWN.turn(number) for number in range(count)]
    found = [
        Block(
            block=turn.block, candidate=turn.variant == "candidate", propensity=turn.propensity, requests=9, voices=3,
            responded=1.0, values={"feedback": likes(turn.variant == "candidate", turn.block), "errors": 0.0},
        )
        for turn in turns
    ]  # fmt: skip
    store.folder.mkdir(parents=True, exist_ok=True)
    blocks_file(store, 1).write_text("".join(f"{block.model_dump_json()}\n" for block in found))
    return found


def begin(store: Experiments, **changed: Any) -> None:
    store.begin(replace(DRAWN, **changed))


def test_the_bounds_after_the_last_block_are_those_of_a_look_now(store: Experiments) -> None:
    seen = blocks(store, lambda candidate, _: 0.9 if candidate else 0.5)
    begin(store)
    (row,) = experiments(store)
    now = {one.name: one for one in looks.look(PLAN, Observed(blocks=tuple(seen))).differences}
    assert [path.outcome for path in row.paths] == ["feedback", "errors"]
    for path in row.paths:
        of = now[path.outcome]
        assert (path.blocks[-1], path.value[-1], path.low[-1], path.high[-1]) == (120, of.observed, of.low, of.high)
        assert len(path.blocks) == 40
        assert all(a <= b for a, b in zip(path.low, path.low[1:], strict=False))
    assert row.paths[0].low[-1] > 0
    assert (row.paths[0].bar, row.paths[1].bar) == (None, 0.05)
    assert (row.requests, row.candidate_blocks + row.control_blocks, row.decision) == (1080, 120, None)


def test_behind_a_commit_the_bounds_begin_anew(store: Experiments) -> None:
    seen = blocks(store, lambda candidate, block: 0.9 if candidate == (block < 60) else 0.2)
    begin(store, state="committed", watched_from=60)
    (row,) = experiments(store)
    before, after = (path for path in row.paths if path.outcome == "feedback")
    assert (before.watched, after.watched, row.committed) == (False, True, True)
    assert (before.blocks[-1], after.blocks[0], after.blocks[-1]) == (60, 61, 120)
    assert before.low[-1] > 0 > after.high[-1]
    of = looks.look(PLAN, Observed(blocks=tuple(seen)), watched_from=60).differences[0]
    assert (after.low[-1], after.high[-1]) == (of.low, of.high)


def test_what_has_ended_is_of_the_blocks_that_ended_it(store: Experiments) -> None:
    blocks(store, lambda candidate, _: 0.1 if candidate else 0.8)
    end = {"decision": "roll back", "why": "feedback is shown to be worse", "blocks": 50}
    begin(store, state="ended", end=end)
    (row,) = experiments(store)
    assert (row.decision, row.why, row.paths[0].blocks[-1]) == ("roll back", "feedback is shown to be worse", 50)
    assert row.candidate_blocks + row.control_blocks == 50


def test_before_a_block_has_closed_there_is_nothing_to_draw(store: Experiments) -> None:
    begin(store)
    (row,) = experiments(store)
    assert (row.paths, row.requests, row.why) == ((), 0, None)
    assert experiments(Experiments(store.root / "elsewhere")) == []


def test_blocks_that_can_decide_nothing_say_why(store: Experiments) -> None:
    blocks(store, lambda candidate, _: 7.0)
    begin(store)
    (row,) = experiments(store)
    assert row.paths == ()
    assert row.why is not None
    assert "feedback is 7 in row 0, outside [0, 1]" in row.why
