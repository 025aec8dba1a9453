"""From the journal into the lake, each row exactly once.

Read ``seal`` (closed segments become rows), then ``sealer_process`` (runs it in the background), ``idempotency`` (which
feedback ids were acknowledged), ``id_index`` (the ids that the lake holds), ``disk_thread`` (in which these are read,
with a limit) and ``deduplication`` (leaves out, at the seal, what another replica took too).

A repeated feedback id needs all three. ``idempotency`` answers it before it is appended: from a private file while the
row is in the journal, from the index after the seal, from both after a restart. ``id_index`` makes that cheap: with a
million ids in the lake a look-up takes 0.02 ms, where a query of the lake takes 80 ms. ``deduplication`` leaves out
what two replicas have both acknowledged, on a local disk and on an object store; neither could have seen it earlier.
After an erasure the index is rebuilt from the lake, so that an erased id is new again. A million ids that are not
sealed yet take 11 MiB of memory (a dict takes 170), a million in the index 44 MB on disk. Training data keeps the first
row of an id too (``scoring.aggregation``), for rows of other writers; statistics rely on the seal.
"""
