"""A user's own class for the policy (``train.model.class``), and what each process needs before it reads a policy."""

from __future__ import annotations

import hashlib
import inspect
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from feedback.trusted_code import code_files, consent_to, trusted
from train.config.sections import PolicyModelConfig
from train.import_object import import_subclass
from train.model.fsdp import Make, causal_lm

_SETTING = "train.model.class"

_sha256: dict[type[PreTrainedModel], str] = {}
"""Of the file of each class when it was imported: hours later it may be another."""


def prepare(model: PolicyModelConfig) -> None:
    """Have this process run the code that the settings trust, and no other, and read configs of the user's class."""
    consent_to(model.trusted_code)
    own_class(model)


def own_class(model: PolicyModelConfig) -> type[PreTrainedModel] | None:
    """The class of the settings; None if they name none. Its config can be read from here on, by its ``model_type``.

    Raises:
        ValueError: they name none that can be imported, or one that is no model, or has no class of config.
    """
    if model.class_name is None:
        return None
    found: Any = import_subclass(_SETTING, model.class_name, PreTrainedModel)
    of: Any = found.config_class
    if of is None or not of.model_type:
        raise ValueError(
            f"{_SETTING}={model.class_name!r} has no config_class that has a model_type; name one, such as "
            "transformers.LlamaConfig"
        )
    if of.model_type not in CONFIG_MAPPING:
        AutoConfig.register(of.model_type, of)
    if found not in _sha256 and (file := inspect.getsourcefile(found)) is not None:
        _sha256[found] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return found


def class_sha256(model: PolicyModelConfig) -> str | None:
    """Of the class's file when this process imported it; None without a class, or without a file. As ``own_class``."""
    own = own_class(model)
    return None if own is None else _sha256.get(own)


def maker(model: PolicyModelConfig) -> Make:
    """Makes the policy of a config. Raises as ``own_class``."""
    found = own_class(model)
    if found is None:
        return causal_lm

    def make(config: PretrainedConfig) -> PreTrainedModel:
        if not isinstance(config, found.config_class):
            raise ValueError(
                f"{_SETTING}={model.class_name!r} is of {found.config_class.__name__}, and the policy's config.json of "
                f"{type(config).__name__} (model_type {config.model_type!r})"
            )
        return found(config)

    return make


def lineage(model: PolicyModelConfig, policy: Path) -> dict[str, Any]:
    """What made a policy's model beside transformers: {class, class_sha256, config_overrides, code}, what there is.

    ``code``: the sha256 of each Python file in the policy's folder, if they ran.
    """
    found: dict[str, Any] = {}
    own = own_class(model)
    if own is not None:
        found = {"class": model.class_name}
        if own in _sha256:
            found["class_sha256"] = _sha256[own]
    overrides = {"config_overrides": model.config_overrides} if model.config_overrides else {}
    code = {"code": code_files(policy)} if trusted(policy) else {}
    return found | overrides | code
