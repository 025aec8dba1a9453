"""OpenTelemetry spans of requests, from HTTP over the engine to the journal, and of whatever else a process does.

Names and attributes are those of OpenTelemetry's conventions for HTTP and for generative AI. No span has a text of a
prompt or a response, nor the name of a user, a session or a tenant. Spans are handed to a queue that a thread of the
exporter's empties: a collector that is slow or gone costs spans, and no request waits for it.

Without ``serve.traces.endpoint`` there is no ``Tracing``, and neither OpenTelemetry's SDK nor its exporter is imported.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from opentelemetry.sdk._logs import LoggerProvider
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

    from serve.config import TracesConfig

log = logging.getLogger(__name__)

_W3C: Final = TraceContextTextMapPropagator()
_TRACEPARENT: Final = "traceparent"
_CLOSE_S: Final = 3.0
_BATCH: Final = 512
PROVIDER: Final = "millrace"

_SAY_EVERY_S: Final = 3600.0

# What clients send is parsed: what is malformed in it is not for the log.
for _name in ("opentelemetry.trace.span", "opentelemetry.trace.propagation", "opentelemetry.exporter.otlp"):
    logging.getLogger(_name).setLevel(logging.ERROR)


class _Reason(logging.Filter):
    """Keeps what an exporter's log has said last, which has no address and comes with each batch, out of ours."""

    last = "no reason was given"

    def filter(self, record: logging.LogRecord) -> bool:
        self.last = record.getMessage()
        return False


_reason: Final = _Reason()
for _name in ("trace_exporter", "_log_exporter"):
    logging.getLogger(f"opentelemetry.exporter.otlp.proto.http.{_name}").addFilter(_reason)


class Collected:
    """Whether a collector takes what is sent, for the log: at the first failure, then now and then, and at the end."""

    def __init__(self, endpoint: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._endpoint = endpoint
        self._clock = clock
        self._lost = 0
        self._said_at: float | None = None

    def sent(self, spans: int, *, taken: bool) -> None:
        """A batch of ``spans`` was sent."""
        if taken:
            if self._said_at is not None:
                log.info("the collector at %s takes spans again; %d were lost", self._endpoint, self._lost)
            self._lost, self._said_at = 0, None
            return
        self._lost += spans
        now = self._clock()
        if self._said_at is None or now - self._said_at >= _SAY_EVERY_S:
            self._said_at = now
            log.error(
                "the collector at %s (serve.traces.endpoint) takes no spans, %d are lost so far: %s",
                self._endpoint,
                self._lost,
                _reason.last,
            )


current: ContextVar[str | None] = ContextVar("trace", default=None)
"""The traceparent of the request at work, if its spans are exported."""


def remote_parent(traceparent: bytes, tracestate: bytes | None) -> SpanContext | None:
    """The trace context of a request's headers, None if it is malformed (W3C Trace Context)."""
    carrier = {_TRACEPARENT: traceparent.decode("latin-1")}
    if tracestate is not None:
        carrier["tracestate"] = tracestate.decode("latin-1")
    found = trace.get_current_span(_W3C.extract(carrier, contexts.Context())).get_span_context()
    return found if found.is_valid else None


class Tracing:
    """Spans of one process. Call ``start`` before the first one ends, and ``close`` at the end."""

    def __init__(self, config: TracesConfig, service: str, instance: str | None = None) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

        named = {"service.name": service, **({} if instance is None else {"service.instance.id": instance})}
        self._config = config
        self._resource = Resource.create(named)
        self._provider = TracerProvider(
            resource=self._resource, sampler=ParentBasedTraceIdRatio(config.sample_ratio), shutdown_on_exit=False
        )
        self._tracer = self._provider.get_tracer("millrace")

    @classmethod
    def of(cls, config: TracesConfig, service: str, instance: str | None = None) -> Tracing | None:
        """None if it is off."""
        return None if config.endpoint is None else cls(config, service, instance)

    def start(self) -> None:
        """Begin to export, in a thread."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult

        collected = Collected(self._base)

        class Exporter(OTLPSpanExporter):
            def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
                result = super().export(spans)
                collected.sent(len(spans), taken=result is SpanExportResult.SUCCESS)
                return result

        exporter = Exporter(f"{self._base}/v1/traces", timeout=self._config.timeout_s)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))

    def close(self) -> None:
        """Export what is left, for some seconds at most: a collector that hangs holds up no end."""
        _close(self._provider)

    # Requests

    def begin_request(self, method: str, path: str, parent: SpanContext | None) -> Span:
        """The server's span of a request."""
        context = None if parent is None else trace.set_span_in_context(trace.NonRecordingSpan(parent))
        attributes = {"http.request.method": method, "url.path": path}
        return self._tracer.start_span(f"{method} {path}", context, SpanKind.SERVER, attributes)

    @contextmanager
    def at_work(self, span: Span) -> Iterator[None]:
        """What is done within belongs to the request of this span."""
        token = contexts.attach(trace.set_span_in_context(span))
        exported = current.set(traceparent(span) if span.is_recording() else None)
        try:
            yield
        finally:
            current.reset(exported)
            contexts.detach(token)

    def end_request(self, span: Span, request_id: str, code: int) -> None:
        """End the server's span. ``code``: the status that the request came to."""
        span.set_attributes({"http.response.status_code": code, "millrace.request_id": request_id})
        if code >= 500:
            span.set_status(Status(StatusCode.ERROR))
        span.end()

    def responses(self, rows: Sequence[Mapping[str, Any]], model: str, sampled_at: int, recorded: bool) -> None:
        """The spans of the responses to one prompt, once their rows are on disk, if they are ``recorded``.

        ``sampled_at``: nanoseconds of Unix time when the engine had ended, and the journal began.
        """
        # Sampled, and not recording: what is made of a client's request that has left, ends behind the request's span.
        if not trace.get_current_span().get_span_context().trace_flags.sampled:
            return
        now, timings = time.time_ns(), rows[0]["timings"]
        began = sampled_at - int(timings["total_ms"] * 1e6)
        operation = "chat" if rows[0]["messages"] is not None else "text_completion"
        whole = self._tracer.start_span(
            f"{operation} {model}", None, SpanKind.INTERNAL, _generated(rows, operation, model), start_time=began
        )
        inside = trace.set_span_in_context(whole)
        engine = self._tracer.start_span("engine", inside, start_time=began)
        if timings["queue_ms"] is not None:
            engine.set_attribute("millrace.queue_ms", timings["queue_ms"])
        if timings["first_token_ms"] is not None:
            engine.add_event("first token", timestamp=began + int(timings["first_token_ms"] * 1e6))
        engine.end(sampled_at)
        if recorded:
            self._tracer.start_span("journal", inside, start_time=sampled_at).end(now)
        if any(row["status"] == "error" for row in rows):
            whole.set_status(Status(StatusCode.ERROR))
        whole.end(now)

    # Other work

    @contextmanager
    def span(self, name: str, **attributes: Any) -> Iterator[Span]:
        """A span of what is done within, a child of the one around it; with the type of the error that it ends with.

        What the error says is not exported: a stage's is the last line of its log, in which people's code may quote.
        """
        with self._tracer.start_as_current_span(
            name, attributes=attributes, record_exception=False, set_status_on_exception=False
        ) as span:
            try:
                yield span
            except BaseException as error:
                span.set_attribute("error.type", type(error).__qualname__)
                span.set_status(Status(StatusCode.ERROR))
                raise

    def evaluations(self, found: Iterable[Mapping[str, Any]]) -> None:
        """Export rewards as evaluation events, with the trace of the request whose response each is of.

        Each of ``found`` has ``response_id``, ``scorer``, ``at`` (nanoseconds of Unix time), ``scores`` (by the name of
        what gave them) and ``trace`` (a traceparent, or None). It waits for each batch, since a queue that is full
        drops; the first one that the collector does not take ends it, which is in the log.
        """
        from opentelemetry._logs import LogRecord
        from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
        from opentelemetry.sdk._logs import LoggerProvider, ReadableLogRecord
        from opentelemetry.sdk._logs.export import BatchLogRecordProcessor, LogRecordExportResult

        class Exporter(OTLPLogExporter):
            taken = True

            def export(self, batch: Sequence[ReadableLogRecord]) -> LogRecordExportResult:
                result = super().export(batch)
                self.taken = self.taken and result is LogRecordExportResult.SUCCESS
                return result

        provider = LoggerProvider(resource=self._resource, shutdown_on_exit=False)
        exporter = Exporter(f"{self._base}/v1/logs", timeout=self._config.timeout_s)
        provider.add_log_record_processor(
            BatchLogRecordProcessor(exporter, max_export_batch_size=_BATCH, max_queue_size=2 * _BATCH)
        )
        logger = provider.get_logger("millrace")
        scores = ((one, *score) for one in found for score in one["scores"].items())
        for number, (one, name, value) in enumerate(scores, start=1):
            carrier = {} if one["trace"] is None else {_TRACEPARENT: one["trace"]}
            attributes = {
                "gen_ai.evaluation.name": name,
                "gen_ai.evaluation.score.value": value,
                "gen_ai.response.id": one["response_id"],
                "millrace.scorer": one["scorer"],
            }
            logger.emit(
                LogRecord(
                    timestamp=one["at"],
                    context=_W3C.extract(carrier, contexts.Context()),
                    event_name="gen_ai.evaluation.result",
                    attributes=attributes,
                )
            )
            if number % _BATCH == 0:
                provider.force_flush()
                if not exporter.taken:
                    log.error(
                        "the collector at %s takes no more evaluation events, at most %d are exported: %s",
                        self._base,
                        number,
                        _reason.last,
                    )
                    break
        _close(provider)

    @property
    def _base(self) -> str:
        return str(self._config.endpoint).rstrip("/")


def _close(provider: TracerProvider | LoggerProvider) -> None:
    def close() -> None:
        provider.force_flush(int(_CLOSE_S * 1000))
        provider.shutdown()

    closing = threading.Thread(target=close, name="last traces", daemon=True)
    closing.start()
    closing.join(_CLOSE_S)


def traceparent(span: Span) -> str:
    """A span's context as the header has it."""
    found = span.get_span_context()
    return f"00-{found.trace_id:032x}-{found.span_id:016x}-{found.trace_flags:02x}"


def _generated(rows: Sequence[Mapping[str, Any]], operation: str, model: str) -> dict[str, Any]:
    """Attributes of the conventions for generative AI."""
    sampling = rows[0]["sampling"]
    policies = [span["policy_version"] for row in rows for span in row["policy_spans"][-1:]]
    found = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": rows[0]["response_id"],
        "gen_ai.response.finish_reasons": [row["finish_reason"] or "error" for row in rows],
        "gen_ai.usage.input_tokens": len(rows[0]["prompt_token_ids"]),
        "gen_ai.usage.output_tokens": sum(len(row["response_token_ids"]) for row in rows),
        "gen_ai.request.choice.count": sampling["n"],
        "gen_ai.request.seed": sampling["seed"],
        "millrace.policy_version": max(policies, default=None),
        **{f"gen_ai.request.{name}": sampling[name] for name in ("temperature", "top_p", "top_k", "max_tokens")},
    }
    return {name: value for name, value in found.items() if value is not None}
