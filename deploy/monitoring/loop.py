"""The loop as Prometheus sees it: every series is worked out from what is on record, so that a restart loses nothing.

What has ended never changes, and is read once; the rest is read at each scrape. The labels are of few values (outcomes,
stages, outcomes of experiments, the newest policies), never a user's, a tenant's or a session's.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from deploy.config.root import Settings
from deploy.loop import schedule
from deploy.loop.records import CycleRecord
from deploy.monitoring.traffic import TrafficReader
from deploy.notify.webhooks import failures
from evaluation.decisions.history import History, hypothesis
from evaluation.decisions.ledger import Ledger
from evaluation.decisions.plan import declared
from evaluation.statistics import error_budget
from feedback.files import is_locked, newest_first
from serve.gpus import gpus
from serve.policies.experiments import Experiment, Experiments
from train.run.recovery.restarts import RESTARTS, read_restarts

log = logging.getLogger(__name__)

PREFIX: Final = "millrace_loop_"
OUTCOMES: Final = ("promoted", "experiment", "refused", "undecided", "skipped", "stopped", "failed")
STATES: Final = ("running", "committed", "stopping", "ended")
VERDICTS: Final = ("pass", "refuse", "undecided")
_TRAINING: Final = {"reward": "reward", "kl": "kl_ref", "entropy": "entropy", "step": "step"}
"""The series of the newest training run, and what ``metrics.jsonl`` calls them."""


class LoopMetrics(Collector):
    """Every series of the loop in one home. ``cycles``: whether the scheduler runs them."""

    def __init__(self, settings: Settings, traffic: TrafficReader, began: datetime, *, cycles: bool) -> None:
        self._settings = settings
        self._traffic = traffic
        self._began = began
        self._cycles = cycles
        self._ended: dict[Path, CycleRecord] = {}
        self._ended_experiments: dict[int, Experiment] = {}
        self._ledger: Ledger | None = None
        self._verdicts: Counter[str] = Counter()
        self._events: list[error_budget.Event] = []
        self._errors: dict[str, str] = {}
        self._parts: dict[str, Callable[[], Iterable[Metric]]] = {
            "cycles": self._of_cycles,
            "gate": self._of_gate,
            "policies": self._of_policies,
            "experiments": self._of_experiments,
            "training": self._of_training,
            "lake": self._of_lake,
            "webhooks": self._of_webhooks,
            "gpu": self._of_gpus,
            "disk": self._of_disks,
        }

    def describe(self) -> Iterator[Metric]:
        """Nothing: it is not read while it is registered."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """All parts; of one that can't be read, why is in the log, once."""
        readable = _gauge("readable", "Whether this part of the metrics could be read.", "part")
        for name, part in self._parts.items():
            try:
                yield from list(part())
                self._errors.pop(name, None)
            except Exception as error:  # noqa: BLE001  the other parts say what they know
                if self._errors.get(name) != str(error):
                    log.warning("metrics of %s can't be read: %s: %s", name, type(error).__name__, error)
                self._errors[name] = str(error)
            readable.add_metric([name], float(name not in self._errors))
        yield readable

    def _records(self) -> list[CycleRecord]:
        """Of all cycles, oldest first."""
        folder = self._settings.path(self._settings.cycle.folder)
        found = []
        for path in sorted(folder.glob("[0-9]*.json")):
            record = self._ended.get(path) or CycleRecord.model_validate_json(path.read_bytes())
            if record.status != "running":
                self._ended[path] = record
            found.append(record)
        return found

    def _of_cycles(self) -> Iterator[Metric]:
        history = self._records()
        ended = [record for record in history if record.status != "running"]
        outcomes = Counter(record.status for record in ended)
        yield _counters("cycles", "Cycles that ended, by outcome.", "outcome", {o: outcomes[o] for o in OUTCOMES})
        stages: dict[str, list[float]] = {}
        for name, seconds in itertools.chain.from_iterable(record.seconds.items() for record in ended):
            stages.setdefault(name, []).append(seconds)
        times = SummaryMetricFamily(
            f"{PREFIX}stage_seconds", "Time that stages of ended cycles took, by stage.", labels=["stage"]
        )
        for name, took in stages.items():
            times.add_metric([name], len(took), math.fsum(took))
        yield times

        runs = is_locked(self._settings.path(self._settings.cycle.folder) / ".lock")
        yield _value("cycle_running", "Whether a cycle runs.", float(runs))
        now = _gauge("stage_started_timestamp_seconds", "When the stage that runs began, by stage.", "stage")
        if runs and history and history[-1].stages and history[-1].stages[-1].ok is None:
            now.add_metric([history[-1].stages[-1].name], history[-1].stages[-1].started_at.timestamp())
        yield now
        failed = len(list(itertools.takewhile(lambda record: record.status == "failed", reversed(ended))))
        yield _value("cycles_failed_in_a_row", "Cycles that failed, since the last that did not.", failed)
        idle = itertools.takewhile(lambda one: one.candidate is None, reversed([r for r in ended if _trained(r)]))
        yield _value(
            "cycles_without_candidate", "Cycles that trained and published nothing, since one did.", len(list(idle))
        )
        if ended and ended[-1].finished_at is not None:
            yield _value("last_cycle_timestamp_seconds", "When a cycle last ended.", ended[-1].finished_at.timestamp())

        yield _value("enabled", "Whether this scheduler runs cycles.", float(self._cycles))
        if self._cycles:
            due = schedule.due_at(self._settings, self._began, history).timestamp()
            latest = due + self._settings.schedule.jitter_seconds
            yield _value("due_timestamp_seconds", "When the next cycle is, or was, due at the latest.", latest)

    def _of_gate(self) -> Iterator[Metric]:
        ledger, self._ledger = self._ledger, None
        if ledger is None:  # the first time, and after what failed
            ledger, self._verdicts, self._events = self._settings.ledger(), Counter(), []
        new = History.of(ledger.unread())  # what is shown is kept of it, and not its thousands of prompts' hashes
        self._ledger = ledger
        self._verdicts.update(found.verdict for race in new.races.values() for _, found in race)
        self._events += new.events
        verdicts = {name: self._verdicts[name] for name in VERDICTS}
        yield _counters("verdicts", "Verdicts of the gate.", "verdict", verdicts)
        budget = declared(self._settings.evaluation.gate)
        given = error_budget.given(self._events)
        spent = given[-1].spent if given else 0.0
        yield _value("error_budget", "Error that all cycles together may make (alpha).", budget.alpha)
        yield _value("error_budget_left", "What of it is not spent.", max(0.0, budget.alpha - spent))
        level = error_budget.level(budget, self._events, hypothesis("another", "one"))
        yield _value("error_budget_next_level", "Level of the next candidate; at 0 none can pass.", level)

    def _of_policies(self) -> Iterator[Metric]:
        store = self._settings.policy_store()
        moves = Counter("rollback" if "rollback_from" in (m.verdict or {}) else "promotion" for m in store.history())
        yield _counters(
            "moves", "Moves of the serving pointer.", "kind", {kind: moves[kind] for kind in ("promotion", "rollback")}
        )
        pointer = store.serving()
        if pointer is None:
            return
        since = datetime.fromisoformat(pointer.at).timestamp()
        yield _value("serving_policy", "The policy that the serving pointer names.", pointer.version)
        yield _value("serving_since_timestamp_seconds", "When the serving pointer was last moved.", since)
        cycle = next((record for record in reversed(self._records()) if record.candidate == pointer.version), None)
        scored = None if cycle is None else next((stage for stage in cycle.stages if stage.name == "score"), None)
        if scored is not None:
            until = scored.started_at.timestamp()
            yield _value(
                "learned_until_timestamp_seconds",
                "Feedback up to here could teach the policy that serves; what came later could not.",
                until,
            )
            yield _value(
                "feedback_lag_seconds",
                "From the newest feedback that could teach the policy that serves, to its being promoted.",
                max(0.0, since - until),
            )

    def _of_experiments(self) -> Iterator[Metric]:
        store = self._settings.policy_store().experiments
        found = [self._experiment(store, number) for number in store.numbers()]
        decisions = Counter(str((one.end or {}).get("decision")) for one in found if one.state == "ended")
        yield _counters("experiments", "Experiments that ended, by what they came to.", "decision", decisions)
        last = found[-1] if found else None
        states = _gauge("experiment_state", "1 for the state that the last experiment is in.", "state")
        for state in STATES:
            states.add_metric([state], float(last is not None and last.state == state))
        yield states
        wealth = _gauge(
            "experiment_wealth",
            "Highest e-value so far of the experiment that runs, by outcome, against no gain and against no harm.",
            "outcome",
            "shows",
        )
        difference = _gauge(
            "experiment_difference", "Candidate less control, with its confidence sequence.", "outcome", "bound"
        )
        latest = (last.latest or {}) if last is not None and last.holds else {}
        for one in latest.get("differences", ()):
            for family, names in ((wealth, ("gain", "harm")), (difference, ("observed", "low", "high"))):
                for name in names:
                    if one.get(name) is not None:
                        family.add_metric([one["name"], name], one[name])
        yield wealth
        yield difference

    def _experiment(self, store: Experiments, number: int) -> Experiment:
        found = self._ended_experiments.get(number) or store.get(number)
        if found.state == "ended":
            self._ended_experiments[number] = found
        return found

    def _of_training(self) -> Iterator[Metric]:
        """The newest step of the newest run, and the restarts of all."""
        runs = self._settings.path(self._settings.train.runs)
        restarts = [one for file in runs.glob(f"*/{RESTARTS}") for one in read_restarts(file.parent)]
        by_kind = Counter(dict.fromkeys(("lost", "hung", "crashed", "raised"), 0))
        by_kind.update(one.kind for one in restarts)
        what = "Restarts that training runs made by themselves, by what had happened."
        yield _counters("training_restarts_total", what, "kind", by_kind)
        newest = next(iter(newest_first(runs.glob("*/metrics.jsonl"))), None)
        row = None if newest is None else last_line(newest)
        if newest is None or row is None:
            return
        yield _value("training_timestamp_seconds", "When training last took a step.", newest.stat().st_mtime)
        for name, key in _TRAINING.items():
            value = row.get(key)
            if isinstance(value, int | float) and math.isfinite(value):
                yield _value(f"training_{name}", f"{key} of the newest step of the newest training run.", value)

    def _of_lake(self) -> Iterator[Metric]:
        if self._traffic.error is not None:
            raise RuntimeError(self._traffic.error)
        found = self._traffic.latest
        if found is None:
            return
        yield _value("lake_read_timestamp_seconds", "When the figures from the lake were read.", found.at)
        rows = _gauge("lake_rows", "Rows of the lake's tables.", "table")
        for name, count in found.rows.items():
            rows.add_metric([name], count)
        yield rows
        if found.responses:
            yield _value(
                "feedback_rate",
                "Share of the complete responses that have feedback.",
                found.responses_with_feedback / found.responses,
            )
        means = _gauge("reward_mean", "Mean reward of a policy's responses, of the newest policies.", "policy")
        counts = _gauge("reward_responses", "Responses of a policy that have a reward.", "policy")
        for version, (count, mean) in found.by_policy.items():
            means.add_metric([str(version)], mean)
            counts.add_metric([str(version)], count)
        yield means
        yield counts
        recent, before = found.recent, found.before
        if recent.mean is not None:
            yield _value("reward_recent_mean", "Mean reward of the last 24 hours' responses.", recent.mean)
        if before.mean is not None:
            yield _value("reward_before_mean", "Mean reward of the 7 days before those.", before.mean)
        if recent.variance is not None and before.variance is not None:
            error = math.sqrt(recent.variance / recent.rewarded + before.variance / before.rewarded)
            yield _value("reward_change_standard_error", "Standard error of the difference of the two.", error)

    def _of_webhooks(self) -> Iterator[Metric]:
        yield _counters(
            "webhook_failures", "Events that a webhook was not told of.", "webhook", failures(self._settings)
        )

    def _of_gpus(self) -> Iterator[Metric]:
        used = _gauge("gpu_memory_used_bytes", "Memory in use of a GPU of this machine.", "gpu")
        total = _gauge("gpu_memory_bytes", "Memory of a GPU of this machine.", "gpu")
        use = _gauge("gpu_use_ratio", "Share of the last moments in which a GPU was at work.", "gpu")
        for gpu in gpus():
            used.add_metric([str(gpu.index)], gpu.used_bytes)
            total.add_metric([str(gpu.index)], gpu.total_bytes)
            use.add_metric([str(gpu.index)], gpu.use)
        return iter((used, total, use))

    def _of_disks(self) -> Iterator[Metric]:
        free = _gauge("disk_free_bytes", "Free bytes of the disk that a folder is on.", "folder")
        size = _gauge("disk_bytes", "Bytes of the disk that a folder is on.", "folder")
        folders = {"home": self._settings.home, "journal": self._settings.path(self._settings.feedback.journal.folder)}
        for name, folder in folders.items():
            if folder.exists():
                usage = shutil.disk_usage(folder)
                free.add_metric([name], usage.free)
                size.add_metric([name], usage.total)
        return iter((free, size))


def last_line(file: Path) -> dict[str, Any] | None:
    """The last whole row of a file of JSON lines that is being written; None if there is none yet."""
    *lines, _torn = file.read_bytes().split(b"\n")
    row: dict[str, Any] | None = json.loads(lines[-1]) if lines else None
    return row


def _trained(record: CycleRecord) -> bool:
    return any(stage.trains_policy for stage in record.stages)


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{PREFIX}{name}", text, labels=list(labels))


def _value(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{PREFIX}{name}", text, value=float(value))


def _counters(name: str, text: str, label: str, values: Mapping[str, float]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"{PREFIX}{name}", text, labels=[label])
    for value, count in values.items():
        family.add_metric([value], count)
    return family
