"""What Prometheus and Grafana see of the loop, and what they are told to do with it.

Read ``loop`` (the series, from what is on record: cycles, ledger, pointer, experiments, runs), then ``traffic`` (those
from the lake), ``listener`` (``GET /metrics`` of the scheduler),
``dashboards`` (Grafana's, as JSON), ``alerts`` (Prometheus' rules).
"""
