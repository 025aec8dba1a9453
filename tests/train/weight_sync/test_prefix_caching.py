"""Prompts are computed once for all responses, and never by other weights than those that answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from loadtests.tiny_model import make_model_folder
from tests.train.engine_turns import GREEDY_TOKENS, PROMPTS
from tests.train.torchrun_checks import answer_of_ranks


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("policy"), 1, eos=False, context=512)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the run with the defaults leaves its policy."""
    return tmp_path_factory.mktemp("trained")


def turns(policy: Path, folder: Path, **settings: Any) -> dict[str, Any]:
    return answer_of_ranks("tests.train.engine_turns", policy, folder, json.dumps(settings), ranks=1, timeout=600)


@pytest.fixture(scope="module")
def by_default(policy: Path, trained: Path) -> dict[str, Any]:
    return turns(policy, trained)


def test_a_prompt_is_computed_once_for_its_responses_and_again_after_a_sync(by_default: dict[str, Any]) -> None:
    assert by_default["hits of the first call"] >= 3 * 128 * 3  # three of four responses, of a block or more each
    assert by_default["hits after the sync"] == 0
    assert by_default["hits of a later call"] == by_default["hits of the first call"], "a call depends on none before"
    assert by_default["mismatch"] < 1e-4
    assert by_default["mismatch after"] < 1e-4
    assert by_default["versions"] == [[[0, 1]]] * 3


def test_greedy_tokens_after_a_sync_are_those_of_an_engine_that_starts_on_the_new_weights(
    by_default: dict[str, Any], policy: Path, trained: Path
) -> None:
    from evaluation.config import EngineConfig
    from evaluation.engine import OfflineEngine

    assert by_default["moved"] > 0.1, "the weights must have changed"
    AutoTokenizer.from_pretrained(policy).save_pretrained(trained)
    greedy = {"temperature": 0.0, "max_tokens": GREEDY_TOKENS}
    with OfflineEngine(trained, EngineConfig(dtype="float32", max_model_len=512, kv_cache_bytes=2**26)) as engine:
        fresh = [response.token_ids for response in engine.answer(PROMPTS, [greedy] * len(PROMPTS))]
    assert by_default["greedy"] == fresh


def test_a_cache_that_outlived_the_weights_would_be_seen(
    by_default: dict[str, Any], policy: Path, tmp_path: Path
) -> None:
    stale = turns(policy, tmp_path, stale=True)
    assert stale["hits after the sync"] > 0
    assert stale["mismatch"] < 1e-4
    assert stale["mismatch after"] > 1e-2
    assert stale["checksum"] == pytest.approx(by_default["checksum"], rel=1e-6)


def test_without_the_cache_the_same_tokens_are_likeliest(
    by_default: dict[str, Any], policy: Path, tmp_path: Path
) -> None:
    without = turns(policy, tmp_path, rollout={"enable_prefix_caching": False})
    assert (without["hits of the first call"], without["hits of a later call"]) == (0, 0)
    assert without["greedy"] == by_default["greedy"]


def test_what_is_trained_waits_elsewhere_while_an_engine_generates_and_all_of_it_is_the_same(
    by_default: dict[str, Any], policy: Path, tmp_path: Path
) -> None:
    away = turns(policy, tmp_path, fsdp={"offload_while_generating": True})
    before, at_log_probs, after = away["away"]
    assert (before, after) == (0, 0)
    assert at_log_probs > 0
    assert min(by_default["away"]) > 0
    for name in ("greedy", "tokens", "mismatch after", "checksum"):
        assert away[name] == by_default[name], name


@pytest.mark.parametrize("away", [False, True], ids=["side by side", "in turns"])
def test_what_was_computed_beside_an_adapter_is_not_read_beside_the_next_one(
    policy: Path, tmp_path: Path, away: bool
) -> None:
    """They have one slot, and for vLLM one name."""
    lora = {"rank": 8, "sync": "adapters"}
    found = turns(policy, tmp_path, lora=lora, learning_rate=3e-2, fsdp={"offload_while_generating": away})
    assert found["hits of the first call"] >= 3 * 128 * 3
    assert found["hits after the sync"] == 0
    assert found["moved"] > 1e-2, "the adapters must have changed"
    assert found["mismatch"] < 1e-4
    assert found["mismatch after"] < 1e-4
    assert found["versions"] == [[[0, 1]]] * 3
