"""The current policy behind HTTP: policy store, vLLM engine, API, swap, fleet.

Read ``runtime`` (a server's parts and their life) and ``app`` (FastAPI and uvicorn over them), then follow a request:
``middleware``, ``api``, ``admission``, ``recorded_request`` (the one path that samples and records, for both APIs),
``recorder``, ``engine`` (what that path needs of an engine) and ``vllm``.
Follow a policy: ``policies`` (the store), ``swap`` (into a running engine), ``fleet`` (into all replicas).
"""
