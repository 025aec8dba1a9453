"""The users' shapes, and how they read streams. In a process of its own: locust makes gevent of everything."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.paths import ROOT

PROGRAM = """
import io, json
from loadtests.locustfile import Answer, Failed, SHAPES, read_stream, users_at

class Lines:
    def __init__(self, text):
        self.file = io.BytesIO(text.encode())
    def readline(self, sep):
        return self.file.readline()

def stream(text):
    answer = Answer()
    try:
        texts = list(read_stream(Lines(text), answer))
    except Failed as error:
        return str(error)
    return [texts, answer.ids, answer.tokens]

done = {"responses": [{"response_id": "r", "text": "ab"}], "policy_version": 3, "usage": {"completion_tokens": 2}}
ours = 'event: delta\\ndata: {"text": "a"}\\n\\nevent: delta\\ndata: {"text": "b"}\\n\\n'
chunk = 'data: {"id": "c", "choices": [{"delta": {"content": "a"}}]}\\n\\n'
usage = 'data: {"id": "c", "choices": [], "usage": {"completion_tokens": 7}}\\n\\n'
print(json.dumps({
    "users": {shape: [users_at(shape, 16, 80, at) for at in (0, 9.9, 10, 33, 47, 48, 79.9, 80)] for shape in SHAPES},
    "few": [users_at("ramp", 3, 80, at) for at in (0, 30, 79)],
    "ours": stream(ours + "event: done\\ndata: " + json.dumps(done) + "\\n\\n"),
    "openai": stream(chunk + usage + "data: [DONE]\\n\\n"),
    "cut": [stream(ours), stream(chunk)],
    "error": stream(ours + 'event: error\\ndata: {"title": "The server stopped", "status": 503}\\n\\n'),
}))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, stdout=subprocess.PIPE, timeout=240, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_shapes_go_to_all_users_and_end(found: dict[str, Any]) -> None:
    assert found["users"] == {
        "steady": [16] * 7 + [None],
        "soak": [16] * 7 + [None],
        "ramp": [2, 2, 4, 8, 10, 10, 16, None],
        "spike": [4, 4, 4, 16, 16, 4, 4, None],
    }
    assert found["few"] == [1, 2, 3]


def test_streams_of_both_apis_are_read_with_their_ids_and_tokens(found: dict[str, Any]) -> None:
    assert found["ours"] == [["a", "b"], ["r"], 2]
    assert found["openai"] == [["a"], ["c"], 7]


def test_a_stream_without_its_end_or_with_an_error_is_a_failure_with_a_name(found: dict[str, Any]) -> None:
    assert found["cut"] == ["the stream broke off"] * 2
    assert found["error"] == "the stream ended with an error: The server stopped"
