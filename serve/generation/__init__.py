"""A request on its way through the server, without HTTP or vLLM in it.

``request`` (a request to the engine and its responses), ``recorded`` (samples and records it, for both APIs), ``tokenizer`` (text to token ids and back),
``interaction_rows`` (rows of the ``interactions`` table), ``variant`` (responses of a policy on trial).
"""
