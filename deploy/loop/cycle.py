"""One turn of the loop: score, train, evaluate, gate, promote, and wait until the server serves it.

Score, train and evaluate run as processes of their own, so that their memory goes back and a crash of one is a failed
cycle and no more. The record under ``cycles/`` is written after every stage; a cycle that died is closed by the next.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from deploy.config.root import Settings
from deploy.loop import promotion, recipes
from deploy.loop.killed_runs import killed_training
from deploy.loop.preflight import check
from deploy.loop.records import (
    CycleRecord,
    Stage,
    close_dead,
    load_all,
    next_number,
    now,
    without_candidate,
    write,
)
from deploy.loop.wait_for_serving import NotServed, server_policy, wait_until_served
from deploy.supervise.children import NOTHING_TO_LEARN, Stopped, start
from feedback.files import locked
from serve.policies.retention import retraining_parent
from serve.policies.store import Pointer, PolicyError, PolicyStore
from train.run.unfinished import give_up

LOCK_WAIT_S = 0.5  # `millrace status` holds it for an instant, to see whether it is free
SIGNALLED = 128  # a process that signal n ended has the code 128 + n


class CycleBusy(RuntimeError):
    """Another process is in the middle of a cycle."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h


class StageFailed(RuntimeError):
    """A stage of the cycle failed; the text says which and why."""


class StageKilled(StageFailed):
    """A stage's process was ended by a signal, and not by anything that it did."""


def run_cycle(settings: Settings, *, say: Callable[[str], None] = print) -> CycleRecord:
    """Run one cycle to its end and return its record, whatever the end was.

    say: gets one line of text for each thing that happens, the stages' own output included.
    Raises ConfigError if the settings can't work, CycleBusy if another cycle is running, Stopped on a signal.
    """
    check(settings)
    folder = settings.path(settings.cycle.folder)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / ".lock", LOCK_WAIT_S, busy=CycleBusy(f"another cycle is running in {folder}")):
        close_dead(settings, say)
        return _Cycle(settings, say).run()


def training_parent(store: PolicyStore, serving: int, say: Callable[[str], None]) -> int:
    """What training starts from: what serves, or, if an erasure has marked that, as ``retraining_parent`` says."""
    clean = retraining_parent(store, serving)
    if clean is None:
        say(
            f"policy {serving} is marked for retraining, and no policy that it descends from has weights and no mark: "
            "training goes on from it. To begin anew: millrace init in another home"
        )
        return serving
    if clean.version != serving:
        say(
            f"policy {serving} is marked for retraining, and serves until another passes the gate: training starts "
            f"from policy {clean.version}"
        )
    return clean.version


class _Cycle:
    def __init__(self, settings: Settings, say: Callable[[str], None]) -> None:
        number = next_number(settings)
        self.settings = settings
        self.say = lambda text: say(f"cycle {number}: {text}")
        self.follow = say
        self.store = settings.policy_store()
        self.record = CycleRecord(number=number, started_at=now())

    def run(self) -> CycleRecord:
        self._save()
        try:
            self._turn()
        except (StageFailed, NotServed, promotion.PromotionRefused, PolicyError) as error:
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
        if not self._has_recipe():
            return self._end("skipped", self.record.recipe_reason)
        if reason := self._nothing_new() or self._suite():
            return self._end("skipped", reason)

        parent = training_parent(self.store, pointer.version, self.say)
        killed, left = killed_training(self.settings, self.record.number, pointer.version, parent)
        for name in give_up(self.settings.path(self.settings.train.runs) / name for name in left):
            self.say(f"run {name} can't go on ({left[name]}): its checkpoints are removed")
        if self.settings.cycle.recipe == "rlhf" and (reason := self._reward_model(parent, go_on=killed is not None)):
            return self._end("skipped", reason)
        if self.settings.trains_reward_model_to_evaluate and (
            reason := self._reward_model(parent, go_on=False, held_out=True)
        ):
            return self._end("skipped", reason)

        self.record.run = f"cycle-{self.record.number:06d}"
        if killed:
            self.record.run, self.record.rewards, self.record.feedback = killed.run, killed.rewards, killed.feedback
            self.say(f"goes on with run {killed.run}: the training of cycle {killed.number} was killed")
        trained = self._run(
            "train",
            self.settings.cycle.train_timeout_s,
            *("--run", str(self.record.run), "--parent", str(parent)),
            *recipes.arguments(self.settings, self.settings.path(self.settings.train.runs) / str(self.record.run)),
        )
        self.record.candidate = trained["candidate"]
        if trained["candidate"] is None:
            again = len(without_candidate(self.settings))
            more = f" ({again} cycles in a row have trained and published nothing)" if again > 1 else ""
            return self._end("skipped", trained["reason"] + more)

        candidate, incumbent = str(trained["candidate"]), str(pointer.version)
        timeout = self.settings.cycle.evaluate_timeout_s
        judged = self._run("evaluate", timeout, candidate, "--incumbent", incumbent)
        self.record.verdict = judged["verdict"]
        if judged["verdict"]["verdict"] != "pass":
            why = "; ".join(judged["verdict"]["reasons"]) or "the gate refused it"
            if parent != pointer.version:  # what serves is marked: a better parent is where the next cycle starts from
                self._run("evaluate", timeout, candidate, "--incumbent", str(parent), stage="evaluate-parent")
                why += f"; policy {incumbent} is marked for retraining, and serves on"
            return self._end("refused", why)

        self._promote(trained["candidate"], pointer)
        self._end("promoted", None)

    def _has_recipe(self) -> bool:
        """Put on record what is learned from; what `auto` stands for is decided by what was scored."""
        if self.settings.cycle.recipe != "auto":
            self.record.recipe = self.settings.cycle.recipe
            return True
        choice = recipes.choose(self.settings)
        self.record.recipe, self.record.recipe_reason = choice.recipe, choice.why
        self._save()
        if choice.settings is None:
            return False
        self.say(f"recipe auto is {choice.recipe or 'to learn'} now: {choice.why}")
        self.settings = choice.settings
        return True

    def _nothing_new(self) -> str | None:
        """Why there is nothing to train on, compared with the last cycle whose candidate was judged."""
        offline = self.settings.cycle.recipe == "offline" or self.settings.train.algorithm.is_offline
        what = "feedback" if offline else "rewards"
        judged = [getattr(record, what) for record in load_all(self.settings) if record.verdict is not None]
        new, least = _new(getattr(self.record, what), judged), self.settings.cycle.min_new_rewards
        return None if new >= least else f"{new} new {what} since the last training, cycle.min_new_rewards is {least}"

    def _suite(self) -> str | None:
        """Draw a suite from the held-out slice of traffic, if there is none; why there can't be one yet."""
        if self.settings.path(self.settings.evaluation.suite).exists():
            return None
        drawn = self._run("suite", self.settings.cycle.score_timeout_s, "sample")
        return None if drawn["reason"] is None else f"there is no suite yet: {drawn['reason']}"

    def _reward_model(self, policy: int, *, go_on: bool, held_out: bool = False) -> str | None:
        """Train another reward model, if enough was said since the last, or an erasure has marked that for retraining.

        Why there is none to reward by, or None if there is one. ``go_on``: with a run that was killed, and rewarded by
        the one that there is. ``held_out``: the one to evaluate by, of feedback on held-out prompts.
        """
        stores, called = self.settings.stores(), "evaluation-reward-model" if held_out else "reward-model"
        store = stores.evaluation_reward_models if held_out else stores.reward_models

        def rewards() -> int | None:
            pointer = store.serving()
            return None if pointer is None or store.get(pointer.version).marked else pointer.version

        trained = [
            record.feedback
            for record in load_all(self.settings)
            if any(stage.name == called and stage.ok for stage in record.stages)
        ]
        marked = rewards() is None and store.serving() is not None
        new, why, least = _new(self.record.feedback, trained), "", self.settings.train.reward_model.min_new_feedback
        if not go_on and (new >= least or marked):
            name = f"cycle-{self.record.number:06d}-{called}"
            arguments = (
                "--reward-model",
                *(["--held-out"] if held_out else []),
                "--run",
                name,
                "--parent",
                str(policy),
            )
            timeout = self.settings.cycle.train_timeout_s
            why = self._run("train", timeout, *arguments, stage=called)["reason"]
            self.say(why)
        version = rewards()
        if not held_out:
            self.record.reward_model = version
        if version is None:
            which = "reward model to evaluate by" if held_out else "reward model"
            return f"there is no {which} yet: {why or f'{new} feedbacks, {least} are needed'}"
        return None

    def _run(self, name: str, timeout: float, *arguments: str, stage: str | None = None) -> dict[str, Any]:
        """Run one stage as ``millrace <name>`` in a process of its own; what it handed on. Raises StageFailed."""
        called = stage or name
        out = self.settings.path(self.settings.cycle.folder) / f".{self.record.number:06d}-{called}.json"
        out.unlink(missing_ok=True)
        with self._stage(called) as kept:
            child = start(
                self.settings,
                called,
                [name, *arguments, "--json-out", out],
                log=f"cycle-{self.record.number:06d}-{called}.log",
                grace=self.settings.cycle.stop_grace_s,
                follow=self.follow,
            )
            try:
                code = child.finish(timeout)
            except TimeoutError:
                setting = f"cycle.{'score' if name == 'suite' else name}_timeout_s"
                raise StageFailed(f"{called} took longer than {setting}={timeout:g} s") from None
            if code != 0 and not (name in ("train", "suite") and code == NOTHING_TO_LEARN):
                failed = StageKilled if code > SIGNALLED else StageFailed
                raise failed(f"{called} ended with code {code}: {_last_error(child.tail())} (log: {child.log})")
            result: dict[str, Any] = json.loads(out.read_bytes())
            out.unlink()
            kept.result = result
        return result

    def _promote(self, version: int, incumbent: Pointer) -> None:
        """Move the pointer, and see that the running server follows. Raises StageFailed if it doesn't."""
        with self._stage("promote") as stage:
            running = server_policy(self.settings) is not None
            pointer = promotion.promote(
                self.store, version, who="cycle", why=f"cycle {self.record.number}: passed the gate", expected=incumbent
            )
            stage.result = {"version": version, "generation": pointer.generation, "server": running}
        self.say(f"promoted policy {version} (before: {incumbent.version})")
        if not running:
            return self.say(f"no server answers at {self.settings.server_url}: it will serve {version} when it starts")
        with self._stage("swap") as stage:
            stage.result = wait_until_served(self.settings, self.store, pointer, say=self.say)

    @contextmanager
    def _stage(self, name: str) -> Iterator[Stage]:
        """Time a stage and keep the record, before it and after it, however it ends."""
        stage = Stage(name=name, started_at=now())
        self.record.stages.append(stage)
        self._save()
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
            self._save()
        self.say(f"{name} took {stage.seconds:.1f} s")

    def _end(self, status: Literal["promoted", "refused", "skipped", "failed"], reason: str | None) -> None:
        self.record.status, self.record.reason, self.record.finished_at = status, reason, now()
        self._save()
        self.say(f"{status}{f': {reason}' if reason else ''}")

    def _save(self) -> None:
        write(self.settings, self.record)


def _new(count: int | None, before: list[int | None]) -> int:
    """How many rows are new since the last count before; all, if there are fewer than then: old ones were removed."""
    last = next((known for known in reversed(before) if known is not None), 0)
    count = count or 0
    return count - last if count >= last else count


def _last_error(output: str) -> str:
    """The last error that a stage printed, else its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or ["it printed nothing"])[-1].removeprefix("error: ")
