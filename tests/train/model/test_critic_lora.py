"""A critic that trains adapters and its head alone, in two ranks over gloo and in one."""

from __future__ import annotations

import copy
import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from transformers import AutoModelForSequenceClassification, Qwen3ForSequenceClassification

from tests.train.ranks import found_by, run_ranks, save_part
from tests.train.tiny_models import own_part, qwen3, some_batch
from train.batch.packed import PackedBatch
from train.checkpoint.folders import CheckpointError
from train.config.training import TrainConfig
from train.model.hf_io import own_slice, plain_name, whole_tensor
from train.model.mesh import mesh_sizes
from train.model.scalar_head import UNSTORED
from train.workers.critic import CriticWorker

pytest.importorskip("peft")

LORA = {"rank": 3, "alpha": 6}
HEAD = next(iter(UNSTORED))
CUTS: dict[str, dict[str, Any]] = {
    "one micro-batch": {},
    "small micro-batches": {"micro_batch_tokens": 16},
    "a shared sequence": {"micro_batch_tokens": 32, "fsdp": {"sequence_parallel": 2}},
    "shared layers": {"fsdp": {"tensor_parallel": 2}},
    "activations recomputed": {"activation_checkpointing": True},
}


def batch_to_learn() -> PackedBatch:
    batch, generator = some_batch(), torch.Generator().manual_seed(9)
    values, returns = (torch.randn(len(batch.tokens), generator=generator) * batch.response_mask for _ in range(2))
    return batch.with_(values=0.2 * values, returns=returns)


# ----------------------------------------------------------------------------------------------- in the ranks


def whole(tensor: Tensor) -> Tensor:
    return whole_tensor(tensor.detach()).clone()


def critic_of(policy: Path, ranks: int, settings: dict[str, Any], lora: dict[str, Any] | None = None) -> CriticWorker:
    config = {
        "ranks": ranks,
        "dtype": "float32",
        "optimizer": {"max_grad_norm": 1e9, "warmup_steps": 0},
        "algorithm": {
            "name": "ppo",
            "critic": {"value_clip": None, "learning_rate": 1e-2, "lora": {**LORA, **(lora or {})}},
        },
        **settings,
    }
    return CriticWorker(policy=policy, config=TrainConfig.model_validate(config), peers={})


def fill_adapters(model: Any) -> None:
    """Values for B, which begins as zero, that depend on the parameter's name alone: so A has gradients too."""
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            seed = sum(plain_name(name).encode())
            values = 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            parameter.data.to_local().copy_(values[own_slice(parameter)])


def an_update(policy: Path, ranks: int, settings: dict[str, Any]) -> dict[str, Any]:
    critic = critic_of(policy, ranks, settings)
    fill_adapters(critic.model)
    kept: dict[str, Tensor] = {}

    def keep(*_: Any) -> None:
        trained = ((n, p) for n, p in critic.model.named_parameters() if p.grad is not None)
        kept.update({plain_name(name): whole(p.grad) for name, p in trained})

    critic.optimizer.register_step_pre_hook(keep)
    batch = batch_to_learn()
    part = own_part(batch, **mesh_sizes(critic.config, ranks))
    mine = batch.select(part)
    weights = {plain_name(n): whole(p) for n, p in critic.model.named_parameters()}
    values = critic.values(mine)
    metrics = critic.update(mine)
    after = {plain_name(n): whole(p) for n, p in critic.model.named_parameters()}
    return {
        "tokens": batch.token_index(part),
        "values": values,
        "metrics": metrics,
        "gradients": kept,
        "weights": weights,
        "trained": {plain_name(n) for n, p in critic.model.named_parameters() if p.requires_grad},
        "changed": {n for n in weights if not torch.equal(weights[n], after[n])},
        "optimized": sum(len(group["params"]) for group in critic.optimizer.param_groups),
        "types": {plain_name(n): p.dtype for n, p in critic.model.named_parameters()},
    }


def refusal(policy: Path, ranks: int, target: str) -> str:
    try:
        critic_of(policy, ranks, {}, {"target_modules": [target]})
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def state(critic: CriticWorker) -> dict[str, Tensor]:
    """All weights and moments, whole, by name."""
    found = {plain_name(n): whole(p) for n, p in critic.model.named_parameters()}
    for name, parameter in critic.model.named_parameters():
        of = critic.optimizer.state.get(parameter, {})
        found |= {f"{plain_name(name)} {key}": whole(value) for key, value in of.items() if value.ndim}
    return found


def updated(critic: CriticWorker) -> dict[str, float]:
    batch = batch_to_learn()
    return critic.update(batch.select(own_part(batch)))


def saved(ranks: int, policy: Path, folder: Path) -> dict[str, Any]:
    """Two updates, a checkpoint, and a third."""
    critic = critic_of(policy, ranks, {})
    for _ in range(2):
        updated(critic)
    ended = save_part(critic, "critic", folder, 2)
    at_save = state(critic)
    return {"error": ended.error, "state": at_save, "next": updated(critic), "after": state(critic)}


def gone_on(ranks: int, policy: Path, folder: Path) -> dict[str, Any]:
    critic = critic_of(policy, ranks, {})
    critic.load_checkpoint(folder / "step-00000002", part="critic")
    loaded = state(critic)
    return {"state": loaded, "next": updated(critic), "after": state(critic)}


def in_two_ranks(rank: int, folder: Path) -> dict[str, Any]:
    return {
        "updates": {name: an_update(folder / "scored", 2, cut) for name, cut in CUTS.items()},
        "stored in bfloat16": an_update(folder / "half", 2, {"dtype": "bfloat16"}),
        "of a policy": an_update(folder / "qwen3", 2, {}),
        "refused": {target: refusal(folder / "qwen3", 2, target) for target in ("score", "nothing_like_it", "norm")},
        "saved": saved(2, folder / "qwen3", folder / "checkpoints"),
        "again": gone_on(2, folder / "qwen3", folder / "checkpoints"),
    }


def in_one_rank(rank: int, folder: Path) -> dict[str, Any]:
    policy = folder.parent / "qwen3"
    return {
        "saved": saved(1, policy, folder / "checkpoints"),
        "of two": gone_on(1, policy, folder.parent / "checkpoints"),
    }


def of_one_in_two(rank: int, folder: Path) -> dict[str, Any]:
    return gone_on(2, folder.parent / "qwen3", folder.parent / "alone" / "checkpoints")


# ------------------------------------------------------------------------------------------------------ tests


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("critic-lora")
    torch.manual_seed(3)
    qwen3().save_pretrained(folder / "qwen3")
    config = copy.deepcopy(qwen3().config)
    config.num_labels = 1
    scored = Qwen3ForSequenceClassification(config)
    with torch.no_grad():
        scored.score.weight.mul_(5)
    scored.save_pretrained(folder / "scored")
    scored.bfloat16().save_pretrained(folder / "half")
    run_ranks(2, in_two_ranks, folder)
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    return found_by(2, folder)


@pytest.fixture(scope="module")
def alone(folder: Path, found: list[dict[str, Any]]) -> dict[str, Any]:
    (folder / "alone").mkdir()
    [seen] = run_ranks(1, in_one_rank, folder / "alone")
    return seen


def by_a_plain_loop(model: Any, weights: dict[str, Tensor]) -> dict[str, Any]:
    """Values, loss and gradients in float64: each adapted weight is W + s B A, whole, in a model without adapters."""
    exact = {name: tensor.double().requires_grad_() for name, tensor in weights.items()}
    merged = {
        name: exact[name]
        + (
            LORA["alpha"]
            / LORA["rank"]
            * exact[f"{layer}.lora_B.default.weight"]
            @ exact[f"{layer}.lora_A.default.weight"]
            if f"{(layer := name.removesuffix('.weight'))}.lora_A.default.weight" in exact
            else 0
        )
        for name in exact
        if ".lora_" not in name
    }
    batch = batch_to_learn()
    assert batch.returns is not None
    values = torch.zeros(len(batch.tokens), dtype=torch.float64)
    body = {name.removeprefix("model."): tensor for name, tensor in merged.items() if name != HEAD}
    for start, end in itertools.pairwise(batch.cu_seqlens.tolist()):
        hidden = functional_call(model.double().model, body, (batch.tokens[start:end][None],)).last_hidden_state[0]
        read = hidden @ merged[HEAD][0]
        values = values.index_put((torch.arange(start + 1, end),), read[:-1])
    values = values * batch.response_mask
    loss = ((values - batch.returns.double()) ** 2 / 2 * batch.response_mask).sum() / batch.response_mask.sum()
    loss.backward()
    return {"values": values.detach(), "loss": float(loss.detach()), "gradients": {n: t.grad for n, t in exact.items()}}


@pytest.mark.parametrize("cut", CUTS)
def test_adapters_and_head_have_the_gradients_of_a_plain_loop_and_nothing_else_has_any(
    folder: Path, found: list[dict[str, Any]], cut: str
) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(folder / "scored", dtype=torch.float32)
    expected = by_a_plain_loop(model, found[0]["updates"][cut]["weights"])
    for ranks_own in found:
        seen = ranks_own["updates"][cut]
        assert seen["trained"] == seen["gradients"].keys() == {n for n in seen["weights"] if ".lora_" in n or n == HEAD}
        assert len(seen["trained"]) == seen["optimized"] == 2 * 14 + 1
        torch.testing.assert_close(seen["values"].double(), expected["values"][seen["tokens"]], atol=2e-6, rtol=1e-5)
        assert seen["metrics"]["value_loss"] == pytest.approx(expected["loss"], abs=1e-6)
        for name, gradient in seen["gradients"].items():
            assert gradient.any(), name
            torch.testing.assert_close(
                gradient.double(), expected["gradients"][name], atol=1e-6, rtol=1e-4, msg=f"{name}, {cut}"
            )
        assert seen["changed"] == seen["trained"]


def test_a_body_that_is_stored_in_the_compute_type_is_held_in_it_and_what_is_trained_in_float32(
    found: list[dict[str, Any]],
) -> None:
    for ranks_own in found:
        seen = ranks_own["stored in bfloat16"]
        for name, dtype in seen["types"].items():
            assert dtype == (torch.float32 if name in seen["trained"] else torch.bfloat16), name
        assert seen["changed"] == seen["trained"]


def test_a_policys_body_begins_with_a_head_of_zeros_and_learns_by_the_head_first(found: list[dict[str, Any]]) -> None:
    for ranks_own in found:
        seen = ranks_own["of a policy"]
        assert not seen["values"].any()
        assert seen["changed"] == {HEAD}


def test_two_ranks_go_on_from_their_checkpoint_bit_for_bit(found: list[dict[str, Any]]) -> None:
    for ranks_own in found:
        went_on, again = ranks_own["saved"], ranks_own["again"]
        assert went_on["error"] is None
        assert went_on["next"] == again["next"]
        for key in ("state", "after"):
            assert went_on[key].keys() == again[key].keys()
            assert all(torch.equal(went_on[key][name], again[key][name]) for name in went_on[key])
        trained = [name for name in went_on["state"] if ".lora_A." in name and "exp_avg" in name]
        assert len(trained) == 2 * 14, "moments of each A, and of the whole rest alike"


def test_a_checkpoint_of_two_ranks_goes_on_in_one_and_one_of_one_in_two(
    folder: Path, found: list[dict[str, Any]], alone: dict[str, Any]
) -> None:
    (folder / "back").mkdir(exist_ok=True)
    back = run_ranks(2, of_one_in_two, folder / "back")
    pairs = [(found[0]["saved"], alone["of two"])] + [(alone["saved"], each) for each in back]
    for before, after in pairs:
        assert before["state"].keys() == after["state"].keys()
        for name, value in before["state"].items():
            assert torch.equal(value, after["state"][name]), f"{name} is loaded as it was saved"
        assert after["next"] == pytest.approx(before["next"], rel=1e-4, abs=1e-6)
        for name, value in before["after"].items():
            if "exp_avg" not in name:
                torch.testing.assert_close(after["after"][name], value, atol=1e-4, rtol=0, msg=name)


def test_a_checkpoint_has_no_weight_of_the_frozen_body(folder: Path, found: list[dict[str, Any]]) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    part = folder / "checkpoints" / "step-00000002" / "critic"
    kept = [k for k in FileSystemReader(part).read_metadata().state_dict_metadata if k.startswith("model.")]
    assert len(kept) == 2 * 14 + 1
    assert all(".lora_" in key or key.endswith(HEAD) for key in kept)


def test_a_checkpoint_of_another_rank_of_adapters_is_refused_by_name(folder: Path, found: Any, tmp_path: Path) -> None:
    shutil.copytree(folder / "qwen3", tmp_path / "qwen3")
    [said] = run_ranks(1, load_with_another_rank, tmp_path, folder / "checkpoints")
    assert "train.algorithm.critic.lora" in said


def load_with_another_rank(rank: int, folder: Path, checkpoints: Path) -> str:
    critic = critic_of(folder / "qwen3", 1, {}, {"rank": 5})
    try:
        critic.load_checkpoint(checkpoints / "step-00000002", part="critic")
    except CheckpointError as error:
        return str(error)
    return "nothing was refused"


def test_targets_that_can_not_have_an_adapter_are_refused_by_the_critics_own_setting(
    found: list[dict[str, Any]],
) -> None:
    for ranks_own in found:
        said = ranks_own["refused"]
        assert (
            "train.algorithm.critic.lora.target_modules takes layers of the body; score is trained whole"
            in said["score"]
        )
        assert "train.algorithm.critic.lora.target_modules=['nothing_like_it'] fits no layer" in said["nothing_like_it"]
        assert "train.algorithm.critic.lora.target_modules=['norm'] fits no layer" in said["norm"]
