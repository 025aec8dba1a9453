"""What may take a running policy's place."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from loadtests.tiny_model import make_model_folder
from serve.policies.store import Policy, PolicyStore
from serve.swap.compatibility import IncompatiblePolicy, computes_alike, require_compatible, require_finite

Edit = Callable[[dict[str, torch.Tensor]], object]


def with_weights(store: PolicyStore, model: Path, edit: Edit) -> Policy:
    def write(folder: Path) -> None:
        for path in model.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        weights = load_file(folder / "model.safetensors")
        edit(weights)
        save_file(weights, folder / "model.safetensors")

    return store.publish(write, parent=None, lineage={}, metrics={})


def test_another_policy_of_the_same_make_is_compatible(store: PolicyStore, model_folders: list[Path]) -> None:
    one, two = (store.publish(folder, parent=None, lineage={}, metrics={}) for folder in model_folders[:2])
    require_compatible(one, two)
    require_finite(two)


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda w: w.pop("model.norm.weight"), r"lacks the tensor model\.norm\.weight"),
        (lambda w: w.update(extra=torch.zeros(1)), "surplus tensor extra"),
        (lambda w: w.update({"model.norm.weight": torch.zeros(63)}), r"shape \[63\]"),
        (lambda w: w.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}), "I8"),
    ],
)
def test_other_tensors_are_refused(store: PolicyStore, model_folders: list[Path], edit: Edit, says: str) -> None:
    one = store.publish(model_folders[0], parent=None, lineage={}, metrics={})
    with pytest.raises(IncompatiblePolicy, match=says):
        require_compatible(one, with_weights(store, model_folders[1], edit))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_one_value_that_is_no_number_is_found(
    store: PolicyStore, model_folders: list[Path], dtype: torch.dtype, bad: float
) -> None:
    def edit(weights: dict[str, torch.Tensor]) -> None:
        weights["model.norm.weight"] = weights["model.norm.weight"].to(dtype)
        if dtype != torch.float64:
            weights["model.norm.weight"][0] = torch.finfo(dtype).max  # large is fine
        require = weights["model.norm.weight"]
        require[63] = bad

    with pytest.raises(IncompatiblePolicy, match=r"model\.norm\.weight.*NaN"):
        require_finite(with_weights(store, model_folders[0], edit))


def test_the_largest_finite_numbers_pass(store: PolicyStore, model_folders: list[Path]) -> None:
    def edit(weights: dict[str, torch.Tensor]) -> None:
        weights["model.norm.weight"] = torch.full((64,), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)

    require_finite(with_weights(store, model_folders[0], edit))


@pytest.mark.parametrize(("key", "value"), [("rms_norm_eps", 0.5), ("num_attention_heads", 4), ("rope_theta", 7.0)])
def test_another_architecture_is_refused_by_the_setting_that_differs(
    store: PolicyStore, model_folders: list[Path], tmp_path: Path, key: str, value: float
) -> None:
    one = store.publish(model_folders[0], parent=None, lineage={}, metrics={})
    other = tmp_path / "other"
    make_model_folder(other, 1)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {key: value, "transformers_version": "0"}))
    two = store.publish(other, parent=None, lineage={}, metrics={})
    with pytest.raises(IncompatiblePolicy, match=key):
        require_compatible(one, two)


def test_another_tokenizer_is_refused_but_leftovers_in_its_file_are_not(
    store: PolicyStore, model_folders: list[Path], tmp_path: Path
) -> None:
    one = store.publish(model_folders[0], parent=None, lineage={}, metrics={})
    other = make_model_folder(tmp_path / "other", 1)
    content = json.loads((other / "tokenizer.json").read_text())
    (other / "tokenizer.json").write_text(json.dumps(content | {"padding": {"strategy": "BatchLongest"}}))
    require_compatible(one, store.publish(other, parent=None, lineage={}, metrics={}))
    content["model"]["vocab"]["<pad>"], content["model"]["vocab"]["<eos>"] = 1, 0
    (other / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(IncompatiblePolicy, match=r"tokenizer\.json"):
        require_compatible(one, store.publish(other, parent=None, lineage={}, metrics={}))


Change = Callable[[Path], object]


def to_json(name: str, **changes: Any) -> Change:
    """Set keys of a JSON file, which is made where it isn't there."""

    def change(folder: Path) -> None:
        path = folder / name
        content = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(content | changes))

    return change


def to_text(name: str, text: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)

    return change


def removed(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def published(store: PolicyStore, model: Path, *changes: Change) -> Policy:
    def write(folder: Path) -> None:
        shutil.copytree(model, folder, dirs_exist_ok=True)
        for change in changes:
            change(folder)

    return store.publish(write, parent=None, lineage={}, metrics={})


def test_an_engine_does_the_same_work_for_policies_of_one_shape_and_type_whatever_else_differs(
    store: PolicyStore, model_folders: list[Path]
) -> None:
    def narrow(weights: dict[str, torch.Tensor]) -> None:
        weights.update({name: tensor.to(torch.bfloat16) for name, tensor in weights.items()})

    one, *alike = (published(store, folder) for folder in model_folders[:2])
    alike.append(published(store, model_folders[0], to_json("generation_config.json", eos_token_id=[1, 12])))
    alike.append(published(store, model_folders[0], to_json("config.json", transformers_version="0")))
    assert all(computes_alike(one, other) for other in alike)
    others = [with_weights(store, model_folders[0], narrow)]
    others.append(published(store, model_folders[0], to_json("config.json", num_hidden_layers=1)))
    others.append(published(store, model_folders[0], to_json("config.json", dtype="bfloat16")))
    assert not any(computes_alike(one, other) for other in others)


def slow_tokenizer(folder: Path) -> None:
    """The files of a tokenizer that has no tokenizer.json."""
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps({"<pad>": 0, "<eos>": 1, "a": 2, "b": 3, "ab": 4}))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    (folder / "tokenizer.model").write_bytes(b"sentencepiece")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (to_text("chat_template.jinja", "{{ messages[0].content }}"), "chat_template.jinja"),
        (removed("chat_template.jinja"), "chat_template.jinja"),
        (to_json("tokenizer_config.json", chat_template="{{ messages[0].content }}"), "chat_template"),
        (to_json("chat_template.json", chat_template="{{ messages[0].content }}"), "chat_template.json"),
        (
            to_text("additional_chat_templates/tool_use.jinja", "{{ tools }}"),
            "additional_chat_templates/tool_use.jinja",
        ),
        (to_json("tokenizer_config.json", eos_token="<pad>"), "eos_token"),
        (to_json("tokenizer_config.json", add_bos_token=True), "add_bos_token"),
        (to_json("tokenizer_config.json", pad_token=None), "pad_token"),
        (to_json("special_tokens_map.json", bos_token="<pad>"), "special_tokens_map.json"),
        (to_json("added_tokens.json", **{"<tool>": 257}), "added_tokens.json"),
        (to_json("generation_config.json", eos_token_id=[1, 5]), "eos_token_id"),
        (to_json("generation_config.json", temperature=0.6, do_sample=True), "do_sample"),
        (removed("generation_config.json"), "generation_config.json"),
        (to_json("config.json", eos_token_id=5), "eos_token_id"),
        (to_json("config.json", bos_token_id=5), "bos_token_id"),
        (to_json("config.json", dtype="bfloat16"), "bfloat16"),
        (to_json("preprocessor_config.json", size=4), "preprocessor_config.json"),
        (to_text("modeling_own.py", "raise SystemExit"), "modeling_own.py"),
    ],
)
def test_what_decides_an_answer_besides_the_weights_is_refused_by_name_and_a_start_is_asked_for(
    store: PolicyStore, model_folders: list[Path], change: Change, says: str
) -> None:
    one, two = published(store, model_folders[0]), published(store, model_folders[1], change)
    for old, new in ((one, two), (two, one)):
        with pytest.raises(IncompatiblePolicy) as refusal:
            require_compatible(old, new)
        assert says in str(refusal.value)
        assert "stop the server, promote the policy, and start the server again" in str(refusal.value)


@pytest.mark.parametrize(
    "change",
    [
        to_json("vocab.json", ab=5),
        to_text("merges.txt", "#version: 0.2\nb a\n"),
        to_text("tokenizer.model", "another"),
        removed("tokenizer.model"),
        to_text("qwen.tiktoken", "YQ== 0"),
    ],
)
def test_a_tokenizer_without_a_tokenizer_json_is_compared_file_by_file(
    store: PolicyStore, model_folders: list[Path], change: Change
) -> None:
    one = published(store, model_folders[0], slow_tokenizer)
    require_compatible(one, published(store, model_folders[1], slow_tokenizer))
    with pytest.raises(IncompatiblePolicy, match="promote the policy"):
        require_compatible(one, published(store, model_folders[1], slow_tokenizer, change))


def split_weights(folder: Path) -> None:
    """The same tensors in two files with an index."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    files = {"model-00001-of-00002.safetensors": names[:3], "model-00002-of-00002.safetensors": names[3:]}
    for file, held in files.items():
        save_file({name: weights[name] for name in held}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, held in files.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def reordered(folder: Path) -> None:
    for path in folder.glob("*.json"):
        content = json.loads(path.read_text())
        path.write_text(json.dumps(dict(reversed(content.items())), indent=7))


@pytest.mark.parametrize(
    "change",
    [
        reordered,
        split_weights,
        to_json("config.json", transformers_version="0", _name_or_path="elsewhere", use_cache=False),
        to_json("generation_config.json", transformers_version="0", eos_token_id=[1]),
        to_json("tokenizer_config.json", name_or_path="elsewhere"),
        to_text("README.md", "a card"),
        to_text("LICENSE", "of the weights"),
    ],
)
def test_what_only_says_how_files_were_written_does_not_matter(
    store: PolicyStore, model_folders: list[Path], change: Change
) -> None:
    require_compatible(published(store, model_folders[0]), published(store, model_folders[1], change))


def test_a_file_that_was_changed_since_it_was_published_is_not_compared(
    store: PolicyStore, model_folders: list[Path]
) -> None:
    one, two = published(store, model_folders[0]), published(store, model_folders[1], reordered)
    to_json("generation_config.json", eos_token_id=5)(one.path)
    with pytest.raises(IncompatiblePolicy, match=r"policy 1: generation_config\.json has sha256 .* its manifest says"):
        require_compatible(one, two)
