"""``millrace init``: a new home, with a Hugging Face causal LM as policy 1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deploy.config import describe
from deploy.config.root import Settings
from feedback.files import private
from serve.policies import probe
from serve.policies.store import Pointer

_CAUSAL = ("ForCausalLM", "LMHeadModel")
_WANTED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken"]


class NotAModel(ValueError):
    """What was named is no causal language model that can be served; the text says what was found."""


def initialise(settings: Settings, model: str, *, revision: str | None, who: str) -> Pointer:
    """Publish ``model`` (a folder, or a name on the hub) as the first policy, and have it serve.

    Pickled weights are converted to safetensors. Raises NotAModel, serve.policies.store.PolicyError.
    """
    store = settings.policy_store()
    if pointer := store.serving():
        raise NotAModel(
            f"{settings.home} is initialised already: policy {pointer.version} serves; for another model take another "
            "--home"
        )
    folder = Path(model).expanduser()
    is_local = folder.is_dir()
    if not is_local:
        folder = _download(model, revision)
    architecture = _architecture(folder)
    has_safetensors = any(folder.glob("*.safetensors"))
    policy = store.publish(
        folder if has_safetensors else lambda aside: _convert(folder, aside),
        parent=None,
        lineage={
            "source": str(folder.absolute()) if is_local else model,
            "revision": revision,
            "architecture": architecture,
            "converted": not has_safetensors,
        },
        metrics={},
        probe=probe.measure,
    )
    settings.lake().create()
    return store.promote(policy.version, expected=None, who=who, why=f"init from {model}")


def write_config(settings: Settings, file: Path) -> bool:
    """Write every setting, commented out but for ``home``, unless there is such a file; whether it was written."""
    if file.exists():
        return False
    lines = ["# Settings of Millrace. To change one, uncomment it and the sections that it is in.", ""]
    for line in describe.to_yaml(settings, comments=True).splitlines():
        lines.append(line if not line or line.startswith(("home:", "#")) else f"# {line}")
    with open(file, "x", opener=private) as output:  # keys will be put into it
        output.write("\n".join(lines) + "\n")
    return True


def _architecture(folder: Path) -> str:
    """The model's class. Raises NotAModel unless config.json names a causal language model."""
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
    except FileNotFoundError:
        raise NotAModel(f"{folder} has no config.json: it is no Hugging Face model folder") from None
    except ValueError as error:
        raise NotAModel(f"{folder / 'config.json'} is not JSON: {error}") from None
    names = config.get("architectures") or []
    if not names or not str(names[0]).endswith(_CAUSAL):
        raise NotAModel(f"{folder / 'config.json'} names {names or 'no architecture'}, not a causal language model")
    import transformers

    if not hasattr(transformers, str(names[0])):
        own = "; code that comes with a model is never run" if "auto_map" in config else ""
        raise NotAModel(
            f"{folder / 'config.json'} names {names[0]}, which is not in transformers {transformers.__version__}{own}"
        )
    return str(names[0])


def _download(name: str, revision: str | None) -> Path:
    """The files of a model on the hub, in the hub's own cache, safetensors only where there are any."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise NotAModel(f"there is no folder {name}")
    try:
        files = HfApi().list_repo_files(name, revision=revision)
        has_safetensors = any(file.endswith(".safetensors") for file in files)
        patterns = _WANTED if has_safetensors else [*_WANTED, "*.bin"]
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise NotAModel(
            f"{name} is no folder here, and the Hugging Face hub did not give a model of that name: {first_line}"
        ) from error


def _convert(folder: Path, aside: Path) -> None:
    """Write a model whose weights are pickled as safetensors; weights_only keeps torch from running code in them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(folder, dtype="auto", weights_only=True).save_pretrained(aside)
    AutoTokenizer.from_pretrained(folder).save_pretrained(aside)
