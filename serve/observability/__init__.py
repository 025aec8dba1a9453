"""Logs and metrics: ``log_format``, ``metrics`` (for Prometheus), ``prometheus_counters`` (cheap where counted)."""
