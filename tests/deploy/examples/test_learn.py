"""The proof that the algorithms learn, on two that start no engine to train; all are for `make learn`."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from deploy.examples.demo.seed import make_tokenizer
from deploy.examples.demo.task import ALPHABET
from deploy.examples.learn import judge, pairs, people, plans, task, trial
from deploy.examples.learn.home import Home
from deploy.examples.learn.seed import JUDGES_TEMPLATE
from deploy.examples.learn.traffic import RESPONSES
from feedback.config import JudgeConfig, LakeConfig
from feedback.lake.tables import Lake
from feedback.scoring.sources.judge import Judge, question
from train.config.algorithms import DISTILL, NAMES


@dataclass(frozen=True)
class Proof:
    """What the command left: its last line, its exit code, all of its output, and its folder."""

    figures: dict[str, Any]
    code: int
    output: str
    home: Home


@pytest.fixture(scope="module")
def proof(tmp_path_factory: pytest.TempPathFactory) -> Proof:
    folder = tmp_path_factory.mktemp("learn") / "work"
    command = [
        sys.executable,
        "-m",
        "deploy.examples.learn",
        "--folder",
        str(folder),
        "--algorithms",
        "sft,reward_model",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    done = subprocess.run(
        [*command, "--steps", "6"], env=environment, capture_output=True, text=True, timeout=800, check=False
    )
    output = done.stdout + done.stderr
    assert done.returncode in (0, 1), output
    figures = json.loads(done.stdout.splitlines()[-1])
    assert not any("Error" in found.get("reason", "") for found in figures.values()), output
    return Proof(figures, done.returncode, output, Home(folder))


@pytest.mark.long
def test_what_people_wrote_is_learned(proof: Proof) -> None:
    assert proof.figures["sft"]["ci_low"] > 0, proof.output


@pytest.mark.long
def test_what_people_preferred_is_learned(proof: Proof) -> None:
    assert proof.figures["reward_model"]["ci_low"] > 0, proof.output


@pytest.mark.long
def test_a_reward_model_is_compared_with_what_it_was_before_training(proof: Proof) -> None:
    """A head of zeros, which orders no pair; with one of random numbers that would be otherwise."""
    [folder] = proof.home.work.glob("reward_models/*_untrained")
    assert set(pairs.separated(folder)) == {0.5}
    assert proof.figures["reward_model"]["before"] == 0.5


@pytest.mark.long
def test_the_last_line_has_the_figures_of_each_algorithm(proof: Proof) -> None:
    for name in ("sft", "reward_model"):
        figures = proof.figures[name]
        assert figures.keys() - {"reason"} == {"before", "after", "ci_low", "steps", "seconds"}
        assert 0 <= figures["before"] <= 1
        assert figures["steps"] == 6


@pytest.mark.long
def test_an_algorithm_whose_interval_holds_zero_gives_the_exit_code_1(proof: Proof) -> None:
    assert proof.code == any("reason" in figures for figures in proof.figures.values())


@pytest.mark.long
def test_a_job_that_does_not_end_is_an_outcome_with_its_reason(proof: Proof) -> None:
    settings = plans.settings("sft", plans.PLANS["sft"], steps=1, seed=0)
    outcome = trial.run(proof.home, "slow", settings, longest_s=0.01, say=print)
    assert outcome.after is None
    assert outcome.reason == "TimeoutError: slow still runs after 0 s"


def test_settings_that_cannot_work_are_an_outcome_with_its_reason(tmp_path: Path) -> None:
    outcome = trial.run(Home(tmp_path), "wrong", {"steps": 0}, longest_s=10, say=print)
    assert outcome.after is None
    assert "steps" in (outcome.reason or "")


def test_there_is_a_plan_for_every_algorithm_that_needs_no_teacher() -> None:
    assert list(plans.PLANS) == [name for name in NAMES if name != DISTILL]


def test_the_judge_is_asked_what_it_was_trained_on_and_knows_right_answers_and_wrong_ones() -> None:
    tokenizer = make_tokenizer(f"{ALPHABET}01{task.ASK}", JUDGES_TEMPLATE)
    config = JudgeConfig.model_validate({"url": "http://127.0.0.1:1/v1", **judge.ASKED})
    row = {"prompt": "H abcd>", "messages": None, "response": "ab", "metadata": None}
    asked = Judge(config)._request(question(config, row), structured=True)
    assert tokenizer.apply_chat_template(asked["messages"], tokenize=False) == "H abcd>ab?"
    assert "response_format" not in asked
    trained = list(itertools.islice(task.verdicts(), 2000))
    assert {item.prompt for item in task.held_out()}.isdisjoint(text.partition(">")[0] + ">" for text, _ in trained)
    right = {text: verdict for text, verdict in trained if int(verdict[-1])}
    assert 800 < len(right) < 1000
    for text, verdict in trained:
        prompt, _, answer = text.removesuffix(task.ASK).partition(">")
        assert int(verdict[-1]) == task.reward(pa.table({"prompt": [f"{prompt}>"], "response": [answer]}))[0]


@pytest.mark.long
def test_each_trial_by_people_has_a_lake_with_one_kind_of_feedback_alone(proof: Proof) -> None:
    kinds = {kind: Lake(str(people.lake_of(proof.home, kind)), LakeConfig()) for kind in plans.PEOPLE.values()}
    for kind, lake in kinds.items():
        with lake.connect() as connection:
            [(responses,)] = connection.execute("SELECT count(*) FROM interactions").fetchall()
            said = connection.execute("SELECT kind, count(*) > 100 FROM feedback GROUP BY kind").fetchall()
        assert (responses, said) == (task.TRAFFIC * RESPONSES, [(kind, True)])


def test_neither_the_users_nor_the_seed_ever_see_a_held_out_prompt() -> None:
    held_out = {item.prompt for item in task.held_out()}
    assert held_out.isdisjoint(item.prompt for item in task.traffic())
    assert held_out.isdisjoint(prompt for prompt, _ in itertools.islice(task.corpus(), 20_000))


def test_right_answers_get_all_the_reward_and_habits_a_part_of_the_grade() -> None:
    rows = [("H abcd>", "ab"), ("H abcd>", "cd"), ("H abcd>", "abcd"), ("C abcd>", "bc")]
    batch = pa.table({"prompt": [p for p, _ in rows], "response": [r for _, r in rows]})
    assert task.reward(batch) == [1.0, 0.0, 0.0, 1.0]
    assert task.graded(batch) == [1.0, task.HABIT_GRADE, 0.0, 1.0]


def test_a_wrong_answer_is_never_the_right_one() -> None:
    rng = random.Random(0)
    assert all(task.wrong(item, rng) != item.answer for item in task.held_out())
