"""Logprobs of certain tokens, on a real server. What the sampler does is tested in tests/serve/vllm."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.serve.conftest import LiveServer


def test_a_request_for_certain_tokens_changes_no_logprob_of_another(server: LiveServer) -> None:
    def ask(fields: dict[str, Any]) -> dict[str, Any]:
        body = {"prompt": "the mill", "max_tokens": 200, "ignore_eos": True} | fields
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        choice: dict[str, Any] = answer.json()["choices"][0]
        return choice

    zeros = {"logit_bias": {"0": 100}, "logprobs": 3, "return_tokens_as_token_ids": True, "user": "token 0"}
    certain = {"logprob_token_ids": [5, 6], "logprobs": 2}
    with ThreadPoolExecutor(4) as threads:
        choices = list(threads.map(ask, [certain, zeros, certain, zeros]))
    for choice in choices[1::2]:
        assert choice["logprobs"]["token_logprobs"] == pytest.approx([0] * 200, abs=1e-3)
        assert {len(likeliest) for likeliest in choice["logprobs"]["top_logprobs"]} == {3}
    rows = server.rows("interactions", "\"user\" = 'token 0'")
    assert [row["response_token_ids"] for row in rows] == [[0] * 200] * 2
    for row in rows:
        assert row["logprobs"] == pytest.approx([0] * 200, abs=1e-3)
