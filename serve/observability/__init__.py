"""Logs and metrics: ``log_format`` (lines as text or JSON, with a request's ids), ``metrics`` (counters and gauges for
Prometheus), ``audit`` (who did what to keys, policies and data).
"""
