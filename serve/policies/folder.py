"""What a policy's folder holds: a Hugging Face model with a tokenizer, its weights in safetensors and nothing else.

Imports neither torch nor vLLM. Format of the weights: https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

PICKLE_SUFFIXES: Final = frozenset(
    {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".npy", ".npz", ".h5", ".msgpack"}
)
COMPUTED_IN: Final = ("float32", "bfloat16", "float16")
"""Types that an engine can compute in."""
_FLOATS: Final = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}  # as safetensors, torch
TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_TEMPLATES: Final = "additional_chat_templates"  # transformers' folder of those that a template's name chooses


class PolicyError(RuntimeError):
    """A policy or the store can't be used as requested; the text names what is wrong."""


class StoreUnreachable(PolicyError):
    """What an object store holds can't be had, or written, at the moment; that says nothing of a policy.

    The text names the store, or what is missing here, and what to look at.
    """


class PolicyInvalid(PolicyError):
    """A folder is not a policy: a file is missing, is pickle, or isn't what its name says."""


class PolicyCorrupt(PolicyError):
    """A published policy differs from its manifest; the text names the file."""


def check_folder(folder: Path) -> None:
    """Raise PolicyInvalid unless ``folder`` is a Hugging Face model with a tokenizer and whole safetensors weights."""
    files = regular_files(folder)
    names = {path.relative_to(folder).as_posix() for path in files}
    for name in sorted(names):
        if Path(name).suffix.lower() in PICKLE_SUFFIXES:
            raise PolicyInvalid(f"{name}: weights of a policy are safetensors; {Path(name).suffix} files can run code")
    if "config.json" not in names:
        raise PolicyInvalid(f"{folder} has no config.json")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        if name in names:
            _check_json(folder / name)
    if not names & set(TOKENIZER_FILES):
        raise PolicyInvalid(f"{folder} has no tokenizer (one of {', '.join(TOKENIZER_FILES)})")
    weights = sorted(name for name in names if name.endswith(".safetensors"))
    if not weights:
        raise PolicyInvalid(f"{folder} has no *.safetensors weights")
    held: dict[str, str] = {}
    for name in weights:
        for tensor in safetensors_header(folder / name):
            if tensor in held:
                raise PolicyInvalid(f"{name}: tensor {tensor} is in {held[tensor]} too")
            held[tensor] = name
    index = folder / "model.safetensors.index.json"
    if index.exists():
        for tensor, name in _check_json(index).get("weight_map", {}).items():
            if held.get(tensor) != name:
                raise PolicyInvalid(f"{index.name} says that {name} holds {tensor}, which it doesn't")


def safetensors_header(path: Path) -> dict[str, dict[str, Any]]:
    """Tensor name -> {dtype, shape, data_offsets}, from the file's header alone. Raises PolicyInvalid naming the file.

    Format: https://huggingface.co/docs/safetensors (8 bytes length, JSON, data).
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise PolicyInvalid(f"{path.name} is not a whole safetensors file ({size} bytes)")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PolicyInvalid(f"{path.name} has no safetensors header: {error}") from error
    if 8 + length + end != size:
        raise PolicyInvalid(f"{path.name} has {size} bytes, its header says {8 + length + end}")
    return header


def compute_dtype(folder: Path, setting: str) -> str:
    """The type that an engine computes a policy in: the one rule for the server and for evaluation.

    ``setting``: an engine's ``dtype``; auto is what ``declared_dtype`` says. vLLM's own "auto" would take a float32
    policy down to 16 bits. Raises PolicyInvalid if no engine computes in it.
    """
    dtype = declared_dtype(folder) if setting == "auto" else setting
    if dtype not in COMPUTED_IN:
        raise PolicyInvalid(
            f"{folder} is of dtype {dtype}, and engines compute in {', '.join(COMPUTED_IN)}: set serve.engine.dtype to "
            "one of them"
        )
    return dtype


def declared_dtype(folder: Path) -> str:
    """What config.json calls the policy's type; where it doesn't say, the one that holds all that is stored."""
    config = _check_json(folder / "config.json")
    text = config.get("text_config")
    for section in (config, text if isinstance(text, dict) else {}):
        for key in ("dtype", "torch_dtype"):
            if isinstance(dtype := section.get(key), str) and dtype != "auto":
                return dtype.removeprefix("torch.")
    stored = {
        _FLOATS[entry["dtype"]]
        for path in folder.glob("*.safetensors")
        for entry in safetensors_header(path).values()
        if entry["dtype"] in _FLOATS
    }
    if not stored:
        raise PolicyInvalid(f"{folder / 'config.json'} has no dtype, and no tensor is of {', '.join(_FLOATS)}")
    if stored == {"bfloat16", "float16"}:
        return "float32"  # neither holds the other
    return max(stored, key=list(_FLOATS.values()).index)


@dataclass(frozen=True)
class WrittenFile:
    """What the writer of a file knows of it: its hash, worked out while it was written, and which file it was.

    The hash holds for that file under any name, until it is written to. It is the word of a process of this run: what
    is served, or goes to another machine, is read and compared all the same.
    """

    sha256: str
    device: int
    inode: int
    size: int
    modified_ns: int

    @classmethod
    def of(cls, status: os.stat_result, sha256: str) -> WrittenFile:
        """``status``: of the open file, behind its last byte."""
        return cls(sha256, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)

    def is_at(self, path: Path) -> bool:
        """Whether ``path`` is that file (a hard link is, a copy is not), and nobody has written to it since."""
        return WrittenFile.of(path.stat(), self.sha256) == self


def sha256_file(path: Path) -> str:
    """Hex sha256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(path: Path) -> list[int]:
    """What changes when a file is written to or replaced: device, inode, size, times of content and of status in ns."""
    status = path.stat()
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def copy_model(source: Path, target: Path) -> None:
    """Copy what a policy consists of: the folder's own files and its further chat templates.

    Links are followed; nothing hidden, and no pickle.
    """
    if not source.is_dir():
        raise PolicyInvalid(f"{source} is not a folder")
    entries = [entry for entry in sorted(source.iterdir()) if entry.is_file() and not entry.name.startswith(".")]
    pickled = [entry.name for entry in entries if entry.suffix.lower() in PICKLE_SUFFIXES]
    if pickled and not any(entry.suffix == ".safetensors" for entry in entries):
        raise PolicyInvalid(f"{source} has pickled weights only ({pickled[0]}): convert them to safetensors first")
    for entry in entries:
        if entry.name not in pickled:
            shutil.copyfile(entry, target / entry.name)
    if (templates := source / _TEMPLATES).is_dir():
        shutil.copytree(templates, target / _TEMPLATES, ignore=lambda _, names: {n for n in names if n[0] == "."})


def regular_files(folder: Path) -> list[Path]:
    """All files below a folder, by name. Raises PolicyInvalid on a link, which could lead outside."""
    files = []
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            raise PolicyInvalid(f"{path} is a symbolic link")
        if path.is_file():
            files.append(path)
    return files


def _check_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise PolicyInvalid(f"{path.name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise PolicyInvalid(f"{path.name} is not a JSON object")
    return value
