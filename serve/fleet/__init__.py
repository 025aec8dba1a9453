"""Several replicas of the server on Ray Serve, which change their policy together.

Read ``deployment`` (starts it all), then ``state`` (the desired state: a durable record, and each replica's task in
it), ``planner`` (the next step, a pure function), ``controller`` (takes the steps, one at a time), ``replica`` (a whole
server on Ray Serve) with ``member`` (its part in the fleet: takes a name, follows the record) and ``reports`` (which
replicas there are, and what each reports). Requests come by ``front`` (an HAProxy, from which they go straight to the
replicas), or, where it matters which replica answers, by Ray Serve's proxies. In those: ``router`` (which replica
answers: canary's share, sticky sessions), ``proxy`` (reads bodies, and answers where no replica does), ``proxy_state``
(what the two share), ``assignment`` (which policy of an experiment answers a request: what proxy, router and replica
agree on). One for all replicas: ``rate_limit_store`` (the token buckets of all keys).
"""
