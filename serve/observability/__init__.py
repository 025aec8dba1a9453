"""Logs and metrics: ``log_format`` and ``metrics`` (for Prometheus)."""
