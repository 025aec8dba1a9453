"""vLLM's own OpenAI handlers over our engine. Importing this imports vLLM's entrypoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import VLLMValidationError
from vllm.renderers.online_renderer import OnlineRenderer

from serve.vllm.openai.engine import CapturedEngine
from serve.vllm.openai.request import current

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    from serve.config import OpenAIConfig
    from serve.vllm.engine import Engine

_CONTENT_FORMAT: Final = "auto"


class Handlers:
    """The handlers of /v1, for an engine that runs; a swap changes nothing for them."""

    def __init__(self, engine: Engine, config: OpenAIConfig, name: str) -> None:
        """``name``: the model's, as clients know it."""
        client = cast("EngineClient", CapturedEngine(engine))
        reasoning_parser = client.vllm_config.structured_outputs_config.reasoning_parser
        parsers: dict[str, Any] = {
            "enable_auto_tools": config.tool_parser is not None,
            "tool_parser": config.tool_parser,
            "reasoning_parser": reasoning_parser,
            "chat_template": None,
            "chat_template_content_format": _CONTENT_FORMAT,
            "trust_request_chat_template": config.request_chat_template,
            "request_logger": None,
        }
        renderer = _Renderer(client.model_config, client.renderer, **parsers)
        self.models = OpenAIServingModels(client, [BaseModelPath(name=name, model_path=name)])
        self.completions = OpenAIServingCompletion(client, self.models, online_renderer=renderer, request_logger=None)
        self.chat = OpenAIServingChat(client, self.models, "assistant", online_renderer=renderer, **parsers)
        for handler in (self.completions, self.chat):
            # What generation_config.json names, top_k and such, would make traffic that training can't use.
            handler.default_sampling_params = {}


class _Renderer(OnlineRenderer):
    """vLLM's, with what it leaves to the engine checked before a stream's status line goes out."""

    async def render_completion(self, request: CompletionRequest, **options: Any) -> Any:
        """As vLLM's. Raises VLLMValidationError."""
        rendered = await super().render_completion(request, **options)
        if not isinstance(rendered, ErrorResponse):
            await self._check(rendered, "prompt", request.n, request.max_tokens)
        return rendered

    async def render_chat(self, request: ChatCompletionRequest, **options: Any) -> Any:
        """As vLLM's. Raises VLLMValidationError."""
        rendered = await super().render_chat(request, **options)
        if not isinstance(rendered, ErrorResponse):
            await self._check(rendered[1], "messages", request.n, request.max_completion_tokens or request.max_tokens)
        return rendered

    async def _check(self, prompts: Any, field: str, n: int | None, max_tokens: int | None) -> None:
        tokens = 0
        limit, vocabulary = self.model_config.max_model_len, self.model_config.get_vocab_size()
        for prompt in prompts:
            token_ids = prompt["prompt_token_ids"]
            if not token_ids:
                raise VLLMValidationError(f"{field}: there is no token in it", parameter=field)
            if len(token_ids) >= limit:
                raise VLLMValidationError(
                    f"{field}: {len(token_ids)} tokens leave no room for a response in the policy's context of {limit} "
                    "tokens",
                    parameter=field,
                )
            if prompt["type"] == "token" and (largest := max(token_ids)) >= vocabulary:
                raise VLLMValidationError(f"{field}: {largest} is no token id (0 to {vocabulary - 1})", parameter=field)
            most = limit if max_tokens is None else max(1, max_tokens)  # for 0 the engine samples a token, too
            tokens += len(token_ids) + (n or 1) * min(most, limit - len(token_ids))
        await current.get().active.budget.reserve(tokens)
