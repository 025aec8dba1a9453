"""Everything that touches vLLM's engine and its internals.

Read ``engine`` (requests; ``commit``: pause, exchange, label what follows, resume), then ``boot`` (how an engine
starts: for serving, for evaluation, for training) with ``engine_process`` (a server's engine, forked once vLLM is
imported) and ``tied_python`` (the Python of an engine that is not, which dies with the server). New weights into a live
engine: ``weight_update`` (what is called inside vLLM's worker), ``standby_weights`` (the second set of weights, and its
exchange with the one that serves), ``adapters`` (low-rank adapters beside them).

What comes out: ``response_collector`` (vLLM's scheduler: sends whole responses, and notes which policy sampled which
token), ``per_request_logprobs`` (vLLM's sampler, for each request with the logprobs that it asks for, and no more),
``offline_worker`` (an evaluation's other weights, and its log-probabilities of given tokens at another temperature),
``detokenizer`` (text of tokens while they come), ``stat_logger`` (the engine's newest numbers, for admission and
metrics). For /v1: ``openai`` (vLLM's own OpenAI handlers over our engine). For training: ``tool_calls`` (calls in a
response, found by vLLM's parsers). ``compat`` (what is used beyond public interfaces, and the versions it was tested
with).
"""
