"""The prompts that policies are judged by, which nothing is learned from, even if traffic has them too.

**Of a suite.** A prompt of traffic is that of a suite's item if its token ids are, or its text in normal form (case,
white space, invisible characters and compatibility forms of Unicode don't count), whichever way either came: as text,
as messages, or rendered by the chat template already. Of messages, the system's don't count; a conversation with an
item in any of its turns has that prompt.

**Of the held-out slice.** A hash puts a share of all prompts into it. What is hashed is how a conversation opens: the
first message of its user, in normal form, or the text of a prompt that is no conversation. A later turn's prompt
repeats it, so that all turns of a conversation are on one side. Neither tenant nor system prompt nor the way it came
changes the side, and a larger share only adds to the slice. Texts that a client joins to a conversation by itself,
otherwise than by the chat template, are prompts of their own.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

from evaluation.suites.suite import Item, Suite
from feedback.tokenizers import load_tokenizer
from serve.generation.tokenizer import Text
from serve.policies.store import OWN

HELD_OUT: Final = "of a held-out suite"
IN_SLICE: Final = "of the held-out slice"
NOT_IN_SLICE: Final = "not of the held-out slice"
"""Why something is left out."""

Side = Literal["rest", "slice"]
"""Of the held-out slice: all other prompts, or those in it."""

_SYSTEM: Final = ("system", "developer")
_SENTINEL: Final = "millrace"
_ANSWER: Final = "ecarllim"


@dataclass(frozen=True)
class HeldOut:
    """The items of some suites as a policy's tokenizer and chat template write them, and the held-out slice.

    ``share``: of the prompts that are in the slice. ``learned``: the side that is learned from. Without a policy, texts
    stand for themselves, and there are no token ids.
    """

    items: tuple[Item, ...] = ()
    policy: Path | None = None
    share: float = 0.0
    learned: Side = "rest"

    @classmethod
    def load(cls, suites: Iterable[Path], policy: Path, share: float = 0.0, learned: Side = "rest") -> HeldOut:
        """Raises SuiteError if a suite can't be read."""
        return cls(tuple(item for path in suites for item in Suite.load(path).items), policy, share, learned)

    def reason(self, row: Mapping[str, Any]) -> str | None:
        """Why nothing is learned from a row's prompt; None if it may be.

        Args:
            row: prompt_token_ids; prompt, the text that they came of, or None; messages, JSON, or None.
        """
        if self.contains(row):
            return HELD_OUT
        if self.learned == "slice":
            return None if self.in_slice(row) else NOT_IN_SLICE
        return IN_SLICE if self.in_slice(row) else None

    def contains(self, row: Mapping[str, Any]) -> bool:
        """Whether a row's prompt is that of an item of a suite. ``row``: as of ``reason``."""
        if not self.items:
            return False
        token_ids, texts = self._known
        if _digest_of(row["prompt_token_ids"]) in token_ids:
            return True
        return not texts.isdisjoint(self.keys(row))

    def keys(self, row: Mapping[str, Any]) -> set[str]:
        """The ``prompt_key`` of every item that a row's prompt would be that of. ``row``: as of ``reason``."""
        return {_key(text) for text in self._forms(row)}

    def in_slice(self, row: Mapping[str, Any]) -> bool:
        """Whether a row's prompt is of the held-out slice. ``row``: as of ``reason``."""
        return self.share > 0 and position(self.opening(row)) < self.share

    def opening(self, row: Mapping[str, Any]) -> str:
        """What puts a row's prompt on its side, in normal form. ``row``: as of ``reason``."""
        if row.get("messages") is not None:
            messages = json.loads(row["messages"])
            users = [message for message in messages if message.get("role") == "user"]
            return normal(text_of(users[0])) if users else conversation(messages)
        if row["prompt"] is not None:
            return normal(self._first_turn(row["prompt"]) or row["prompt"])
        ids = row["prompt_token_ids"]
        first = self._first_turn(self._tokenizer.decode(ids, skip_special_tokens=False))
        return normal(first or self._tokenizer.decode(ids, skip_special_tokens=True))

    def _forms(self, row: Mapping[str, Any]) -> Iterable[str]:
        """The texts that a row's prompt may be known by, in normal form."""
        if row["prompt"] is not None:
            rendered = [row["prompt"]]
        else:
            ids = row["prompt_token_ids"]
            rendered = [self._tokenizer.decode(ids, skip_special_tokens=skip) for skip in (False, True)]
        for text in rendered:
            yield normal(text)
            if (last := self._last_turn(text)) is not None:
                yield normal(last)
        if row.get("messages") is not None:
            messages = json.loads(row["messages"])
            yield conversation(messages)
            yield from (normal(text_of(message)) for message in messages if message.get("role") == "user")

    @cached_property
    def _known(self) -> tuple[frozenset[bytes], frozenset[str]]:
        """Digests of the items' token ids, and keys of their texts in normal form."""
        by = None if self.policy is None else _tokenizer_files(self.policy)
        key = hashlib.sha256("\n".join([str(by), *(item.model_dump_json() for item in self.items)]).encode()).digest()
        if (found := _KNOWN.get(key)) is None:
            _KNOWN.clear()  # a process that trains again and again has the same suites, or newer ones
            found = _KNOWN[key] = frozenset(self._token_ids()), frozenset(map(_key, self._texts()))
        return found

    def _token_ids(self) -> Iterator[bytes]:
        if self.policy is None:
            return
        prompts = [item.prompt for item in self.items if item.prompt is not None]
        rendered = [text for text in self._rendered if text is not None]
        text = Text(self._tokenizer)
        for texts, special in ((prompts, True), (prompts, False), (rendered, False)):
            encoded = (text.token_ids(one, special) for one in texts)
            yield from (_digest_of(ids) for ids in encoded if ids)

    def _texts(self) -> set[str]:
        found = {conversation(_messages(item)) for item in self.items}
        return (found | {normal(text) for text in self._rendered if text is not None}) - {""}

    @cached_property
    def _rendered(self) -> list[str | None]:
        """Items as the chat template writes them; None if there is no template, or it takes no such messages."""
        return [self._render(_messages(item)) for item in self.items]

    def _render(self, messages: Sequence[Mapping[str, Any]], *, to_answer: bool = True) -> str | None:
        if self.policy is None or not self._tokenizer.chat_template:
            return None
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=to_answer))
        except Exception:  # noqa: BLE001  a template is a program, which may raise anything; then traffic can't have the item so either
            return None

    def _last_turn(self, text: str) -> str | None:
        """The user's last message in a prompt that the client has rendered; None if it has not."""
        before, after = self._turn
        if not before or not after or not text.endswith(after):
            return None
        _, found, last = text.removesuffix(after).rpartition(before)
        return last if found else None

    def _first_turn(self, text: str) -> str | None:
        """The user's first message in a prompt that the client has rendered; None if it has not."""
        before, after = self._turn
        if not before or not self._answered:
            return None
        _, _, rest = text.partition(before)
        first, answered, _ = rest.partition(self._answered)
        if answered:
            return first
        return rest.removesuffix(after) if rest and after and rest.endswith(after) else None

    @cached_property
    def _answered(self) -> str:
        """What the chat template puts between a user's message and the answer to it; empty if that can't be said."""
        talk = [{"role": "user", "content": _SENTINEL}, {"role": "assistant", "content": _ANSWER}]
        _, _, rest = (self._render([*talk, {"role": "user", "content": "a"}]) or "").partition(_SENTINEL)
        between, found, _ = rest.partition(_ANSWER)
        return between if found else ""

    @cached_property
    def _turn(self) -> tuple[str, str]:
        """What the chat template puts before and after the user's last message, wherever in a conversation that is."""
        user, other = {"role": "user", "content": _SENTINEL}, {"role": "user", "content": "a"}
        alone, later = self._render([user]), self._render([other, {"role": "assistant", "content": "b"}, user])
        if alone is None or later is None or _SENTINEL not in alone or _SENTINEL not in later:
            return "", ""
        (first, _, after), (second, _, _) = alone.rpartition(_SENTINEL), later.rpartition(_SENTINEL)
        common = next(
            (n for n in range(min(len(first), len(second))) if first[-1 - n] != second[-1 - n]),
            min(len(first), len(second)),
        )
        before = first[len(first) - common :]
        # The end of a turn before it isn't part of it: where the template puts a system's message of its own first, and
        # a client renders none, nothing stands before the user's.
        _, _, unanswered = (self._render([user], to_answer=False) or "").rpartition(_SENTINEL)
        end = next((after[:n] for n in range(len(after), 0, -1) if unanswered.startswith(after[:n])), "")
        return before.removeprefix(end) or before, after

    @cached_property
    def _tokenizer(self) -> Any:
        assert self.policy is not None
        return load_tokenizer(self.policy)


_KNOWN: Final[dict[bytes, tuple[frozenset[bytes], frozenset[str]]]] = {}
"""Of the last suites and tokenizer that were asked for."""


def _tokenizer_files(policy: Path) -> str:
    """A digest of a policy's files but its weights and the store's own: tokenizer and templates are among them."""
    found = hashlib.sha256()
    for path in sorted(policy.rglob("*")):
        if path.is_file() and not OWN.fullmatch(path.name) and path.suffix not in (".safetensors", ".bin"):
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            found.update(f"{path.relative_to(policy)} {digest}\n".encode())
    return found.hexdigest()


def _digest_of(token_ids: Iterable[int]) -> bytes:
    return hashlib.sha256(array("q", token_ids).tobytes()).digest()


def position(opening: str) -> float:
    """Where a prompt lies from 0 to 1, by a hash of what ``HeldOut.opening`` gives; below the share is the slice."""
    digest = hashlib.sha256(opening.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def prompt_key(item: Item) -> str:
    """What a prompt is recognised by, in any suite: a hash of it in normal form, without what the system says."""
    return _key(normal(item.prompt) if item.prompt is not None else conversation(item.messages or ()))


def _key(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


def normal(text: str) -> str:
    """A text without what does not change its meaning."""
    if text.isascii():  # which has no such characters and forms, and most of English is
        return " ".join(text.casefold().split())
    seen = "".join(character for character in text if unicodedata.category(character) != "Cf")
    folded = unicodedata.normalize("NFKC", seen).casefold()
    return " ".join(unicodedata.normalize("NFKC", folded).split())


def conversation(messages: Sequence[Mapping[str, Any]]) -> str:
    """Messages in normal form, without the system's: a single one is its text, as a prompt of that text is."""
    turns = [message for message in messages if message.get("role") not in _SYSTEM]
    if len(turns) == 1:
        return normal(text_of(turns[0]))
    return "\0".join(f"{turn.get('role')}: {normal(text_of(turn))}" for turn in turns)


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message; what is no text in it, such as an image or a call of a tool, as JSON."""
    content = message.get("content")
    texts = [_part_text(part) for part in (content if isinstance(content, list) else [content or ""])]
    if calls := message.get("tool_calls"):
        texts.append(json.dumps(calls, sort_keys=True))
    return "\n".join(texts)


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    text = part.get("text") if isinstance(part, Mapping) else None
    return text if isinstance(text, str) and text else json.dumps(part, sort_keys=True)


def _messages(item: Item) -> Sequence[Mapping[str, Any]]:
    return item.messages if item.messages is not None else [{"role": "user", "content": item.prompt}]
