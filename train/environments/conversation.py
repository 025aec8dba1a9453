"""The tokens of an episode: those of the policy's turns as it sampled them, between them the chat template's text.

What was sampled is never tokenised again. The template renders the whole conversation after each turn; what it has
behind the policy's last turn is what the environment said, and is tokenised by itself. A template that renders earlier
turns otherwise than the policy saw them (Qwen3's takes ``<think>`` out of turns before a user's message) leaves no such
text: the next turn then begins a sequence of its own, whose prompt is what a server would send to the policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serve.generation.tokenizer import Text
from train.environments.environment import Message, Tool
from train.environments.episode import EpisodeDropped, TrainedSequence


class Conversation:
    """One episode's messages, and the sequences that are learned from."""

    def __init__(
        self, text: Text, messages: list[Message], tools: Sequence[Tool], *, split: bool, vocabulary: int
    ) -> None:
        """Begin with the first messages.

        Args:
            split: have a turn begin a sequence where the turns before were rewritten; False drops the episode.
            vocabulary: of the model, whose tokens have ids below it; a tokenizer may know more.

        Raises:
            EpisodeDropped: the template fails, or there are no tokens for what it renders.
        """
        self._text, self._tools, self._split, self._vocabulary = text, list(tools), split, vocabulary
        self.messages = messages
        self.rendered = self._render(messages, prompt=True)
        self.sequences = [TrainedSequence(self._token_ids(self.rendered))]

    @property
    def context(self) -> list[int]:
        """Token ids that the next turn follows."""
        last = self.sequences[-1]
        return last.prompt + last.token_ids

    def add_turn(self, token_ids: list[int], log_probs: list[float], policies: Sequence[tuple[int, int]] = ()) -> None:
        """What the policy has sampled, the token that ended it included; ``policies``: as of a ``Sample``."""
        self.sequences[-1].add(token_ids, log_probs, sampled=True, policies=policies)

    def add_observation(self, turn: Message, token_ids: list[int], observation: list[Message], *, ended: bool) -> None:
        """What is said to the policy's last turn.

        Args:
            turn: the policy's, as a message.
            token_ids: its tokens; ``ended``: the last one of them ended it.

        Raises:
            EpisodeDropped: as of ``__init__``; or earlier turns are rewritten, and the episode isn't to be split.
        """
        before, self.messages = self.messages, [*self.messages, turn, *observation]
        raw = self._raw(token_ids)
        end = self._raw(token_ids[-1:]) if ended else ""
        full = self._render(self.messages, prompt=True)
        said = self._behind(full, [*before, turn], raw, end)
        if said is not None:
            new = self._token_ids(said)
            self.sequences[-1].add(new, [0.0] * len(new), sampled=False)
        elif self._split:
            self.sequences.append(TrainedSequence(self._token_ids(full)))
        else:
            raise EpisodeDropped("rewritten", self._difference(full))
        self.rendered = full

    def finished(self) -> list[TrainedSequence]:
        """The sequences, each up to the last token that was sampled."""
        return [of.trimmed() for of in self.sequences if any(of.sampled)]

    def _behind(self, full: str, messages: list[Message], raw: str, end: str) -> str | None:
        """What the template renders behind the policy's last turn; None if it renders other text before that.

        The turn may itself be rendered otherwise than it was sampled: spaces, or JSON of a call. Then its end is found
        by the token that ended it.
        """
        for turn in (raw, raw.removesuffix(end)):
            if full.startswith(self.rendered + turn):
                return full[len(self.rendered + turn) :]
        so_far = self._render(messages, prompt=False)
        if not (so_far.startswith(self.rendered) and full.startswith(so_far)):
            return None
        at = so_far.rfind(end, len(self.rendered)) if end else -1
        return None if at < 0 else so_far[at + len(end) :] + full[len(so_far) :]

    def _difference(self, full: str) -> str:
        """Where a rendering departs from what the policy saw, for a message."""
        seen = self.rendered
        at = next((i for i, (a, b) in enumerate(zip(seen, full, strict=False)) if a != b), min(len(seen), len(full)))
        return (
            "the chat template renders earlier turns otherwise once there is a later one: "
            f"{full[at : at + 40]!r} behind {full[max(0, at - 20) : at]!r}"
        )

    def _render(self, messages: list[Message], *, prompt: bool) -> str:
        try:
            return self._text.chat(messages, tools=self._tools or None, prompt=prompt)
        except Exception as error:  # a template is a program, which may raise anything
            raise EpisodeDropped("template", f"the chat template fails: {type(error).__name__}: {error}") from error

    def _token_ids(self, rendered: str) -> list[int]:
        try:
            token_ids = self._text.token_ids(rendered, special_tokens=False)
        except Exception as error:  # of half a character, as the JSON of a call may have
            raise EpisodeDropped("tokens", f"the tokenizer fails: {type(error).__name__}: {error}") from error
        if not token_ids:
            raise EpisodeDropped(
                "template", "the chat template renders no token where the policy should read something"
            )
        if (largest := max(token_ids)) >= self._vocabulary:
            unknown = self._text.tokenizer.convert_ids_to_tokens(largest)
            raise EpisodeDropped(
                "tokens", f"the tokenizer has {unknown!r} as token {largest}, and the model {self._vocabulary} tokens"
            )
        return token_ids

    def _raw(self, token_ids: list[int]) -> str:
        return str(self._text.tokenizer.decode(token_ids, skip_special_tokens=False))


def assistant_message(content: str, tool_calls: Sequence[Any]) -> Message:
    """A turn of the policy as a client of /v1 sends it back."""
    message: Message = {"role": "assistant", "content": content}
    if tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in tool_calls
        ]
    return message
