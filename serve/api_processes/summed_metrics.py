"""One Prometheus text of several API processes' texts: what they count is added up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

_GAUGES: Final[dict[str, Callable[[Iterable[float]], float]]] = {
    "millrace_engine_in_flight": sum,
    "millrace_engine_preemptions": sum,
    "millrace_journal_healthy": min,
    "millrace_journal_last_commit_ms": max,
    "millrace_journal_last_commit_rows": max,
    **{
        f"millrace_journal_{name}": sum
        for name in (
            *("queued_rows", "waiting_rows", "bytes", "segments", "open_streams"),
            *("rows", "commits", "refused", "commit_ms_total", "failures"),
        )
    },
    "process_resident_memory_bytes": sum,
    "process_virtual_memory_bytes": sum,
    "process_open_fds": sum,
}
"""How gauges of the processes become one; of another one, the first process's counts."""


def summed(texts: Sequence[bytes], ended: Sequence[bytes] = ()) -> bytes:
    """One text of all, the first process's first: counters and histograms are sums, gauges as ``_GAUGES`` says.

    ``ended``: the last texts of processes that are gone, of which what they counted stays.
    """
    return generate_latest(_Summed(texts, ended))


class _Summed(Collector):
    def __init__(self, texts: Sequence[bytes], ended: Sequence[bytes]) -> None:
        self._texts = [*((text, False) for text in texts), *((text, True) for text in ended)]

    def collect(self) -> Iterator[Metric]:
        metrics: dict[str, Metric] = {}
        samples: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], list[Sample]]] = {}
        for text, ended in self._texts:
            for family in text_string_to_metric_families(text.decode()):
                if ended and family.type not in ("counter", "histogram"):
                    continue
                metrics.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                of_family = samples.setdefault(family.name, {})
                for sample in family.samples:
                    key = sample.name, tuple(sorted(sample.labels.items()))
                    of_family.setdefault(key, []).append(sample)
        for name, metric in metrics.items():
            combine = _GAUGES.get(name) if metric.type == "gauge" else sum
            for same in samples[name].values():
                value = same[0].value if combine is None else combine(sample.value for sample in same)
                metric.samples.append(same[0]._replace(value=value))
            yield metric
