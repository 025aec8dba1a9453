"""Keeps the lake in order: compaction, retention, erasure.

Read ``maintain`` (compact, vacuum, retain), then ``erasure`` (what is known of a user, a tenant or a response goes for
good) and ``vacuum`` (removes at once what the current version does not need). ``external_sort`` (sorts more rows than
memory holds).
"""
