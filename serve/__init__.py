"""The current policy behind HTTP: policy store, vLLM engine, API, swap, fleet.

Read ``runtime`` (starts, drains and stops a server's parts) with ``api_processes`` (what of them each process has that
answers requests, where there are several), and ``app`` (FastAPI and uvicorn over them), then follow a request:
``middleware`` (before a route sees it: authentication, rate limits, bodies), ``api`` (the routes) with ``http`` (what
they share: JSON in and out, errors) and ``static_files`` (of pages), ``admission`` (whether a request may begin),
``recorded_request`` (the one path that samples and records, for both APIs) with ``time_limit`` (for its many short
waits), ``generation`` (what a request is made of: sampling parameters, token ids, rows), ``recorder`` (rows to the
journal), ``reading`` (what is looked up in the lake meanwhile), ``engine`` (what that path needs of an engine),
``vllm`` (vLLM's engine, and new weights into it).

Follow a policy: ``policies`` (the store and the serving pointer), ``swap`` (into a running engine), ``fleet`` (into all
replicas). For all of them: ``config`` (every setting of the server), ``gpus`` (what the driver says of each),
``kv_cache`` (how long a context and how large a KV cache an engine gets), ``standby_room`` (whether a second set of
weights has room beside it), ``observability`` (logs and metrics), ``local_ray`` (a Ray on this machine, for a fleet and
for training).
"""
