"""What `millrace evaluate --environment` does: episodes of a suite's items with a policy that serves."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any, Final

import click
from pydantic import ValidationError

from deploy.commands.gate.harness import Live, endpoint_server, own_server
from deploy.config import wording
from deploy.config.root import ConfigError, Settings
from deploy.supervise.children import no_leftovers
from evaluation.suites.suite import Suite
from feedback.processes.signals import stop_on_signals
from train import environments
from train.checkpoint.random_state import seed_of
from train.config.environment import EnvironmentConfig
from train.environments.environment import EpisodePrompt
from train.environments.episode import REASONS
from train.environments.served import ServedEpisode, play

_REQUEST_S: Final = 600.0


def run(settings: Settings, name: str, version: int | None, *, endpoint: bool) -> dict[str, Any]:
    """Play an episode of each item of evaluation.suite, greedily, and print what they came to.

    Args:
        name: the environment; where it is that of train.environment, with its settings.
        version: the policy; by default the newest, or with ``endpoint`` the one that serves.

    Raises:
        ConfigError: the environment can't be made, or the server can't be asked.
    """
    config, suite = config_of(settings, name), Suite.load(settings.resolved().evaluation.suite)
    try:
        environments.check(config)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    store = settings.policy_store()
    live = Live.of(settings, version) if endpoint else None
    version = live.version if live is not None else version
    if version is None:
        if (newest := store.latest()) is None:
            raise click.UsageError(f"there is no policy in {store.root}: make a home first (millrace init)")
        version = newest.version
    prompts = [
        EpisodePrompt(item.prompt, item.messages, item.scorer_metadata(), seed_of(i))
        for i, item in enumerate(suite.items)
    ]
    with no_leftovers(), stop_on_signals(), store.hold(version):
        policy = store.verify(version)
        asked = (
            endpoint_server(settings, policy, live, _REQUEST_S)
            if live
            else own_server(with_tools(settings, config), policy)
        )
        with asked as server:
            at = server.endpoint
            body = {"model": at.model, "temperature": 0.0, "max_tokens": settings.train.rollout.max_tokens}
            headers = {"Authorization": f"Bearer {at.key}"}
            make = environments.maker(config)
            played = play(prompts, config, make, url=at.url, headers=headers, body=body, timeout_s=_REQUEST_S)
            server.check()
    found = summary(played)
    click.echo(f"{name} with policy {version}: {shown(found)}")
    items = [{"id": item.id, **asdict(episode)} for item, episode in zip(suite.items, played, strict=True)]
    return {"policy": version, "environment": environments.identity(config), **found, "items": items}


def config_of(settings: Settings, name: str) -> EnvironmentConfig:
    """The settings of train.environment, if it is the one that is named; else those of one without any.

    Raises ConfigError for none.
    """
    own = settings.train.environment
    try:
        return own if own is not None and own.name == name else EnvironmentConfig(name=name)
    except ValidationError as error:
        raise ConfigError(f"--environment {name}: {wording.wrong(error.errors()[0])}") from None


def with_tools(settings: Settings, config: EnvironmentConfig) -> Settings:
    """For a server of our own: the parser of calls that training has."""
    if config.tool_parser is None:
        return settings
    openai = settings.serve.openai.model_copy(update={"tool_parser": config.tool_parser})
    return settings.model_copy(update={"serve": settings.serve.model_copy(update={"openai": openai})})


def summary(played: list[ServedEpisode]) -> dict[str, Any]:
    """Numbers of all episodes; ``reward`` is None where none has any."""
    rewards = [episode.reward for episode in played if episode.reward is not None]
    turns = [episode.turns for episode in played if not episode.dropped]
    return {
        "reward": sum(rewards) / len(rewards) if rewards else None,
        "turns": sum(turns) / len(turns) if turns else None,
        "episodes": len(played),
        "truncated": sum(episode.truncated for episode in played),
        "dropped": dict(Counter(episode.dropped for episode in played if episode.dropped)),
    }


def shown(found: dict[str, Any]) -> str:
    lost = "; ".join(f"{count} dropped because {REASONS[reason]}" for reason, count in found["dropped"].items())
    if found["reward"] is None:
        return lost
    text = f"reward {found['reward']:.3f} in {found['episodes']} episodes of {found['turns']:.1f} turns"
    return text + (f"; {lost}" if lost else "")
