"""What the loop exports to OpenTelemetry: a span for a cycle and each of its stages, rewards as evaluation events."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from deploy.config.root import Settings

if TYPE_CHECKING:
    import duckdb

    from serve.observability.tracing import Tracing

MOST_EVENTS: Final = 10_000
"""Of responses that one run of scoring tells of: the newest."""

_SCORED: Final = """
SELECT r.response_id, r.scorer, epoch_us(r.scored_at) * 1000 AS at, r.reward, r.components,
    element_at(i.metadata, $key)[1] AS trace
FROM rewards AS r JOIN interactions AS i USING (response_id)
WHERE r.scored_at >= $since AND r.reward IS NOT NULL
ORDER BY r.scored_at DESC, r.response_id LIMIT $most
"""


@contextmanager
def traced(settings: Settings, service: str) -> Iterator[Tracing | None]:
    """Export spans within, if ``serve.traces.endpoint`` is set; None if it is not."""
    config = settings.serve.traces
    if config.endpoint is None:
        yield None
        return
    from serve.observability.tracing import Tracing

    tracing = Tracing(config, service)
    tracing.start()
    try:
        yield tracing
    finally:
        tracing.close()


@contextmanager
def span(tracing: Tracing | None, name: str, **attributes: Any) -> Iterator[Callable[..., None]]:
    """A span of what is done within, if there is a ``Tracing``. It yields what adds attributes; None is none."""

    def named(of: dict[str, Any]) -> dict[str, Any]:
        return {f"millrace.{key}": value for key, value in of.items() if value is not None}

    if tracing is None:
        yield lambda **_: None
        return
    with tracing.span(name, **named(attributes)) as found:
        yield lambda **more: found.set_attributes(named(more))


def export_rewards(settings: Settings, since: datetime) -> int:
    """Export what was scored since a time as evaluation events; how many responses. 0 where there are no traces.

    Raises LakeError.
    """
    with traced(settings, "millrace-score") as tracing:
        if tracing is None:
            return 0
        from serve.generation.interaction_rows import TRACE_KEY

        def read(connection: duckdb.DuckDBPyConnection) -> list[dict[str, Any]]:
            values = {"key": TRACE_KEY, "since": since, "most": MOST_EVENTS}
            return connection.execute(_SCORED, values).to_arrow_table().to_pylist()

        rows = settings.lake().read(read, tables=("interactions", "rewards"))
        tracing.evaluations({**row, "scores": _scores(row)} for row in rows)
        return len(rows)


def _scores(row: dict[str, Any]) -> dict[str, float]:
    """The reward and its components by name."""
    components = {name: value for name, value in row["components"] or () if value is not None}
    return {**components, "reward": row["reward"]}
