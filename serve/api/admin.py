"""``GET /health``, ``/ready``, ``/policy`` and ``/metrics``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from serve.http import Problem, json_response, problems

if TYPE_CHECKING:
    from serve.runtime import Server

router = APIRouter()

# /health and /ready are open to all: why an engine had to stop may name files and policies, which is for the log.
_DEAD: Final = "the server can't go on, and has to be started again; its log says why"


class HealthOut(BaseModel):
    """The process is worth keeping."""

    status: Literal["ok"] = Field(description="ok.")


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
    phase: str | None = Field(None, description="In a fleet: what its rollout does at the moment.")
    rollout: dict[str, Any] | None = Field(None, description="In a fleet: the rollout under way.")
    replicas: dict[str, Any] | None = Field(None, description="In a fleet: what each replica does.")


@router.get("/health", responses={200: {"model": HealthOut}, **problems(503)})
async def health(request: Request) -> Response:
    """Whether this process is worth keeping: 503 once its engine has died. A fleet is while any replica is."""
    server: Server = request.app.state.server
    if server.fleet is not None and (replicas := server.fleet.ready()):
        return json_response({"status": "ok", "replicas": replicas})
    if server.dead():
        raise Problem(503, _DEAD)
    return json_response({"status": "ok"})


@router.get("/ready", responses={200: {"model": ReadyOut}, **problems(503)})
async def ready(request: Request) -> Response:
    """Whether requests will be answered and recorded; 503 says what is wrong."""
    server: Server = request.app.state.server
    if server.fleet is not None and (replicas := server.fleet.ready()) and not server.draining:
        version = server.fleet.policy()["version"]
        return json_response({"status": "ready", "policy_version": version, "replicas": replicas})
    if reason := server.unready():
        raise Problem(503, _DEAD if server.dead() else reason, retry_after=5)
    return json_response({"status": "ready", "policy_version": server.engine.version})


@router.get("/policy", responses={200: {"model": PolicyOut}})
async def policy(request: Request) -> Response:
    """Which policy serves, since when, and the last swaps; in a fleet, also what each replica does."""
    server: Server = request.app.state.server
    fleet = server.fleet.policy() if server.fleet is not None else {}
    own = {"replica": server.config.replica_name, "unready": server.unready()}
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
