"""Experiments on live traffic: started, looked at, committed, rolled back, and put on record.

A look reads the lake and decides from its rows alone, so it may be killed at any moment: the next one comes to the
same. What it decides is done in this order, each step harmless to repeat: the server is told (the experiment's record,
or the pointer), then the ledger. So harm ends as fast as a swap, and what is on record has happened.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, Literal

from deploy.config.root import Settings
from deploy.loop import promotion
from deploy.loop.promotion import ExperimentRefused
from deploy.loop.wait_for_serving import server_policy
from evaluation.decisions.ledger import Entry, Ledger, LedgerError
from evaluation.experiments import looks
from evaluation.experiments.blocks import BadEvidence, Observed, observe
from evaluation.experiments.plan import ExperimentPlan
from feedback.files import locked
from serve.policies.experiments import Experiment, ExperimentRunning, Experiments, Phase
from serve.policies.records import now
from serve.policies.store import Pointer, PolicyStore, StalePointer

_LOCK_WAIT_S: Final = 0.5
_START_IN_S: Final = 1.0  # so that block 0 is whole for a server that has not seen the record yet

End = Literal["commit", "kept", "roll back", "stopped", "failed", "expired"]


class Controller:
    """The experiments of a home. ``say`` gets one line for each thing that happens."""

    def __init__(self, settings: Settings, *, say: Callable[[str], None] = print) -> None:
        self.settings = settings
        self.say = say
        self.store: PolicyStore = settings.policy_store()
        self.ledger: Ledger = settings.ledger()
        self.experiments = Experiments(self.store.root)

    # Start

    def start(self, version: int, *, who: str, why: str, override: bool = False) -> Experiment:
        """Have the policy and the one that serves take turns, from a second from now on.

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
            if (server_policy(self.settings) or {}).get("phase") is not None:
                raise ExperimentRefused(
                    "the server is a fleet, whose replicas would have to change policies block by block: a fleet tries "
                    "a policy in a canary (serve.fleet.canary_seconds)"
                )
            self.store.verify(version)
            objection, verdict_entry = self._objection(version, pointer.version)
            if objection and not override:
                raise ExperimentRefused(f"{objection}; to try it all the same: --override --why '...'")
            if objection and not why.strip():
                raise ExperimentRefused(f"{objection}, and an override needs a reason, which is recorded: --why '...'")
            experiment = self._declare(version, pointer, verdict_entry, who=who, why=why, objection=objection)
            self.experiments.begin(experiment)
        self.say(
            f"experiment {experiment.number}: policy {version} takes turns with policy {pointer.version}, "
            f"{experiment.block_s:g} s each, {experiment.share(0):.0%} of them its own"
        )
        return experiment

    def _objection(self, version: int, serving: int) -> tuple[str | None, int | None]:
        """Why the policy is not to be tried against what serves, and the entry of its verdict."""
        verdict, objection = promotion.verdict_on(self.store, self.ledger, version, serving, override=True)
        candidate, control = (self.store.get(one).sha256 for one in (version, serving))
        for entry in self._entries():
            if (entry.body["candidate"]["sha256"], entry.body["control"]["sha256"]) == (candidate, control):
                tried = f"policy {version} was tried against policy {serving} in experiment {entry.body['number']}"
                objection = f"{objection}; {tried}" if objection else f"{tried}, and a second try is another chance"
                break
        number = None if verdict is None else int(str(verdict["entry"]))
        return objection, number

    def _declare(
        self, version: int, pointer: Pointer, verdict_entry: int | None, *, who: str, why: str, objection: str | None
    ) -> Experiment:
        """Put an experiment into the ledger, before anybody meets it."""
        config = self.settings.evaluation.experiment
        number = max([0, *self.experiments.numbers(), *(entry.body["number"] for entry in self._entries())]) + 1
        at, phases = 0, []
        for phase in config.phases:
            phases.append(Phase(at, phase.share))
            at += phase.blocks or 0
        experiment = Experiment(
            number=number,
            candidate=version,
            control=pointer.version,
            seed=secrets.token_hex(16),
            started_at=time.time() + _START_IN_S,
            block_s=config.block_seconds,
            phases=tuple(phases),
            generation=pointer.generation,
            state="running",
            who=who,
            why=why,
            plan=ExperimentPlan.of(config).to_json(),
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
            self._finish_what_is_left()
            experiment = self.experiments.current()
            if experiment is None:
                return None
            if experiment.state == "stopping":
                return self._end(experiment)
            experiment = self._follow_pointer(experiment)
            if not experiment.holds:
                return self._end(experiment)
            plan = ExperimentPlan.model_validate(experiment.plan)
            at = time.time()
            try:
                observed = self._observe(experiment, plan, at)
                since = experiment.phases[-1].from_block if experiment.state == "committed" else None
                decision = looks.look(plan, observed, watched_from=since)
            except (BadEvidence, ValueError) as error:  # nothing can be concluded: the candidate must not stay for it
                self.experiments.stop(experiment.number, who="experiment", why=str(error), failed=True)
                return self._end(self.experiments.get(experiment.number))
            latest = {"at": now(), **looks.to_json(decision, observed)}
            experiment = self.experiments.change(experiment.number, lambda one: replace(one, latest=latest))
            if not experiment.holds:  # somebody stopped it meanwhile
                return self._end(experiment)
            why = "; ".join(decision.reasons)
            if decision.decision == "roll back":
                return self._over(experiment, "roll back", why, observed)
            if experiment.state == "running":
                if decision.decision == "commit":
                    return self._commit(experiment, why, observed)
                if at - experiment.started_at >= plan.max_s:
                    return self._over(experiment, "expired", why, observed)
            elif at >= self._watched_until(experiment, plan):
                return self._over(experiment, "kept", "no harm was shown while it was watched", observed)
            return experiment

    def _observe(self, experiment: Experiment, plan: ExperimentPlan, at: float) -> Observed:
        resolved = self.settings.resolved().feedback
        journal = self.settings.path(resolved.journal.folder)
        return observe(self.settings.lake(), journal, experiment, plan, resolved.scoring.human, resolved.kinds, now=at)

    def _watched_until(self, experiment: Experiment, plan: ExperimentPlan) -> float:
        """When the watch is over: what was asked last has had its time for feedback then."""
        return experiment.begins(experiment.phases[-1].from_block) + plan.watch_s + plan.window_s

    def _follow_pointer(self, experiment: Experiment) -> Experiment:
        """The experiment under the pointer as it is now: it goes on, a killed look has committed it, or it ends."""
        pointer = self._pointer()
        if self._committed_by(pointer, experiment) and pointer.generation >= experiment.generation:
            return self._watch(experiment, pointer)
        if pointer.generation == experiment.generation:
            return experiment
        why = f"the pointer was moved to policy {pointer.version} ({pointer.who}: {pointer.why})"
        self.say(f"experiment {experiment.number} ends: {why}")
        return self.experiments.stop(experiment.number, who=pointer.who, why=why)

    # What follows from a look

    def _commit(self, experiment: Experiment, why: str, observed: Observed) -> Experiment:
        """Promote the candidate, and go on watching it beside the control."""
        [start] = [entry.body for entry in self._entries("start") if entry.body["number"] == experiment.number]
        verdict = {
            "verdict": "pass",
            "experiment": experiment.number,
            "evidence": self._keep(experiment, observed),
            **({"override": True, "objection": start["objection"]} if start["override"] else {}),
        }
        try:
            pointer = self.store.serving()
            if pointer is None or pointer.generation != experiment.generation:
                raise StalePointer("the serving pointer was moved")
            why = f"experiment {experiment.number}: {why}"
            pointer = self.store.promote(
                experiment.candidate, expected=pointer, who="experiment", why=why, verdict=verdict
            )
        except StalePointer:
            experiment = self._follow_pointer(experiment)
            return experiment if experiment.holds else self._end(experiment)
        self.say(f"policy {experiment.candidate} is committed: {why}")
        return self._watch(experiment, pointer)

    def _watch(self, experiment: Experiment, pointer: Pointer) -> Experiment:
        """Put a commit on record, and have the candidate be watched beside the control."""
        plan = ExperimentPlan.model_validate(experiment.plan)
        following = experiment.block_at(time.time()) + 2  # what servers know of stays as it is
        phases = (*(p for p in experiment.phases if p.from_block < following), Phase(following, plan.watch_share))

        def watched(one: Experiment) -> Experiment:
            if one.state != "running":
                return one
            return replace(one, state="committed", generation=pointer.generation, phases=phases)

        after = self.experiments.change(experiment.number, watched)
        if not any(entry.body["number"] == experiment.number for entry in self._entries("commit")):
            body = {"decision": "commit", "evidence": (pointer.verdict or {})["evidence"], "why": pointer.why}
            self._record(experiment, "commit", body)
            promotion.record_moves(self.store, self.ledger)
        return after

    def _over(self, experiment: Experiment, decision: End, why: str, observed: Observed) -> Experiment:
        """Have servers stop taking turns, and record why."""
        evidence = self._keep(experiment, observed)
        end = {"decision": decision, "at": now(), "who": "experiment", "why": why, "evidence": evidence}

        def stopping(one: Experiment) -> Experiment:
            return replace(one, state="stopping", end=end) if one.holds else one

        if decision == "roll back" and experiment.state == "committed":  # else servers went back to the candidate
            self._move_back(experiment, why, evidence)
        return self._end(self.experiments.change(experiment.number, stopping))

    def _end(self, experiment: Experiment) -> Experiment:
        """Put the end of what servers no longer obey on record."""
        end = dict(experiment.end or {})
        decision, why = str(end.get("decision")), str(end.get("why"))
        pointer = self._pointer()
        if decision in ("roll back", "failed") and self._committed_by(pointer, experiment):
            self._move_back(experiment, why, end.get("evidence"))
        body = {"decision": decision, "evidence": end.get("evidence"), "why": why}
        self._record(experiment, "end", body, who=str(end.get("who")))
        promotion.record_moves(self.store, self.ledger)
        after = self.experiments.change(experiment.number, lambda one: replace(one, state="ended"))
        self.say(f"experiment {experiment.number} has ended: {decision}: {why}")
        return after

    def _move_back(self, experiment: Experiment, why: str, evidence: str | None) -> None:
        """Point at the control again, unless the pointer is elsewhere already."""
        pointer = self._pointer()
        if pointer.version != experiment.candidate:
            return
        self.store.promote(
            experiment.control,
            expected=pointer,
            who="experiment",
            why=f"experiment {experiment.number}: {why}",
            verdict={"rollback_from": experiment.candidate, "experiment": experiment.number, "evidence": evidence},
        )

    def _finish_what_is_left(self) -> None:
        """What a killed process left between two steps: declared and not begun."""
        started = {entry.body["number"]: entry for entry in self._entries("start")}
        ended = {entry.body["number"] for entry in self._entries("end")}
        for number in sorted(started.keys() - ended - set(self.experiments.numbers())):
            body = started[number].body
            why = "it was declared, and its start was interrupted"
            end = {"decision": "failed", "evidence": None, "why": why, "phases": body["phases"]}
            self.ledger.append(
                "experiment",
                {**{name: body[name] for name in ("number", "candidate", "control")}, "event": "end", **end},
                who="experiment",
            )
            self.say(f"experiment {number} has ended: {why}")

    # Records

    def _committed_by(self, pointer: Pointer, experiment: Experiment) -> bool:
        verdict = pointer.verdict or {}
        return pointer.version == experiment.candidate and verdict.get("experiment") == experiment.number

    def _keep(self, experiment: Experiment, observed: Observed) -> str:
        return self.ledger.keep({"experiment": experiment.number, "observed": observed.model_dump(mode="json")})

    def _record(
        self,
        experiment: Experiment,
        event: Literal["start", "commit", "end"],
        body: dict[str, Any],
        who: str = "experiment",
    ) -> None:
        """Add an entry, once."""

        def policy(version: int) -> dict[str, Any]:
            return {"version": version, "sha256": self.store.get(version).sha256}

        common: dict[str, Any] = {
            "number": experiment.number,
            "event": event,
            "candidate": policy(experiment.candidate),
            "control": policy(experiment.control),
            "phases": [vars(phase) for phase in experiment.phases],
        }
        if event == "start":
            common |= {
                "seed": experiment.seed,
                "started_at": experiment.started_at,
                "block_s": experiment.block_s,
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
