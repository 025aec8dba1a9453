"""Reward models: the job from preferences in a lake to a folder that scoring reads, and what the loss is."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from job_home import job_context, make_home, metrics_of, results_of, run_jobs
from pydantic import ValidationError
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from deploy.config import root
from feedback.config import LakeConfig, ModelConfig
from feedback.datasets import preference_pairs
from feedback.lake.tables import Lake
from feedback.scoring.sources.reward_model import RewardModel
from serve.policies.store import PolicyStore
from tests.feedback.feedback_rows import interaction, put, said
from tests.paths import ROOT
from train.algorithms import load
from train.algorithms.offline.reward_model import judgements, vote_loss
from train.batch.packed import PackedBatch, Rollout
from train.config.algorithms import AlgorithmConfig
from train.config.training import TrainConfig
from train.data.feedback_items import DATASETS
from train.dataflows import load as load_dataflow
from train.run.calibration import Judged, agreement, calibrate
from train.run.reward_model import read_as_trained, verdict

HERE = ROOT / "tests" / "train"
PAIRS = 40
CONFIG: dict[str, Any] = {
    "dtype": "float32",
    "launcher": "torchrun",
    "steps": 16,
    "micro_batch_tokens": 256,
    "optimizer": {"learning_rate": 3e-3, "warmup_steps": 1},
    "data": {"prompts_per_step": 12, "min_prompts": 8, "held_out_share": 0.25, "held_out_every_steps": 8},
    "algorithm": {"name": "reward_model"},
    "checkpoint": {"every_steps": 6, "asynchronous": False},
    "start_timeout_s": 100,
    "step_timeout_s": 60,
}
HOOK = """
from train.observe.hooks import Hook

class StopOnce(Hook):
    def on_step(self, step, metrics):
        marker = self.run.folder / "stopped"
        if step == 8 and not marker.exists():
            marker.touch()
            raise RuntimeError("the power went")
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that serves, and pairs of responses of which the one with an x in it was preferred."""
    root = tmp_path_factory.mktemp("home")
    make_home(root)
    (root / "stop_once.py").write_text(HOOK)
    tokenizer = AutoTokenizer.from_pretrained(root / "seed")
    rng = random.Random(5)
    responses, feedback = [], []
    for i in range(PAIRS):
        prompt = "".join(rng.sample("abcdefgh", 4)) + ">"
        asked: dict[str, Any] = {"prompt": prompt, "prompt_token_ids": tokenizer(prompt).input_ids}
        if i % 3 == 0:
            asked["messages"] = json.dumps([{"role": "user", "content": prompt}])
        for name, letter in (("good", "x"), ("bad", "y")):
            text = "".join(rng.sample("klmnop", rng.randint(1, 4))) + letter + "".join(rng.sample("klmnop", 2))
            ids = tokenizer(text).input_ids
            given = {"response": text, "response_token_ids": ids, "logprobs": [-2.0] * len(ids)}
            responses.append(interaction(f"{name}-{i}", **asked, **given))
        feedback.append(said(f"p{i}", f"good-{i}", "preference", rejected_response_id=f"bad-{i}"))
    no_text = {"prompt": None, "prompt_token_ids": [5, 6]}
    responses += [interaction("blind-1", **no_text), interaction("blind-2", **no_text, response="five")]
    feedback.append(said("blind", "blind-1", "preference", rejected_response_id="blind-2"))
    lake = Lake(str(root / "lake"), LakeConfig())
    put(lake, "interactions", responses)
    put(lake, "feedback", feedback)
    return root


@pytest.fixture(scope="module")
def output(home: Path) -> str:
    """What the jobs printed: one left alone, one that is stopped and started again, and the first once more."""
    jobs = [job(home, "whole"), *[job(home, "stopped", hooks=["stop_once:StopOnce"])] * 2, job(home, "whole")]
    return run_jobs(home, jobs)


def job(home: Path, name: str, **changes: Any) -> dict[str, Any]:
    return {"config": {**CONFIG, **changes}, "context": job_context(home, name)}


def test_it_tells_pairs_apart_that_it_never_learned_from(home: Path, output: str) -> None:
    first, last = metrics_of(home, "whole")[0], metrics_of(home, "whole")[-1]
    assert first["held_out_at_start/loss"] == pytest.approx(math.log(2)), "a head of zeros prefers nothing"
    assert first["held_out_at_start/accuracy"] == 0.5
    assert last["held_out/accuracy"] >= 0.8
    assert last["held_out/loss"] < 0.5
    assert last["loss"] < 0.3
    assert "1 the prompt has no text" in output


def test_it_publishes_no_policy_and_says_where_the_reward_model_is(home: Path, output: str) -> None:
    whole, stopped, again = results_of(output)
    assert [result["candidate"] for result in (whole, stopped, again)] == [None] * 3
    assert whole["reward_model"] == 1
    assert whole["reason"].startswith("reward model 1: agrees with ")
    assert PolicyStore(home / "policies").versions() == [1]
    assert output.splitlines()[-1].split() == ["IMPORTED"], "nothing that samples is started"


def test_a_finished_run_gives_its_reward_model_again(output: str) -> None:
    whole, _, again = results_of(output)
    assert again["reward_model"] == whole["reward_model"] == 1
    assert again["metrics"] == whole["metrics"]
    assert "whole: was finished before, it published reward model" in output


def test_a_run_that_was_stopped_goes_on_to_the_weights_of_one_that_was_not(home: Path, output: str) -> None:
    assert "goes on after step 6" in output
    through, again = (
        (PolicyStore(home / "reward_models").get(version).path / "model.safetensors").read_bytes() for version in (1, 2)
    )
    assert through == again


def test_scoring_gives_each_response_what_training_measured(home: Path, output: str) -> None:
    folder = PolicyStore(home / "reward_models").get(1).path
    lake = Lake(str(home / "lake"), LakeConfig())
    config = TrainConfig.model_validate(CONFIG)
    data = load_dataflow(config).read(lake, lake.versions(), config, home / "seed", 1)
    line = json.loads((folder / "config.json").read_text())["reward_calibration"]
    model, info = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert model.config.num_labels == 1
    held_out = [[ids.prompt + ids.response for ids in pair] for pair in data.held_out]  # type: ignore[attr-defined]
    with torch.no_grad():
        scores = torch.tensor([[float(model(torch.tensor([ids])).logits) for ids in pair] for pair in held_out])
    measured = metrics_of(home, "whole")[-1]
    assert float((scores[:, 0] - scores[:, 1]).mean()) == pytest.approx(measured["held_out/margin"], abs=1e-4)
    assert float(scores[:, 0].mean()) == pytest.approx(measured["held_out/reward_chosen"], abs=1e-4)

    by_ids = dict(zip((tuple(ids) for pair in held_out for ids in pair), scores.flatten().tolist(), strict=True))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = preference_pairs(lake).table.to_pylist()
    asked = [
        {**{k: row[k] for k in ("prompt", "messages")}, "response": row[k]}
        for row in rows
        for k in ("chosen", "rejected")
    ]
    rewards, reasons = RewardModel(ModelConfig(name=str(folder), activation="none")).by_row(pa.Table.from_pylist(asked))
    compared = 0
    for row, reward in zip(asked, rewards, strict=True):
        text = row["response"] if row["messages"] else f"{row['prompt']}{row['response']}"
        if row["prompt"] is not None and (key := tuple(tokenizer(text).input_ids)) in by_ids:
            assert reward == pytest.approx(line["scale"] * by_ids[key] + line["shift"], abs=1e-4)
            compared += 1
    assert compared == 2 * len(held_out)
    assert sum(reason is not None for reason in reasons) == 2, "those without a prompt's text"
    known = [pair for pair in zip(rewards[::2], rewards[1::2], strict=True) if None not in pair]
    assert sum(good > bad for good, bad in known) >= 0.9 * len(known)  # type: ignore[operator]


def test_it_is_read_as_in_training_whatever_the_policys_tokenizer_makes(home: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(home / "seed", tmp_path / "model")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert "token_type_ids" in AutoTokenizer.from_pretrained(folder)("ab", "cd")
    read_as_trained(folder)
    assert AutoTokenizer.from_pretrained(folder)("ab", "cd").keys() == {"input_ids", "attention_mask"}


def test_the_folder_names_what_it_came_of(home: Path, output: str) -> None:
    model = PolicyStore(home / "reward_models").verify(1)
    tokenizer = AutoTokenizer.from_pretrained(model.path)
    assert json.loads((model.path / "config.json").read_text())["pad_token_id"] == tokenizer.pad_token_id
    assert (model.parent, model.lineage["policy"]) == (None, 1)
    assert model.lineage["lake_versions"].keys() >= {"interactions", "feedback", "rewards"}
    assert not (model.path / "generation_config.json").exists()


def test_a_version_rewards_if_it_is_not_worse_than_the_one_before_on_the_same_items(home: Path, output: str) -> None:
    store = PolicyStore(home / "reward_models")
    first, second = store.get(1).metrics, store.get(2).metrics
    assert first["compared"] is None
    assert first["agreement"]["value"] >= 0.8
    assert first["agreement"]["low"] <= first["agreement"]["value"] <= first["agreement"]["high"]
    assert second["compared"] == {"version": 1, "difference": 0.0, "low": 0.0, "high": 0.0}, "the same weights"
    assert [pointer.version for pointer in store.history()] == [1, 2]
    assert verdict([1.0] * 30 + [0.0] * 10, 1, [1.0] * 40)["keep"] is False
    assert verdict([1.0] * 40, 1, [1.0] * 30 + [0.0] * 10)["keep"] is True
    assert verdict([], 1, [])["keep"] is False, "nothing says that it is no worse"
    assert verdict([], None, [])["keep"] is True
    assert verdict([0.0] * 40, None, [])["keep"] is False, "worse than a coin"
    assert verdict([1.0] * 6 + [0.0] * 6, None, [])["keep"] is True


def test_the_gate_scores_by_a_reward_model_only_if_it_is_shown_to_be_better_than_a_coin() -> None:
    for right, of, kept in ((6, 12, False), (8, 12, False), (11, 12, True)):  # Wilson: from 25, 39 and 65 %
        found = verdict([1.0] * right + [0.0] * (of - right), None, [], decides=True)
        assert found["keep"] is kept, found["why"]
        assert ("not shown to be better than a coin" in found["why"]) is not kept
    assert verdict([], None, [], decides=True)["keep"] is False
    before = [1.0] * 14 + [0.0] * 6
    now = [1.0] * 4 + [0.0] * 6 + [1.0] * 6 + [0.0] * 4
    found = verdict(now, 1, before, decides=True)
    assert found["compared"]["high"] > 0, "not shown to be worse than the one before"
    assert found["keep"] is False, "but half of the judgements is what a coin agrees with"
    assert ": not shown to be better than a coin, " in found["why"]
    assert verdict([1.0] * 20, 1, before, decides=True)["keep"] is True


def test_the_loss_is_bradley_and_terrys() -> None:
    scores = [1.5, 0.25, -1.0, 2.0]  # chosen, rejected, rejected, chosen
    batch = PackedBatch.pack(
        [Rollout([3, 4], [5], [0.0], reward, group=i // 2) for i, reward in enumerate((1.0, 0.0, 0.0, 1.0))]
    )
    per_token = torch.full((12,), 9.0)
    per_token[2::3] = torch.tensor(scores)

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    for e in (0.0, 0.1):
        algorithm = load(AlgorithmConfig.model_validate({"name": "reward_model", "vote_noise": e}))
        loss, logged = algorithm.loss(per_token, batch)
        expected = -sum(math.log((1 - e) * sigmoid(m) + e * sigmoid(-m)) for m in (1.25, 3.0))
        assert float(loss) == pytest.approx(expected)
        assert algorithm.count(batch) == 2
        assert logged["margin"].tolist() == [1.25, 3.0]
        assert logged["accuracy"].tolist() == [1.0, 1.0]


def test_a_vote_on_one_response_is_its_binomial_likelihood_and_stands_beside_pairs() -> None:
    rollouts = [(0, 1.0), (0, 0.0), (1, 0.75), (2, 0.0)]
    batch = PackedBatch.pack([Rollout([3], [5], [0.0], reward, group=group) for group, reward in rollouts])
    per_token = torch.full((8,), 9.0)
    per_token[1::2] = torch.tensor([2.0, 1.0, 0.5, -1.5])
    algorithm = load(AlgorithmConfig.model_validate({"name": "reward_model", "vote_noise": 0.1}))
    loss, logged = algorithm.loss(per_token, batch)

    def likelihood(log_odds: float) -> float:
        return 0.9 / (1 + math.exp(-log_odds)) + 0.1 / (1 + math.exp(log_odds))

    rating = 0.75 * math.log(likelihood(0.5)) + 0.25 * math.log(1 - likelihood(0.5))
    assert float(loss) == pytest.approx(-(math.log(likelihood(1.0)) + rating + math.log(1 - likelihood(-1.5))))
    assert algorithm.count(batch) == 3
    assert logged["accuracy"].tolist() == [1.0, 1.0, 1.0]
    assert logged["reward_rejected"].tolist() == [1.0, -1.5]


def test_the_loss_is_the_mean_over_judgements_by_their_weights() -> None:
    rollouts = [(0, 1.0, 3.0), (0, 0.0, 3.0), (1, 0.75, 0.5), (2, 0.0, 1.0)]
    packed = [Rollout([3], [5], [0.0], reward, group=group, weight=weight) for group, reward, weight in rollouts]
    per_token = torch.full((8,), 9.0)
    per_token[1::2] = torch.tensor([2.0, 1.0, 0.5, -1.5])
    algorithm = load(AlgorithmConfig.model_validate({"name": "reward_model", "vote_noise": 0.0}))
    batch = PackedBatch.pack(packed)
    loss, _ = algorithm.loss(per_token, batch)

    def log_sigmoid(x: float) -> float:
        return -math.log(1 + math.exp(-x))

    rating = 0.75 * log_sigmoid(0.5) + 0.25 * log_sigmoid(-0.5)
    assert float(loss) == pytest.approx(-(3 * log_sigmoid(1.0) + 0.5 * rating + log_sigmoid(1.5)))
    assert algorithm.count(batch) == 4.5
    part = batch.select([3, 2])
    assert float(algorithm.loss(per_token[4:], part)[0]) == pytest.approx(
        -(log_sigmoid(-0.5) + 0.5 * (0.75 * log_sigmoid(-1.5) + 0.25 * log_sigmoid(1.5)))
    ), "of a part, each judgement has its own weight"


def test_a_vote_that_contradicts_all_others_pulls_with_a_bounded_weight() -> None:
    for noise, most in ((0.0, 1.0), (0.05, 0.1)):
        log_odds = torch.tensor([12.0], requires_grad=True)
        vote_loss(log_odds, torch.tensor([0.0]), noise).sum().backward()
        assert log_odds.grad is not None
        assert 0 < float(log_odds.grad) <= most


def test_groups_that_are_neither_pairs_nor_votes_are_refused() -> None:
    for rewards in ((1.0, 1.0), (0.0, 0.0), (1.0, 0.0, 0.0)):
        batch = PackedBatch.pack([Rollout([3], [5], [0.0], reward, group=0) for reward in rewards])
        with pytest.raises(ValueError, match="neither pairs nor votes"):
            judgements(batch)


def test_a_calibrated_score_is_the_share_of_good_votes() -> None:
    """Votes drawn where the truth is 0.5 * score - 1, with one in ten the wrong way round."""
    rng = random.Random(3)
    judged = []
    for _ in range(4000):
        score = rng.gauss(0, 4)
        meant = rng.random() < 1 / (1 + math.exp(-(0.5 * score - 1)))
        judged.append(Judged((score,), float(meant == (rng.random() >= 0.1))))
    line = calibrate(judged, 0.1)
    assert line["scale"] == pytest.approx(0.5, abs=0.06)
    assert line["shift"] == pytest.approx(-1, abs=0.15)
    assert sum(agreement(judged, line)) > sum(agreement(judged)), "by its own zero"


def test_judgements_calibrate_by_their_weights_of_which_the_ratios_alone_matter() -> None:
    """Three votes for and one against say as much as one of each, of which the one for weighs three times as much."""

    def line(*weighed: tuple[float, float], times: float = 1.0) -> list[float]:
        judged = [Judged((score,), vote, times * weight) for score in (-1.0, 2.0) for vote, weight in weighed]
        return [calibrate(judged, 0.05)[name] for name in ("scale", "shift")]

    assert line((1, 3), (0, 1), (1, 3), (0, 1), times=7) == pytest.approx(
        line((1, 1), (1, 1), (1, 1), (0, 1)), abs=1e-6
    )
    assert line((1, 3), (0, 1))[1] > line((1, 1), (0, 1))[1] + 0.1


def test_a_few_judgements_that_agree_stretch_the_scores_by_little_and_pairs_alone_centre_them() -> None:
    line = calibrate([Judged((2.0, 1.0), 1.0), Judged((4.0, 3.0), 1.0)], 0.05)
    assert 1 < line["scale"] < 3
    assert line["shift"] == pytest.approx(-2.5 * line["scale"])
    assert calibrate([Judged((None, 1.0), 1.0)], 0.05) == {"scale": 1.0, "shift": 0.0}
    assert agreement([Judged((None, 1.0), 1.0), Judged((1.0,), 0.5)]) == [0.5]


@pytest.mark.parametrize(
    ("settings", "named"), [({"lora": {}}, r"train\.lora is set"), ({"max_kl": 0.1}, r"train\.max_kl is set")]
)
def test_settings_of_a_policy_are_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        TrainConfig.model_validate({**CONFIG, **settings})


def test_it_learns_from_pairs_votes_and_thumbs_each_response_once(tmp_path: Path) -> None:
    lake = Lake(str(tmp_path / "lake"), LakeConfig())
    lake.create()
    names = ("chosen", "rejected", "thumbed", "rated", "torn", "silent")
    put(lake, "interactions", [interaction(name, prompt="q>", prompt_token_ids=[5], response=name) for name in names])
    feedback = [
        said("p", "chosen", "preference", rejected_response_id="rejected"),
        said("t1", "chosen", "thumb", value=0, source="grumpy"),
        said("t2", "thumbed", "thumb", value=1),
        said("r", "rated", "rating", value=4, name="stars"),
        said("t3", "torn", "thumb", value=1, source="one"),
        said("t4", "torn", "thumb", value=0, source="two"),
    ]
    put(lake, "feedback", feedback)

    assert judged(lake) == {
        "pairs by preference ": ([1.0, 0.0], 1.0),
        "votes thumbed": ([1.0], 1.0),
        "votes rated": ([0.75], 1.0),
        "votes torn": ([0.5], 1.0),
    }


def judged(
    lake: Lake, left_out: Counter[str] | None = None, **reward_model: Any
) -> dict[str, tuple[list[float], float]]:
    """What there is to learn a reward model from, and what each weighs."""
    config = TrainConfig.model_validate({**CONFIG, "reward_model": reward_model})
    rows = DATASETS["judgements"](lake, lake.versions(), config, Counter() if left_out is None else left_out)
    rows = (one for one in rows if not one[1].get("in_a_pair"))  # for where the pair can't be read
    found = {f"{kind} {row.get('response_id', '')}": ([one[2] for one in of], row["weight"]) for kind, row, of in rows}
    return {name: ([round(vote, 12) for vote in votes], round(weight, 12)) for name, (votes, weight) in found.items()}


def test_each_kind_of_feedback_weighs_what_the_settings_say_and_nothing_at_0(tmp_path: Path) -> None:
    lake = Lake(str(tmp_path / "lake"), LakeConfig())
    lake.create()
    names = ("chosen", "rejected", "corrected", "both", "two", "clicked", "bought")
    put(lake, "interactions", [interaction(name, prompt="q>", prompt_token_ids=[5], response=name) for name in names])
    metric = {"type": "number", "low": 0, "high": 10, "direction": "lower"}
    feedback = [
        said("p", "chosen", "preference", rejected_response_id="rejected"),
        said("c", "corrected", "correction", text="right"),
        said("t", "chosen", "thumb", value=1),
        said("b1", "both", "thumb", value=1, source="ann"),
        said("b2", "both", "rating", value=2, name="stars", source="ann"),
        said("w1", "two", "thumb", value=0, source="ann"),
        said("w2", "two", "metric", value=2, name="seconds", source="timer"),
        said("m", "clicked", "metric", value=5, name="seconds", source="timer"),
        said("u", "bought", "metric", value=5, name="undeclared", source="timer"),
    ]
    put(lake, "feedback", feedback)
    votes = {"kinds": {"metrics": {"seconds": metric}}}
    # ann's thumb of 1 (4) and rating of a quarter (1) come to 4.25 / 5, and she weighs 4; the timer says 0.8 (0.5)
    assert judged(lake, votes=votes, weights={"preference": 2, "thumb": 4, "metric": 0.5}) == {
        "pairs by preference ": ([1.0, 0.0], 2.0),
        "pairs by correction ": ([1.0, 0.0], 1.0),
        "votes both": ([0.85], 4.0),
        "votes two": ([round((4 * 0 + 0.5 * 0.8) / 4.5, 12)], 2.25),
        "votes clicked": ([0.5], 0.5),
    }
    left_out: Counter[str] = Counter()
    only = {"preference": 0, "correction": 0, "metric": 0, "rating": 0}
    assert judged(lake, left_out, votes=votes, weights=only) == {
        "votes chosen": ([1.0], 1.0),  # which is in no pair now
        "votes both": ([1.0], 1.0),
        "votes two": ([0.0], 1.0),
    }
    assert left_out["without a weight in train.reward_model.weights"] == 2
    without = {**votes, "human": {"thumbs": 0.0}}  # scoring leaves them out
    assert "votes both" not in judged(lake, votes=without, weights={"rating": 0})
    assert judged(lake, votes=without, weights={"rating": 3})["votes both"] == ([0.25], 3.0)


@pytest.mark.parametrize(
    ("weights", "named"),
    [
        ({"thumbs": 1}, r"thumbs"),
        ({"thumb": -1}, r"weights\.thumb"),
        (dict.fromkeys(("preference", "correction", "thumb", "rating", "metric"), 0), r"weights are all 0"),
    ],
)
def test_weights_that_can_not_be_are_refused_by_name(weights: dict[str, float], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        TrainConfig.model_validate({**CONFIG, "reward_model": {"weights": weights}})


def test_the_scales_and_weights_of_votes_come_from_the_settings_of_scoring() -> None:
    settings = root.load(
        None,
        [
            ("feedback.scoring.human.ratings", "0.5"),
            ("feedback.kinds.ratings", "{taste: {low: 0, high: 7}}"),
            ("train.reward_model.weights.thumb", "2"),
        ],
        {},
    )
    own = settings.training(reward_model=True).reward_model
    assert own.weights.thumb == 2
    assert own.votes is not None
    assert (own.votes["human"]["ratings"], own.votes["kinds"]["ratings"]["taste"]["high"]) == (0.5, 7)
    with pytest.raises(root.ConfigError, match=r"train\.reward_model\.weights\.thumbs"):
        root.load(None, [("train.reward_model.weights.thumbs", "2")], {})
