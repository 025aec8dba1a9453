"""What an answer must be, held against its request, the rows that were recorded of it, and itself when repeated."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from loadtests.tiny_model import CONTEXT
from loadtests.valid_requests import CHAT, COMPLETIONS, EOS, GENERATE, Case, may_be_refused, refused

CLOSE: Final = 2e-3  # nats, between two answers that were computed in batches of different sizes


@dataclass(frozen=True)
class Fault:
    """Something that is wrong. ``kind`` is the same for what has one cause, as far as can be seen."""

    kind: str
    detail: str


@dataclass
class Choice:
    """One response as its client got it."""

    text: str = ""
    finish_reason: str | None = None
    response_id: str | None = None  # None where OpenAI's form has none
    token_ids: list[int] | None = None
    logprobs: list[float | None] | None = None
    tops: list[int] | None = None  # how many likeliest tokens came with each


@dataclass
class Answer:
    """An answer of any of the routes, whole or streamed."""

    status: int
    refusal: str = ""
    fields: list[str] = field(default_factory=list)  # that a refusal names
    answer_id: str = ""
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, int] | None = None
    prompt_ids: list[int] | None = None


def read(case: Case, status: int, body: Any) -> Answer:
    """The answer in a JSON body."""
    if status != 200:
        return _refusal(status, body)
    if case.path == GENERATE:
        choices = {
            index: Choice(
                item["text"], item["finish_reason"], item["response_id"], item.get("token_ids"), item.get("logprobs")
            )
            for index, item in enumerate(body["responses"])
        }
        return Answer(200, choices=choices, usage=body["usage"], prompt_ids=body.get("prompt_token_ids"))
    answer = Answer(200, answer_id=body["id"], usage=body["usage"], prompt_ids=body.get("prompt_token_ids"))
    for item in body["choices"]:
        _add(answer.choices.setdefault(item["index"], Choice()), item, item.get("message", item))
    return answer


def read_stream(case: Case, status: int, text: str) -> Answer:
    """The answer in server-sent events."""
    if not text.startswith(("data:", "event:", ":")):
        return _refusal(status, json.loads(text))
    if case.path == GENERATE:
        return _read_generate_stream(case, text)
    answer, ended = Answer(200), False
    for line in re.split(r"\r\n|\n|\r", text):
        if line == "data: [DONE]":
            ended = True
        elif line.startswith("data: "):
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                return _refusal(int(chunk["error"].get("code") or 500), chunk)
            answer.answer_id = chunk["id"]
            answer.usage = chunk.get("usage") or answer.usage
            for item in chunk["choices"]:
                _add(answer.choices.setdefault(item["index"], Choice()), item, item.get("delta", item))
    return answer if ended else Answer(599, "the stream has no end")


def _read_generate_stream(case: Case, text: str) -> Answer:
    deltas: dict[int, str] = {}
    for event in text.split("\n\n"):
        name, _, data = event.partition("\n")
        if not name.startswith("event: "):
            continue
        body = json.loads(data.removeprefix("data: "))
        if name == "event: delta":
            deltas[body["index"]] = deltas.get(body["index"], "") + body["text"]
        elif name == "event: error":
            return _refusal(body["status"], body)
        elif name == "event: done":
            answer = read(case, 200, body)
            for index, choice in answer.choices.items():
                if deltas.get(index, "") != choice.text:
                    return Answer(599, f"pieces make {deltas.get(index)!r}, the whole is {choice.text!r}")
            return answer
    return Answer(599, "the stream has no end")


def _refusal(status: int, body: dict[str, Any]) -> Answer:
    if "error" in body:
        error = body["error"]
        return Answer(status, error["message"], [error["param"]] if error["param"] else [])
    return Answer(status, body["detail"], [item["field"] for item in body.get("errors", ())])


def _add(choice: Choice, item: dict[str, Any], part: dict[str, Any]) -> None:
    choice.text += part.get("text") or part.get("content") or ""
    choice.finish_reason = item.get("finish_reason") or choice.finish_reason
    if (ids := item.get("token_ids")) is not None:
        choice.token_ids = (choice.token_ids or []) + ids
    if (logprobs := item.get("logprobs")) is None:
        return
    choice.logprobs, choice.tops = choice.logprobs or [], choice.tops or []
    if "content" in logprobs:
        choice.logprobs += [token["logprob"] for token in logprobs["content"] or ()]
        choice.tops += [len(token["top_logprobs"]) for token in logprobs["content"] or ()]
    else:
        choice.logprobs += logprobs["token_logprobs"]
        choice.tops += [len(top or ()) for top in logprobs["top_logprobs"] or ()]


def faults(case: Case, mode: str, answer: Answer, rows: Sequence[dict[str, Any]], tokenizer: Any) -> Iterator[Fault]:
    """What is wrong with one answer. ``rows``: all that were recorded of its request."""
    stated = refused(case, mode)
    if answer.status != 200:
        named = {name.partition(".")[0] for name in answer.fields}
        if answer.status >= 500:
            yield Fault(f"{answer.status}: {_gist(answer.refusal)}", answer.refusal)
        elif named & may_be_refused(case):
            return
        elif not stated:
            yield Fault(f"refused: {_gist(answer.refusal)}", f"{answer.status} {answer.fields} {answer.refusal}")
        elif not named & stated:
            yield Fault(f"names {answer.fields} for {sorted(stated)}", answer.refusal)
        elif rows:
            yield Fault("a refused request has rows", answer.refusal)
        return
    if stated:
        yield Fault(f"taken, though {sorted(stated)} is refused", "")
        return
    if sorted(answer.choices) != list(range(case.n * case.prompts)):
        yield Fault("number of choices", f"{sorted(answer.choices)} of {case.prompts} prompts")
        return
    recorded = by_choice(answer, rows)
    if len(rows) != len(answer.choices) or len(recorded) != len(answer.choices):
        yield Fault("number of rows", f"{len(rows)} rows, {len(recorded)} of them of the {len(answer.choices)} choices")
        return
    for index, choice in answer.choices.items():
        yield from _choice_faults(case, choice, recorded[index], tokenizer)
    yield from _usage_faults(case, answer, recorded)


def _gist(text: str) -> str:
    return re.sub(r"[0-9]+", "#", text)[:60]


def by_choice(answer: Answer, rows: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The row of each choice."""
    found = {row["response_id"]: row for row in rows}
    first = answer.answer_id.partition("-")[2]
    names = {
        index: choice.response_id or (first if index == 0 else f"{first}:{index}")
        for index, choice in answer.choices.items()
    }
    return {index: found[name] for index, name in names.items() if name in found}


def _choice_faults(case: Case, choice: Choice, row: dict[str, Any], tokenizer: Any) -> Iterator[Fault]:
    body, ids = case.body, row["response_token_ids"]
    echo = bool(body.get("echo"))
    if row["status"] != "complete" or row["finish_reason"] != choice.finish_reason:
        yield Fault("end of the row", f"{row['status']} {row['finish_reason']}, answered {choice.finish_reason}")
    if choice.text != row["response"] and not (echo and choice.text.endswith(row["response"])):
        yield Fault("text of the row", f"{row['response']!r}, answered {choice.text!r}")
    if choice.token_ids is None and body.get("return_token_ids"):
        yield Fault("no token ids", "they were requested")
    if choice.token_ids is not None and choice.token_ids != ids:
        yield Fault("token ids of the row", f"{ids}, answered {choice.token_ids}")
    yield from _logprob_faults(case, choice, row)
    yield from _end_faults(case, choice, row, tokenizer)
    yield from _label_faults(case, row)
    if (allowed := body.get("allowed_token_ids")) and not set(ids) <= {*allowed, EOS}:
        yield Fault("a token that is not allowed", f"{ids} of {allowed}")
    with_end = body.get("include_stop_str_in_output") and not body.get("skip_special_tokens", True)
    if choice.finish_reason == "stop" and not case.stops and not body.get("stop_token_ids") and not with_end:
        yield from _structure_faults(case, row["response"])


def _logprob_faults(case: Case, choice: Choice, row: dict[str, Any]) -> Iterator[Fault]:
    body, logprobs = case.body, row["logprobs"]
    if len(logprobs) != len(row["response_token_ids"]):
        yield Fault("logprobs of the row", f"{len(logprobs)} of {len(row['response_token_ids'])} tokens")
    if any(not math.isfinite(value) or value > 1e-5 for value in logprobs):
        yield Fault("a logprob that is none", f"{logprobs}")
    if case.temperature > 0 and body.get("top_k") == 1 and any(value < -1e-4 for value in logprobs):
        yield Fault("top_k 1 leaves a choice", f"{logprobs}")
    setting = body.get("logprobs")
    requested = setting is not None if case.path == COMPLETIONS else bool(setting)
    if not requested:
        if choice.logprobs:
            yield Fault("logprobs that were not requested", f"{choice.logprobs}")
        return
    answered = choice.logprobs or []
    answered = answered[-len(logprobs) :] if body.get("echo") and case.path == COMPLETIONS and logprobs else answered
    if len(answered) != len(logprobs):
        yield Fault("logprobs of the answer", f"{len(answered)} of {len(logprobs)} tokens")
    elif any(mine is None or abs(mine - its) > CLOSE for mine, its in zip(answered, logprobs, strict=True)):
        # OpenAI's form has no minus infinity, for which vLLM writes -9999.
        yield Fault("logprobs of the row and the answer", f"{logprobs}, answered {answered}")
    most = body.get("top_logprobs", 0) if case.path == CHAT else setting
    if case.path != GENERATE and most and not body.get("logprob_token_ids") and choice.tops:
        response = choice.tops[-len(logprobs) :]
        if any(not 1 <= top <= most + 1 for top in response):
            yield Fault("number of likeliest tokens", f"{response}, requested {most}")


def _end_faults(case: Case, choice: Choice, row: dict[str, Any], tokenizer: Any) -> Iterator[Fault]:
    body, ids, text = case.body, row["response_token_ids"], row["response"]
    most = min(case.max_tokens, CONTEXT - len(row["prompt_token_ids"]))
    if not 1 <= len(ids) <= most:
        yield Fault("number of tokens", f"{len(ids)} of at most {most}")
    wanted, form = body.get("structured_outputs"), (body.get("response_format") or {}).get("type", "text")
    structured = wanted is not None or form != "text"
    if len(ids) < min(body.get("min_tokens") or 0, most) and not structured:
        yield Fault("fewer than min_tokens", f"{len(ids)} of {body['min_tokens']}")
    kept = bool(body.get("include_stop_str_in_output"))
    for stop in case.stops:
        # Below min_tokens nothing ends a response, not even a stop text.
        if stop in text and not kept and not body.get("min_tokens"):
            yield Fault("stop text in the text", f"{stop!r} in {text!r}")
    if choice.finish_reason == "length":
        if len(ids) != most:
            yield Fault("length, but there was room", f"{len(ids)} of {most}")
        return
    if choice.finish_reason != "stop":
        yield Fault(f"finish_reason {choice.finish_reason}", "")
        return
    ends = {*(body.get("stop_token_ids") or ()), *(() if body.get("ignore_eos") else (EOS,))}
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    if ids[-1] not in ends and not any(stop in whole for stop in case.stops) and not structured:
        yield Fault("stop, but nothing stopped it", f"{ids} {whole!r}")


def _structure_faults(case: Case, text: str) -> Iterator[Fault]:
    wanted = case.body.get("structured_outputs") or {}
    kind = (case.body.get("response_format") or {}).get("type")
    if "choice" in wanted and text not in wanted["choice"]:
        yield Fault("not of the choices", f"{text!r}")
    if "regex" in wanted and not re.fullmatch(wanted["regex"], text):
        yield Fault("not of the regex", f"{text!r}")
    if "json" in wanted or kind in ("json_object", "json_schema"):
        try:
            json.loads(text)
        except ValueError:
            yield Fault("not JSON", f"{text!r}")


def _label_faults(case: Case, row: dict[str, Any]) -> Iterator[Fault]:
    """Whether the row has the request's sampling parameters."""
    body, sampling = case.body, row["sampling"]
    user = body.get("user") or (body.get("safety_identifier") if case.path != GENERATE else None)
    metadata = {name: text for name, text in row["metadata"] if not name.startswith("millrace:")}
    seed = body.get("seed")
    expected = {
        "endpoint": (row["endpoint"], case.path),
        "user": (row["user"], user),
        "session_id": (row["session_id"], body.get("session_id")),
        "metadata": (metadata, body.get("metadata") or {}),
        "n": (sampling["n"], case.n),
        "stop": (list(sampling["stop"]), case.stops),
        "seed": (sampling["seed"], None if seed == -1 else seed),
        "spans": ([span["start"] for span in row["policy_spans"]], [0]),
    }
    if "messages" in body:
        expected["messages"] = (json.loads(row["messages"]), body["messages"])
    if case.temperature > 0:
        expected["top_k"] = (sampling["top_k"], body.get("top_k") or 0)
    for name, (recorded, sent) in expected.items():
        if recorded != sent:
            yield Fault(f"{name} of the row", f"{recorded!r}, sent {sent!r}")
    for name, default in (("temperature", 1.0), ("top_p", 1.0), ("min_p", 0.0)):
        sent = body.get(name, default)
        if (case.temperature > 0 or name == "temperature") and abs(sampling[name] - sent) > 1e-6:
            yield Fault(f"{name} of the row", f"{sampling[name]!r}, sent {sent!r}")


def _usage_faults(case: Case, answer: Answer, rows: dict[int, dict[str, Any]]) -> Iterator[Fault]:
    if answer.usage is None:
        yield Fault("no usage", "")
        return
    prompt = sum(len(rows[index]["prompt_token_ids"]) for index in range(0, len(rows), case.n))
    completion = sum(len(row["response_token_ids"]) for row in rows.values())
    usage = {name: answer.usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    if list(usage.values()) != [prompt, completion, prompt + completion]:
        yield Fault("usage", f"{usage}, of {prompt} and {completion} tokens")


def differences(case: Case, one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> Iterator[Fault]:
    """How the rows of two answers to one request differ that is to be answered alike; each in the choices' order."""
    for mine, its in zip(one, other, strict=True):
        for name in ("response_token_ids", "response", "finish_reason"):
            if mine[name] != its[name]:
                yield Fault(f"another {name} when repeated", f"{mine[name]!r}, then {its[name]!r}")
                return
        pairs = zip(mine["logprobs"], its["logprobs"], strict=True)
        if any(abs(a - b) > CLOSE for a, b in pairs):
            yield Fault("other logprobs when repeated", f"{mine['logprobs']}, then {its['logprobs']}")
