"""Text of tokens while they come, the same as that of all of them at once. Importing this imports vLLM.

vLLM primes tokenizers' DecodeStream with the prompt. Where that ends within a character (or with U+FFFD, which is what
half a character decodes to), the stream takes all of the prompt for text that is still to be returned: the response
begins with it, and stop texts are looked for in it. And when a response ends within a character, what was held back of
it is dropped. vLLM has no setting for either, so its class is replaced by this one (vllm.v1.engine.detokenizer, 0.32).
It takes 2.4 µs per token where vLLM's takes 1.6.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers.decoders import DecodeStream
from vllm.v1.engine import detokenizer as vllms
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

from serve.generation.tokenizer import CONTEXT_TOKENS, context_of

if TYPE_CHECKING:
    from transformers import TokenizersBackend
    from vllm.v1.engine import EngineCoreRequest


class Detokenizer(FastIncrementalDetokenizer):
    """vLLM's, primed with whole characters of the prompt, and with an end."""

    output_text: str

    def __init__(self, tokenizer: TokenizersBackend, request: EngineCoreRequest) -> None:
        super().__init__(tokenizer, request)
        self._before = context_of(request.prompt_token_ids or [], self._decode)  # the last tokens that have their text
        self._held: list[int] = []  # those after them, which have none yet
        self.stream = DecodeStream(ids=self._before, skip_special_tokens=self.skip_special_tokens)

    def decode_next(self, next_token_id: int) -> str:
        text = super().decode_next(next_token_id)
        self._held.append(next_token_id)
        if text:
            self._before, self._held = (self._before + self._held)[-CONTEXT_TOKENS:], []
        return text

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        stop = super().update(new_token_ids, stop_terminated)
        if stop is not None:
            self._held = []
        return stop

    def get_next_output_text(self, finished: bool, delta: bool) -> str:
        """As vLLM's, with the rest at the end."""
        if finished and self._held:
            self._add_the_rest()
        return super().get_next_output_text(finished, delta)

    def _add_the_rest(self) -> None:
        before, both = self._decode(self._before), self._decode(self._before + self._held)
        rest = both[len(before) :] if both.startswith(before) else self._decode(self._held)
        self._held = []
        self.output_text += rest
        if self.num_output_tokens() > self.min_tokens:
            found = vllms.check_stop_strings(self.output_text, len(rest), self.stop, self.include_stop_str_in_output)
            if found is not None and found[1] != -1:
                self.output_text = self.output_text[: found[1]]

    def _decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=self.skip_special_tokens)


def install() -> None:
    """Have vLLM's clients of this process make their text by it."""
    if vllms.FastIncrementalDetokenizer not in (FastIncrementalDetokenizer, Detokenizer):
        raise RuntimeError("vLLM's detokenizer has been replaced by another one already")
    vllms.FastIncrementalDetokenizer = Detokenizer
