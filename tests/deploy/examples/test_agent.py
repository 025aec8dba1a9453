"""`make agent`: its settings, what the seed policy is shown, and what counts as a proof; it runs in minutes."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from deploy.examples.agent import code, task
from deploy.examples.agent.__main__ import figures, settings
from deploy.examples.agent.seed import TASKS, make_tokenizer_of
from serve.generation.tokenizer import Text
from train.config.training import TrainConfig
from train.context import JobResult
from train.environments import check
from train.environments.conversation import assistant_message
from train.environments.environment import EpisodePrompt, ToolCall


def test_the_seed_policy_is_shown_conversations_as_the_template_renders_them() -> None:
    text = Text(make_tokenizer_of(task))
    first, second = itertools.islice(task.corpus(), 2)
    key, called = first[0][len(task.USER) :][:3], first[1].split('"')[1]
    user = {"role": "user", "content": f"{key}?"}
    assert text.chat([user]) == first[0]
    found = second[0].split(task.TOOL)[1].removesuffix(task.ASSISTANT)
    turn = assistant_message("", [ToolCall("call_0_0", "look", {"key": called})])
    assert text.chat([user, turn, {"role": "tool", "content": found}]) == second[0]
    for context, said in itertools.islice(task.corpus(), 50):
        ids = text.token_ids(context + said, special_tokens=False)
        assert text.tokenizer.decode(ids, skip_special_tokens=False) == context + said


def test_what_the_seed_policy_is_shown_of_code_is_tokens_and_seldom_right() -> None:
    text, right, tasks = Text(make_tokenizer_of(code)), 0, {code.described(*t): t for t in code.tasks()}
    for context, said in itertools.islice(code.corpus(), 400):
        prompt = context.removeprefix(task.USER).removesuffix(task.ASSISTANT)
        assert text.chat([{"role": "user", "content": prompt}]) == context
        ids = text.token_ids(context + said, special_tokens=False)
        assert text.tokenizer.decode(ids, skip_special_tokens=False) == context + said
        assert len(text.token_ids(said, special_tokens=False)) < code.LONGEST_TURN
        right += said == code.code(*tasks[prompt])
    assert 0.1 < right / 400 < 0.3


@pytest.mark.parametrize("steps", [("times", 3, "add", 7), ("add", 3, "times", 7), ("take", 2, "times", 9)])
def test_code_for_a_prompt_passes_its_tests_and_that_in_the_other_order_does_not(steps: code.Task) -> None:
    for shown, passes in ((steps, True), ((*steps[2:], *steps[:2]), False)):
        names: dict[str, object] = {}
        exec(code.code(*shown), names)
        try:
            exec(code.tests(*steps), names)
        except AssertionError:
            assert not passes
        else:
            assert passes


@pytest.mark.parametrize("name", TASKS)
def test_the_settings_work_and_measured_prompts_are_not_trained_on(name: str, tmp_path: Path) -> None:
    config = TrainConfig.model_validate(settings(tmp_path, name, steps=2, seed=0, credit="episode"))
    assert config.environment is not None
    assert check(config.environment).startswith(f"environment {config.environment.name} ")
    trained, held_out = (
        {json.loads(line)["prompt"] for line in (tmp_path / name).read_text().splitlines()}
        for name in ("prompts.jsonl", "heldout.jsonl")
    )
    of, every = TASKS[name], len(TASKS[name].prompts())
    assert (len(trained), len(held_out), trained & held_out) == (every - of.HELD_OUT, of.HELD_OUT, set())


def test_only_what_the_tool_knows_is_right() -> None:
    prompt = EpisodePrompt("abc?", None)
    assert task.verify(prompt, task.look("abc")) == 1.0
    assert task.verify(prompt, task.look("abc")[::-1] + "x") == 0.0


def test_figures_that_are_no_proof_say_why(tmp_path: Path) -> None:
    run = tmp_path / "work" / "runs" / "agent"
    run.mkdir(parents=True)
    first = {"reward": 0.2, "held_out_at_start/reward": 0.1}
    last = {"reward": 0.7, "held_out/reward": 0.9, "turns": 2.0}
    (run / "metrics.jsonl").write_text(f"{json.dumps(first)}\n{json.dumps(last)}\n")
    result = JobResult(run="agent", candidate=2, parent=1, steps=2, reason=None, metrics={}, seconds=1.0)
    assert figures(tmp_path, result)["reason"] == "after not as it is to be"
    (run / "metrics.jsonl").write_text(f"{json.dumps(first)}\n{json.dumps(last | {'reward': 0.9})}\n")
    assert "reason" not in figures(tmp_path, result)
