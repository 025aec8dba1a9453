"""One turn of the loop: score, train, evaluate, gate, promote, and wait until the server serves it.

Score, train and evaluate run as processes of their own, so that their memory goes back and a crash of one is a failed
cycle and no more. The record under ``cycles/`` is written after every stage; a cycle that died is closed by the next.
"""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal

from pydantic import BaseModel, Field

from deploy import rollout
from deploy.config import ConfigError, Settings, child_environment
from deploy.processes import Child, Stopped, millrace
from evaluation.results import write_whole
from feedback.config import RuleConfig
from feedback.rewards.rules import RuleError, configured, load_rule
from serve.policies import Pointer, PolicyError, PolicyStore
from train import algorithms, dataflows
from train.context_length import longest_prompt
from train.continuing import goes_on
from train.hooks import HookError, load_function

SERVER_TIMEOUT_S = 5.0
SIGNALLED = 128  # a process that signal n ended has the code 128 + n
TRAINING_ATTEMPTS = 3  # of cycles at one training run, of which all but the last were killed
NO_REWARD = (
    "train.reward is null, and feedback.scoring.rules has no rule with a weight: training needs something that rewards "
    "its responses (a module:function, or a rule)"
)
NO_POLICY = (
    "train.algorithm.name=reward_model trains no policy that a cycle could judge and promote: train the reward model "
    "by `millrace train`, set feedback.scoring.model.name to the folder that it names, and train.algorithm.name to a "
    "policy's algorithm"
)


class CycleBusy(RuntimeError):
    """Another process is in the middle of a cycle."""


class StageFailed(RuntimeError):
    """A stage of the cycle failed; the text says which and why."""


class StageKilled(StageFailed):
    """A stage's process was ended by a signal, and not by anything that it did."""


class Stage(BaseModel):
    """One stage of a cycle; ``result`` is what it handed on."""

    name: str
    started_at: datetime
    seconds: float | None = None
    ok: bool | None = None
    result: dict[str, Any] | None = None
    error: str | None = None
    killed: bool = Field(False, description="It was stopped or killed, rather than failing by itself.")


class CycleRecord(BaseModel):
    """What became of a cycle; ``reason`` says why it was skipped, refused or failed."""

    number: int
    status: Literal["running", "promoted", "refused", "skipped", "failed"] = "running"
    reason: str | None = None
    started_at: datetime
    finished_at: datetime | None = None
    incumbent: int | None = None
    run: str | None = Field(None, description="The training run; an earlier cycle's, if its training was killed.")
    candidate: int | None = None
    verdict: dict[str, Any] | None = None
    rewards: int | None = Field(None, description="Rows of the rewards table that the training could learn from.")
    feedback: int | None = Field(None, description="Rows of the feedback table that it could learn from.")
    stages: list[Stage] = []

    @property
    def seconds(self) -> dict[str, float]:
        return {stage.name: stage.seconds for stage in self.stages if stage.seconds is not None}


def run_cycle(settings: Settings, number: int | None = None, *, say: Callable[[str], None] = print) -> CycleRecord:
    """Run one cycle to its end and return its record, whatever the end was.

    number: of the cycle; the next free one if not given.
    say: gets one line of text for each thing that happens, the stages' own output included.
    Raises ConfigError if the settings can't work, CycleBusy if another cycle is running, Stopped on a signal.
    """
    check(settings)
    with _only_one(settings):
        _close_dead(settings, say)
        return _Cycle(settings, number or _next_number(settings), say).run()


def check(settings: Settings) -> None:
    """Raise ConfigError, before anything is started, for what would fail an hour later."""
    from evaluation.suites import load_scorer

    problems = []
    suite = settings.path(settings.evaluation.suite)
    if not suite.is_file():
        problems.append(f"evaluation.suite: there is no file {suite}; the gate needs held-out items to judge by")
    if settings.train.samples and not reward_of(settings):
        problems.append(NO_REWARD)
    problems += [
        f"train.reward_weights.{name}: feedback.scoring.rules has no such rule; there are: "
        f"{', '.join(settings.feedback.scoring.rules) or 'none'}"
        for name in sorted(settings.train.reward_weights.keys() - settings.feedback.scoring.rules.keys())
    ]
    if not settings.train.algorithm.trains_policy:
        problems.append(NO_POLICY)
    rules = settings.feedback.scoring.rules
    loads: dict[str, Callable[[], object]] = {
        f"feedback.scoring.rules.{name}": partial(configured, name, rule) for name, rule in rules.items()
    }
    if settings.train.reward:
        loads["train.reward"] = partial(load_rule, settings.train.reward)
    loads |= {f"train.hooks {name!r}": partial(load_function, "train.hooks", name) for name in settings.train.hooks}
    loads |= {
        f"train.trackers {name!r}": partial(load_function, "train.trackers", name) for name in settings.train.trackers
    }
    if ":" in settings.train.algorithm.name:
        loads["train.algorithm.name"] = partial(algorithms.load, settings.train.algorithm)
    if settings.train.dataflow:
        loads["train.dataflow"] = partial(dataflows.load, settings.train)
    if settings.train.samples and (policy := PolicyStore(settings.path(settings.serve.policies)).serving()):
        folder = PolicyStore(settings.path(settings.serve.policies)).get(policy.version).path
        loads["train.rollout"] = partial(longest_prompt, settings.train.rollout, folder)
    loads["evaluation.scorer"] = partial(load_scorer, settings.evaluation)
    for key, load in loads.items():
        try:
            load()
        except RuleError as error:
            problems.append(f"{key}: {error}")
        except (HookError, ValueError) as error:  # names its setting itself
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))


def reward_of(settings: Settings) -> str | dict[str, RuleConfig]:
    """What rewards rollouts: a function by name, or the rules that have a weight in training; empty if none has."""
    weights = settings.train.reward_weights
    rules = {
        name: rule.model_copy(update={"weight": weights.get(name, rule.weight)})
        for name, rule in settings.feedback.scoring.rules.items()
    }
    return settings.train.reward or {name: rule for name, rule in rules.items() if rule.weight > 0}


def records(settings: Settings) -> list[CycleRecord]:
    """The records of all cycles, oldest first."""
    folder = settings.path(settings.cycle.folder)
    return [CycleRecord.model_validate_json(path.read_bytes()) for path in sorted(folder.glob("[0-9]*.json"))]


def killed_training(settings: Settings, number: int, incumbent: int) -> CycleRecord | None:
    """The last cycle before ``number`` that trained, if its training was killed and going on with it is safe.

    Safe: it started from the policy that serves now, has a checkpoint, has the settings of now, and was not tried too
    often (what kills it may be the run itself). Training checks all this again, and more.
    """
    before = [record for record in records(settings) if record.run is not None and record.number < number]
    if not before:
        return None
    last = before[-1]
    stage = next((stage for stage in reversed(last.stages) if stage.name == "train"), None)
    if stage is None or not stage.killed or last.incumbent != incumbent:
        return None
    if sum(record.run == last.run for record in before) >= TRAINING_ATTEMPTS:
        return None
    return last if goes_on(settings.path(settings.train.runs) / str(last.run), settings.train) else None


class _Cycle:
    def __init__(self, settings: Settings, number: int, say: Callable[[str], None]) -> None:
        self.settings = settings
        self.say = lambda text: say(f"cycle {number}: {text}")
        self.follow = say
        self.snapshot = settings.snapshot()
        self.store = PolicyStore(settings.path(settings.serve.policies))
        self.record = CycleRecord(number=number, started_at=_now())

    def run(self) -> CycleRecord:
        self._keep()
        try:
            self._turn()
        except (StageFailed, rollout.RolloutRefused, PolicyError) as error:
            self._end("failed", str(error))
        except BaseException as error:
            self._end(
                "failed", f"stopped by {error}" if isinstance(error, Stopped) else f"{type(error).__name__}: {error}"
            )
            raise
        return self.record

    def _turn(self) -> None:
        pointer = self.store.serving()
        if pointer is None:
            raise StageFailed(f"no policy serves in {self.store.root}: run `millrace init --model NAME_OR_FOLDER`")
        self.record.incumbent = pointer.version

        scored = self._run("score", self.settings.cycle.score_timeout_s)
        self.record.rewards, self.record.feedback = (scored["counts"][table] for table in ("rewards", "feedback"))
        if reason := self._nothing_new():
            return self._end("skipped", reason)

        self.record.run = f"cycle-{self.record.number:06d}"
        if killed := killed_training(self.settings, self.record.number, pointer.version):
            self.record.run, self.record.rewards, self.record.feedback = killed.run, killed.rewards, killed.feedback
            self.say(f"goes on with run {killed.run}: the training of cycle {killed.number} was killed")
        trained = self._run(
            "train",
            self.settings.cycle.train_timeout_s,
            *("--run", str(self.record.run), "--parent", str(pointer.version)),
        )
        self.record.candidate = trained["candidate"]
        if trained["candidate"] is None:
            return self._end("skipped", trained["reason"] or "training published nothing")

        candidate, incumbent = str(trained["candidate"]), str(pointer.version)
        judged = self._run("evaluate", self.settings.cycle.evaluate_timeout_s, candidate, "--incumbent", incumbent)
        self.record.verdict = judged["verdict"]
        if judged["verdict"]["verdict"] != "pass":
            return self._end("refused", "; ".join(judged["verdict"]["reasons"]) or "the gate refused it")

        self._promote(trained["candidate"], pointer)
        self._end("promoted", None)

    def _nothing_new(self) -> str | None:
        """Why there is nothing to train on, compared with the last cycle whose candidate was judged."""
        what = "feedback" if self.settings.train.algorithm.is_offline else "rewards"
        judged = [getattr(record, what) for record in records(self.settings) if record.verdict is not None]
        before = next((count for count in reversed(judged) if count is not None), 0)
        count, least = getattr(self.record, what), self.settings.cycle.min_new_rewards
        new = count - before if count >= before else count  # fewer than before: old rows were retired
        return None if new >= least else f"{new} new {what} since the last training, cycle.min_new_rewards is {least}"

    def _run(self, name: str, timeout: float, *arguments: str) -> dict[str, Any]:
        """Run one stage as ``millrace <name>`` in a process of its own; what it handed on. Raises StageFailed."""
        out = self.settings.path(self.settings.cycle.folder) / f".{self.record.number:06d}-{name}.json"
        out.unlink(missing_ok=True)
        log = self.settings.path(self.settings.up.logs) / f"cycle-{self.record.number:06d}-{name}.log"
        with self._stage(name) as stage:
            child = Child(
                name,
                millrace("--config", self.snapshot, name, *arguments, "--json-out", out),
                log=log,
                environment=child_environment(),
                grace=self.settings.cycle.stop_grace_s,
                follow=self.follow,
            )
            try:
                code = child.wait(timeout)
            except TimeoutError:
                raise StageFailed(f"{name} took longer than cycle.{name}_timeout_s={timeout:g} s") from None
            finally:
                child.stop()  # does nothing to a stage that has ended
            if code != 0:
                failed = StageKilled if code > SIGNALLED else StageFailed
                raise failed(f"{name} ended with code {code}: {_last_words(child.tail())} (log: {log})")
            result: dict[str, Any] = json.loads(out.read_bytes())
            out.unlink()
            stage.result = result
        return result

    def _promote(self, version: int, incumbent: Pointer) -> None:
        """Move the pointer, and see that the running server follows. Raises StageFailed if it doesn't."""
        with self._stage("promote") as stage:
            running = server_policy(self.settings) is not None
            pointer = rollout.promote(
                self.store, version, who="cycle", why=f"cycle {self.record.number}: passed the gate", expected=incumbent
            )
            stage.result = {"version": version, "generation": pointer.generation, "server": running}
        self.say(f"promoted policy {version} (before: {incumbent.version})")
        if not running:
            return self.say(f"no server answers at {self.settings.server_url}: it will serve {version} when it starts")
        with self._stage("swap") as stage:
            stage.result = wait_until_served(self.settings, self.store, pointer)

    @contextmanager
    def _stage(self, name: str) -> Iterator[Stage]:
        """Time a stage and keep the record, before it and after it, however it ends."""
        stage = Stage(name=name, started_at=_now())
        self.record.stages.append(stage)
        self._keep()
        self.say(f"{name} …")
        started = time.monotonic()
        try:
            yield stage
        except BaseException as error:
            stage.ok, stage.error = False, str(error) or type(error).__name__
            stage.killed = isinstance(error, (Stopped, StageKilled))
            raise
        else:
            stage.ok = True
        finally:
            stage.seconds = time.monotonic() - started
            self._keep()
        self.say(f"{name} took {stage.seconds:.1f} s")

    def _end(self, status: Literal["promoted", "refused", "skipped", "failed"], reason: str | None) -> None:
        self.record.status, self.record.reason, self.record.finished_at = status, reason, _now()
        self._keep()
        self.say(f"{status}{f': {reason}' if reason else ''}")

    def _keep(self) -> None:
        _write(self.settings, self.record)


def _last_words(output: str) -> str:
    """What a stage failed by: the last line of its error, if it told one."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or ["it said nothing"])[-1].removeprefix("error: ")


def server_policy(settings: Settings) -> dict[str, Any] | None:
    """What ``GET /policy`` of the configured server says; None if nobody answers there."""
    import httpx

    try:
        answer = httpx.get(f"{settings.server_url}/policy", headers=settings.server_headers, timeout=SERVER_TIMEOUT_S)
        answer.raise_for_status()
        body = answer.json()
    except (httpx.HTTPError, ValueError):
        return None
    return body if isinstance(body, dict) else None


def wait_until_served(settings: Settings, store: PolicyStore, pointer: Pointer) -> dict[str, Any]:
    """Wait until the server, or the whole fleet, serves the pointer's policy; {seconds, replica}.

    A server that reports that it could not load it keeps the old policy; then the pointer goes back too, so that a
    restart doesn't try the same again. Raises StageFailed for that and when cycle.swap_timeout_s has passed, which a
    fleet's canary has its own time beside.
    """
    started = time.monotonic()
    fleet = settings.serve.fleet
    deadline = started + settings.cycle.swap_timeout_s + (0 if fleet.is_one else fleet.canary_seconds)
    while time.monotonic() < deadline:
        answer = server_policy(settings) or {}
        if (
            answer.get("version") == pointer.version
            and answer.get("generation", pointer.generation) >= pointer.generation
        ):
            return {"seconds": time.monotonic() - started, "replica": answer.get("replica")}
        failed = answer.get("failed")
        undoing = answer.get("phase") == "undoing"  # a fleet that goes back, and then moves the pointer itself
        if isinstance(failed, dict) and failed.get("generation") == pointer.generation and not undoing:
            why = f"the server could not load policy {pointer.version}: {failed.get('error') or failed}"
            current = store.serving()
            if current is not None and current.generation != pointer.generation:
                why += f"; the pointer is at {current.version}"
            elif pointer.previous is not None and pointer.previous != pointer.version:
                rollout.rollback(store, who="cycle", why=why, to=pointer.previous)
                why += f"; the pointer is back at {pointer.previous}"
            raise StageFailed(why)
        time.sleep(0.25)
    raise StageFailed(
        f"the server at {settings.server_url} does not serve policy {pointer.version} after "
        f"cycle.swap_timeout_s={settings.cycle.swap_timeout_s:g} s"
    )


@contextmanager
def _only_one(settings: Settings) -> Iterator[None]:
    folder = settings.path(settings.cycle.folder)
    folder.mkdir(parents=True, exist_ok=True)
    # Inheritable descriptors are off in Python, so no stage can keep the lock when this process has died.
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CycleBusy(f"another cycle is running in {folder}") from None
        yield


def _close_dead(settings: Settings, say: Callable[[str], None]) -> None:
    """Cycles that are still 'running' while we hold the lock have died."""
    for record in records(settings):
        if record.status == "running":
            during = f" in {record.stages[-1].name}" if record.stages else ""
            record.status, record.reason, record.finished_at = "failed", f"its process died{during}", _now()
            if record.stages:
                record.stages[-1].killed = record.stages[-1].ok is None
            _write(settings, record)
            say(f"cycle {record.number}: {record.reason}")


def _next_number(settings: Settings) -> int:
    return max((record.number for record in records(settings)), default=0) + 1


def _write(settings: Settings, record: CycleRecord) -> None:
    """Replace the record on disk, whole or not at all."""
    path = settings.path(settings.cycle.folder) / f"{record.number:06d}.json"
    write_whole(path, record.model_dump_json(indent=2).encode() + b"\n")


def _now() -> datetime:
    return datetime.now(UTC)
