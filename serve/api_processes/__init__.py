"""Several API processes in front of one engine (``serve.api_processes``).

The first one is a whole server (``serve.runtime``): the engine is its child, and it alone follows the policy store,
seals, knows which feedback is recorded, and has the console and the metrics. A further one answers the requests for
responses that reach it: it accepts on the same port, is a client of the same engine, and has a journal of its own.
All else it hands to the first.

Read ``process`` (what every API process has, a single one too), then ``further`` (a further one, and what it is started
with) and ``first`` (how the first one starts the others, and what it tells them). Between them: ``link`` (calls in both
directions over a socket), ``forwarding`` (a request and its answer over that), ``summed_metrics`` (what all have
counted, as one text).
"""
