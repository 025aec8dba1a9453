"""``GET /experiments``, ``/experiments/{number}`` and ``POST /experiments/{number}/stop``."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Path, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from serve.api.bounds import parse_body
from serve.http import Problem, body_of, json_response, problems
from serve.observability.audit import AuditLog, AuditLogError
from serve.policies.experiments import Experiment, Experiments, NoSuchExperiment
from serve.policies.store import PolicyError

if TYPE_CHECKING:
    from serve.runtime import Server

router = APIRouter()

Number = Annotated[int, Path(description="The experiment's number.", ge=1)]


class ExperimentOut(BaseModel):
    """An experiment on live traffic."""

    model_config = ConfigDict(extra="allow")

    number: int = Field(description="Its number, from 1.")
    candidate: int = Field(description="The policy that is tried.")
    control: int = Field(description="The policy that it is compared with.")
    state: str = Field(
        description="running; committed (the candidate serves, and is watched); stopping (nothing is tried any more, "
        "the end is not on record yet); ended."
    )
    phases: list[dict[str, Any]] = Field(description="From which block on the candidate has which share of blocks.")
    block_s: float = Field(description="Length of a block, in seconds.")
    latest: dict[str, Any] | None = Field(description="The last look at the evidence, and what it says.")
    end: dict[str, Any] | None = Field(description="What it came to, when and why.")


class ExperimentsOut(BaseModel):
    """All experiments, oldest first."""

    experiments: list[ExperimentOut] = Field(description="Each, the last one last.")


class StopIn(BaseModel):
    """Why it is stopped."""

    model_config = ConfigDict(extra="forbid", strict=True)

    why: str = Field(min_length=1, max_length=2000, description="The reason, which goes on record.")


@router.get("/experiments", responses={200: {"model": ExperimentsOut}, **problems(401, 403, 503)})
async def experiments(request: Request) -> Response:
    """All experiments on live traffic, oldest first."""
    store = _of(request)
    found = await asyncio.to_thread(lambda: [asdict(_get(store, number)) for number in store.numbers()])
    return json_response({"experiments": found})


@router.get("/experiments/{number}", responses={200: {"model": ExperimentOut}, **problems(401, 403, 404, 422, 503)})
async def experiment(request: Request, number: Number) -> Response:
    """One experiment: its arms, its plan, the last look at it and its end."""
    return json_response(asdict(await asyncio.to_thread(_get, _of(request), number)))


@router.post(
    "/experiments/{number}/stop",
    responses={200: {"model": ExperimentOut}, **problems(401, 403, 404, 408, 409, 413, 422, 503)},
    openapi_extra=body_of(StopIn),
)
async def stop(request: Request, number: Number) -> Response:
    """Have the server follow the serving pointer again, at once. What the experiment came to is then ``stopped``."""
    server: Server = request.app.state.server
    said = await parse_body(await server.bodies.read(request.receive), StopIn)
    store = _of(request)
    before = await asyncio.to_thread(_get, store, number)
    if not before.holds:
        raise Problem(409, f"experiment {number} is {before.state}: there is nothing to stop")
    key = request.scope["principal"].key
    who = "a client of the server" if key is None else f"key {key}"
    client = request.client.host if request.client else "unknown"

    def stop_on_record() -> Experiment:
        log = AuditLog(server.config.audit)
        with log.entry("experiment.stop", {"number": number, "why": said.why}, who=who, origin=client):
            return store.stop(number, who=who, why=said.why)

    try:
        after = await asyncio.to_thread(stop_on_record)
    except (PolicyError, AuditLogError, OSError) as error:
        raise Problem(503, f"experiment {number} could not be stopped: {error}", retry_after=5) from error
    return json_response(asdict(after))


def _of(request: Request) -> Experiments:
    server: Server = request.app.state.server
    return server.swapper.experiments


def _get(store: Experiments, number: int) -> Experiment:
    try:
        return store.get(number)
    except NoSuchExperiment as error:
        raise Problem(404, str(error)) from error
    except PolicyError as error:
        raise Problem(503, f"the record of experiment {number} can't be read: see the server's log") from error
