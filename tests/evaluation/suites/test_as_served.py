"""The gate's engine and the server's compute a policy alike: one type, one tokenizer, one end."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from evaluation.config import EngineConfig, EvaluationConfig
from evaluation.engine import OfflineEngine, Work
from evaluation.suites import answers
from evaluation.suites.suite import Suite
from loadtests.tiny_model import make_model_folder
from serve.config import EngineConfig as ServingConfig
from serve.generation.request import Generated
from serve.policies.folder import PolicyInvalid, compute_dtype, declared_dtype
from serve.policies.store import Policy, PolicyStore
from serve.vllm.engine import Engine, Sampling
from tests.evaluation.conftest import MIB, write_policy

TOKENS = 24


def in_type(stored: torch.dtype, /, **config: object) -> Callable[[Path], None]:
    """Writes a policy that is stored in a type, and whose config says so, or says ``config`` instead."""

    def write(folder: Path) -> None:
        write_policy(folder, 7)
        weights = load_file(folder / "model.safetensors")
        save_file(
            {k: v.to(stored) for k, v in weights.items()}, folder / "model.safetensors", metadata={"format": "pt"}
        )
        config_json = json.loads((folder / "config.json").read_text())
        del config_json["dtype"]
        config_json |= config or {"torch_dtype": str(stored).removeprefix("torch.")}
        (folder / "config.json").write_text(json.dumps(config_json))
        # Two tokens end a response, and only this file says so.
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 12]}))

    return write


def publish(root: Path, write: Callable[[Path], None]) -> Policy:
    return PolicyStore(root).publish(write, parent=None, lineage={}, metrics={})


async def served(policy: Policy, prompts: list[str]) -> tuple[str, list[list[int]], list[Generated]]:
    """The server's engine on a policy: its type, the prompts' tokens, and the greedy response to each."""
    engine = Engine(ServingConfig(kv_cache_bytes=8 * MIB, threads=1))
    try:
        await engine.start(policy)
        encoded_prompts = [await engine.text.encode(prompt, special_tokens=True) for prompt in prompts]
        answers = [
            await engine.generate(str(i), ids, Sampling(max_tokens=TOKENS, temperature=0))
            for i, ids in enumerate(encoded_prompts)
        ]
        return engine.dtype, encoded_prompts, [answer.responses[0] for answer in answers]
    finally:
        await engine.close()


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.long), torch.bfloat16], ids=str)
def test_the_gate_computes_in_the_servers_type_and_its_greedy_answers_are_the_servers_token_by_token(
    tmp_path: Path, suite: Suite, dtype: torch.dtype
) -> None:
    policy = publish(tmp_path, in_type(dtype))
    prompts = [item.prompt for item in suite.items[:24] if item.prompt is not None]
    serving, encoded_prompts, answers = asyncio.run(served(policy, prompts))
    with OfflineEngine(policy.path, EngineConfig(max_num_seqs=64, kv_cache_bytes=8 * MIB)) as engine:
        judging = engine.dtype
        encoded = engine.encode(prompts)
        # One at a time, as the server ran them: in 16 bits the size of a batch decides how sums are rounded.
        judged = [engine.run(Work(greedy=[ids]), max_tokens=TOKENS).greedy[0] for ids in encoded]
    assert serving == judging == str(dtype).removeprefix("torch.")
    assert encoded == encoded_prompts
    assert [g.token_ids for g in judged] == [g.token_ids for g in answers]
    assert [(g.text, g.finish_reason) for g in judged] == [(g.text, g.finish_reason) for g in answers]
    assert any(answer.token_ids[-1] == 12 for answer in answers), "the second token that ends a response never came"


def test_a_response_that_is_cut_within_a_character_has_all_of_its_text(tmp_path: Path) -> None:
    model = make_model_folder(tmp_path / "model", 1, letters="Ã", eos=False)  # the first of two bytes of a character
    with OfflineEngine(model, EngineConfig(kv_cache_bytes=8 * MIB)) as engine:
        [answer] = engine.run(Work(greedy=[[2, 2]]), max_tokens=8).greedy
    assert 2 in answer.token_ids
    assert answer.text == AutoTokenizer.from_pretrained(model).decode(answer.token_ids, skip_special_tokens=True)


def test_an_engine_starts_with_the_longest_context_that_is_worked_out_for_its_cache(tmp_path: Path) -> None:
    model = make_model_folder(tmp_path / "model", 1, context=4096)
    block = 128 * 2 * 2 * 1 * 32 * 4  # tokens, keys and values, layers, heads, head size, float32
    with OfflineEngine(model, EngineConfig(kv_cache_bytes=20 * block)) as engine:
        assert engine.max_model_len == 19 * 128


@pytest.mark.parametrize(
    ("write", "dtype"),
    [
        (in_type(torch.float32), "float32"),
        (in_type(torch.float16), "float16"),
        (in_type(torch.bfloat16, dtype="torch.bfloat16"), "bfloat16"),
        (in_type(torch.bfloat16, dtype="auto"), "bfloat16"),
        (in_type(torch.bfloat16, dtype=None), "bfloat16"),
        (in_type(torch.float32, dtype="bfloat16"), "bfloat16"),
        (in_type(torch.float32, text_config={"dtype": "bfloat16"}), "bfloat16"),
    ],
)
def test_a_policy_is_computed_in_what_its_config_says_and_else_in_what_it_is_stored_in(
    tmp_path: Path, write: Callable[[Path], None], dtype: str
) -> None:
    policy = publish(tmp_path, write)
    assert compute_dtype(policy.path, "auto") == dtype
    assert compute_dtype(policy.path, "float16") == "float16"


def test_tensors_of_several_types_are_computed_in_one_that_holds_them_all(tmp_path: Path) -> None:
    policy = publish(tmp_path, in_type(torch.bfloat16, dtype=None))
    weights = load_file(policy.path / "model.safetensors")
    for other, dtype in ((torch.float32, "float32"), (torch.float16, "float32"), (torch.int8, "bfloat16")):
        mixed = weights | {"model.norm.weight": weights["model.norm.weight"].to(other)}
        save_file(mixed, policy.path / "model.safetensors")
        assert declared_dtype(policy.path) == dtype


def test_a_type_that_no_engine_computes_in_is_refused_with_what_to_set(tmp_path: Path) -> None:
    policy = publish(tmp_path, in_type(torch.float32, dtype="float64"))
    with pytest.raises(PolicyInvalid, match=r"dtype float64.*set serve\.engine\.dtype"):
        compute_dtype(policy.path, "auto")
    assert compute_dtype(policy.path, "float32") == "float32"


def test_answers_are_kept_by_the_type_they_were_computed_in_and_not_by_the_settings_name_for_it(
    tmp_path: Path, config: EvaluationConfig
) -> None:
    wide, narrow = (publish(tmp_path / name, in_type(getattr(torch, name))) for name in ("float32", "bfloat16"))

    def key(policy: Policy, **engine: object) -> str:
        changed = config.engine.model_copy(update=engine)
        return answers.settings_hash(policy, config.model_copy(update={"engine": changed}))

    assert key(wide, dtype="auto") == key(wide, dtype="float32") == key(narrow, dtype="float32")
    assert key(narrow, dtype="auto") == key(wide, dtype="bfloat16") != key(wide, dtype="auto")
    assert key(wide, log_level="DEBUG") == key(wide)
    changes = {"max_model_len": 64, "enforce_eager": False, "tensor_parallel_size": 2, "extra": {"block_size": 16}}
    assert len({key(wide), *(key(wide, **{name: value}) for name, value in changes.items())}) == 5


def test_scores_are_of_the_samples_that_the_incumbent_made_in_its_own_type(
    tmp_path: Path, suite: Suite, config: EvaluationConfig
) -> None:
    wide, narrow = (publish(tmp_path / name, in_type(getattr(torch, name))) for name in ("float32", "bfloat16"))
    settings = [
        config.model_copy(update={"engine": config.engine.model_copy(update={"dtype": dtype})})
        for dtype in ("auto", "float32")
    ]
    paths = {answers._path(wide, suite, each, tmp_path) for each in settings}
    scores = {answers._scored_path(wide, narrow, suite, each, tmp_path) for each in settings}
    assert (len(paths), len(scores)) == (1, 2)


def test_another_template_or_tokenizer_makes_another_policy_whose_answers_are_its_own(
    tmp_path: Path, suite: Suite, config: EvaluationConfig
) -> None:
    one = publish(tmp_path, in_type(torch.float32))

    def edited(folder: Path) -> None:
        shutil.copytree(one.path, folder, dirs_exist_ok=True)
        (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")

    paths = {answers._path(policy, suite, config, tmp_path) for policy in (one, publish(tmp_path, edited))}
    assert len(paths) == 2


def test_answers_are_kept_by_the_device_that_computed_them(
    tmp_path: Path, config: EvaluationConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = publish(tmp_path, in_type(torch.float32))
    here = answers.settings_hash(policy, config)
    assert answers._device().startswith(("cpu ", "gpu "))
    monkeypatch.setattr("evaluation.suites.answers._device", lambda: "gpu NVIDIA H200")
    assert answers.settings_hash(policy, config) != here


def test_answers_are_kept_by_the_context_that_memory_has_room_for(
    tmp_path: Path, config: EvaluationConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a container may be another one after its next start."""
    monkeypatch.setattr("serve.kv_cache.smallest_gpu", lambda: None)
    tuned = {"long": {"max_position_embeddings": 2**20}, "of another kind": {"kv_lora_rank": 8}}
    policies = {name: publish(tmp_path / name, in_type(torch.float32, **of)) for name, of in tuned.items()}
    policies["short"] = publish(tmp_path / "short", in_type(torch.float32))

    def keys(name: str, **engine: int | None) -> int:
        """How many there are on machines of two sizes."""
        changed = config.engine.model_copy(update={"kv_cache_bytes": None, **engine})
        found = set()
        for memory in (2**30, 2**31):
            monkeypatch.setattr("serve.kv_cache.machine_memory", lambda memory=memory: memory)
            found.add(answers.settings_hash(policies[name], config.model_copy(update={"engine": changed})))
        return len(found)

    assert [keys(name) for name in ("long", "of another kind", "short")] == [2, 2, 1]
    for said in ({"max_model_len": 64}, {"kv_cache_bytes": 8 * MIB}):
        assert [keys(name, **said) for name in policies] == [1, 1, 1]
