"""Logs and metrics: ``log_format``, ``metrics`` (for Prometheus) and ``prometheus_counters`` (cheap to count)."""
