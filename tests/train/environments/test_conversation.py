"""The tokens of an episode under chat templates of several kinds."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from deploy.examples.agent.task import TEMPLATE
from serve.generation.tokenizer import Text
from train.environments.conversation import Conversation, assistant_message
from train.environments.environment import ToolCall
from train.environments.episode import EpisodeDropped

THINKING = (  # as Qwen3's: what was thought is taken out of turns before a later message of the user
    "{% set last = messages | map(attribute='role') | list | join(',') %}"
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'assistant' and 'user' in (messages[loop.index:] | map(attribute='role') | list) %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
STRIPS = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% if m.role == 'assistant' %}<eos>{% endif %}" + (
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
USER = [{"role": "user", "content": "ab"}]


def text(template: str) -> Text:
    """Characters, and ``ab`` as a token of its own, which what was sampled need not use."""
    special = ["<pad>", "<eos>", "<user>", "<assistant>", "<tool>", "<think>", "</think>"]
    characters = [chr(i) for i in range(32, 127)]
    vocabulary = {token: i for i, token in enumerate([*special, *characters, "ab"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b")], unk_token="<pad>"))
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    fast.add_special_tokens({"additional_special_tokens": special[2:]})
    fast.chat_template = template
    return Text(fast)


def ids(of: Text, *tokens: str) -> list[int]:
    return [of.tokenizer.convert_tokens_to_ids(token) for token in tokens]


def played(
    template: str, turn: list[str], said: str, answer: list[dict[str, Any]], **others: Any
) -> tuple[Text, Conversation]:
    """A conversation after a turn of these tokens, which ``said`` is as text, and an answer to it."""
    of = text(template)
    conversation = Conversation(of, USER, [], split=others.pop("split", True), vocabulary=len(of.tokenizer))
    sampled = ids(of, *turn)
    conversation.add_turn(sampled, [-1.0] * len(sampled))
    message = assistant_message(said, others.pop("calls", []))
    conversation.add_observation(message, sampled, answer, ended=turn[-1] == "<eos>")
    return of, conversation


def test_tokens_stay_as_sampled_and_the_rest_is_the_templates() -> None:
    of, conversation = played(TEMPLATE, ["a", "b", "c", "<eos>"], "abc", [{"role": "user", "content": "ab"}])
    [sequence] = conversation.sequences
    assert sequence.prompt == ids(of, "<user>", "ab", "<assistant>")
    assert sequence.token_ids == ids(of, "a", "b", "c", "<eos>", "<user>", "ab", "<assistant>")
    assert sequence.token_ids[:2] != of.token_ids("ab", special_tokens=False), "tokenised anew it would be other tokens"
    assert sequence.sampled == [True] * 4 + [False] * 3
    assert sequence.log_probs == [-1.0] * 4 + [0.0] * 3
    assert conversation.context == sequence.prompt + sequence.token_ids


def test_what_nothing_was_sampled_after_is_not_learned_from() -> None:
    _, conversation = played(TEMPLATE, ["c", "<eos>"], "c", [{"role": "user", "content": "d"}])
    [sequence] = conversation.finished()
    assert sequence.sampled == [True, True]
    assert sequence.turn_ends == [1]


def test_a_call_that_the_template_writes_otherwise_stays_as_sampled() -> None:
    turn = [*"[ look( k = ", '"', "a", '"', *" ) ]", "<eos>"]
    calls = [ToolCall("call_0_0", "look", {"k": "a"})]
    of, conversation = played(TEMPLATE, turn, "", [{"role": "tool", "content": "x"}], calls=calls)
    assert '[look(k="a")]<eos>' in conversation.rendered
    [sequence] = conversation.sequences
    assert sequence.token_ids == ids(of, *turn, "<tool>", "x", "<assistant>")


def test_spaces_that_the_template_strips_stay_as_sampled() -> None:
    of, conversation = played(STRIPS, [" ", "c", " ", "<eos>"], " c ", [{"role": "user", "content": "d"}])
    [sequence] = conversation.sequences
    assert sequence.token_ids == ids(of, " ", "c", " ", "<eos>", "<user>", "d", "<assistant>")


THOUGHT = (["<think>", "c", "</think>", "d", "<eos>"], "<think>c</think>d")


def test_a_template_that_rewrites_earlier_turns_begins_a_sequence_with_what_a_server_would_send() -> None:
    user = {"role": "user", "content": "e"}
    of, conversation = played(THINKING, *THOUGHT, [user])
    first, second = conversation.sequences
    assert first.token_ids == ids(of, *THOUGHT[0])
    sent = of.chat([*USER, assistant_message(THOUGHT[1], []), user])
    assert "think" not in sent
    assert second.prompt == of.token_ids(sent, special_tokens=False) == conversation.context
    conversation.add_turn(ids(of, "f", "<eos>"), [-1.0, -2.0])
    assert [s.token_ids for s in conversation.finished()] == [ids(of, *THOUGHT[0]), ids(of, "f", "<eos>")]


def test_the_same_template_leaves_turns_alone_that_no_user_speaks_after() -> None:
    of, conversation = played(THINKING, *THOUGHT, [{"role": "tool", "content": "e"}])
    [sequence] = conversation.sequences
    assert sequence.token_ids == ids(of, *THOUGHT[0], "<tool>", "e", "<assistant>")


def test_a_rewritten_turn_drops_the_episode_where_it_is_not_to_be_split() -> None:
    with pytest.raises(EpisodeDropped, match="renders earlier turns otherwise") as dropped:
        played(THINKING, *THOUGHT, [{"role": "user", "content": "e"}], split=False)
    assert dropped.value.reason == "rewritten"


def test_a_template_that_fails_is_the_reason() -> None:
    with pytest.raises(EpisodeDropped, match="no tool here") as dropped:
        played(
            "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tool here') }}{% endif %}"
            "{{ m.content }}{% endfor %}",
            ["c", "<eos>"],
            "c",
            [{"role": "tool", "content": "x"}],
        )
    assert dropped.value.reason == "template"


def test_half_a_character_that_a_tool_repeats_of_the_json_of_a_call_drops_the_episode() -> None:
    calls = [ToolCall("call_0_0", "look", json.loads(r'{"k": "\ud800"}'))]
    answer = {"role": "tool", "content": f"no {calls[0].arguments['k']}"}
    with pytest.raises(EpisodeDropped, match="the tokenizer fails: TypeError") as dropped:
        played(TEMPLATE, ["c", "<eos>"], "", [answer], calls=calls)
    assert dropped.value.reason == "tokens"


def test_a_token_that_the_tokenizer_has_and_the_model_does_not_drops_the_episode() -> None:
    of = text(TEMPLATE)
    with pytest.raises(
        EpisodeDropped, match="the tokenizer has 'ab' as token 102, and the model 102 tokens"
    ) as dropped:
        Conversation(of, USER, [], split=True, vocabulary=len(of.tokenizer) - 1)
    assert dropped.value.reason == "tokens"


def test_a_template_that_does_not_say_where_a_turn_ends_still_has_what_comes_after_it() -> None:
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    of, conversation = played(plain, ["c", "<eos>"], "c", [{"role": "user", "content": "d"}])
    assert conversation.sequences[0].token_ids == ids(of, "c", "<eos>", "d")
