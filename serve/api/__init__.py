"""The HTTP routes.

Read ``generate`` (POST /generate), then ``completions`` (/v1) with ``completions_request``; both translate bodies for
``serve.recorded_request`` and send their answers with ``answers``. Then ``feedback`` and ``admin``. ``bounds`` says
how much a body may hold, ``openapi`` what the OpenAPI page adds; ``fast_routes`` leads past FastAPI to two busy routes.
"""
