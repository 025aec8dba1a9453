"""What the server tells Prometheus. One registry a server, so that two in one process don't mix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_SWAP_SECONDS: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_BATCH_ITEMS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)

Numbers = Callable[[], dict[str, float]]


class Metrics:
    """Counters that the routes and the swapper move, and gauges read when somebody looks."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("millrace_requests", "Requests answered.", ("route", "code"), registry=self.registry)
        self.seconds = Histogram(
            "millrace_request_seconds",
            "Time to answer a request.",
            ("route",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.first_token_seconds = Histogram(
            "millrace_first_token_seconds",
            "Time to a request's first token, in the engine.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.prompt_tokens = Counter("millrace_prompt_tokens", "Prompt tokens read.", registry=self.registry)
        self.response_tokens = Counter("millrace_response_tokens", "Response tokens made.", registry=self.registry)
        self.responses = Counter(
            "millrace_responses", "Responses recorded, by how they ended.", ("status",), registry=self.registry
        )
        self.feedback = Counter(
            "millrace_feedback",
            "Feedback received, by kind and by what came of it: new, same, conflict, invalid, refused.",
            ("kind", "verdict"),
            registry=self.registry,
        )
        self.feedback_batch = Histogram(
            "millrace_feedback_batch",
            "Items of a feedback batch.",
            buckets=_BATCH_ITEMS,
            registry=self.registry,
        )
        self.swaps = Counter("millrace_swaps", "Policy swaps.", ("ok",), registry=self.registry)
        self.hold_seconds = Histogram(
            "millrace_swap_hold_seconds",
            "Time in a swap for which no token was made.",
            buckets=_SWAP_SECONDS,
            registry=self.registry,
        )
        self.policy_version = Gauge("millrace_policy_version", "The policy that serves.", registry=self.registry)

    def watch(self, prefix: str, numbers: Numbers) -> None:
        """Show ``numbers()`` as gauges named ``millrace_<prefix>_<key>``, read at each scrape."""
        self.registry.register(_Gauges(prefix, numbers))

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)


class _Gauges(Collector):
    def __init__(self, prefix: str, numbers: Numbers) -> None:
        self._prefix = prefix
        self._numbers = numbers

    def describe(self) -> Iterable[Metric]:
        return ()  # don't read while registering

    def collect(self) -> Iterator[Metric]:
        for name, value in self._numbers().items():
            yield GaugeMetricFamily(f"millrace_{self._prefix}_{name}", f"{self._prefix}: {name}", value=float(value))
