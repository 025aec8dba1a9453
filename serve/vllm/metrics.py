"""vLLM's own metrics, which it makes as a step's outputs reach the API process, at a fifth to a half of their cost.

vLLM adds its own logger of them unless it is given one. They are in prometheus_client's global registry. vLLM sees a
response that is not streamed when it is whole (``serve.vllm.response_collector``): its times to the first token, and
between tokens, are those of streams; ``millrace_first_token_seconds`` and ``millrace_inter_token_seconds`` are of all.
"""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.v1.metrics.loggers import PrometheusStatLogger

from serve.observability.prometheus_counters import Count, Tally


class EngineStats(PrometheusStatLogger):
    """Also keeps the newest numbers in ``newest``. A subclass, by ``into``, says which dict that is."""

    _counter_cls = Count
    _histogram_cls = Tally
    newest: ClassVar[dict[str, float]]

    @classmethod
    def into(cls, newest: dict[str, float]) -> type[EngineStats]:
        """For AsyncLLM's ``stat_loggers``, which makes an instance itself."""
        return type("EngineStats", (cls,), {"newest": newest})

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """What a step made."""
        newest = self.newest
        if scheduler_stats is not None:
            newest["running"] = scheduler_stats.num_running_reqs
            newest["waiting"] = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            newest["kv_cache_usage"] = scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            newest["preemptions"] += iteration_stats.num_preempted_reqs
        super().record(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)
