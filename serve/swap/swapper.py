"""The swap, step by step, in one replica: follow the store's serving pointer without failing a request.

Prepare, still serving: compare, verify, prepare standby weights -> commit: exchange the weights between two engine
steps -> prove it by the numbers in the manifest. Requests in flight go on under the new policy. If anything fails, the
old weights are what serves, the replica says so, and the pointer's generation is not tried again.

While an experiment holds (``serve.policies.experiments``), its two policies take turns in place of the pointer's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from serve.config import SwapConfig
from serve.engine import EngineError
from serve.policies.adapter_files import rank_of
from serve.policies.experiments import Experiment, ExperimentReader, Turn
from serve.policies.folder import StoreUnreachable, fingerprint
from serve.policies.probe import Numbers, judge
from serve.policies.records import append_json, now
from serve.policies.store import Pointer, Policy, PolicyCorrupt, PolicyError, PolicyStore, StalePointer
from serve.policies.whole_policies import whole
from serve.standby_room import size_text
from serve.swap.compatibility import require_compatible, require_same_but_weights
from serve.swap.verification import read, verify
from serve.vllm.engine import Engine, Exchanged, Weights

log = logging.getLogger(__name__)

REMEMBERED: Final = 20
_RETRY_S: Final = 5.0
_TENANTS_AGAIN_S: Final = 60.0


@dataclass(frozen=True)
class Swap:
    """One swap as it is recorded; times in milliseconds.

    ``prepare_ms``: while the old policy served; ``hold_ms``: how long no token could be sampled; ``in_place``: loaded
    into the live weights, not exchanged; ``probe``: how far the logprobs were from the manifest's, or why that isn't
    known.
    """

    at: str
    from_version: int
    to_version: int
    generation: int
    ok: bool
    error: str | None
    prepare_ms: float
    hold_ms: float = 0.0
    in_flight: int = 0
    in_place: bool = False
    probe: str = ""

    def to_json(self) -> dict[str, Any]:
        """The record with its keys as they are written: ``from`` and ``to``."""
        record = asdict(self)
        return {"at": record.pop("at"), "from": record.pop("from_version"), "to": record.pop("to_version"), **record}


class StaleWeights(EngineError):
    """What serves after a swap is not what the policy's manifest says it computes."""


@dataclass(frozen=True)
class Prepared:
    """A policy that only needs ``commit``. ``before``: what the old policy gave where ``numbers`` has the new one's.

    ``loaded``: the engine has it beside what serves, as an adapter or as the weights under it.
    """

    weights: Weights
    in_place: bool
    numbers: Numbers | str
    before: list[list[float]] | None
    loaded: bool = False


@dataclass(frozen=True)
class DesiredState:
    """What a replica should serve, and what it should have prepared beside that.

    ``turn``: its part in an experiment, in place of ``serve``, until ``turn_ends`` in seconds of Unix time.
    ``beside``: the experiment whose two policies are both to answer, each its own users. ``candidate``: the version
    that the gate is at work on; nothing but time is lost if it can't be prepared.
    """

    serve: Pointer | None
    prepare: Pointer | None = None
    turn: Turn | None = None
    turn_ends: float | None = None
    beside: Experiment | None = None
    candidate: int | None = None


def block_turn(experiment: Experiment | None, pointer: Pointer | None) -> DesiredState:
    """What a replica should serve that takes turns between two policies, if an experiment holds."""
    if experiment is None:
        return DesiredState(pointer)
    block = experiment.block_at(time.time())
    return DesiredState(pointer, turn=experiment.turn(block), turn_ends=experiment.begins(block + 1))


class Swapper:
    """Keeps one engine on the policy that the store's pointer names, or ``desired_state``."""

    def __init__(
        self,
        store: PolicyStore,
        engine: Engine,
        config: SwapConfig,
        record: Path,
        *,
        observe: Callable[[Swap], None] = lambda swap: None,
        desired_state: Callable[[], DesiredState] | None = None,
        name: str = "server",
    ) -> None:
        """``record``: the file that each swap is appended to, one JSON a line; ``observe`` is called after each.

        ``desired_state``: read at every turn in place of the store's pointer; may raise PolicyError or OSError. Without
        it, the pointer is moved back from a policy that is refused, by ``name``.
        """
        self.store = store
        self.engine = engine
        self.config = config
        self.record = record
        self.broken: str | None = None
        """Why the engine can't serve any more, if a swap failed and the old weights could not be put back."""
        self.failed: dict[str, Any] | None = None
        """The pointer that could not be followed, or prepared for, until another one is."""
        self.name = name
        self.way: dict[str, Any] = {"in_place": bool(config.in_place), "reason": "the engine has not started"}
        """How policies are swapped, and why, as it was decided when the engine started."""
        self.agree: Callable[[], Awaitable[None]] = _alone
        """Has the other API processes know what serves, and returns when they do."""
        self.turn: Turn | None = None
        """What of an experiment is served at the moment, from the exchange of the weights on until the next one."""
        room = engine.config.adapters
        self._of_tenants = frozenset() if room is None else frozenset(room.tenants.values())
        self._loaded_for = ""  # the label of the weights beside which those of tenants were last loaded
        self._tenants_wait = "", 0.0  # the label of those beside which some can't be, and when to try again
        self.beside: Experiment | None = None
        """The experiment whose two policies both answer, each its own users."""
        self.experiments = store.experiments
        self._reader = ExperimentReader(self.experiments)
        self._taking_turns: int | None = None  # the experiment whose policies take turns
        self._turn_ends: float | None = None  # of the turn that was last desired
        self._by_user: int | None = None  # the last experiment that needs a fleet, and that the log names
        self._retry_at = 0.0  # by time.monotonic
        self._void: int | None = None  # the last experiment that this replica could not serve its part of
        self._desired_state = desired_state
        self._ready: tuple[int | None, Prepared] | None = (
            None  # the generation that was prepared for; a candidate's: None
        )
        self._readied = 0  # the newest generation that was prepared for, well or not
        self._candidate: int | None = None  # the last that was announced
        self._preparing: asyncio.Task[None] | None = None  # what is prepared of it
        self._verified: Weights | None = None  # by their files; the engine loads no others than those
        self._observe = observe
        self._serving: Weights  # from start on
        self._base: Weights  # those that the engine has: of what serves, or of what that is an adapter of
        self._spare: Weights | None = None  # the standby weights
        self._held = ExitStack()  # the policy that serves, so that nobody prunes it
        self._logged_reason: str | None = None  # why weights are loaded in place
        self._pointer: Pointer | None = None
        self._seen = 0  # the newest generation that was acted upon, well or not
        self._since = now()
        self._store: str | None = None
        self._swaps: deque[Swap] = deque(maxlen=REMEMBERED)
        self._task: asyncio.Task[None] | None = None
        self._at_work = asyncio.Lock()  # held by a step, and while the server sleeps

    async def start(self) -> None:
        """Start the engine on what the pointer names and begin to follow the pointer.

        Raises PolicyError (no pointer, no such policy, a damaged one), EngineError.
        """
        pointer = self.require_policy()
        await asyncio.to_thread(self._held.enter_context, self.store.hold(pointer.version))
        policy, adapter, base = self.store.get(pointer.version), None, pointer.version
        if self._fits_beside(policy):
            assert policy.base is not None
            adapter, base = await self._read(pointer.version), policy.base["version"]
        self._base = await self._started_on(self.store.get(base))
        self._serving = adapter or self._base
        await self._note_way()
        if adapter is not None:
            await self.engine.put_adapter(adapter, self.config.prepare_timeout_s)
            self.engine.serve(pointer.version)
        try:
            await self._load_for_tenants()
        except StoreUnreachable as error:
            log.error("tenants with a policy of their own wait until the store answers: %s", error)
        numbers = Numbers.of(self.policy.probe) if self.config.probe else "serve.swap.probe is off"
        proof = await self._prove(Prepared(self._serving, in_place=False, numbers=numbers, before=None))
        log.info("probe of policy %d: %s", self.engine.version, proof)
        await asyncio.to_thread(self._record_served, pointer)
        self._pointer, self._seen, self._since = pointer, pointer.generation, now()
        self._store = await asyncio.to_thread(self.store.identity)
        await asyncio.to_thread(self.store.follow, self.config.poll_seconds)
        self._task = asyncio.create_task(self._follow(), name="swapper")

    async def _started_on(self, policy: Policy) -> Weights:
        """Start the engine, and meanwhile read the policy whole; its weights.

        Raises PolicyError, whatever the engine makes of damaged files, and EngineError.
        """
        reading = asyncio.create_task(self._read(policy.version))
        if self.store.uri is not None or policy.base is not None:  # its files come, or are made, as it is read
            policy = (await reading).policy
        reading.add_done_callback(self._give_up_on_damaged)
        log.info("starting the engine on policy %d", policy.version)
        started = time.monotonic()
        try:
            await self.engine.start(policy)
        except BaseException as error:
            if not isinstance(error, Exception):
                reading.cancel()
            elif reading.done() or isinstance(error, EngineError):
                await reading
            raise
        log.info("the engine runs after %.1f s", time.monotonic() - started)
        weights = await reading
        for file in policy.weight_files:
            *before, _ = weights.files[file.name]["fingerprint"]  # without the time of its status: links come and go
            if not file.exists() or fingerprint(file)[:-1] != before:
                raise PolicyCorrupt(f"policy {policy.version}: {file.name} was changed while the engine read it")
        return weights

    def _give_up_on_damaged(self, reading: asyncio.Task[Weights]) -> None:
        if not reading.cancelled() and reading.exception() is not None:
            self.engine.give_up()

    def require_policy(self) -> Pointer:
        """What to start on. Raises PolicyError: none, no such policy, or one whose files are not as long as they were.

        That takes no time; ``start`` reads them whole.
        """
        pointer = self._desired().serve
        if pointer is None:
            raise PolicyError(f"{self.store.root} has no serving policy yet: promote one first (millrace init)")
        self.store.get(pointer.version).require_whole()
        return pointer

    async def close(self) -> None:
        """Stop following. A swap under way is brought to its end first, by its own timeouts."""
        task, self._task = self._task, None
        self.store.unfollow()  # a download under way is broken off, and goes on when the next server needs it
        try:
            if task is not None:
                task.cancel()
                await task
        except asyncio.CancelledError:
            if task is None or not task.cancelled():  # it is this call that was cancelled
                raise
        finally:
            await self._settle_candidate(None)
            self._held.close()

    async def rest(self) -> None:
        """Return when nothing is being exchanged, with no second set of weights there; nothing is until ``go_on``."""
        await self._at_work.acquire()
        try:
            await self._settle_candidate(None)
            await self._discard_prepared()
            if self._spare is not None:
                self._spare = None
                await self._release()
        except BaseException:
            self._at_work.release()
            raise
        self._candidate = None  # it is prepared anew

    def go_on(self) -> None:
        """Follow the pointer again, to where it has moved since."""
        self._at_work.release()

    @property
    def healthy(self) -> bool:
        """Whether pointer changes are noticed and the engine holds whole weights."""
        return self.broken is None and self._task is not None and not self._task.done()

    def status(self) -> dict[str, Any]:
        """What ``GET /policy`` says of this replica."""
        pointer, turn = self._pointer, self.turn
        return {
            "version": self.engine.version,
            "previous": pointer.previous if pointer else None,
            "since": self._since,
            "generation": pointer.generation if pointer else 0,
            "swaps": [swap.to_json() for swap in self._swaps],
            "failed": self.failed,
            "prepared": self._ready[1].weights.policy.version if self._ready is not None else None,
            "experiment": asdict(turn) if turn is not None else None,
            "base": self.engine.base,
            "loaded": sorted(self.engine.loaded),
            "store": self._store,
            "swap": self.way,
        }

    async def _note_way(self) -> None:
        """Say how policies will be swapped: whoever operates the server should not learn it from the first swap."""
        room, reason = self.engine.room, await self._in_place_reason()
        self.way = {"in_place": reason is not None, "reason": reason or room.reason}
        if reason is None:
            (log.warning if room.short else log.info)("swaps exchange weights: %s", room.reason)
            return
        kept = f"; {size_text(room.second)} that the engine has left free for them are of no use" if room.second else ""
        log.warning("swaps load weights in place, and requests wait for the load: %s%s", reason, kept)
        self._logged_reason = reason

    async def _in_place_reason(self) -> str | None:
        """Why there is no second set of weights; None if there is."""
        if self.config.in_place:
            return "serve.swap.in_place is set"
        if self.config.in_place is None and self.engine.room.in_place:
            return self.engine.room.reason
        return await self.engine.unsupported_reason()

    async def _follow(self) -> None:
        unreadable = unreachable = None
        while self.broken is None:
            await asyncio.sleep(self._pause())
            async with self._at_work:
                try:
                    desired = self._desired()
                    self._turn_ends = desired.turn_ends
                    unreadable = None
                except (PolicyError, OSError) as error:
                    if str(error) != unreadable:  # once, not at every turn
                        log.error("the serving pointer can't be read, policy %d stays: %s", self.engine.version, error)
                    unreadable = str(error)
                    continue
                before = self._seen, self._readied
                if (step := self._step(desired)) is None:
                    continue
                # Shielded: once begun, a swap is finished or undone, also when the server stops.
                swap = asyncio.create_task(step, name="swap")
                try:
                    await asyncio.shield(swap)
                except asyncio.CancelledError:
                    with suppress(StoreUnreachable):  # nothing was exchanged
                        await swap
                    raise
                except StoreUnreachable as error:  # that says nothing of the policy, which is tried again
                    if str(error) != unreachable:
                        log.error("policy %d stays for now: %s", self.engine.version, error)
                    unreachable = str(error)
                    self._seen, self._readied = before
                    await asyncio.sleep(_RETRY_S)
                except (EngineError, TimeoutError) as error:
                    log.error("policy %d stays, and the policy store is followed on: %s", self.engine.version, error)
                    await asyncio.sleep(_RETRY_S)
                else:
                    unreachable = None

    def _step(self, desired: DesiredState) -> Coroutine[Any, Any, None] | None:
        """What to do next, if anything."""
        pointer, turn = desired.serve, desired.turn
        if pointer is not None and turn is not None and turn.experiment != self._void:
            if turn != self.turn or pointer.generation != self._seen:
                return self._take_turn(turn, pointer)
            return self._load_for_tenants() if self._tenants_due() else None
        if pointer is not None and self._taking_turns is not None:
            return self._end_turns(pointer) if time.monotonic() >= self._retry_at else None
        if self.beside is not None and desired.beside is None:
            return self._answer_beside(None)  # first: what is promoted may need the places of its policies
        if pointer is not None and pointer.generation != self._seen:
            self._seen = pointer.generation
            return self._act(pointer)
        if self._tenants_due():
            return self._load_for_tenants()
        if desired.beside != self.beside and (desired.beside is None or desired.beside.number != self._void):
            return self._answer_beside(desired.beside)
        if desired.prepare is not None and desired.prepare.generation != self._readied:
            self._readied = desired.prepare.generation
            return self._prepare_ahead(desired.prepare)
        if desired.prepare is not None:
            return None
        if desired.candidate != self._candidate:
            return self._follow_candidate(desired.candidate)
        if self._ready is not None and (self._ready[0] is not None or desired.candidate is None):
            return self._discard_prepared()
        return None

    def _pause(self) -> float:
        """Until the next look at what is desired: at the latest when another block of an experiment begins."""
        if self.turn is None or self._turn_ends is None:
            return self.config.poll_seconds
        return min(self.config.poll_seconds, max(0.0, self._turn_ends - time.time()))

    def _desired(self) -> DesiredState:
        # Before the pointer: once a candidate is announced no more, the pointer has moved to it, or never will.
        candidate = self.store.announced() if self.config.prepare_early else None
        if self._desired_state is not None:
            return replace(self._desired_state(), candidate=candidate)
        pointer = self.store.serving()
        experiment = None if pointer is None else self._reader.under(pointer.generation)
        if experiment is not None and experiment.unit == "user":
            if self._has_room_for(experiment):
                return DesiredState(pointer, beside=experiment, candidate=candidate)
            if self._by_user != experiment.number:
                self._by_user = experiment.number
                log.warning(
                    "experiment %d shares traffic between the replicas of a fleet, or adapters of one base, and this "
                    "is one server with another base: policy %d serves alone, and nothing counts for the experiment",
                    experiment.number,
                    pointer.version if pointer is not None else 0,
                )
            experiment = None
        return replace(block_turn(experiment, pointer), candidate=candidate)

    def _has_room_for(self, experiment: Experiment) -> bool:
        """Whether both of its policies can answer at once: adapters of the weights that the engine has, or those."""
        if (room := self.engine.config.adapters) is None:
            return False
        try:
            arms = [self.store.get(version) for version in (experiment.candidate, experiment.control)]
            adapters = sum(arm.base is not None for arm in arms)
            return all(map(self._beside, arms)) and adapters <= room.count - len(self._of_tenants)
        except PolicyError as error:
            log.error("experiment %d can't be taken part in: %s", experiment.number, error)
            return False

    async def _answer_beside(self, experiment: Experiment | None) -> None:
        """Have both policies of an experiment answer, or none but the one that serves. What can't be had ends it."""
        if experiment is None or self.beside is None or experiment.number != self.beside.number:
            self.beside, self.engine.kept = None, self._of_tenants
            await self.agree()
        if experiment is None:
            return
        await self._settle_candidate(None)
        self.engine.kept = self._of_tenants | {experiment.candidate, experiment.control}
        for version in (experiment.control, experiment.candidate):
            if (why := await self._load_beside(version)) is not None:
                self._void, self.engine.kept = experiment.number, self._of_tenants
                log.error("experiment %d can't go on: %s", experiment.number, why)
                of_candidate = version == experiment.candidate
                await asyncio.to_thread(self._stop_experiment, experiment.number, why, of_candidate)
                return
        self.beside = experiment
        await self.agree()

    async def _load_beside(self, version: int) -> str | None:
        """Have a policy answer beside the one that serves, if it can and does what its manifest says; else why not."""
        if version in self.engine.loaded:
            return None
        try:
            policy = await asyncio.to_thread(self._compatible, version)
            if not self._beside(policy):
                return f"policy {version} is no adapter of policy {self._base.policy.version}, whose weights are loaded"
            proof = await self._prove(await self._prepare_beside(policy), version)
        except StoreUnreachable:
            raise
        except Exception as failure:  # noqa: BLE001 - whatever it was, what serves goes on and the cause is recorded
            self.engine.reject(version)
            return f"policy {version} was refused: {_describe(failure)}"
        self.engine.admit(version)
        log.info("policy %d answers beside policy %d; probe: %s", version, self.engine.version, proof)
        return None

    async def _load_for_tenants(self) -> None:
        """Have the policies answer that tenants have of their own. Those that can't be had are refused to them.

        These are tried again, and so are all after StoreUnreachable.
        """
        label, missing = self.engine.label, False
        self.engine.kept |= self._of_tenants
        try:
            for version in sorted(self._of_tenants):
                if (why := await self._load_beside(version)) is not None:
                    missing = True
                    log.error("no request of the tenants of policy %d is answered: %s", version, why)
        finally:
            self.engine.on_load()
        if missing:
            self._tenants_wait = label, time.monotonic() + _TENANTS_AGAIN_S
        else:
            self._loaded_for = label

    def _tenants_due(self) -> bool:
        """Whether policies of tenants are to be loaded beside the weights that the engine has."""
        label, again = self._tenants_wait
        tried = label == self.engine.label and time.monotonic() < again
        return bool(self._of_tenants) and self._loaded_for != self.engine.label and not tried

    async def _take_turn(self, turn: Turn, pointer: Pointer) -> None:
        """Serve the policy whose block it is. What can't be served ends the experiment, and the pointer counts."""
        self._taking_turns = turn.experiment
        if turn.version != self.engine.version:
            self.turn = None  # what begins during the exchange belongs to neither
            await self.agree()
            swap = await self.swap_to(replace(pointer, version=turn.version))
            await self._note(swap)
            if not swap.ok:
                self._void = turn.experiment
                why = f"policy {turn.version} was refused: {swap.error}"
                log.error("experiment %d can't go on: %s", turn.experiment, why)
                await asyncio.to_thread(self._stop_experiment, turn.experiment, why, turn.variant == "candidate")
                return
        if pointer.generation != self._seen:
            await asyncio.to_thread(self._record_served, pointer)
            self._pointer, self._seen, self.failed = pointer, pointer.generation, None
        self.turn = turn
        await self.agree()

    async def _end_turns(self, pointer: Pointer) -> None:
        """Serve what the pointer names, or named: the next step follows it to where it is now.

        Tried until it works: nobody has decided that the other policy may serve.
        """
        self.turn = None
        await self.agree()
        decided = pointer if self._pointer is None or pointer.generation == self._seen else self._pointer
        if self.engine.version not in (decided.version, pointer.version):
            swap = await self.swap_to(decided)
            await self._note(swap)
            if not swap.ok and pointer.generation == self._seen:
                self._fail(decided, swap.error or "")
                self._retry_at = time.monotonic() + _RETRY_S
                log.error("policy %d does not serve again yet: %s", decided.version, swap.error)
                return
        self._taking_turns, self.failed = None, None
        if self._spare is not None and not self.config.shadow_weights:
            self._spare = None
            await self._release()

    def _stop_experiment(self, number: int, why: str, of_candidate: bool) -> None:
        """Only what is wrong with the candidate speaks against it."""
        decision = "failed" if of_candidate else "void"
        try:
            self.experiments.stop(number, who=self.name, why=why, decision=decision)
        except (PolicyError, OSError) as error:
            log.error("that experiment %d is over can't be put on record: %s", number, error)

    async def _act(self, pointer: Pointer) -> None:
        if pointer.version == self.engine.version:
            await asyncio.to_thread(self._record_served, pointer)
            self._pointer, self.failed = pointer, None
            await self._discard_prepared()
            return
        swap = await self.swap_to(pointer)
        if swap.ok:
            await asyncio.to_thread(self._record_served, pointer)
            self._pointer, self.failed = pointer, None
            log.info("policy %d serves, held for %.1f ms; probe: %s", swap.to_version, swap.hold_ms, swap.probe)
        else:
            log.error("policy %d refused, %d stays: %s", swap.to_version, swap.from_version, swap.error)
            decided = self._pointer is None or self._pointer.version == swap.from_version  # no policy on trial
            if self._desired_state is None and self.broken is None and self.engine.healthy and decided:
                await asyncio.to_thread(self._move_back, pointer, swap)
            self._fail(pointer, swap.error or "")
        await self._note(swap)

    async def _note(self, swap: Swap) -> None:
        """Put a swap on record."""
        if swap.ok:
            self._since = swap.at
        self._swaps.append(swap)
        self._observe(swap)
        try:
            await asyncio.to_thread(append_json, self.record, swap.to_json())
        except OSError as error:
            log.error("the swap to policy %d could not be recorded: %s", swap.to_version, error)

    def _record_served(self, pointer: Pointer) -> None:
        """Put on record that the policy serves, so that it can be rolled back to; of a fleet, its controller does."""
        if self._desired_state is not None:
            return
        try:
            self.store.record_outcome(pointer, served=True, by=self.name)
        except (PolicyError, OSError) as error:
            log.error("that policy %d serves can't be put on record: %s", pointer.version, error)

    def _move_back(self, pointer: Pointer, swap: Swap) -> None:
        """Have the store's pointer name again what serves: else the next start would try the refused policy.

        An engine that died says nothing of the policy: then the pointer stays, and the next start serves what it names.
        """
        try:
            why = f"policy {swap.to_version} was refused: {swap.error}"
            back = self.store.move_back(pointer, swap.from_version, who=self.name, why=why)
        except StalePointer as error:  # it was moved meanwhile; the next turn reads where it is
            log.info("%s", error)
        except (PolicyError, OSError) as error:
            log.error("the serving pointer stays at policy %d: %s", pointer.version, error)
        else:
            self._pointer, self._seen = back, back.generation

    async def swap_to(self, pointer: Pointer) -> Swap:
        """Serve another policy from the next token on, or keep the old one; which it was is in the result."""
        started = time.monotonic()
        with ExitStack() as held:
            try:
                await self._settle_candidate(pointer.version)
                await self._discard_unless_ready(pointer.version)
                await asyncio.to_thread(held.enter_context, self.store.hold(pointer.version))
                prepared = self._ready[1] if self._ready is not None else await self.prepare(pointer.version)
            except StoreUnreachable:
                raise
            except Exception as failure:  # noqa: BLE001 - whatever it was, the old policy serves on and the cause is recorded
                return Swap(
                    at=now(),
                    from_version=self.policy.version,
                    to_version=pointer.version,
                    generation=pointer.generation,
                    ok=False,
                    error=_describe(failure),
                    prepare_ms=_since_ms(started),
                )
            self._ready = self._verified = None
            swap = await self.commit(prepared, pointer.generation, prepare_ms=_since_ms(started))
            if swap.ok:
                self._held.close()
                self._held = held.pop_all()
            return swap

    @property
    def prepared(self) -> tuple[int, Policy] | None:
        """The generation that only needs a commit, and its policy. A candidate has none."""
        if self._ready is None or (generation := self._ready[0]) is None:
            return None
        return generation, self._ready[1].weights.policy

    @property
    def policy(self) -> Policy:
        """What serves."""
        return self._serving.policy

    async def _follow_candidate(self, version: int | None) -> None:
        """Begin to prepare a candidate, in place of another one, and in a task of its own: no swap waits for that."""
        await self._settle_candidate(None)
        await self._discard_prepared()
        self._candidate, self._verified = version, None
        if version is not None and version != self.engine.version:
            self._preparing = asyncio.create_task(self._prepare_candidate(version), name="prepare a candidate")

    async def _settle_candidate(self, version: int | None) -> None:
        """Have the preparation of that version come to its end, and that of another one given up."""
        task, self._preparing = self._preparing, None
        if task is not None:
            if version != self._candidate:
                task.cancel()
            await asyncio.wait({task})

    async def _prepare_candidate(self, version: int) -> None:
        """Do what can be done of a swap while the gate is still at work."""
        started = time.monotonic()
        try:
            policy = await asyncio.to_thread(self._compatible, version)
            if policy.version != self._base.policy.version:
                self._verified = await self._verify(policy)
            if self._spare is None:  # else that is worth more: this may be refused
                self._ready = None, await self.prepare(version)
        except Exception as failure:  # noqa: BLE001 - if it is promoted, the swap says so, and what becomes of it
            log.warning("candidate %d can't be prepared yet: %s", version, _describe(failure))
        else:
            log.info("candidate %d is prepared after %.0f ms, and does not serve", version, _since_ms(started))

    async def _prepare_ahead(self, pointer: Pointer) -> None:
        await self._settle_candidate(pointer.version)
        if self._ready is not None and self._ready[1].weights.policy.version == pointer.version:
            self._ready = pointer.generation, self._ready[1]
            return
        await self._discard_prepared()
        try:
            self._ready = pointer.generation, await self.prepare(pointer.version)
        except StoreUnreachable:
            raise
        except Exception as failure:  # noqa: BLE001 - whatever it was, the old policy serves on and the cause is recorded
            self._fail(pointer, _describe(failure))
            log.error("policy %d can't be prepared: %s", pointer.version, _describe(failure))

    async def _discard_unless_ready(self, version: int) -> None:
        """Give up what was prepared, unless it is that policy and needs no more than a commit.

        In place, a commit reads the files, which must be as they were verified; an adapter may have had to make room.
        """
        if self._ready is None:
            return
        prepared = self._ready[1]
        ready = prepared.weights.policy.version == version
        if ready and prepared.in_place:
            ready = await asyncio.to_thread(_untouched, prepared.weights)
        elif ready and prepared.loaded:
            ready = self.engine.holds(version)
        if not ready:
            await self._discard_prepared()

    async def _discard_prepared(self) -> None:
        """Give up what was prepared and is not wanted any more."""
        ready, self._ready = self._ready, None
        if ready is None:
            return
        if ready[1].loaded:
            self.engine.discard(ready[1].weights.policy.version)
        else:
            await self._release()

    async def _release(self) -> None:
        """Free the second set of weights; an engine that is in a long step does so when it gets to it."""
        with suppress(TimeoutError):
            await self.engine.release()

    def _fail(self, pointer: Pointer, error: str) -> None:
        self.failed = {"version": pointer.version, "generation": pointer.generation, "error": error, "at": now()}

    async def prepare(self, version: int) -> Prepared:
        """All of a swap that can be done while the old policy serves undisturbed.

        Raises PolicyError, EngineError, TimeoutError with what is wrong; nothing has changed then.
        """
        config = self.config
        policy = await asyncio.to_thread(self._compatible, version)
        if self._beside(policy):
            return await self._prepare_beside(policy)
        weights = await self._verify(policy)
        reason = await self._in_place_reason()
        self._spare = None
        if reason is None:
            await self.engine.prepare_standby(
                weights, spare_bytes=config.spare_bytes, timeout_s=config.prepare_timeout_s
            )
        elif reason != self._logged_reason:
            log.warning("weights are loaded in place, requests wait for the load: %s", reason)
            self._logged_reason = reason
        numbers = self._numbers(policy)
        try:
            before = await self._ask(numbers) if isinstance(numbers, Numbers) else None
        except BaseException:  # a candidate's that is given up, too
            await self._release()
            raise
        return Prepared(weights, in_place=reason is not None, numbers=numbers, before=before)

    async def _prepare_beside(self, policy: Policy) -> Prepared:
        """Have the engine hold an adapter of the weights that it has, on trial; or those are what is wanted."""
        weights = self._base
        if policy.version != self._base.policy.version:
            weights = await self._verify(policy)
            await self.engine.put_adapter(weights, self.config.prepare_timeout_s)
        numbers = self._numbers(policy)
        try:
            before = await self._ask(numbers) if isinstance(numbers, Numbers) else None
        except BaseException:  # a candidate's that is given up, too
            self.engine.discard(policy.version)
            raise
        return Prepared(weights, in_place=False, numbers=numbers, before=before, loaded=True)

    def _numbers(self, policy: Policy) -> Numbers | str:
        return Numbers.of(policy.probe) if self.config.probe else "serve.swap.probe is off"

    def _fits_beside(self, policy: Policy) -> bool:
        """Whether it is an adapter that the engine has room for, beside the weights that it is of."""
        room = self.engine.config.adapters
        return room is not None and policy.base is not None and rank_of(policy.path) <= room.rank

    def _beside(self, policy: Policy) -> bool:
        """Whether it is an adapter of the weights that the engine has, or those themselves."""
        base = self._base.policy
        if policy.version == base.version:
            return True
        return self._fits_beside(policy) and policy.base == {"version": base.version, "sha256": base.sha256}

    async def _read(self, version: int) -> Weights:
        """A policy's weights, verified, as the engine can have them: an adapter that it has no room for merged."""
        policy = self.store.get(version)
        merged = not self._fits_beside(policy)
        files = await asyncio.to_thread(read, self.store, version, check_finite=False, merged=merged)
        return Weights(await asyncio.to_thread(whole, policy) if merged else policy, files)

    async def _verify(self, policy: Policy) -> Weights:
        """Its weights as they were when their files were read whole, now or before.

        Raises PolicyError, TimeoutError.
        """

        def are_those(known: Weights) -> bool:
            # Known weights are those of one version: another one with the same bytes has files and a label of its own.
            return (known.policy.version, known.policy.files) == (policy.version, policy.files)

        spare, verified = self._spare, self._verified
        if spare is not None and are_those(spare):
            return spare  # the engine has them, and reads no file
        if verified is not None and are_those(verified) and await asyncio.to_thread(_untouched, verified):
            return verified
        config = self.config
        files = await verify(
            self.store,
            policy.version,
            check_finite=config.check_finite,
            timeout_s=config.prepare_timeout_s,
            merged=policy.base is None,
        )
        return Weights(policy, files)

    async def commit(self, prepared: Prepared, generation: int, *, prepare_ms: float = 0.0) -> Swap:
        """Have what was prepared serve, and prove it; or put the old policy back."""
        config, old, base, policy = self.config, self._serving, self._base, prepared.weights.policy
        in_flight = self.engine.in_flight
        hold_ms, probe, error = 0.0, "", None
        exchanged: Exchanged | None = None
        held = time.monotonic()
        touched = False
        try:
            if prepared.loaded:
                probe = await self._prove(prepared, policy.version)  # before it answers anything
                self.engine.serve(policy.version)
            else:
                await self.engine.end_adapters(config.drain_timeout_s)
                touched = True
                exchanged, hold_ms = await self._exchange(prepared)
                probe = await self._prove(prepared)
                self._base = prepared.weights
                await self._keep(base, exchanged)
            self._serving = prepared.weights
        except Exception as failure:  # noqa: BLE001 - whatever it was, the old policy must serve on and the cause be recorded
            error = _describe(failure)
            if touched:
                await self._put_back(old, base, exchanged, error)
                hold_ms = hold_ms or _since_ms(held)
            elif isinstance(failure, StaleWeights):
                self.engine.reject(policy.version)
                if policy.version in self._of_tenants:
                    # Nor does it answer its tenants before it has proved itself anew.
                    self._loaded_for, self._tenants_wait = "", ("", 0.0)
            else:
                self.engine.discard(policy.version)
        return Swap(
            at=now(),
            from_version=old.policy.version,
            to_version=policy.version,
            generation=generation,
            ok=error is None,
            error=error,
            prepare_ms=prepare_ms,
            hold_ms=hold_ms,
            in_flight=in_flight,
            in_place=prepared.in_place,
            probe=probe,
        )

    async def _exchange(self, prepared: Prepared) -> tuple[Exchanged | None, float]:
        """Have other weights serve: what the engine says of it, None if they were loaded in place; and milliseconds."""
        config = self.config
        if config.mode == "wait" and not await self.engine.drain(config.drain_timeout_s):
            log.warning("%d requests did not end within drain_timeout_s: they go on", self.engine.in_flight)
        if not prepared.in_place:
            weights, recompute = prepared.weights, config.recompute
            exchanged = await self.engine.commit(weights, recompute=recompute, timeout_s=config.hold_timeout_s)
            return exchanged, round(exchanged.ms, 3)
        held = time.monotonic()
        await self.engine.hold(recompute=config.recompute, timeout_s=config.hold_timeout_s)
        await self.engine.load(prepared.weights, config.hold_timeout_s)
        await self.engine.resume(config.hold_timeout_s)
        return None, _since_ms(held)

    async def _keep(self, before: Weights, exchanged: Exchanged | None) -> None:
        """Keep the weights that served before as the standby ones, if they are to be; else free their memory."""
        wanted = self.config.shadow_weights or self._taking_turns is not None
        if exchanged is not None and exchanged.kept and wanted:
            self._spare = before
        else:
            await self._release()

    def _compatible(self, version: int) -> Policy:
        """The policy as the engine can have it: an adapter of other weights than the engine's, merged."""
        policy, base = self.store.get(version), self._base.policy
        policy.require_whole()
        if self._beside(policy):
            require_same_but_weights(base, policy)
            return base if policy.version == base.version else policy
        policy = whole(policy)
        require_compatible(base, policy)
        return policy

    async def _ask(self, numbers: Numbers, version: int | None = None) -> list[list[float]]:
        """What the engine gives where the numbers have something to compare with."""
        return [
            await self.engine.next_logprobs(prompt, tokens, self.config.hold_timeout_s, version)
            for prompt, tokens in zip(numbers.prompts, numbers.tokens, strict=True)
        ]

    async def _prove(self, prepared: Prepared, version: int | None = None) -> str:
        """Compare the engine with the policy's numbers; ``version``: of one that does not serve, and is loaded.

        Raises StaleWeights if they differ.
        """
        numbers = prepared.numbers
        if isinstance(numbers, str):
            return numbers
        verdict = judge(numbers, prepared.before, await self._ask(numbers, version), self.engine.dtype)
        if verdict.objection:
            raise StaleWeights(f"policy {prepared.weights.policy.version} is not what serves: {verdict.objection}")
        return f"{verdict.difference:.2g} nats off"

    async def _put_back(self, old: Weights, base: Weights, exchanged: Exchanged | None, cause: str) -> None:
        """Have the old weights serve again, with the adapter that served; else stop the engine rather than serve a
        mixture."""
        config = self.config
        adapter = old if old.policy.version != base.policy.version else None
        try:
            if exchanged is not None and exchanged.kept:
                await self.engine.commit(base, recompute=config.recompute, timeout_s=config.hold_timeout_s)
                await self._release()
            else:
                await self.engine.hold(recompute=config.recompute, timeout_s=config.hold_timeout_s)
                await self._release()
                # Verified anew: in the time that it served, its files may have been copied or touched.
                files = await asyncio.to_thread(read, self.store, base.policy.version, check_finite=False)
                base = Weights(base.policy, files)
                await self.engine.load(base, config.hold_timeout_s)
                await self.engine.resume(config.hold_timeout_s)
            self._base = self._serving = base
            if adapter is not None:
                if not await asyncio.to_thread(_untouched, adapter):
                    adapter = await self._read(adapter.policy.version)
                self._serving = adapter
                await self.engine.put_adapter(self._serving, config.prepare_timeout_s)
                self.engine.serve(adapter.policy.version)
        except Exception as failure:  # noqa: BLE001 - the end of the line: the engine must not go on with unknown weights
            self.broken = f"{cause}; and policy {old.policy.version} could not be put back: {_describe(failure)}"
            log.critical("the engine is stopped: %s", self.broken)
            await self.engine.close()


def _untouched(weights: Weights) -> bool:
    """Whether the engine will take the files for those that were verified: a new link to one is a change, too."""
    folder = weights.policy.path
    try:
        return all(fingerprint(folder / name) == file["fingerprint"] for name, file in weights.files.items())
    except OSError:
        return False


async def _alone() -> None:
    """There are no others."""


def _describe(error: BaseException) -> str:
    if isinstance(error, TimeoutError) and not str(error):
        return "the engine did not answer in time (serve.swap.prepare_timeout_s, serve.swap.hold_timeout_s)"
    text = str(error) if isinstance(error, PolicyError) else f"{type(error).__name__}: {error}"
    return text.encode("utf-8", "backslashreplace").decode()  # a file's name need not be text, and JSON has only text


def _since_ms(started: float) -> float:
    return round((time.monotonic() - started) * 1e3, 3)
