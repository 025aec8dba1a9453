"""The server's metrics for Prometheus. One registry a server, so that two in one process don't mix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Final, Literal, get_args

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_TOKEN_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_SWAP_SECONDS: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_BATCH_ITEMS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)

Numbers = Callable[[], dict[str, float]]

Outcome = Literal["complete", "failed", "refused", "left"]
OUTCOMES: Final[tuple[Outcome, ...]] = get_args(Outcome)


class Metrics:
    """Counters that the routes and the swapper move, and gauges that are read at each scrape."""

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
        self.inter_token_seconds = Histogram(
            "millrace_inter_token_seconds",
            "Time between two tokens of a response, on average over the response.",
            buckets=_TOKEN_SECONDS,
            registry=self.registry,
        )
        outcomes = Counter(
            "millrace_outcomes",
            "Requests for responses that were let in, by what they came to: complete (all rows are), failed (a row "
            "says error, or aborted by the server), refused (the request is at fault), left (by its client).",
            ("outcome",),
            registry=self.registry,
        )
        self._outcomes = {outcome: outcomes.labels(outcome=outcome) for outcome in OUTCOMES}
        self.came_to: dict[Outcome, int] = dict.fromkeys(OUTCOMES, 0)
        """The same, for this process to read."""
        self.prompt_tokens = Counter("millrace_prompt_tokens", "Prompt tokens read.", registry=self.registry)
        self.response_tokens = Counter("millrace_response_tokens", "Response tokens sampled.", registry=self.registry)
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
        self.auth_failures = Counter(
            "millrace_auth_failures",
            "Requests without a good key: missing, unknown, revoked, expired; scope: one that may not do that.",
            ("reason",),
            registry=self.registry,
        )
        self.rate_limited = Counter(
            "millrace_rate_limited",
            "Requests over a key's limit of requests or tokens, by the key's id.",
            ("limit", "key"),
            registry=self.registry,
        )
        self.swaps = Counter("millrace_swaps", "Policy swaps.", ("ok",), registry=self.registry)
        self.hold_seconds = Histogram(
            "millrace_swap_hold_seconds",
            "Time in a swap for which no token was sampled.",
            buckets=_SWAP_SECONDS,
            registry=self.registry,
        )
        self.policy_version = Gauge("millrace_policy_version", "The policy that serves.", registry=self.registry)
        self.responses_of = cache(lambda status: self.responses.labels(status=status))
        """The counter of the responses that ended with a status."""
        self._of_route = cache(lambda route, code: (self.requests.labels(route, str(code)), self.seconds.labels(route)))

    def answered(self, route: str, code: int, seconds: float) -> None:
        """Count an answer. ``route``: the route's template, or "other"."""
        requests, times = self._of_route(route, code)
        requests.inc()
        times.observe(seconds)

    def ended(self, outcome: Outcome) -> None:
        """Count what a request for responses came to."""
        self.came_to[outcome] += 1
        self._outcomes[outcome].inc()

    def watch(self, prefix: str, numbers: Numbers) -> None:
        """Show ``numbers()`` as gauges named ``millrace_<prefix>_<key>``, read at each scrape."""
        self.registry.register(_Gauges(prefix, numbers))

    def render(self) -> bytes:
        """The text that Prometheus reads: the server's, and that of the process's own registry, which has vLLM's."""
        return generate_latest(self.registry) + generate_latest(REGISTRY)


class _Gauges(Collector):
    def __init__(self, prefix: str, numbers: Numbers) -> None:
        self._prefix = prefix
        self._numbers = numbers

    def describe(self) -> Iterable[Metric]:
        return ()  # don't read while registering

    def collect(self) -> Iterator[Metric]:
        for name, value in self._numbers().items():
            yield GaugeMetricFamily(f"millrace_{self._prefix}_{name}", f"{self._prefix}: {name}", value=float(value))
