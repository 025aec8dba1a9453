"""Offline runs, whole: from feedback in a lake to a published policy; and an update of pairs on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from job_home import job_context, make_home, metrics_of, results_of, run_jobs

from feedback.config import LakeConfig
from feedback.lake.tables import Lake
from serve.policies.store import PolicyStore
from tests.feedback.feedback_rows import interaction, put, said
from tests.paths import ROOT
from tests.train.ranks import run_ranks
from tests.train.tiny_models import plain_log_probs, qwen3, whole
from train.algorithms import load
from train.batch.packed import PackedBatch, Rollout
from train.config.training import TrainConfig
from train.model.hf_io import plain_name
from train.workers.actor import ActorWorker

HERE = ROOT / "tests" / "train"
STEPS, PROMPTS = 6, 24
GOOD, BAD = [10, 11, 1], [12, 13, 14, 1]  # tokens; 1 is the EOS
CONFIG: dict[str, Any] = {
    "dtype": "float32",
    "launcher": "torchrun",
    "steps": STEPS,
    "micro_batch_tokens": 64,
    "optimizer": {"learning_rate": 3e-3, "warmup_steps": 1},
    "data": {"prompts_per_step": 8, "min_prompts": 8, "held_out_share": 0.25, "held_out_every_steps": 3},
    "checkpoint": {"every_steps": 2, "asynchronous": False},
    "start_timeout_s": 100,
    "step_timeout_s": 60,
}
HOOK = """
from train.observe.hooks import Hook

class StopOnce(Hook):
    def on_step(self, step, metrics):
        marker = self.run.folder / "stopped"
        if step == 3 and not marker.exists():
            marker.touch()
            raise RuntimeError("the power went")
"""
OWN = """
from torch.nn.functional import logsigmoid

from train.algorithms.base import Algorithm
from train.objectives.preferences import pairs


class SimPO(Algorithm):
    dataset = "pairs"
    whole_groups = True

    def loss(self, log_probs, batch):
        chosen, rejected = pairs(batch)
        mean = batch.response_sums(log_probs) / batch.response_lengths
        margin = self.config.options["beta"] * (mean[chosen] - mean[rejected])
        return -logsigmoid(margin - self.config.options["gamma"]).sum(), {"margin": margin}

    def count(self, batch):
        return len(batch) / 2
"""
JOBS: dict[str, dict[str, Any]] = {
    "dpo": {"algorithm": {"name": "dpo"}, "minibatches": 2},
    "dpo-stopped": {"algorithm": {"name": "dpo"}, "minibatches": 2, "hooks": ["stop_once:StopOnce"]},
    "kto": {"algorithm": {"name": "kto", "beta": 0.5}, "lora": {"rank": 4, "alpha": 8}, "max_kl": 100.0},
    "sft": {"algorithm": {"name": "sft"}, "measure_kl": False},
    "own": {"algorithm": {"name": "simpo:SimPO", "offline": True, "options": {"beta": 2.0, "gamma": 0.5}}},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that serves; and for each prompt a response that people liked, and one that they did not and corrected.

    What makes the one better is the same everywhere, so that it can be learned from few.
    """
    root = tmp_path_factory.mktemp("home")
    make_home(root)
    (root / "stop_once.py").write_text(HOOK)
    (root / "simpo.py").write_text(OWN)
    responses, feedback = [], []
    for i in range(PROMPTS):
        for name, tokens, text in ((f"good-{i}", GOOD, "ij"), (f"bad-{i}", BAD, "klm")):
            sampled = {"response_token_ids": tokens, "logprobs": [-2.0] * len(tokens), "response": text}
            responses.append(interaction(name, prompt=None, prompt_token_ids=[30 + i % 9, 40 + i % 8, 20], **sampled))
        feedback += [said(f"u{i}", f"good-{i}", "thumb", value=1.0), said(f"d{i}", f"bad-{i}", "thumb", value=0.0)]
        feedback.append(said(f"c{i}", f"bad-{i}", "correction", text="ij"))
    lake = Lake(str(root / "lake"), LakeConfig())
    put(lake, "interactions", responses)
    put(lake, "feedback", feedback)
    return root


@pytest.fixture(scope="module")
def output(home: Path) -> str:
    """What the jobs printed, one after the other in one process; the one that is stopped is started again."""
    jobs = [job(home, name) for name in ("dpo", "dpo-stopped", "dpo-stopped", "kto", "sft", "own")]
    return run_jobs(home, jobs)


def job(home: Path, name: str) -> dict[str, Any]:
    return {"config": {**CONFIG, **JOBS[name]}, "context": job_context(home, name)}


def candidate(home: Path, output: str, name: str) -> int:
    results = results_of(output)
    [version] = [result["candidate"] for result in results if result["run"] == name]
    return int(version)


def test_dpo_raises_the_margin_of_pairs_that_it_never_learned_from(home: Path, output: str) -> None:
    lines = metrics_of(home, "dpo")
    first, last = lines[0], lines[-1]
    assert first["held_out_at_start/margin"] == 0.0  # the policy is its own reference
    assert first["held_out_at_start/loss"] == pytest.approx(0.6931, abs=1e-4)
    assert last["held_out/margin"] > 0.1
    assert last["held_out/accuracy"] == 1.0
    assert last["held_out/loss"] < first["held_out_at_start/loss"]
    assert last["margin"] > first["margin"]
    assert last["k2_ref"] > first["k2_ref"] >= 0
    assert ["held_out/loss" in line for line in lines] == [False, False, True] * 2


def test_kto_with_adapters_makes_liked_responses_likelier_and_others_less(home: Path, output: str) -> None:
    first, last = metrics_of(home, "kto")[0], metrics_of(home, "kto")[-1]
    assert last["held_out/loss"] < first["held_out_at_start/loss"]
    assert last["held_out/reward_desirable"] > 0 > last["held_out/reward_undesirable"]
    assert all(line["z0"] >= 0 for line in metrics_of(home, "kto"))
    assert "24 thumbs down, 24 thumbs up" in output
    settled = PolicyStore(home / "policies").get(candidate(home, output, "kto")).lineage["train"]["algorithm"]
    assert (settled["desirable_weight"], settled["undesirable_weight"]) == (1.0, 1.0)


def test_sft_makes_corrections_likelier_that_it_never_learned_from(home: Path, output: str) -> None:
    first, last = metrics_of(home, "sft")[0], metrics_of(home, "sft")[-1]
    assert last["held_out/loss"] < 0.8 * first["held_out_at_start/loss"]
    assert "k2_ref" not in last  # neither the loss nor a bound needs the reference


def test_an_algorithm_of_the_users_own_learns_from_feedback(home: Path, output: str) -> None:
    first, last = metrics_of(home, "own")[0], metrics_of(home, "own")[-1]
    assert last["held_out/margin"] > first["held_out_at_start/margin"]


def test_a_run_that_was_stopped_goes_on_to_the_weights_of_one_that_was_not(home: Path, output: str) -> None:
    assert "STOPPED train.hooks: 'stop_once:StopOnce' failed in on_step, step 3" in output
    assert "goes on after step 2" in output
    folders = [home / "policies" / f"v{candidate(home, output, name):06d}" for name in ("dpo", "dpo-stopped")]
    through, again = ((folder / "model.safetensors").read_bytes() for folder in folders)
    assert through == again
    assert through != (home / "seed" / "model.safetensors").read_bytes()
    same = ("loss", "margin", "grad_norm", "k2_ref", "held_out/loss")
    picked = [[{n: line.get(n) for n in same} for line in metrics_of(home, name)] for name in ("dpo", "dpo-stopped")]
    assert picked[0] == picked[1]


def test_nothing_that_samples_is_started(output: str) -> None:
    assert output.splitlines()[-1].split() == ["IMPORTED"]


def test_the_policy_says_what_it_learned_from(home: Path, output: str) -> None:
    policy = PolicyStore(home / "policies").get(candidate(home, output, "dpo"))
    assert policy.parent == 1
    assert policy.lineage["lake_versions"].keys() >= {"interactions", "feedback"}
    assert "pairs by correction" in policy.lineage["data"]
    assert policy.metrics["last"]["held_out/margin"] > policy.metrics["first"]["held_out_at_start/margin"]


# ------------------------------------------------------------------------------------------------------ two ranks

RANKS = 2


def some_pairs() -> PackedBatch:
    """Seven pairs of uneven lengths, with reference logprobs."""
    generator = torch.Generator().manual_seed(5)

    def some(count: int) -> list[int]:
        return torch.randint(1, 60, (count,), generator=generator).tolist()

    rollouts = []
    for i in range(14):
        response = some(1 + (3 * i) % 7)
        rollouts.append(Rollout(some(1 + i % 3), response, [0.0] * len(response), float(i % 2), i // 2))
    batch = PackedBatch.pack(rollouts).with_(whole_groups=True)
    return batch.with_(ref_log_probs=-4.0 * batch.response_mask)


def in_a_rank(rank: int, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    actor = ActorWorker(policy=folder / "policy", config=TrainConfig.model_validate(settings), peers={})
    kept: dict[str, torch.Tensor] = {}

    def keep(*_: Any) -> None:
        kept.update({plain_name(name): whole(p.grad) for name, p in actor.model.named_parameters()})

    actor.optimizer.register_step_pre_hook(keep)
    batch = some_pairs()
    part = batch.select(batch.balanced(RANKS)[rank])
    metrics, _ = actor.learn(part)
    return {"gradients": kept, "metrics": metrics, "groups": part.groups.tolist()}


def test_pairs_stay_whole_on_two_ranks_and_in_micro_batches_and_give_the_gradient_of_a_plain_loop(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    model = qwen3()
    model.save_pretrained(tmp_path / "policy")
    settings = {
        "ranks": RANKS,
        "dtype": "float32",
        "micro_batch_tokens": 16,
        "algorithm": {"name": "dpo", "beta": 0.4, "label_smoothing": 0.1},
        "optimizer": {"max_grad_norm": 1e9},
    }
    ranks = run_ranks(RANKS, in_a_rank, tmp_path, settings)
    assert sorted(ranks[0]["groups"] + ranks[1]["groups"]) == [g for g in range(7) for _ in range(2)]
    assert not set(ranks[0]["groups"]) & set(ranks[1]["groups"])

    batch = some_pairs()
    algorithm = load(TrainConfig.model_validate(settings).algorithm)
    loss, found = algorithm.loss(plain_log_probs(model, batch), batch)
    (loss / 7).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ranks[0]["gradients"][name], parameter.grad, rtol=1e-4, atol=1e-6)
    for name in ("margin", "accuracy", "logp_chosen"):
        assert ranks[1]["metrics"][name] == pytest.approx(float(found[name].detach().mean()), rel=1e-4)
    assert ranks[0]["metrics"]["loss"] == pytest.approx(float(loss.detach()) / 7, rel=1e-5)
