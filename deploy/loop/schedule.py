"""The scheduler: starts a cycle when it is due, by cron or interval, one at a time, missed ones as one.

Beside the cycles it looks at the experiment that runs, if one does, and runs the lake's maintenance, at intervals each,
and behind that the retention of policies, reward models and runs. One that fails is reported, and tried again when the
next one is due. Where no cycle can work, all that goes on without them.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from typing import Any

from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_MAX_INSTANCES, EVENT_JOB_MISSED, JobExecutionEvent
from apscheduler.schedulers.blocking import BlockingScheduler
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.interval import IntervalTrigger

from deploy.config.root import ConfigError, ScheduleConfig, Settings
from deploy.loop import preflight, records
from deploy.loop.cycle import LOCK_WAIT_S, CycleBusy
from deploy.loop.records import CycleRecord
from deploy.supervise import preloaded, resident
from deploy.supervise.children import Child, start
from evaluation.decisions.ledger import Ledger, LedgerError
from feedback.files import locked
from serve.policies.store import PolicyError

LOCK = ".schedule.lock"
"""In the home: schedulers that run share it."""

_CYCLE, _MAINTENANCE, _EXPERIMENT = "cycle", "maintenance", "look at the experiment"
_SOON_S = 60.0  # the process of resident workers starts at once where the first cycle is due by then
_FIRST_MAINTENANCE_S = 300.0  # a scheduler that is often started again does maintenance too


class Scheduler:
    """Runs ``millrace cycle`` as a process when it is due, until ``stop`` or schedule.max_cycles.

    Without ``cycles`` it does what is due beside them, until ``stop``.
    """

    def __init__(self, settings: Settings, *, cycles: bool = True, say: Callable[[str], None] = print) -> None:
        """Raises ConfigError for an invalid crontab line, or settings with which no cycle can work."""
        if cycles:
            preflight.check(settings)
        self._settings = settings
        self._say = say
        self._trigger = trigger(settings.schedule) if cycles else None
        self._children: dict[str, Child] = {}
        self._lock = threading.Lock()
        self._stop_requests: queue.SimpleQueue[None] = queue.SimpleQueue()  # safe in a signal handler
        self._stopping = self._ended = False
        self._overlap_reported: set[str] = set()
        self._experiment_trouble: str | None = None
        self._ledger: Ledger | None = None
        self._unfinished = set[Any]()  # numbers of experiments
        self._before = {record.number for record in records.load_all(settings)}
        logging.getLogger("apscheduler").setLevel(logging.ERROR)  # _report prints what it warns of
        # Its jobs run one at a time each, and missed runs of one become one, as is APScheduler's default.
        self._soon = False
        self._scheduler = BlockingScheduler(timezone=UTC if not settings.schedule.cron else None)

    def run(self) -> None:
        """Block until the scheduling ends. Call it in the main thread."""
        schedule = self._settings.schedule
        what = "no cycles; it looks at experiments and maintains the lake"
        if self._trigger is not None:
            what = self._add_cycles(self._trigger)
        if schedule.maintenance_seconds is not None:
            self._scheduler.add_job(
                self._maintenance,
                IntervalTrigger(seconds=schedule.maintenance_seconds, timezone=UTC),
                id=_MAINTENANCE,
                next_run_time=datetime.now(UTC)
                + timedelta(seconds=min(schedule.maintenance_seconds, _FIRST_MAINTENANCE_S)),
                misfire_grace_time=None,
            )
        self._scheduler.add_job(
            self._experiment,
            IntervalTrigger(seconds=self._settings.evaluation.experiment.look_seconds, timezone=UTC),
            id=_EXPERIMENT,
            misfire_grace_time=None,
        )
        self._scheduler.add_listener(self._report, EVENT_JOB_ERROR | EVENT_JOB_MAX_INSTANCES | EVENT_JOB_MISSED)
        self._say(f"schedule: {what}")
        threading.Thread(target=self._shut_down_on_request, name="schedule stop", daemon=True).start()
        lock = self._settings.path(LOCK)
        lock.parent.mkdir(parents=True, exist_ok=True)
        lock.touch()  # its age is the scheduler's, for `millrace status`
        try:
            with (
                locked(lock, LOCK_WAIT_S, shared=True),
                preloaded.serving(self._settings.path(self._settings.up.logs) / "preloaded.log")
                if self._trigger
                else nullcontext(),
                resident.serving(self._settings, at_once=self._soon, shared=True) if self._trigger else nullcontext(),
            ):
                self._scheduler.start()
        finally:
            self._ended = True
            self.stop()

    def _add_cycles(self, due: CronTrigger | IntervalTrigger) -> str:
        """Have cycles run when they are due; in words, when."""
        schedule = self._settings.schedule
        first = first_run(self._settings, due)
        self._scheduler.add_job(
            self._cycle,
            due,
            id=_CYCLE,
            next_run_time=first,
            misfire_grace_time=None if schedule.misfire_grace_seconds is None else int(schedule.misfire_grace_seconds),
        )
        wait = max(0.0, (first - datetime.now(UTC)).total_seconds())
        self._soon = wait < _SOON_S
        every = f"cron {schedule.cron!r}" if schedule.cron else f"every {schedule.interval_seconds:g} s"
        return f"{every}, first cycle in {wait:.0f} s"

    def stop(self) -> None:
        """End the scheduling; a cycle that is running is stopped and recorded as failed, a maintenance is stopped.

        Safe in a signal handler.
        """
        self._stop_requests.put(None)

    def _shut_down_on_request(self) -> None:
        self._stop_requests.get()
        with self._lock:
            self._stopping = True
            for child in self._children.values():
                child.request_stop()
        while not self._scheduler.running and not self._ended:
            time.sleep(0.05)  # requested before it began
        if self._scheduler.running:
            self._scheduler.shutdown(wait=True)

    def _cycle(self) -> None:
        limits = self._settings.cycle
        trainings = max(len(limits.stages), 2) + 1  # `auto` may be two stages; and a reward model to evaluate by
        most = 2 * (limits.score_timeout_s + limits.evaluate_timeout_s) + trainings * limits.train_timeout_s
        most += limits.swap_timeout_s
        if (shadow := self._settings.evaluation.experiment.shadow).enabled:
            most += shadow.seconds + limits.evaluate_timeout_s
        most += self._settings.serve.fleet.longest_canary_s
        # It needs its stage's grace, and time to write its record.
        code = self._run_child(_CYCLE, ["cycle"], log="cycles.log", grace=2 * limits.stop_grace_s, most=most + 600.0)
        if code is None:
            return
        if code == CycleBusy.exit_code:
            self._say("schedule: another cycle was running; this one is left out")
        else:  # where it was killed, servers would keep its candidate's weights until the next one
            self._settings.policy_store().announce(None)
        self._count()

    def _maintenance(self) -> None:
        grace, most = self._settings.cycle.stop_grace_s, self._settings.schedule.maintenance_timeout_s
        work = {"maintenance of the lake": ["lake", "maintain"]}
        train = self._settings.train
        for what, kept in (
            ("policies", self._settings.serve.retention),
            ("reward-models", train.reward_model.retention),
            ("runs", train.retention),
        ):
            if kept.keep_last is not None:
                work[f"pruning of the {what}"] = [what, "prune"]
        for what, command in work.items():
            code = self._run_child(_MAINTENANCE, command, log="maintenance.log", grace=grace, most=most)
            if code and not self._stopping:
                file = self._settings.path(self._settings.up.logs) / "maintenance.log"
                self._say(f"schedule: {what} ended with code {code}, see {file}; the next run tries again")

    def _experiment(self) -> None:
        """Look at the experiment that runs, if one does. What goes wrong is said once, and tried again."""
        try:
            running = self._settings.policy_store().experiments.current() is not None
            if not running and not self._is_unfinished():  # else a look ends what was moved away
                return
        except (PolicyError, LedgerError, OSError) as error:
            self._report_trouble(f"error: {error}")
            return
        most, grace = self._settings.evaluation.experiment.look_timeout_seconds, self._settings.cycle.stop_grace_s
        said: list[str] = []
        command = ["experiment", "look", "--only-changes"]
        code = self._run_child(_EXPERIMENT, command, log="experiments.log", grace=grace, most=most, follow=said.append)
        if not code:
            self._experiment_trouble = None
            for line in said:
                self._say(f"schedule: {line}")
        elif not self._stopping:
            self._report_trouble(
                next((line for line in said if line.startswith("error: ")), f"it ended with code {code}")
            )

    def _is_unfinished(self) -> bool:
        """Whether the ledger has an experiment's start without its end."""
        if self._ledger is None:
            self._ledger = self._settings.ledger()
        for entry in self._ledger.unread():
            if entry.kind == "experiment" and entry.body.get("event") == "start":
                self._unfinished.add(entry.body.get("number"))
            elif entry.kind == "experiment" and entry.body.get("event") == "end":
                self._unfinished.discard(entry.body.get("number"))
        return bool(self._unfinished)

    def _report_trouble(self, trouble: str) -> None:
        if trouble != self._experiment_trouble:
            self._say(f"schedule: the experiment could not be looked at: {trouble}; the next look tries again")
        self._experiment_trouble = trouble

    def _run_child(
        self,
        name: str,
        command: list[str],
        *,
        log: str,
        grace: float,
        most: float,
        follow: Callable[[str], None] | None = None,
    ) -> int | None:
        """Run a command of ours to its end; the exit code, None if the scheduling has ended."""
        with self._lock:
            if self._stopping:
                return None
            self._overlap_reported.discard(name)
            child = start(self._settings, name, command, log=log, grace=grace, follow=follow or self._say)
            self._children[name] = child
        try:
            return child.wait(most)
        except TimeoutError as error:
            self._say(f"schedule: {error}, stopping it")
            return child.stop()
        finally:
            with self._lock:
                del self._children[name]

    def _count(self) -> None:
        """End the scheduling when schedule.max_cycles of the cycles since our start have done something."""
        most = self._settings.schedule.max_cycles
        if most is None:
            return
        ours = [record for record in records.load_all(self._settings) if record.number not in self._before]
        done = sum(record.status not in ("skipped", "running") for record in ours)
        if done >= most:
            self._say(f"schedule: {done} cycles done, schedule.max_cycles reached")
            self.stop()

    def _report(self, event: Any) -> None:
        if isinstance(event, JobExecutionEvent) and event.exception is not None:
            self._say(f"schedule: the {event.job_id} could not be started: {event.exception!r}")
        elif event.code == EVENT_JOB_MAX_INSTANCES:
            if event.job_id not in self._overlap_reported:
                self._say(f"schedule: a {event.job_id} is due and one is running: they become one")
            self._overlap_reported.add(event.job_id)
        else:
            self._say("schedule: a start was too late (schedule.misfire_grace_seconds) and is left out")


def trigger(config: ScheduleConfig) -> CronTrigger | IntervalTrigger:
    """When cycles are due. Raises ConfigError for an invalid crontab line."""
    jitter = int(config.jitter_seconds) or None
    if config.cron is None:
        return IntervalTrigger(seconds=config.interval_seconds, jitter=jitter, timezone=UTC)
    try:
        cron = CronTrigger.from_crontab(config.cron)
    except ValueError as error:
        raise ConfigError(f"schedule.cron: {config.cron!r} is not a crontab line: {error}") from None
    cron.jitter = jitter
    return cron


def first_run(settings: Settings, due: CronTrigger | IntervalTrigger) -> datetime:
    """When the first cycle of a scheduler is due. Cycles missed while none was running become one, at once."""
    at = datetime.now(UTC)
    if settings.schedule.first_after_seconds is not None:
        return at + timedelta(seconds=settings.schedule.first_after_seconds)
    history = records.load_all(settings)
    if not history:
        return _next(due, at)
    return max(at, _next(due, history[-1].started_at))


def next_cycle(settings: Settings, began: datetime) -> datetime:
    """When the scheduler that began at that time starts its next cycle, as far as its jitter lets that be known."""
    history = records.load_all(settings)
    due = due_at(settings, began, history)
    return max(datetime.now(UTC), due) if history and history[-1].started_at >= began else due


def due_at(settings: Settings, began: datetime, history: Sequence[CycleRecord]) -> datetime:
    """When a cycle of the scheduler that began at that time is due; in the past if it is late, no jitter added.

    ``history``: all cycles, oldest first. What was due while the last one was at work became one with it.
    """
    due = trigger(settings.schedule)
    last = history[-1] if history else None
    if last is not None and last.started_at >= began:
        ended = last.finished_at or last.started_at
        if isinstance(due, IntervalTrigger):
            return last.started_at + due.interval * max(1, math.ceil((ended - last.started_at) / due.interval))
        return _next(due, ended)
    first = settings.schedule.first_after_seconds
    if first is not None:
        return began + timedelta(seconds=first)
    return max(began, _next(due, began if last is None else last.started_at))


def _next(due: CronTrigger | IntervalTrigger, after: datetime) -> datetime:
    """The first time after ``after`` at which a cycle is due, no jitter added."""
    if isinstance(due, IntervalTrigger):
        return after + due.interval
    at = due.get_next_fire_time(None, after)
    if at is None:
        raise ConfigError(f"schedule.cron names no time after {after:%Y-%m-%d %H:%M}")
    return at
