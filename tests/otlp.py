"""A collector of OpenTelemetry's: a small HTTP server that decodes what comes."""

from __future__ import annotations

import gzip
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.http_receiver import receiving


@dataclass(frozen=True)
class Item:
    """A span or an event. Ids are hexadecimal; times are nanoseconds of Unix time; ``kind`` is OTLP's number."""

    service: str
    name: str
    trace: str
    span: str
    parent: str
    kind: int
    start: int
    end: int
    error: bool
    attributes: dict[str, Any]
    events: tuple[str, ...] = ()


@dataclass
class Collector:
    url: str = ""
    spans: list[Item] = field(default_factory=list)
    events: list[Item] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    def of(self, trace: str) -> dict[str, Item]:
        """The spans of a trace, by name."""
        return {item.name: item for item in list(self.spans) if item.trace == trace}

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < deadline, [(item.service, item.name) for item in self.spans]
            time.sleep(0.1)

    def take(self, path: str, body: bytes) -> None:
        self.bodies.append(body)
        if path == "/v1/traces":
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                service = _values(resource.resource.attributes)["service.name"]
                self.spans += [_span(service, span) for scope in resource.scope_spans for span in scope.spans]
        elif path == "/v1/logs":
            for resource in ExportLogsServiceRequest.FromString(body).resource_logs:
                service = _values(resource.resource.attributes)["service.name"]
                self.events += [_event(service, log) for scope in resource.scope_logs for log in scope.log_records]


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free port."""
    found = Collector()

    def take(path: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str]]:
        found.take(path, gzip.decompress(body) if headers.get("Content-Encoding") == "gzip" else body)
        return 200, {}

    with receiving(take) as found.url:
        yield found


def _span(service: str, span: Any) -> Item:
    ids = span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()
    times, events = (span.start_time_unix_nano, span.end_time_unix_nano), tuple(event.name for event in span.events)
    return Item(service, span.name, *ids, span.kind, *times, span.status.code == 2, _values(span.attributes), events)


def _event(service: str, log: Any) -> Item:
    ids, at = (log.trace_id.hex(), log.span_id.hex(), ""), log.time_unix_nano
    return Item(service, log.event_name, *ids, 0, at, at, False, _values(log.attributes))


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)
