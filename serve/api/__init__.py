"""The HTTP routes.

Read ``generate`` (POST /generate) with ``generate_stream``, then ``completions`` (/v1) with ``completions_request``,
``feedback`` and ``admin``. ``bounds`` says how much a body may hold, ``openapi`` what the OpenAPI page adds, and
``fast_routes`` is the short way to the two busiest routes.
"""
