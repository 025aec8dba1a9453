"""Several replicas of the server on Ray Serve, which change their policy together.

Read ``deployment`` (starts it all), then ``planner`` (the next step, a pure function), ``controller`` (drives it),
``state`` and ``reports`` (the durable record and the replicas' reports), ``replica`` and ``member`` (one replica's
part), ``router``, ``proxy`` and ``proxy_state`` (in Ray Serve's proxies), ``rate_limit_store``.
"""
