"""The critic and the scorer in two ranks over gloo: values, gradients, clip, checkpoints; what a pass leaves behind."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen3ForSequenceClassification

from tests.train.ranks import found_by, run_ranks
from tests.train.tiny_models import gpt2, gpt_neox, mixture, own_part, plain_log_probs, qwen3, some_batch, whole
from train.algorithms import load
from train.batch.packed import PackedBatch
from train.checkpoint.folders import begin_aside, make_whole
from train.config.algorithms import AlgorithmConfig
from train.config.training import TrainConfig
from train.export.model_folder import export
from train.model.hf_io import plain_name
from train.model.mesh import make_meshes, mesh_sizes
from train.model.scalar_head import UNSTORED, build_with_scalar_head, sequence_scores, token_values
from train.objectives.values import explained_variance, value_loss
from train.workers.actor import ActorWorker
from train.workers.critic import CriticWorker
from train.workers.reference import ReferenceWorker
from train.workers.scorer import ScorerWorker

RANKS = 2
BODIES = {"qwen3": qwen3, "gpt-neox": gpt_neox, "mixture": mixture, "gpt2": gpt2}
CUTS: dict[str, dict[str, Any]] = {
    "one micro-batch": {},
    "small micro-batches": {"micro_batch_tokens": 16},
    "a shared sequence": {"micro_batch_tokens": 32, "fsdp": {"sequence_parallel": 2}},
    "activations recomputed": {"activation_checkpointing": True},
}
CLIP = 0.05


def batch_to_learn() -> PackedBatch:
    """With values that the critic had before, some near to what it says and some not, and returns."""
    batch, generator = some_batch(), torch.Generator().manual_seed(9)
    values, returns = (torch.randn(len(batch.tokens), generator=generator) * batch.response_mask for _ in range(2))
    return batch.with_(values=0.2 * values, returns=returns)


def some_pairs() -> PackedBatch:
    batch = some_batch()
    numbers = torch.arange(len(batch))
    return batch.with_(groups=numbers // 2, rewards=(numbers % 2).float(), whole_groups=True)


# ----------------------------------------------------------------------------------------------- in the ranks


def in_a_rank(rank: int, folder: Path) -> dict[str, Any]:
    found = {
        "bodies": {name: of_a_body(folder / name) for name in BODIES},
        "updates": {name: an_update(rank, folder / "scored", cut) for name, cut in CUTS.items()},
        "in bfloat16": an_update(rank, folder / "scored", {"dtype": "bfloat16"}),
        "from zero": an_update(rank, folder / "qwen3", {}),
        "from a reward model": an_update(rank, folder / "qwen3", starting_from(folder / "scored")),
        "from other tokens": refusal(folder / "qwen3", starting_from(folder / "more tokens")),
        "pairs": {name: pairs_learned(rank, folder / "scored", cut) for name, cut in CUTS.items()},
        "without gradient": without_gradient(folder / "qwen3"),
        "checkpoint": gone_on(rank, folder / "qwen3", folder / "checkpoints"),
    }
    return found


def of_a_body(policy: Path) -> dict[str, Any]:
    """What a head of ones makes of the body of a policy."""
    model = build_with_scalar_head(policy, dtype=torch.float32, meshes=make_meshes("cpu"))
    began = whole(model.score.weight)
    with torch.no_grad():
        model.score.weight.fill_(1.0)
        batch = some_batch()
        said = {"values": token_values(model, batch), "scores": sequence_scores(model, batch)}
    out = policy.with_name(policy.name + " again")
    if torch.distributed.get_rank() == 0:
        out.mkdir()
    export(model, policy, out, unstored=UNSTORED)
    return {"began": began, **said}


def critic_of(policy: Path, settings: dict[str, Any], **peers: Any) -> CriticWorker:
    config = {
        "ranks": RANKS,
        "dtype": "float32",
        "optimizer": {"max_grad_norm": 1e9, "warmup_steps": 0, "learning_rate": 1.0},
        "algorithm": {"name": "ppo", "critic": {"value_clip": CLIP, "learning_rate": 1e-2}},
        **settings,
    }
    return CriticWorker(policy=policy, config=TrainConfig.model_validate(config), peers=peers)


def an_update(rank: int, policy: Path, settings: dict[str, Any]) -> dict[str, Any]:
    critic = critic_of(policy, settings)
    kept: dict[str, Tensor] = {}

    def keep(*_: Any) -> None:
        kept.update({plain_name(name): whole(p.grad) for name, p in critic.model.named_parameters()})

    critic.optimizer.register_step_pre_hook(keep)
    batch = batch_to_learn()
    part = own_part(batch, **mesh_sizes(critic.config, critic.world_size))
    mine = batch.select(part)
    before = critic.values(mine)
    return {
        "tokens": batch.token_index(part),
        "values": before,
        "metrics": critic.update(mine),
        "gradients": kept,
        "after": critic.values(mine),
    }


def starting_from(model: Path) -> dict[str, Any]:
    return {"algorithm": {"name": "ppo", "critic": {"model": str(model)}}}


def refusal(policy: Path, settings: dict[str, Any]) -> str:
    try:
        critic_of(policy, settings)
    except ValueError as error:
        return str(error)
    return "it was not refused"


def pairs_learned(rank: int, policy: Path, settings: dict[str, Any]) -> dict[str, Any]:
    config = {
        "ranks": RANKS,
        "dtype": "float32",
        "optimizer": {"max_grad_norm": 1e9},
        "algorithm": {"name": "reward_model"},
        **settings,
    }
    scorer = ScorerWorker(policy=policy, config=TrainConfig.model_validate(config), peers={})
    kept: dict[str, Tensor] = {}

    def keep(*_: Any) -> None:
        kept.update({plain_name(name): whole(p.grad) for name, p in scorer.model.named_parameters()})

    scorer.optimizer.register_step_pre_hook(keep)
    batch = some_pairs()
    part = own_part(batch, **mesh_sizes(scorer.config, scorer.world_size))
    mine = batch.select(part)
    before = scorer.scores(mine)
    metrics, learned_from = scorer.learn(mine)
    return {"same": torch.equal(before, learned_from), "metrics": metrics, "gradients": kept}


def without_gradient(policy: Path) -> dict[str, list[tuple[Tensor, bool]]]:
    """Two passes of each role: what came of it, and whether every parameter is a shard afterwards."""
    config = TrainConfig.model_validate({"ranks": RANKS, "dtype": "float32", "micro_batch_tokens": 16})
    reference, critic = ReferenceWorker(policy=policy, config=config, peers={}), critic_of(policy, {})
    scorer = ScorerWorker(policy=policy, config=config, peers={})
    passes = {"reference": reference.log_probs, "critic": critic.values, "scorer": scorer.scores}
    models = {"reference": reference.model, "critic": critic.model, "scorer": scorer.model}

    def run(role: str) -> tuple[Tensor, bool]:
        came = passes[role](some_batch())
        return came, all(isinstance(parameter, DTensor) for parameter in models[role].parameters())

    return {role: [run(role), run(role)] for role in passes}


def gone_on(rank: int, policy: Path, folder: Path) -> dict[str, Any]:
    """Actor and critic in one process: an update, a checkpoint of both, another update, and that one again."""
    settings = {"ranks": RANKS, "dtype": "float32", "algorithm": {"name": "ppo"}}
    actor = ActorWorker(policy=policy, config=TrainConfig.model_validate(settings), peers={})
    parts = {"actor": actor, "critic": critic_of(policy, {}, actor=actor)}
    batch = batch_to_learn()
    mine = batch.select(batch.balanced(RANKS)[rank])

    def update() -> list[dict[str, float]]:
        return [worker.update(mine) for worker in parts.values()]

    def states() -> list[dict[str, Tensor]]:
        return [{name: whole(p) for name, p in worker.model.named_parameters()} for worker in parts.values()]

    update()
    if rank == 0:
        begin_aside(folder, 1, "{}")
    torch.distributed.barrier()
    for part, worker in parts.items():
        worker.save_checkpoint(folder / ".step-00000001.new" / part, step=1)
    errors = [saved.error for worker in parts.values() for saved in worker.saved(True)]
    torch.distributed.barrier()
    if rank == 0:
        make_whole(folder, 1)
    torch.distributed.barrier()
    said, reached = update(), states()
    again = ActorWorker(policy=policy, config=actor.config, peers={})
    parts = {"actor": again, "critic": critic_of(policy, {}, actor=again)}
    for part, worker in parts.items():
        worker.load_checkpoint(folder / "step-00000001", part=part)
    return {
        "errors": errors,
        "said": (said, update()),
        "reached": (reached, states()),
        "meshes are shared": parts["critic"].meshes is again.meshes,
    }


# ------------------------------------------------------------------------------------------------------ tests


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policies, one of them with a head, and what each rank found."""
    folder = tmp_path_factory.mktemp("critic")
    torch.manual_seed(3)
    for name, make in BODIES.items():
        make().save_pretrained(folder / name)
    config = copy.deepcopy(qwen3().config)
    config.num_labels = 1
    scored = Qwen3ForSequenceClassification(config)
    with torch.no_grad():
        scored.score.weight.mul_(5)
    scored.save_pretrained(folder / "scored")
    config.vocab_size = 71
    config.save_pretrained(folder / "more tokens")
    run_ranks(RANKS, in_a_rank, folder)
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    return found_by(RANKS, folder)


def plain_values(model: Any, batch: PackedBatch) -> list[Tensor]:
    """The head's output at every token, one sequence at a time, in a model that is not sharded."""
    sequences = [batch.tokens[start:end] for start, end in itertools.pairwise(batch.cu_seqlens.tolist())]
    return [model.score(model.base_model(ids[None]).last_hidden_state)[0, :, 0] for ids in sequences]


def before_each_token(at_tokens: list[Tensor], batch: PackedBatch) -> Tensor:
    """What was read at a token is the value of the state before the next one; zero at prompts."""
    return torch.cat([torch.cat([torch.zeros(1), x[:-1]]) for x in at_tokens]) * batch.response_mask


@pytest.mark.parametrize("name", BODIES)
def test_values_and_scores_are_the_heads_of_hidden_states_of_the_policys_body(
    folder: Path, found: list[dict[str, Any]], name: str
) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(folder / name, num_labels=1, dtype=torch.float32)
    batch = some_batch()
    with torch.no_grad():
        model.score.weight.fill_(1.0)
        expected = plain_values(model, batch)
    for ranks_own in found:
        seen = ranks_own["bodies"][name]
        assert not seen["began"].any(), "a head that nothing is known of is zero"
        torch.testing.assert_close(seen["values"], before_each_token(expected, batch), atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(seen["scores"], torch.stack([x[-1] for x in expected]), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("name", BODIES)
def test_an_export_is_a_sequence_classification_model_of_one_label_in_the_policys_type(
    folder: Path, found: list[dict[str, Any]], name: str
) -> None:
    out = folder / f"{name} again"
    again, info = AutoModelForSequenceClassification.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert again.config.num_labels == 1
    assert "generation_config.json" not in {path.name for path in out.iterdir()}
    with torch.no_grad():
        scores = torch.stack([x[-1] for x in plain_values(again, some_batch())])
    torch.testing.assert_close(scores, found[0]["bodies"][name]["scores"], atol=2e-5, rtol=1e-5)
    stored = {name_: t.dtype for name_, t in load_file(folder / name / "model.safetensors").items()}
    assert set(stored.values()) == {t.dtype for t in load_file(out / "model.safetensors").values()}


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Any]:
    """Values, loss and gradients of the whole batch, token by token."""
    model = AutoModelForSequenceClassification.from_pretrained(folder / "scored", dtype=torch.float32)
    batch = batch_to_learn()
    assert batch.values is not None
    assert batch.returns is not None
    values = before_each_token(plain_values(model, batch), batch)
    total, clipped = torch.zeros(()), 0
    for t in batch.response_mask.nonzero().flatten().tolist():
        v, old, target = float(values[t].detach()), float(batch.values[t]), float(batch.returns[t])
        near = old + max(-CLIP, min(CLIP, v - old))
        held = (near - target) ** 2 > (v - target) ** 2
        clipped += held
        # Where the clipped value's error is larger, it does not depend on the weights.
        total = total + ((near if held else values[t]) - target) ** 2 / 2
    count = int(batch.response_mask.sum())
    (total / count).backward()  # type: ignore[no-untyped-call]
    return {
        "values": values.detach(),
        "loss": float(total.detach()) / count,
        "clipped": clipped / count,
        "gradients": {name: p.grad.clone() for name, p in model.named_parameters()},
    }


@pytest.mark.parametrize("cut", CUTS)
def test_an_update_is_that_of_a_plain_loop_however_the_batch_is_cut(
    found: list[dict[str, Any]], expected: dict[str, Any], cut: str
) -> None:
    assert 0.2 < expected["clipped"] < 0.8
    for ranks_own in found:
        seen = ranks_own["updates"][cut]
        torch.testing.assert_close(seen["values"], expected["values"][seen["tokens"]], atol=2e-6, rtol=1e-5)
        assert seen["metrics"]["value_loss"] == pytest.approx(expected["loss"], abs=1e-6)
        assert seen["metrics"]["value_clip_fraction"] == pytest.approx(expected["clipped"])
        assert seen["gradients"].keys() == expected["gradients"].keys()
        for name, gradient in expected["gradients"].items():
            torch.testing.assert_close(seen["gradients"][name], gradient, atol=1e-6, rtol=1e-4, msg=name)
        norm = torch.cat([g.flatten() for g in expected["gradients"].values()]).norm()
        assert seen["metrics"]["critic_grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        assert seen["metrics"]["critic_learning_rate"] == 1e-2, "the critic's own, not train.optimizer's"
        assert not torch.equal(seen["after"], seen["values"])


@pytest.mark.parametrize("cut", CUTS)
def test_an_update_on_pairs_is_that_of_a_plain_loop_however_the_batch_is_cut(
    folder: Path, found: list[dict[str, Any]], cut: str
) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(folder / "scored", dtype=torch.float32)
    scores = [x[-1] for x in plain_values(model, some_pairs())]
    margins = [better - worse for worse, better in zip(scores[::2], scores[1::2], strict=True)]
    noise = AlgorithmConfig(name="reward_model").vote_noise
    preferred = [1 / (1 + (-m).exp()) for m in margins]
    loss = -sum(((1 - noise) * p + noise * (1 - p)).log() for p in preferred) / len(margins)
    loss.backward()
    for ranks_own in found:
        seen = ranks_own["pairs"][cut]
        assert seen["same"], "what the update's own pass gives is what the scores were"
        assert seen["metrics"]["loss"] == pytest.approx(float(loss.detach()), abs=1e-6)
        assert seen["metrics"]["accuracy"] == pytest.approx(sum(float(m.detach()) > 0 for m in margins) / len(margins))
        assert seen["metrics"]["margin"] == pytest.approx(
            sum(float(m.detach()) for m in margins) / len(margins), abs=1e-6
        )
        for name, p in model.named_parameters():
            torch.testing.assert_close(seen["gradients"][name], p.grad, atol=1e-6, rtol=1e-4, msg=name)


def test_in_bfloat16_values_and_gradients_are_near_those_of_float32(
    found: list[dict[str, Any]], expected: dict[str, Any]
) -> None:
    seen = found[0]["in bfloat16"]
    torch.testing.assert_close(seen["values"], expected["values"][seen["tokens"]], atol=0.05, rtol=0.05)
    a, b = (torch.cat([g[n].flatten() for n in sorted(g)]) for g in (seen["gradients"], expected["gradients"]))
    assert float(torch.cosine_similarity(a, b, dim=0)) > 0.98


def test_from_a_head_of_zeros_the_head_learns_first(found: list[dict[str, Any]]) -> None:
    seen = found[0]["from zero"]
    assert not seen["values"].any()
    head = seen["gradients"].pop(next(iter(UNSTORED)))
    assert head.any()
    assert not any(gradient.any() for gradient in seen["gradients"].values())
    assert seen["after"].any()


def test_a_critic_can_start_from_a_reward_model_with_the_policys_tokens(
    found: list[dict[str, Any]], expected: dict[str, Any]
) -> None:
    for ranks_own in found:
        seen = ranks_own["from a reward model"]
        torch.testing.assert_close(seen["values"], expected["values"][seen["tokens"]], atol=2e-6, rtol=1e-5)
        assert "more tokens has 71 tokens, and the policy 67" in ranks_own["from other tokens"]


def test_actor_and_critic_go_on_from_one_checkpoint_bit_for_bit(found: list[dict[str, Any]]) -> None:
    for ranks_own in found:
        seen = ranks_own["checkpoint"]
        assert seen["errors"] == [None, None]
        assert seen["said"][0] == seen["said"][1]
        for went_on, again in zip(*seen["reached"], strict=True):
            assert all(torch.equal(went_on[name], again[name]) for name in went_on)
        assert seen["meshes are shared"]


def test_a_value_that_moved_beyond_the_clip_towards_its_return_has_no_gradient() -> None:
    values = torch.tensor([1.5, 0.5, 1.05, 0.0], requires_grad=True)
    old, returns = torch.ones(4), torch.full((4,), 2.0)
    loss, clipped = value_loss(values, old, returns, clip=0.1)
    # 1.5 went towards 2 by more than 0.1: held at 1.1. 0.5 and 0 went the other way, 1.05 not far: their own errors.
    torch.testing.assert_close(loss.detach(), torch.tensor([0.405, 1.125, 0.45125, 2.0]))
    assert clipped.tolist() == [True, False, False, False]
    loss.sum().backward()  # type: ignore[no-untyped-call]
    assert values.grad is not None
    torch.testing.assert_close(values.grad, torch.tensor([0.0, -1.5, -0.95, -2.0]))
    free, none = value_loss(values, old, returns, clip=None)
    torch.testing.assert_close(free.detach(), torch.tensor([0.125, 1.125, 0.45125, 2.0]))
    assert not none.any()


def test_explained_variance_is_1_for_what_is_known_and_0_for_a_constant_guess() -> None:
    returns = torch.tensor([1.0, 2.0, 4.0, 1.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(torch.full((4,), 7.0), returns) == pytest.approx(0.0)
    # Differences 0, 0, 2, 0: variance 0.75; that of the returns is 1.5.
    assert explained_variance(torch.tensor([1.0, 2.0, 2.0, 1.0]), returns) == pytest.approx(0.5)
    assert explained_variance(torch.zeros(4), torch.ones(4)) == 0.0


def test_ppos_returns_are_discounted_td_errors_plus_values_and_its_advantages_are_whitened() -> None:
    gamma, lam = 0.9, 0.8
    config = AlgorithmConfig.model_validate({"name": "ppo", "critic": {"gamma": gamma, "lam": lam}})
    ppo, batch = load(config), batch_to_learn()
    assert batch.values is not None
    advantages, returns = torch.zeros(len(batch.tokens)), torch.zeros(len(batch.tokens))
    for s in range(len(batch)):
        start, end = int(batch.cu_seqlens[s] + batch.prompt_lengths[s]), int(batch.cu_seqlens[s + 1])
        for t in range(start, end):
            total = 0.0
            for later in range(t, end):
                last = later == end - 1
                reward, after = (float(batch.rewards[s]), 0.0) if last else (0.0, float(batch.values[later + 1]))
                total += (gamma * lam) ** (later - t) * (reward + gamma * after - float(batch.values[later]))
            advantages[t], returns[t] = total, total + float(batch.values[t])
    mask = batch.response_mask
    torch.testing.assert_close(ppo.returns(batch)[mask], returns[mask])
    whitened = (advantages[mask] - advantages[mask].mean()) / advantages[mask].std(correction=0)
    torch.testing.assert_close(ppo.advantages(batch)[mask], whitened, atol=1e-4, rtol=1e-4)
    assert not ppo.advantages(batch)[~mask].any()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (
            {"steps": 5, "algorithm": {"name": "ppo", "critic": {"warmup_steps": 5}}},
            r"train\.algorithm\.critic\.warmup_steps=5 are all of train\.steps=5",
        ),
        (
            {"placement": {"pools": {"all": {}, "own": {}}, "critic": "own"}},
            r"train\.placement\.critic=own: grpo has no critic",
        ),
        ({"algorithm": {"name": "ppo"}, "placement": {"critic": "own"}}, r"train\.placement\.critic=own is not a pool"),
    ],
)
def test_a_critic_that_can_not_be_is_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        TrainConfig.model_validate(settings)


def test_a_pass_without_gradient_leaves_shards_alone_and_the_next_one_computes_the_same(
    folder: Path, found: list[dict[str, Any]]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "qwen3", dtype=torch.float32)
    with torch.no_grad():
        expected = plain_log_probs(model, some_batch())
    for ranks_own in found:
        for role, ((first, sharded), (second, again)) in ranks_own["without gradient"].items():
            assert (sharded, again) == (True, True), f"{role} keeps what is outside the layers whole"
            torch.testing.assert_close(first, second, atol=0, rtol=0)
        reference, _ = ranks_own["without gradient"]["reference"][0]
        torch.testing.assert_close(reference, expected, atol=1e-5, rtol=1e-5)
