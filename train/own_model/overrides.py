"""Changes to a policy's config (``train.model.config_overrides``), held against its weights before anything starts."""

from __future__ import annotations

import difflib
import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from feedback.files import replace_file
from feedback.trusted_code import trusted
from train.config.sections import PolicyModelConfig
from train.model.fsdp import Make, skeleton
from train.own_model.model_class import maker, own_class

_SETTING = "train.model.config_overrides"


def model_folder(model: PolicyModelConfig, policy: Path, into: Path) -> Path:
    """The policy's folder as training reads it: itself, or, where the overrides change its config, a folder below
    ``into`` of links to its files, with another config.json.

    Raises:
        ValueError: as ``read_config``; or the overrides contradict the weights, or the class can't be had.
        feedback.trusted_code.UntrustedCode: it comes with code that may not run.
    """
    trusted(policy)
    stored = json.loads((policy / "config.json").read_text())
    changed = _merged(stored, model.config_overrides)
    if changed == stored:
        return policy
    config = read_config(policy, model)
    require_same_weights(model, read_config(policy, model.model_copy(update={"config_overrides": {}})), config)
    folder = into / "model"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for entry in policy.iterdir():
        if entry.name != "config.json":
            (folder / entry.name).symlink_to(entry.absolute())
    replace_file(folder / "config.json", (json.dumps(changed, indent=2) + "\n").encode())
    return folder


def read_config(policy: Path, model: PolicyModelConfig) -> PretrainedConfig:
    """The config of a policy's folder, or of a config.json, with the overrides.

    Raises:
        ValueError: transformers can't read it; or it has no such key, or not with such a value.
        OSError: there is none.
        feedback.trusted_code.UntrustedCode: it comes with code that may not run.
    """
    own_class(model)
    if policy.name == "config.json":
        policy = policy.parent
    trust = trusted(policy)
    config: PretrainedConfig = AutoConfig.from_pretrained(policy, trust_remote_code=trust)
    if not model.config_overrides:
        return config
    file = policy if policy.is_file() else policy / "config.json"
    stored = json.loads(file.read_text())
    _require_keys(model.config_overrides, config, stored, _SETTING)
    try:
        changed = type(config).from_dict(_merged(stored, model.config_overrides))
    except Exception as error:  # of a class that may be anybody's
        raise ValueError(f"{_SETTING}={model.config_overrides}: {type(config).__name__} refuses it: {error}") from error
    changed.name_or_path = config.name_or_path
    return changed


def require_same_weights(model: PolicyModelConfig, before: PretrainedConfig, after: PretrainedConfig) -> None:
    """Raise ValueError unless the model of the config has the weights that it had, each of its shape, naming the keys
    that are to blame."""
    make = maker(model)
    shapes = _shapes(before, make)
    if (difference := _difference(shapes, _shapes(after, make))) is None:
        return
    to_blame = {
        key: value for key, value in model.config_overrides.items() if _changes_shapes(before, key, value, shapes, make)
    }
    named = to_blame or model.config_overrides
    raise ValueError(f"{_SETTING}={named} contradicts the policy's weights: {difference}")


def _changes_shapes(
    config: PretrainedConfig, key: str, value: Any, shapes: Mapping[str, list[int]], make: Make
) -> bool:
    """Whether a key does so alone; it may make no model without the others."""
    with suppress(Exception):  # of a class that may be anybody's
        changed = type(config).from_dict(_merged(config.to_dict(), {key: value}))
        changed.name_or_path = config.name_or_path
        return _difference(shapes, _shapes(changed, make)) is not None
    return False


def _shapes(config: PretrainedConfig, make: Make) -> dict[str, list[int]]:
    return {name: list(parameter.shape) for name, parameter in skeleton(config, make).named_parameters()}


def _difference(before: Mapping[str, list[int]], after: Mapping[str, list[int]]) -> str | None:
    for name in (*after, *before):
        was, would = before.get(name), after.get(name)
        if was == would:
            continue
        if was is None:
            return f"the model would have {name}, of which there are none"
        if would is None:
            return f"the model would have no {name}, which they have"
        return f"{name} has shape {was}, and would have {would}"
    return None


def _merged(stored: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The file's content with the overrides; the parts of a model that has several (text_config) key by key."""
    found = dict(stored)
    for key, value in overrides.items():
        inner = stored.get(key)
        if key.endswith("_config") and isinstance(inner, dict) and isinstance(value, dict):
            value = _merged(inner, value)
        found[key] = value
    return found


def _require_keys(
    overrides: Mapping[str, Any], config: PretrainedConfig, stored: Mapping[str, Any], setting: str
) -> None:
    known = config.to_dict().keys() | stored.keys()
    for key, value in overrides.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(sorted(known))}"
            raise ValueError(f"{setting}.{key}: {type(config).__name__} has no such key; {hint}")
        part = getattr(config, key, None)
        if isinstance(part, PretrainedConfig) and isinstance(value, Mapping):
            _require_keys(value, part, stored.get(key) or {}, f"{setting}.{key}")
