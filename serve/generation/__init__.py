"""A request on its way through the server, without HTTP or vLLM in it.

``request`` (what is asked of the engine, and what it gives), ``tokenizer`` (text to token ids and back),
``interaction_rows`` (rows of the ``interactions`` table), ``variant`` (responses of a policy on trial).
"""
