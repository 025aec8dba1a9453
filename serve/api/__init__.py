"""The HTTP routes.

Read ``generate`` (POST /generate), then ``completions`` (OpenAI's routes below /v1) with ``completions_request`` (which
fields their bodies may have); both translate bodies for ``serve.recorded_request`` and send their answers with
``answers`` (at once, or as server-sent events). Then ``feedback`` (POST /feedback and /feedback/batch), ``admin``
(/health, /ready, /policy, /metrics, /server/sleep and /server/wake), ``experiments`` (what is tried on live traffic),
``bounds`` (how much a JSON body may hold), ``fast_routes`` (/generate and /feedback, past FastAPI's layers),
``openapi`` (the OpenAPI document, with what FastAPI can't see), ``documentation`` (/docs, the page that shows it).
"""
