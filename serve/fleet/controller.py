"""Drives deployments: it reads records and reports, takes one step, records it, and reads again.

It holds no state of its own. Killed at any moment and started again, it goes on from the record.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from feedback.files import make_folder, open_lock, try_lock
from serve.config import FleetConfig
from serve.fleet.planner import NOTHING, next_step
from serve.fleet.reports import Report, reports
from serve.fleet.state import Deployment, FleetError, FleetRecord, FleetState, Instant, by_content, instant
from serve.policies.experiments import ExperimentReader
from serve.policies.folder import StoreUnreachable
from serve.policies.store import Pointer, PolicyError, PolicyStore, RecordDamaged, StalePointer

log = logging.getLogger(__name__)

WHO: Final = "fleet"
_LOCK: Final = ".fleet.lock"


class Controller:
    """Takes the fleet whose replicas report in ``folder`` to what the store's pointer names."""

    def __init__(
        self, store: PolicyStore, folder: Path, config: FleetConfig, clock: Callable[[], Instant] = instant
    ) -> None:
        self.store = store
        self.folder = folder
        self.config = config
        self.record = FleetRecord(store.root)
        self._experiments = ExperimentReader(store.experiments)
        self.route: Callable[[bool], None] = lambda by_content: None
        """Has requests reach the replicas by what is in them, or any of them; raises OSError if that can't be."""
        self._clock = clock
        self._lock = -1
        self._recorded = 0  # the newest generation that this process knows to be on record as having served
        self._damage: str | None = None  # what was last wrong with the record of what has served
        self._turn = threading.Lock()  # between the thread of ``run`` and the one that ends it

    def open(self) -> FleetState:
        """Be the only controller of this fleet, and see that there is a record. Where it starts.

        Raises FleetError if there is another, PolicyError if no policy serves.
        """
        pointer = self.store.serving()
        if pointer is None:
            raise PolicyError(f"{self.store.root} has no serving policy yet: promote one first (millrace init)")
        self._lock = open_lock(self.store.root / _LOCK)
        if not try_lock(self._lock):
            self.close()
            raise FleetError(f"another process runs the fleet of {self.store.root}: stop that one first")
        make_folder(self.folder)
        state = self.record.read()
        if state is None:
            state = FleetState(serving=pointer)
            self.record.write(state)
        elif state.stopping:
            state = replace(state, stopping=False)
            self.record.write(state)
        while self.turn():  # where nothing runs, there is nothing to wait for
            pass
        return self.record.read() or state

    def close(self) -> None:
        """Let another process be the controller."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def run(self, stop: threading.Event, seconds: float) -> None:
        """Take steps until ``stop`` is set; what can't be read is logged and read again."""
        wrong = None
        while not stop.wait(seconds):
            try:
                while self.turn() and not stop.is_set():
                    pass
                wrong = None
            except (PolicyError, OSError, ValueError, TypeError) as error:
                if str(error) != wrong:  # once, not at every turn
                    log.error("the deployment can't go on: %s", error)
                wrong = str(error)

    def turn(self) -> bool:
        """Take the next step, if there is one to be taken now; whether there was."""
        with self._turn:
            return self._take_step()

    def _take_step(self) -> bool:
        state, pointer = self.record.read(), self.store.serving()
        if state is None or pointer is None:
            raise PolicyError(f"the fleet's record or the serving pointer is gone from {self.store.root}")
        reported = reports(self.folder)
        served = self._served() if state.deployment is not None else ()
        step = next_step(
            state, pointer, reported, served, self.config, self._clock(), self._experiments.under(pointer.generation)
        )
        after = step.state or state
        if by_content(after):
            self.route(True)  # before a replica reads the record, and serves what others do not
        if step.message:
            log.info("%s", step.message)
        self._record_served(after.serving, reported)
        if step.back:
            assert state.deployment is not None
            self._move_back(state, state.deployment)
        elif step.state is not None:
            self._write(state, step.state)
        if not by_content(after) and all(_is_settled(report, after) for report in reported):
            self.route(False)
        return step != NOTHING

    def _served(self) -> Collection[int]:
        """The policies that have served; none if that can't be read: then a rollback too is tried on a canary."""
        try:
            served = self.store.served()
        except RecordDamaged as error:
            if str(error) != self._damage:  # once, not at every step
                log.error("which policies have served can't be read: %s", error)
            self._damage = str(error)
            return ()
        self._damage = None
        return served

    def _record_served(self, serving: Pointer, reported: Sequence[Report]) -> None:
        """Put on record that the fleet serves what it is settled on, so that it can be rolled back to."""
        if self._recorded == serving.generation:
            return
        at = (serving.version, serving.generation)
        if any(r.state == "ready" and r.unready is None and (r.version, r.generation) == at for r in reported):
            try:
                self.store.record_outcome(serving, served=True, by=WHO)
            except StoreUnreachable as error:  # a canary must go back all the same; the next step tries again
                log.warning("that policy %d serves is not on record yet: %s", serving.version, error)
            else:
                self._recorded = serving.generation

    def request_stop(self) -> None:
        """Have all replicas finish their requests, within serve.drain_timeout_s."""
        with self._turn:
            if (state := self.record.read()) is not None:
                self.record.write(replace(state, stopping=True))

    def _write(self, before: FleetState, after: FleetState) -> None:
        deployment = before.deployment
        if deployment is not None and after.deployment is None:
            self.record.append_history(
                {
                    "from": before.serving.version,
                    "to": deployment.to.version,
                    "generation": deployment.to.generation,
                    "outcome": "undone" if deployment.phase == "undoing" else "done",
                    "error": deployment.error,
                    "unproven": deployment.unproven,
                    "who": deployment.to.who,
                    "why": deployment.to.why,
                    "started": deployment.started,
                    "seconds": round(self._clock().wall - deployment.started, 3),
                    "canaries": list(deployment.canaries),
                }
            )
        self.record.write(after)

    def _move_back(self, state: FleetState, deployment: Deployment) -> None:
        try:
            why = f"policy {deployment.to.version} was undone: {deployment.error}"
            self.store.move_back(deployment.to, state.serving.version, who=WHO, why=why)
        except StalePointer as error:  # it was moved meanwhile; the next turn reads where it is
            log.info("%s", error)


def _is_settled(report: Report, state: FleetState) -> bool:
    """Whether a replica, if it answers requests, does so as all others do. One that stops goes on for a moment."""
    return report.state == "starting" or (report.version == state.serving.version and report.variant is None)
