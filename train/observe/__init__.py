"""What is seen of a run: ``progress`` (for the user), ``health`` (when it must end), ``trackers`` and ``hooks``."""
