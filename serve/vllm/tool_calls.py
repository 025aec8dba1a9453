"""Tool calls in a response, found by vLLM's parsers as /v1 finds them."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager


class ToolCallParser:
    """One of vLLM's parsers, by its name, for one set of tools."""

    def __init__(self, name: str, tokenizer: Any, tools: Sequence[dict[str, Any]]) -> None:
        """Raises ValueError if there is no such parser, it can't work with the tokenizer, or a tool is none."""
        try:
            parser = ToolParserManager.get_tool_parser(name)
        except KeyError:
            known = sorted({*ToolParserManager.tool_parsers, *ToolParserManager.lazy_parsers})
            raise ValueError(f"{name!r} is none of vLLM's tool parsers: {', '.join(known)}") from None
        # A policy in training samples calls that are none, and each would be a traceback in the log.
        logging.getLogger(parser.__module__).setLevel(logging.CRITICAL)
        self._request = ChatCompletionRequest(messages=[], tools=list(tools), tool_choice="auto")
        self._parser = parser(tokenizer, self._request.tools)
        self._request = self._parser.adjust_request(self._request)

    @property
    def skip_special_tokens(self) -> bool:
        """Whether the text to parse is without special tokens."""
        return bool(self._request.skip_special_tokens)

    def parse(self, text: str) -> tuple[str, list[tuple[str, Any]]]:
        """(the text without its calls, (name, arguments) of each): arguments as their JSON says, or as they stand."""
        found = self._parser.extract_tool_calls(text, self._request)
        if not found.tools_called:
            return text, []
        return found.content or "", [(c.function.name, _parsed(c.function.arguments)) for c in found.tool_calls]


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
