"""The engine's newest numbers, for admission and for ``millrace_engine_*``. Importing this imports vLLM.

vLLM's own Prometheus metrics are in prometheus_client's global registry. Of a response that is not streamed vLLM sees
one message (``serve.vllm.response_collector``): its times to the first token, and between tokens, are those of streams;
``millrace_first_token_seconds`` and ``millrace_inter_token_seconds`` are of all.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase


class StatLogger(StatLoggerBase):
    """Writes the newest numbers into a dict."""

    def __init__(self, newest: dict[str, float]) -> None:
        self._newest = newest

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Called by vLLM for each message of the engine's process."""
        newest = self._newest
        if scheduler_stats is not None:
            newest["running"] = scheduler_stats.num_running_reqs
            newest["waiting"] = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            newest["kv_cache_usage"] = scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            newest["preemptions"] += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        """Nothing to log."""
