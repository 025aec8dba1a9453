"""From the journal into the lake, each row exactly once.

Read ``seal`` (closed segments become rows), then ``sealer_process`` (runs it in the background), ``idempotency`` (which
feedback ids were acknowledged), ``id_index`` (the ids that the lake holds) and ``deduplication`` (between replicas).
"""
