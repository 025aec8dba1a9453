"""Everything that touches vLLM's engine and its internals.

Read ``engine`` first, then ``boot`` (how an engine starts: for serving, for evaluation, for training), then
``response_collector`` (vLLM's scheduler, which sends whole responses), ``standby_weights`` and ``weight_update`` (new
weights into a live engine), ``openai_engine``, ``openai_request`` and ``openai_handlers`` (vLLM's own OpenAI handlers
over our engine), ``detokenizer`` and ``stat_logger``. ``compat`` lists what is used beyond public interfaces.
"""
