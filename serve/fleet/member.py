"""A replica's part in its fleet: it takes a name, follows the fleet's record, and reports what it does."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from serve.config import ServeConfig
from serve.fleet import reports
from serve.fleet.assignment import HEADER, assigned, read, replica_stats
from serve.fleet.reports import Name, Report
from serve.fleet.state import FleetRecord, FleetState, Task, part_of, task_of
from serve.policies.experiments import Assignment, Experiment, ExperimentReader, Experiments, Turn
from serve.policies.store import PolicyError
from serve.swap.swapper import DesiredState, block_turn

if TYPE_CHECKING:
    from serve.runtime import Server

log = logging.getLogger(__name__)

_METRICS_SECONDS: Final = 2.0


class Member:
    """One replica of a fleet. ``desired_state`` is what its swapper follows; ``run`` reports until it is cancelled."""

    def __init__(self, config: ServeConfig) -> None:
        """Take a name. Raises PolicyError if there is no fleet's record to follow, FleetError if no name is free."""
        self.config = config
        self._record = FleetRecord(Path(config.policies))
        self._experiments = ExperimentReader(Experiments(Path(config.policies)))
        self._experiment: Experiment | None = None  # that holds, and that this replica has a part in
        self._part: Turn | None = None
        self._folder = Path(config.replicas)
        self._state = self._read()
        self._name = Name(self._folder, re.sub(r"-\d+$", "", config.replica_name))
        self._report = Report(self._name.name, uuid.uuid4().hex, "starting")
        self._server: Server | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._write_report(self._report)

    @property
    def name(self) -> str:
        """The replica's name, unique among those that live."""
        return self._name.name

    def begin(self, server: Server) -> None:
        """Report what ``server`` does, from now on. It serves."""
        self._server = server
        _try_out(server, task_of(self._state, self.name))
        self._turn()
        self._tasks += [
            asyncio.create_task(self._run(), name="fleet member"),
            asyncio.create_task(self._leave_metrics(), name="fleet metrics"),
        ]

    def stop(self) -> None:
        """Report no more, take part in no deployment."""
        for task in self._tasks:
            task.cancel()
        report = self._report if self._server is None else self._report_of(self._server)
        self._write_report(replace(report, state="stopping"))

    def release(self) -> None:
        """Give the name up."""
        self._name.release()

    # What the replica follows

    def desired_state(self) -> DesiredState:
        """What to serve and what to prepare. Raises PolicyError or OSError if the record can't be read."""
        state = self._state = self._read()
        task = task_of(state, self.name)
        if self._server is not None:
            _try_out(self._server, task)
        experiment = self._experiments.under(state.serving.generation)
        self._part = part_of(state, experiment, self.name)
        self._experiment = experiment if self._part is not None else None
        if experiment is not None and experiment.unit == "block" and state.deployment is None:
            return block_turn(experiment, task.serve)  # it began before there was a fleet: all take turns by the clock
        return DesiredState(task.serve, task.prepare, self._part)

    def lost(self) -> str | None:
        """Why this replica should be replaced: the fleet is where it can't follow. None if all is well."""
        server = self._server
        if server is None or (failed := server.swapper.failed) is None:
            return None
        task = task_of(self._state, self.name)
        if task.trial or failed["generation"] != task.serve.generation:
            return None
        there = (r.name for r in self._all() if r.state == "ready" and r.version == task.serve.version)
        if not any(name != self.name for name in there):  # an old policy is better than none
            return None
        return f"it can't follow the fleet to policy {task.serve.version}: {failed['error']}"

    def routing(self) -> dict[str, Any]:
        """What the router must know of this replica; Ray hands it on."""
        server = self._server
        stats: dict[str, Any] = {"ready": server is not None and server.unready() is None}
        deployment = self._state.deployment
        if server is not None and deployment is not None and (variant := server.variants.label) is not None:
            stats |= {"variant": variant, "share": deployment.share, "salt": deployment.to.generation}
        if server is not None and self._experiment is not None and self._part is not None:
            serves = server.swapper.turn == self._part
            stats["experiment"] = replica_stats(self._experiment, self._part.variant, serves=serves)
        return stats

    def assigned(
        self,
        headers: Mapping[str, str],
        *,
        tenant: str,
        user: str | None,
        session: str | None,
        request: str,
        at: float,
    ) -> Assignment | None:
        """What the experiment drew for a request that came ``at`` a time, in seconds of Unix time; None outside one."""
        server, experiment = self._server, self._experiment
        if server is None or experiment is None:
            return None
        return assigned(
            experiment,
            read(headers.get(HEADER)),
            tenant=tenant,
            user=user,
            session=session,
            request=request,
            at=at,
            serving=None if server.swapper.turn is None else server.swapper.turn.version,
        )

    # What clients see

    def policy(self) -> dict[str, Any]:
        """``GET /policy`` of the fleet. ``version``: what all of it serves; ``replicas``: what each does."""
        state, deployment = self._state, self._state.deployment
        return {
            "version": state.serving.version,
            "previous": state.serving.previous,
            "since": state.serving.at,
            "generation": state.serving.generation,
            "failed": state.failed,
            "phase": state.phase,
            "experiment": None if state.split is None else asdict(state.split),
            "rollout": None
            if deployment is None
            else {
                "to": deployment.to.version,
                "generation": deployment.to.generation,
                "canaries": list(deployment.canaries),
                "share": deployment.share,
                "held": deployment.held,
                "done": list(deployment.done),
                "error": deployment.error,
            },
            "replicas": {
                report.name: {
                    "state": "unready" if report.state == "ready" and report.unready else report.state,
                    "version": report.version,
                    "variant": report.variant,
                    "prepared": report.prepared is not None and deployment is not None,
                    "unready": report.unready,
                    "requests": report.requests,
                    "failures": report.failures,
                }
                for report in self._all()
            },
        }

    def metrics(self) -> bytes:
        """All replicas' Prometheus texts as one, distinguished by the label ``replica``; the others' seconds old."""
        texts = reports.read_metrics(self._folder)
        if self._server is not None:
            texts[self.name] = self._server.metrics.render()
        return merge(texts)

    def ready(self) -> list[str]:
        """The replicas that answer requests."""
        return [report.name for report in self._all() if report.state == "ready" and report.unready is None]

    # Inside

    async def _run(self) -> None:
        wrong = None
        while True:
            await asyncio.sleep(self.config.swap.poll_seconds)
            try:
                self._turn()
                wrong = None
            except (OSError, ValueError) as error:
                if str(error) != wrong:  # once, not at every turn
                    log.error("%s can't report: %s", self.name, error)
                wrong = str(error)

    def _turn(self) -> None:
        server = self._server
        assert server is not None
        if self._state.stopping and not server.draining:
            server.draining = True
            self._tasks.append(asyncio.create_task(server.drain(), name="drain"))
        report = self._report_of(server)
        if report != self._report:
            self._write_report(report)

    def _report_of(self, server: Server) -> Report:
        status, prepared = server.swapper.status(), server.swapper.prepared
        failed, came_to = status["failed"], server.metrics.came_to  # refused and abandoned requests don't count
        return replace(
            self._report,
            state="ready",
            version=server.engine.version,
            generation=status["generation"],
            content=(prepared[1] if prepared else server.swapper.policy).sha256,
            prepared=prepared[0] if prepared else None,
            failed=(failed["generation"], failed["error"]) if failed else None,
            unready=server.unready(),
            variant=server.variants.label or (server.swapper.turn.variant if server.swapper.turn else None),
            requests=came_to["complete"] + came_to["failed"],
            failures=came_to["failed"],
        )

    async def _leave_metrics(self) -> None:
        server = self._server
        assert server is not None
        while True:
            try:
                reports.write_metrics(self._folder, self.name, server.metrics.render())
            except OSError as error:
                log.error("%s can't leave its metrics: %s", self.name, error)
            await asyncio.sleep(_METRICS_SECONDS)

    def _write_report(self, report: Report) -> None:
        reports.write_report(self._folder, replace(report, at=time.time()))
        self._report = report

    def _all(self) -> list[Report]:
        """What all say; this replica, what it knows of itself at this moment."""
        server = self._server
        own = self._report_of(server) if server is not None and self._report.state == "ready" else self._report
        return [own if report.name == self.name else report for report in reports.reports(self._folder)]

    def _read(self) -> FleetState:
        state = self._record.read()
        if state is None:
            raise PolicyError(
                f"{self._record.root} has no fleet's record: the replicas of a fleet are started by `millrace serve` "
                f"(process {os.getpid()})"
            )
        return state


def _try_out(server: Server, task: Task) -> None:
    """Label the rows of a policy on trial. To be called before it serves, since rows may come at once."""
    server.variants.set(task.serve.version if task.variant else None, task.variant or "")


def merge(texts: Mapping[str, bytes]) -> bytes:
    """Prometheus texts by replica as one, each sample labelled with its replica; a metric comes once."""
    return generate_latest(_Merged(texts))


class _Merged(Collector):
    def __init__(self, texts: Mapping[str, bytes]) -> None:
        self._texts = texts

    def collect(self) -> Iterator[Metric]:
        merged: dict[str, Metric] = {}
        for replica in sorted(self._texts):
            for family in text_string_to_metric_families(self._texts[replica].decode()):
                metric = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    metric.samples.append(sample._replace(labels={**sample.labels, "replica": replica}))
        yield from merged.values()
