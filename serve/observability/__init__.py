"""Logs and metrics: ``log_format``, ``metrics`` (what Prometheus is given), ``prometheus_counters`` (cheap to count)."""
