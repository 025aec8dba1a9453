"""What an algorithm is set to where the config says nothing: what its paper has."""

from __future__ import annotations

from typing import Any

from train.config.algorithms import DEFAULTS, ONLINE, AlgorithmConfig
from train.config.training import TrainConfig


def settings_of(name: str, max_tokens: int = 256, **options: Any) -> AlgorithmConfig:
    config = {"algorithm": {"name": name, **options}, "rollout": {"max_tokens": max_tokens}}
    return TrainConfig.model_validate(config).algorithm


def test_unconfigured_an_algorithm_is_as_its_paper_has_it() -> None:
    dapo = settings_of("dapo", max_tokens=20_480)
    assert (dapo.clip_low, dapo.clip_high, dapo.aggregation) == (0.2, 0.28, "token_mean")
    assert (dapo.overlong_buffer, dapo.overlong_penalty) == (4096, 1.0)
    assert dapo.resample_rounds > 0
    assert (settings_of("gspo").clip_low, settings_of("gspo").clip_high) == (3e-4, 4e-4)
    assert settings_of("cispo").clip_low == 1.0
    assert settings_of("grpo").aggregation == settings_of("gspo").aggregation == "sequence_mean"
    for name in ("dr_grpo", "rloo", "remax"):
        assert (settings_of(name).aggregation, settings_of(name).max_tokens) == ("constant_length", 256)
    for name in ("rloo", "remax", "reinforce_pp", "ppo"):
        assert (settings_of(name).kl.placement, settings_of(name).kl.estimator) == ("reward", "k1")
    kl = settings_of("reinforce_pp_baseline").kl
    assert (kl.placement, kl.estimator) == ("loss", "k2")


def test_the_kl_has_no_weight_until_it_is_given_one() -> None:
    assert {settings_of(name).kl.coefficient for name in ONLINE} == {0.0}


def test_a_setting_in_a_section_leaves_the_papers_others_as_they_are() -> None:
    kl = settings_of("reinforce_pp", kl={"coefficient": 0.2}).kl
    assert (kl.coefficient, kl.placement, kl.estimator) == (0.2, "reward", "k1")
    assert DEFAULTS["reinforce_pp"]["kl"] == {"placement": "reward", "estimator": "k1"}


def test_lengths_that_are_given_are_not_those_of_the_longest_response() -> None:
    assert settings_of("dapo", overlong_buffer=0).overlong_buffer == 0
    given = TrainConfig.model_validate({"algorithm": {"name": "dr_grpo", "max_tokens": 50}})
    assert given.algorithm.max_tokens == 50


def test_a_config_that_is_written_down_and_read_again_is_the_same() -> None:
    for name in ONLINE:
        config = TrainConfig.model_validate({"algorithm": {"name": name}})
        assert TrainConfig.model_validate(config.model_dump(mode="json")) == config
