"""vLLM's own OpenAI handlers behind /v1, over our engine.

``handlers`` (vLLM's handlers), ``engine`` (what they take for the engine: every response is recorded on its way),
``request`` (one HTTP request, and what its rows say of it).
"""
