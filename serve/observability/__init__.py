"""Logs, metrics, traces: ``log_format`` (lines as text or JSON, with a request's ids), ``metrics`` (counters and gauges
for Prometheus), ``tracing`` (OpenTelemetry spans), ``audit`` (who did what to keys, policies and data).
"""
