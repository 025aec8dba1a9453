"""A server that redacts what it records, and a key whose responses it does not record, over HTTP."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from feedback.config import LakeConfig
from feedback.ingest.seal import seal
from feedback.lake.tables import Lake
from loadtests.event_lines import read_lines
from serve.middleware.api_keys import create_key
from serve.policies.store import PolicyStore
from tests.serve.api.test_both_apis import HI, texts
from tests.serve.api.test_unstored import files_with, ids
from tests.serve.conftest import LiveServer, start_server, stop_server

OWN = """
import pathlib, re

MODE = pathlib.Path(__file__).with_name("mode")  # what becomes of responses: which texts those are, the prompts say

def own(text):
    if "please fail" in text:
        raise ValueError(text)
    if "please hang" in text:
        re.match(r"(a+)+$", "a" * 64 + "b")
    if "prompt" not in text and "user" not in text and text not in ("hi", "millrace"):
        mode = MODE.read_text()
        if mode == "fail":
            raise ValueError(text)
        if mode == "change":
            return "[response]"
    return text
"""


class Capturing:
    """The server and its keys."""

    def __init__(self, live: LiveServer, keys: dict[str, str]) -> None:
        self.live = live
        self.keys = keys

    def mode(self, mode: str) -> None:
        """What becomes of responses: keep, change, fail."""
        (self.live.home / "mode").write_text(mode)

    def post(self, path: str, body: dict[str, Any], key: str = "open") -> httpx.Response:
        headers = {"X-API-Key": self.keys[key]}
        body = body if path.startswith("/feedback") else {"max_tokens": 6} | body
        return httpx.post(f"{self.live.url}{path}", json=body, headers=headers, timeout=120)

    def rows(self, user: str) -> list[dict[str, Any]]:
        return self.live.rows("interactions", f"\"user\" = '{user}'")


@pytest.fixture(scope="module")
def capturing(tmp_path_factory: pytest.TempPathFactory, model_folders: list[Path]) -> Iterator[Capturing]:
    home = tmp_path_factory.mktemp("capturing")
    store = PolicyStore(home / "policies")
    store.publish(model_folders[0], parent=None, lineage={"test": True}, metrics={})
    store.promote(1, expected=None, who="test", why="first")
    (home / "own_redaction.py").write_text(OWN)
    (home / "mode").write_text("keep")
    keys = {
        name: create_key(home / "keys.json", name=name, tenant="t", scopes=["generate", "feedback"], capture=capture)[1]
        for name, capture in (("open", True), ("private", False))
    }
    for name, scopes in (("evaluator", ["evaluate"]), ("rater", ["evaluate", "feedback"])):
        keys[name] = create_key(home / "keys.json", name=name, tenant="t", scopes=scopes)[1]  # type: ignore[arg-type]
    capture = {"redact": ["email", "own_redaction:own"], "redact_timeout_s": 2}
    live = start_server(home, store, capture=capture)
    yield Capturing(live, keys)
    stop_server(live)


def test_a_key_without_capture_is_answered_and_nothing_of_it_is_recorded(capturing: Capturing) -> None:
    capturing.mode("keep")
    for path, prompt in (("/generate", {"prompt": "my prompt"}), ("/v1/chat/completions", {"messages": HI})):
        answer = capturing.post(path, prompt | {"user": "hidden-away", "store": True}, "private")
        assert texts(answer)
        thumb = {"response_id": ids(answer)[0], "kind": "thumb", "value": 1}
        assert capturing.post("/feedback", thumb, "private").status_code == 404
    assert texts(capturing.post("/generate", {"prompt": "my prompt", "user": "in the open"}))
    assert capturing.rows("hidden-away") == []
    assert len(capturing.rows("in the open")) == 1
    assert files_with(capturing.live.home, "hidden-away") == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/generate", {"prompt": "item 7", "n": 2}),
        ("/v1/completions", {"prompt": ["item 7", "item 8"]}),
        ("/v1/completions", {"prompt": [[74, 85, 70]], "echo": True, "logprobs": 1, "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": HI}),
    ],
)
def test_what_a_key_for_evaluation_generates_is_never_recorded(
    capturing: Capturing, path: str, prompt: dict[str, Any], stream: bool
) -> None:
    labels = {"user": "the-harness", "session_id": "harness-run", "metadata": {"of": "the-harness"}, "store": True}
    answer = capturing.post(path, {"max_tokens": 6} | prompt | labels | {"stream": stream}, "evaluator")
    assert answer.status_code == 200, answer.text
    assert '"error"' not in answer.text
    names = set(re.findall(r"unstored-[0-9a-f-]{36}", answer.text))
    assert names
    thumb = {"kind": "thumb", "value": 1}
    for on in ({"response_id": names.pop()}, {"session_id": "harness-run"}):
        assert capturing.post("/feedback", thumb | on, "evaluator").status_code == 403
        assert capturing.post("/feedback", thumb | on, "rater").status_code == 404
        assert capturing.post("/feedback", thumb | on, "open").status_code == 404
    batch = {"feedback": [thumb | {"session_id": "harness-run"}]}
    assert capturing.post("/feedback/batch", batch, "evaluator").status_code == 403
    assert capturing.rows("the-harness") == []
    assert capturing.live.rows("feedback") == []
    assert files_with(capturing.live.home, "the-harness") == []


def test_a_key_is_for_evaluation_or_for_traffic(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="leave generate out"):
        create_key(tmp_path / "keys.json", name="both", tenant="t", scopes=["generate", "evaluate"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/generate", {"prompt": "the prompt of ann@mill.example"}),
        ("/generate", {"prompt_token_ids": list(b"the prompt of ann@mill.example")}),
        ("/generate", {"messages": [{"role": "user", "content": "the prompt of ann@mill.example"}]}),
        ("/v1/completions", {"prompt": "the prompt of ann@mill.example"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "the prompt of ann@mill.example"}]}),
    ],
)
def test_a_redacted_prompt_is_nowhere_and_its_row_has_no_tokens(
    capturing: Capturing, path: str, prompt: dict[str, Any], stream: bool
) -> None:
    capturing.mode("keep")
    user = f"user {path} {next(iter(prompt))} {stream}"
    answer = capturing.post(
        path, prompt | {"user": user, "metadata": {"user note": "of ann@mill.example"}, "stream": stream}
    )
    assert answer.status_code == 200, answer.text
    [row] = capturing.rows(user)
    assert row["status"] == "redacted"
    assert (row["prompt_token_ids"], row["response_token_ids"], row["logprobs"]) == ([], [], [])
    assert "ann@" not in str(row)
    assert "[email]" in str(row["prompt"]) + str(row["metadata"])
    assert files_with(capturing.live.home, "ann@mill") == []


def test_the_client_gets_the_response_that_the_lake_has_redacted(capturing: Capturing) -> None:
    capturing.mode("change")
    body = {"prompt": "a prompt", "user": "user changed", "logprobs": True, "return_token_ids": True}
    answer = capturing.post("/generate", body)
    [response] = answer.json()["responses"]
    assert response["text"] != "[response]"
    assert len(response["token_ids"]) == len(response["logprobs"]) == 6
    [row] = capturing.rows("user changed")
    assert (row["response"], row["status"], row["response_id"]) == ("[response]", "redacted", response["response_id"])
    capturing.mode("keep")
    assert (
        capturing.post("/feedback", {"response_id": row["response_id"], "kind": "thumb", "value": 1}).status_code == 201
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
@pytest.mark.parametrize("prompt", ["please fail", "please hang"])
def test_a_prompt_that_can_not_be_redacted_fails_with_503_and_no_row(
    capturing: Capturing, path: str, stream: bool, prompt: str
) -> None:
    capturing.mode("keep")
    answer = capturing.post(path, {"prompt": f"{prompt}, prompt", "user": "user refused", "stream": stream})
    assert answer.status_code == 503, answer.text
    assert ("own_redaction:own failed: ValueError" if prompt == "please fail" else "longer than 2 s") in answer.text
    assert capturing.rows("user refused") == []
    assert files_with(capturing.live.home / "journal", prompt) == []
    assert prompt not in capturing.live.log.read_text()
    assert texts(capturing.post(path, {"prompt": "a good prompt"}))  # the server goes on


def test_a_response_that_can_not_be_redacted_fails_and_leaves_no_text(capturing: Capturing) -> None:
    capturing.mode("fail")
    answer = capturing.post("/generate", {"prompt": "a prompt", "user": "user plain"})
    assert answer.status_code == 503
    assert capturing.rows("user plain") == []
    for path in ("/generate", "/v1/completions"):
        user = f"user streamed {path}"
        answer = capturing.post(path, {"prompt": "a prompt", "user": user, "stream": True})
        # 503 where all of the response was there before its first event had gone out.
        assert answer.status_code in (200, 503), answer.text
        assert re.search(r"own_redaction:own failed: ValueError", answer.text), answer.text
        [row] = capturing.rows(user)
        assert (row["status"], row["response"], row["prompt"]) == ("error", "", None)


def test_a_server_that_is_killed_in_a_stream_leaves_no_text_of_the_response(capturing: Capturing) -> None:
    capturing.mode("keep")
    body = {"prompt": "a prompt", "user": "user killed", "stream": True, "max_tokens": 200}
    headers = {"X-API-Key": capturing.keys["open"]}
    with httpx.stream("POST", f"{capturing.live.url}/generate", json=body, headers=headers, timeout=60) as answer:
        next(read_lines(answer))
        capturing.live.process.kill()
        capturing.live.process.wait(180)
    seal(Lake(str(capturing.live.home / "lake"), LakeConfig()), capturing.live.home / "journal")
    [row] = capturing.rows("user killed")
    assert (row["status"], row["prompt"], row["response"]) == ("aborted", "a prompt", "")
    assert row["response_token_ids"] == []
