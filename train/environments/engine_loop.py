"""Many episodes at once on one engine: it goes on sampling those whose turn it is, whatever the others wait for.

Each episode has a thread; the caller's own drives the engine. Turns of any number are in one batch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Final

from feedback.processes.exit import skip_teardown
from serve.generation.tokenizer import Text
from serve.vllm.boot import add_request
from train.batch.packed import Sample
from train.config.environment import EnvironmentConfig
from train.environments.calls import HELD, holds_its_thread
from train.environments.environment import Environment, EpisodePrompt
from train.environments.episode import Episode
from train.environments.episode_loop import Limits, run_episode
from train.environments.time_limit import EPISODE, Handed

_TURN_S: Final = 0.5
"""How long to wait for an environment before deadlines are looked at again."""


@dataclass(frozen=True)
class Start:
    """An episode to play. ``sampling``: of a turn's number, vLLM's parameters of it but for its longest length."""

    prompt: EpisodePrompt
    sampling: Callable[[int], dict[str, Any]]


@dataclass(eq=False)
class _Running(Handed):
    key: str
    start: Start
    reply: SimpleQueue[Sample | None]


@dataclass(frozen=True)
class _Turn:
    of: _Running
    context: list[int]
    max_tokens: int
    turn: int


class _GivenUp(BaseException):
    """Ends the thread of an episode that nobody waits for."""


class Player:
    """Plays episodes on a vLLM engine in this process; ``train.rollouts.responses.Sampling`` says how it is called."""

    def __init__(
        self,
        engine: Any,
        text: Text,
        config: EnvironmentConfig,
        limits: Limits,
        make: Callable[[], Environment],
        params: Callable[..., Any],
        to_sample: Callable[[Any, list[int]], Sample],
        start_of: Callable[[Any], Start],
        salt: Callable[[], str | None] = lambda: None,
        adapter: int | None = None,
    ) -> None:
        """``engine``: vLLM's LLMEngine. ``params``: makes its sampling parameters; ``to_sample`` reads a completion.

        ``start_of``: what a request is of, which has a ``key``. ``salt``: what prefixes are cached under that are
        computed now; None where the weights never change. ``adapter``: the number of the engine's adapter that samples;
        None: its weights do.
        """
        self._engine, self._text, self._config, self._limits = engine, text, config, limits
        self._make, self._params, self._to_sample, self._start_of = make, params, to_sample, start_of
        self._salt, self._adapter = salt, adapter
        self._events: SimpleQueue[_Turn | tuple[_Running, Episode | BaseException]] = SimpleQueue()
        self._waiting: deque[tuple[str, Start]] = deque()
        self._running: dict[str, _Running] = {}
        self._sampling: dict[str, _Turn] = {}

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def samples(self) -> bool:
        return bool(self._sampling)

    def start(self, request: Any) -> None:
        self._waiting.append((request.key, self._start_of(request)))

    def step(self) -> dict[str, Episode]:
        """One step of the engine, or a short wait for environments. Raises what the engine raises."""
        found: dict[str, Episode] = {}
        while self._waiting and len(self._running) < self._config.episodes_at_once:
            self._begin(*self._waiting.popleft())
        self._collect(found, wait=not self._sampling)
        if self._sampling:
            self._step()
        self._give_up(found)
        return found

    def abort(self) -> None:
        self._engine.abort_request(list(self._sampling))
        for running in self._running.values():
            running.reply.put(None)
        for under_way in (self._waiting, self._running, self._sampling):
            under_way.clear()
        self._events = SimpleQueue()  # what threads say from here on is of no interest

    def _begin(self, key: str, start: Start) -> None:
        running = self._running[key] = _Running(time.monotonic(), key, start, SimpleQueue())
        events = self._events

        def sample(context: list[int], max_tokens: int, turn: int) -> Sample:
            events.put(_Turn(running, context, max_tokens, turn))
            if (sampled := running.reply.get()) is None:
                raise _GivenUp
            return sampled

        def work() -> None:
            EPISODE.set(running)
            try:
                played = run_episode(self._make, start.prompt, sample, self._text, self._config, self._limits)
                events.put((running, played))
            except _GivenUp:
                pass
            except BaseException as error:  # noqa: BLE001  raised where the episodes are waited for
                events.put((running, error))

        Thread(target=work, name=f"episode-{key}", daemon=True).start()

    def _collect(self, found: dict[str, Episode], *, wait: bool) -> None:
        """What the episodes' threads have to say; ``wait`` for the first of it."""
        while True:
            try:
                event = self._events.get(timeout=_TURN_S) if wait else self._events.get_nowait()
            except Empty:
                return
            wait = False
            running, outcome = (event.of, event) if isinstance(event, _Turn) else event
            if self._running.get(running.key) is not running:  # it was given up; a later one may have its key
                continue
            if isinstance(outcome, _Turn):
                self._submit(outcome)
                continue
            del self._running[running.key]
            if isinstance(outcome, BaseException):
                raise outcome
            found[running.key] = outcome

    def _submit(self, turn: _Turn) -> None:
        turn.of.since = None
        params = self._params(max_tokens=turn.max_tokens, detokenize=False, **turn.of.start.sampling(turn.turn))
        name = f"{turn.of.key}-{turn.turn}"
        self._sampling[name] = turn
        add_request(self._engine, name, turn.context, params, cache_salt=self._salt(), adapter=self._adapter)

    def _step(self) -> None:
        for output in self._engine.step():
            if not output.finished:
                continue
            turn = self._sampling.pop(output.request_id)
            turn.of.since = time.monotonic()
            turn.of.reply.put(self._to_sample(output.outputs[0], turn.context))

    def _give_up(self, found: dict[str, Episode]) -> None:
        """Drop the episodes whose environments hold their threads: what is cooperative has its own time limit."""
        for key, running in list(self._running.items()):
            if holds_its_thread(running.since, self._config.step_seconds):
                del self._running[key]
                running.reply.put(None)
                skip_teardown("an environment still holds its thread")
                found[key] = Episode(dropped="timeout", detail=HELD)
