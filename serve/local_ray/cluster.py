"""A Ray on this machine that belongs to the process that starts it.

It listens on loopback alone, and requires a token of its own. Signals don't reach it: its owner ends it,
when what runs on it has ended, and nothing of it is left. Ray is imported when one is started.
"""

from __future__ import annotations

import logging
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import psutil

from feedback.processes.exit import is_resource_tracker, still_running
from feedback.processes.signals import stop_signals_blocked
from feedback.user_code import search_path
from serve.middleware.keyring import is_loopback

log = logging.getLogger(__name__)

LOOPBACK: Final = "127.0.0.1"
FOLDER: Final = "MILLRACE_RAY_FOLDER"
"""The environment variable with a local Ray's private folder, for the processes on it. It goes when Ray does."""
_TRIES: Final = 3
_GONE_S: Final = 10.0
_AUTH_MODE: Final = "RAY_AUTH_MODE"
_NICENESS: Final = "RAY_worker_niceness"
_TASK_EVENTS: Final = "RAY_task_events_report_interval_ms"
_REAPER: Final = Path(__file__).with_name("reaper.py")


class LocalRayError(RuntimeError):
    """Ray can't be started, or would be reached by others; the message says why and what to do."""


@contextmanager
def local_ray(**options: Any) -> Iterator[None]:
    """Start a Ray with these options of ``ray.init``, and end all of its processes when the block ends.

    With ``RAY_AUTH_MODE=disabled`` in the environment it requires no token.

    Raises LocalRayError if it does not start, or if others could reach a Ray that requires no token.
    """
    try:
        with (
            tempfile.TemporaryDirectory(prefix="millrace-ray-") as folder,
            environment(_variables(Path(folder))),
            _reaped(),
        ):
            import ray
            from ray._private import ray_constants

            # Ray takes a loopback address for a mistake and replaces it by that of the way out; where it runs no
            # cluster, which on Linux only this constant says (services.get_node_ip_address), it chooses loopback
            # itself.
            is_cluster, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
            try:
                _start(options)
                _refuse_exposed()
                yield
            finally:
                ray_constants.ENABLE_RAY_CLUSTER = is_cluster
                if ray.is_initialized():
                    _end()
    finally:
        _read_environment()


def connect(**options: Any) -> None:
    """``ray.init``, which leaves this process its signal handlers.

    A signal waits until Ray has started or failed to: within that, an exception would end in Ray's crash report.
    """
    import ray
    from ray._private import utils

    # Ray's own handler, which worker.init and Node set by this function, would end the process and Ray with it.
    setter, utils.set_sigterm_handler = utils.set_sigterm_handler, lambda handler: None
    try:
        with stop_signals_blocked():
            ray.init(**options | search_as_here(options.get("runtime_env", {})))
    finally:
        utils.set_sigterm_handler = setter


def search_as_here(runtime_env: Mapping[str, Any]) -> dict[str, Any]:
    """Options of ``ray.init`` with which workers find modules where this process does, in the same order."""
    from ray.job_config import JobConfig

    class WithoutWorkingDirectory(JobConfig):
        """Ray puts the driver's working directory first on its workers' path, unless the runtime environment has one:
        worker.connect asks by this method (ray 2.60; tests/deploy/test_user_files.py sees whether that holds).
        """

        def _runtime_env_has_working_dir(self) -> bool:
            return True

    variables = {**runtime_env.get("env_vars", {}), **search_path()}
    return {"runtime_env": {**runtime_env, "env_vars": variables}, "job_config": WithoutWorkingDirectory()}


@contextmanager
def environment(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables of this process (None: unset them), and put back what was there when the block ends."""
    before = {name: os.environ.get(name) for name in variables}
    _set(variables)
    try:
        yield
    finally:
        _set(before)


def loopback_sockets() -> dict[str, str]:
    """Variables by which gloo and NCCL listen on loopback alone."""
    return sockets_on(LOOPBACK)


def sockets_on(address: str) -> dict[str, str]:
    """Variables by which gloo and NCCL listen on this machine's interface with an address; none if it has none."""
    names = [name for name, found in psutil.net_if_addrs().items() if any(each.address == address for each in found)]
    return {f"{library}_SOCKET_IFNAME": names[0] for library in ("GLOO", "NCCL")} if names else {}


def exposed(processes: Iterable[psutil.Process]) -> list[str]:
    """What of these processes listens where other machines reach it, as "name (pid) on address:port"."""
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            found += [
                f"{process.name()} ({process.pid}) on {connection.laddr.ip}:{connection.laddr.port}"
                for connection in process.net_connections(kind="tcp")
                if connection.status == psutil.CONN_LISTEN and not is_loopback(connection.laddr.ip)
            ]
    return found


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _variables(folder: Path) -> dict[str, str | None]:
    """What Ray's processes and those that run on it have in their environment; None: what they don't have."""
    token = folder / "token"
    token.touch(0o600)
    token.write_text(secrets.token_hex(32))
    is_disabled = os.environ.get(_AUTH_MODE, "").lower() == "disabled"
    return {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # as ENABLE_RAY_CLUSTER, in the processes that Ray starts
        _AUTH_MODE: "disabled" if is_disabled else "token",
        FOLDER: str(folder),
        "RAY_AUTH_TOKEN": None,
        "RAY_AUTH_TOKEN_PATH": str(token),
        "SPT_NOENV": "1",  # a process that sets its title keeps its environment readable, by which the reaper knows it
        # Left to itself 15, at which a training gets next to nothing of the cores that a busy server uses too.
        _NICENESS: os.environ.get(_NICENESS, "5"),
        # What each task did, for Ray's dashboard: its GCS would keep it of the last 100,000 tasks.
        _TASK_EVENTS: os.environ.get(_TASK_EVENTS, "0"),
        "RAY_gcs_rpc_server_reconnect_timeout_s": "10",  # a GCS on this machine that has died does not come back
        **loopback_sockets(),
    }


@contextmanager
def _reaped() -> Iterator[None]:
    """Have all that is started with this token ended if this process dies within the block."""
    with stop_signals_blocked():
        reaper = subprocess.Popen(
            [sys.executable, "-I", str(_REAPER), os.environ["RAY_AUTH_TOKEN_PATH"]],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
    try:
        yield
    finally:
        reaper.kill()
        reaper.communicate()


def _start(options: Mapping[str, Any]) -> None:
    import ray

    for tries in range(_TRIES):
        _read_environment()
        try:
            return connect(address="local", **options)
        except Exception as error:  # Ray gives itself 30 s, which a busy machine can take for other things
            ray.shutdown()
            if tries == _TRIES - 1:
                raise LocalRayError(f"Ray can't be started ({options}): {type(error).__name__}: {error}") from error
            log.warning("Ray did not start, once more: %s", error)


def _read_environment() -> None:
    """Have this process read its environment again: it may have read another Ray's, with its token."""
    import ray

    compiled: Any = ray._raylet
    compiled.Config.initialize("")
    compiled.AuthenticationTokenLoader.instance().reset_cache()


def _refuse_exposed() -> None:
    import ray

    address = ray.util.get_node_ip_address()
    listening = exposed([psutil.Process(), *_processes()])
    if not listening and is_loopback(address):
        return
    where = f"Ray {ray.__version__} runs on {address}; other machines reach {', '.join(listening) or 'that address'}"
    if os.environ[_AUTH_MODE] == "disabled":
        raise LocalRayError(f"{where}, and {_AUTH_MODE}=disabled lets all of them in: unset {_AUTH_MODE}")
    log.warning("%s; it takes no call without a token that is new at each start", where)


def _end() -> None:
    import ray

    daemons, all_of_it = _daemons(), _processes()
    for daemon in daemons:
        daemon.terminate = daemon.kill  # SIGTERM is held back from it, and Ray would wait a second for each
    ray.shutdown()
    for process in all_of_it:
        with suppress(psutil.NoSuchProcess):
            if not is_resource_tracker(process):
                process.kill()
    for process in still_running(all_of_it, _GONE_S):
        log.error("process %d of Ray's does not end by itself: killing it", process.pid)
        process.kill()


def _daemons() -> list[Any]:
    """The Popen of each process that ``ray.init`` started."""
    from ray._private import worker

    node: Any = worker._global_node
    return [info.process for infos in node.all_processes.values() for info in infos]


def _processes() -> list[psutil.Process]:
    """Ray's daemons and all that they have started."""
    found = []
    for daemon in _daemons():
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(daemon.pid)
            found += [process, *process.children(recursive=True)]
    return found
