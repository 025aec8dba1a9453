"""A look at a policy as training would read it, before anything is started. Imports no torch by itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from feedback.trusted_code import trusted
from train.config.sections import PolicyModelConfig


@contextmanager
def as_trained(settings: PolicyModelConfig, policy: Path) -> Iterator[Path]:
    """The folder of a policy as training would read it. Raises ValueError, as ``train.own_model`` does."""
    if settings.class_name is None and not settings.config_overrides:
        trusted(policy)
        yield policy
        return
    from train.own_model.overrides import model_folder  # it imports torch

    with TemporaryDirectory() as aside:
        yield model_folder(settings, policy, Path(aside))
