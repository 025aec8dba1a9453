"""Rewards of fresh responses by every source that scoring has: real rules, real models, a judge by real HTTP."""

from __future__ import annotations

import gc
import json
import math
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
)

from feedback.config import JudgeConfig, KindsConfig, LakeConfig, ScoringConfig
from feedback.datasets import Prompt
from feedback.lake.tables import Lake
from feedback.scoring.scorer import load_sources
from feedback.scoring.sources.reward_model import RewardModel
from feedback.scoring.sources.rules import PerToken, load_rule
from serve.policies.store import Policy
from tests.feedback.feedback_rows import NOON, interaction, put
from tests.feedback.judge_server import Answer, judge_server, says
from train.batch.packed import PackedBatch, Sample
from train.config.training import TrainConfig
from train.context import JobContext, RunStart, TrainingStopped
from train.data.rewards import Reward, RewardError, Rewards, check_rewards, logged_responses, try_reward
from train.data.samples import score, table_of
from train.job import on_logged_responses
from train.run.recovery.resume import Begun

PROMPTS = [Prompt("a", None, [1], {"answer": "4"}), Prompt("b", None, [2, 3])]
RUBRIC = "Q: {prompt}\nA: {response}"


def sample(text: str, tokens: int = 2) -> Sample:
    return Sample([7] * tokens, text, [-0.5] * tokens, "stop")


def rows(*texts: str, tokens: int = 2) -> pa.Table:
    return table_of([(PROMPTS[0], sample(text, tokens)) for text in texts])


def scoring(**sources: Any) -> ScoringConfig:
    return ScoringConfig.model_validate(sources)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Writes a user's module with a function ``reward``, and names it."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(body: str) -> str:
        (tmp_path / "users_rewards.py").write_text(f"def reward(rows): return {body}")
        return "users_rewards:reward"

    yield write
    sys.modules.pop("users_rewards", None)


# ------------------------------------------------------------------------------------------------------------- rules


def test_rewards_come_by_component_and_as_their_weighted_mean() -> None:
    rules = {"long": {"sql": "length(response)", "weight": 3.0}, "exact": {"ready": "exact_match"}}
    reward = Reward(scoring(rules=rules), 60)
    found = score(PROMPTS, [[sample("4"), sample("five")], [sample("x")]], reward, TrainConfig())
    assert found.components == {"exact": [1.0, 0.0], "long": [1.0, 4.0, 1.0]}
    assert [r.reward for r in found.rollouts] == [1.0, 3.0, 1.0], "(3 + 1) / 4, 12 / 4; and no answer is known to b"
    assert found.missing == {"exact": 1 / 3, "long": 0.0}


def test_votes_alone_are_no_reward_of_a_fresh_response() -> None:
    with pytest.raises(RewardError, match=r"feedback\.scoring: no reward source that can reward fresh responses"):
        Reward(scoring(rules={"off": {"sql": "1", "weight": 0}}), 60)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("[float('nan')] * len(rows)", "returned nan for row 0"),
        ("[1.0]", "returned 1 values for 2 rows"),
        ("['good'] * len(rows)", "returned 'good' for row 0"),
        ("1 / 0", "failed: ZeroDivisionError"),
    ],
)
def test_a_function_that_fails_on_all_stops_the_step_by_name_also_as_one_of_several(
    module: Callable[[str], str], body: str, message: str
) -> None:
    name = module(body)
    both = scoring(rules={"mine": {"function": name}, "one": {"sql": "1"}})
    for settings, named in ((name, name), (both, "mine")):
        found = Reward(settings, 60)(rows("a", "b"))
        with pytest.raises(
            TrainingStopped, match=rf"{named} gave none of 2 responses a value \(2 × rule {named} {message}"
        ):
            check_rewards(found, max_missing=1, per_token=False)


def test_a_function_is_in_one_call_at_a_time_whoever_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a step's responses are rewarded, those to held-out prompts may be, too."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "meeting_rewards.py").write_text(
        "import contextlib, threading\n"
        "barrier, met = threading.Barrier(2), []\n"
        "def reward(rows):\n"
        "    with contextlib.suppress(threading.BrokenBarrierError):\n"
        "        met.append(barrier.wait(1))\n"
        "    return [0.0] * len(rows)\n"
    )
    reward = Reward("meeting_rewards:reward", 60)
    others = [threading.Thread(target=reward, args=(rows("a"),)) for _ in range(2)]
    for other in others:
        other.start()
    for other in others:
        other.join()
    assert sys.modules.pop("meeting_rewards").met == []


def test_a_function_that_fails_on_one_response_leaves_out_that_one_with_the_reason(
    module: Callable[[str], str],
) -> None:
    name = module("[1 / (text != 'bad') for text in rows['response'].to_pylist()]")
    found = Reward(name, 60)(rows("a", "bad", "c", "d", "e"))
    assert found.values == [1.0, None, 1.0, 1.0, 1.0]
    assert found.reasons[name][1] == f"rule {name} failed: ZeroDivisionError: division by zero"
    check_rewards(found, max_missing=0.2, per_token=False)
    with pytest.raises(TrainingStopped, match=r"1 of 5 sampled .* train\.reward_max_missing=0\.19 \(1 × .*ZeroDiv"):
        check_rewards(found, max_missing=0.19, per_token=False)


# ------------------------------------------------------------------------------------------------------------- judge


def judged(url: str, cache: Path, **more: Any) -> dict[str, Any]:
    settings = {"url": url, "model": "m", "rubric": RUBRIC, "cache": str(cache), "backoff_s": 0.01, "attempts": 2}
    return {"weight": 1.0, **settings, **more}


def by_length(asked: Any, _: int) -> Answer:
    return says(json.dumps({"score": len(asked.text.split("A: ")[1].split("\n")[0])}))


def test_a_judge_rewards_rollouts_and_scoring_finds_its_verdicts(tmp_path: Path) -> None:
    with judge_server(by_length) as server:
        config = scoring(human={"weight": 0}, judge=judged(server.url, tmp_path / "judge"))
        reward = Reward(config, 60)
        texts = rows("four", "ten letter", "four")
        assert reward(texts).values == [0.4, 1.0, 0.4]
        assert reward(rows("four", "new")).values == [0.4, 0.3], "each call is from a thread of its own"
        assert len(server.asked) == 3
        [source] = load_sources(config, KindsConfig())
        assert source.by_row is not None
        assert source.by_row(texts)[0] == [0.4, 1.0, 0.4]
        assert len(server.asked) == 3, "no verdict is paid for twice"


def test_a_judge_that_is_down_ends_the_run_before_an_engine_starts(tmp_path: Path) -> None:
    config = scoring(rules={"one": {"sql": "1"}}, judge=judged("http://127.0.0.1:9/v1", tmp_path / "judge"))
    with pytest.raises(
        RewardError, match=r"feedback\.scoring: judge gave none of 2 .*2 × ConnectError.* \(2 attempts\)"
    ):
        try_reward(Reward(config, 60), config, rows("a", "b"), per_token=False)


def test_a_slow_judge_is_waited_for_until_its_deadline_and_anew_in_the_next_step(tmp_path: Path) -> None:
    slow = judged("", tmp_path / "judge", deadline_s=2, attempts=1)
    with judge_server(lambda asked, _: Answer(wait=30) if "slow" in asked.text else says("7")) as server:
        config = scoring(rules={"one": {"sql": "1"}}, judge={**slow, "url": server.url})
        reward = Reward(config, 60)
        found = reward(rows("slow", "quick"))
        assert found.values == [1.0, pytest.approx(0.85)]
        assert found.components["judge"] == [None, 0.7]
        assert "no answer within deadline_s=2" in (found.reasons["judge"][0] or "")
        assert reward(rows("next", "slow")).components["judge"] == [0.7, None]


def test_nonsense_of_a_judge_is_missing_with_what_it_said_and_is_bounded(tmp_path: Path) -> None:
    with judge_server(lambda asked, _: says("Lovely!") if "odd" in asked.text else says("11 or 3")) as server:
        config = scoring(judge=judged(server.url, tmp_path / "judge"))
        found = Reward(config, 60)(rows("odd", "even"))
        assert found.values == [None, None]
        with pytest.raises(TrainingStopped, match=r"judge gave none of 2 .*no score in the judge's answer 'Lovely!'"):
            check_rewards(found, max_missing=1, per_token=False)


def test_the_reasons_of_a_step_have_no_count_of_scoring_runs(tmp_path: Path) -> None:
    with judge_server(
        lambda asked, _: Answer(500, {"error": "no GPU"}) if "bad" in asked.text else says("5")
    ) as server:
        found = Reward(scoring(judge=judged(server.url, tmp_path / "judge")), 60)(rows("bad", "fine"))
    assert found.reasons["judge"] == ["HTTP 500: no GPU (2 attempts)", None]
    assert str(found) == "judge 1 of 2, mean 0.500 (missing: 1 × HTTP 500: no GPU (2 attempts))"


def test_a_refused_key_ends_the_run_and_is_in_no_message(tmp_path: Path) -> None:
    with judge_server(
        lambda asked, _: Answer(401, {"error": f"no such key {asked.headers['Authorization']}"})
    ) as server:
        config = scoring(judge=judged(server.url, tmp_path / "judge", api_key="sk-12345678"))
        with pytest.raises(RewardError, match=r"judge gave none of 2 .*HTTP 401") as error:
            try_reward(Reward(config, 60), config, rows("a", "b"), per_token=False)
    assert "sk-12345678" not in str(error.value)


# ------------------------------------------------------------------------------------------------------------- models


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sequence-classification model with one label, that reads single characters."""
    folder = tmp_path_factory.mktemp("reward-model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    characters = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate([*alphabet, "<eos>"])}, merges=[]))
    characters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=characters, eos_token="<eos>").save_pretrained(folder)
    torch.manual_seed(1)
    Qwen3ForSequenceClassification(shape(257)).save_pretrained(folder)
    return folder


def shape(vocabulary: int) -> Qwen3Config:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    return Qwen3Config(vocab_size=vocabulary, num_labels=1, initializer_range=0.5, pad_token_id=None, **sizes, **heads)


@torch.no_grad()
def plain(folder: Path, prompt: str, response: str) -> float:
    network = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    inputs = AutoTokenizer.from_pretrained(folder)(prompt, response, return_tensors="pt")
    return 1 / (1 + math.exp(-float(network(**inputs).logits[0, 0])))


def test_a_model_a_judge_and_a_rule_are_mixed_by_their_weights(model: Path, tmp_path: Path) -> None:
    with judge_server(by_length) as server:
        config = scoring(
            rules={"exact": {"ready": "exact_match", "weight": 2}},
            model={"name": str(model), "device": "cpu", "weight": 3},
            judge=judged(server.url, tmp_path / "judge"),
        )
        found = Reward(config, 60)(rows("4", "five"))
    expected = [(2 * 1 + 3 * plain(model, "a", "4") + 0.1) / 6, (3 * plain(model, "a", "five") + 0.4) / 6]
    assert found.values == pytest.approx(expected, abs=1e-5)


def test_a_model_of_the_votes_stands_in_for_people_in_training_and_changes_nothing_in_scoring(model: Path) -> None:
    config = scoring(human={"weight": 2, "model": {"name": str(model), "device": "cpu"}})
    found = Reward(config, 60)(rows("4"))
    assert found.components["human"] == [pytest.approx(plain(model, "a", "4"), abs=1e-5)]
    [votes] = load_sources(config, KindsConfig())
    [before] = load_sources(scoring(human={"weight": 2}), KindsConfig())
    assert (votes.name, votes.by_row, votes.identity) == ("human", None, before.identity)


def test_a_loaded_model_takes_no_random_numbers_from_training(model: Path) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    Reward(scoring(model={"name": str(model), "device": "cpu"}), 60)(rows("4"))
    assert torch.rand(3).equal(expected)


def models_there() -> list[RewardModel]:
    return [each for each in gc.get_objects() if type(each) is RewardModel]


def test_a_model_is_freed_with_the_reward_that_it_was_of(model: Path) -> None:
    """By itself: where nobody looks for cycles, what a run has ended with would stay on its device."""
    others = models_there()
    reward = Reward(scoring(model={"name": str(model), "device": "cpu"}), 60)
    found = reward(rows("4"))
    assert found.values[0] is not None
    for thread in threading.enumerate():
        if thread.name == "reward":  # it has answered, and may not have ended
            thread.join(10)
    [known] = [weakref.ref(each) for each in models_there() if each not in others]
    gc.disable()
    try:
        del reward
        assert known() is None
    finally:
        gc.enable()


def broken(folder: Path, how: str) -> None:
    tokenizer = {"eos_token": "<eos>"}
    if how == "policy":
        Qwen3ForCausalLM(shape(257)).save_pretrained(folder)
    elif how == "vocabulary":
        Qwen3ForSequenceClassification(shape(40)).save_pretrained(folder)
    elif how == "weights":
        Qwen3ForSequenceClassification(shape(257)).save_pretrained(folder)
        (folder / "model.safetensors").write_bytes(b"no weights")
    elif how == "label":
        Qwen3ForSequenceClassification(shape(257)).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    characters = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate([*alphabet, "<eos>"])}, merges=[]))
    PreTrainedTokenizerFast(tokenizer_object=characters, **tokenizer).save_pretrained(folder)


@pytest.mark.parametrize(
    ("how", "settings", "message"),
    [
        ("nothing", {}, "the folder has no config.json"),
        ("policy", {}, "has no weights for score.weight: is it a sequence-classification model"),
        ("weights", {}, "SafetensorError"),
        ("vocabulary", {}, r"its tokenizer's token \d+ is not one of the model's 40"),
        ("label", {"label": 2}, "has 1 labels, counted from 0; there is no label 2"),
    ],
)
def test_a_model_that_can_reward_nothing_ends_the_run_before_an_engine_starts(
    how: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    broken(tmp_path, how)
    config = scoring(rules={"one": {"sql": "1"}}, model={"name": str(tmp_path), "device": "cpu", **settings})
    with pytest.raises(RewardError, match=f"^feedback.scoring: .*{message}"):
        try_reward(Reward(config, 60), config, rows("word", "zoo"), per_token=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_device_that_is_not_there_is_named(model: Path) -> None:
    with pytest.raises(RewardError, match="no GPU for device cuda:0; set it to cpu or auto"):
        Reward(scoring(model={"name": str(model), "device": "cuda:0"}), 60)(rows("4"))


def test_every_difference_that_decides_a_reward_changes_its_scorer(model: Path, tmp_path: Path) -> None:
    base = {"rules": {"one": {"sql": "1"}}, "judge": judged("http://x/v1", tmp_path / "judge")}
    first = Reward(scoring(**base), 60).scorer
    same = {**base, "judge": judged("http://y:2/v1", tmp_path / "judge", timeout_s=9, api_key="k1234567")}
    assert Reward(scoring(**same), 5).scorer == first
    for other in (
        {**base, "rules": {"one": {"sql": "2"}}},
        {**base, "rules": {"one": {"sql": "1", "weight": 2}}},
        {**base, "judge": judged("http://x/v1", tmp_path / "judge", rubric="{response}?")},
        {**base, "model": {"name": str(model)}},
    ):
        assert Reward(scoring(**other), 60).scorer != first


# --------------------------------------------------------------------------------------------------- process rewards


def test_a_function_may_reward_tokens_or_steps_and_scoring_takes_the_sum(module: Callable[[str], str]) -> None:
    name = module("[[1, 2.5, -1], [[0, 2], [2, 1.0]], 4, None]")
    rule = load_rule(name)
    values = rule(rows("a", "b", "c", "d", tokens=3))
    assert values == [2.5, 3.0, 4.0, None]
    assert [value.tokens for value in values if isinstance(value, PerToken)] == [[1, 2.5, -1], [2, 0, 1]]
    found = Reward(name, 60)(rows("a", "b", "c", "d", tokens=3))
    assert (found.values, found.tokens) == ([2.5, 3.0, 4.0, None], [[1, 2.5, -1], [2, 0, 1], None, None])


def test_in_a_mix_the_tokens_add_up_to_the_reward_of_the_response(module: Callable[[str], str]) -> None:
    rules = {
        "steps": {"function": module("[[[0, 1.0], [2, 4.0]], [1, 2, 3]]"), "weight": 3},
        "whole": {"sql": "CASE WHEN response = 'a' THEN 8 END"},
    }
    found = Reward(scoring(rules=rules), 60)(rows("a", "b", tokens=3))
    assert found.values == [(3 * 5 + 8) / 4, 6.0]
    assert found.tokens == [[0.75, 0.0, 3.0 + 2.0], [1.0, 2.0, 3.0]]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[1.0]", r"returned 1 numbers for row 0; the response has 3 tokens"),
        ("[]", r"returned 0 numbers for row 0; the response has 3 tokens"),
        ("[[3, 1.0]]", r"a step that ends at 3 for row 0; ends of steps rise"),
        ("[[1, 1.0], [1, 2.0]]", r"a step that ends at 1 for row 0"),
        ("[[-1, 1.0]]", r"a step that ends at -1 for row 0"),
        ("[[0.5, 1.0]]", r"a step that ends at 0\.5 for row 0"),
        ("[[0, 1.0], 2.0]", r"step 2\.0 for row 0; a step is \[index of its last token, number\]"),
        ("[1.0, 'x', 2.0]", r"returned 'x' for row 0; a reward is a number or None"),
        ("[1.0, float('inf'), 2.0]", r"returned inf for row 0; a reward lies within"),
    ],
)
def test_what_is_no_list_of_tokens_or_steps_is_missing_with_the_reason(
    module: Callable[[str], str], value: str, message: str
) -> None:
    name = module(f"[{value}] * len(rows)")
    with pytest.raises(TrainingStopped, match=message):
        check_rewards(Reward(name, 60)(rows("a", tokens=3)), max_missing=1, per_token=True)


def test_arrays_of_numpy_and_torch_are_lists_of_tokens(module: Callable[[str], str]) -> None:
    name = module("[__import__('numpy').arange(3), __import__('torch').ones(3)]")
    assert Reward(name, 60)(rows("a", "b", tokens=3)).tokens == [[0, 1, 2], [1, 1, 1]]


def test_an_algorithm_that_compares_whole_responses_refuses_rewards_of_tokens() -> None:
    found = Rewards([1.0], tokens=[[0.0, 1.0]])
    with pytest.raises(TrainingStopped, match=r"train\.algorithm\.name compares whole responses: use ppo or reinf"):
        check_rewards(found, max_missing=1, per_token=False)
    with pytest.raises(RewardError, match=r"train\.reward=a:b: it rewards single tokens or steps"):
        try_reward(lambda _: found, "a:b", rows("a"), per_token=False)
    check_rewards(found, max_missing=1, per_token=True)


def test_length_costs_the_last_token_and_what_has_no_tokens_comes_with_it() -> None:
    config = TrainConfig.model_validate(
        {"rollout": {"max_tokens": 4}, "algorithm": {"name": "ppo", "overlong_buffer": 2, "overlong_penalty": 1.0}}
    )
    given = Rewards([3.0, 5.0], tokens=[[1.0, 0.0, 2.0], None])
    found = score(PROMPTS, [[sample("a", 3)], [sample("b", 2)]], lambda _: given, config)
    assert [r.token_rewards for r in found.rollouts] == [[1.0, 0.0, 1.5], None]
    batch = PackedBatch.pack(found.rollouts)
    assert batch.token_rewards is not None
    assert batch.token_rewards.tolist() == [0.0, 1.0, 0.0, 1.5, 0.0, 0.0, 0.0, 5.0]
    assert batch.response_sums(batch.token_rewards).tolist() == batch.rewards.tolist() == [2.5, 5.0]


def test_the_key_of_a_judge_is_in_no_text_of_a_reward(tmp_path: Path) -> None:
    config = scoring(judge=judged("http://x/v1", tmp_path / "judge", api_key="sk-12345678"))
    assert isinstance(config.judge, JudgeConfig)
    assert "sk-12345678" not in f"{Reward(config, 60).settings!r} {config.model_dump_json()}"


# -------------------------------------------------------------------------------------------- before the first step


@pytest.mark.parametrize(("traffic_weight", "tried"), [(0.0, False), (1.0, True)])
def test_a_reward_is_not_tried_on_traffic_where_only_prompts_of_ones_own_are_drawn(
    tmp_path: Path, traffic_weight: float, tried: bool
) -> None:
    lake = Lake(str(tmp_path / "lake"), LakeConfig())
    lake.create()
    put(lake, "interactions", [interaction("r1")])
    start = RunStart(id="i", parent=1, parent_sha256="", lake_versions=lake.versions(), reward=None, config={})
    parent = Policy(1, None, tmp_path, "", {}, {}, {}, None)
    paths = {"runs": tmp_path, "policies": tmp_path, "reward_models": tmp_path}
    context = JobContext(run="r", lake_uri=lake.uri, **paths)
    (tmp_path / "own.jsonl").write_text('{"prompt": "a"}\n')
    data = {"prompts": [{"path": tmp_path / "own.jsonl"}], "traffic_weight": traffic_weight}
    seen: list[int] = []

    def reward(rows: pa.Table) -> Rewards:
        seen.append(rows.num_rows)
        return Rewards([1.0] * rows.num_rows)

    config = TrainConfig.model_validate({"data": data})
    on_logged_responses(config, context, lake, Begun(start, parent), reward)
    assert seen == ([1] if tried else [])


def test_a_request_whose_responses_have_no_reward_decides_nothing_however_many_and_new_they_are(
    tmp_path: Path, module: Callable[[str], str]
) -> None:
    lake = Lake(str(tmp_path / "lake"), LakeConfig())
    lake.create()
    later = {"created_at": NOON + timedelta(minutes=1), "prompt_token_ids": [9], "metadata": {}}
    put(lake, "interactions", [interaction("known"), *(interaction(f"n{i}", **later) for i in range(5))])
    tried = logged_responses(lake, lake.versions())
    assert tried["metadata"].to_pylist() == [[], [("answer", "four")]], "the newest of each prompt, newest first"
    name = module("[float(dict(row)['answer'] == 'four') for row in rows['metadata'].to_pylist()]")
    assert try_reward(Reward(name, 60), name, tried, per_token=False).values == [None, 1.0]
    put(lake, "interactions", [interaction(f"p{i}", **later | {"prompt_token_ids": [i]}) for i in range(40)])
    assert logged_responses(lake, lake.versions()).num_rows == 32
