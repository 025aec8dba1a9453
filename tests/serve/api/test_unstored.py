"""Responses that are not to be stored: answered and counted, and nowhere else."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.cli import run
from loadtests.event_lines import read_lines
from tests.serve.api.test_both_apis import PROMPTS, post, texts
from tests.serve.conftest import LiveServer

MARK = "quietly-"
"""In the texts that must be nowhere."""

COMPLETE = 'millrace_responses_total{status="complete"}'


def body(path: str, mark: str, **fields: Any) -> dict[str, Any]:
    """A request with ``mark`` in each text that a row would keep."""
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": mark}]} if "chat" in path else {"prompt": mark}
    return prompt | {"user": mark, "session_id": mark, "metadata": {"note": mark}, "seed": 3} | fields


def ids(answer: httpx.Response) -> list[str]:
    """The ids that the answer's responses have for /feedback."""
    answered = answer.json()
    if "responses" in answered:
        return [response["response_id"] for response in answered["responses"]]
    return [f"{answered['id']}:{choice['index']}" for choice in answered["choices"]]


def files_with(folder: Path, mark: str) -> list[str]:
    """Files below a folder that hold a text as it is, and not behind ``kept-``."""
    wanted = re.compile(rb"(?<!kept-)" + mark.encode())
    found = [file for file in folder.rglob("*") if file.is_file() and wanted.search(file.read_bytes())]
    return [str(file.relative_to(folder)) for file in found]


def counted(server: LiveServer, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", httpx.get(f"{server.url}/metrics", timeout=60).text, re.MULTILINE)
    return float(found[1]) if found else 0.0


@pytest.mark.parametrize("path", PROMPTS)
def test_nothing_of_a_response_that_is_not_to_be_stored_is_kept_but_its_counts(server: LiveServer, path: str) -> None:
    mark = MARK + path.strip("/").replace("/", "-")
    before = {name: counted(server, name) for name in ("millrace_prompt_tokens_total", COMPLETE)}
    answer = post(server, path, body(path, mark, store=False, n=2))
    assert len(texts(answer)) == 2
    streamed = post(server, path, body(path, mark, store=False, stream=True, max_tokens=40))
    assert streamed.status_code == 200
    assert '"error"' not in streamed.text

    assert counted(server, COMPLETE) - before[COMPLETE] >= 3
    assert counted(server, "millrace_prompt_tokens_total") > before["millrace_prompt_tokens_total"]
    kept = body(path, "kept-" + mark)
    assert texts(post(server, path, kept))  # which the journal has: what is looked for below would be found
    rows = server.rows("interactions", f"CAST(interactions AS VARCHAR) LIKE '%{mark}%'")
    assert [row["user"] for row in rows] == ["kept-" + mark]
    assert files_with(server.home, mark) == []


@pytest.mark.parametrize("path", PROMPTS)
def test_feedback_on_a_response_that_is_not_stored_is_refused_with_404(server: LiveServer, path: str) -> None:
    names = ids(post(server, path, body(path, "quiet", store=False, n=2)))
    stored = ids(post(server, path, body(path, "loud")))
    for name in names:
        thumb = {"response_id": name, "kind": "thumb", "value": 1}
        answer = httpx.post(f"{server.url}/feedback", json=thumb, timeout=60)
        assert answer.status_code == 404, answer.text
        assert "not stored" in answer.json()["detail"]
        batch = httpx.post(
            f"{server.url}/feedback/batch",
            json={"feedback": [thumb | {"response_id": stored[0]}, thumb]},
            timeout=60,
        )
        assert [result["status"] for result in batch.json()["results"]] == [201, 404]
    preference = {"response_id": stored[0], "rejected_response_id": names[0], "kind": "preference"}
    refused = httpx.post(f"{server.url}/feedback", json=preference, timeout=60)
    assert refused.json()["errors"][0]["field"] == "rejected_response_id"


def test_a_client_that_leaves_a_stream_that_is_not_to_be_stored_leaves_no_row(server: LiveServer) -> None:
    aborted = 'millrace_responses_total{status="aborted"}'
    before = counted(server, aborted)
    request = body("/generate", "left early", store=False, stream=True, max_tokens=100)
    with httpx.stream("POST", f"{server.url}/generate", json=request, timeout=60) as answer:
        next(read_lines(answer))
    deadline = time.monotonic() + 180
    while counted(server, aborted) == before:
        assert time.monotonic() < deadline, "the response was not aborted"
        time.sleep(0.1)
    assert server.rows("interactions", "\"user\" = 'left early'") == []


def test_a_key_without_capture_is_made_by_the_command_and_listed_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, options in (("plain", []), ("private", ["--no-capture"])):
        assert run(["keys", "create", "--name", name, *options, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["capture"] is (name == "plain")
    assert run(["keys", "list"]) == 0
    header, *lines = [line.split() for line in capsys.readouterr().out.splitlines() if line]
    capture = header.index("capture") - len(header)  # from the end: dates are two words
    assert {line[1]: line[capture] for line in lines} == {"plain": "yes", "private": "no"}
