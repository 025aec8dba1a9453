"""A class of the user's own, changes to a config, and code that comes with a policy: what is refused before a start."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BloomConfig, FalconConfig, PreTrainedModel

from deploy.examples.demo.seed import make_untrained
from evaluation.suites.held_out import HeldOut
from feedback.config import ModelConfig
from feedback.scoring.sources.reward_model import RewardModel, RewardModelError
from feedback.trusted_code import UntrustedCode, code_files, consent_to
from serve.policies import probe
from serve.vllm.boot import offline_engine
from tests.train.ranks import run_ranks
from tests.train.tiny_models import qwen3
from tests.train.tiny_own_model import CROSSING, SOURCE, put_tiny_model
from train.config.sections import PolicyModelConfig
from train.config.training import TrainConfig
from train.model.fsdp import build, skeleton
from train.model.scalar_head import build_with_scalar_head
from train.own_model.model_class import maker, own_class, prepare
from train.own_model.overrides import model_folder, read_config
from train.own_model.separation import policy_outputs, require_apart, scalar_outputs
from train.planner.model_shape import ModelNotPlanned
from train.planner.model_shape import read_config as planned_config
from train.run.reward_model import read_as_trained
from train.workers.critic import require_same_tokens


class NoModel:
    pass


class Unconfigured(PreTrainedModel):
    pass


@pytest.fixture(autouse=True)
def no_consent() -> Iterator[None]:
    consent_to({})
    yield
    consent_to({})


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    qwen3().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def coded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("coded") / "policy"
    make_untrained(folder)
    put_tiny_model(folder, module="modeling_tiny")
    return folder


def overriding(**overrides: Any) -> PolicyModelConfig:
    return PolicyModelConfig(config_overrides=overrides)


# ------------------------------------------------------------------------------------------------------- the class


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{__name__}:NoModel", "is not a subclass of transformers"),
        (f"{__name__}:Absent", "has no 'Absent'"),
        ("no_such_module_anywhere:Model", "can't be imported"),
        (f"{__name__}:Unconfigured", "has no config_class"),
    ],
)
def test_a_class_that_is_no_model_is_refused_by_the_setting(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"train\.model\.class='{name}'.* {message}"):
        own_class(PolicyModelConfig.model_validate({"class": name}))


def test_a_class_of_another_kind_of_config_is_refused(policy: Path) -> None:
    make = maker(PolicyModelConfig.model_validate({"class": "transformers:LlamaForCausalLM"}))
    with pytest.raises(ValueError, match=r"is of LlamaConfig, and the policy's config\.json of Qwen3Config"):
        make(read_config(policy, PolicyModelConfig()))


def test_a_critic_of_ones_own_class_is_refused() -> None:
    with pytest.raises(ValueError, match=r"train\.model\.class=a:B: a critic is made of transformers' own class"):
        TrainConfig.model_validate({"model": {"class": "a:B"}, "algorithm": {"name": "ppo"}})


# ------------------------------------------------------------------------------------------------------- overrides


def test_overrides_change_the_config_alone_and_leave_the_policy_as_it_is(policy: Path, tmp_path: Path) -> None:
    before = (policy / "config.json").read_bytes()
    folder = model_folder(overriding(sliding_window=32, max_position_embeddings=128), policy, tmp_path)
    changed, stored = (json.loads((of / "config.json").read_text()) for of in (folder, policy))
    assert changed == stored | {"sliding_window": 32, "max_position_embeddings": 128}
    assert (folder / "model.safetensors").read_bytes() == (policy / "model.safetensors").read_bytes()
    assert (policy / "config.json").read_bytes() == before
    assert read_config(policy, overriding(max_position_embeddings=128)).max_position_embeddings == 128


def test_what_the_policy_has_already_is_no_change(policy: Path, tmp_path: Path) -> None:
    assert model_folder(overriding(max_position_embeddings=64), policy, tmp_path) == policy
    assert model_folder(PolicyModelConfig(), policy, tmp_path) == policy


def test_an_unknown_key_is_refused_by_name(policy: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config_overrides\.slidin_window: .* did you mean sliding_window\?"):
        model_folder(overriding(slidin_window=32), policy, tmp_path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"hidden_size": 64, "attention_dropout": 0.1}, r"\{'hidden_size': 64\} contradicts .* has shape \[67, 32\]"),
        (
            {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3},
            r"would have model\.layers\.2\.\S+, of which there are none",
        ),
        (
            {"num_hidden_layers": 1, "layer_types": ["full_attention"]},
            r"would have no model\.layers\.1\.\S+, which they have",
        ),
        ({"tie_word_embeddings": False}, r"would have lm_head\.weight, of which there are none"),
        ({"num_key_value_heads": 4}, r"k_proj\.weight has shape \[16, 32\], and would have \[32, 32\]"),
    ],
)
def test_what_contradicts_the_weights_is_refused(
    policy: Path, tmp_path: Path, overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=rf"train\.model\.config_overrides=.*{message}"):
        model_folder(overriding(**overrides), policy, tmp_path)
    assert not (tmp_path / "model").exists()


def test_a_value_that_the_config_refuses_is_refused_with_its_reason(policy: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config_overrides=\{'hidden_act': 7\}: Qwen3Config refuses it"):
        model_folder(overriding(hidden_act=7), policy, tmp_path)


def test_keys_that_say_what_a_model_is_are_no_overrides() -> None:
    with pytest.raises(ValueError, match="model_type is no value to override"):
        overriding(model_type="llama")
    with pytest.raises(ValueError, match="quantization_config is no value to override"):
        overriding(text_config={"quantization_config": {}})


def test_the_planner_reads_the_overrides(policy: Path) -> None:
    assert planned_config(policy, overriding(max_position_embeddings=128)).max_position_embeddings == 128
    with pytest.raises(ModelNotPlanned, match="has no such key"):
        planned_config(policy, overriding(no_such_key=1))


def test_settings_keep_the_name_of_the_class_when_they_are_handed_on() -> None:
    config = TrainConfig.model_validate({"model": {"class": "a:B", "trusted_code": {"a.py": "0" * 64}}})
    dump = config.model_dump(mode="json")
    assert dump["model"]["class"] == "a:B"
    assert dump["model"]["trusted_code"] == {"a.py": ["0" * 64]}
    assert TrainConfig.model_validate(dump).model == config.model


# ------------------------------------------------------------------------------------------------------------ code


LOADERS: dict[str, Callable[[Path], object]] = {
    "an engine of vLLM": lambda folder: offline_engine(folder),
    "the probe": probe.measure,
    "the planner": planned_config,
    "held-out items": lambda folder: HeldOut(policy=folder, share=0.1)._tokenizer,
    "a critic": lambda folder: require_same_tokens(folder, folder),
    "a trained reward model": read_as_trained,
    "the start of a run": lambda folder: model_folder(PolicyModelConfig(), folder, folder.parent),
}


@pytest.mark.parametrize("loader", LOADERS)
def test_whoever_loads_a_policy_refuses_its_code_without_consent(loader: str, coded: Path) -> None:
    with pytest.raises(ValueError, match=r"modeling_tiny\.py is not named"):
        LOADERS[loader](coded)
    consent_to({"modeling_tiny.py": ["0" * 64]})
    with pytest.raises(ValueError, match=r"modeling_tiny\.py has changed"):
        LOADERS[loader](coded)


def test_a_reward_model_with_code_is_refused_without_consent(coded: Path) -> None:
    with pytest.raises(RewardModelError, match=r"modeling_tiny\.py is not named"):
        RewardModel(ModelConfig(name=str(coded))).by_row(
            pa.table({"prompt": ["a"], "messages": [None], "response": ["b"]})
        )


def test_code_that_was_allowed_is_the_model(coded: Path) -> None:
    prepare(PolicyModelConfig.model_validate({"trusted_code": code_files(coded)}))
    config = planned_config(coded)
    assert type(config).__name__ == "TinyConfig"
    assert type(skeleton(config)).__name__ == "TinyLM"
    assert len(probe.measure(coded)["tokens"]) > 0


# -------------------------------------------------------------------------------------------------- in two ranks


THEIR_OWN = {
    "falcon": FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
    "bloom": BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4),
}
"""Models of transformers' that make their attention themselves."""


def in_a_rank(rank: int, folder: Path, coded: Path) -> dict[str, str]:
    import torch

    found = {}
    for name in ("apart", "crossing"):
        of_rank = folder / name
        prepare(PolicyModelConfig.model_validate({"trusted_code": code_files(of_rank)}))
        makers: dict[str, tuple[Callable[..., nn.Module], Callable[..., Tensor]]]
        makers = {"policy": (build, policy_outputs), "critic": (build_with_scalar_head, scalar_outputs)}
        for kind, (make, outputs) in makers.items():
            try:
                require_apart(make(of_rank, dtype=torch.float32), torch.float32, outputs)
                found[f"{kind} {name}"] = "apart"
            except ValueError as error:
                found[f"{kind} {name}"] = str(error)
    for name in THEIR_OWN:
        try:
            require_apart(build(folder / name, dtype=torch.float32), torch.float32)
            found[name] = "apart"
        except ValueError as error:
            found[name] = str(error)
    try:
        build(coded, dtype=torch.float32)
    except UntrustedCode as error:
        found["revoked"] = str(error)
    return found


def test_ranks_load_code_together_and_refuse_a_model_that_mixes_sequences(coded: Path, tmp_path: Path) -> None:
    for name, source in (("apart", SOURCE + "# apart\n"), ("crossing", CROSSING)):
        (tmp_path / name).mkdir()
        for file in coded.iterdir():
            (tmp_path / name / file.name).write_bytes(file.read_bytes())
        (tmp_path / name / "modeling_tiny.py").write_text(source)
    for name, config in THEIR_OWN.items():
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name)
    for found in run_ranks(2, in_a_rank, tmp_path, coded):
        for kind in ("policy", "critic"):
            assert found[f"{kind} apart"] == "apart"
            assert "gives a sequence other outputs where others lie before it in a batch" in found[f"{kind} crossing"]
        for name in THEIR_OWN:
            assert "gives a sequence other outputs where others lie before it in a batch" in found[name]
        assert "modeling_tiny.py has changed" in found["revoked"]
