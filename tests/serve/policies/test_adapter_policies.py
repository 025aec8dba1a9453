"""Policies that are an adapter beside another one's weights: what is refused, what is kept, and the model of both."""

from __future__ import annotations

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from feedback.files import link_or_copy, locked
from loadtests.tiny_model import make_model_folder
from serve.config import RetentionConfig
from serve.policies.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, rank_of, stack
from serve.policies.folder import PolicyCorrupt, PolicyError, PolicyInvalid, WrittenFile, sha256_file
from serve.policies.retention import Kept
from serve.policies.store import MERGED, UNPUBLISHED, Policy, PolicyPruned, PolicyStore
from serve.policies.whole_policies import base_of, whole
from serve.swap.verification import read
from tests.serve.adapter_policies import make_adapter


@pytest.fixture
def base(store: PolicyStore, tmp_path: Path) -> Policy:
    return store.publish(make_model_folder(tmp_path / "base", 1), parent=None, lineage={}, metrics={})


def published(store: PolicyStore, base: Policy, folder: Path, **how: Any) -> Policy:
    made = make_adapter(base, folder, **how)
    return store.publish(made, parent=base.version, lineage={}, metrics={}, base=base)


def merged_by_peft(base: Policy, adapter: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(base.path, dtype=torch.float32)
    found: dict[str, torch.Tensor] = PeftModel.from_pretrained(model, adapter).merge_and_unload().state_dict()
    return found


def test_the_whole_model_is_the_one_that_peft_merges(store: PolicyStore, base: Policy, tmp_path: Path) -> None:
    adapter = published(store, base, tmp_path / "adapter", seed=1)
    assert adapter.base == {"version": 1, "sha256": base.sha256}
    assert [path.name for path in adapter.weight_files] == [ADAPTER_WEIGHTS]
    assert whole(base) is base
    made = whole(adapter)
    assert (made.version, made.base, made.path.parent.name) == (2, None, MERGED)
    assert made.files.keys() == base.files.keys()
    expected = merged_by_peft(base, adapter.path)
    for name, tensor in load_file(made.path / "model.safetensors").items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=1e-6)
    written = (made.path / "model.safetensors").stat().st_mtime_ns
    assert whole(adapter) == made
    assert (made.path / "model.safetensors").stat().st_mtime_ns == written, "it is made once"
    files = read(store, 2, check_finite=True)
    assert {name: of["sha256"] for name, of in files.items()} == {
        "model.safetensors": made.files["model.safetensors"]["sha256"]
    }
    (made.path / "model.safetensors").write_bytes(b"half")
    assert whole(adapter) == made


def test_an_adapter_on_an_adapter_is_one_of_the_base_of_both(store: PolicyStore, base: Policy, tmp_path: Path) -> None:
    first = published(store, base, tmp_path / "first", seed=1, rank=2)
    second = make_adapter(base, tmp_path / "second", seed=2, rank=3)
    tensors = load_file(second / ADAPTER_WEIGHTS)
    left_out = {name for name in tensors if "layers.0.self_attn.q_proj" in name}
    save_file({name: t for name, t in tensors.items() if name not in left_out}, second / ADAPTER_WEIGHTS)
    on_top = merged_by_peft(whole(first), second)
    stack(second, first.path)
    assert rank_of(second) == 5
    both = store.publish(second, parent=2, lineage={}, metrics={}, base=base)
    for name, tensor in load_file(whole(both).path / "model.safetensors").items():
        torch.testing.assert_close(tensor, on_top[name], atol=1e-5, rtol=1e-5)
    by_peft = merged_by_peft(base, both.path)
    assert all(torch.allclose(by_peft[name], on_top[name], atol=1e-5) for name in on_top)


def test_an_adapter_that_is_stacked_leaves_its_other_name_as_it_was(
    store: PolicyStore, base: Policy, tmp_path: Path
) -> None:
    """A run's best weights are linked into its candidate, and a run that is taken up again stacks anew."""
    first = published(store, base, tmp_path / "first", seed=1, rank=2)
    best = make_adapter(base, tmp_path / "best", seed=2, rank=3) / ADAPTER_WEIGHTS
    before = sha256_file(best)
    for _ in range(2):
        candidate = tmp_path / "candidate"
        shutil.rmtree(candidate, ignore_errors=True)
        shutil.copytree(best.parent, candidate, copy_function=link_or_copy)
        (candidate / ADAPTER_CONFIG).unlink()
        shutil.copyfile(best.parent / ADAPTER_CONFIG, candidate / ADAPTER_CONFIG)
        stack(candidate, first.path)
        assert rank_of(candidate) == 5
        assert sha256_file(best) == before


def test_an_adapters_file_that_was_hashed_while_it_was_written_is_not_read_again(
    store: PolicyStore, base: Policy, tmp_path: Path
) -> None:
    made = make_adapter(base, tmp_path / "adapter", seed=1)
    untrue = WrittenFile.of((made / ADAPTER_WEIGHTS).stat(), "f" * 64)
    policy = store.publish(
        lambda aside: shutil.copytree(made, aside, dirs_exist_ok=True, copy_function=link_or_copy),
        parent=1,
        lineage={},
        metrics={},
        written={ADAPTER_WEIGHTS: untrue},
        base=base,
    )
    assert policy.files[ADAPTER_WEIGHTS]["sha256"] == "f" * 64
    with pytest.raises(PolicyCorrupt, match=r"adapter_model\.safetensors has sha256"):
        store.verify(policy.version)


def test_what_is_no_plain_adapter_of_the_base_is_refused_by_name(
    store: PolicyStore, base: Policy, tmp_path: Path
) -> None:
    good = make_adapter(base, tmp_path / "good", seed=1)

    def refused(match: str, *, of: Policy | None = base, config: Any = None, tensors: Any = None) -> None:
        folder = tmp_path / "bad"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(good, folder)
        if config is not None:
            (folder / ADAPTER_CONFIG).write_text(json.dumps(json.loads((good / ADAPTER_CONFIG).read_text()) | config))
        if tensors is not None:
            save_file(tensors(load_file(good / ADAPTER_WEIGHTS)), folder / ADAPTER_WEIGHTS)
        with pytest.raises(PolicyInvalid, match=match):
            store.publish(folder, parent=None, lineage={}, metrics={}, base=of)

    prefix, layer = "base_model.model.", "model.layers.0.mlp.down_proj"
    a, b = (f"{prefix}{layer}.lora_{side}.weight" for side in "AB")
    refused("say of which policy", of=None)
    refused("use_dora=True, which is no plain adapter", config={"use_dora": True})
    refused("rank_pattern=", config={"rank_pattern": {"q_proj": 2}})
    refused("r=0", config={"r": 0})
    refused(r"no adapter of rank 8 of a weight", config={"r": 8})
    refused("down_proj.lora_A.weight, which is no A or B", tensors=lambda t: {n: x for n, x in t.items() if n != b})
    refused("embed_tokens", tensors=lambda t: t | {f"{prefix}model.embed_tokens.lora_embedding_A": torch.ones(2, 2)})
    refused(
        r"adapter of model\.layers\.7\.mlp\.down_proj, of which its base has no weight",
        tensors=lambda t: t | {n.replace("layers.0", "layers.7"): t[n].clone() for n in (a, b)},
    )
    adapter = store.publish(good, parent=1, lineage={}, metrics={}, base=base)
    refused("policy 2 is an adapter of policy 1: an adapter's base has weights of its own", of=adapter)


def test_a_base_keeps_its_weights_while_an_adapter_needs_them(store: PolicyStore, base: Policy, tmp_path: Path) -> None:
    adapter = published(store, base, tmp_path / "adapter", seed=1)
    other = store.publish(make_model_folder(tmp_path / "other", 2), parent=None, lineage={}, metrics={})
    for version in (1, 2, other.version):
        pointer = store.serving()
        store.promote(version, expected=pointer.version if pointer else None, who="test", why="test")
    pointer = store.promote(2, expected=other.version, who="test", why="test")
    whole(adapter)
    kept = Kept(store, RetentionConfig(keep_last=1, served_days=0))
    assert kept.reasons() == {
        1: "policy 2 is an adapter of it",
        2: "it serves",
        other.version: "it served before what serves now",
    }
    assert kept.prune()[0] == []
    with pytest.raises(PolicyError, match="policy 2 is an adapter of policy 1: withdraw that first"):
        store.withdraw(1)
    with store.hold(2):
        assert store.prune(1, "test", dict) == "in use"
    third = store.publish(make_model_folder(tmp_path / "third", 3), parent=None, lineage={}, metrics={})
    store.promote(other.version, expected=2, who="test", why="test")
    store.promote(third.version, expected=other.version, who="test", why="test")
    assert [policy.version for policy in kept.prune()[0]] == [1, 2]
    assert not (store.root / MERGED / adapter.path.name).exists()
    with pytest.raises(PolicyPruned):
        whole(store.get(2))


def test_of_a_policy_that_is_withdrawn_nothing_is_left_whatever_is_damaged_beside_it(
    store: PolicyStore, base: Policy, tmp_path: Path
) -> None:
    adapter = published(store, base, tmp_path / "adapter", seed=1)
    damaged = store.publish(make_model_folder(tmp_path / "other", 2), parent=None, lineage={}, metrics={})
    (damaged.path / "policy.json").write_text("{")
    made = whole(adapter).path
    killed = made.with_name(f".{made.name}-of-a-killed-process")
    killed.mkdir()
    with pytest.raises(PolicyError, match="policy 2 is an adapter of policy 1: withdraw that first"):
        store.withdraw(1)
    store.withdraw(2)
    assert [path.name for path in made.parent.iterdir()] == [".lock"]
    store.withdraw(1)
    assert store.versions() == [damaged.version]


def test_while_a_prune_waits_for_anothers_merge_the_store_is_open_to_all(
    store: PolicyStore, base: Policy, tmp_path: Path
) -> None:
    adapter = published(store, base, tmp_path / "adapter", seed=1)
    made = whole(adapter).path
    with ThreadPoolExecutor(1) as pool:
        with locked(made.parent / ".lock", 0):  # a merge of some adapter
            pruned = pool.submit(store.prune, adapter.version, "test", dict)
            while store.get(adapter.version).pruned is None:
                assert not pruned.done()
                time.sleep(0.01)
            began = time.monotonic()
            store.pin(base.version, who="test", why="test")
            store.publish(base.path, parent=None, lineage={}, metrics={})
            assert time.monotonic() - began < 30
            assert not pruned.done()
            assert made.exists()
        assert pruned.result(60) is None
    assert not made.exists()
    assert not list(adapter.path.glob("*.safetensors"))


def test_the_next_publish_goes_on_with_a_withdrawal_that_was_killed(
    store: PolicyStore, base: Policy, tmp_path: Path
) -> None:
    adapter = published(store, base, tmp_path / "adapter", seed=1)
    made = whole(adapter).path
    adapter.path.rename(store.root / f"{UNPUBLISHED}killed")
    store.publish(base.path, parent=None, lineage={}, metrics={})
    assert [path.name for path in made.parent.iterdir()] == [".lock"]
    assert not list(store.root.glob(f"{UNPUBLISHED}*"))


def test_an_adapter_of_another_policy_than_it_was_made_of_is_refused(
    store: PolicyStore, base: Policy, tmp_path: Path
) -> None:
    adapter = published(store, base, tmp_path / "adapter", seed=1)
    manifest = json.loads((base.path / "policy.json").read_text())
    manifest["files"]["model.safetensors"]["sha256"] = "0" * 64
    (base.path / "policy.json").write_text(json.dumps(manifest))
    with pytest.raises(PolicyCorrupt, match=r"policy 2 is an adapter of policy 1 with sha256 \w{12}…, and that has"):
        base_of(adapter)
