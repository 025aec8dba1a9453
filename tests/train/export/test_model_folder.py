"""Export by several ranks over gloo: who gathers and writes what, hashes, and what a kill leaves."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import P2POp
from transformers import AutoModelForCausalLM

from deploy.examples.demo.seed import make_tokenizer
from serve.policies.folder import PolicyInvalid, WrittenFile, check_folder
from tests.train.ranks import run_ranks
from tests.train.tiny_models import SIZES, llama
from train.config.sections import LoraConfig
from train.export import model_folder
from train.export.model_folder import export
from train.export.safetensors_writer import write_safetensors
from train.model.fsdp import build
from train.model.hf_io import stored_in
from train.model.mesh import make_meshes

FILE_BYTES = 9_000
LARGEST = 2 * SIZES["vocab_size"] * SIZES["hidden_size"]  # bytes, in bfloat16


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "policy"
    torch.manual_seed(0)
    llama().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@contextmanager
def observed() -> Iterator[dict[str, Any]]:
    """Elements that this rank receives, and the tensors of each file that it writes."""
    seen: dict[str, Any] = {"received": 0, "files": []}
    receive, write = torch.distributed.batch_isend_irecv, model_folder.write_safetensors

    def counted(operations: list[P2POp]) -> Any:
        seen["received"] += sum(o.tensor.numel() for o in operations if o.op is torch.distributed.irecv)
        return receive(operations)

    def noted(path: Path, tensors: dict[str, torch.Tensor]) -> WrittenFile:
        seen["files"].append([*tensors])
        return write(path, tensors)

    torch.distributed.batch_isend_irecv, model_folder.write_safetensors = counted, noted
    try:
        yield seen
    finally:
        torch.distributed.batch_isend_irecv, model_folder.write_safetensors = receive, write


def exported(rank: int, folder: Path, policy: Path, tensor_parallel: int) -> dict[str, Any]:
    model = build(policy, dtype=torch.float32, meshes=make_meshes("cpu", tensor_parallel=tensor_parallel))
    out = folder / "out"
    out.mkdir(exist_ok=True)
    with observed() as seen:
        seen["written"] = export(model, policy, out, file_bytes=FILE_BYTES)
    seen["shards"] = sum(p.to_local().numel() for p in model.parameters())  # type: ignore[attr-defined]
    return seen


@pytest.fixture(scope="module", params=[(1, 1), (4, 1), (4, 2)], ids=["one", "fsdp", "tensor parallel"])
def found(request: pytest.FixtureRequest, policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    ranks, tensor_parallel = request.param
    folder = tmp_path_factory.mktemp("ranks")
    return folder / "out", run_ranks(ranks, exported, folder, policy, tensor_parallel)


def test_the_files_are_those_of_the_policy_in_the_models_order_whatever_the_ranks(
    found: tuple[Path, list[dict[str, Any]]], policy: Path
) -> None:
    out, by_rank = found
    stored = {key: load_file(path)[key] for key, path in stored_in(policy).items()}
    again = stored_in(out)
    assert again.keys() == stored.keys()
    for key, path in again.items():
        assert torch.equal(load_file(path)[key], stored[key])
        assert load_file(path)[key].dtype == stored[key].dtype
    files = sorted(set(again.values()))
    assert [file.name for file in files] == [
        f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))
    ]
    order = [key for file in files for key in by_rank_order(by_rank, file, again)]
    names = [name for name, _ in AutoModelForCausalLM.from_pretrained(policy).named_parameters()]
    assert order == names
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored.values())
    AutoModelForCausalLM.from_pretrained(out)


def by_rank_order(by_rank: list[dict[str, Any]], file: Path, stored: dict[str, Path]) -> list[str]:
    """The tensors of a file in the order they were written in."""
    keys = {key for key, path in stored.items() if path == file}
    [order] = [tensors for rank in by_rank for tensors in rank["files"] if set(tensors) == keys]
    return order


def test_each_rank_writes_every_nth_file_and_receives_of_it_what_it_lacks(
    found: tuple[Path, list[dict[str, Any]]],
) -> None:
    out, by_rank = found
    count = len({*stored_in(out).values()})
    assert [len(rank["files"]) for rank in by_rank] == [len(range(i, count, len(by_rank))) for i in range(len(by_rank))]
    everything = sum(load_file(path)[key].numel() for key, path in stored_in(out).items())
    received = sum(rank["received"] for rank in by_rank)
    if len(by_rank) == 1:
        assert received == 0
    else:  # a file is on one rank, which has a part of it; norms are on all under tensor parallelism
        assert 0.6 * everything < received <= 0.8 * everything
        assert all(rank["received"] < 0.5 * everything for rank in by_rank)
    for path in {*stored_in(out).values()}:
        sizes = [tensor.nbytes for tensor in load_file(path).values()]
        assert sum(sizes) <= FILE_BYTES or len(sizes) == 1


def test_hashes_are_those_of_the_files_and_every_rank_knows_all_of_them(
    found: tuple[Path, list[dict[str, Any]]],
) -> None:
    out, by_rank = found
    for rank in by_rank:
        assert set(rank["written"]) == {path.name for path in stored_in(out).values()}
        for name, written in rank["written"].items():
            assert written.sha256 == hashlib.sha256((out / name).read_bytes()).hexdigest()
            assert written.size == (out / name).stat().st_size
            assert written.is_at(out / name), "its last name is another, and it is the same file"


def adapters_exported(rank: int, folder: Path, policy: Path) -> int:
    model = build(policy, dtype=torch.float32, lora=LoraConfig(rank=2))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.fill_(0.5)
    (folder / "out").mkdir(exist_ok=True)
    export(model, policy, folder / "out", file_bytes=FILE_BYTES)
    return len(stored_in(folder / "out"))


def test_adapters_are_merged_into_what_each_rank_writes(policy: Path, tmp_path: Path) -> None:
    a, b = (tmp_path / name for name in "ab")
    for ranks, folder in ((1, a), (3, b)):
        folder.mkdir()
        run_ranks(ranks, adapters_exported, folder, policy)
    for key, path in stored_in(a / "out").items():
        one, three = load_file(path)[key], load_file(stored_in(b / "out")[key])[key]
        torch.testing.assert_close(one, three)
        if "q_proj" in key:
            assert not torch.equal(one, load_file(stored_in(policy)[key])[key])


def killed(rank: int, folder: Path, policy: Path) -> None:
    model = build(policy, dtype=torch.float32)
    write, count = model_folder.write_safetensors, 0

    def ends(path: Path, tensors: dict[str, torch.Tensor]) -> WrittenFile:
        nonlocal count
        count += 1
        if rank == 1 and count == 2:
            path.write_bytes(b"half of")
            os._exit(9)
        return write(path, tensors)

    model_folder.write_safetensors = ends
    (folder / "out").mkdir(exist_ok=True)
    export(model, policy, folder / "out", file_bytes=FILE_BYTES)


def test_what_a_killed_rank_leaves_is_not_taken_for_a_model(policy: Path, tmp_path: Path) -> None:
    with pytest.raises(torch.multiprocessing.ProcessExitedException):
        run_ranks(2, killed, tmp_path, policy)
    left = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert len(left) > 1
    assert all(name.endswith(".safetensors.new") for name in left)
    make_tokenizer().save_pretrained(tmp_path / "out")
    with pytest.raises(PolicyInvalid):
        check_folder(tmp_path / "out")


def misnamed(rank: int, folder: Path, policy: Path) -> list[str]:
    model = build(policy, dtype=torch.float32)
    model.checkpoint_keys = {**model.checkpoint_keys, "lm_head.weight": ["other.weight"]}
    (folder / "out").mkdir(exist_ok=True)
    with pytest.raises(ValueError, match=r"has a tensor 'other\.weight', and its parent in .* has none of that name"):
        export(model, policy, folder / "out", file_bytes=FILE_BYTES)
    torch.distributed.barrier()
    return [path.name for path in (folder / "out").iterdir()]


def test_a_tensor_that_the_parent_does_not_name_fails_on_all_ranks_and_leaves_no_file(
    policy: Path, tmp_path: Path
) -> None:
    assert run_ranks(2, misnamed, tmp_path, policy) == [[], []]


def test_a_file_reads_back_to_the_bit_and_its_wider_tensors_come_first(tmp_path: Path) -> None:
    tensors = {
        "narrow": torch.randn(3, 5).bfloat16(),
        "wide": torch.randn(7, 2, dtype=torch.float64),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "transposed": torch.randn(4, 6).T,
        "large": torch.randn(2**21 + 3),
    }
    path = tmp_path / "model.safetensors"
    written = write_safetensors(path, tensors)
    assert written.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    read = load_file(path)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(read[name], tensor)
        assert read[name].dtype == tensor.dtype
    length = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + length])
    for name, tensor in tensors.items():
        assert (8 + length + header[name]["data_offsets"][0]) % tensor.itemsize == 0
    with pytest.raises(FileExistsError):
        write_safetensors(path, tensors)
