"""Environments: what answers the policy's turns in a rollout of several, and rewards them. This file imports no torch.

Read ``environment`` (the protocol, and how to write your own), ``episode`` (what comes of one, and why some are
dropped), ``conversation`` (the tokens of an episode, as sampled), ``episode_loop`` (one episode, from its first
messages to its last turn, by ``calls`` (of its environment, within ``time_limit`` (what counts as that one's
time))) and ``engine_loop`` (many at once on one engine); ``served`` (episodes with a policy that serves, for
evaluation). Millrace's own: ``ready`` (maths, JSON, unit tests, tools).
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from train.import_object import import_object, import_subclass

if TYPE_CHECKING:
    from train.config.environment import EnvironmentConfig
    from train.environments.environment import Environment


def maker(config: EnvironmentConfig) -> Callable[[], Environment]:
    """Makes an environment for an episode. Raises ValueError if the config names none."""
    from train.environments.environment import Environment

    found = import_subclass("train.environment.name", config.target, Environment)
    return lambda: found(**deepcopy(config.arguments))  # each its own: what one changes is no other's


def check(config: EnvironmentConfig) -> str:
    """Make one, so that a run whose environment can't work ends before it loads a model; returns its ``identity``.

    Raises:
        ValueError: the config names none, or its constructor raises.
    """
    make = maker(config)
    try:
        make()
    except (Exception, SystemExit) as error:  # whatever a user's code raises
        raise ValueError(
            f"train.environment={config.name}: with train.environment.arguments={config.arguments} its constructor "
            f"raised {type(error).__name__}: {error}"
        ) from error
    return identity(config)


def identity(config: EnvironmentConfig) -> str:
    """Names all settings of it, and the files of its code: a run that goes on must have the same.

    They are those of its class and of the classes that this inherits from, those of what its arguments name as
    ``module:name``, and, of Millrace's own, those of ``ready``. What these files import is not in it.
    """
    from train.environments.environment import Environment

    digest = hashlib.sha256(json.dumps(config.model_dump(mode="json"), sort_keys=True).encode())
    found = import_subclass("train.environment.name", config.target, object)
    code = {*found.__mro__, *_named(config.arguments)} - {Environment, object}
    files = {Path(file) for of in code if (file := _source_of(of)) is not None}
    if any(file.parent == _READY for file in files):
        files |= set(_READY.glob("*.py"))
    for content in sorted(hashlib.sha256(file.read_bytes()).digest() for file in files):
        digest.update(content)
    return f"environment {config.name} {digest.hexdigest()[:16]}"


_READY: Final = Path(__file__).parent / "ready"


def _source_of(found: Any) -> str | None:
    try:
        return inspect.getsourcefile(inspect.unwrap(found))
    except (TypeError, ValueError):  # C, or no code at all
        return None


def _named(arguments: Any) -> list[Any]:
    """Functions and classes that arguments name as ``module:name``."""
    from feedback.settings_base import FUNCTION

    if isinstance(arguments, dict | list):
        values = arguments.values() if isinstance(arguments, dict) else arguments
        return [found for value in values for found in _named(value)]
    if isinstance(arguments, str) and FUNCTION.fullmatch(arguments) is not None:
        with suppress(ValueError):  # text that only looks like a name
            found = import_object("train.environment.arguments", arguments)
            return [found] if inspect.isroutine(found) or inspect.isclass(found) else []
    return []
