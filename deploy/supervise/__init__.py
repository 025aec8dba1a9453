"""Child processes: ``children``, and ``subreaper``, which leaves nothing of them behind."""
