"""What may take a running policy's place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loadtests.tiny_model import make_model_folder
from serve.policies import Policy, PolicyStore
from serve.swappable import NotSwappable, require_finite, require_swappable

Edit = Callable[[dict[str, torch.Tensor]], object]


def with_weights(store: PolicyStore, model: Path, edit: Edit) -> Policy:
    def write(folder: Path) -> None:
        for path in model.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        weights = load_file(folder / "model.safetensors")
        edit(weights)
        save_file(weights, folder / "model.safetensors")

    return store.publish(write, parent=None, lineage={}, metrics={})


def test_another_policy_of_the_same_make_is_swappable(store: PolicyStore, model_folders: list[Path]) -> None:
    one, two = (store.publish(folder, parent=None, lineage={}, metrics={}) for folder in model_folders[:2])
    require_swappable(one, two)
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
    with pytest.raises(NotSwappable, match=says):
        require_swappable(one, with_weights(store, model_folders[1], edit))


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

    with pytest.raises(NotSwappable, match=r"model\.norm\.weight.*NaN"):
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
    with pytest.raises(NotSwappable, match=key):
        require_swappable(one, two)


def test_another_tokenizer_is_refused_but_leftovers_in_its_file_are_not(
    store: PolicyStore, model_folders: list[Path], tmp_path: Path
) -> None:
    one = store.publish(model_folders[0], parent=None, lineage={}, metrics={})
    other = make_model_folder(tmp_path / "other", 1)
    content = json.loads((other / "tokenizer.json").read_text())
    (other / "tokenizer.json").write_text(json.dumps(content | {"padding": {"strategy": "BatchLongest"}}))
    require_swappable(one, store.publish(other, parent=None, lineage={}, metrics={}))
    content["model"]["vocab"]["<pad>"], content["model"]["vocab"]["<eos>"] = 1, 0
    (other / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(NotSwappable, match=r"tokenizer\.json"):
        require_swappable(one, store.publish(other, parent=None, lineage={}, metrics={}))
