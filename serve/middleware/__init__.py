"""What happens to every request before a route sees it.

Read ``request_context`` (the one ASGI middleware), then ``authentication`` (which principal a request is from) with
``keyring`` and ``api_keys``, ``rate_limits`` with ``token_buckets``, ``bodies`` and ``connections`` (bounds on what
strangers may send).
"""
