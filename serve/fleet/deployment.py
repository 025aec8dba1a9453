"""Run a fleet: Ray, Ray Serve, the replicas and the controller; until a signal, and then nothing of it is left."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from feedback.config import FeedbackConfig
from feedback.processes.signals import STOPPING, StopSignal, handled_by, handled_signals
from feedback.trusted_code import consented
from serve.config import FleetConfig, ServeConfig
from serve.fleet.assignment import HEADER
from serve.fleet.controller import Controller
from serve.fleet.front import process as front_process
from serve.fleet.front.configuration import IDLE_S
from serve.fleet.front.process import Front
from serve.fleet.proxy import SSO
from serve.fleet.state import FleetError, by_content
from serve.local_ray.cluster import LOOPBACK, connect, local_ray
from serve.middleware.connections import KEEP_ALIVE_S, bind
from serve.middleware.keyring import Keyring
from serve.observability import log_format
from serve.policies.open_store import open_store

if TYPE_CHECKING:
    from serve.app import Console

log = logging.getLogger(__name__)

APPLICATION: Final = "millrace"
DEPLOYMENT: Final = "Replica"
_POLL_S: Final = 0.5
_FOR_PROXIES: Final = {"host", "allowed_hosts", "audit", "auth", "keys", "limits", "sso", "tenant"}
_MARGIN_S: Final = 30.0  # to stop an engine and seal what was recorded, beyond the drain
_OBJECT_STORE_BYTES: Final = 128 << 20  # requests and answers pass through it only when they are large


class _Stop(StopSignal):
    """A signal to stop the fleet."""


def run(config: ServeConfig, feedback_config: FeedbackConfig, console: Console | None = None) -> None:
    """Serve with ``config.fleet``'s replicas until SIGTERM or SIGINT, then drain and stop them.

    Raises PolicyError, FleetError (what kept the replicas from starting), LocalRayError, OSError if the port is taken,
    KeyFileError, NeedsKeys where others reach it and no key is needed.
    """
    log_format.configure(config.log_format)
    keyring = Keyring(config)
    keyring.load()
    keyring.check_host(config.host)
    log.info("%s", keyring.describe())
    store = open_store(Path(config.policies), config.policy_store)
    controller = Controller(store, Path(config.replicas), config.fleet)
    stop = threading.Event()
    ray_stack = ExitStack()
    front: Front | None = None
    try:
        with _signals():
            store.follow(config.swap.poll_seconds)
            state = controller.open()
            log.info("policy %d is what the fleet serves", state.serving.version)
            listener = None
            if config.fleet.ray_address is None:
                listener = ray_stack.enter_context(bind(config.host, config.port))  # before anything takes its seconds
            ray_stack.enter_context(_ray(config.fleet, config))
            if listener is not None and not front_process.is_of_use(config):
                listener.close()
            elif listener is not None:
                front = ray_stack.enter_context(front_process.started(config, listener, by_content=by_content(state)))
            if front is not None:
                controller.route = front.route
            driver = threading.Thread(
                target=controller.run, args=(stop, config.swap.poll_seconds), name="fleet controller", daemon=True
            )
            driver.start()
            _deploy(config, feedback_config, console, front)
            _watch()
    except _Stop:
        log.info("stopping: the replicas finish what they have")
    finally:
        with handled_by(signal.SIG_IGN, STOPPING):
            _end(controller, config, front)
            ray_stack.close()
            stop.set()
            controller.close()
            store.unfollow()


@contextmanager
def _ray(config: FleetConfig, server: ServeConfig) -> Iterator[None]:
    """Be connected to the fleet's Ray: the cluster's, or one of our own, which ends with the block."""
    # Ray holds back a line that another replica has written too, until some other one comes: minutes later, or never.
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    environment = {
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "serve.fleet.proxy.middlewares",
        "RAY_SERVE_SESSION_ID_HEADER_KEY": HEADER,
        "FORWARDED_ALLOW_IPS": ",".join(server.proxies),  # for the uvicorn that Ray Serve makes; by itself loopback
        SSO: server.sso.model_dump_json(),
        # A thread less between the socket and the engine; what we run there never blocks.
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # by itself five seconds, which a proxy's imports can take
    }
    common: dict[str, Any] = {
        "runtime_env": {"env_vars": environment},
        "logging_level": "WARNING",
        "namespace": APPLICATION,
    }
    if config.ray_address is None:
        environment["RAY_SERVE_CONTROL_LOOP_INTERVAL_S"] = "0.5"  # by itself 0.1, which takes 3 % of a core
        most = max(config.replicas, config.max_replicas or 0)
        with local_ray(
            # Ray's own count of cores, so that all replicas fit whatever the machine has.
            num_cpus=max(os.cpu_count() or 1, int(most * config.num_cpus) + 1),
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            **common,
        ):
            yield
        return
    try:
        connect(address=config.ray_address, **common)
    except Exception as error:
        raise FleetError(f"no Ray at {config.ray_address}: {type(error).__name__}: {error}") from error
    try:
        yield
    finally:
        import ray

        ray.shutdown()


def _deploy(config: ServeConfig, feedback_config: FeedbackConfig, console: Console | None, front: Front | None) -> None:
    """Start the replicas and wait until they serve. Raises FleetError with their reason if they can't."""
    from ray import serve as ray_serve
    from ray.serve.config import HTTPOptions
    from ray.serve.schema import LoggingConfig

    from serve.fleet.rate_limit_store import start_store

    start_store()
    quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
    ray_serve.start(
        http_options=HTTPOptions(
            host=config.host if front is None else LOOPBACK,
            port=config.port if front is None else front.proxy_port,
            keep_alive_timeout_s=KEEP_ALIVE_S if front is None else IDLE_S,
            request_timeout_s=config.limits.timeout_s + _MARGIN_S,  # where there is no replica that would say it
        ),
        proxy_location="EveryNode" if config.fleet.ray_address else "HeadOnly",
        logging_config=quiet,
    )
    # Feedback's as an object: it hides the secrets that are in it wherever it is printed.
    application = _deployment(config, quiet).bind(
        config.model_dump(mode="json"), feedback_config, console, trusted_code=consented()
    )
    try:
        ray_serve.run(application, name=APPLICATION, route_prefix="/")
    except RuntimeError as error:
        raise FleetError(f"the replicas can't start: {_reason() or error}") from error


def _deployment(config: ServeConfig, logging_config: Any) -> Any:
    from ray import serve as ray_serve
    from ray.serve.config import AutoscalingConfig, RequestRouterConfig

    from serve.fleet.replica import Replica

    fleet, limits = config.fleet, config.limits
    number: dict[str, Any] = {"num_replicas": fleet.replicas}
    if fleet.max_replicas is not None:
        number = {
            "autoscaling_config": AutoscalingConfig(
                initial_replicas=fleet.replicas,
                min_replicas=fleet.min_replicas or fleet.replicas,
                max_replicas=fleet.max_replicas,
                target_ongoing_requests=fleet.target_ongoing_requests,
                upscale_delay_s=fleet.upscale_delay_s,
                downscale_delay_s=fleet.downscale_delay_s,
            )
        }
    return ray_serve.deployment(ray_serve.ingress()(Replica)).options(
        name=DEPLOYMENT,
        ray_actor_options={"num_cpus": fleet.num_cpus, "num_gpus": fleet.num_gpus},
        max_ongoing_requests=limits.concurrent_requests,
        max_queued_requests=limits.concurrent_requests,
        health_check_period_s=fleet.health_check_period_s,
        health_check_timeout_s=fleet.health_check_timeout_s,
        # No request takes longer than its limit, so a replica that is not wanted any more cuts off none.
        graceful_shutdown_timeout_s=limits.timeout_s + _MARGIN_S,
        graceful_shutdown_wait_loop_s=_POLL_S,
        request_router_config=RequestRouterConfig(
            request_router_class="serve.fleet.router.Router",
            request_router_kwargs={
                "sticky": fleet.sticky == "session",
                "config": config.model_dump(mode="json", include=_FOR_PROXIES),
            },
            request_routing_stats_period_s=1.0,
        ),
        logging_config=logging_config,
        **number,
    )


def _watch() -> None:
    """Never returns; logs when the replicas' number or state changes."""
    from ray import serve as ray_serve

    before = None
    while True:
        deployment = ray_serve.status().applications[APPLICATION].deployments[DEPLOYMENT]
        counts = {str(getattr(state, "value", state)): count for state, count in deployment.replica_states.items()}
        if counts != before:
            log.info("replicas: %s", ", ".join(f"{count} {state.lower()}" for state, count in counts.items()) or "none")
            before = counts
        time.sleep(_POLL_S * 4)


def _end(controller: Controller, config: ServeConfig, front: Front | None) -> None:
    """Drain and stop all that ``run`` started, whatever of it there is."""
    import ray

    if not ray.is_initialized():
        return
    from ray import serve as ray_serve

    from serve.fleet.rate_limit_store import end_store

    try:
        controller.request_stop()
        if front is not None:
            front.drain(config.drain_timeout_s + _MARGIN_S)
        ray_serve.delete(APPLICATION)  # before the proxies go, through which the answers go
        end_store()
        if config.fleet.ray_address is None:
            ray_serve.shutdown()
    except Exception as error:  # noqa: BLE001 - whatever of it failed, Ray must end too
        log.error("the fleet did not stop as it should: %s: %s", type(error).__name__, error)


def _reason() -> str | None:
    """Why the deployment is not healthy, in the words of the replica that failed."""
    from ray import serve as ray_serve

    application = ray_serve.status().applications.get(APPLICATION)
    if application is None:
        return None
    message = next((found.message for found in application.deployments.values() if found.message), application.message)
    # A traceback in a traceback; its last line is the reason.
    return next((line.strip() for line in reversed(message.splitlines()) if line.strip()), None)


@contextmanager
def _signals() -> Iterator[None]:
    """Raise _Stop at the first signal to stop; further ones change nothing."""
    stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        if not stopped:
            stopped = True
            raise _Stop

    with handled_by(stop, handled_signals()):
        try:
            yield
        except SystemExit as error:  # Ray hands on a plain one, whichever ended its wait
            if not stopped:
                raise
            raise _Stop from error
