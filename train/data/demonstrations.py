"""Demonstrations: what people wrote in place of a response, as the tokens that the policy would have sampled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from feedback.tokenizers import load_tokenizer
from feedback.trusted_code import trusted
from serve.generation.tokenizer import Text


class UnfitTextError(ValueError):
    """A text can't be a response; the message says why, in a few words that are the same for all such texts."""


class DemonstrationTokenizer:
    """Tokenises texts with the policy's own tokenizer and ends them as the policy ends its responses.

    The answer to chat messages is what the chat template makes of it, after the prompt and up to the token that ends
    the turn. Any other text stands as it is, and the tokenizer's EOS ends it.
    """

    def __init__(self, policy: Path) -> None:
        self.policy = policy
        self.tokenizer: Any = load_tokenizer(policy)
        self._text = Text(self.tokenizer)
        added = self.tokenizer.added_tokens_decoder
        self.special = {*self.tokenizer.all_special_ids, *(token for token, of in added.items() if of.special)}

    def token_ids(
        self, text: str, *, prompt: str | None, prompt_token_ids: Sequence[int], messages: str | None
    ) -> list[int]:
        """The response's tokens, the one that ends it included.

        Args:
            text: the demonstration.
            prompt: the text of ``prompt_token_ids``, if there is one. Some tokenizers begin every text with a
                space that does not belong in the middle of one; the text is therefore tokenised where it stands.
            messages: JSON of the chat messages of the prompt, if it has any.

        Raises:
            UnfitTextError: it holds special tokens, with which a text could say where a turn ends and who speaks next,
                or characters that the tokenizer has no token for; or the chat template fails on it.
            ValueError: the policy has nothing to end a response with.
        """
        if not self.special.isdisjoint(self._text.token_ids(text, special_tokens=False)):
            raise UnfitTextError("text with special or unknown tokens")
        if messages is None or not self.tokenizer.chat_template:
            return [*self._after(prompt, prompt_token_ids, text), self.end]
        turn = self._after(prompt, prompt_token_ids, self._turn(prompt, messages, text))
        ends = [i for i, token in enumerate(turn) if token in self.stops]
        return turn[: ends[0] + 1] if ends else [*turn, self.end]

    def _turn(self, prompt: str | None, messages: str, text: str) -> str:
        """What the template puts after the prompt.

        Where the prompt was not made of the messages alone (tools, settings of the template), the text and what ends
        its turn.
        """
        turns = [*json.loads(messages), {"role": "assistant", "content": text}]
        try:
            conversation = str(self.tokenizer.apply_chat_template(turns, tokenize=False))
        except Exception as error:  # a template is a program, which may raise anything
            raise UnfitTextError("text that the chat template fails on") from error
        if prompt and conversation.startswith(prompt):
            return conversation[len(prompt) :]
        _, found, after = conversation.rpartition(text.strip() or text)
        return text + (after if found else "")

    def _after(self, prompt: str | None, prompt_token_ids: Sequence[int], text: str) -> list[int]:
        before = list(prompt_token_ids)
        for special_tokens in (False, True) if prompt is not None else ():
            whole = self._text.token_ids(f"{prompt}{text}", special_tokens)
            if whole[: len(before)] == before:  # else a token lies across the seam, or the tokenizer is another one
                return whole[len(before) :]
        return self._text.token_ids(text, special_tokens=False)

    @cached_property
    def end(self) -> int:
        """The token that ends a text."""
        if self.tokenizer.eos_token_id is None:
            raise ValueError(
                f"the tokenizer in {self.policy} has no EOS token, so nothing could end a demonstration; set "
                "eos_token in its tokenizer_config.json"
            )
        return int(self.tokenizer.eos_token_id)

    @cached_property
    def stops(self) -> set[int]:
        """The tokens that end a response when it is sampled: those that vLLM stops at."""
        from transformers import AutoConfig, GenerationConfig

        configured: Any = None
        if (self.policy / "generation_config.json").exists():
            configured = GenerationConfig.from_pretrained(self.policy).eos_token_id
        elif (self.policy / "config.json").exists():
            model = AutoConfig.from_pretrained(self.policy, trust_remote_code=trusted(self.policy))
            configured = GenerationConfig.from_model_config(model).eos_token_id
        return {self.end, *([configured] if isinstance(configured, int) else configured or ())}
