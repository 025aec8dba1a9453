"""Child processes: ``children`` (starts, follows and stops them), ``subreaper`` (leaves nothing of them behind)."""
