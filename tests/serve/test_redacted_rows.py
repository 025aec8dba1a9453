"""What the journal holds of rows that pass redact functions: while a stream is open, when it ends, when they fail."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from feedback.config import CaptureConfig, JournalConfig, LakeConfig
from feedback.events import FeedbackIn
from feedback.ids import uuid7
from feedback.ingest.idempotency import SeenFeedback
from feedback.ingest.seal import seal
from feedback.journal.writer import Journal
from feedback.lake.tables import Lake
from feedback.redaction import Redactor
from serve.generation.interaction_rows import build_rows
from serve.generation.request import Generated, Generation, GenerationRequest, Sampling
from serve.http import Problem
from serve.observability.metrics import Metrics
from serve.recorder import Recorder, Redaction

FAILS = """
def fails(text):
    if "unbearable" in text:
        raise ValueError(text)
    return text
"""


class Home:
    """A recorder over a journal and a lake; ``close`` seals what was recorded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "journal"
        self.journal = Journal(self.folder, JournalConfig(segment_seconds=0.05), "replica-0")
        self.journal.open()
        self.lake = Lake(str(folder / "lake"), LakeConfig())
        self.lake.create()
        self.ledger = SeenFeedback(self.lake, self.folder)
        self.ledger.open()
        redactor = Redactor(CaptureConfig(redact=["email", "own_fails:fails"]))
        self.redaction = Redaction(redactor, 20, lambda ids: "".join(map(chr, ids)))
        self.recorder = Recorder(self.journal, self.ledger, Metrics(), self.redaction)

    def on_disk(self, text: str) -> bool:
        """Whether any file of the home has a text as it is."""
        return any(text.encode() in file.read_bytes() for file in self.folder.parent.rglob("*") if file.is_file())

    async def sealed(self, table: str = "interactions") -> list[dict[str, Any]]:
        await self.redaction.close()
        await asyncio.to_thread(self.journal.close)
        self.ledger.close()
        seal(self.lake, self.folder)
        with self.lake.connect() as connection:
            return connection.sql(f"FROM {table}").to_arrow_table().to_pylist()


@pytest.fixture
async def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Home]:
    (tmp_path / "own_fails.py").write_text(FAILS)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = Home(tmp_path / "home")
    yield made
    if not made.journal.folder.exists() or made.journal.healthy:
        await asyncio.to_thread(made.journal.close)


def row(response: str, *, prompt: str = "say it", finish_reason: str = "stop", response_id: str = "") -> dict[str, Any]:
    ids = [ord(c) for c in response]
    request = GenerationRequest(
        request_id="q",
        endpoint="/generate",
        replica="r",
        tenant="t",
        prompt=prompt,
        prompt_token_ids=[ord(c) for c in prompt],
        sampling=Sampling(),
        user="bob@example.org",
    )
    generated = Generated(response, ids, [-1.0] * len(ids), [(0, 4)] if ids else [], finish_reason)
    [made] = build_rows(request, Generation([generated], 0.0, 1.0, 2.0), [response_id or uuid7()])
    return made


async def test_an_open_stream_has_nothing_of_its_response_on_disk_in_any_segment(home: Home) -> None:
    said = "write to a"
    first = row("", prompt="I am x@y.z", response_id="open")
    stream = await home.recorder.begin(first, lambda: row(said, prompt="I am x@y.z", response_id="open"))
    for said in ("write to anna", "write to anna@mill", "write to anna@mill.example"):
        assert said.startswith("write")  # read by the stream's so_far
        segments = home.journal.stats()["segments"]
        await home.recorder.record([row("unrelated")])
        async with asyncio.timeout(60):
            while home.journal.stats()["segments"] == segments:
                await asyncio.sleep(0.01)
        await home.recorder.record([row("unrelated")])  # a segment after the stream is repeated in it
    for text in ("anna", "write to", "x@y.z"):
        assert not home.on_disk(text)
    assert home.on_disk("unrelated")
    home.recorder.abandon(stream)
    [cut_off] = [found for found in await home.sealed() if found["response_id"] == "open"]
    assert (cut_off["status"], cut_off["response"], cut_off["response_token_ids"]) == ("aborted", "", [])
    assert (cut_off["prompt"], cut_off["prompt_token_ids"], cut_off["user"]) == ("I am [email]", [], "bob@example.org")


async def test_the_end_of_a_stream_is_redacted_and_its_row_for_the_client_is_not(home: Home) -> None:
    stream = await home.recorder.begin(row("", response_id="s"), lambda: row("to anna@", response_id="s"))
    end = row("to anna@mill.example", response_id="s")
    await home.recorder.end([stream], [end])
    assert end["response"] == "to anna@mill.example"
    assert not home.on_disk("anna")
    [kept] = await home.sealed()
    assert (kept["status"], kept["response"]) == ("redacted", "to [email]")
    assert (kept["prompt_token_ids"], kept["response_token_ids"], kept["logprobs"]) == ([], [], [])
    assert kept["policy_spans"] == [{"start": 0, "policy_version": 4}]


async def test_an_end_that_can_not_be_redacted_is_an_error_without_any_text(home: Home) -> None:
    stream = await home.recorder.begin(row("", response_id="s"), lambda: row("un", response_id="s"))
    with pytest.raises(Problem) as raised:
        await home.recorder.end([stream], [row("unbearable", response_id="s")])
    assert raised.value.status == 503
    assert "own_fails:fails failed: ValueError" in raised.value.detail
    assert not home.on_disk("unbearable")
    [kept] = await home.sealed()
    assert (kept["status"], kept["response"], kept["prompt"], kept["user"]) == ("error", "", None, "bob@example.org")


async def test_an_end_whose_functions_can_not_be_started_is_an_error_without_any_text(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = await home.recorder.begin(row("", prompt="", response_id="s"), lambda: row("un", response_id="s"))
    monkeypatch.setattr(sys, "executable", "/not/there")
    with pytest.raises(Problem) as raised:
        await home.recorder.end([stream], [row("swordfish", response_id="s")])
    assert (raised.value.status, raised.value.retry_after) == (503, 5.0)
    monkeypatch.undo()
    assert not home.on_disk("swordfish")
    [kept] = await home.sealed()
    assert (kept["status"], kept["response"], kept["user"]) == ("error", "", "bob@example.org")


async def test_of_what_can_not_be_redacted_nothing_is_recorded_and_a_stream_does_not_begin(home: Home) -> None:
    for work in (
        home.recorder.record([row("fine"), row("unbearable")]),
        home.recorder.begin(row("", prompt="unbearable"), lambda: {}),
        home.recorder.record_feedback(
            FeedbackIn(response_id="r", kind="comment", text="unbearable").to_row("t"), generated_id=True
        ),
    ):
        with pytest.raises(Problem) as raised:
            await work
        assert (raised.value.status, raised.value.retry_after) == (503, 5.0)
        assert "unbearable" not in raised.value.detail
    assert await home.sealed() == []


async def test_feedback_is_recorded_once_also_where_its_text_is_redacted(home: Home) -> None:
    said = FeedbackIn(response_id="r", kind="correction", text="write to a@b.c", feedback_id="f").to_row("t")
    assert await home.recorder.record_feedback(said, generated_id=False) == "new"
    assert await home.recorder.record_feedback(said, generated_id=False) == "same"
    [kept] = await home.sealed("feedback")
    assert (kept["kind"], kept["text"]) == ("comment", "write to [email]")
