"""Episodes with a policy that serves: turns come over /v1/chat/completions, as any client has them."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Final

import httpx

from feedback.processes.exit import skip_teardown
from train.config.environment import EnvironmentConfig
from train.environments.calls import HELD, Caller, guarded, holds_its_thread
from train.environments.environment import Environment, EpisodePrompt, Message, ToolCall
from train.environments.episode import EpisodeDropped
from train.environments.time_limit import EPISODE, Handed

_AT_ONCE: Final = 16
_TURN_S: Final = 0.5
"""How long to wait for an episode before those are looked for whose environments hold their threads."""
_NO_ROOM: Final = "messages"
"""What the server names as wrong where all messages together leave no room for a turn; of one, it says which."""


@dataclass(frozen=True)
class ServedEpisode:
    """``reward``: of all turns; None if it was ``dropped``, for one of ``episode.REASONS``, with ``detail``."""

    reward: float | None
    turns: int
    truncated: bool = False
    dropped: str = ""
    detail: str = ""


@dataclass(frozen=True)
class Turn:
    """What a server answered: the choice's message, its ``finish_reason``, and how many tokens it sampled."""

    message: dict[str, Any]
    finish_reason: str
    tokens: int


class NoRoom(Exception):
    """The messages leave no room for a turn in the server's context; the text is what it says."""


Ask = Callable[[Mapping[str, Any]], Turn]
"""Of the messages, tools and max_tokens of a request, the turn. Raises NoRoom."""


def play(
    prompts: Sequence[EpisodePrompt],
    config: EnvironmentConfig,
    make: Callable[[], Environment],
    *,
    url: str,
    headers: Mapping[str, str],
    body: Mapping[str, Any],
    timeout_s: float,
) -> list[ServedEpisode]:
    """An episode of each prompt, in order.

    Args:
        url: of the server, without /v1.
        body: of all requests, as the model, the longest turn (``max_tokens``) and how it is sampled.
        timeout_s: of a request.

    Raises:
        httpx.HTTPError: the server does not answer, or refuses a request.
    """
    events: SimpleQueue[tuple[int, ServedEpisode | BaseException]] = SimpleQueue()
    waiting, running, found = deque(enumerate(prompts)), dict[int, Handed](), dict[int, ServedEpisode]()
    with httpx.Client(base_url=url, headers=dict(headers), timeout=timeout_s) as client:

        def work(number: int, prompt: EpisodePrompt, of: Handed) -> None:
            def ask(more: Mapping[str, Any]) -> Turn:
                of.since = None
                try:
                    return _turn(client.post("/v1/chat/completions", json={**body, **more}))
                finally:
                    of.since = time.monotonic()

            EPISODE.set(of)
            try:
                events.put((number, play_one(make, prompt, config, ask, longest_turn=body["max_tokens"])))
            except BaseException as error:  # noqa: BLE001  raised where the episodes are waited for
                events.put((number, error))

        while waiting or running:
            while waiting and len(running) < min(_AT_ONCE, config.episodes_at_once):
                number, prompt = waiting.popleft()
                running[number] = Handed(time.monotonic())
                Thread(target=work, args=(number, prompt, running[number]), daemon=True).start()
            try:
                number, outcome = events.get(timeout=_TURN_S)
            except Empty:
                pass
            else:
                if running.pop(number, None) is not None:  # else it was given up
                    if isinstance(outcome, BaseException):
                        raise outcome
                    found[number] = outcome
            for number in [n for n, of in running.items() if holds_its_thread(of.since, config.step_seconds)]:
                del running[number]
                skip_teardown("an environment still holds its thread")
                found[number] = ServedEpisode(None, 0, dropped="timeout", detail=HELD)
    return [found[i] for i in range(len(prompts))]


def _turn(answer: httpx.Response) -> Turn:
    if answer.status_code == httpx.codes.BAD_REQUEST and (error := answer.json()["error"]).get("param") == _NO_ROOM:
        raise NoRoom(error["message"])
    answer.raise_for_status()
    found = answer.json()
    choice = found["choices"][0]
    return Turn(choice["message"], choice["finish_reason"], found["usage"]["completion_tokens"])


def play_one(
    make: Callable[[], Environment], prompt: EpisodePrompt, config: EnvironmentConfig, ask: Ask, *, longest_turn: int
) -> ServedEpisode:
    """One episode; what it is dropped for is its outcome. Raises what ``ask`` raises."""
    with asyncio.Runner() as runner:
        call: Caller | None = None
        try:
            call = Caller(runner, guarded("the constructor", make), config.step_seconds)
            return _play(call, prompt, config, ask, longest_turn)
        except EpisodeDropped as dropped:
            return ServedEpisode(None, 0, dropped=dropped.reason, detail=str(dropped))
        finally:
            if call is not None:
                call.close()


def _play(call: Caller, prompt: EpisodePrompt, config: EnvironmentConfig, ask: Ask, longest_turn: int) -> ServedEpisode:
    messages = call.reset(prompt)
    tools, names = call.tools()
    rewards: list[float | None] = []
    done, ended, left = False, True, config.longest(longest_turn)
    while not done and ended and left > 0 and len(rewards) < config.max_turns:
        request = {"messages": messages, "max_tokens": min(longest_turn, left), **({"tools": tools} if tools else {})}
        try:
            turn = ask(request)
        except NoRoom as error:
            if not rewards:
                raise EpisodeDropped("too_long", str(error)) from None
            break
        ended, left = turn.finish_reason != "length", left - turn.tokens
        calls = [_call(of) for of in turn.message.get("tool_calls") or ()]
        if config.unknown_tool == "drop" and (unknown := [c.name for c in calls if c.name not in names]):
            raise EpisodeDropped("unknown_tool", f"the policy called {unknown[0]!r}; tools are {sorted(names)}")
        observation, reward, done = call.step(turn.message.get("content") or "", calls)
        rewards.append(reward)
        messages = [*messages, _sent(turn.message), *observation]
    if all(reward is None for reward in rewards):
        if done:
            raise EpisodeDropped("no_reward", f"the episode ended after {len(rewards)} turns without a reward")
        rewards[-1] = config.unfinished_reward
    return ServedEpisode(sum(reward or 0.0 for reward in rewards), len(rewards), truncated=not (done and ended))


def _call(found: Mapping[str, Any]) -> ToolCall:
    arguments = found["function"]["arguments"]
    try:
        return ToolCall(found["id"], found["function"]["name"], json.loads(arguments))
    except (ValueError, RecursionError):
        return ToolCall(found["id"], found["function"]["name"], arguments)


def _sent(turn: Mapping[str, Any]) -> Message:
    """A turn as the next request has it."""
    message: Message = {"role": "assistant", "content": turn.get("content") or ""}
    return message | ({"tool_calls": turn["tool_calls"]} if turn.get("tool_calls") else {})
