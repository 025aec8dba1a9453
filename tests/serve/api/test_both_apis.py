"""What holds for ``/generate`` and for the routes below ``/v1`` alike, over HTTP, on a real engine."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from loadtests.tiny_model import CONTEXT
from tests.serve.conftest import LiveServer

OPENING_BRACE = 92  # its token
HI: list[Any] = [{"role": "user", "content": "hi"}]
PROMPTS: dict[str, dict[str, Any]] = {
    "/generate": {"prompt": "the mill"},
    "/v1/completions": {"prompt": "the mill"},
    "/v1/chat/completions": {"messages": HI},
}


def post(
    server: LiveServer, path: str, body: dict[str, Any] | bytes, headers: dict[str, str] | None = None
) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(PROMPTS[path] | {"max_tokens": 6} | body).encode()
    headers = {"content-type": "application/json"} | (headers or {})
    return httpx.post(f"{server.url}{path}", content=content, headers=headers, timeout=60)


def refused_field(answer: httpx.Response) -> str | None:
    """The field that a refusal names."""
    body = answer.json()
    if "error" in body:
        assert answer.status_code == 400, answer.text
        param: str | None = body["error"]["param"]
        return param
    assert answer.status_code == 422, answer.text
    field: str = body["errors"][0]["field"]
    return field


def texts(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    body = answer.json()
    if "responses" in body:
        return [response["text"] for response in body["responses"]]
    return [choice.get("text", choice.get("message", {}).get("content")) for choice in body["choices"]]


@pytest.mark.parametrize("path", PROMPTS)
@pytest.mark.parametrize("stream", [False, True])
def test_several_greedy_responses_are_refused_by_name(server: LiveServer, path: str, stream: bool) -> None:
    answer = post(server, path, {"temperature": 0, "n": 2, "stream": stream})
    assert refused_field(answer) == "n"
    assert "greedy" in answer.text


@pytest.mark.parametrize("path", PROMPTS)
def test_every_seed_that_is_taken_repeats_all_choices_and_minus_one_is_none(server: LiveServer, path: str) -> None:
    for seed in (0, 2**63 - 1 - 4096):
        seeded = {"seed": seed, "n": 3, "max_tokens": 12}
        assert texts(post(server, path, seeded)) == texts(post(server, path, seeded))
    answer = post(server, path, {"seed": -1, "user": "unseeded"})
    assert texts(answer)
    rows = server.rows("interactions", f"\"user\" = 'unseeded' AND endpoint = '{path}'")
    assert [row["sampling"]["seed"] for row in rows] == [None]
    for seed in (-2, -(2**63), 2**63 - 1):  # of n that count up from -2, one would have none
        assert refused_field(post(server, path, {"seed": seed, "n": 3})) == "seed"


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/generate", rb'{"prompt": "a\ud800b"}', "prompt"),
        ("/generate", b'{"prompt": "a\xed\xa0\x80b"}', "prompt"),
        ("/generate", rb'{"messages": [{"role": "user", "content": "\udfff"}]}', "messages.0.content"),
        ("/generate", rb'{"prompt": "a", "metadata": {"k": "\ud800"}}', "metadata.k"),
        ("/generate", rb'{"prompt": "a", "metadata": {"\ud800": "k"}}', "metadata"),
        ("/v1/completions", rb'{"prompt": ["a", "\ud800"]}', "prompt.1"),
        ("/v1/chat/completions", rb'{"messages": [{"role": "user", "content": "\ud800"}]}', "messages.0.content"),
    ],
)
def test_half_a_character_is_refused_by_the_name_of_its_field(
    server: LiveServer, path: str, body: bytes, field: str
) -> None:
    answer = post(server, path, body)
    assert refused_field(answer) == field
    assert "surrogate" in answer.text


def streamed_text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    text = ""
    for line in answer.text.splitlines():
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            text += event.get("text", "")
            for choice in event.get("choices", ()):
                text += choice.get("text") or choice.get("delta", {}).get("content") or ""
    return text


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
@pytest.mark.parametrize("prompt", ["the mill \ufffd", "\ufffd", "the mill"])
def test_a_text_is_the_same_in_every_form_also_where_prompt_and_response_end_within_a_character(
    server: LiveServer, path: str, prompt: str
) -> None:
    for seed in range(6):  # of random bytes: many a response begins or ends within a character
        body = {"prompt": prompt, "seed": seed, "max_tokens": 5}
        [whole] = texts(post(server, path, body))
        assert texts(post(server, path, body | {"stop": ["never said"]})) == [whole]
        assert streamed_text(post(server, path, body | {"stream": True})) == whole
        assert texts(post(server, path, body | {"stop": ["mill"]})) == [whole]  # which is in the prompt


def test_messages_are_recorded_with_numbers_as_they_were_sent(server: LiveServer) -> None:
    exact = 123456789012345678901234567890
    messages = [
        *HI,
        {"role": "assistant", "content": "", "tool_calls": []},
        {"role": "user", "content": "x", "id": exact},
    ]
    answer = post(server, "/v1/chat/completions", {"messages": messages, "user": "exact"})
    assert texts(answer)
    [row] = server.rows("interactions", "\"user\" = 'exact'")
    assert json.loads(row["messages"]) == messages


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_number_of_hundreds_of_digits_is_no_error_of_the_server(server: LiveServer, path: str) -> None:
    huge = 10**300
    for body in (
        {"n": huge},
        {"temperature": huge},
        {"logit_bias": {"5": huge}},
        {"stop_token_ids": [huge]},
        {"truncate_prompt_tokens": huge},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"maximum": huge}}}},
        {"structured_outputs": {"json": {"type": "integer", "maximum": huge}}},
        {"metadata": {"a": huge}},
    ):
        answer = post(server, path, body)
        assert answer.status_code in (200, 400), (body, answer.text)


@pytest.mark.parametrize("path", PROMPTS)
def test_a_session_header_of_no_or_too_many_characters_is_refused_by_name(server: LiveServer, path: str) -> None:
    for session_id in ("", "x" * 201):
        for body in ({}, {"session_id": "of the body"}):
            answer = post(server, path, body, {"X-Session-Id": session_id})
            assert refused_field(answer) == "X-Session-Id"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("/v1/chat/completions", {"logprob_token_ids": [5]}, "logprob_token_ids"),
        ("/v1/completions", {"logprob_token_ids": [5]}, "logprob_token_ids"),
        ("/v1/completions", {"min_tokens": 7}, "min_tokens"),
        ("/v1/completions", {"bad_words": ["a", " \n"]}, "bad_words"),
        (
            "/v1/completions",
            {"structured_outputs": {"choice": ["a"]}, "response_format": {"type": "json_object"}},
            "structured_outputs",
        ),
        (
            "/v1/chat/completions",
            {"add_generation_prompt": True, "continue_final_message": True},
            "add_generation_prompt",
        ),
        (
            "/v1/completions",
            {"allowed_token_ids": [72], "response_format": {"type": "json_object"}},
            "response_format",
        ),
    ],
)
def test_fields_that_do_not_go_together_are_refused_by_name_and_without_a_traceback(
    server: LiveServer, path: str, body: dict[str, Any], field: str, stream: bool
) -> None:
    before = server.log.read_text().count("Traceback")
    assert refused_field(post(server, path, body | {"stream": stream})) == field
    assert server.log.read_text().count("Traceback") == before


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("structure", "field"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"choice": ["{}"]}}, "structured_outputs"),
    ],
)
def test_a_stream_that_breaks_after_its_first_tokens_names_the_field_as_a_whole_answer_does(
    server: LiveServer, path: str, structure: dict[str, Any], field: str
) -> None:
    body = structure | {"allowed_token_ids": [OPENING_BRACE]}  # nothing can follow the first token
    whole = post(server, path, body)
    assert refused_field(whole) == field
    streamed = post(server, path, body | {"stream": True})
    for _ in range(20):
        if streamed.status_code == 200:
            break
        assert streamed.json() == whole.json()  # a busy machine: the first token and the failure came in one output
        streamed = post(server, path, body | {"stream": True})
    assert streamed.status_code == 200, streamed.text
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert "choices" in events[0]
    assert events[-1]["error"] == whole.json()["error"] | {"code": 400}


@pytest.mark.parametrize("path", PROMPTS)
def test_max_tokens_past_the_context_ends_a_response_there(server: LiveServer, path: str) -> None:
    answer = post(server, path, {"max_tokens": 4000, "temperature": 0})
    body = answer.json()
    assert answer.status_code == 200, answer.text
    end = body["responses"][0] if path == "/generate" else body["choices"][0]
    assert end["finish_reason"] == "stop" or body["usage"]["total_tokens"] == CONTEXT


def test_the_last_message_can_be_gone_on_with(server: LiveServer) -> None:
    messages = [*HI, {"role": "assistant", "content": "well"}]
    body = {"messages": messages, "continue_final_message": True, "user": "goes on"}
    assert texts(post(server, "/v1/chat/completions", body))
    [row] = server.rows("interactions", "\"user\" = 'goes on'")
    assert row["prompt"] == "user: hi\nassistant: well"
