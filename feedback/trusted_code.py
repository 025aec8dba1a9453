"""Code that comes with a model, and the consent to run it. Imports no torch.

A model's folder may have Python files that its JSON files name (``auto_map``); transformers and vLLM run them where
``trust_remote_code`` is true. Here that is ``trusted(folder)`` and nothing else: true if each Python file of the folder
has a sha256 that the setting ``train.model.trusted_code`` has for it, an error if the folder names code and one has
not. A process begins without any consent; what is not handed on to it, it refuses.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from feedback.files import locked

SETTING: Final = "train.model.trusted_code"

_NAMING: Final = (
    *("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json"),
    "video_preprocessor_config.json",
)
"""Files in which transformers looks for ``auto_map``."""

_REDIRECTING: Final = {
    "speculators_config": "vLLM would serve the model that it names in place of this one",
    "configuration_files": "transformers would read the file that it names in place of config.json",
}
"""Keys of config.json by which another model, or another config with other code, would be loaded than was looked at."""

_COPY_S: Final = 120.0

_consent: dict[str, frozenset[str]] = {}


class UntrustedCode(ValueError):
    """A model comes with code that may not run; the text names the files, and what to set."""


def consent_to(files: Mapping[str, Sequence[str]]) -> None:
    """From here on this process runs code of models if all files of it are these, sha256 by name, and no other."""
    global _consent
    _consent = {name: frozenset(hashes) for name, hashes in files.items()}


def consented() -> dict[str, list[str]]:
    """What ``consent_to`` was called with last, to hand it on to another process."""
    return {name: sorted(hashes) for name, hashes in _consent.items()}


def trusted(model: Path | str) -> bool:
    """``trust_remote_code`` for whatever loads a model: its folder, or its config.json.

    False for one without code of its own. Raises UntrustedCode, whether or not transformers has a class of its own for
    the model: which of the two runs would depend on what is installed; and for a config.json that leads elsewhere.
    """
    folder, named = _named_code(Path(model))
    _forget_loaded()
    if not named:
        return False
    files = code_files(folder)
    if foreign := sorted(name for name in named if "--" in name):
        raise UntrustedCode(
            f"{folder} names code of another repository, {foreign[0]}, which may change at any time: put the files "
            "into the folder, and take what stands before -- out of auto_map"
        )
    if missing := sorted({f"{name.rpartition('.')[0]}.py" for name in named} - files.keys()):
        raise UntrustedCode(f"{folder} names code that is not in the folder: {', '.join(missing)}")
    problems = [
        f"{name} has changed" if name in _consent else f"{name} is not named"
        for name, found in files.items()
        if found not in _consent.get(name, ())
    ]
    if problems:
        raise UntrustedCode(
            f"{folder} comes with code of its own, and {SETTING} does not allow all of it ({', '.join(problems)}). "
            f"Read these files; if they may run, set {SETTING} to {json.dumps(files)}. If transformers has a class for "
            "the model itself, taking auto_map out of the folder's JSON files has it use that"
        )
    _copy(folder, {f"{name.rpartition('.')[0]}.py" for name in named})
    return True


def code_files(folder: Path) -> dict[str, str]:
    """The sha256 of each Python file in a model's folder and below it, by its path there.

    Raises UntrustedCode if a folder below it is a link: what is behind it could change, and transformers would read it.
    """
    if linked := [path for path in sorted(folder.rglob("*")) if path.is_symlink() and path.is_dir()]:
        raise UntrustedCode(f"{linked[0]} is a link to a folder, in a model that comes with code: copy what it has")
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*.py"))
        if path.is_file()
    }


def _named_code(model: Path) -> tuple[Path, set[str]]:
    """(folder, all that its JSON files name as code): module.Class, or owner/repository--module.Class."""
    folder, files = (model.parent, [model]) if model.is_file() else (model, [model / name for name in _NAMING])
    named: set[str] = set()
    for file in files:
        try:
            content = json.loads(file.read_bytes())
        except (OSError, ValueError):  # whoever loads it says what is wrong
            continue
        if file.name == "config.json" and isinstance(content, dict):
            for key in _REDIRECTING.keys() & content.keys():
                raise UntrustedCode(f"{file} has {key}: {_REDIRECTING[key]}. Take it out of the file")
        named |= {name for found in _auto_maps(content) for name in _names(found)}
    return folder, named


def _forget_loaded() -> None:
    """Have transformers load a model's code once more, as it is now.

    It keeps the classes of code that it has run, by the class of their configs, and takes those for the next model of
    that config, whatever its files are by then.
    """
    auto = sys.modules.get("transformers.models.auto.modeling_auto")
    if auto is None:
        return
    for mapping in (auto.MODEL_FOR_CAUSAL_LM_MAPPING, auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING):
        for config, found in list(mapping._extra_content.items()):
            if found.__module__.startswith("transformers_modules."):
                del mapping._extra_content[config]


def _auto_maps(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "auto_map":
                yield inner
            else:
                yield from _auto_maps(inner)


def _names(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):  # of a tokenizer, the slow one and the fast one, either of them null
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _names(inner)


def _copy(folder: Path, files: set[str]) -> None:
    """Have transformers copy the files to its cache, from which it imports them, while no other process does.

    It writes them in place, so that of two ranks that begin together one could import half a file.
    """
    from transformers.dynamic_module_utils import get_cached_module_file
    from transformers.utils import HF_MODULES_CACHE

    cache = Path(HF_MODULES_CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache / ".millrace.lock", _COPY_S):
        for file in sorted(files):
            get_cached_module_file(str(folder), file, local_files_only=True)
