"""What happens to every request before a route sees it.

Read ``request_context`` (the one ASGI middleware: request id and trace, then authentication and rate limits), then
``authentication`` (a request's headers to a principal, its scope, 401 and 403), ``browser_sessions`` (a cookie that
stands for a key), ``keyring`` (is this key good: known, not revoked, not expired; and which scope a route needs),
``api_keys`` (the key file), ``refusals`` (keys that are not good: counted, slowed down by address, on record),
``rate_limits`` (requests and tokens per minute of a key), ``token_buckets`` (the arithmetic of those), ``bodies`` (read
in time, and in bounded memory), ``connections`` (uvicorn's, with bounds on the rest of a request).
"""
