"""``GET /health``, ``/ready``, ``/policy`` and ``/metrics``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response

from serve.api.http import Problem, json_response, problems

if TYPE_CHECKING:
    from serve.app import Server

router = APIRouter()


@router.get("/health", responses=problems(503))
async def health(request: Request) -> Response:
    """Whether this process is worth keeping: 503 once its engine has died."""
    server: Server = request.app.state.server
    if reason := server.dead():
        raise Problem(503, reason)
    return json_response({"status": "ok"})


@router.get("/ready", responses=problems(503))
async def ready(request: Request) -> Response:
    """Whether requests will be answered and recorded; 503 says what is wrong."""
    server: Server = request.app.state.server
    if reason := server.unready():
        raise Problem(503, reason, retry_after=5)
    return json_response({"status": "ready", "policy_version": server.engine.version})


@router.get("/policy")
async def policy(request: Request) -> Response:
    """Which policy serves, since when, and the last swaps."""
    server: Server = request.app.state.server
    return json_response({**server.swapper.status(), "replica": server.config.replica_name})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus text."""
    server: Server = request.app.state.server
    return Response(server.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")
