"""One replica on Ray Serve: a whole server, its engine and its journal, behind the same application as alone."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Receive, Scope, Send

from feedback.config import FeedbackConfig
from feedback.trusted_code import consent_to
from serve.config import ServeConfig
from serve.fleet.front.configuration import places_of
from serve.fleet.front.process import folder_of_front
from serve.fleet.member import Member
from serve.observability import log_format
from serve.vllm import compat

if TYPE_CHECKING:
    from serve.app import Console


class Replica:
    """What Ray Serve starts, checks, and ends. The server's config comes as JSON values."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self,
        config: dict[str, Any],
        feedback_config: FeedbackConfig,
        console: Console | None = None,
        *,
        trusted_code: dict[str, list[str]],
    ) -> None:
        """Start the server. Raises what keeps it from serving; Ray Serve tries again."""
        consent_to(trusted_code)
        from serve.app import create_app
        from serve.fleet.front.listener import Listener
        from serve.fleet.rate_limit_store import FleetBuckets
        from serve.runtime import Server

        _listen_on_its_own_address_alone()
        settings = ServeConfig(**config)
        logging.getLogger().handlers.clear()
        log_format.configure(settings.log_format)
        self.member = Member(settings)
        try:
            named = settings.model_copy(update={"replica_name": self.member.name})
            self.application = create_app(
                named, feedback_config, desired_state=self.member.desired_state, console=console
            )
            self.server: Server = self.application.state.server
            self.server.limiter.shared = FleetBuckets()
            self._lifespan = self.application.router.lifespan_context(self.application)
            await self._lifespan.__aenter__()
        except BaseException:
            self.member.release()
            raise
        self.server.fleet = self.member
        self.member.begin(self.server)
        self._listener: Listener | None = None
        if (folder := folder_of_front()) is not None:
            places = range(places_of(named.fleet))
            self._listener = Listener(self.application, named, folder, places, self.server.unready)
            await self._listener.start()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """The application, whose life is this object's and not the one that Ray Serve would give it."""

        async def application(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "lifespan":
                return await self.application(scope, receive, send)
            for phase in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{phase}.complete"})

        return application

    async def check_health(self) -> None:
        """Raises RuntimeError when only a new replica helps."""
        listener = None if self._listener is None else self._listener.dead()
        if reason := self.server.dead() or self.member.lost() or listener:
            raise RuntimeError(f"{self.member.name}: {reason}")

    async def record_routing_stats(self) -> dict[str, Any]:
        """What the router sees of this replica."""
        return self.member.routing()

    async def __del__(self) -> None:
        """Called by Ray Serve once the requests at work, as far as it knows them, are done.

        Finish the others, stop the engine, seal what was recorded.
        """
        if not hasattr(self, "_lifespan"):
            return
        self.member.stop()
        try:
            if self._listener is not None:
                await self._listener.close(at_once=self.server.draining or self.server.dead() is not None)
            await self._lifespan.__aexit__(None, None, None)
        finally:
            self.member.release()


def _listen_on_its_own_address_alone() -> None:
    """Have Ray Serve's gRPC server beside this replica listen on the address of its node in Ray.

    It opens it on "[::]:0" (Replica._on_initialized in ray.serve._private.replica, which runs after this), though
    nothing calls it here, and would unpickle what comes. Raises IncompatibleVersion if that can't be changed.
    """
    import ray
    from ray._common.network_utils import build_address
    from ray._common.tls_utils import add_port_to_grpc_server
    from ray.serve._private import replica

    compat.require()
    own = build_address(ray.util.get_node_ip_address(), 0)
    replica.add_port_to_grpc_server = lambda server, everywhere: add_port_to_grpc_server(server, own)
