"""Training in fp8: which layers, with which numbers, on which devices; and whole models in two ranks over gloo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from tests.paths import ROOT
from tests.train.ranks import found_by, run_ranks
from tests.train.tiny_models import mixture, own_part, qwen3, some_batch
from train.config.fp8 import Fp8Config, fp8_unsupported
from train.config.sections import LoraConfig
from train.config.training import TrainConfig
from train.model.fsdp import build, skeleton, token_log_probs
from train.model.hf_io import held, plain_name, stored_dtypes, whole_tensor
from train.model.low_precision.float8 import convert_layers
from train.workers.actor import ActorWorker
from train.workers.critic import CriticWorker
from train.workers.reference import ReferenceWorker

ROWWISE = Fp8Config(training="rowwise", emulate=True)
RECIPES = ("rowwise", "tensorwise")


# ---------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fp8": {}}, r"train\.fp8 has neither training nor rollout"),
        ({"fp8": {"training": "blockwise"}}, r"fp8\.training[\s\S]*rowwise"),
        ({"fp8": {"rollout": "fp8"}}, r"fp8\.rollout[\s\S]*fp8_per_channel"),
        ({"fp8": {"rollout": "fp8_per_channel", "keep": ["o_proj"]}}, r"train\.fp8\.keep=.*'o_proj'.* is unset"),
        (
            {"fp8": {"training": "rowwise"}, "dtype": "float32"},
            r"train\.fp8\.training=rowwise rounds what is bfloat16, and train\.dtype=float32",
        ),
        (
            {"fp8": {"training": "rowwise"}, "ranks": 2, "fsdp": {"tensor_parallel": 2}},
            r"train\.fp8\.training=rowwise multiplies in whole layers, and train\.fsdp\.tensor_parallel=2",
        ),
        (
            {"fp8": {"rollout": "fp8_per_channel"}, "rollout": {"backend": "hf"}},
            r"train\.fp8\.rollout=fp8_per_channel is vLLM's, and train\.rollout\.backend=hf",
        ),
        (
            {"fp8": {"rollout": "fp8_per_tensor"}, "algorithm": {"name": "dpo"}},
            r"learns from feedback, and samples nothing; take out train\.fp8\.rollout=fp8_per_tensor",
        ),
    ],
)
def test_settings_that_can_not_work_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainConfig.model_validate(settings)


def test_a_reward_model_is_trained_in_fp8_where_the_policy_is_and_samples_nothing() -> None:
    both = TrainConfig.model_validate({"fp8": {"training": "rowwise", "rollout": "fp8_per_channel"}})
    assert both.of_reward_model().fp8 == Fp8Config(training="rowwise")
    sampling = TrainConfig.model_validate({"fp8": {"rollout": "fp8_per_channel"}})
    assert sampling.of_reward_model().fp8 is None


@pytest.mark.parametrize(
    ("settings", "capability", "said"),
    [
        (None, None, None),
        ({"training": "rowwise"}, (8, 9), None),
        ({"training": "rowwise", "rollout": "fp8_per_block"}, (9, 0), None),
        (
            {"training": "rowwise", "rollout": "fp8_per_tensor"},
            (8, 6),
            "train.fp8.training=rowwise and train.fp8.rollout=fp8_per_tensor: it does not multiply in fp8, which a GPU "
            "of compute capability 8.9 or later does",
        ),
        ({"rollout": "fp8_per_channel"}, None, "train.fp8.rollout=fp8_per_channel: it does not multiply in fp8"),
        ({"training": "tensorwise", "emulate": True}, (8, 0), None),
        ({"training": "tensorwise", "rollout": "fp8_per_channel", "emulate": True}, None, None),
        ({"rollout": "fp8_per_block", "emulate": True}, None, "vLLM's build for CPUs can't compute it"),
        ({"rollout": "fp8_per_block", "emulate": True}, (8, 0), None),
    ],
)
def test_a_device_without_fp8_is_refused_with_the_setting_unless_it_is_emulated(
    settings: dict[str, Any] | None, capability: tuple[int, int] | None, said: str | None
) -> None:
    found = fp8_unsupported(settings and Fp8Config.model_validate(settings), "it", capability)
    assert found is None if said is None else said in str(found)


def test_importing_transformers_in_our_processes_says_nothing_of_torchao() -> None:
    code = "import feedback, sys; from transformers import Qwen3ForCausalLM; assert 'torchao' in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200, check=True
    )
    assert "torchao" not in done.stderr
    assert "pytree" not in done.stderr


# ------------------------------------------------------------------------------------------------------ layers


def kinds(model: nn.Module) -> dict[str, set[str]]:
    """Classes of modules -> the last parts of their names."""
    found: dict[str, set[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            found.setdefault(type(module).__name__, set()).add(name.rsplit(".", 1)[-1])
    return found


def test_the_linear_layers_of_the_body_are_converted_but_for_odd_sizes_and_those_to_keep() -> None:
    config = qwen3().config
    config.intermediate_size = 40  # no multiple of 16
    model = skeleton(config)
    assert all(parameter.is_meta for parameter in model.parameters())
    before = dict(model.named_parameters())
    found = convert_layers(list(model.model.layers), ROWWISE.model_copy(update={"keep": ["o_proj"]}))
    assert found == ["self_attn.k_proj", "self_attn.q_proj", "self_attn.v_proj"]
    assert kinds(model) == {
        "Float8Linear": {"q_proj", "k_proj", "v_proj"},
        "Linear": {"o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"},
    }
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


def test_a_router_is_not_converted() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.proj = nn.Linear(32, 16), nn.Linear(32, 32)

    layer = Routed()
    assert convert_layers([layer], ROWWISE) == ["proj"]
    assert type(layer.gate) is nn.Linear
    routed = skeleton(mixture().config)
    assert "self_attn.q_proj" in convert_layers(list(routed.model.layers), ROWWISE)


def test_what_can_not_be_converted_is_refused() -> None:
    layers = [nn.Sequential(nn.Linear(32, 32))]
    with pytest.raises(ValueError, match=r"train\.fp8\.keep: no linear layer is called q_proj; there are 0"):
        convert_layers(layers, ROWWISE.model_copy(update={"keep": ["q_proj"]}))
    with pytest.raises(ValueError, match=r"no linear layer of Sequential can be computed in fp8, .*multiples of 16"):
        convert_layers([nn.Sequential(nn.Linear(24, 32))], ROWWISE)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"train\.fp8\.training=rowwise: a CPU does not multiply in fp8"):
            convert_layers(layers, Fp8Config(training="rowwise"))


def rounded(x: Tensor, dim: int | None) -> Tensor:
    """float64: to fp8 (e4m3, 3 bits of mantissa, at most 448) and back, by the largest of all, or of each slice."""
    largest = x.abs().max() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = 448 / largest
    if dim is not None:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    scaled = (x * scale).clamp(-448, 448)
    step = torch.exp2(torch.floor(torch.log2(scaled.abs().clamp(min=2.0**-6))) - 3)
    return (scaled / step).round() * step / scale


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_gives_the_product_of_what_is_rounded(recipe: Any) -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(64, 48, bias=False)).bfloat16()
    x = (3 * torch.randn(21, 64)).bfloat16()
    plain = layer(x).detach().double()
    dim = 1 if recipe == "rowwise" else None
    expected = rounded(x.double(), dim) @ rounded(layer[0].weight.detach().double(), dim).T
    convert_layers([layer], ROWWISE.model_copy(update={"training": recipe}))
    found = layer(x).detach().double()
    size = float(expected.abs().mean())
    assert float((found - expected).abs().mean()) < 0.004 * size, "but for bfloat16, in which it is given"
    assert float((plain - expected).abs().mean()) > 0.02 * size, "rounding must have been seen"


def test_by_rows_a_token_does_not_depend_on_those_beside_it() -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(64, 48)).bfloat16()
    convert_layers([layer], ROWWISE)
    x = torch.randn(21, 64).bfloat16()
    x[1:] *= 100
    assert torch.equal(layer(x)[:1], layer(x[:1]))


# ----------------------------------------------------------------------------------------------- in the ranks


def in_a_rank(rank: int, folder: Path) -> dict[str, Any]:
    policy = folder / "qwen3"
    recipes: dict[str, Any] = {recipe: Fp8Config(training=recipe, emulate=True) for recipe in RECIPES}  # type: ignore[arg-type]
    return {
        "passes": {name: a_pass(policy, fp8) for name, fp8 in {"bfloat16": None, **recipes}.items()},
        "recomputed": a_pass(policy, ROWWISE, activation_checkpointing=True),
        "adapters": a_pass(policy, ROWWISE, lora=LoraConfig(rank=4)),
        "refused": refusal(policy),
        "steps": steps(policy),
    }


def a_pass(policy: Path, fp8: Fp8Config | None, **how: Any) -> dict[str, Any]:
    """Log-probabilities of the batch, of which both ranks have all, and gradients of a weighted sum of them."""
    model = build(policy, dtype=torch.bfloat16, fp8=fp8, **how)
    model.train()
    batch = some_batch()
    log_probs, _ = token_log_probs(model, batch)
    (log_probs * torch.linspace(-1, 1, len(batch.tokens))).sum().backward()
    return {
        "log_probs": log_probs.detach(),
        "gradients": {plain_name(n): whole_tensor(p.grad) for n, p in model.named_parameters() if p.grad is not None},
        "kinds": kinds(model),
        "types": {str(parameter.dtype) for parameter in model.parameters()},
        "names": {plain_name(name) for name, _ in held(model)},
    }


def refusal(policy: Path) -> str:
    try:
        build(policy, dtype=torch.bfloat16, fp8=Fp8Config(training="rowwise"))
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def steps(policy: Path) -> dict[str, Any]:
    """As a job would: the reference, updates of actor and critic, a published model."""
    config = TrainConfig.model_validate(
        {
            "ranks": 2,
            "dtype": "bfloat16",
            "fp8": {"training": "rowwise", "emulate": True},
            "optimizer": {"learning_rate": 1e-2, "warmup_steps": 0},
            "algorithm": {"name": "ppo", "critic": {"learning_rate": 1e-2}},
        }
    )
    actor = ActorWorker(policy=policy, config=config, peers={})
    peers = {"actor": actor}
    reference = ReferenceWorker(policy=policy, config=config, peers=peers)
    critic = CriticWorker(policy=policy, config=config, peers=peers)
    batch = some_batch()
    part = batch.select(own_part(batch))
    before = actor.log_probs(part)
    as_reference = reference.log_probs(part)
    part = part.with_(old_log_probs=before, values=critic.values(part), returns=part.advantages)
    of_actor = [actor.update(part)["loss"] for _ in range(6)]
    of_critic = [critic.update(part)["value_loss"] for _ in range(6)]
    out = policy.with_name("candidate")
    out.mkdir(exist_ok=True)
    torch.distributed.barrier()
    actor.export(out)
    return {
        "at the start": (before, as_reference),
        "losses": (of_actor, of_critic),
        "kinds": {name: kinds(w.model) for name, w in (("reference", reference), ("critic", critic))},
    }


# ------------------------------------------------------------------------------------------------------- tests


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("float8")
    torch.manual_seed(3)
    qwen3().save_pretrained(folder / "qwen3")
    run_ranks(2, in_a_rank, folder)
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    return found_by(2, folder)


def flat(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([gradients[name].flatten().float() for name in sorted(gradients)])


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_sharded_model_in_fp8_is_near_to_one_in_bfloat16_and_has_its_parameters(
    found: list[dict[str, Any]], recipe: str
) -> None:
    for ranks_own in found:
        exact, seen = ranks_own["passes"]["bfloat16"], ranks_own["passes"][recipe]
        mask = some_batch().response_mask
        difference = (seen["log_probs"] - exact["log_probs"])[mask].abs()
        assert 1e-3 < float(difference.mean()) < 0.1
        assert seen["gradients"].keys() == exact["gradients"].keys()
        assert 0.95 < float(torch.cosine_similarity(flat(seen["gradients"]), flat(exact["gradients"]), dim=0)) < 0.9999
        assert seen["kinds"]["Linear"] == {"lm_head"}
        assert (seen["names"], seen["types"]) == (exact["names"], {"torch.float32"})


def test_recomputed_activations_give_the_same_gradients(found: list[dict[str, Any]]) -> None:
    for ranks_own in found:
        kept, recomputed = ranks_own["passes"]["rowwise"], ranks_own["recomputed"]
        torch.testing.assert_close(recomputed["log_probs"], kept["log_probs"], atol=0, rtol=0)
        torch.testing.assert_close(recomputed["gradients"], kept["gradients"], atol=0, rtol=0)


def test_adapters_stay_in_bfloat16_over_a_base_in_fp8(found: list[dict[str, Any]]) -> None:
    for ranks_own in found:
        seen = ranks_own["adapters"]
        assert seen["kinds"]["Float8Linear"] == {"base_layer"}
        assert seen["kinds"]["Linear"] == {"default", "lm_head"}, "A and B of each adapter are called default"
        torch.testing.assert_close(seen["log_probs"], ranks_own["passes"]["rowwise"]["log_probs"], atol=0, rtol=0)
        assert all(".lora_" in name for name in seen["gradients"])
        assert any(gradient.any() for name, gradient in seen["gradients"].items() if ".lora_B." in name)


def test_a_rank_on_a_cpu_refuses_by_name(found: list[dict[str, Any]]) -> None:
    if torch.cuda.is_available():
        pytest.skip("is of a CPU")
    for ranks_own in found:
        assert ranks_own["refused"].startswith("train.fp8.training=rowwise: a CPU does not multiply in fp8")


def test_actor_reference_and_critic_compute_alike_and_learn(folder: Path, found: list[dict[str, Any]]) -> None:
    for ranks_own in found:
        seen = ranks_own["steps"]
        torch.testing.assert_close(*seen["at the start"], atol=0, rtol=0)
        for losses in seen["losses"]:
            assert losses[-1] < losses[0]
        assert seen["kinds"]["reference"]["Linear"] == {"lm_head"}
        assert seen["kinds"]["critic"]["Linear"] == {"score"}
    assert stored_dtypes(folder / "candidate") == stored_dtypes(folder / "qwen3")
