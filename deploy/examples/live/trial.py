"""One experiment in the real loop: started, looked at by `millrace schedule`, and its end; with deaths, if wanted."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from deploy.config.root import Settings
from deploy.examples.live.home import LiveFailed, Say, wait_for
from deploy.loop.experiments import Controller, blocks_file, blocks_seen
from deploy.loop.wait_for_serving import server_policy
from deploy.supervise.children import Child, child_variables, millrace, start
from evaluation.decisions.history import History
from evaluation.experiments import looks
from evaluation.experiments.blocks import Observed
from evaluation.experiments.plan import ExperimentPlan
from feedback.files import locked
from serve.policies.experiments import Experiment

_LOCK_S: Final = 60.0
_BEFORE_FIRST_LOOK: Final = 40
"""Blocks that pass before the first look at an experiment in which the controller is to die."""
_TRIES: Final = 20
"""Looks that may die before one of them had decided to roll back."""
LONGEST_S: Final = 600.0


@dataclass(frozen=True)
class Trial:
    """What came of an experiment. ``events``: its entries in the ledger, in order. ``units``: blocks, or users, that
    its last look counted; ``shown_after``: by how many of them with feedback harm was shown first. ``started_at``,
    ``ended_at``: seconds of Unix time; the latter when all that serves served one policy alone again. ``killed``: looks
    that died, the last but one after it had decided to roll back, the last one after the server was told. ``wrong``:
    what should not be."""

    number: int
    candidate: int
    control: int
    decision: str
    events: tuple[str, ...]
    units: int
    shown_after: int | None
    mislabelled: int
    started_at: float
    ended_at: float
    killed: int = 0
    wrong: tuple[str, ...] = ()


def run(settings: Settings, candidate: int, needed: list[Child], say: Say, *, most_s: float, die: bool) -> Trial:
    """Try a policy until the experiment has ended by itself. ``most_s``: its longest time; ``needed``: must not end.

    A ``controller`` must run, unless it is to ``die``: then one is started, and killed between a decision to roll back
    and what follows from it, and again before that is on record. Raises LiveFailed.
    """
    longer = settings.evaluation.experiment.model_copy(update={"max_seconds": most_s})
    settings = settings.model_copy(update={"evaluation": settings.evaluation.model_copy(update={"experiment": longer})})
    levels = levels_given(settings)
    started = Controller(settings, say=say).start(
        candidate, who="deploy.examples.live", why="no gate in these trials", override=True
    )
    wrong: list[str] = []
    killed = die_twice(settings, started, needed, say, wrong) if die else 0
    with controller(settings, say) if die else nullcontext():
        wait_for("the end", lambda: record(settings, started).state == "ended", needed, within_s=most_s + LONGEST_S)
    ended = record(settings, started)
    latest, end = ended.latest, ended.end or {}
    if latest is None:
        raise LiveFailed(f"experiment {started.number} has ended before a look at it: {end}")
    kept = started.candidate if end["decision"] == "kept" else started.control
    wait_for(f"policy {kept} alone", lambda: serves_alone(settings, kept), needed)
    ended_at = time.time()
    entries = [entry.body for entry in settings.ledger().entries() if entry.kind == "experiment"]
    own = [body for body in entries if body["number"] == started.number]
    if levels_given(settings) != levels:
        wrong.append("the levels of the gate's error budget have changed")
    if (
        own[0]["plan"]["alpha_rollback"] != longer.alpha_rollback
        or own[0]["plan"]["alpha_commit"] != longer.alpha_commit
    ):
        wrong.append("the levels on record are not those of the settings")
    if die:
        wrong += verify(settings)
    return Trial(
        number=started.number,
        candidate=candidate,
        control=started.control,
        decision=str(end["decision"]),
        events=tuple(body["event"] for body in own),
        units=latest["blocks"]["candidate"] + latest["blocks"]["control"],
        shown_after=next(one["harm_at"] for one in latest["differences"] if one["name"] == "feedback"),
        mislabelled=latest["mislabelled"],
        started_at=started.started_at,
        ended_at=ended_at,
        killed=killed,
        wrong=tuple(wrong),
    )


def die_twice(settings: Settings, experiment: Experiment, needed: list[Child], say: Say, wrong: list[str]) -> int:
    """Kill the controller with SIGKILL between a decision and the rollback, and once more before it is on record.

    It is held where it is to die by the lock that it needs next. How many looks have died for it.
    """
    store, ledger = settings.policy_store(), settings.ledger()
    file = blocks_file(store.experiments, experiment.number)
    plan, pointer = ExperimentPlan.model_validate(experiment.plan), store.serving()
    time.sleep(max(0.0, experiment.begins(_BEFORE_FIRST_LOOK) - time.time()))
    for killed in range(1, _TRIES + 1):
        with locked(store.root / ".lock", _LOCK_S), scheduler_process(settings) as process:
            wait_for("a decision", lambda: holds_open(process, store.root / ".lock") and file.exists(), needed)
            kill(process)
        decided = looks.look(plan, Observed(blocks=tuple(blocks_seen(file)))).decision
        say(f"killed look {killed}, which had decided: {decided}")
        if record(settings, experiment).state != "running" or store.serving() != pointer:
            wrong.append("a look that was killed before it said anything has changed what servers obey")
        if decided == "roll back":
            break
    else:
        raise LiveFailed(f"{_TRIES} looks did not find policy {experiment.candidate} to be worse")
    with locked(ledger.folder / ".lock", _LOCK_S), scheduler_process(settings) as process:
        wait_for("the rollback", lambda: record(settings, experiment).state == "stopping", needed)
        kill(process)
    say("killed a look that had rolled back, and not put it on record")
    wait_for(f"policy {experiment.control} alone", lambda: serves_alone(settings, experiment.control), needed)
    events = [entry.body["event"] for entry in ledger.entries() if entry.kind == "experiment"]
    if events[-1] != "start":
        wrong.append("the end was on record before the look that was to put it there")
    return killed + 1


def controller(settings: Settings, say: Say) -> Child:
    """What looks at experiments, as `millrace up` has it."""

    def follow(line: str) -> None:
        if " has ended: " in line or " is committed: " in line:
            say(line)

    return start(settings, "schedule", ["schedule"], log="live-schedule.log", grace=30.0, follow=follow)


@contextmanager
def scheduler_process(settings: Settings) -> Iterator[psutil.Popen]:
    """The same, to be killed."""
    command = millrace("--config", settings.snapshot(), "schedule")
    log = settings.path(settings.up.logs) / "live-killed.log"
    with log.open("ab") as output:
        process = psutil.Popen(command, stdout=output, stderr=output, env=child_variables(), start_new_session=True)
    try:
        yield process
    finally:
        kill(process)


def kill(process: psutil.Popen) -> None:
    """SIGKILL for the scheduler and for the look that it has started. Harmless to repeat."""
    try:
        family = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for one in family:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    _, left = psutil.wait_procs(family, timeout=30)
    if left:
        raise LiveFailed(f"{left} outlived SIGKILL by 30 s")


def holds_open(process: psutil.Popen, file: Path) -> bool:
    """Whether a process below this one waits for the lock on a file: it has opened it."""
    if process.poll() is not None:
        raise LiveFailed(f"the scheduler ended with {process.returncode}")
    for one in process.children(recursive=True):
        with suppress(psutil.Error):
            if any(Path(opened.path) == file for opened in one.open_files()):
                return True
    return False


def record(settings: Settings, experiment: Experiment) -> Experiment:
    return settings.policy_store().experiments.get(experiment.number)


def serves_alone(settings: Settings, version: int) -> bool:
    """Whether all that serves serves this policy, and takes part in no experiment."""
    answer: dict[str, Any] = server_policy(settings) or {}
    versions = [one["version"] for one in (answer.get("replicas") or {}).values()] or [answer.get("version")]
    return answer.get("experiment", "unknown") is None and set(versions) == {version}


def levels_given(settings: Settings) -> float:
    return History.of(settings.ledger().entries()).levels_given()


def verify(settings: Settings) -> list[str]:
    """What `millrace decisions verify` finds to be wrong."""
    command = millrace("--config", settings.snapshot(), "decisions", "verify")
    done = subprocess.run(command, env=child_variables(), capture_output=True, text=True, timeout=300, check=False)
    return (
        [] if done.returncode == 0 else [f"decisions verify ended with {done.returncode}: {done.stdout}{done.stderr}"]
    )
