"""One turn of the loop: score, train, evaluate, gate, promote, and wait until the server serves it.

Score, train and evaluate run as processes of their own, so that their memory goes back and a crash of one is a failed
cycle and no more. The record under ``cycles/`` is written after every stage; a cycle that died is closed by the next.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal

from deploy import devices
from deploy.config.root import ConfigError, RecipeStage, Settings
from deploy.loop import promotion, recipes
from deploy.loop.preflight import check
from deploy.loop.records import (
    EVALUATION_REWARD_MODEL,
    CycleRecord,
    Stage,
    close_dead,
    load_all,
    new_rows,
    next_number,
    now,
    without_candidate,
    write,
)
from deploy.loop.recovery.killed_runs import judged_before, passed_before, unfinished_training
from deploy.loop.traces import span, traced
from deploy.loop.wait_for_serving import NotServed, server_policy, wait_until_served
from deploy.supervise import preloaded, resident
from deploy.supervise.children import NOTHING_TO_LEARN, start
from evaluation.decisions.gate import SPENT
from evaluation.decisions.history import History, fresh_items, hypothesis
from evaluation.decisions.ledger import LedgerError
from evaluation.decisions.plan import declared
from evaluation.suites.suite import Suite, SuiteError
from feedback.datasets import count_on_policy
from feedback.files import locked
from feedback.processes.exit import SIGNALLED
from feedback.processes.signals import Stopped
from serve.policies.folder import fingerprint
from serve.policies.retention import retraining_parent
from serve.policies.store import Pointer, PolicyError, PolicyStore
from train.run.recovery.unfinished import give_up

if TYPE_CHECKING:
    from serve.observability.tracing import Tracing

_NO_FRESH = (
    "an item decides once; `millrace suite add FILE` adds some, and held-out traffic does where the suite is drawn"
)
_IMPORTS_S = 60.0
LOCK_WAIT_S = 0.5  # `millrace status` holds it for an instant, to see whether it is free


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
        if settings.train.run_store.uri is not None:
            from deploy.loop.recovery.other_machines import take_over  # obstore is loaded where it is used

            if busy := take_over(settings, say):
                raise CycleBusy(busy)
        with (
            preloaded.serving(settings.path(settings.up.logs) / "preloaded.log"),
            resident.joined(settings, "train"),
            resident.serving(settings),
        ):
            cycle = _Cycle(settings, say)
            with traced(settings, "millrace-cycle") as tracing:
                return cycle.run(tracing)


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


_FAILURES = (
    StageFailed,
    NotServed,
    promotion.PromotionRefused,
    promotion.ExperimentRefused,
    PolicyError,
    ConfigError,
    SuiteError,
    LedgerError,
)


class _Cycle:
    def __init__(self, settings: Settings, say: Callable[[str], None]) -> None:
        number = next_number(settings)
        self.settings = settings
        self.say = lambda text: say(f"cycle {number}: {text}")
        self.follow = say
        self.store = settings.policy_store()
        self.ledger, self._history, self._counted = settings.ledger(), History(), 0
        self.record = CycleRecord(number=number, started_at=now())
        self._read: tuple[list[int], Suite] | None = None
        self._tracing: Tracing | None = None
        self._beside = ExitStack()  # what goes on beside the stages, up to the end of the cycle

    def run(self, tracing: Tracing | None) -> CycleRecord:
        self._tracing = tracing
        with span(tracing, f"cycle {self.record.number}", number=self.record.number) as whole:
            try:
                return self._run_to_its_end()
            finally:
                whole(outcome=self.record.status, candidate=self.record.candidate, incumbent=self.record.incumbent)

    def _run_to_its_end(self) -> CycleRecord:
        self._save()
        self.store.announce(None)  # what a cycle that was killed has left
        try:
            with self._beside:
                self._turn()
        except _FAILURES as error:
            self._end("failed", str(error))
        except Stopped as stopped:
            self._end("stopped", f"by {stopped}")
            raise
        except BaseException as error:
            self._end("failed", f"{type(error).__name__}: {error}")
            raise
        return self.record

    def _turn(self) -> None:
        pointer = self.store.serving()
        if pointer is None:
            raise StageFailed(f"no policy serves in {self.store.root}: run `millrace init --model NAME_OR_FOLDER`")
        self.record.incumbent = pointer.version
        promotion.record_moves(self.store, self.ledger)

        scored = self._run("score", self.settings.cycle.score_timeout_s)
        self.record.rewards, self.record.feedback = (scored["counts"][table] for table in ("rewards", "feedback"))
        if (tried := self.store.experiments.current()) is not None:
            return self._end("skipped", f"experiment {tried.number} tries policy {tried.candidate} on live traffic")
        if self._passed_before(pointer.version):
            parent, reason = pointer.version, None
        elif (waits := self._judged_before(pointer.version)) is not None:
            parent, reason = self._parent_of_candidate(pointer.version), waits
        else:
            parent, reason = self._train_candidate(pointer.version)
        if self.record.candidate is None:
            return self._end("skipped", reason)

        candidate, incumbent = str(self.record.candidate), str(pointer.version)
        timeout = self.settings.cycle.evaluate_timeout_s
        self.store.announce(self.record.candidate)
        self._beside.enter_context(self._scoring_ahead())
        judged = self._run("evaluate", timeout, candidate, "--incumbent", incumbent)
        self.record.verdict = judged["verdict"]
        why = "; ".join(judged["verdict"]["reasons"])
        if judged["verdict"]["verdict"] == "undecided":
            return self._end("undecided", why)
        if judged["verdict"]["verdict"] != "pass":
            why = why or "the gate refused it"
            if parent != pointer.version:  # what serves is marked: a better parent is where the next cycle starts from
                self._run("evaluate", timeout, candidate, "--incumbent", str(parent), stage="evaluate-parent")
                why += f"; policy {incumbent} is marked for retraining, and serves on"
            return self._end("refused", why)

        if self.settings.evaluation.experiment.shadow.enabled and (harm := self._shadow(self.record.candidate)):
            return self._end("refused", f"its shadow did harm: {harm}")
        if self.settings.evaluation.experiment.enabled:
            return self._try_on_traffic(self.record.candidate)
        try:
            self._promote(self.record.candidate, pointer)
        finally:
            promotion.record_moves(self.store, self.ledger)
        self._end("promoted", None)

    def history(self) -> History:
        """What the ledger says now; of it only what is new is read."""
        entries = self.ledger.entries()
        for entry in entries[self._counted :]:
            self._history.add(entry)
        self._counted = len(entries)
        return self._history

    def _passed_before(self, incumbent: int) -> bool:
        """Take up the candidate of a cycle that was killed after it had passed the gate, and before it was promoted."""
        last, why_not = passed_before(self.settings, self.history(), self.record.number, incumbent)
        if last is None:
            return False
        left = f"policy {last.candidate} has passed the gate in cycle {last.number}"
        if why_not:
            self.say(f"{left}, and is not promoted: {why_not}")
            return False
        self.say(f"{left}, which ended before it was promoted: its verdict is on record")
        self._take_up(last)
        return True

    def _judged_before(self, incumbent: int) -> str | None:
        """Take up the candidate that is in the race; why it waits, if it does, and None if there is none.

        While it waits for fresh items nothing is trained: what would come of it could not be judged either.
        """
        last, why_not = judged_before(self.settings, self.history(), self.record.number, incumbent)
        if last is None or last.candidate is None:
            return None
        if why_not:
            self.say(f"policy {last.candidate} is undecided, and is let go: {why_not}")
            return None
        name = hypothesis(self.store.get(last.candidate).sha256, self.store.get(incumbent).sha256)
        race = self.history().races.get(name)
        if race and race[-1][1].final:
            self.say(f"policy {last.candidate} was judged in cycle {last.number}, which ended before it could say so")
        else:
            try:
                without = self._suite()
                fresh = 0 if without else self._fresh(name, self.store.learned_prompts(last.candidate)[0])
            except SuiteError as error:
                without, fresh = str(error), 0
            if without:
                return f"policy {last.candidate} is undecided, and there is nothing to go on with: {without}"
            if fresh == 0:
                needs = (last.verdict or {}).get("needs")
                more = f"about {needs} more items" if needs else "more items"
                return f"policy {last.candidate} is undecided and needs {more}: {_NO_FRESH}"
            self.say(
                f"policy {last.candidate} is undecided since cycle {last.number}: {fresh} fresh items go on with it"
            )
        self._take_up(last)
        return ""

    def _take_up(self, last: CycleRecord) -> None:
        for name in ("recipe", "recipe_reason", "run", "reward_model", "candidate", "rewards", "feedback"):
            setattr(self.record, name, getattr(last, name))
        self.record.stages += [stage.model_copy(update={"seconds": 0.0}) for stage in last.stages if stage.run]

    def _parent_of_candidate(self, incumbent: int) -> int:
        """What a candidate that is taken up was trained from, where what serves is marked for retraining."""
        if self.record.candidate is None or not self.store.get(incumbent).marked:
            return incumbent
        return self.store.get(self.record.candidate).parent or incumbent

    def _fresh(self, name: str | None = None, learned: Collection[str] = ()) -> int:
        """How many items of the suite can still decide, on a new candidate or on the hypothesis ``name``, which has
        ``learned`` from some."""
        return fresh_items(self._loaded(), self.history(), name, learned)

    def _loaded(self) -> Suite:
        """The suite, read when its file is another one than before. Raises SuiteError."""
        path = self.settings.path(self.settings.evaluation.suite)
        try:
            stamp = fingerprint(path)
        except OSError:
            return Suite.load(path)  # which says what is wrong
        if self._read is None or self._read[0] != stamp:
            self._read = stamp, Suite.load(path)
        return self._read[1]

    def _not_to_be_judged(self) -> str | None:
        """Why what would be trained now could not pass, whatever it learned."""
        gate = self.settings.evaluation.gate
        if self.history().level(declared(gate), hypothesis("another", "one")) <= 0:
            return SPENT
        if (fresh := self._fresh()) < gate.min_items:
            return f"{fresh} of the suite's items are fresh, gate.min_items is {gate.min_items}: {_NO_FRESH}"
        return None

    def _train_candidate(self, incumbent: int) -> tuple[int, str | None]:
        """Train one, if there is something to learn from: (what training starts from, why there is no candidate)."""
        if not self._has_recipe():
            return incumbent, self.record.recipe_reason
        if (
            reason := self._nothing_new()
            or self._little_on_policy(incumbent)
            or self._suite()
            or self._not_to_be_judged()
        ):
            return incumbent, reason
        parent = training_parent(self.store, incumbent, self.say)
        if self.settings.trains_reward_model_to_evaluate and (
            reason := self._reward_model(RecipeStage(stage="reward-model"), parent, None, held_out=True)
        ):
            if not self.settings.compares_by_held_out_feedback:
                return parent, reason
            self.say(f"{reason}: the guardrail holdout_reward does not decide")
        reason = self._learn(incumbent, parent)
        if self.record.candidate is None:
            in_a_row = without_candidate(self.settings)
            again = len(in_a_row) if in_a_row and in_a_row[-1].number == self.record.number else 0
            reason += f" ({again} cycles in a row have trained and published nothing)" if again > 1 else ""
        return parent, reason

    def _has_recipe(self) -> bool:
        """Put on record what is learned from; what `auto` stands for is decided by what was scored."""
        if self.settings.cycle.recipe != "auto":
            recipe = self.settings.cycle.recipe
            self.record.recipe = "stages" if isinstance(recipe, list) else recipe
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
        cycle, judged = self.settings.cycle, [one for one in load_all(self.settings) if one.verdict is not None]
        offline = {
            cycle.recipe == "offline" or self.settings.of_stage(stage).train.algorithm.is_offline
            for stage in cycle.stages
            if stage.stage == "train"
        }
        kinds = [what for what, by in (("rewards", False), ("feedback", True)) if by in offline]
        new = {what: new_rows(getattr(self.record, what), [getattr(one, what) for one in judged]) for what in kinds}
        if max(new.values()) >= cycle.min_new_rewards:
            return None
        found = " and ".join(f"{count} new {what}" for what, count in new.items())
        return f"{found} since the last cycle that trained, cycle.min_new_rewards is {cycle.min_new_rewards}"

    def _little_on_policy(self, incumbent: int) -> str | None:
        """Why what people said of the policy that serves is too little to train on."""
        least = self.settings.cycle.min_on_policy_feedback
        if least == 0 or (count := count_on_policy(self.settings.lake(), incumbent)) >= least:
            return None
        return f"{count} of the {least} feedbacks on policy {incumbent} that cycle.min_on_policy_feedback asks for"

    def _suite(self) -> str | None:
        """Draw a suite from the held-out slice of traffic, or more of one; why there can't be one yet."""
        evaluation, suite = self.settings.evaluation, None
        if self.settings.path(evaluation.suite).exists():
            suite = self._loaded()
            enough = fresh_items(suite, self.history()) >= evaluation.suite_items
            if not evaluation.holdout or enough or not suite.drawn:
                return None
        reason = self._run("suite", self.settings.cycle.score_timeout_s, "sample", "--grow")["reason"]
        return None if suite or reason is None else f"there is no suite yet: {reason}"

    def _learn(self, incumbent: int, parent: int) -> str:
        """Train what the recipe says, each stage from the policy of the one before; the last one is the candidate.

        What the last cycle has trained before it was killed is not trained again. What can't be gone on with is removed
        here; the object store of runs has it until train.retention removes it, as it may be another machine's, whose
        settings it fits. A stage with nothing to learn from hands its parent on. What it returns says why there is no
        candidate, if there is none.
        """
        last, left = unfinished_training(self.settings, self.record.number, incumbent, parent)
        folders = [self.settings.path(self.settings.train.runs) / name for name in left]
        removed = give_up(folders)
        here = "" if self.settings.run_store() is None else " from this machine"
        for name, hindrance in left.items():
            then = f"its checkpoints are removed{here}" if name in removed else "it is trained anew"
            self.say(f"run {name} can't go on ({hindrance}): {then}")
        recipe, reasons = recipes.stages(self.settings) if last is None else last.recipe, []
        kept = {} if last is None else {stage.name: stage for stage in last.stages}
        if last is not None:
            self.record.rewards, self.record.feedback = last.record.rewards, last.record.feedback
            runs = ", ".join(str(stage.run) for stage in last.stages)
            self.say(f"goes on with what cycle {last.record.number} has trained: {runs}")
        for i, stage in enumerate(recipe):
            before = kept.get(stage.label)
            if stage.stage == "reward-model":
                rewarded = any(later.label in kept for later in recipe[i + 1 :])
                if why := self._reward_model(stage, parent, before, refresh=not rewarded):
                    self.say(f"{why}: stages after {stage.label} are left out")
                    reasons.append(why)
                    break
                continue
            trained = self._train(stage, parent, before)
            if trained["candidate"] is None:
                reasons.append(trained["reason"] if stage.name is None else f"{stage.name}: {trained['reason']}")
                self.say(f"{stage.label} has published nothing, policy {parent} stays: {trained['reason']}")
            else:
                self.record.candidate = parent = trained["candidate"]
        return "; ".join(reasons)

    def _train(
        self, stage: RecipeStage, parent: int, before: Stage | None, *arguments: str, label: str | None = None
    ) -> dict[str, Any]:
        """Run a stage that trains, or take over what an earlier cycle has of it; its result."""
        label = label or stage.label
        plain = f"cycle-{self.record.number:06d}"
        own = plain if label == "train" else f"{plain}-{label}"
        run = own if before is None else str(before.run)
        if label == stage.label:  # what a later cycle may go on with
            self.record.run = run
        if before is not None and before.result is not None:
            self.record.stages.append(before.model_copy(update={"seconds": 0.0}))
            return before.result
        return self._run(
            "train",
            self.settings.cycle.train_timeout_s,
            *("--run", run, "--parent", str(parent), *arguments),
            settings=self.settings.of_stage(stage),
            stage=label,
            run=run,
        )

    def _reward_model(
        self, stage: RecipeStage, policy: int, before: Stage | None, *, refresh: bool = True, held_out: bool = False
    ) -> str | None:
        """Train another reward model, if enough was said since the last, or an erasure has marked that for retraining.

        Why there is none to reward by, or None if there is one. ``refresh``: not with a later stage that was killed,
        and rewarded by the one that there is. ``held_out``: the one to evaluate by, of feedback on held-out prompts.
        """
        stores, label = self.settings.stores(), EVALUATION_REWARD_MODEL if held_out else stage.label
        store = stores.evaluation_reward_models if held_out else stores.reward_models

        def rewards() -> int | None:
            pointer = store.serving()
            return None if pointer is None or store.get(pointer.version).marked else pointer.version

        marked = rewards() is None and recipes.newest_is_marked(store)
        least = self.settings.of_stage(stage).train.reward_model.min_new_feedback
        new, why = recipes.new_feedback(self.settings, label, self.record.feedback), ""
        if before is not None or (refresh and (new >= least or marked)):
            arguments = ("--reward-model", *(["--held-out"] if held_out else []))
            result = self._train(stage, policy, before, *arguments, label=label)
            why = result["reason"]
            if result.get("reward_model") is not None:  # "reward model 2: …": each of the two counts its versions
                why = ("gate's " if held_out else "training's ") + why
            self.say(why)
        version = rewards()
        if not held_out:
            self.record.reward_model = version
        if version is None:
            which = "reward model to evaluate by" if held_out else "reward model"
            return f"there is no {which} yet: {why or f'it needs {least} pieces of feedback, and has {new}'}"
        return None

    def _run(
        self,
        name: str,
        timeout: float,
        *arguments: str,
        settings: Settings | None = None,
        stage: str | None = None,
        run: str | None = None,
    ) -> dict[str, Any]:
        """Run one stage as ``millrace <name>`` in a process of its own; what it handed on. Raises StageFailed."""
        called = stage or name
        out = self.settings.path(self.settings.cycle.folder) / f".{self.record.number:06d}-{called}.json"
        out.unlink(missing_ok=True)
        with self._stage(called, run) as kept:
            child = start(
                settings or self.settings,
                called,
                [name, *arguments, "--json-out", out],
                log=f"cycle-{self.record.number:06d}-{called}.log",
                grace=self.settings.cycle.stop_grace_s,
                follow=self.follow,
                patience=_IMPORTS_S if name != "score" else 0.0,
            )
            try:
                code = child.finish(timeout)
            except TimeoutError:
                limit = {"suite": "score", "experiment": "evaluate"}.get(name, name)
                setting = f"{'the seconds of a shadow and ' * (name == 'experiment')}cycle.{limit}_timeout_s"
                raise StageFailed(f"{called} took longer than {setting}={timeout:g} s") from None
            if code != 0 and not (name in ("train", "suite", "experiment") and code == NOTHING_TO_LEARN):
                failed = StageKilled if code > SIGNALLED else StageFailed
                raise failed(f"{called} ended with code {code}: {_last_error(child.tail())} (log: {child.log})")
            result: dict[str, Any] = json.loads(out.read_bytes())
            out.unlink()
            kept.result = result
        return result

    @contextmanager
    def _scoring_ahead(self) -> Iterator[None]:
        """Score, for the next cycle, what has come since this one has scored, beside the block; stopped if that raises.

        What it fails at, the next cycle's stage finds again. Nothing is scored ahead where that takes a GPU: it is one
        of the evaluation's, and a server that has it in turns would sleep on when there is a promotion to serve.
        """
        if not self.settings.cycle.score_ahead or devices.scores_on_device(self.settings):
            yield
            return
        cycle = self.settings.cycle
        with start(
            self.settings,
            "score-ahead",
            ["score", "--nice", "10"],  # nobody waits for it, and the evaluation beside it has the cores
            log=f"cycle-{self.record.number:06d}-score-ahead.log",
            grace=cycle.stop_grace_s,
        ) as child:
            yield
            try:
                code = child.wait(cycle.score_timeout_s)
            except TimeoutError:
                self.say(f"score-ahead took longer than cycle.score_timeout_s={cycle.score_timeout_s:g} s")
            else:
                if code:
                    self.say(f"score-ahead ended with code {code} (log: {child.log}); the next cycle scores")

    def _shadow(self, version: int) -> str | None:
        """Have the candidate answer a copy of a share of requests; what harm that shows."""
        timeout = self.settings.evaluation.experiment.shadow.seconds + self.settings.cycle.evaluate_timeout_s
        shown = self._run("experiment", timeout, "shadow", str(version), stage="shadow")["comparison"]
        return "; ".join(shown["reasons"]) if shown["decision"] == "harm" else None

    def _try_on_traffic(self, version: int) -> None:
        """Start an experiment; `millrace up` or `millrace schedule` looks at it from then on."""
        from deploy.loop.experiments import Controller  # scipy, which no other cycle needs here

        with self._stage("experiment") as stage:
            why = f"cycle {self.record.number}: passed the gate"
            started = Controller(self.settings, say=self.say).start(version, who="cycle", why=why)
            stage.result = {"experiment": started.number}
        self._end("experiment", f"experiment {started.number} tries policy {version} on live traffic")

    def _promote(self, version: int, incumbent: Pointer) -> None:
        """Move the pointer, and see that the running server follows. Raises StageFailed if it doesn't."""
        with self._stage("promote") as stage:
            running = server_policy(self.settings) is not None
            pointer = promotion.promote(
                self.store,
                self.ledger,
                version,
                who="cycle",
                why=f"cycle {self.record.number}: passed the gate",
                expected=incumbent,
            )
            stage.result = {"version": version, "generation": pointer.generation, "server": running}
        self.say(f"promoted policy {version} (before: {incumbent.version})")
        if not running:
            return self.say(f"no server answers at {self.settings.server_url}: it will serve {version} when it starts")
        with self._stage("swap") as stage:
            stage.result = wait_until_served(self.settings, self.store, pointer, say=self.say)

    @contextmanager
    def _stage(self, name: str, run: str | None = None) -> Iterator[Stage]:
        """Time a stage and keep the record, before it and after it, however it ends."""
        stage = Stage(name=name, started_at=now(), run=run)
        self.record.stages.append(stage)
        self._save()
        self.say(f"{name} …")
        started = time.monotonic()
        try:
            with span(self._tracing, name, **({} if run is None else {"run": run})):
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

    def _end(
        self,
        status: Literal["promoted", "experiment", "refused", "undecided", "skipped", "stopped", "failed"],
        reason: str | None,
    ) -> None:
        """Put on record what the cycle has come to, once: a stop while something goes on beside it is no end."""
        if self.record.status != "running":
            return
        self.record.status, self.record.reason, self.record.finished_at = status, reason, now()
        self._save()
        self.store.announce(None)
        self.say(f"{status}{f': {reason}' if reason else ''}")

    def _save(self) -> None:
        write(self.settings, self.record)


def _last_error(output: str) -> str:
    """The last error that a stage printed, else its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or ["it printed nothing"])[-1].removeprefix("error: ")
