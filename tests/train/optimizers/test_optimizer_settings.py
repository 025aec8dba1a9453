"""Learning rates, groups of parameters, and settings that don't go together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from tests.train.tiny_models import mixture, qwen3
from train.config.sections import OptimizerConfig
from train.config.training import TrainConfig
from train.optimizers.build import body_matrices, make_optimizer, parameter_groups
from train.optimizers.schedule import share_of_peak
from train.run.recovery.resume_settings import differing_settings


@pytest.mark.parametrize(
    ("settings", "shares"),
    [
        ({"warmup_steps": 2}, [1 / 3, 2 / 3, 1, 1, 1, 1]),
        ({"warmup_steps": 0, "schedule": "linear"}, [1, 0.8, 0.6, 0.4, 0.2, 0]),
        ({"warmup_steps": 1, "schedule": "linear", "final_learning_rate": 0.2}, [0.5, 1, 0.8, 0.6, 0.4, 0.2]),
        ({"warmup_steps": 1, "schedule": "cosine"}, [0.5, 1, (2 + 2**0.5) / 4, 0.5, (2 - 2**0.5) / 4, 0]),
    ],
)
def test_the_learning_rate_rises_and_falls_to_its_end(settings: dict[str, Any], shares: list[float]) -> None:
    config = OptimizerConfig.model_validate(settings)
    assert [share_of_peak(step, config, 6) for step in range(6)] == pytest.approx(shares)
    assert share_of_peak(9, config, 6) == pytest.approx(shares[-1]), "more steps than were expected stay at the end"


def test_the_schedule_of_the_policy_has_as_many_steps_as_it_learns_in() -> None:
    critic = {"name": "ppo", "critic": {"warmup_steps": 3}}
    config = TrainConfig.model_validate({"steps": 10, "minibatches": 2, "epochs": 2, "algorithm": critic})
    assert (config.updates, config.updates_of_policy) == (40, 28)


def test_a_run_goes_on_with_other_steps_only_if_its_learning_rate_does_not_end_with_them() -> None:
    for schedule, differs in (("constant", []), ("cosine", ["train.steps is 9, it was 8"])):
        before, after = (TrainConfig(steps=n, optimizer={"schedule": schedule}) for n in (8, 9))  # type: ignore[arg-type]
        assert differing_settings(before.model_dump(mode="json"), after) == differs


def rates_and_decays(**settings: Any) -> dict[str, tuple[float, float]]:
    model = qwen3()
    config = OptimizerConfig.model_validate({"weight_decay": 0.1, **settings})
    names = {id(p): name for name, p in model.named_parameters()}
    optimizer = make_optimizer(model, config, 1.0, all_patterns_fit=True)
    found = {names[id(p)]: (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    assert found.keys() == set(names.values())
    return found


def test_vectors_do_not_decay_unless_a_setting_says_so() -> None:
    found = rates_and_decays()
    assert found["model.norm.weight"] == found["model.layers.0.self_attn.q_norm.weight"] == (1.0, 0.0)
    assert found["model.embed_tokens.weight"] == found["model.layers.1.mlp.up_proj.weight"] == (1.0, 0.1)
    assert set(rates_and_decays(decay_vectors=True).values()) == {(1.0, 0.1)}


def test_of_the_groups_that_fit_the_first_counts() -> None:
    groups = [
        {"pattern": r"layers\.0\..*proj", "learning_rate_factor": 0.5},
        {"pattern": "norm", "weight_decay": 0.3},
        {"pattern": r"layers\.0\.", "learning_rate_factor": 0.1, "weight_decay": 0.0},
        {"pattern": "embed", "weight_decay": 0.0},
    ]
    groups[2]["pattern"] = "layers"
    found = rates_and_decays(groups=groups)
    assert found["model.layers.0.mlp.up_proj.weight"] == (0.5, 0.1)
    assert found["model.layers.0.input_layernorm.weight"] == (1.0, 0.3)
    assert found["model.layers.1.mlp.up_proj.weight"] == (0.1, 0.0)
    assert found["model.embed_tokens.weight"] == (1.0, 0.0)


def test_muon_is_for_the_linear_layers_of_the_body_and_nothing_else() -> None:
    model = qwen3()
    config = OptimizerConfig(name="muon", groups=[{"pattern": "mlp", "learning_rate_factor": 2}])  # type: ignore[list-item]
    matrices, others = parameter_groups(model, config, 1.0, all_patterns_fit=True)
    assert [(group["lr"], len(group["params"])) for group in matrices] == [(1.0, 8), (2.0, 6)]
    assert {p.ndim for group in matrices for p in group["params"]} == {2}
    assert sum(len(group["params"]) for group in others) == len(list(model.parameters())) - 14
    experts = mixture()
    names = {id(p): name for name, p in experts.named_parameters()}
    found = [names[id(p)] for p in body_matrices(experts)]
    assert found
    assert not any("experts" in name for name in found)


def test_muon_of_a_model_without_linear_layers_in_training_is_refused() -> None:
    model = qwen3().requires_grad_(False)
    model.model.norm.weight.requires_grad_(True)
    with pytest.raises(ValueError, match="muon: Qwen3ForCausalLM trains no linear layers inside its body"):
        make_optimizer(model, OptimizerConfig(name="muon"), 1.0, all_patterns_fit=True)


def without_decay(groups: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.Rprop(groups, lr=lr)


def test_a_users_optimizer_without_weight_decay_is_not_given_one() -> None:
    config = OptimizerConfig(name=f"{__name__}:without_decay", weight_decay=0.1)
    with pytest.raises(ValueError, match="without_decay' has no weight_decay"):
        make_optimizer(qwen3(), config, 1.0, all_patterns_fit=True)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"optimizer": {"name": "adam"}}, "train.optimizer.name|optimizer.name"),
        ({"optimizer": {"momentum": 0.9}}, "momentum=0.9 is of muon and sgd, and name is adamw"),
        ({"optimizer": {"name": "sgd", "betas": [0.8, 0.9]}}, "are of adamw, adamw_8bit and muon, and name is sgd"),
        ({"optimizer": {"options": {"eps": 1}}}, "are of an optimizer of your own, and name is adamw"),
        ({"optimizer": {"final_learning_rate": 0.1}}, "final_learning_rate=0.1 is of schedule=linear and cosine"),
        ({"optimizer": {"groups": [{"pattern": "("}]}}, "is no regular expression"),
        (
            {"steps": 3, "optimizer": {"schedule": "cosine", "warmup_steps": 3}},
            "warmup_steps=3 leaves train.optimizer.schedule=cosine none of the 3 optimizer steps",
        ),
        ({"fsdp": {"cpu_offload": True, "offload_optimizer": True}}, "take offload_optimizer out"),
        ({"fsdp": {"cpu_offload": True, "offload_while_generating": True}}, "take offload_while_generating out"),
        (
            {
                "fsdp": {"offload_while_generating": True},
                "placement": {
                    "pools": {"a": {"ranks": 1}, "b": {"ranks": 1}},
                    **{"actor": "a", "reference": "a", "rollout": "b"},
                },
            },
            "train.placement.rollout=b has devices of its own; take it out",
        ),
        (
            {"ranks": 2, "fsdp": {"compile_layers": "inductor", "tensor_parallel": 2}},
            "compile_layers=inductor: ranks that share layers",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        TrainConfig.model_validate(settings)
