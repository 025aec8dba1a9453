"""The current policy behind HTTP: policy store, vLLM engine, API, swap, fleet.

Read ``app`` (what a server consists of), then follow a request: ``middleware``, ``api``, ``generation``, ``vllm``.
Follow a policy: ``policies`` (the store), ``swap`` (into a running engine), ``fleet`` (into all replicas).
"""
