"""The append-only log on local disk: a row is acknowledged when the disk has it, and not before.

Read ``writer`` (what callers use), then ``session`` (one session of the writer), ``segment`` (one file), ``codec``
(rows to Arrow), ``entry`` (a row that waits), ``streams`` (responses in progress), ``recovery`` (after a crash).
"""
