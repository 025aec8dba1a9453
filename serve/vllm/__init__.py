"""Everything that touches vLLM's engine and its internals.

Read ``engine`` first, then ``response_collector`` (vLLM's scheduler, handing over whole responses), ``standby_weights``
and ``weight_update`` (new weights into a live engine), ``openai_engine``, ``openai_request`` and ``openai_handlers``
(vLLM's own OpenAI handlers over our engine), ``prefill``, ``detokenizer`` and ``metrics``.
"""
