"""Child processes: ``up`` (server and scheduler together), ``children``, ``subreaper`` (leaves nothing behind)."""
