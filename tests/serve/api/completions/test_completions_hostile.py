"""Bodies that nobody means well with, sent to the routes below /v1."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest

from tests.serve.conftest import LiveServer

HI: list[Any] = [{"role": "user", "content": "hi"}]

DEEP = b'{"prompt": "a", "metadata": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}"
HOSTILE: list[Any] = [
    b"",
    b"null",
    b"[]",
    b"{",
    b"\xff\xfe\x00",
    b'{"prompt": "\\ud800", "messages": []}',
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "temperature": 1e999}',
    b'{"prompt": "a", "seed": ' + b"9" * 4000 + b"}",
    DEEP,
    b'{"messages": ' + b"[" * 900 + b"]" * 900 + b"}",
    {"prompt": 5, "messages": 5},
    {"prompt": [], "messages": []},
    {"prompt": [[]], "messages": [[]]},
    {"prompt": ["", ""], "messages": ["", ""]},
    {"prompt": ["a", 1], "messages": [None]},
    {"prompt": [True], "messages": [{}]},
    {"prompt": {"a": 1}, "messages": {"role": "user"}},
    {"prompt": [-1], "messages": [{"role": 5, "content": "a"}]},
    {"prompt": [2**40], "messages": [{"role": "wizard", "content": "a"}]},
    {"prompt": ["a"] * 500, "messages": [{"role": "user"}] * 50},
    {"prompt": "\x00", "messages": [{"role": "user", "content": "\x00"}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x"}}]}]},
    {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]}
        ]
    },
    {"messages": [{"role": "user", "content": [{"image_url": "FILE:///etc/passwd"}]}]},
    {"messages": [{"role": "user", "content": [{"type": "audio_url", "audio_url": {"url": 5}}]}]},
    {
        "messages": [
            {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "A", "format": "wav"}}]}
        ]
    },
    {"messages": [{"role": "user", "content": [{"type": "image_embeds", "image_embeds": "AAAA"}]}]},
    {"messages": [{"role": "user", "content": [{"type": "prompt_embeds", "prompt_embeds": "AAAA"}]}]},
    {"messages": [{"role": "user", "content": [{"type": "text"}, 5, None, {"type": ["x"]}]}]},
    {"messages": [{"role": "assistant", "tool_calls": 5}]},
    {"messages": [{"role": "assistant", "tool_calls": [{"function": 5}]}]},
    {"messages": [{"role": "tool", "content": "x", "tool_call_id": {}}]},
    {"chat_template": "{{ ''.__class__.__mro__ }}"},
    {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
    {"chat_template_kwargs": {"tokenize": True, "return_tensors": "pt"}},
    {"chat_template_kwargs": {"conversation": [], "tools": 5, "messages": 7}},
    {"add_generation_prompt": True, "continue_final_message": True},
    {"documents": [{"a": 5}]},
    {"tools": []},
    {"tools": [{"type": "function"}], "tool_choice": {"type": "function", "function": {"name": "f"}}},
    {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"},
    {"tools": 5, "tool_choice": 5},
    {"cache_salt": ""},
    {"cache_salt": "@/\\"},
    {"cache_salt": 5},
    {"cache_salt": "1.1"},
    {"n": -1},
    {"n": 0},
    {"n": "2"},
    {"n": 2, "temperature": 0},
    {"n": 1e30},
    {"max_tokens": -5},
    {"max_tokens": True},
    {"min_tokens": 2**62},
    {"temperature": "hot"},
    {"temperature": 1e-320},
    {"top_p": 0},
    {"top_k": 2**40},
    {"min_p": 7},
    {"repetition_penalty": 1e300},
    {"presence_penalty": 1e9},
    {"seed": 2**63 - 1, "n": 4},
    {"seed": -(2**63)},
    {"logit_bias": {"999999999999999999999": 1}},
    {"logit_bias": {"-1": 1, "x": 2}},
    {"logit_bias": [1, 2]},
    {"logprobs": -1, "top_logprobs": -1},
    {"logprobs": 5, "top_logprobs": 5, "echo": True},
    {"prompt_logprobs": -1},
    {"prompt_logprobs": 5, "stream": True},
    {"logprob_token_ids": [2**70], "logprobs": True},
    {"logprob_token_ids": [1, 2], "logprobs": 1},
    {"stop": [""]},
    {"stop": ["a"] * 50},
    {"stop": "x" * 100_000},
    {"stop_token_ids": [-5, 10**12]},
    {"allowed_token_ids": []},
    {"allowed_token_ids": [10**9]},
    {"bad_words": ["", "\x00"]},
    {"bad_words": ["x"] * 5000},
    {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nonsense"}}}},
    {"response_format": {"type": "structural_tag", "format": 5}},
    {"structured_outputs": {"regex": "((((("}},
    {"structured_outputs": {"grammar": "root ::= root"}},
    {"structured_outputs": {"json": "{", "regex": "a"}},
    {"structured_outputs": 5},
    {"truncate_prompt_tokens": 0},
    {"truncate_prompt_tokens": -7},
    {"stream_options": {"include_usage": True}},
    {"stream": True, "stream_options": 5},
    {"stream": "maybe"},
    {"stream_interval": 10**9, "stream": True},
    {"priority": -(2**62)},
    {"request_id": "../../x"},
    {"prompt_embeds": "AAAA"},
    {"vllm_xargs": {"millrace_whole": 1}},
    {"kv_transfer_params": {"do_remote_prefill": True, "prompt_token_ids": [1]}},
    {"media_io_kwargs": {"image": {"x": 1}}},
    {"metadata": {"millrace:sampling": "x"}},
    {"metadata": {str(i): "" for i in range(100)}},
    {"user": {"a": 1}},
    {"session_id": ""},
    {"suffix": "x"},
    {"echo": 5},
    {"model": ["millrace"]},
    {"thinking_token_budget": 10**30},
    {"repetition_detection": {"max_pattern_size": 10**18, "min_count": 2}},
]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_no_hostile_body_is_an_error_of_the_server_or_leaves_work_behind(server: LiveServer, path: str) -> None:
    fine: dict[str, Any] = {"max_tokens": 2} | ({"messages": HI} if "chat" in path else {"prompt": "a"})
    with httpx.Client(base_url=server.url, timeout=60) as http:
        for body in HOSTILE:
            if isinstance(body, dict):
                keep = {"prompt"} if "chat" not in path else {"messages"}
                other = {"messages", "prompt"} - keep
                content = json.dumps(fine | {key: value for key, value in body.items() if key not in other}).encode()
            else:
                content = body
            answer = http.post(path, content=content, headers={"content-type": "application/json"})
            assert answer.status_code < 500, (content[:300], answer.text)
            if answer.status_code >= 400:
                assert answer.json()["error"].keys() == {"message", "type", "param", "code"}, content[:300]
                assert len(answer.content) < 10_000
            elif "text/event-stream" in answer.headers["content-type"]:
                assert '"error"' not in answer.text, (content[:300], answer.text)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            text = http.get("/metrics").text
            gauges = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("millrace_"))
            if float(gauges["millrace_journal_open_streams"]) == float(gauges["millrace_engine_in_flight"]) == 0:
                break
            time.sleep(0.05)
        else:
            raise AssertionError("requests are at work still")
        assert http.get("/health").status_code == 200
        assert http.post(path, json=fine).status_code == 200


NOTHING_LEFT: list[tuple[str, dict[str, Any]]] = [
    ("allowed_token_ids", {"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 3}),
    ("structured_outputs", {"structured_outputs": {"choice": ["yes"]}, "stop_token_ids": [70], "stop": "a"}),
]
"""A grammar masks the tokens that end a response, and 70 is the "e" of "yes"; the "a" is in the text of token 0."""


@pytest.mark.parametrize(("field", "limits"), NOTHING_LEFT)
@pytest.mark.parametrize("n", [1, 2])
def test_a_response_that_no_token_may_go_on_with_is_an_error_of_the_field_and_no_noise(
    field: str, limits: dict[str, Any], n: int, server: LiveServer
) -> None:
    session = f"nothing-left-{field}-{n}"
    body = {"model": "millrace", "prompt": "a", "skip_special_tokens": False, "n": n, "session_id": session, **limits}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
    streamed = httpx.post(f"{server.url}/v1/completions", json={**body, "stream": True}, timeout=60).text
    events = [line.removeprefix("data: ") for line in streamed.splitlines() if line.startswith("data: {")]
    texts = [choice["text"] for event in events for choice in json.loads(event).get("choices", ())]
    assert json.loads((events or [streamed])[-1])["error"]["param"] == field
    assert set(texts) <= {"", "y"}
    rows = server.rows("interactions", f"session_id = '{session}'")
    assert len(rows) == 2 * n
    assert {row["status"] for row in rows} <= {"error", "aborted"}
    assert "error" in {row["status"] for row in rows}


def test_prompts_that_fail_one_after_another_leave_no_error_that_nobody_takes(server: LiveServer) -> None:
    before = len(server.log.read_text())
    limits = {"structured_outputs": {"choice": ["yes", "say yes"]}, "stop_token_ids": [70]}
    for seed in range(8):
        prompts = [f"{seed} {number}" for number in range(8)]
        body = {"model": "millrace", "prompt": prompts, "max_tokens": 16, "seed": seed, **limits}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 400
    httpx.post(f"{server.url}/v1/completions", json={"model": "millrace", "prompt": "a", "max_tokens": 64}, timeout=60)
    assert "Traceback" not in server.log.read_text()[before:]
