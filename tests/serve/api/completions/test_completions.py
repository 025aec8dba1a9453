"""The routes below /v1, spoken to by OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import openai
import pytest

from loadtests.tiny_model import CONTEXT
from tests.serve.api.generate.test_generate_stream import left_requests
from tests.serve.conftest import LiveServer, reference_logprobs

GREEDY: dict[str, Any] = {"model": "millrace", "temperature": 0, "max_tokens": 8}
ROWS_TIMEOUT_S = 120
HI: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    """OpenAI's client, as it comes."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture
async def async_client(server: LiveServer) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's asynchronous client, as it comes."""
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def uuid_of(answer: str) -> str:
    prefix, _, rest = answer.partition("-")
    assert prefix in ("cmpl", "chatcmpl")
    assert uuid.UUID(rest).version == 7
    return rest


def rows_of(server: LiveServer, answer: str) -> list[dict[str, Any]]:
    """The rows of an answer by its id, in the order of its choices."""
    first = uuid_of(answer)
    rows = server.rows("interactions", f"starts_with(response_id, '{first}')")
    rows.sort(key=lambda row: int(row["response_id"].partition(":")[2] or 0))
    expected = [first if index == 0 else f"{first}:{index}" for index in range(len(rows))]
    assert [row["response_id"] for row in rows] == expected
    return rows


def wait_for_rows(server: LiveServer, where: str, count: int = 1) -> list[dict[str, Any]]:
    deadline = time.monotonic() + ROWS_TIMEOUT_S
    while time.monotonic() < deadline:
        if len(rows := server.rows("interactions", where)) >= count:
            return rows
        time.sleep(0.05)
    raise TimeoutError(where)


def test_the_served_model_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["millrace"]
    assert client.models.retrieve("millrace").id == "millrace"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_a_completion_is_recorded_as_generate_records_it(client: openai.OpenAI, server: LiveServer) -> None:
    answer = client.completions.create(prompt="the mill", **GREEDY)
    [row] = rows_of(server, answer.id)
    body = {"prompt": "the mill", "temperature": 0, "max_tokens": 8}
    other = httpx.post(f"{server.url}/generate", json=body, timeout=60).json()
    [like] = server.rows("interactions", f"request_id = '{other['request_id']}'")
    differ = ("response_id", "request_id", "endpoint", "created_at", "completed_at", "timings", "logprobs", "date")
    assert {k: v for k, v in row.items() if k not in differ} == {k: v for k, v in like.items() if k not in differ}
    assert row["endpoint"] == "/v1/completions"
    assert row["logprobs"] == pytest.approx(like["logprobs"], abs=1e-5)
    policy = server.store.get(row["policy_spans"][0]["policy_version"])
    expected = reference_logprobs(policy.path, row["prompt_token_ids"], row["response_token_ids"])
    assert row["logprobs"] == pytest.approx(expected, abs=1e-4)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (row["response"], row["finish_reason"])
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(row["response_token_ids"])
    assert 0 <= row["timings"]["queue_ms"] <= row["timings"]["first_token_ms"] <= row["timings"]["total_ms"]


def test_chat_goes_through_the_policys_template_and_is_kept_as_it_was_sent(
    client: openai.OpenAI, server: LiveServer
) -> None:
    messages: list[Any] = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "mia"},
    ]
    answer = client.chat.completions.create(
        messages=messages, model="millrace", max_completion_tokens=6, temperature=0.7, seed=3
    )
    [row] = rows_of(server, answer.id)
    assert json.loads(row["messages"]) == messages
    assert row["prompt"] == "system: be kind\nuser: hi\nassistant:"
    assert row["endpoint"] == "/v1/chat/completions"
    assert row["response"] == answer.choices[0].message.content
    assert row["sampling"]["temperature"] == pytest.approx(0.7)
    assert (row["sampling"]["max_tokens"], row["sampling"]["seed"]) == (6, 3)
    policy = server.store.get(row["policy_spans"][0]["policy_version"])
    expected = reference_logprobs(policy.path, row["prompt_token_ids"], row["response_token_ids"], temperature=0.7)
    assert row["logprobs"] == pytest.approx(expected, abs=1e-4)


def test_who_asked_is_kept(client: openai.OpenAI, server: LiveServer) -> None:
    answer = client.chat.completions.create(
        messages=HI,
        model="millrace",
        max_tokens=2,
        user="u1",
        metadata={"answer": "42"},
        extra_headers={"X-Session-Id": "s1", "X-Request-Id": "mine-1"},
    )
    [row] = rows_of(server, answer.id)
    assert (row["user"], row["session_id"], row["request_id"]) == ("u1", "s1", "mine-1")
    assert (row["tenant"], dict(row["metadata"])) == ("default", {"answer": "42"})
    other = client.completions.create(
        prompt="a", model="millrace", max_tokens=2, extra_headers={"X-Request-Id": "mine-1"}
    )
    assert uuid_of(other.id) != uuid_of(answer.id)


def test_choices_are_numbered_through_all_prompts(client: openai.OpenAI, server: LiveServer) -> None:
    answer = client.completions.create(prompt=["one", "two", "three"], model="millrace", n=2, max_tokens=5, seed=1)
    rows = rows_of(server, answer.id)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == [row["response"] for row in rows]
    assert [row["prompt"] for row in rows] == ["one", "one", "two", "two", "three", "three"]
    assert len({row["request_id"] for row in rows}) == 1
    assert all(row["sampling"]["n"] == 2 for row in rows)


def test_token_ids_are_a_prompt_too(client: openai.OpenAI, server: LiveServer) -> None:
    answer = client.completions.create(prompt=[[5, 6, 7], [8, 9]], model="millrace", max_tokens=2, echo=True)
    assert [(row["prompt"], row["prompt_token_ids"]) for row in rows_of(server, answer.id)] == [
        (None, [5, 6, 7]),
        (None, [8, 9]),
    ]


@pytest.mark.parametrize("n", [1, 3])
def test_a_streamed_completion_is_that_of_a_plain_request(client: openai.OpenAI, server: LiveServer, n: int) -> None:
    body: dict[str, Any] = {"prompt": "the same", "model": "millrace", "max_tokens": 12, "seed": 9, "n": n}
    plain = client.completions.create(**body)
    texts, ends, usage, seen = [""] * n, [None] * n, None, set()
    for chunk in client.completions.create(stream=True, stream_options={"include_usage": True}, **body):
        seen.add(chunk.id)
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
                index = choice.index
                where = f"response_id = '{uuid_of(chunk.id)}{f':{index}' if index else ''}' AND status = 'complete'"
                assert server.rows("interactions", where), "its end went out before its row was there"
    # A stream never sends the bytes of a character that has not come whole.
    assert [text.rstrip("\ufffd") for text in texts] == [choice.text.rstrip("\ufffd") for choice in plain.choices]
    assert usage == plain.usage
    [answer] = seen
    rows, like = rows_of(server, answer), rows_of(server, plain.id)
    assert [row["finish_reason"] for row in rows] == ends
    assert [row["response"] for row in rows] == texts
    for name in ("response_token_ids", "policy_spans", "sampling", "prompt"):
        assert [row[name] for row in rows] == [row[name] for row in like]
    for row, other in zip(rows, like, strict=True):
        assert row["logprobs"] == pytest.approx(other["logprobs"], abs=1e-5)


async def test_streamed_chats_of_many_clients_are_all_recorded(
    async_client: openai.AsyncOpenAI, server: LiveServer
) -> None:
    async def chat(number: int) -> tuple[str, str]:
        stream = await async_client.chat.completions.create(
            messages=[{"role": "user", "content": f"client {number}"}],
            model="millrace",
            max_tokens=10 + number % 7,
            stream=True,
            user="chats",
        )
        text, answer = "", ""
        async for chunk in stream:
            answer = chunk.id
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
        return uuid_of(answer), text

    said = dict(await asyncio.gather(*(chat(number) for number in range(24))))
    rows = server.rows("interactions", "\"user\" = 'chats'")
    assert {row["response_id"]: row["response"] for row in rows} == said
    assert {row["status"] for row in rows} == {"complete"}


def test_logprobs_that_are_asked_for_are_those_of_the_row(client: openai.OpenAI, server: LiveServer) -> None:
    body: dict[str, Any] = {"model": "millrace", "max_tokens": 6, "seed": 2}
    answer = client.completions.create(prompt="abc", logprobs=3, **body)
    [row] = rows_of(server, answer.id)
    told = answer.choices[0].logprobs
    assert told is not None
    assert told.token_logprobs == pytest.approx(row["logprobs"], abs=1e-5)
    assert told.top_logprobs is not None
    assert all(1 <= len(top) <= 4 for top in told.top_logprobs)  # by text, which bytes of characters have not
    chat = client.chat.completions.create(messages=HI, logprobs=True, top_logprobs=2, **body)
    [row] = rows_of(server, chat.id)
    content = chat.choices[0].logprobs
    assert content is not None
    assert content.content is not None
    assert [token.logprob for token in content.content] == pytest.approx(row["logprobs"], abs=1e-5)
    quiet = client.completions.create(prompt="abc", **body)
    assert quiet.choices[0].logprobs is None
    assert rows_of(server, quiet.id)[0]["logprobs"]


def test_streamed_logprobs_are_those_of_the_row(client: openai.OpenAI, server: LiveServer) -> None:
    told: list[float] = []
    answer = ""
    for chunk in client.completions.create(prompt="abc", model="millrace", max_tokens=9, logprobs=2, stream=True):
        answer = chunk.id
        for choice in chunk.choices:
            assert choice.logprobs is not None
            assert choice.logprobs.token_logprobs is not None
            told += [logprob for logprob in choice.logprobs.token_logprobs if logprob is not None]
    assert told == pytest.approx(rows_of(server, answer)[0]["logprobs"], abs=1e-5)


def test_an_echoed_prompt_is_no_part_of_the_response(client: openai.OpenAI, server: LiveServer) -> None:
    answer = client.completions.create(prompt="hello", echo=True, logprobs=1, **GREEDY)
    [row] = rows_of(server, answer.id)
    assert answer.choices[0].text == "hello" + row["response"]
    told = answer.choices[0].logprobs
    assert told is not None
    assert told.token_logprobs is not None
    assert len(told.token_logprobs) == len(row["prompt_token_ids"]) + len(row["response_token_ids"])
    assert told.token_logprobs[5:] == pytest.approx(row["logprobs"], abs=1e-5)


def test_a_stop_text_ends_a_response_before_it(client: openai.OpenAI, server: LiveServer) -> None:
    whole = client.completions.create(prompt="stop", model="millrace", max_tokens=40, seed=6).choices[0].text
    mark = next(character for character in whole[3:] if character.isascii() and whole.index(character) >= 3)
    answer = client.completions.create(prompt="stop", model="millrace", max_tokens=40, seed=6, stop=[mark])
    assert answer.choices[0].text == whole[: whole.index(mark)]
    [row] = rows_of(server, answer.id)
    assert (row["response"], row["finish_reason"]) == (answer.choices[0].text, "stop")
    assert (row["sampling"]["stop"], row["status"]) == ([mark], "complete")


@pytest.mark.parametrize("chat", [False, True])
def test_the_last_of_sixteen_stop_texts_ends_a_response(client: openai.OpenAI, server: LiveServer, chat: bool) -> None:
    def ask(**more: Any) -> tuple[str, str]:
        shared: dict[str, Any] = {"model": "millrace", "max_tokens": 40, "seed": 6, **more}
        if chat:
            said = client.chat.completions.create(messages=[{"role": "user", "content": "stop"}], **shared)
            return said.choices[0].message.content or "", said.id
        answer = client.completions.create(prompt="stop", **shared)
        return answer.choices[0].text, answer.id

    whole, _ = ask()
    mark = next(character for character in whole[3:] if character.isascii() and whole.index(character) >= 3)
    stops = [*(f"never said {i}" for i in range(15)), mark]
    text, request = ask(stop=stops)
    assert text == whole[: whole.index(mark)]
    [row] = rows_of(server, request)
    assert (row["finish_reason"], row["sampling"]["stop"]) == ("stop", stops)
    with pytest.raises(openai.BadRequestError, match="stop: 17 entries are more than the 16"):
        ask(stop=[*stops, "one more"])


def test_what_else_shapes_the_sampling_is_in_the_row_and_in_its_logprobs(
    client: openai.OpenAI, server: LiveServer
) -> None:
    answer = client.completions.create(
        prompt="bias",
        model="millrace",
        max_tokens=5,
        logit_bias={"70": 100},
        presence_penalty=0.5,
        extra_body={"min_tokens": 2},
    )
    [row] = rows_of(server, answer.id)
    assert row["response_token_ids"] == [70] * 5
    assert row["logprobs"] == pytest.approx([0] * 5, abs=1e-3)
    shaped = json.loads(dict(row["metadata"])["millrace:sampling"])
    assert shaped == {"logit_bias": {"70": 100.0}, "presence_penalty": 0.5, "min_tokens": 2}


def test_structured_output_is_made_and_recorded(client: openai.OpenAI, server: LiveServer) -> None:
    answer = client.chat.completions.create(
        messages=HI, model="millrace", max_tokens=5, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    )
    assert answer.choices[0].message.content in ("yes", "no")
    [row] = rows_of(server, answer.id)
    assert row["response"] == answer.choices[0].message.content
    assert "structured_outputs" in json.loads(dict(row["metadata"])["millrace:sampling"])
    assert len(row["logprobs"]) == len(row["response_token_ids"])


def test_a_client_that_leaves_a_stream_has_aborted_rows_with_the_tokens_so_far(
    client: openai.OpenAI, server: LiveServer
) -> None:
    for number in range(10):  # until the client is gone before all is made
        stream = client.completions.create(
            prompt=["long"] * 40, model="millrace", max_tokens=240, stream=True, user=f"v1 leaver {number}", n=8
        )
        for _ in range(3):
            next(stream)
        stream.close()
        rows = wait_for_rows(server, f"\"user\" = 'v1 leaver {number}'", 320)
        assert len(rows) == 320
        for row in rows:
            assert (row["status"] == "aborted") is (row["finish_reason"] == "abort")
            assert len(row["logprobs"]) == len(row["response_token_ids"])
            assert bool(row["policy_spans"]) is bool(row["response_token_ids"])
        cut_off = [row for row in rows if row["status"] == "aborted"]
        if any(1 <= len(row["response_token_ids"]) < 240 for row in cut_off):
            return
    pytest.fail("no client left while its responses were made")


def test_every_choice_of_a_stream_that_echoes_has_the_logprobs_of_the_prompt(client: openai.OpenAI) -> None:
    for seed in range(4):
        stream = client.completions.create(
            prompt="the mill", model="millrace", max_tokens=3, n=16, echo=True, logprobs=1, stream=True, seed=seed
        )
        told: dict[int, list[str]] = {}
        for chunk in stream:
            for choice in chunk.choices:
                if choice.logprobs is not None:
                    told.setdefault(choice.index, []).extend(choice.logprobs.tokens or [])
        assert len(told) == 16
        assert all("".join(tokens[:8]) == "the mill" for tokens in told.values())


def test_a_client_that_leaves_a_plain_request_has_an_aborted_row(server: LiveServer) -> None:
    body = {"prompt": ["gone"], "max_tokens": 250, "n": 16, "ignore_eos": True}
    for outcome, rows in left_requests(server, body, path="/v1/completions"):
        assert len(rows) in (0, 16)
        for row in rows:
            assert len(row["logprobs"]) == len(row["response_token_ids"])
        if "aborted" in {row["status"] for row in rows}:
            assert outcome == "left"
            return
    pytest.fail("no client left while its responses were made")


def test_a_form_that_the_one_backend_of_grammars_does_not_know_is_refused_and_changes_none_for_others(
    client: openai.OpenAI,
) -> None:
    boolean = {"type": "boolean"}
    schema = {"type": "object", "properties": {"a": boolean}, "required": ["a"], "patternProperties": {"^x": boolean}}
    both = {"allOf": [{"type": "object", "properties": {"a": boolean}}, {"type": "object", "required": ["a"]}]}
    for unknown in (schema, both):
        with pytest.raises(openai.BadRequestError, match="xgrammar"):
            client.completions.create(
                prompt="a", model="millrace", max_tokens=5, extra_body={"structured_outputs": {"json": unknown}}
            )
    answer = client.completions.create(
        prompt="a", model="millrace", max_tokens=5, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    )
    assert answer.choices[0].text in ("yes", "no")


def test_rows_that_would_repeat_too_much_of_a_body_are_refused_with_their_size(server: LiveServer) -> None:
    body = {"prompt": ["a"] * 64, "n": 16, "max_tokens": 2, "stop": ["x" * 300_000]}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 413
    assert "its 1024 responses would be recorded with 307" in answer.json()["error"]["message"]
    body = {"prompt": [30] * 200, "n": 16, "max_tokens": 2, "stop": ["x" * 100_000]}
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200, "tokens are one prompt"


def test_feedback_takes_the_ids_that_the_client_sees(client: openai.OpenAI, server: LiveServer) -> None:
    answer = client.chat.completions.create(messages=HI, model="millrace", max_tokens=3, n=3)
    first = uuid_of(answer.id)
    said = [
        {"response_id": answer.id, "kind": "thumb", "value": 1},
        {"response_id": f"{answer.id}:0", "kind": "comment", "text": "choice 0"},
        {"response_id": f"{answer.id}:2", "kind": "preference", "rejected_response_id": f"chatcmpl-{first}:1"},
    ]
    for one in said:
        assert httpx.post(f"{server.url}/feedback", json=one, timeout=60).status_code == 201
    assert (
        httpx.post(f"{server.url}/feedback/batch", json={"feedback": said}, timeout=60).json()["results"][2]["status"]
        == 201
    )
    rows = server.rows("feedback", f"starts_with(response_id, '{first}')")
    assert {row["response_id"] for row in rows} == {first, f"{first}:2"}
    assert {row["rejected_response_id"] for row in rows} == {None, f"{first}:1"}
    same = {"response_id": answer.id, "kind": "preference", "rejected_response_id": first}
    assert httpx.post(f"{server.url}/feedback", json=same, timeout=60).status_code == 422
    assert (
        httpx.post(f"{server.url}/feedback", json=said[0] | {"response_id": "chatcmpl-x"}, timeout=60).status_code
        == 201
    )


def test_after_a_swap_rows_have_the_policy_that_sampled(client: openai.OpenAI, server: LiveServer) -> None:
    before = server.store.serving()
    assert before is not None
    other = 2 if before.version != 2 else 1
    seen = []
    for version in (other, before.version):
        server.settle(server.promote(version))
        answer = client.completions.create(prompt="the mill turns", **GREEDY)
        [row] = rows_of(server, answer.id)
        assert row["policy_spans"] == [{"start": 0, "policy_version": version}]
        policy = server.store.get(version)
        expected = reference_logprobs(policy.path, row["prompt_token_ids"], row["response_token_ids"])
        assert row["logprobs"] == pytest.approx(expected, abs=1e-4)
        seen.append(answer.choices[0].text)
    assert seen[0] != seen[1]


@pytest.mark.parametrize(
    ("body", "error", "param", "says"),
    [
        ({"model": "gpt-4"}, openai.NotFoundError, "model", "millrace"),
        ({"prompt": ""}, openai.BadRequestError, "prompt", "non-empty"),
        ({"prompt": "x" * CONTEXT}, openai.BadRequestError, "prompt", f"{CONTEXT} tokens .* {CONTEXT} tokens"),
        ({"prompt": [5] * 300}, openai.BadRequestError, "prompt", f"{CONTEXT} tokens.* 300 "),
        ({"prompt": [1, 99999]}, openai.BadRequestError, "prompt", "99999"),
        ({"n": 99}, openai.BadRequestError, "n", "99 .* 16"),
        ({"max_tokens": 10**6}, openai.BadRequestError, "max_tokens", "4096"),
        ({"max_tokens": 0, "echo": True}, openai.BadRequestError, "max_tokens", "no response to record"),
        ({"temperature": -1}, openai.BadRequestError, "temperature", "-1"),
        ({"logprobs": 10**4}, openai.BadRequestError, "logprobs", "10000"),
        ({"best_of": 4}, openai.BadRequestError, "best_of", "n"),
        ({"user": "x" * 201}, openai.BadRequestError, "user", "200"),
        ({"extra_body": {"use_beam_search": True}}, openai.BadRequestError, "use_beam_search", "beam"),
        ({"extra_body": {"metadata": {"k": 1}}}, openai.BadRequestError, "metadata.k", "string"),
        ({"extra_body": {"kv_transfer_params": {"a": 1}}}, openai.BadRequestError, "kv_transfer_params", "clients"),
        ({"extra_body": {"guided_json": {}}}, openai.BadRequestError, "guided_json", "no such field"),
        ({"stream": True, "n": 99}, openai.BadRequestError, "n", "16"),
        ({"stream": True, "logprobs": 10**4}, openai.BadRequestError, "logprobs", "10000"),
        ({"stream": True, "prompt": "x" * CONTEXT}, openai.BadRequestError, "prompt", str(CONTEXT)),
    ],
)
def test_an_error_is_of_openais_classes_and_names_the_field(
    client: openai.OpenAI, body: dict[str, Any], error: type[openai.APIStatusError], param: str, says: str
) -> None:
    with pytest.raises(error, match=says) as caught:
        client.completions.create(**({"model": "millrace", "prompt": "a"} | body))
    assert isinstance(caught.value.body, dict)
    assert caught.value.body.keys() == {"message", "type", "param", "code"}
    assert caught.value.param == param


def test_a_body_that_is_too_large_is_refused_in_openais_form(server: LiveServer) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", content=b" " * (5 << 20), timeout=60)
    assert answer.status_code == 413
    assert answer.json()["error"]["message"]


def test_the_openapi_page_describes_every_field(server: LiveServer) -> None:
    schema = httpx.get(f"{server.url}/openapi.json", timeout=60).json()
    for path in ("/v1/completions", "/v1/chat/completions"):
        body = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert all(field["description"] for field in body["properties"].values())
        assert {"200", "400", "404", "413", "503", "504"} <= schema["paths"][path]["post"]["responses"].keys()
    feedback = schema["components"]["schemas"]["FeedbackIn"]
    assert "chatcmpl-U:i" in feedback["properties"]["response_id"]["description"]
