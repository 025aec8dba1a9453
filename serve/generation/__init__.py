"""What a request is made of on its way through the server, without HTTP or vLLM in it.

``request`` (what goes to the engine, and its responses), ``tokenizer`` (text to token ids and back; prompts of /v1 are
tokenised by vLLM, see ``serve.vllm.openai.handlers``), ``interaction_rows`` (engine output to rows of the
``interactions`` table), ``variant`` (which responses a canary policy sampled).
"""
