"""Real vLLM on tiny real policies, checked against transformers."""

from __future__ import annotations

import itertools
import json
import logging
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from evaluation.config import EvaluationConfig
from evaluation.engine import EngineError, OfflineEngine, OfflineEngines
from evaluation.evaluate import compare_samples, evaluate
from evaluation.judging import Sources, TrainingReward
from evaluation.results import Evaluation
from evaluation.suites import answers
from evaluation.suites.suite import Suite
from feedback.config import JudgeConfig
from serve.policies.store import Policy
from tests.feedback.judge_server import Answer, Asked, judge_server, says


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("evaluations")


def digits(rows: pa.Table) -> list[float]:
    """As training might reward: the share of the tokens that are digits."""
    return [sum(2 <= token < 12 for token in ids) / len(ids) for ids in rows["response_token_ids"].to_pylist()]


REWARD = TrainingReward("digits", digits)


@pytest.fixture(scope="module")
def evaluation(policies: list[Policy], suite: Suite, config: EvaluationConfig, folder: Path) -> Evaluation:
    """Policy 2 against policy 1."""
    return evaluate(policies[1], policies[0], suite, config, folder, training_reward=REWARD)


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr("evaluation.engine.OfflineEngine", refuse)


def reference_logprobs(policy: Policy, prompt: list[int], response: list[int]) -> np.ndarray:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy.path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0].double()
    logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return logprobs.gather(1, torch.tensor(response)[:, None])[:, 0].numpy()


def test_responses_are_the_greedy_ones_of_transformers(
    evaluation: Evaluation, policies: list[Policy], suite: Suite, config: EvaluationConfig, folder: Path
):
    import torch
    from transformers import AutoModelForCausalLM

    for policy in policies[:2]:
        table = answers.cached(policy, suite, config, folder)
        assert table is not None
        model = AutoModelForCausalLM.from_pretrained(policy.path, dtype=torch.float32)
        for row in table.slice(5, 6).to_pylist():
            expected = model.generate(
                torch.tensor([row["prompt_token_ids"]]), do_sample=False, max_new_tokens=config.max_tokens
            )[0].tolist()[len(row["prompt_token_ids"]) :]
            assert row["response_token_ids"] == expected
            assert row["finish_reason"] == ("stop" if expected[-1] == 1 else "length")


def test_chat_messages_go_through_the_policys_template(
    evaluation: Evaluation, policies: list[Policy], suite: Suite, config: EvaluationConfig, folder: Path
):
    table = answers.cached(policies[0], suite, config, folder)
    assert table is not None
    prompts = table.column("prompt_token_ids").to_pylist()
    plain = prompts[[item.id for item in suite.items].index("sum-1-2")]
    assert prompts[[item.id for item in suite.items].index("chat")] == plain  # both are 1+2=


def test_both_policies_logprobs_of_the_incumbents_samples_are_those_of_transformers(
    evaluation: Evaluation, policies: list[Policy], suite: Suite, config: EvaluationConfig, folder: Path, no_engine
):
    with OfflineEngines(config.engine) as engines:
        kl = answers.answer(policies[1], suite, config, folder, engines, incumbent=policies[0]).kl
    table = answers.cached(policies[0], suite, config, folder)
    assert kl is not None
    assert table is not None
    assert len(kl.item) == len(suite.items) * config.kl_samples
    for sample in (0, 30, 100, 119):
        row = table.column("samples").to_pylist()[kl.item[sample]][sample % config.kl_samples]
        prompt = table.column("prompt_token_ids").to_pylist()[kl.item[sample]]
        for policy, found in ((policies[0], kl.incumbent[sample]), (policies[1], kl.candidate[sample])):
            assert found == pytest.approx(reference_logprobs(policy, prompt, row["token_ids"]), abs=1e-4)


def test_kl_is_that_of_the_full_distributions_on_the_sampled_prefixes(
    evaluation: Evaluation, policies: list[Policy], suite: Suite, config: EvaluationConfig, folder: Path
):
    import torch
    from transformers import AutoModelForCausalLM

    table = answers.cached(policies[0], suite, config, folder)
    assert table is not None
    assert evaluation.kl is not None
    rows = [
        (row["prompt_token_ids"], sample["token_ids"]) for row in table.to_pylist() for sample in row["samples"][:2]
    ]
    width = max(len(prompt) + len(response) for prompt, response in rows)
    # What is padded on the right doesn't change what stands before it.
    ids = torch.tensor([prompt + response + [0] * (width - len(prompt) - len(response)) for prompt, response in rows])
    with torch.no_grad():
        p, q = (
            AutoModelForCausalLM.from_pretrained(policy.path)(ids).logits.double().log_softmax(-1)
            for policy in policies[:2]
        )
    mask = torch.zeros(ids.shape, dtype=torch.float64)
    for i, (prompt, response) in enumerate(rows):
        mask[i, len(prompt) - 1 : len(prompt) + len(response) - 1] = 1
    tokens = int(mask.sum())
    forward = float(((p.exp() * (p - q)).sum(-1) * mask).sum())
    reverse = float(((q.exp() * (q - p)).sum(-1) * mask).sum())
    assert evaluation.kl.tokens == tokens
    # The estimates come from the sampled tokens alone; the interval is at 95 %, so it gets some room.
    for estimate, exact in (
        (evaluation.kl.incumbent_candidate, forward / tokens),
        (evaluation.kl.candidate_incumbent, reverse / tokens),
    ):
        room = estimate.high - estimate.low
        assert estimate.low - room < exact < estimate.high + room


def test_an_evaluation_counts_what_it_says(evaluation: Evaluation, suite: Suite, config: EvaluationConfig):
    assert (evaluation.candidate.version, evaluation.incumbent.version) == (2, 1)
    assert evaluation.n == len(suite.items) == 60
    assert evaluation.accuracy
    assert evaluation.candidate.accuracy
    assert evaluation.incumbent.accuracy
    assert evaluation.accuracy.value == pytest.approx(
        evaluation.candidate.accuracy.value - evaluation.incumbent.accuracy.value
    )
    assert 1 <= evaluation.candidate.length_mean <= config.max_tokens
    assert len(evaluation.samples) == config.samples
    assert evaluation.scorer.startswith("exact_match@")


def test_best_of_n_is_the_expected_score_of_the_response_that_training_would_reward_most(
    policies: list[Policy], suite: Suite, config: EvaluationConfig, folder: Path, evaluation: Evaluation, no_engine
):
    """By every set of k of the four responses, scored by whether they begin with a digit."""
    own = config.model_copy(update={"scorer": f"{__name__}:begins_with_a_digit"})
    found = evaluate(policies[1], policies[0], suite, own, folder, training_reward=REWARD).best_of
    table = answers.cached(policies[0], suite, config, folder)
    assert found is not None
    assert table is not None
    assert (found.by, found.n, found.items, found.missing) == ("digits", 4, 60, 0)
    assert [point.k for point in found.points] == [1, 2, 4]
    for point in found.points:
        expected = []
        for samples in table.column("samples").to_pylist():
            rewards = [sum(2 <= token < 12 for token in one["token_ids"]) / len(one["token_ids"]) for one in samples]
            scores = [one["text"][:1].isdigit() for one in samples]
            for chosen in itertools.combinations(range(4), point.k):
                best = max(rewards[i] for i in chosen)
                expected.append(np.mean([scores[i] for i in chosen if rewards[i] == best]))
        assert point.reward.value == point.accuracy.value == pytest.approx(np.mean(expected))
        assert point.reward.low < point.reward.value < point.reward.high
        assert point.kl_bound == pytest.approx(math.log(point.k) - 1 + 1 / point.k)


def begins_with_a_digit(rows: pa.Table) -> list[float]:
    return [float(text[:1].isdigit()) for text in rows["response"].to_pylist()]


def test_a_best_of_n_that_can_not_be_had_has_its_reason_and_the_gate_judges_without_it(
    policies: list[Policy], suite: Suite, config: EvaluationConfig, folder: Path, evaluation: Evaluation, no_engine
):
    def down(rows: pa.Table) -> list[float | None]:
        raise RuntimeError("the judge is down")

    for training_reward, why in (
        (None, "nothing rewards responses"),
        (TrainingReward("judge", down), "the judge is down"),
        (TrainingReward("judge", lambda rows: [None] * len(rows)), "no item has a reward by judge"),
    ):
        found = evaluate(policies[1], policies[0], suite, config, folder, training_reward=training_reward)
        assert found.best_of is None
        assert why in str(found.best_of_missing)
        assert found.reward == evaluation.reward
    some = TrainingReward("judge", lambda rows: [None, *digits(rows)[1:]])
    found = evaluate(policies[1], policies[0], suite, config, folder, training_reward=some)
    assert found.best_of is not None
    assert (found.best_of.items, found.best_of.missing) == (59, 1)


def test_a_second_evaluation_starts_no_engine_and_finds_the_same(
    evaluation: Evaluation, policies: list[Policy], suite: Suite, config: EvaluationConfig, folder: Path, no_engine
):
    again = evaluate(policies[1], policies[0], suite, config, folder, training_reward=REWARD)
    assert again.seconds["candidate"] == again.seconds["incumbent"] == 0.0
    assert again.engines == {"incumbent": "cache", "candidate": "cache"}
    other = {"seconds", "created_at", "engines"}
    assert again.model_dump(exclude=other) == evaluation.model_dump(exclude=other)


def test_the_former_candidate_is_not_answered_again_when_it_is_the_incumbent(
    evaluation: Evaluation,
    policies: list[Policy],
    suite: Suite,
    config: EvaluationConfig,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    started: list[Path] = []

    def start(path: Path, settings: object) -> OfflineEngine:
        started.append(path)
        return OfflineEngine(path, config.engine)

    monkeypatch.setattr("evaluation.engine.OfflineEngine", start)
    found = evaluate(policies[2], policies[1], suite, config, folder)
    assert started == [policies[2].path]
    assert found.engines == {"incumbent": "cache", "candidate": "own"}
    assert found.kl is not None
    assert found.kl.incumbent_candidate.value > 0.01


def test_the_same_weights_are_no_better_and_zero_kl_apart(
    evaluation: Evaluation, policies: list[Policy], suite: Suite, config: EvaluationConfig, folder: Path
):
    found = evaluate(policies[2], policies[0], suite, config, folder)
    assert (found.accuracy.value, found.accuracy.low, found.accuracy.high) == (0.0, 0.0, 0.0)
    assert found.kl is not None
    assert found.kl.incumbent_candidate.value == pytest.approx(0.0, abs=1e-6)


def test_samples_come_from_the_same_answers(
    evaluation: Evaluation, policies: list[Policy], suite: Suite, config: EvaluationConfig, folder: Path, no_engine
):
    samples = compare_samples(policies[1], policies[0], suite, config, folder)
    assert len(samples) == 60
    assert tuple(samples[: config.samples]) == evaluation.samples
    other = config.model_copy(update={"max_tokens": 3})
    assert compare_samples(policies[1], policies[0], suite, other, folder) == []


def test_a_judge_s_scores_and_comparisons_are_those_of_an_evaluation(
    evaluation: Evaluation,
    policies: list[Policy],
    suite: Suite,
    config: EvaluationConfig,
    folder: Path,
    no_engine,
    tmp_path: Path,
):
    """Both by one judge, which counts letters; but for four items, of which it says nothing: they are lost."""

    def answer(asked: Asked, _: int) -> Answer:
        if any(f"ask {a}+5=" in asked.text for a in range(4)):
            return says("?")
        if "Answer A" not in asked.text:
            return says(json.dumps({"score": len(asked.text.split("[")[1].split("]")[0])}))
        first, second = (part.split("]")[0] for part in asked.text.split("[")[1:3])
        return says(json.dumps({"better": "A" if len(first) > len(second) else "B"}))

    judged = {"gate": config.gate.model_copy(update={"metric": "reward"})}
    texts = {
        sample.id: (sample.candidate, sample.incumbent)
        for sample in compare_samples(policies[1], policies[0], suite, config, folder)
    }
    silent = {f"sum-{a}-5" for a in range(4)}
    with judge_server(answer) as server:
        judge = JudgeConfig(
            url=server.url, model="m", rubric="ask {prompt} [{response}]", cache=str(tmp_path / "judge"), high=6
        )
        alone = config.model_copy(update={**judged, "scorer": "judge"})
        found = evaluate(policies[1], policies[0], suite, alone, folder, Sources(judge=judge), training_reward=REWARD)
        template = "ask {prompt} Answer A [{first}] Answer B [{second}]"
        both = config.model_copy(update={**judged, "scorer": "pairwise", "comparison": template})
        pairs = evaluate(policies[1], policies[0], suite, both, folder, Sources(judge=judge))
    known = [(len(a), len(b)) for name, (a, b) in texts.items() if name not in silent]
    assert (found.n, found.missing) == (56, 4)
    assert found.candidate.reward.value == pytest.approx(np.mean([candidate / 6 for candidate, _ in known]))
    assert found.reward.value == pytest.approx((sum((a - b) / 6 for a, b in known) - 4) / 60)
    assert (found.accuracy, found.candidate.accuracy, found.incumbent.accuracy) == (None, None, None)
    assert found.best_of is not None
    assert {point.accuracy for point in found.best_of.points} == {None}
    assert found.missing_reasons == {"no score in the judge's answer '?'": 8}
    assert found.scorer.startswith("judge@")
    assert found.scorer_details["rubric"] == "ask {prompt} [{response}]"

    # Where both are as long the judge says B, whatever stands there: a tie, which is not alike in both orders.
    asked = [(len(a), len(b)) for name, (a, b) in texts.items() if a != b and name not in silent]
    ties = sum(a == b for a, b in texts.values())
    wins = sum(1.0 if a > b else 0.0 if a < b else 0.5 for a, b in asked) + 0.5 * ties
    assert pairs.n == len(asked) + ties
    assert pairs.candidate.reward.value == pytest.approx(wins / pairs.n)
    assert pairs.position_consistency == pytest.approx(sum(a != b for a, b in asked) / len(asked))
    assert found.wins is None
    assert pairs.wins is not None
    assert pairs.wins.raw == pytest.approx(wins / len(suite.items))
    assert (pairs.wins.identical, pairs.wins.longer > 0.9) == (ties, True)
    lost = len(suite.items) - pairs.n
    won = 2 * pairs.candidate.reward.value - 1
    assert pairs.reward.value == pytest.approx((pairs.n * won - lost) / len(suite.items))
    assert pairs.incumbent.reward.value == pytest.approx(1 - pairs.candidate.reward.value)
    assert Evaluation.load(pairs.save(tmp_path)) == pairs
    assert compare_samples(policies[1], policies[0], suite, both, folder) == []


def test_a_damaged_cache_is_answered_anew(
    evaluation: Evaluation,
    policies: list[Policy],
    suite: Suite,
    config: EvaluationConfig,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
):
    before = answers.cached(policies[0], suite, config, folder)
    paths = (folder / "cache").glob(f"{policies[0].sha256}-*/*.arrow")
    path = next(path for path in paths if path.name == "answers.arrow")
    path.write_bytes(path.read_bytes()[:100])
    with caplog.at_level(logging.WARNING):
        assert answers.cached(policies[0], suite, config, folder) is None
    assert "can't be read" in caplog.text
    with OfflineEngines(config.engine) as engines:
        answered = answers.answer(policies[0], suite, config, folder, engines).table
    assert before is not None
    assert answered.column("response_token_ids") == before.column("response_token_ids")


def test_a_prompt_that_the_policy_cannot_take_is_named_with_both_lengths(
    policies: list[Policy], tmp_path: Path, config: EvaluationConfig
):
    path = tmp_path / "long.jsonl"
    path.write_text('{"id": "long one", "prompt": "' + "1" * 200 + '", "answer": "2"}\n')
    with (
        OfflineEngines(config.engine) as engines,
        pytest.raises(EngineError, match="item 'long one' has 200 tokens, policy 1 takes 1 to 127"),
    ):
        answers.answer(policies[0], Suite.load(path), config, tmp_path, engines)
