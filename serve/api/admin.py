"""``GET /health``, ``/ready``, ``/policy`` and ``/metrics``; ``POST /server/sleep`` and ``/server/wake``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from serve.api.bounds import parse_body
from serve.http import Problem, body_of, json_response, problems
from serve.observability.audit import AuditLog, AuditLogError
from serve.swap.sleep import CannotSleep, Sleeper

if TYPE_CHECKING:
    from serve.runtime import Server

router = APIRouter()

# /health and /ready are open to all: why an engine had to stop may name files and policies, which is for the log.
_DEAD: Final = "the server can't go on, and has to be started again; its log says why"
_ASLEEP: Final = "the server sleeps, as training or evaluation has its devices; requests wait for it"


class HealthOut(BaseModel):
    """The process is worth keeping."""

    status: Literal["ok"] = Field(description="ok.")
    sleep: Literal["falling asleep", "asleep", "waking"] | None = Field(
        None, description="Unless the server is awake: what it does instead, for as long as others have its devices."
    )


class ReadyOut(BaseModel):
    """Requests will be answered and recorded."""

    status: Literal["ready"] = Field(description="ready.")
    policy_version: int = Field(description="The policy that serves; of a fleet, the one that all of it serves.")
    replicas: list[str] | None = Field(None, description="In a fleet: the replicas that answer requests.")


class PolicyOut(BaseModel):
    """What serves, and how it came to that."""

    model_config = ConfigDict(extra="allow")

    version: int = Field(description="The policy that serves.")
    previous: int | None = Field(description="The policy that a rollback goes to.")
    since: str | None = Field(description="Since when, ISO 8601.")
    generation: int = Field(description="How often the serving pointer has moved up to what serves.")
    swaps: list[dict[str, Any]] = Field(description="The last swaps of this replica: when, from, to, and what it took.")
    failed: dict[str, Any] | None = Field(description="The pointer that could not be followed, and why.")
    prepared: int | None = Field(
        None, description="The policy that does not serve, and would at a move of the pointer, by an exchange alone."
    )
    experiment: dict[str, Any] | None = Field(
        None,
        description="If an experiment runs: the block that it is. In a fleet: which replicas serve the candidate.",
    )
    base: int | None = Field(None, description="The policy whose weights the engine of this replica has.")
    loaded: list[int] | None = Field(
        None, description="The policies that this replica can answer with at the moment: adapters of the base, and it."
    )
    store: str | None = Field(None, description="Which policy store it serves from: the time of that one's first move.")
    swap: dict[str, Any] = Field(
        description="How this replica swaps policies, in_place or not, and the reason, as decided when it started."
    )
    replica: str = Field(description="The replica that answers.")
    unready: str | None = Field(description="Why the replica that answers takes no requests.")
    sleep: dict[str, Any] = Field(description="As of `/server/sleep`: what this replica does, and who has it sleep.")
    phase: str | None = Field(None, description="In a fleet: what its rollout does at the moment.")
    rollout: dict[str, Any] | None = Field(None, description="In a fleet: the rollout under way.")
    replicas: dict[str, Any] | None = Field(None, description="In a fleet: what each replica does.")


class SleepIn(BaseModel):
    """Who wants the server's devices, and for how long."""

    model_config = ConfigDict(extra="forbid", strict=True)

    holder: str = Field(
        min_length=1, max_length=200, description="Who it is. The server sleeps while any holder has a lease."
    )
    lease_s: float = Field(
        gt=0,
        le=3600,
        description="Seconds that the lease lasts from the answer on. Sent again by its holder it is renewed; what is "
        "not renewed ends by itself.",
    )
    why: str = Field("", max_length=2000, description="The reason, which goes on record.")


class WakeIn(BaseModel):
    """Who lets go."""

    model_config = ConfigDict(extra="forbid", strict=True)

    holder: str = Field(min_length=1, max_length=200, description="As it was named to `/server/sleep`.")


class SleepOut(BaseModel):
    """Whether the server sleeps."""

    state: Literal["awake", "falling asleep", "asleep", "waking"] = Field(description="What it does.")
    holders: dict[str, float] = Field(description="Who has a lease, and for how many seconds yet.")
    waiting: int = Field(description="Requests that wait until it is awake.")


@router.get("/health", responses={200: {"model": HealthOut}, **problems(503)})
async def health(request: Request) -> Response:
    """Whether this process is worth keeping: 503 once its engine has died. A fleet is while any replica is."""
    server: Server = request.app.state.server
    if server.fleet is not None and (replicas := server.fleet.ready()):
        return json_response({"status": "ok", "replicas": replicas})
    if server.dead():
        raise Problem(503, _DEAD)
    asleep = {} if server.sleeper.state == "awake" else {"sleep": server.sleeper.state}
    return json_response({"status": "ok"} | asleep)


@router.get("/ready", responses={200: {"model": ReadyOut}, **problems(503)})
async def ready(request: Request) -> Response:
    """Whether requests will be answered and recorded; 503 says what is wrong."""
    server: Server = request.app.state.server
    if server.fleet is not None and (replicas := server.fleet.ready()) and not server.draining:
        version = server.fleet.policy()["version"]
        return json_response({"status": "ready", "policy_version": version, "replicas": replicas})
    if reason := server.unready():
        raise Problem(503, _DEAD if server.dead() else reason, retry_after=5)
    if server.admission.closed:
        raise Problem(503, _ASLEEP, retry_after=5)
    return json_response({"status": "ready", "policy_version": server.engine.version})


@router.get("/policy", responses={200: {"model": PolicyOut}})
async def policy(request: Request) -> Response:
    """Which policy serves, since when, and the last swaps; in a fleet, also what each replica does."""
    server: Server = request.app.state.server
    fleet = server.fleet.policy() if server.fleet is not None else {}
    own = {"replica": server.config.replica_name, "unready": server.unready(), "sleep": server.sleeper.status()}
    return json_response({**server.swapper.status(), **fleet, **own})


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"description": "Metrics", "content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(request: Request) -> Response:
    """Prometheus text, of all API processes; in a fleet, of all replicas, by the label ``replica``."""
    server: Server = request.app.state.server
    return Response(await server.render_metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.post(
    "/server/sleep",
    responses={200: {"model": SleepOut}, **problems(401, 403, 408, 409, 413, 422, 503)},
    openapi_extra=body_of(SleepIn),
)
async def sleep(request: Request) -> Response:
    """Have the server sleep while somebody else has its devices, up to the end of a lease that has to be renewed.

    Requests at work end first, new ones wait. On a GPU the engine gives back its memory. What waits longer than
    `serve.sleep.wait_s` gets 503 with Retry-After.
    """
    server: Server = request.app.state.server
    said = await parse_body(await server.bodies.read(request.receive), SleepIn)
    sleeper = _sleeper(server)
    renewed = sleeper.holds(said.holder)  # several times a minute
    on_record = nullcontext() if renewed else _on_record(request, "server.sleep", said.model_dump())
    try:
        async with on_record:
            await sleeper.sleep(said.holder, said.lease_s)
    except CannotSleep as error:
        raise Problem(503, str(error), retry_after=5) from error
    return json_response(sleeper.status())


@router.post(
    "/server/wake",
    responses={200: {"model": SleepOut}, **problems(401, 403, 408, 409, 413, 422, 503)},
    openapi_extra=body_of(WakeIn),
)
async def wake(request: Request) -> Response:
    """Let go of a lease on the server's devices: it wakes, and answers what waits, unless others have leases too."""
    server: Server = request.app.state.server
    said = await parse_body(await server.bodies.read(request.receive), WakeIn)
    sleeper = _sleeper(server)
    held = sleeper.holds(said.holder)
    async with _on_record(request, "server.wake", said.model_dump()) if held else nullcontext():
        await sleeper.wake(said.holder)  # behind a sleep of its own that is not complete yet, too
    if server.dead():
        raise Problem(503, _DEAD)
    return json_response(sleeper.status())


def _sleeper(server: Server) -> Sleeper:
    """Raises Problem 409 for a server that does not sleep."""
    config = server.config
    if not config.sleep.allowed:
        why = config.never_sleeps or "set devices.use=in_turns, or serve.sleep.allowed=true, and start it again"
        raise Problem(409, f"this server was not started to sleep: {why}")
    return server.sleeper


@asynccontextmanager
async def _on_record(request: Request, action: str, subject: dict[str, Any]) -> AsyncIterator[None]:
    """Have an action in the audit log, before and behind it. Raises Problem 503 if it can't be there."""
    server: Server = request.app.state.server
    key = request.scope["principal"].key
    who = "a client of the server" if key is None else f"key {key}"
    client = request.client.host if request.client else "unknown"
    entry = AuditLog(server.config.audit).entry(action, subject, who=who, origin=client)
    try:
        await asyncio.to_thread(entry.__enter__)
    except AuditLogError as error:
        raise Problem(503, str(error), retry_after=5) from error
    try:
        yield
    except BaseException as error:
        await asyncio.to_thread(entry.__exit__, type(error), error, error.__traceback__)
        raise
    await asyncio.to_thread(entry.__exit__, None, None, None)
