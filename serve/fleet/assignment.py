"""Which policy of an experiment answers a request: found in the proxy, kept to by the router, recorded by the replica.

The proxy reads who asks from the body, which no router sees, and hands it on in a header of its own; a client's is
taken out. The router sends the request to a replica of the variant that is drawn for that unit. The replica draws
again, at the time that its row has, and labels the row if it serves what was drawn. Where one of the two policies has
no replica, the others answer, and nothing is drawn: such rows, of either policy, are left out together. Imports no
torch and no vLLM.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from pydantic import BaseModel, ValidationError
from starlette.types import Scope

from feedback.ids import uuid7
from serve.api.bounds import aside, check, is_large
from serve.http import Problem
from serve.middleware.authentication import headers_of
from serve.middleware.request_context import RESPONSES, well_formed_id
from serve.policies.experiments import Assignment, Experiment, Variant, of_replicas, unit_of

HEADER: Final = "x-millrace-route"
_HEADER: Final = HEADER.encode()
_OURS: Final = re.compile(rb"x[-_]millrace[-_]route")  # Ray Serve takes both for one
_SESSION: Final = b"x-session-id"
_REQUEST: Final = b"x-request-id"
_VALUE: Final = re.compile(r"(?:(\d+)\.([0-9a-f]{32}))?;(.*)", re.DOTALL)


@dataclass(frozen=True)
class Route:
    """What the header says. ``experiment``, ``unit``: None outside of an experiment; ``session``: "" if it has none."""

    experiment: int | None = None
    unit: str | None = None
    session: str = ""

    def encode(self) -> bytes:
        """The header's value, as the text that Ray Serve reads it as."""
        drawn = "" if self.experiment is None else f"{self.experiment}.{self.unit}"
        return f"{drawn};{self.session}".encode()


def read(value: str | None) -> Route:
    """A header's value, as ``Route.encode`` writes it."""
    found = _VALUE.fullmatch(value or "")
    if found is None:
        return Route()
    number, unit, session = found.groups()
    return Route(None if number is None else int(number), unit, session)


class _Labels(BaseModel):
    """Who asks, of a body that a replica checks."""

    user: Any = None
    safety_identifier: Any = None
    session_id: Any = None


async def routed(scope: Scope, body: bytes, tenant: str, experiment: Experiment | None) -> Scope:
    """A request as its router is to see it. ``experiment``: the one that both policies have replicas in, if any."""
    headers = [(name, value) for name, value in scope["headers"] if not _OURS.fullmatch(name.lower())]
    session = next((value for name, value in headers if name == _SESSION), b"").decode("latin-1")
    route = Route(session=session)
    if experiment is not None and scope["path"] in RESPONSES and body:
        request = headers_of(scope, frozenset({_REQUEST})).get(_REQUEST, b"")
        if not well_formed_id(request):
            request = uuid7().encode()
            headers = [*((name, value) for name, value in headers if name.lower() != _REQUEST), (_REQUEST, request)]
        found = await aside(is_large(body), _labels, body)
        user = _text(found.user) or (_text(found.safety_identifier) if scope["path"] != "/generate" else None)
        unit = unit_of(
            tenant,
            user=user,
            session=_text(found.session_id) or session or None,
            request=request.decode(),
        )
        route = Route(experiment.number, unit, session)
    if route != Route():
        headers.append((_HEADER, route.encode()))
    return {**scope, "headers": headers}


def _labels(body: bytes) -> _Labels:
    """Nobody, of a body that a replica will refuse."""
    try:
        check(body, 422)
        return _Labels.model_validate_json(body)
    except (Problem, ValidationError):
        return _Labels()


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


@dataclass(frozen=True)
class Arms:
    """The replicas of an experiment as their router knows them, by what they report (``replica_stats``).

    ``of``: each one's variant, also while it does not serve it yet; ``serving``: those that do.
    """

    experiment: Experiment
    of: Mapping[Any, Variant]
    serving: frozenset[Any]

    @classmethod
    def among(cls, stats: Mapping[Any, Mapping[str, Any]]) -> Arms | None:
        """``stats``: of each replica. The newest experiment that one takes part in; None where none does."""
        parts = {key: of["experiment"] for key, of in stats.items() if of.get("experiment")}
        if not parts:
            return None
        # A record changes while it is on its way: the newest is the one that says most.
        newest = max((_known(part["record"]) for part in parts.values()), key=_age)
        mine = {key: part for key, part in parts.items() if part["record"]["number"] == newest.number}
        return cls(
            newest,
            {key: part["variant"] for key, part in mine.items()},
            frozenset(key for key, part in mine.items() if part["serves"]),
        )

    def whole(self, ready: Iterable[Any]) -> bool:
        """Whether each of the two policies has a replica that is ready."""
        return {self.of[key] for key in ready if key in self.serving} == {"candidate", "control"}

    def allowed(self, ready: Sequence[Any], route: Route, at: float) -> list[Any]:
        """Those of the ready replicas that may answer: of the variant that is drawn; all, if that leaves none.

        What is not part of the experiment goes to those that serve what the pointer names.
        """
        usual: Variant = "candidate" if self.experiment.state == "committed" else "control"
        if route.unit is not None and route.experiment == self.experiment.number and self.whole(ready):
            usual = self.experiment.assign(route.unit, at).variant
        found = [key for key in ready if key in self.serving and self.of[key] == usual]
        return found or [key for key in ready if self.of.get(key, "control") == "control"] or list(ready)


def replica_stats(experiment: Experiment, variant: Variant, *, serves: bool) -> dict[str, Any]:
    """What a replica reports of its part in an experiment. ``serves``: whether it has its variant's policy by now."""
    return {"record": experiment.for_routers(), "variant": variant, "serves": serves}


def assigned(
    experiment: Experiment,
    route: Route,
    *,
    tenant: str,
    user: str | None,
    session: str | None,
    request: str,
    at: float,
    serving: int | None,
) -> Assignment:
    """What the rows of a request are labelled with, that came ``at`` a time to a replica that serves a policy."""
    unit = unit_of(tenant, user=user, session=session, request=request)
    drawn = experiment.assign(unit, at)
    if (route.experiment, route.unit, serving) == (experiment.number, unit, drawn.version):
        return drawn
    return replace(drawn, counts=False)


def now() -> float:
    """Seconds of Unix time, by this machine's clock."""
    return time.time()


_records: dict[str, Experiment] = {}


def _known(record: dict[str, Any]) -> Experiment:
    """A record that replicas report, understood once."""
    key = repr(record)
    if key not in _records:
        _records.clear()
        _records[key] = of_replicas(record)
    return _records[key]


def _age(experiment: Experiment) -> tuple[int, int]:
    return experiment.number, experiment.generation
