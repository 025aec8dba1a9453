"""How many users a server holds, where it breaks, and what limits it: ``make loadtest``.

``__main__`` (the run: a server if none is given, users by ``locustfile``, thresholds that decide the exit code),
``observe`` (what /metrics and this machine say meanwhile), ``figures`` (levels of users, what was used up, growth of
memory: pure functions), ``page`` (all of it as HTML).
"""
