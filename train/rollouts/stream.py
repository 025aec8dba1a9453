"""Groups of responses, sampled whatever training does meanwhile: a queue of those that have ended, and what fills it.

Where generation is on a pool of its own, a thread keeps its engines at work, a few steps a call, so that weights can be
exchanged between two calls; what is under way goes on with the new ones. Where training has the same processes, they
sample while a step waits for groups, and what has not ended then goes on in the next step. Another thread has each
response rewarded once it has ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import Condition, Thread
from typing import Any, Final

from feedback.datasets import Prompt
from feedback.processes.exit import skip_teardown
from train.batch.packed import Sample
from train.controller.worker_group import WorkerError
from train.data.rewards import Rewards
from train.rollouts.group import Group
from train.rollouts.request import Request
from train.rollouts.schedule import Schedule

_CALL_S: Final = 0.25
"""How long a call should take: what an exchange of weights and a reward wait for, and much more than a call costs."""
_MOST_STEPS: Final = 256
_LOOK_S: Final = 1.0
"""How long a thread waits before it looks again, whatever it is told."""
_CLOSE_S: Final = 30.0


class RolloutStream:
    """The groups of a run, in order of their numbers. The driver's thread calls all methods.

    Args:
        schedule: what may begin when.
        engines: how many there are.
        size: responses of each group.
        prompt_of: a group's prompt, by its number.
        requests_of: what a group asks for, by its number, a request for each response.
        advance: has engines go on by ``steps``: what each is to begin → (key, what it is) of what has ended on each.
        reward: of responses to prompts, one row each; None if they come with their rewards.
        beside: sampling goes on while training learns.
        timeout_s: how long a step waits for its groups.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        engines: int,
        size: int,
        prompt_of: Callable[[int], Prompt],
        requests_of: Callable[[int, Prompt], list[Request]],
        advance: Callable[..., list[list[tuple[str, Any]]]],
        reward: Callable[[list[tuple[Prompt, Sample]]], Rewards] | None,
        beside: bool,
        timeout_s: float,
    ) -> None:
        self._schedule, self._size, self._beside, self._timeout_s = schedule, size, beside, timeout_s
        self._prompt_of, self._requests_of, self._advance, self._reward = prompt_of, requests_of, advance, reward
        self._changed = Condition()  # held for whatever follows
        self._groups: dict[int, Group] = {}
        """Under way, or ended and not taken."""
        self._places: dict[str, tuple[Group, int, int]] = {}
        """Of what is under way on an engine, by key: its group, its number in it, and the engine."""
        self._load = [0] * engines
        self._steps = 1
        """Of the engines in a call: as many for all ranks, whatever their clocks say."""
        self._unasked: list[Group] = []
        self._unrewarded: list[tuple[Group, int]] = []
        self._next, self._step, self._version = 0, 0, 0
        self._holds, self._turning, self._closing = 0, False, False
        self._failure: BaseException | None = None
        self._threads: list[Thread] = []

    # -------------------------------------------------------------------------------------------------- of a step

    def take(self, step: int) -> list[Group]:
        """The groups of a step, which are all that no step has taken and that are the oldest; waits for them.

        Raises:
            WorkerError: sampling failed, or did not give them in time.
            train.data.rewards.RewardError: a reward can't be had.
        """
        self._begin()
        deadline = time.monotonic() + self._timeout_s
        while True:
            with self._changed:
                self._step = step
                if (chosen := self._chosen()) is not None:
                    taken = [self._groups.pop(number) for number in chosen]
                    self._step = step + 1
                    self._changed.notify_all()
                    return taken
                if time.monotonic() > deadline:
                    raise WorkerError(
                        f"step {step + 1} has waited for its responses for train.step_timeout_s={self._timeout_s:g} s: "
                        f"{len(self._ended())} of the {len(self._groups)} groups under way have ended, and their "
                        f"rewards are there; it takes {self._schedule.per_step}, the oldest among them",
                        kind="hung",
                    )
                if self._beside or not self._has_work():
                    self._changed.wait(_LOOK_S)
                    continue
            self._turn()

    @contextmanager
    def updating(self, version: int) -> Iterator[None]:
        """Nothing is sampled in the block, which gives the engines the weights of this version. Raises as ``take``."""
        with self._changed:
            self._holds += 1
        try:
            with self._changed:
                while self._turning:
                    self._changed.wait(_LOOK_S)  # the call has a timeout
                self._require_well()
            yield
            with self._changed:
                self._version = version
        finally:
            with self._changed:
                self._holds -= 1
                self._changed.notify_all()

    @property
    def queued(self) -> int:
        """Groups that have ended, and that no step has taken."""
        with self._changed:
            return len(self._ended())

    def close(self) -> None:
        """End the threads, as soon as the calls that they are in have ended; what is under way is left."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        deadline = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                skip_teardown(f"the thread of {thread.name} is in the middle of a call")

    # ------------------------------------------------------------------------------------------- of a checkpoint

    def state(self) -> Any:
        """What ``resume`` needs: all that has ended and was not taken, and which groups there are."""
        with self._changed:
            copies = [replace(g, ended=dict(g.ended), rewards=dict(g.rewards)) for g in self._groups.values()]
            following = self._next
        return {"next": following, "groups": [group.kept() for group in copies]}

    def resume(self, state: Mapping[str, Any], *, step: int, episodes: bool) -> None:
        """Go on before ``step``, with weights of as many steps, from a ``state`` of then.

        What was under way begins anew.
        """
        self._next, self._step, self._version = state["next"], step, step
        for kept in state["groups"]:
            prompt = self._prompt_of(kept["number"])
            group = Group.of_kept(kept, prompt, self._size, version=step, episodes=episodes)
            self._groups[group.number] = group
            self._unasked.append(group)
            self._unrewarded += [(group, index) for index in group.ended if self._lacks_reward(group, index)]

    # -------------------------------------------------------------------------------------------------- sampling

    def _begin(self) -> None:
        if self._threads or self._closing:
            return
        work = {"sampling": self._keep_sampling} if self._beside else {}
        if self._reward is not None:
            work["rewards"] = self._keep_rewarding
        self._threads = [Thread(target=self._noting_failure, args=(run,), name=name) for name, run in work.items()]
        for thread in self._threads:
            thread.daemon = True  # a reward may never return
            thread.start()

    def _noting_failure(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:  # noqa: BLE001  raised where the driver waits for groups
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()

    def _keep_sampling(self) -> None:
        while True:
            with self._changed:
                while not self._closing and (self._holds or not self._has_work()):
                    self._changed.wait(_LOOK_S)
                if self._closing:
                    return
                self._turning = True
            self._turn()

    def _turn(self) -> None:
        """Begin what may begin, and have the engines go on by a few steps."""
        answers: list[list[tuple[str, Any]]] = []
        try:
            with self._changed:
                requests = self._due()
            began = time.monotonic()
            answers = self._advance(requests, steps=self._steps)
            longer = _CALL_S / max(time.monotonic() - began, 1e-3)
            self._steps = round(min(_MOST_STEPS, max(1, self._steps * min(2.0, max(0.5, longer)))))
        finally:
            with self._changed:
                self._turning = False
                for key, found in (one for of in answers for one in of):
                    self._note_ended(key, found)
                self._changed.notify_all()

    def _has_work(self) -> bool:
        return bool(self._places or self._unasked or self._may_begin())

    def _may_begin(self) -> bool:
        return self._schedule.may_begin(self._next, len(self._groups), version=self._version, step=self._step)

    def _due(self) -> list[list[Request]]:
        """What each engine is to begin: a group's responses on the one that has the fewest under way."""
        while self._may_begin():
            group = Group(self._next, self._prompt_of(self._next), self._version, self._size)
            self._groups[group.number] = group
            self._unasked.append(group)
            self._next += 1
        requests: list[list[Request]] = [[] for _ in self._load]
        for group in self._unasked:
            engine = self._load.index(min(self._load))
            for index, request in enumerate(self._requests_of(group.number, group.prompt)):
                if index not in group.ended:
                    self._places[request.key] = group, index, engine
                    self._load[engine] += 1
                    requests[engine].append(request)
        self._unasked.clear()
        return requests

    def _note_ended(self, key: str, found: Any) -> None:
        group, index, engine = self._places.pop(key)
        self._load[engine] -= 1
        group.ended[index] = found
        if self._lacks_reward(group, index):
            self._unrewarded.append((group, index))

    def _chosen(self) -> list[int] | None:
        self._require_well()
        began = {number: group.began for number, group in self._groups.items()}
        return self._schedule.choose(self._step, began, self._ended())

    def _ended(self) -> list[int]:
        """The groups of which all is there."""
        rewarded = self._reward is not None
        return [
            number
            for number, group in self._groups.items()
            if len(group.ended) == group.size and (not rewarded or len(group.rewards) == group.size)
        ]

    def _require_well(self) -> None:
        if self._failure is not None:
            raise self._failure

    # --------------------------------------------------------------------------------------------------- rewards

    def _lacks_reward(self, group: Group, index: int) -> bool:
        return self._reward is not None and index not in group.rewards

    def _keep_rewarding(self) -> None:
        """All that waits for its reward is rewarded in one call; what ends meanwhile, in the next."""
        assert self._reward is not None
        while True:
            with self._changed:
                while not self._closing and not self._unrewarded:
                    self._changed.wait(_LOOK_S)
                if self._closing:
                    return
                waiting, self._unrewarded = self._unrewarded, []
                rows: Sequence[tuple[Prompt, Sample]] = [(group.prompt, group.ended[index]) for group, index in waiting]
            found = self._reward(list(rows))
            with self._changed:
                for row, (group, index) in enumerate(waiting):
                    group.rewards[index] = found.row(row)
                self._changed.notify_all()
