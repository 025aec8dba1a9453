"""What a home does at this moment: what serves and why, what the loop does, what is wrong and what to do about it.

It reads files and asks the server once, so that it works beside a cycle, with the server down, and in an empty folder.
Imports neither torch nor vLLM.
"""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from deploy.config import root
from deploy.config.root import ConfigError, Settings
from deploy.loop import records
from deploy.loop.records import LOOP_OFF, RUNNING, CycleRecord
from deploy.loop.wait_for_serving import ask_server, is_of_another
from deploy.supervise.resident import residents
from feedback.files import is_locked
from feedback.journal.segment import CLOSED, OPEN
from serve.policies.store import Pointer, PolicyStore

CYCLES_SHOWN: Final = 5
_SERVER_TIMEOUT_S: Final = 2.0
_LEAST_FREE_BYTES: Final = 2**30
_SEALER_BEHIND_S: Final = 60.0  # and no less than ten times feedback.lake.seal_seconds


@dataclass(frozen=True)
class Problem:
    """Something that is wrong, and what to do about it."""

    what: str
    advice: str


@dataclass
class Status:
    """All of it; a part that is None is not there. Times are ISO 8601, UTC."""

    home: str
    policy: dict[str, Any] | None = None  # version, since, who, why: what the serving pointer says
    server: dict[str, Any] | None = None  # url, ready, version, since, unready: what answers
    runs: dict[str, bool] = field(default_factory=dict)  # serve, up, schedule, cycle
    loop_off: str | None = None  # why the `up` that runs turns no cycles
    cycle: dict[str, Any] | None = None  # number, since, stage, stage_since: the one that runs
    experiment: dict[str, Any] | None = None  # number, candidate, control, state, decision: the one that runs
    next_cycle: str | None = None
    resident: dict[str, Any] | None = None  # since, state, bytes: workers that stay between cycles
    cycles: list[dict[str, Any]] = field(default_factory=list)  # the last that ended, newest first
    data: dict[str, Any] | None = None  # rows, and how many are new since the last cycle that trained
    reward_model: dict[str, Any] | None = None  # version, since, why, agreement
    problems: list[Problem] = field(default_factory=list)

    def wrong(self, what: str, advice: str) -> None:
        self.problems.append(Problem(what, advice))


def look(settings: Settings, *, data: bool = True) -> Status:
    """Every part. What can't be read is among what is wrong, and keeps nothing else from being read.

    ``data``: False leaves out what is read from the lake, which takes longest.
    """
    status = Status(str(settings.home))
    settings = _as_running(settings)
    parts: tuple[Callable[[Settings, Status], None], ...] = (_policy,)
    if settings.policy_store().root.is_dir():
        parts = (
            _policy,
            _runs,
            _server,
            _experiment,
            _cycles,
            _next_cycle,
            _resident,
            _reward_model,
            _data,
            _journal,
            _disk,
        )
    for part in parts:
        if part is _data and not data:
            continue
        try:
            part(settings, status)
        except Exception as error:  # noqa: BLE001  what is broken is what this command is for
            name = part.__name__.strip("_").replace("_", " ")
            status.wrong(f"{name}: {type(error).__name__}: {error}", "repair or restore the file that it names")
    return status


def _as_running(settings: Settings) -> Settings:
    """The settings of the `up` that runs in this home; those of the file and the line if none does."""
    file = settings.path(RUNNING)
    if not is_locked(settings.path(".up.lock")) or not file.is_file():
        return settings
    try:
        return root.load(Path(file.read_text()), environment={})
    except ConfigError:  # of another version, or removed
        return settings


def _policy(settings: Settings, status: Status) -> None:
    store = settings.policy_store()
    pointer = store.serving()
    if pointer is None:
        return status.wrong(f"no policy serves in {settings.home}", "run `millrace up NAME_OR_FOLDER` here")
    policy = store.get(pointer.version)
    status.policy = {"version": pointer.version, "since": pointer.at, "who": pointer.who, "why": pointer.why}
    if policy.marked:
        status.wrong(
            f"policy {pointer.version} serves, and an erasure has marked it for retraining",
            "the next cycle trains from an ancestor; until then: millrace rollback --to VERSION",
        )


def _runs(settings: Settings, status: Status) -> None:
    locks: dict[str, str | Path] = {
        "up": ".up.lock",
        "schedule": ".schedule.lock",
        "cycle": settings.cycle.folder / ".lock",
    }
    # A server holds the locks of the segments that it writes.
    segments = [path for path in _files(settings.path(settings.feedback.journal.folder)) if path.suffix == OPEN]
    status.runs = {"serve": any(is_locked(path) for path in segments)}
    status.runs |= {name: is_locked(settings.path(lock)) for name, lock in locks.items()}
    if status.runs["up"] and (off := settings.path(LOOP_OFF)).is_file():
        status.loop_off = off.read_text() or None
    if status.loop_off:
        status.wrong(f"the loop is off: {status.loop_off}", "mend it, and start `millrace up` again")


def _server(settings: Settings, status: Status) -> None:
    import httpx

    try:
        ready = ask_server(settings, "/ready", timeout_s=_SERVER_TIMEOUT_S)
        answer = ask_server(settings, "/policy", headers=settings.server_headers, timeout_s=_SERVER_TIMEOUT_S)
        body = answer.json()
    except (httpx.HTTPError, ValueError) as error:
        if status.runs["up"]:
            logs = settings.path(settings.up.logs)
            what = f"`millrace up` runs, and no server answers at {settings.server_url} ({type(error).__name__})"
            status.wrong(what, f"wait, if it has just been started; {logs / 'serve.log'} says what it does")
        elif status.runs["serve"]:
            what = f"`millrace serve` runs, and no server answers at {settings.server_url} ({type(error).__name__})"
            status.wrong(what, "if it has just been started, wait; if it listens elsewhere, give serve.port here too")
        return
    if answer.status_code != 200:
        what = f"what answers at {settings.server_url} does not say which policy it serves: {answer.status_code}"
        return status.wrong(what, "if it is another program, choose another serve.port; else see `millrace keys`")
    if is_of_another(body, settings.policy_store()):
        what = f"what answers at {settings.server_url} is the server of another home"
        return status.wrong(what, "choose another serve.port here")
    unready = None if ready.status_code == 200 else ready.text[:300]
    status.server = {"url": settings.server_url, "ready": unready is None, "unready": unready}
    status.server |= {
        name: body.get(name)
        for name in ("version", "since", "generation", "replica", "failed", "experiment", "replicas", "sleep")
    }
    if unready is not None and not _sleeps(status.server):
        status.wrong(f"the server takes no requests: {unready}", f"see {settings.path(settings.up.logs) / 'serve.log'}")
    pointer = settings.policy_store().serving()
    if pointer is not None:
        _follows(settings, status, status.server, pointer)


def _follows(settings: Settings, status: Status, server: dict[str, Any], pointer: Pointer) -> None:
    failed = server["failed"]
    if isinstance(failed, dict) and failed.get("generation") == pointer.generation:
        what = f"the server could not load policy {pointer.version}: {failed.get('error') or failed}"
        return status.wrong(what, "`millrace promote VERSION` another one, or `millrace rollback`")
    if server["experiment"]:  # two policies take turns
        return
    behind = server["version"] != pointer.version or (server["generation"] or pointer.generation) < pointer.generation
    seconds = (records.now() - datetime.fromisoformat(pointer.at)).total_seconds()
    if behind and seconds > settings.cycle.swap_timeout_s:
        what = f"the server serves policy {server['version']}, and the pointer names {pointer.version}"
        status.wrong(f"{what} for {seconds:.0f} s", "see its log; `millrace promote` again has it try again")


def _experiment(settings: Settings, status: Status) -> None:

    found = settings.policy_store().experiments.current()
    if found is None:
        return
    status.experiment = {name: getattr(found, name) for name in ("number", "candidate", "control", "state")}
    status.experiment["decision"] = (found.latest or {}).get("decision")
    if not status.runs["schedule"]:
        what = f"experiment {found.number} runs, and nobody looks at it"
        status.wrong(what, "`millrace up` and `millrace schedule` do; or: millrace experiment look")


def _cycles(settings: Settings, status: Status) -> None:
    history = records.load_all(settings)
    ended = [record for record in history if record.status != "running"]
    shown = {"number", "status", "reason", "started_at", "finished_at", "recipe", "candidate"}
    of_stage = {"name", "started_at", "seconds"}
    status.cycles = [
        record.model_dump(mode="json", include=shown)
        | {"stages": [one.model_dump(mode="json", include=of_stage) | {"work": one.work} for one in record.stages]}
        for record in reversed(ended[-CYCLES_SHOWN:])
    ]
    if history and history[-1].status == "running":
        _running(history[-1], status)
    if ended and ended[-1].status == "failed":
        times = len(list(itertools.takewhile(lambda record: record.status == "failed", reversed(ended))))
        what = f"cycle {ended[-1].number} failed{f' ({times} in a row)' if times > 1 else ''}: {ended[-1].reason}"
        status.wrong(what, f"its logs are {settings.path(settings.up.logs)}/cycle-{ended[-1].number:06d}-*.log")
    if idle := records.idle_cycles(settings):
        what = f"the last {len(idle)} cycles that trained published nothing: {idle[-1].reason}"
        status.wrong(what, "fix what it says: until then nothing is learned")


def _running(record: CycleRecord, status: Status) -> None:
    stage = record.stages[-1] if record.stages and record.stages[-1].ok is None else None
    if not status.runs["cycle"]:
        during = f" in {stage.name}" if stage else ""
        advice = "the next cycle closes it, and takes up its training"
        return status.wrong(f"cycle {record.number} died{during}", advice)
    status.cycle = {"number": record.number, "since": record.started_at.isoformat()}
    status.cycle |= {"stage": stage and stage.name, "stage_since": stage and stage.started_at.isoformat()}


def _next_cycle(settings: Settings, status: Status) -> None:
    """When the scheduler that runs starts one. Its lock file is as old as it is."""
    if not status.runs["schedule"] or status.loop_off:
        return
    from deploy.loop.schedule import next_cycle

    began = datetime.fromtimestamp(settings.path(".schedule.lock").stat().st_mtime, UTC)
    status.next_cycle = next_cycle(settings, began).isoformat()


def _resident(settings: Settings, status: Status) -> None:
    status.resident = residents(settings)


def _reward_model(settings: Settings, status: Status) -> None:
    stores = settings.stores()
    store: PolicyStore = stores.reward_models
    judge = stores.evaluation_reward_models.serving()
    if judge is not None and stores.evaluation_reward_models.get(judge.version).marked:
        what = f"an erasure has marked the gate's reward model {judge.version} for retraining"
        status.wrong(what, "the next cycle trains another one; until then it evaluates nothing")
    pointer = store.serving()
    if pointer is None:
        return
    model = store.get(pointer.version)
    status.reward_model = {"version": pointer.version, "since": pointer.at, "agreement": model.metrics.get("agreement")}
    if model.marked:
        what = f"an erasure has marked training's reward model {pointer.version} for retraining: it rewards nothing"
        status.wrong(what, "the next cycle of the recipe rlhf trains another one")


def _data(settings: Settings, status: Status) -> None:
    if "://" not in settings.feedback.lake.uri and not settings.path(settings.feedback.lake.uri).is_dir():
        return
    from feedback.datasets import count_given

    counts = settings.lake().counts()
    trained = [one for one in records.load_all(settings) if any(stage.trains_policy for stage in one.stages)]
    status.data = dict(counts)
    given = counts | {"feedback": count_given(settings.lake())}  # as a cycle counts them
    for table in ("feedback", "rewards"):
        before = getattr(trained[-1], table) if trained else 0
        status.data[f"new_{table}"] = max(0, given[table] - (before or 0))


def _journal(settings: Settings, status: Status) -> None:
    """Segments that were put aside; while a server is there to seal them, those that wait for long."""
    folder = settings.path(settings.feedback.journal.folder)
    damaged = _files(folder / "damaged")
    if damaged:
        advice = "their whole rows are in the lake; look for what is wrong with the disk, then move them away"
        status.wrong(f"{len(damaged)} damaged segments of the journal are in {folder / 'damaged'}", advice)
    closed = [path for path in _files(folder) if path.suffix == CLOSED]
    oldest = max((time.time() - path.stat().st_mtime for path in closed), default=0.0)
    if status.server and oldest > max(_SEALER_BEHIND_S, 10 * settings.feedback.lake.seal_seconds):
        advice = f"see {settings.path(settings.up.logs) / 'serve.log'}; `millrace lake stats` shows the journal"
        status.wrong(f"{len(closed)} segments wait to be sealed, the oldest for {oldest:.0f} s", advice)


def _files(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _disk(settings: Settings, status: Status) -> None:
    free = shutil.disk_usage(settings.home).free
    if free < _LEAST_FREE_BYTES:
        advice = "make room: `millrace policies prune`, serve.retention, feedback.lake.retain_days"
        status.wrong(f"{free / 2**20:.0f} MiB are free at {settings.home}", advice)


def lines(status: Status) -> Iterator[tuple[str, str]]:
    """(title, text) of each line, for people."""
    if policy := status.policy:
        yield "serves", f"policy {policy['version']} since {_at(policy['since'])} ({policy['who']}: {policy['why']})"
        yield "server", _server_line(status)
        running = [name for name, runs in status.runs.items() if runs]
        yield "running", ", ".join(f"millrace {name}" for name in running) or "nothing; `millrace up` starts it"
        yield "loop", _loop_line(status)
    if kept := status.resident:
        yield (
            "workers",
            f"resident since {_at(kept['since'])}, {kept['state']}; {kept['bytes'] / 2**20:,.0f} MiB of memory",
        )
    if tried := status.experiment:
        looked = tried["decision"] or "not looked at yet"
        text = f"{tried['number']}: policy {tried['candidate']} against {tried['control']}, {tried['state']}, {looked}"
        yield "experiment", text
    for number, cycle in enumerate(status.cycles):
        recipe = f" ({cycle['recipe']})" if cycle["recipe"] else ""
        reason = f": {cycle['reason']}" if cycle["reason"] else ""
        text = f"{cycle['number']} {cycle['status']} at {_at(cycle['finished_at'])}{recipe}{reason}"
        yield "" if number else "cycles", text
    if data := status.data:
        new = f"{data['new_feedback']:,} feedback and {data['new_rewards']:,} rewards since the last cycle that trained"
        yield "data", f"{data['interactions']:,} interactions, {data['feedback']:,} feedback; {new}"
    if model := status.reward_model:
        agreed = model["agreement"]
        share = f": agrees with {agreed['value']:.0%} of {agreed['judgements']} held-out judgements" if agreed else ""
        yield "reward model", f"training's reward model {model['version']} since {_at(model['since'])}{share}"
    for number, problem in enumerate(status.problems):
        yield "" if number else "wrong", problem.what
        yield "", f"-> {problem.advice}"
    if not status.problems:
        yield "wrong", "nothing"


def _sleeps(server: dict[str, Any]) -> bool:
    return (server.get("sleep") or {}).get("state", "awake") != "awake"


def _server_line(status: Status) -> str:
    server = status.server
    if server is None:
        return "does not answer"
    ready = "ready" if server["ready"] else f"not ready: {server['unready']}"
    if _sleeps(server):
        ready = f"{server['sleep']['state']}, for {', '.join(server['sleep']['holders'])}"
    return f"{server['url']} serves policy {server['version']} since {_at(server['since'])}, {ready}"


def _loop_line(status: Status) -> str:
    if cycle := status.cycle:
        stage = f", {cycle['stage']} since {_at(cycle['stage_since'])}" if cycle["stage"] else ""
        return f"cycle {cycle['number']} since {_at(cycle['since'])}{stage}"
    if status.next_cycle:
        return f"idle; the next cycle is due at {_at(status.next_cycle)}"
    if status.loop_off:
        return "off"
    return "idle; no schedule runs here, `millrace cycle` runs one cycle"


def _at(moment: str | None) -> str:
    return "-" if moment is None else f"{datetime.fromisoformat(moment).astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
