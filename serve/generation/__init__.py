"""What a request is made of on its way through the server, without HTTP or vLLM in it.

``request`` (what goes to the engine, and its responses),
``tokenizer`` (text to token ids and back), ``interaction_rows`` (rows of the ``interactions`` table), ``variant``
(responses of a canary policy).
"""
