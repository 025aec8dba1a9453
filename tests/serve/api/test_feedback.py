"""Feedback over real HTTP: alone and in batches, early and late, said again and said otherwise."""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from typing import Any

import httpx
import pytest

from feedback.config import JournalConfig
from feedback.journal.writer import Journal
from tests.serve.conftest import LiveServer


def thumb(**body: Any) -> dict[str, Any]:
    return {"response_id": "r", "kind": "thumb", "value": 1} | body


def fresh() -> str:
    return str(uuid.uuid4())


async def batch(client: httpx.AsyncClient, *items: Any) -> list[dict[str, Any]]:
    response = await client.post("/feedback/batch", json={"feedback": items})
    assert response.status_code == 200, response.text
    results: list[dict[str, Any]] = response.json()["results"]
    assert len(results) == len(items)
    return results


async def counted(client: httpx.AsyncClient, sample: str) -> float:
    metrics = (await client.get("/metrics")).text
    found = re.search(rf"^{re.escape(sample)} (\S+)$", metrics, re.MULTILINE)
    return float(found[1]) if found else 0.0


@pytest.mark.parametrize(
    ("body", "field", "says"),
    [
        ({"value": None}, "value", "kind 'thumb' needs 'value'"),
        ({"value": 0.5}, "value", "got 0.5"),
        ({"value": "1"}, "value", "number, true or false, not '1'"),
        ({"name": "stars"}, "name", "takes no 'name'"),
        ({"kind": "preference", "value": None, "rejected_response_id": "r"}, "rejected_response_id", "both are r"),
        ({"kind": "rating", "value": 7}, "value", "'stars' goes from 1 to 5, got 7"),
        ({"kind": "rating", "name": "moons"}, "name", "'moons'.*stars"),
        ({"kind": "metric", "name": "likes"}, "name", "'likes'.*clicked"),
        ({"kind": "metric", "name": "clicked", "value": 2}, "value", "got 2"),
        ({"kind": "applause"}, "kind", "'thumb'"),
        ({"extra": 1}, "extra", "not permitted"),
        ({"response_id": None}, "response_id", "give response_id or session_id"),
        ({"response_id": 5}, "response_id", "string"),
    ],
)
async def test_bad_feedback_is_told_which_field_and_why_alone_and_in_a_batch(
    client: httpx.AsyncClient, body: dict[str, Any], field: str, says: str
) -> None:
    bad = thumb(feedback_id=fresh(), **body)
    response = await client.post("/feedback", json=bad)
    assert response.status_code == 422
    assert response.headers["content-type"] == "application/problem+json"
    (error,) = response.json()["errors"]
    assert error["field"] == field
    assert re.search(says, error["reason"])
    (result,) = await batch(client, bad)
    assert result == {
        "status": 422,
        "feedback_id": bad["feedback_id"],
        "detail": response.json()["detail"],
        "errors": [error],
    }


async def test_feedback_of_every_kind_is_recorded_as_it_was_said(client: httpx.AsyncClient, server: LiveServer) -> None:
    about = fresh()
    said = [
        {"kind": "thumb", "value": True},
        {"kind": "rating", "value": 4},
        {"kind": "preference", "rejected_response_id": "worse"},
        {"kind": "correction", "text": "fünf"},
        {"kind": "comment", "text": "nice"},
        {"kind": "metric", "name": "clicked", "value": False},
    ]
    results = await batch(client, *({"response_id": about, "source": "ann", **body} for body in said))
    assert [result["status"] for result in results] == [201] * 6
    rows = {row["kind"]: row for row in server.rows("feedback", f"response_id = '{about}'")}
    assert {row["feedback_id"] for row in rows.values()} == {result["feedback_id"] for result in results}
    assert (rows["thumb"]["value"], rows["metric"]["value"], rows["metric"]["name"]) == (1.0, 0.0, "clicked")
    assert (rows["rating"]["value"], rows["rating"]["name"]) == (4.0, "stars")
    assert rows["preference"]["rejected_response_id"] == "worse"
    assert rows["correction"]["text"] == "fünf"
    assert {row["source"] for row in rows.values()} == {"ann"}


async def test_a_bad_item_does_not_harm_the_others_and_results_are_in_order(
    client: httpx.AsyncClient, server: LiveServer
) -> None:
    about = fresh()
    known = thumb(response_id=about, feedback_id=fresh())
    assert (await client.post("/feedback", json=known)).status_code == 201
    items: list[Any] = [
        thumb(response_id=about, feedback_id="first-" + about),
        "no object",
        thumb(response_id=about, value=7),
        known,
        known | {"value": 0},
        None,
        thumb(response_id=about),
        {"feedback_id": 5},
    ]
    results = await batch(client, *items)
    assert [result["status"] for result in results] == [201, 422, 422, 200, 409, 422, 201, 422]
    assert results[0]["feedback_id"] == "first-" + about
    assert results[3]["feedback_id"] == results[4]["feedback_id"] == known["feedback_id"]
    assert [result["errors"][0]["field"] for result in results if result["status"] == 409] == ["feedback_id"]
    assert [result["feedback_id"] for result in results if result["status"] == 422] == [None] * 4
    recorded = {row["feedback_id"] for row in server.rows("feedback", f"response_id = '{about}'")}
    assert recorded == {known["feedback_id"], "first-" + about, results[6]["feedback_id"]}


async def test_repeats_inside_a_batch_are_recorded_once(client: httpx.AsyncClient, server: LiveServer) -> None:
    one = thumb(response_id=fresh(), feedback_id=fresh())
    results = await batch(client, one, one, one | {"value": 0}, one)
    assert [result["status"] for result in results] == [201, 200, 409, 200]
    (row,) = server.rows("feedback", f"response_id = '{one['response_id']}'")
    assert row["value"] == 1.0


async def test_a_thousand_items_take_a_few_commits_and_can_all_be_sent_again(
    client: httpx.AsyncClient, server: LiveServer
) -> None:
    about = fresh()
    items = [thumb(response_id=about, feedback_id=f"{about}-{i}") for i in range(1000)]
    before = await counted(client, "millrace_journal_commits")
    kinds = 'millrace_feedback_total{kind="thumb",verdict="%s"}'
    new, same = await counted(client, kinds % "new"), await counted(client, kinds % "same")
    batches = await counted(client, "millrace_feedback_batch_sum")
    assert {result["status"] for result in await batch(client, *items)} == {201}
    assert await counted(client, "millrace_journal_commits") - before <= 50
    assert {result["status"] for result in await batch(client, *items)} == {200}
    assert len(server.rows("feedback", f"response_id = '{about}'")) == 1000
    assert await counted(client, kinds % "new") == new + 1000
    assert await counted(client, kinds % "same") == same + 1000
    assert await counted(client, "millrace_feedback_batch_sum") == batches + 2000


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"feedback": [{}] * 1001}, 422, "1001 items are more than the 1000"),
        ({"feedback": thumb()}, 422, "feedback"),
        ({}, 422, "feedback: Field required"),
        ({"feedback": [], "atomic": True}, 422, "atomic"),
        ({"feedback": [{"text": "x" * (4 << 20)}]}, 413, "larger than 4194304 bytes"),
    ],
)
async def test_a_batch_that_is_none_is_refused_whole(
    client: httpx.AsyncClient, body: dict[str, Any], status: int, says: str
) -> None:
    response = await client.post("/feedback/batch", json=body)
    assert response.status_code == status
    assert response.headers["content-type"] == "application/problem+json"
    assert says in response.json()["detail"]


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"null", b'{"feedback": [{"text": "\\ud800"}]}'])
async def test_a_batch_that_is_no_json_object_is_refused_whole(client: httpx.AsyncClient, content: bytes) -> None:
    response = await client.post("/feedback/batch", content=content)
    assert response.status_code == 422
    assert response.json()["errors"]


async def test_an_empty_batch_is_fine(client: httpx.AsyncClient) -> None:
    assert await batch(client) == []


async def test_clients_that_send_the_same_batch_at_once_record_it_once(
    client: httpx.AsyncClient, server: LiveServer
) -> None:
    about = fresh()
    items = [thumb(response_id=about, feedback_id=f"{about}-{i}", value=i % 2) for i in range(50)]
    otherwise = [item | {"value": 1 - item["value"]} for item in items]
    sent = await asyncio.gather(*(batch(client, *choice) for choice in (items, otherwise) * 4))
    for i in range(50):
        statuses = sorted(results[i]["status"] for results in sent)
        assert statuses == [200, 200, 200, 201, 409, 409, 409, 409]
    rows = {row["feedback_id"]: row["value"] for row in server.rows("feedback", f"response_id = '{about}'")}
    assert len(rows) == 50
    for results, said in zip(sent, (items, otherwise) * 4, strict=True):
        for result, item in zip(results, said, strict=True):
            assert (rows[item["feedback_id"]] == item["value"]) == (result["status"] in (200, 201))


async def test_feedback_may_come_before_its_response_and_for_one_that_another_replica_served(
    client: httpx.AsyncClient, server: LiveServer
) -> None:
    theirs = fresh()
    mine = (await client.post("/generate", json={"prompt": "the mill", "max_tokens": 4})).json()["responses"][0]
    results = await batch(client, thumb(response_id=mine["response_id"]), thumb(response_id=theirs))
    assert [result["status"] for result in results] == [201, 201]
    joined = "response_id IN (SELECT response_id FROM interactions)"
    assert len(server.rows("feedback", f"response_id = '{mine['response_id']}' AND {joined}")) == 1
    assert server.rows("feedback", f"response_id = '{theirs}' AND {joined}") == []

    (row,) = server.rows("interactions", f"response_id = '{mine['response_id']}'")
    columns = {name: value for name, value in row.items() if name != "date"}
    other = Journal(server.home / "journal", JournalConfig(), "replica-9")
    other.open()
    await other.append("interactions", columns | {"response_id": theirs, "replica": "replica-9"})
    other.close()
    assert len(server.rows("feedback", f"response_id = '{theirs}' AND {joined}")) == 1


async def test_what_was_sealed_is_still_known(client: httpx.AsyncClient, server: LiveServer) -> None:
    one = thumb(feedback_id=fresh())
    assert (await client.post("/feedback", json=one)).status_code == 201
    async with asyncio.timeout(120):
        while await counted(client, "millrace_ledger_unsealed") > 0:
            await asyncio.sleep(0.1)
    assert (await client.post("/feedback", json=one)).status_code == 200
    assert (await client.post("/feedback", json=one | {"value": 0})).status_code == 409
    assert await counted(client, "millrace_ledger_healthy") == 1


async def test_openapi_describes_the_batch_and_its_results(client: httpx.AsyncClient) -> None:
    schema = (await client.get("/openapi.json")).json()
    route = schema["paths"]["/feedback/batch"]["post"]
    schemas = schema["components"]["schemas"]
    items = schemas["FeedbackBatchIn"]["properties"]["feedback"]
    assert items["maxItems"] == 1000
    assert items["items"]["anyOf"][0] == {"$ref": "#/components/schemas/FeedbackIn"}
    assert set(schemas["FeedbackIn"]["properties"]["kind"]["enum"]) >= {"thumb", "metric"}
    assert {"200", "413", "422", "503"} <= route["responses"].keys()
    assert "FeedbackResult" in json.dumps(schema["components"])
