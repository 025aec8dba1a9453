"""Text to token ids and back, as the policy's tokenizer does it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, Final

from feedback.tokenizers import rust_part

CONTEXT_TOKENS: Final = 6  # of the prompt, that the first response tokens are decoded together with
_HALF: Final = "\ufffd"  # what bytes decode to that are no whole character
_MOST_HALVES: Final = 16  # tokens at the end of a prompt that may be no whole character, for it to be a context at all
_LONG_CHARACTERS: Final = 8192  # past this, encoding takes long enough to be done beside the event loop


def context_of(prompt: list[int], decode: Callable[[list[int]], str]) -> list[int]:
    """The tokens that a response is decoded together with: the prompt's last ones, without a character that is cut."""
    for end in range(len(prompt), max(0, len(prompt) - _MOST_HALVES), -1):
        context = prompt[max(0, end - CONTEXT_TOKENS) : end]
        if not decode(context).endswith(_HALF):
            return context
    return []


class Text:
    """A Hugging Face tokenizer. Where it is a fast one, its Rust part is called directly, at a tenth of the time."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._fast = rust_part(tokenizer)
        self.longest_token = max(len(token) for token in tokenizer.get_vocab())
        """Characters; a text of more than these times the context's tokens doesn't fit, whatever it says."""

    @property
    def least_characters(self) -> int:
        """Of a prompt: 0 where the tokenizer makes a token of no text at all."""
        return 0 if self.token_ids("", True) else 1

    @property
    def has_chat_template(self) -> bool:
        """Whether chat messages can be put into text."""
        return bool(self.tokenizer.chat_template)

    def chat(
        self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None, prompt: bool = True
    ) -> str:
        """Messages in the policy's own template. Raises what the template raises.

        ``tools``: what the policy may call, as OpenAI's API has them. ``prompt``: ready for its answer.
        """
        how: dict[str, Any] = {} if tools is None else {"tools": tools}
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt, **how))

    async def encode(self, text: str, *, special_tokens: bool) -> list[int]:
        """Token ids; ``special_tokens``: with those that the tokenizer puts around a text."""
        if len(text) > _LONG_CHARACTERS:
            return await asyncio.to_thread(self.token_ids, text, special_tokens)
        return self.token_ids(text, special_tokens)

    def prompt(self, prompt: str | list[dict[str, Any]]) -> tuple[str, str | None, list[int]]:
        """Of text or chat messages the text that is tokenised, the messages as JSON, and the token ids.

        As the server makes them of a request. Raises what the template raises.
        """
        if isinstance(prompt, str):
            return prompt, None, self.token_ids(prompt, special_tokens=True)
        rendered = self.chat(prompt)
        return rendered, json.dumps(prompt, ensure_ascii=False), self.token_ids(rendered, special_tokens=False)

    def response(self, prompt: list[int], token_ids: list[int]) -> str:
        """Text of a response, decoded with the end of its prompt, since some tokenizers join over the seam."""
        if not token_ids:
            return ""
        context = context_of(prompt, self._decode)
        before, both = self._decode(context), self._decode(context + token_ids)
        return both[len(before) :] if both.startswith(before) else self._decode(token_ids)

    def decode(self, token_ids: list[int]) -> str:
        """Text of any token ids, special ones left out."""
        return self._decode(token_ids)

    def token_ids(self, text: str, special_tokens: bool) -> list[int]:
        """Token ids, at once; see ``encode``."""
        if self._fast is not None:
            ids: list[int] = self._fast.encode(text, add_special_tokens=special_tokens).ids
            return ids
        return list(self.tokenizer.encode(text, add_special_tokens=special_tokens))

    def _decode(self, token_ids: list[int]) -> str:
        decoder = self._fast if self._fast is not None else self.tokenizer
        return str(decoder.decode(token_ids, skip_special_tokens=True))
