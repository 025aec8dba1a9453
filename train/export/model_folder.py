"""A model in training as a Hugging Face folder, its safetensors files written by all ranks at once.

Parameters go to files in the model's order, so that the files are the same on any number of ranks but where a parameter
becomes tensors that no file has room for. The ranks take turns: each file's tensors are gathered on the rank that
writes it, which writes in a thread while the next file is gathered on the next rank.

Nothing in the folder can be taken for a model before it is whole: files have names of their own until all ranks have
written theirs, and config.json comes last.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from feedback.files import fsync_path, replace_file
from feedback.trusted_code import trusted
from serve.policies.folder import WrittenFile
from train.export.collect import collect, connect
from train.export.safetensors_writer import write_safetensors
from train.model.fsdp import log_once
from train.model.hf_io import common_dtype, is_own, stored_as, stored_dtypes, stored_in
from train.model.lora import plain_parameters

FILE_BYTES: Final = 2 * 2**30
"""Bytes of one file of weights; a rank holds one of them in memory, and one tensor."""


def export(
    model: nn.Module,
    policy: Path,
    folder: Path,
    file_bytes: int = FILE_BYTES,
    unstored: frozenset[str] = frozenset(),
) -> dict[str, WrittenFile]:
    """Write the weights to ``folder`` as a Hugging Face model, adapters merged; every rank must call it.

    Each tensor is in the type and under the names that the policy stores it. It is gathered on the rank that writes it,
    and only there. Adapters over weights in NF4 are merged into those that the policy stores: merged into the rounded
    ones, what they learned would be rounded away when the next run rounds anew.

    Args:
        policy: where ``train.model.fsdp.build`` made the model from; its config and types are kept.
        folder: empty, and the same for all ranks, on all machines.
        file_bytes: size of one file of weights; a tensor that is larger has its own.
        unstored: as of ``build``; these are written under the names that they have in the model.

    Returns:
        The files of weights, by name.

    Raises:
        ValueError: a weight has no name in the policy, so that nothing could load what would be written. No rank has
            left a file then.
        OSError: the disk refuses.
    """
    dtypes = stored_dtypes(policy)
    common = common_dtype(dtypes.values())
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    connect()
    own = _OwnFiles(folder, file_bytes)
    with own:
        for number, name, tensor in _numbered(model, policy, dtypes, common, file_bytes):
            whole = collect(name, tensor.to(common), number % ranks)
            if whole is not None:
                for key, values in stored_as(model, name, whole):
                    own.add(number, key, values.to(dtypes.get(key, common)))
            del whole
    every: list[Any] = [None] * ranks
    torch.distributed.all_gather_object(every, own.files)
    files = sorted((file for of_rank in every for file in of_rank), key=lambda file: (file.number, file.part))
    try:
        _require_names(model, policy, files, unstored)
    except ValueError:
        own.remove()
        raise
    names = {file: _name(i, len(files)) for i, file in enumerate(files)}
    for file in own.files:
        file.aside(folder).rename(folder / names[file])
    torch.distributed.barrier()
    if rank == 0:
        _complete(model, policy, folder, names, common)
    torch.distributed.barrier()
    return {name: file.written for file, name in names.items()}


@dataclass(frozen=True)
class _File:
    """Part ``part`` of file ``number``, as all ranks count them, which its rank alone cut in parts."""

    number: int
    part: int
    tensors: tuple[str, ...]
    bytes: int
    written: WrittenFile

    def aside(self, folder: Path) -> Path:
        return _aside(folder, self.number, self.part)


class _OwnFiles:
    """The files that this rank writes, in a thread, one after the other; leaving the context waits for the last.

    The memory of one file is taken at a time: what comes for the next one waits until the one before is written.
    """

    def __init__(self, folder: Path, file_bytes: int) -> None:
        self.files: list[_File] = []
        self._folder, self._file_bytes = folder, file_bytes
        self._number = self._part = 0
        self._waiting: dict[str, Tensor] = {}
        self._bytes = 0
        self._thread = ThreadPoolExecutor(1, "export")
        self._writing: Future[_File] | None = None

    def __enter__(self) -> _OwnFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._write()
                self._wait()
        finally:
            self._thread.shutdown()

    def add(self, number: int, key: str, tensor: Tensor) -> None:
        """Take a tensor for file ``number``; they come in order."""
        if self._waiting and (number != self._number or self._bytes + tensor.nbytes > self._file_bytes):
            self._write()
        self._wait()
        self._part = self._part if number == self._number else 0
        self._number = number
        self._waiting[key] = tensor
        self._bytes += tensor.nbytes

    def remove(self) -> None:
        """Remove what was written, before it has its last name."""
        for file in self.files:
            file.aside(self._folder).unlink()

    def _write(self) -> None:
        """Begin to write what waits."""
        if not self._waiting:
            return
        tensors, self._waiting = self._waiting, {}
        self._writing = self._thread.submit(_write, self._folder, self._number, self._part, tensors)
        self._part += 1
        self._bytes = 0

    def _wait(self) -> None:
        if self._writing is not None:
            self.files.append(self._writing.result())
            self._writing = None


def _write(folder: Path, number: int, part: int, tensors: dict[str, Tensor]) -> _File:
    written = write_safetensors(_aside(folder, number, part), tensors)
    return _File(number, part, tuple(tensors), sum(tensor.nbytes for tensor in tensors.values()), written)


def _aside(folder: Path, number: int, part: int) -> Path:
    return folder / f"model-{number:05}-{part:03}.safetensors.new"


def _numbered(
    model: nn.Module, policy: Path, dtypes: dict[str, torch.dtype], common: torch.dtype, file_bytes: int
) -> Iterator[tuple[int, str, Tensor]]:
    """(number of the file, plain name, tensor) of every weight, as each rank counts by sizes alone."""
    keys: dict[str, list[str]] = model.checkpoint_keys
    number = filled = 0
    for name, tensor in plain_parameters(model, policy):
        stored = [dtypes.get(key, common) for key in keys.get(name) or [name]]
        size = tensor.numel() * sum(dtype.itemsize for dtype in stored)
        if filled and filled + size > file_bytes:
            number, filled = number + 1, 0
        filled += size
        yield number, name, tensor


def _require_names(model: nn.Module, policy: Path, files: list[_File], unstored: frozenset[str]) -> None:
    expected = set(stored_in(policy)) | unstored
    written = {key for file in files for key in file.tensors}
    if surplus := sorted(written - expected):
        raise ValueError(
            f"the trained model has a tensor {surplus[0]!r}, and its parent in {policy} has none of that name"
        )
    if missing := sorted(expected - written):
        log_once(f"not of {type(model).__name__}, so left out: {', '.join(missing)}")


def _name(i: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{i + 1:05}-of-{count:05}.safetensors"


def _complete(model: nn.Module, policy: Path, folder: Path, names: dict[_File, str], dtype: torch.dtype) -> None:
    """Write what makes a model of the files of weights: the index, where there are several, and the config."""
    if len(names) > 1:
        weight_map = {key: name for file, name in names.items() for key in file.tensors}
        index = {"metadata": {"total_size": sum(file.bytes for file in names)}, "weight_map": weight_map}
        replace_file(folder / "model.safetensors.index.json", (json.dumps(index, indent=2) + "\n").encode())
    write_config(model, policy, folder, dtype)
    fsync_path(folder)


def write_config(model: nn.Module, policy: Path, folder: Path, dtype: torch.dtype) -> None:
    """Leave the policy's config beside the weights: as it stands, or with another class and labels if those are new.

    A user's own class is not in it: what serves the policy goes on with the class that it knows.

    Written anew by another transformers, the same settings have other names, and a running server would refuse them.
    The generation config and the tokenizer are copied when the policy is published.
    """
    config = AutoConfig.from_pretrained(policy, trust_remote_code=trusted(policy))
    architectures = [model.made_as.__name__]
    same = config.architectures == architectures and config.num_labels == model.config.num_labels
    if same or is_own(model.made_as):
        shutil.copyfile(policy / "config.json", folder / "config.json")
        return
    config.architectures, config.dtype = architectures, dtype
    if config.num_labels != model.config.num_labels:
        config.num_labels = model.config.num_labels
    config.save_pretrained(folder)
