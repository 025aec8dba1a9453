"""The requests of lm-eval 0.4.13 and Inspect 0.3.285, byte for byte as they sent them to a server, and the answers."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.serve.conftest import LiveServer, reference_logprobs

# "Question: 0 plus 0 is\nAnswer:" and " 10", one token a byte.
CONTEXT = [50, 86, 70, 84, 85, 74, 80, 79, 27, 222, 17, 222, 81, 77, 86, 84, 222, 17, 222, 74, 84, 200, 34, 79, 84, 88]
CONTEXT += [70, 83, 27]
CHOICE = [222, 18, 17]
LOGLIKELIHOOD = (
    b'{"model": "millrace", "prompt": [[50, 86, 70, 84, 85, 74, 80, 79, 27, 222, 17, 222, 81, 77, 86, 84, 222, 17, '
    b'222, 74, 84, 200, 34, 79, 84, 88, 70, 83, 27, 222, 18, 17]], "temperature": 0, "max_tokens": 1, "logprobs": 1, '
    b'"seed": 1234, "echo": true}'
)
GENERATE = (
    b'{"prompt": [[50, 86, 70, 84, 85, 74, 80, 79, 27, 222, 17, 222, 81, 77, 86, 84, 222, 17, 222, 74, 84, 200, 34, '
    b'79, 84, 88, 70, 83, 27]], "model": "millrace", "max_tokens": 8, "temperature": 0.0, "stop": ["\\n", "Question"], '
    b'"seed": 1234}'
)
INSPECT = b'{"model":"millrace","messages":[{"role":"user","content":"0 plus 0 is"}],"max_tokens":16}'


def post(server: LiveServer, path: str, body: bytes | dict[str, Any]) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body)
    return httpx.post(f"{server.url}{path}", content=content, headers={"Content-Type": "application/json"}, timeout=60)


def test_the_loglikelihood_of_a_choice_is_what_transformers_computes(server: LiveServer) -> None:
    answer = post(server, "/v1/completions", LOGLIKELIHOOD)
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    found, top = choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]
    assert len(found) == len(top) == len(CONTEXT) + len(CHOICE) + 1
    assert found[0] is None
    expected = reference_logprobs(server.store.get(1).path, CONTEXT, CHOICE)
    assert found[len(CONTEXT) : -1] == pytest.approx(expected, abs=1e-3)  # as lm-eval reads it
    assert all(max(likeliest.values()) >= own for own, likeliest in zip(found[1:], top[1:], strict=True))


@pytest.mark.parametrize("stream", [False, True])
def test_max_tokens_0_echoes_the_prompt_alone_with_the_same_logprobs(server: LiveServer, stream: bool) -> None:
    body = json.loads(LOGLIKELIHOOD)
    [with_one] = post(server, "/v1/completions", body).json()["choices"]
    answer = post(server, "/v1/completions", body | {"max_tokens": 0, "store": False, "stream": stream})
    assert answer.status_code == 200, answer.text
    text = answer.text.split("data: ")[1] if stream else answer.text
    [choice] = json.loads(text)["choices"]
    assert choice["text"] == "Question: 0 plus 0 is\nAnswer: 10"
    assert choice["logprobs"]["token_logprobs"] == with_one["logprobs"]["token_logprobs"][:-1]


def test_max_tokens_0_is_refused_where_a_response_would_be_recorded_or_nothing_is_echoed(server: LiveServer) -> None:
    body = {"model": "millrace", "prompt": "nobody sees it", "max_tokens": 0, "user": "of none"}
    for fields, says in (({"echo": True}, "store: false"), ({"store": False}, "echo")):
        answer = post(server, "/v1/completions", body | fields)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "max_tokens"
        assert says in answer.json()["error"]["message"]
    assert server.rows("interactions", "\"user\" = 'of none'") == []


def test_generation_until_a_stop_text_ends_before_it_and_within_max_gen_toks(server: LiveServer) -> None:
    answer = post(server, "/v1/completions", GENERATE)
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    assert answer.json()["usage"]["completion_tokens"] <= 8
    assert "\n" not in choice["text"]


def test_inspect_gets_a_chat_completion(server: LiveServer) -> None:
    answer = post(server, "/v1/chat/completions", INSPECT)
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    assert choice["message"]["role"] == "assistant"
    assert answer.json()["usage"]["completion_tokens"] <= 16
