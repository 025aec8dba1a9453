"""Experiments on live traffic: started, looked at, committed, rolled back, and put on record.

A look reads the lake and decides from its rows alone, so it may be killed at any moment: the next one comes to the
same. What it decides is done in this order, each step harmless to repeat: the server is told (the experiment's record,
or the pointer), then the ledger. So harm ends as fast as a swap, and what is on record has happened.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

from deploy.config.root import Settings
from deploy.loop import promotion
from deploy.loop.promotion import ExperimentRefused
from deploy.loop.wait_for_serving import server_policy
from evaluation.decisions.ledger import Entry, Ledger, LedgerError
from evaluation.experiments import looks
from evaluation.experiments.blocks import BadEvidence, Block, Observed, has_rows, observe
from evaluation.experiments.plan import ExperimentPlan
from evaluation.experiments.verification import declared
from feedback.files import locked, replace_file
from serve.policies.adapter_files import rank_of
from serve.policies.experiments import Experiment, ExperimentRunning, Experiments, Phase, Unit
from serve.policies.records import now
from serve.policies.store import Pointer, PolicyError, PolicyStore, StalePointer
from serve.policies.whole_policies import weights_of

_LOCK_WAIT_S: Final = 0.5
_START_IN_S: Final = 1.0  # so that block 0 is whole for a server that has not seen the record yet

_GRACE_S: Final = 3600.0  # for somebody to look, before servers take an experiment for over by themselves
_WHO: Final = "experiment"

End = Literal["kept", "roll back", "expired"]


class Controller:
    """The experiments of a home. ``say`` gets one line for each thing that happens."""

    def __init__(self, settings: Settings, *, say: Callable[[str], None] = print) -> None:
        self.settings = settings
        self.say = say
        self.store: PolicyStore = settings.policy_store()
        self.ledger: Ledger = settings.ledger()
        self.experiments = self.store.experiments

    # Start

    def start(self, version: int, *, who: str, why: str, override: bool = False) -> Experiment:
        """Have the policy and the one that serves share traffic, from a second from now on.

        With one server they take turns, block by block; in a fleet each has replicas, and users are drawn for.
        The policy must have passed the gate against the one that serves, and each such pair is tried once, unless
        ``override`` with a reason. Raises ExperimentRefused, ExperimentRunning, PolicyError, LedgerError.
        """
        with self._alone():
            self._finish_what_is_left()
            pointer = self._pointer()
            if pointer.version == version:
                raise ExperimentRefused(f"policy {version} serves: an experiment compares another one with it")
            if (current := self.experiments.current()) is not None:
                raise ExperimentRunning(
                    f"experiment {current.number} on policy {current.candidate} has not ended: one at a time "
                    "(millrace experiment show, millrace experiment stop)"
                )
            unit = self._unit(version, pointer.version)
            self.store.verify(version)
            objection, verdict_entry = self._objection(version, pointer.version)
            if objection and not override:
                raise ExperimentRefused(f"{objection}; to try it all the same: --override --why '...'")
            if objection and not why.strip():
                raise ExperimentRefused(f"{objection}, and an override needs a reason, which is recorded: --why '...'")
            experiment = self._declare(version, pointer, verdict_entry, unit, who=who, why=why, objection=objection)
            self.experiments.begin(experiment)
        if unit == "user":
            shares = f"shares users with policy {pointer.version}, {experiment.share(0):.0%} of them its own"
        else:
            shares = (
                f"takes turns with policy {pointer.version}, {experiment.block_s:g} s each, {experiment.share(0):.0%} "
                "of them its own"
            )
        self.say(f"experiment {experiment.number}: policy {version} {shares}")
        return experiment

    def _unit(self, candidate: int, control: int) -> Unit:
        """What is drawn for: by what serves or, where nothing does, by the settings. Raises ExperimentRefused."""
        answer = server_policy(self.settings)
        if answer is None:
            one = self.settings.serve.fleet.is_one
            return "block" if one and not self._fit_one_engine(candidate, control, None) else "user"
        if answer.get("phase") is None:
            return "user" if self._fit_one_engine(candidate, control, answer.get("base")) else "block"
        if answer["phase"] != "settled":
            raise ExperimentRefused("the fleet deploys a policy at this moment: start the experiment when it is done")
        ready = [name for name, one in (answer.get("replicas") or {}).items() if one["state"] == "ready"]
        if len(ready) < 2:
            raise ExperimentRefused(
                f"the fleet has {len(ready)} replica that is ready, and each of the two policies needs one: wait for "
                "the others, or see its log"
            )
        return "user"

    def _fit_one_engine(self, candidate: int, control: int, base: int | None) -> bool:
        """Whether one engine can answer with both: adapters of one base, or that; ``base``: the engine's, if known."""
        room = self.settings.serve.engine.adapters
        arms = [self.store.get(version) for version in (candidate, control)]
        adapters = [arm for arm in arms if arm.base is not None]
        if room is None or len({base or weights_of(arms[0]), *map(weights_of, arms)}) > 1:
            return False
        places = room.count - len(set(room.tenants.values()))
        return len(adapters) <= places and all(rank_of(arm.path) <= room.rank for arm in adapters)

    def _objection(self, version: int, serving: int) -> tuple[str | None, int | None]:
        """Why the policy is not to be tried against what serves, and the entry of its verdict."""
        verdict, objection = promotion.verdict_on(self.store, self.ledger, version, serving, override=True)
        objection = "; ".join(filter(None, (objection, promotion.erased_from(self.store, version)))) or None
        not_begun = {entry.body["number"] for entry in self._entries("end") if entry.body["decision"] == "not begun"}
        not_begun -= {entry.body["number"] for entry in self._entries("commit")}
        candidate, control = (self.store.get(one).sha256 for one in (version, serving))
        for entry in self._entries("start"):
            if entry.body["number"] not in not_begun and (
                entry.body["candidate"]["sha256"],
                entry.body["control"]["sha256"],
            ) == (candidate, control):
                tried = f"policy {version} was tried against policy {serving} in experiment {entry.body['number']}"
                objection = f"{objection}; {tried}" if objection else f"{tried}, and a second try is another chance"
                break
        number = None if verdict is None else int(str(verdict["entry"]))
        return objection, number

    def _declare(
        self,
        version: int,
        pointer: Pointer,
        verdict_entry: int | None,
        unit: Unit,
        *,
        who: str,
        why: str,
        objection: str | None,
    ) -> Experiment:
        """Put an experiment into the ledger, before anybody meets it."""
        config = self.settings.evaluation.experiment
        scoring, kinds = self.settings.feedback.scoring, self.settings.feedback.kinds
        number = max([0, *self.experiments.numbers(), *(entry.body["number"] for entry in self._entries())]) + 1
        at, phases = 0, []
        for phase in config.phases:
            phases.append(Phase(at, phase.share))
            at += phase.blocks or 0
        started_at = time.time() + _START_IN_S
        experiment = Experiment(
            number=number,
            candidate=version,
            control=pointer.version,
            seed=secrets.token_hex(16),
            started_at=started_at,
            block_s=config.block_seconds,
            phases=tuple(phases),
            generation=pointer.generation,
            state="running",
            who=who,
            why=why,
            plan=ExperimentPlan.of(config, scoring.human, kinds, unit=unit).to_json(),
            expires_at=started_at + config.max_seconds + config.feedback_window_seconds + _GRACE_S,
            unit=unit,
        )
        self._record(
            experiment,
            "start",
            {"verdict_entry": verdict_entry, "override": objection is not None, "objection": objection},
            who=who,
        )
        return experiment

    # Look

    def look(self) -> Experiment | None:
        """Look at the experiment that has not ended, and do what follows; the experiment then, None if there is none.

        Raises what the lake, the store and the ledger raise.
        """
        with self._alone():
            experiment = self.experiments.current()
            if experiment is None:
                self._finish_what_is_left()
                return None
            if experiment.holds:
                experiment = self._follow_pointer(experiment)
            if experiment.holds:
                experiment = self._decide(experiment, time.time())
            return experiment if experiment.holds else self._end(experiment)

    def _decide(self, experiment: Experiment, at: float) -> Experiment:
        """What the blocks that have closed say, and what servers are to do now."""
        over = self._over_at(experiment)
        try:
            plan = ExperimentPlan.model_validate(experiment.plan)
            observed = self._observe(experiment, plan, at)
            decision = looks.look(plan, observed, watched_from=experiment.watched_from)
        except (BadEvidence, ValueError) as error:  # nothing can be concluded: the candidate must not stay for it
            return self.experiments.stop(experiment.number, who=_WHO, why=str(error), decision="failed")
        except Exception:
            if at >= over:
                why = "its time is over, and its rows can't be read"
                return self.experiments.stop(experiment.number, who=_WHO, why=why, decision="expired")
            raise
        why, count = "; ".join(decision.reasons), len(observed.blocks)
        latest = {"at": now(), **looks.to_json(plan, decision, observed)}
        if decision.decision == "roll back":
            if experiment.state == "committed":  # the pointer first: without turns, servers follow it
                self._move_back(experiment, why, count)
            return self._over(experiment, "roll back", why, count, latest)
        if experiment.state == "running" and (harm := self._harm_of_shadow(experiment)):
            return self.experiments.stop(experiment.number, who=_WHO, why=harm, decision="failed")
        if experiment.state == "committed" and at >= over:
            return self._over(experiment, "kept", "no harm was shown while it was watched", count, latest)
        if experiment.state == "running" and decision.decision == "commit":
            return self._commit(experiment, why, observed)
        if experiment.state == "running" and at >= over:
            return self._over(experiment, "expired", why, count, latest)
        return self.experiments.change(experiment.number, lambda one: replace(one, latest=latest))

    def _observe(self, experiment: Experiment, plan: ExperimentPlan, at: float) -> Observed:
        """All blocks that have closed; those that no look has seen yet are kept for all that follow."""
        known = self._blocks(experiment)
        observed = observe(self.settings.lake(), self._journal, experiment, plan, now=at, known=known)
        if len(observed.blocks) > len(known):
            lines = "".join(f"{block.model_dump_json()}\n" for block in observed.blocks)
            replace_file(self._blocks_file(experiment), lines.encode())
        return observed

    @property
    def _journal(self) -> Path:
        return self.settings.path(self.settings.resolved().feedback.journal.folder)

    def _blocks(self, experiment: Experiment) -> list[Block]:
        """The blocks that looks have seen so far."""
        return blocks_seen(self._blocks_file(experiment))

    def _blocks_file(self, experiment: Experiment) -> Path:
        return blocks_file(self.experiments, experiment.number)

    def _over_at(self, experiment: Experiment) -> float:
        """When it ends, if nothing is shown: what was asked last has had its time for feedback then."""
        plan = experiment.plan
        if experiment.state == "running":
            return experiment.started_at + float(plan.get("max_s", 0.0))
        watch_began = experiment.begins(experiment.phases[-1].from_block)
        return watch_began + float(plan.get("watch_s", 0.0)) + float(plan.get("window_s", 0.0))

    def _follow_pointer(self, experiment: Experiment) -> Experiment:
        """The experiment under the pointer as it is now.

        It goes on; or a look that was killed has committed it, or rolled it back; or it ends.
        """
        pointer = self._pointer()
        verdict = pointer.verdict or {}
        if self._committed_by(pointer, experiment) and pointer.generation >= experiment.generation:
            return self._watch(experiment, pointer)
        if pointer.generation == experiment.generation:
            return experiment
        if verdict.get("experiment") == experiment.number and verdict.get("rollback_from") == experiment.candidate:
            return self._over(experiment, "roll back", verdict["reason"], verdict["blocks"], experiment.latest)
        why = f"the pointer was moved to policy {pointer.version} ({pointer.who}: {pointer.why})"
        self.say(f"experiment {experiment.number} ends: {why}")
        return self.experiments.stop(experiment.number, who=pointer.who, why=why)

    # What follows from a look

    def _commit(self, experiment: Experiment, why: str, observed: Observed) -> Experiment:
        """Promote the candidate, and go on watching it beside the control."""
        start = self._start_of(experiment)
        objection = promotion.erased_from(self.store, experiment.candidate)
        if start is None or objection:
            why, decision = (str(objection), "failed") if objection else ("the ledger lacks its start", "void")
            return self.experiments.stop(experiment.number, who=_WHO, why=why, decision=decision)
        verdict = {
            "verdict": "pass",
            "experiment": experiment.number,
            "evidence": self._keep(experiment, observed.blocks),
            "blocks": len(observed.blocks),
            **({"override": True, "objection": start["objection"]} if start["override"] else {}),
        }
        why = f"experiment {experiment.number}: {why}"
        pointer = self._pointer()
        if pointer.generation != experiment.generation or not self.experiments.get(experiment.number).holds:
            return self._follow_pointer(self.experiments.get(experiment.number))
        try:
            pointer = self.store.promote(experiment.candidate, expected=pointer, who=_WHO, why=why, verdict=verdict)
        except StalePointer:
            return self._follow_pointer(experiment)
        self.say(f"policy {experiment.candidate} is committed: {why}")
        return self._watch(experiment, pointer)

    def _harm_of_shadow(self, experiment: Experiment) -> str | None:
        """What harm a shadow has shown of the candidate; an override knew of what was on record when it began."""
        entries = self.ledger.entries()
        for at, entry in enumerate(entries):
            body = entry.body
            if entry.kind == "experiment" and (body["event"], body["number"]) == ("start", experiment.number):
                known = entries[at:] if body["override"] else entries
                return promotion.harm_of_shadow(known, body["candidate"]["sha256"], body["control"]["sha256"])
        return None

    def _watch(self, experiment: Experiment, pointer: Pointer) -> Experiment:
        """Have a committed candidate be watched beside the control, and put the commit on record."""
        plan = ExperimentPlan.model_validate(experiment.plan)
        verdict = dict(pointer.verdict or {})
        seen = self._blocks(experiment)[: verdict["blocks"]]
        following = experiment.block_at(time.time()) + 2  # what servers know of stays as it is
        phases = (*(p for p in experiment.phases if p.from_block < following), Phase(following, plan.watch_share))

        def watched(one: Experiment) -> Experiment:
            if one.state != "running":
                return one
            committed = replace(one, state="committed", generation=pointer.generation, phases=phases)
            expires = self._over_at(committed) + _GRACE_S
            watched_from = following if one.unit == "user" else seen[-1].block + 1  # users are drawn anew
            return replace(committed, expires_at=expires, watched_from=watched_from)

        after = self.experiments.change(experiment.number, watched)
        if after.watched_from is not None and not self._has(experiment, "commit"):
            body = {"decision": "commit", "evidence": verdict["evidence"], "why": pointer.why}
            self._record(experiment, "commit", body)
            promotion.record_moves(self.store, self.ledger)
        return after

    def _over(
        self, experiment: Experiment, decision: End, why: str, blocks: int, latest: dict[str, Any] | None
    ) -> Experiment:
        """Have servers stop taking turns. ``blocks``: how many it was decided by."""
        end = {"decision": decision, "at": now(), "who": _WHO, "why": why, "blocks": blocks}

        def stopping(one: Experiment) -> Experiment:
            return replace(one, state="stopping", end=end, latest=latest) if one.holds else one

        return self.experiments.change(experiment.number, stopping)

    def _end(self, experiment: Experiment) -> Experiment:
        """Put the end of what servers no longer obey on record."""
        end = dict(experiment.end or {})
        decision, why = str(end.get("decision")), str(end.get("why"))
        not_to_stay = decision in ("roll back", "failed") or experiment.watched_from is None  # stopped before a commit
        if not_to_stay and self._committed_by(self._pointer(), experiment):
            why = self._move_back(experiment, why, int(end.get("blocks", 0))) or why
        seen = self._blocks(experiment)[: end["blocks"]] if "blocks" in end else None
        evidence = None if seen is None else self._keep(experiment, seen)
        self._record(
            experiment, "end", {"decision": decision, "evidence": evidence, "why": why}, who=str(end.get("who"))
        )
        promotion.record_moves(self.store, self.ledger)
        after = self.experiments.change(experiment.number, lambda one: replace(one, state="ended"))
        self.say(f"experiment {experiment.number} has ended: {decision}: {why}")
        return after

    def _move_back(self, experiment: Experiment, why: str, blocks: int) -> str | None:
        """Point at the control again, unless the pointer is elsewhere already; why that can't be, if it can't."""
        pointer = self._pointer()
        if pointer.version != experiment.candidate:
            return None
        verdict = {
            "rollback_from": experiment.candidate,
            "experiment": experiment.number,
            "reason": why,
            "blocks": blocks,
        }
        try:
            self.store.verify(experiment.control)
            self.store.promote(
                experiment.control,
                expected=pointer,
                who=_WHO,
                why=f"experiment {experiment.number}: {why}",
                verdict=verdict,
            )
        except PolicyError as error:
            self.say(f"policy {experiment.candidate} stays, as policy {experiment.control} can't serve: {error}")
            return f"{why}; policy {experiment.candidate} stays, as policy {experiment.control} can't serve: {error}"
        return None

    def _finish_what_is_left(self) -> None:
        """End what the ledger has a start of and the store has no record of.

        A process was killed between the two, and nobody has met the candidate. Or the record was moved away: then it is
        void, and what it had committed is taken back, as nobody would watch it.
        """
        ended = {entry.body["number"] for entry in self._entries("end")}
        there = set(self.experiments.numbers())
        for body in (entry.body for entry in self._entries("start")):
            if body["number"] in ended | there:
                continue
            lost = self._declared(body)
            if self._began(lost):
                self.experiments.begin(lost)
                self._end(lost)
                continue
            end = {"decision": "not begun", "evidence": None, "why": "it was declared, and its start was interrupted"}
            common = {name: body[name] for name in ("number", "candidate", "control", "phases")}
            self.ledger.append("experiment", {**common, "event": "end", **end}, who=_WHO)
            self.say(f"experiment {body['number']} was declared and never begun: it has ended")

    def _declared(self, start: dict[str, Any]) -> Experiment:
        """What the ledger says of an experiment, as a record that nobody obeys any more."""
        end = {"decision": "void", "at": now(), "who": _WHO, "why": "its record was moved away before it had ended"}
        return replace(declared(start, start["phases"]), state="stopping", end=end)

    def _began(self, experiment: Experiment) -> bool:
        """Whether anybody may have met the candidate: it was committed or looked at, or there are rows of it."""
        if self._has(experiment, "commit") or self._committed_by(self._pointer(), experiment):
            return True
        return self._blocks_file(experiment).exists() or has_rows(self.settings.lake(), self._journal, experiment)

    # Records

    def _committed_by(self, pointer: Pointer, experiment: Experiment) -> bool:
        verdict = pointer.verdict or {}
        return pointer.version == experiment.candidate and verdict.get("experiment") == experiment.number

    def _keep(self, experiment: Experiment, blocks: Sequence[Block]) -> str:
        observed = Observed(blocks=tuple(blocks))
        return self.ledger.keep({"experiment": experiment.number, "observed": observed.model_dump(mode="json")})

    def _start_of(self, experiment: Experiment) -> dict[str, Any] | None:
        """What the ledger says of its start."""
        starts = (entry.body for entry in self._entries("start"))
        return next((body for body in starts if body["number"] == experiment.number), None)

    def _has(self, experiment: Experiment, event: str) -> bool:
        return any(entry.body["number"] == experiment.number for entry in self._entries(event))

    def _record(
        self,
        experiment: Experiment,
        event: Literal["start", "commit", "end"],
        body: dict[str, Any],
        who: str = _WHO,
    ) -> None:
        """Add an entry, once."""

        def policy(version: int) -> dict[str, Any]:
            return {"version": version, "sha256": self.store.get(version).sha256}

        start = self._start_of(experiment)  # a policy may have been removed since
        common: dict[str, Any] = {
            "number": experiment.number,
            "event": event,
            "candidate": start["candidate"] if start else policy(experiment.candidate),
            "control": start["control"] if start else policy(experiment.control),
            "phases": [vars(phase) for phase in experiment.phases],
        }
        if event == "commit" and start:  # the watch's phase comes with it, and not before
            common["phases"] = start["phases"]
        if event == "start":
            common |= {
                "seed": experiment.seed,
                "started_at": experiment.started_at,
                "block_s": experiment.block_s,
                "unit": experiment.unit,
                "plan": experiment.plan,
                "why": experiment.why,
            }

        def recorded(entries: list[Entry]) -> str | None:
            known = any(
                entry.kind == "experiment" and (entry.body["number"], entry.body["event"]) == (experiment.number, event)
                for entry in entries
            )
            return f"the {event} of experiment {experiment.number} is there already" if known else None

        try:
            self.ledger.append("experiment", {**common, **body}, who=who, unless=recorded)
        except LedgerError:
            if recorded(self.ledger.entries()) is None:
                raise

    def _entries(self, event: str | None = None) -> list[Entry]:
        return [
            entry
            for entry in self.ledger.entries()
            if entry.kind == "experiment" and (event is None or entry.body["event"] == event)
        ]

    def _pointer(self) -> Pointer:
        pointer = self.store.serving()
        if pointer is None:
            raise ExperimentRefused(f"nothing serves in {self.store.root}: there is nothing to compare with")
        return pointer

    def _alone(self) -> Any:
        folder = self.experiments.folder
        folder.mkdir(parents=True, exist_ok=True)
        busy = ExperimentRunning(f"another process looks at the experiment in {folder} at this moment")
        return locked(folder / ".lock", _LOCK_WAIT_S, busy=busy)


def blocks_file(experiments: Experiments, number: int) -> Path:
    """Where the blocks lie that looks at an experiment have seen."""
    return experiments.folder / f"{number:06d}.blocks.jsonl"


def blocks_seen(file: Path) -> list[Block]:
    """The blocks in such a file; none before the first look."""
    try:
        lines = file.read_text().splitlines()
    except FileNotFoundError:
        return []
    return [Block.model_validate_json(line) for line in lines]
