"""Estimates from what a real engine answered, against the truth that sampling from the candidate shows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from evaluation.config import EvaluationConfig
from evaluation.engine import EngineError, OfflineEngine
from evaluation.estimation.estimate import Baseline, EstimateError, estimate
from evaluation.estimation.logged_responses import LoggedTraffic, read_logged
from feedback.config import ClassifierConfig, LakeConfig
from feedback.lake.tables import Lake
from serve.policies.store import Policy, PolicyStore
from tests.evaluation.conftest import write_policy
from tests.evaluation.estimation.served_traffic import BY_USER, publish_fond_of_digits, record, serve, value

N = 600
SAMPLES = 10  # of the candidate to each prompt, for the truth


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> PolicyStore:
    """Policy 1, and one that is fonder of digits, which are rewarded."""
    store = PolicyStore(tmp_path_factory.mktemp("policies"))
    store.publish(lambda folder: write_policy(folder, 1), parent=None, lineage={}, metrics={})
    publish_fond_of_digits(store, store.get(1), steps=2)
    return store


@pytest.fixture(scope="module")
def traffic(store: PolicyStore, tmp_path_factory: pytest.TempPathFactory) -> LoggedTraffic:
    """What policy 1 answered."""
    lake = Lake(str(tmp_path_factory.mktemp("lake")), LakeConfig())
    lake.create()
    record(lake, serve(store.get(1), N))
    found = read_logged(lake, 1, limit=N)
    assert (found.considered, found.rewarded, len(found.responses), found.left_out) == (N, N, N, {})
    return found


@pytest.fixture(scope="module")
def candidate(store: PolicyStore) -> Policy:
    return store.get(2)


@pytest.fixture(scope="module")
def truth(candidate: Policy, traffic: LoggedTraffic, config: EvaluationConfig) -> float:
    """The mean reward of what the candidate answers to the same prompts."""
    asked = [response for response in traffic.responses for _ in range(SAMPLES)]
    with OfflineEngine(candidate.path, config.engine) as engine:
        texts = engine.sample([r.prompt_token_ids for r in asked], [r.sampling for r in asked], seed=10**6)
    return float(np.mean([value(text) for text in texts]))


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Baseline:
    """A classifier of characters with weights of chance: a poor baseline, which must do no harm."""
    import torch
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    folder = tmp_path_factory.mktemp("reward-model")
    write_policy(folder, 5)
    shutil.copy(folder / "config.json", folder / "policy.json")
    torch.manual_seed(5)
    config = Qwen3Config(**json.loads((folder / "policy.json").read_text()) | {"num_labels": 1})
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    return Baseline("a poor one", ClassifierConfig(name=str(folder)))


def of_users(values: Sequence[float]) -> np.ndarray:
    return np.array(values).reshape(-1, BY_USER).mean(axis=1)


def test_a_policy_earns_on_its_own_traffic_the_mean_that_was_logged_and_every_user_counts(
    store: PolicyStore, traffic: LoggedTraffic, config: EvaluationConfig
):
    found = estimate(store.get(1), store.get(1), traffic, config, baseline="none is asked for")
    assert found.numbers is not None
    mean = np.mean([response.reward for response in traffic.responses])
    assert (found.verdict, found.reasons, found.responses, found.clusters) == ("estimated", (), N, N // BY_USER)
    assert found.clustered_by == {"user": N // BY_USER}
    assert found.numbers.ess == pytest.approx(N / BY_USER, abs=0.01)
    assert found.numbers.logged.value == pytest.approx(mean)
    assert found.numbers.estimate.value == pytest.approx(mean, abs=1e-5)
    assert found.numbers.gain.low == pytest.approx(0, abs=1e-4)
    assert found.no_baseline == "none is asked for"
    half = 1.968 * of_users([r.reward for r in traffic.responses]).std(ddof=1) / (N / BY_USER) ** 0.5
    assert found.numbers.snips.high - mean == pytest.approx(half, rel=0.02)  # its t has fewer degrees of freedom


@pytest.mark.long
def test_a_policy_that_prefers_what_is_rewarded_earns_what_sampling_from_it_shows(
    store: PolicyStore,
    candidate: Policy,
    traffic: LoggedTraffic,
    config: EvaluationConfig,
    truth: float,
    reward_model: Baseline,
):
    found = estimate(candidate, store.get(1), traffic, config, baseline=reward_model, samples=2)
    assert found.numbers is not None
    assert (found.verdict, found.baseline, found.no_baseline) == ("estimated", "a poor one", None)
    numbers = found.numbers
    assert 100 < numbers.ess < 0.95 * found.clusters
    assert numbers.doubly_robust is not None
    for one in (numbers.ips, numbers.snips, numbers.doubly_robust):
        assert one.low < truth < one.high
    assert numbers.lower < truth
    assert numbers.logged.high < truth
    assert numbers.gain.low > 0
    assert numbers.mean_weight.low < 1 < numbers.mean_weight.high


def test_a_policy_that_answers_too_differently_can_not_be_told_of_and_the_counts_say_why(
    store: PolicyStore, traffic: LoggedTraffic, config: EvaluationConfig
):
    far = publish_fond_of_digits(store, store.get(1), steps=12)
    found = estimate(far, store.get(1), traffic, config, baseline="none")
    assert found.numbers is not None
    assert found.numbers.ess < 100
    assert found.verdict == "can't tell"
    assert found.reasons[0].startswith(
        f"the effective sample size is {found.numbers.ess:.1f} of 300 clusters (600 responses), 100 are needed"
    )


def test_log_probabilities_are_those_of_the_whole_softmax_at_the_temperature_and_the_next_call_is_free_of_it(
    candidate: Policy, traffic: LoggedTraffic, config: EvaluationConfig
):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(candidate.path, dtype=torch.float32)
    pairs = [(r.prompt_token_ids, r.response_token_ids) for r in traffic.responses[:4]]
    with OfflineEngine(candidate.path, config.engine) as engine:
        found = {temperature: engine.score(pairs, temperature=temperature) for temperature in (0.5, 2.0, 1.0)}
        with pytest.raises(EngineError, match="have 128 tokens, 127 can be scored"):
            engine.score([([2] * 120, [2] * 8)], temperature=1.0)
    for temperature, scored in found.items():
        for (prompt, response), own in zip(pairs, scored, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([prompt + response])).logits[0].double() / temperature
            expected = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(response)[:, None])[:, 0]
            assert own == pytest.approx(expected.numpy(), abs=1e-4)


def test_a_response_longer_than_the_candidate_reads_is_left_out_with_the_reason(
    store: PolicyStore, traffic: LoggedTraffic, config: EvaluationConfig
):
    long = replace(traffic.responses[0], prompt_token_ids=[2] * 200)
    with_long = replace(traffic, responses=(long, *traffic.responses[1:]))
    found = estimate(store.get(1), store.get(1), with_long, config, baseline="none")
    assert found.left_out == {"longer than the candidate's context": 1}
    assert (found.responses, found.verdict) == (N - 1, "estimated")


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr("evaluation.estimation.estimate.OfflineEngine", refuse)


def test_too_few_responses_say_so_with_their_count_before_an_engine_starts(
    store: PolicyStore, traffic: LoggedTraffic, config: EvaluationConfig, no_engine: None
):
    few = replace(traffic, responses=traffic.responses[:190])
    found = estimate(store.get(1), store.get(1), few, config, baseline="none")
    assert (found.verdict, found.numbers) == ("can't tell", None)
    assert found.reasons == (
        "190 of 600 responses of traffic can be used, of 95 users, sessions or requests: their effective number would "
        "be below 100",
    )
    assert json.loads(found.to_json())["numbers"] is None


def test_a_reward_out_of_bounds_is_refused_by_its_response(
    store: PolicyStore, traffic: LoggedTraffic, config: EvaluationConfig, no_engine: None
):
    more = replace(traffic, responses=(replace(traffic.responses[0], reward=1.5), *traffic.responses[1:]))
    with pytest.raises(EstimateError, match=r"response r0599 has the reward 1.5, outside \[0, 1\]: .* --bounds"):
        estimate(store.get(1), store.get(1), more, config, baseline="none")


@pytest.mark.parametrize(
    ("file", "old", "new", "words"),
    [
        ("tokenizer.json", '"a": 16', '"a": 17', "another tokenizer than policy 1 (tokenizer.json differs)"),
        ("chat_template.jinja", "content", "role", "another chat template than policy 1 (chat_template.jinja differs)"),
    ],
)
def test_policies_that_read_other_tokens_are_refused(
    file: str,
    old: str,
    new: str,
    words: str,
    store: PolicyStore,
    traffic: LoggedTraffic,
    config: EvaluationConfig,
    tmp_path: Path,
    no_engine: None,
):
    shutil.copytree(store.get(1).path, tmp_path / "other")
    changed = tmp_path / "other" / file
    text = changed.read_text()
    assert old in text
    changed.chmod(0o644)
    changed.write_text(text.replace(old, new))
    other = replace(store.get(1), version=7, path=tmp_path / "other")
    with pytest.raises(EstimateError, match="policy 7 has") as caught:
        estimate(other, store.get(1), traffic, config, baseline="none")
    assert words in str(caught.value)
