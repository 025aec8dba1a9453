"""The append-only log on local disk: a row is acknowledged when the disk has it, and not before.

Read ``writer`` (what callers use: append, group commit), then ``session`` (one session of the writer, until a write
fails), ``segment`` (one file, each message with a checksum), ``codec`` (rows to Arrow), ``entry`` (a row that waits),
``streams`` (responses in progress), ``recovery`` (after a crash).
"""
