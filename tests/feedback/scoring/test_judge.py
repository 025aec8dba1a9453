"""The judge against real HTTP servers: one that behaves as a script says, and vLLM's own."""

from __future__ import annotations

import email.utils
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from feedback_rows import interaction, put
from judge_server import Answer, Asked, judge_server, says
from pydantic import SecretStr, ValidationError

from feedback.config import HumanConfig, JudgeConfig, ScoringConfig
from feedback.scoring.run import score
from feedback.scoring.sources.judge import Judge, parse_score, question
from feedback.scoring.sources.judge_cache import JudgeCacheError
from loadtests.tiny_model import make_model_folder
from tests.paths import ROOT
from tests.vllm_server import serving

RUBRIC = "How good is this answer?\nQ: {prompt}\nA: {response}"


@pytest.fixture
def config(tmp_path: Path) -> JudgeConfig:
    return JudgeConfig(
        url="http://127.0.0.1:9", model="m", rubric=RUBRIC, cache=str(tmp_path / "judge"), backoff_s=0.01, timeout_s=5
    )


def rows(*responses: str, **columns: Any) -> pa.Table:
    made = [
        {"prompt": "p", "messages": None, "response": text, "response_token_ids": [1], "metadata": []} | columns
        for text in responses
    ]
    schema = pa.schema(
        [
            ("prompt", pa.string()),
            ("messages", pa.string()),
            ("response", pa.string()),
            ("response_token_ids", pa.list_(pa.int32())),
            ("metadata", pa.map_(pa.string(), pa.string())),
            ("tries", pa.int32()),
        ]
    )
    return pa.Table.from_pylist(made, schema=schema)


def at(config: JudgeConfig, url: str, **changes: Any) -> Judge:
    return Judge(JudgeConfig.model_validate(config.model_dump() | {"url": url} | changes))


def test_a_score_is_requested_with_the_rubric_and_brought_into_0_to_1(config):
    with judge_server(lambda asked, _: says(json.dumps({"score": 5 if "good one" in asked.text else 2}))) as server:
        judge = at(config, server.url, low=1, high=5, api_key="sk-1", extra={"top_p": 0.5, "max_tokens": None})
        assert judge.by_row(rows("good one", "bad one")) == ([1.0, 0.25], [None, None])
    request = next(iter(server.about("good one")))
    assert request.text.startswith("How good is this answer?\nQ: p\nA: good one\n")
    assert request.headers["Authorization"] == "Bearer sk-1"
    assert (request.body["model"], request.body["top_p"], request.body["temperature"]) == ("m", 0.5, 0.0)
    assert "max_tokens" not in request.body
    schema = request.body["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["score"] == {"type": "integer", "minimum": 1, "maximum": 5}


def test_braces_in_the_texts_stand_for_themselves_and_metadata_can_be_named(config):
    texts: list[str] = []
    rubric = 'Like {"score": 1}: {response} for {metadata.gold-answer}, {prompt}'
    with judge_server(lambda asked, _: (texts.append(asked.text), says('{"score": 1}'))[1]) as server:
        judge = at(config, server.url, rubric=rubric)
        nasty = "{prompt} {0} {metadata.gold-answer} %s \\1"
        messages = json.dumps([{"role": "system", "content": "{response}"}, {"role": "user", "content": "hi"}])
        values, _ = judge.by_row(rows(nasty, metadata=[("gold-answer", "{response}")], messages=messages))
        assert values == [0.1]
        expected = f'Like {{"score": 1}}: {nasty} for {{response}}, system: {{response}}\nuser: hi'
        assert texts[0].startswith(expected)
        values, reasons = judge.by_row(rows("a", "b", metadata=[]))
    assert values == [None, None]
    assert reasons == ["no 'gold-answer' in the response's metadata, which the rubric refers to"] * 2
    assert len(texts) == 1


@pytest.mark.parametrize(
    "failure",
    [
        Answer(500, {"error": {"message": "oops"}}),
        Answer(503, b"<html>busy</html>"),
        Answer(429, {"error": "slow down"}),
        Answer(408, b""),
        Answer(drop=True),
        Answer(200, b"garbage"),
        Answer(200, {"choices": []}),
    ],
    ids=["500", "503", "429", "408", "dropped", "garbage", "no choice"],
)
def test_what_may_pass_is_tried_again_until_it_does(config, failure):
    with judge_server(lambda asked, attempt: failure if attempt < 3 else says('{"score": 10}')) as server:
        assert at(config, server.url).by_row(rows("a", "b")) == ([1.0, 1.0], [None, None])
    assert len(server.asked) == 6


def test_what_does_not_pass_is_missing_with_the_reason_after_the_last_attempt(config):
    with judge_server(lambda asked, _: Answer(500, {"error": {"message": "no GPU"}})) as server:
        values, reasons = at(config, server.url, attempts=3).by_row(rows("a", tries=1))
    assert (values, reasons) == ([None], ["try 2 of 3: HTTP 500: no GPU (3 attempts)"])
    assert len(server.asked) == 3
    closed = at(config, server.url, attempts=2)
    values, reasons = closed.by_row(rows("a"))
    assert values == [None]
    assert (reasons[0] or "").startswith("try 1 of 3: ConnectError")


def test_retry_after_is_honoured_by_all_up_to_the_bound_in_the_settings(config):
    limited = Answer(429, {"error": "slow down"}, headers={"Retry-After": "0.6"})
    with judge_server(lambda asked, n: limited if "a" in asked.text.split()[-20:] and n == 1 else says("3")) as server:
        started = time.monotonic()
        values, _ = at(config, server.url, concurrency=1).by_row(rows("a", "b"))
        assert values == [0.3, 0.3]
        assert 0.5 < time.monotonic() - started < 4
    later = email.utils.formatdate(time.time() + 3600, usegmt=True)
    for retry_after in ("3600", later):
        limited = Answer(429, {"error": "slow down"}, headers={"Retry-After": retry_after})
        with judge_server(lambda asked, n, limited=limited: limited if n == 1 else says("3")) as server:
            started = time.monotonic()
            judge = at(config, server.url, max_backoff_s=0.3)
            assert judge.by_row(rows(f"new {retry_after}"))[0] == [0.3]
            assert 0.2 < time.monotonic() - started < 4


def test_a_slow_answer_is_given_up_after_the_timeout_and_the_whole_run_after_the_deadline(config):
    with judge_server(lambda asked, _: Answer(wait=2.0) if "slow" in asked.text else says("10")) as server:
        judge = at(config, server.url, timeout_s=0.2, attempts=2)
        values, reasons = judge.by_row(rows("slow", "quick"))
        assert values == [None, 1.0]
        assert reasons[0] == "try 1 of 3: no answer within 0.2 s (2 attempts)"
        started = time.monotonic()
        judge = at(config, server.url, deadline_s=0.3, concurrency=1)
        values, reasons = judge.by_row(rows("slow 1", "slow 2", "slow 3"))
        assert time.monotonic() - started < 1.5
    assert values == [None] * 3
    assert (reasons[0] or "").startswith("try 1 of 3: no answer within deadline_s=0.3")
    assert reasons[2] == "try 1 of 3: not asked within deadline_s=0.3"


def test_a_status_that_says_the_settings_are_wrong_ends_the_asking_for_this_run(config):
    refusal = Answer(401, {"error": {"message": "Incorrect API key: sk-secret"}})
    with judge_server(lambda asked, _: refusal) as server:
        judge = at(config, server.url, concurrency=1, api_key="sk-secret")
        values, reasons = judge.by_row(rows(*"abcde"))
        _, more = judge.by_row(rows("f"))
    assert values == [None] * 5
    assert reasons[0] == "try 1 of 3: HTTP 401: Incorrect API key: ***"
    assert reasons[4] == more[0] == "try 1 of 3: not asked: HTTP 401: Incorrect API key: ***"
    assert len(server.asked) == 1


def test_a_server_that_knows_no_response_format_is_asked_in_words(config):
    def script(asked: Asked, _: int) -> Answer:
        if "response_format" in asked.body:
            return Answer(400, {"error": {"message": "response_format is not supported"}})
        return says("I would say 7/10.")

    with judge_server(script) as server:
        judge = at(config, server.url, concurrency=1)
        assert judge.by_row(rows("a", "b", "c"))[0] == [0.7] * 3
    assert ["response_format" in asked.body for asked in server.asked] == [True, False, False, False]


def test_a_question_that_the_server_refuses_is_asked_once_a_run(config):
    with judge_server(lambda asked, _: Answer(400, {"error": {"message": "too long"}})) as server:
        values, reasons = at(config, server.url).by_row(rows("a"))
    assert (values, reasons) == ([None], ["try 1 of 3: HTTP 400: too long"])
    assert ["response_format" in asked.body for asked in server.asked] == [True, False]


@pytest.mark.parametrize(
    ("content", "says_what"),
    [
        ("no idea", "no score in the judge's answer 'no idea'"),
        ('{"score": 11}', "11 is not from 0 to 10"),
        (None, "no text"),
    ],
)
def test_an_answer_without_a_usable_score_is_final(config, content, says_what):
    with judge_server(lambda asked, _: says(content)) as server:
        values, reasons = at(config, server.url).by_row(rows("a"))
    assert values == [None]
    assert says_what in (reasons[0] or "")
    assert not (reasons[0] or "").startswith("try")
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("content", "score"),
    [
        ('{"score": 7}', 7),
        ('Thinking {"a": 1} … {"score": 2.5} is it', 2.5),
        ('{"score": true}', None),
        ('{"score": "7"}', 7),
        ("Score: 8", 8),
        ("My score is 8 because 2 things fit", 8),
        ("7/10", 7),
        ("7 out of 10", 7),
        ("-1", -1),
        ("between 3 and 4", None),
        ("", None),
    ],
)
def test_a_score_is_read_from_what_judges_write(content, score):
    assert parse_score(content, 10.0) == score


NESTED = "[" * 100_000


@pytest.mark.parametrize(
    ("body", "says_what"),
    [
        (says('{"score": ' + "9" * 310 + "}").body, "score inf is not from 0 to 10"),
        (says('{"score": -' + "9" * 310 + "}").body, "score -inf is not from 0 to 10"),
        (says('{"score": ' + "9" * 5000 + "}").body, "score inf is not"),
        (says('{"score": ' + NESTED + "}").body, "no score in the judge's answer"),
        (says("1" * 200_000 + " " * 200_000).body, "score inf is not"),
        (says("\ud800").body, "no score in the judge's answer '\\ud800'"),
        (says(None).body | {"choices": [{"message": {"content": None}, "finish_reason": "\ud800"}]}, "no text"),
        (json.loads('{"choices": [1]}'), "no chat completion"),
    ],
)
def test_no_answer_of_a_judge_ends_a_run_and_the_other_responses_keep_their_score(lake, config, body, says_what):
    put(lake, "interactions", [interaction("bad"), interaction("good", response="sunshine")])

    def answer(asked: Asked, _: int) -> Answer:
        return says("5") if "sunshine" in asked.text else Answer(200, body)

    with judge_server(answer) as server:
        judge = config.model_dump() | {"url": server.url, "runs": 1, "attempts": 1}
        scoring = ScoringConfig(human=HumanConfig(weight=0), judge=judge)
        assert score(lake, scoring).components == {"judge": 1}
    with lake.connect() as connection:
        found = connection.sql("SELECT response_id, reward, missing['judge'] FROM rewards").fetchall()
    assert {response_id: reward for response_id, reward, _ in found} == {"good": 0.5, "bad": None}
    assert says_what in next(why for response_id, _, why in found if response_id == "bad")


def test_an_error_that_quotes_half_a_character_and_one_that_is_nested_deeply_are_reasons(lake, config):
    put(lake, "interactions", [interaction("half", response="half"), interaction("deep", response="deep")])
    half = Answer(422, {"error": {"message": "can't read \ud800"}})

    def answer(asked: Asked, _: int) -> Answer:
        return half if "half" in asked.text else Answer(422, NESTED.encode())

    with judge_server(answer) as server:
        scoring = ScoringConfig(human=HumanConfig(weight=0), judge=config.model_dump() | {"url": server.url})
        assert score(lake, scoring).missing == 2


def test_messages_that_are_nested_too_deeply_to_be_read_are_a_reason_and_no_end_of_the_run(config):
    with judge_server(lambda asked, _: says("5")) as server:
        table = pa.concat_tables([rows("a", messages='[{"content": ' + NESTED), rows("b")])
        values, reasons = at(config, server.url).by_row(table)
    assert values == [None, 0.5]
    assert "the messages can't be read" in (reasons[0] or "")


def test_verdicts_that_can_t_be_kept_end_the_run_and_name_the_file(config):
    with judge_server(lambda asked, _: says("5")) as server:
        judge = at(config, server.url)
        judge._cache._database.execute("PRAGMA query_only = ON")
        with pytest.raises(JudgeCacheError, match=r"verdicts\.sqlite"):
            judge.by_row(rows("a"))


def test_no_more_questions_are_asked_at_once_than_the_settings_allow(config):
    with judge_server(lambda asked, _: Answer(200, says("1").body, wait=0.05)) as server:
        values, _ = at(config, server.url, concurrency=3).by_row(rows(*(f"r{n}" for n in range(12))))
    assert values == [0.1] * 12
    assert server.most_at_once == 3


def test_a_verdict_is_paid_once_for_equal_texts_and_for_every_later_run(config):
    with judge_server(lambda asked, _: says("4")) as server:
        assert at(config, server.url).by_row(rows("same", "same", "other"))[0] == [0.4] * 3
        assert at(config, server.url).by_row(rows("other", "same"))[0] == [0.4] * 2
        assert len(server.asked) == 2
        at(config, server.url, rubric=RUBRIC + "!").by_row(rows("same"))
        at(config, server.url, high=5).by_row(rows("same"))
        at(config, server.url, model="another").by_row(rows("same"))
        assert len(server.asked) == 5
    kept = (Path(config.cache) / "verdicts.sqlite").read_bytes()
    assert b"same" not in kept, "no text of a user's is kept"


def kept_keys(config: JudgeConfig) -> set[str]:
    with closing(sqlite3.connect(Path(config.cache) / "verdicts.sqlite")) as database:
        return {key for (key,) in database.execute("SELECT key FROM verdicts")}


def test_who_reads_the_kept_verdicts_without_the_key_can_not_try_texts_against_them(config, tmp_path):
    with judge_server(lambda asked, _: says("4")) as server:
        judge = at(config, server.url)
        judge.by_row(rows("same"))
    guess = judge._key(question(config, rows("same").to_pylist()[0]))
    [kept] = kept_keys(config)
    assert kept != guess
    assert len(kept) == len(guess)
    modes = {path.name: path.stat().st_mode & 0o777 for path in Path(config.cache).iterdir()}
    assert set(modes.values()) == {0o600}
    key = tmp_path / "judge.key"
    assert key.stat().st_mode & 0o777 == 0o600
    key.write_text("short")
    with pytest.raises(JudgeCacheError, match=r"judge\.key is no key"):
        at(config, server.url)


def test_verdicts_that_an_older_millrace_kept_are_found_still_and_their_hashes_are_keyed(config):
    folder = Path(config.cache)
    folder.mkdir()
    judge_key = Judge(config.model_copy(update={"cache": str(folder / "unused")}))._key
    old = {name: judge_key(question(config, rows(name).to_pylist()[0])) for name in ("a", "b")}
    with closing(sqlite3.connect(folder / "verdicts.sqlite", isolation_level=None)) as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("CREATE TABLE verdicts (key TEXT PRIMARY KEY, score REAL NOT NULL)")
        database.executemany("INSERT INTO verdicts VALUES (?, ?)", [(old["a"], 4.0), (old["b"], 6.0)])
    os.chmod(folder / "verdicts.sqlite", 0o644)
    for _ in range(2):
        assert Judge(config).by_row(rows("a", "b"))[0] == [0.4, 0.6], "without a question"
    bytes_kept = b"".join(path.read_bytes() for path in folder.glob("verdicts*"))
    assert not any(key.encode() in bytes_kept for key in old.values())
    assert {path.stat().st_mode & 0o777 for path in folder.glob("verdicts*")} == {0o600}


KILLED = """
import json, sys
from feedback.config import JudgeConfig
from feedback.scoring.sources.judge import Judge
import pyarrow as pa
rows = [{"prompt": "p", "messages": None, "response": f"r{n}", "metadata": []} for n in range(6)]
Judge(JudgeConfig(**json.loads(sys.argv[1]))).by_row(pa.Table.from_pylist(rows))
"""


def test_a_run_that_is_killed_and_repeated_asks_nothing_twice(config):
    def script(asked: Asked, _: int) -> Answer:
        if len(server.asked) == 4:
            os.kill(process.pid, signal.SIGKILL)
        return says("6")

    with judge_server(script) as server:
        settings = json.dumps(config.model_dump(mode="json") | {"url": server.url, "concurrency": 1})
        process = subprocess.Popen([sys.executable, "-c", KILLED, settings], cwd=ROOT)
        assert process.wait(180) == -signal.SIGKILL
        assert at(config, server.url).by_row(rows(*(f"r{n}" for n in range(6))))[0] == [0.6] * 6
    asked = Counter(request.text.split("A: ")[1][:2] for request in server.asked)
    assert asked == {"r0": 1, "r1": 1, "r2": 1, "r3": 2, "r4": 1, "r5": 1}, "only the one in flight is asked again"


def test_a_folder_for_verdicts_that_can_not_be_written_is_named(config, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(JudgeCacheError, match=r"verdicts\.sqlite"):
        Judge(config.model_copy(update={"cache": str(tmp_path / "file")}))


def test_responses_whose_judge_failed_are_judged_by_later_runs_until_it_answers_or_they_give_up(lake, config):
    broken = {"r0", "r1"}

    def script(asked: Asked, _: int) -> Answer:
        return Answer(503, b"busy") if any(name in asked.text for name in broken) else says("10")

    def run(**changes: Any) -> tuple[int, int, dict[str, str]]:
        judge = JudgeConfig.model_validate(
            config.model_dump() | {"url": server.url, "attempts": 1, "runs": 3} | changes
        )
        result = score(lake, ScoringConfig(human=HumanConfig(weight=0), judge=judge))
        with lake.connect() as connection:
            found = connection.sql("SELECT response_id, missing FROM current_rewards").to_arrow_table().to_pylist()
        return (
            result.scored,
            result.retried,
            {row["response_id"]: dict(row["missing"]).get("judge", "") for row in found},
        )

    put(lake, "interactions", [interaction(f"r{n}", response=f"r{n}") for n in range(4)])
    with judge_server(script) as server:
        assert run() == (4, 2, {"r0": "try 1 of 3: HTTP 503: busy (1 attempts)", "r2": "", "r3": "",
                                "r1": "try 1 of 3: HTTP 503: busy (1 attempts)"})  # fmt: skip
        lake.table("rewards").optimize.compact()
        broken.remove("r1")
        scored, retried, missing = run()
        assert (scored, retried) == (2, 1)
        assert missing == {"r0": "try 2 of 3: HTTP 503: busy (1 attempts)", "r1": "", "r2": "", "r3": ""}
        put(lake, "interactions", [interaction("r4", response="r4")])
        scored, retried, missing = run()
        assert (scored, retried) == (2, 0)
        assert missing["r0"] == "try 3 of 3: HTTP 503: busy (1 attempts)"
        assert run()[:2] == (0, 0), "given up"
        assert len(server.about("r2")) == 1
    with lake.connect() as connection:
        counts = connection.execute("SELECT response_id, count(*) FROM rewards GROUP BY ALL").fetchall()
    assert dict(counts) == {"r0": 3, "r1": 2, "r2": 1, "r3": 1, "r4": 1}


@pytest.mark.parametrize(
    ("changes", "says_what"),
    [
        ({"url": "localhost:8000"}, "http://"),
        ({"rubric": "rate it"}, "needs {response}"),
        ({"rubric": "{response} {propmt}"}, "{propmt} stands for nothing"),
        ({"low": 5, "high": 5}, "must be less than"),
        ({"api_key": "**********"}, "the mask"),
        ({"api_key": "sk-1 sk-2"}, "one word of printable ASCII"),
        ({"api_key": "sk-1\r\nX-Header: 2"}, "one word of printable ASCII"),
        ({"api_key": "sk-ключ"}, "one word of printable ASCII"),
        ({"api_key": " \n"}, "one word of printable ASCII"),
        ({"concurrency": 0}, "greater than or equal to 1"),
    ],
)
def test_a_judges_settings_that_can_not_work_are_refused(config, changes, says_what):
    with pytest.raises(ValidationError) as error:
        JudgeConfig.model_validate(config.model_dump() | changes)
    assert says_what in str(error.value)


def test_a_key_from_a_file_that_ends_with_a_line_end_is_sent_without_it(config):
    with judge_server(lambda asked, _: says("5")) as server:
        values, reasons = Judge(
            JudgeConfig.model_validate(config.model_dump() | {"url": server.url, "api_key": "sk-1\n"})
        ).by_row(rows("a"))
    assert (values, reasons) == ([0.5], [None])
    assert server.asked[0].headers["Authorization"] == "Bearer sk-1"


@pytest.mark.parametrize("before", [0, 195])
@pytest.mark.parametrize("answer", [lambda text: Answer(200, {"error": text}), lambda text: Answer(500, text), says])
def test_no_reason_repeats_the_key_or_the_half_of_it_before_the_quote_ends(config, answer, before):
    answer = answer("x" * before + "sk-secret is no verdict")
    with judge_server(lambda asked, _: answer) as server:
        values, reasons = at(config, server.url, api_key="sk-secret", attempts=1).by_row(rows("a"))
    assert values == [None]
    assert "***" in str(reasons[0])
    assert "sk-" not in str(reasons[0])


def test_an_api_key_is_written_in_clear_only_where_that_is_requested(config):
    with_key = config.model_copy(update={"api_key": SecretStr("sk-1")})
    assert "sk-1" not in repr(with_key) + str(with_key.model_dump(mode="json"))
    assert with_key.model_dump(mode="json", context={"secrets": True})["api_key"] == "sk-1"


@pytest.fixture(scope="module")
def vllm_url(tmp_path_factory) -> Iterator[str]:
    """vLLM's own OpenAI server, with a random model."""
    folder = make_model_folder(tmp_path_factory.mktemp("judge"), seed=1)
    # A random model would write white space without end where JSON allows it.
    outputs = json.dumps({"backend": "xgrammar", "disable_any_whitespace": True})
    with serving(folder, "--structured-outputs-config", outputs) as url:
        yield url


@pytest.mark.long
def test_vllms_own_server_gives_verdicts(lake, config, vllm_url):
    put(lake, "interactions", [interaction(f"r{n}", response=f"answer {n}") for n in range(6)])
    judge = JudgeConfig.model_validate(
        config.model_dump()
        | {"url": vllm_url, "model": "tiny", "rubric": "Rate {response}", "max_tokens": 32, "timeout_s": 60}
    )
    result = score(lake, ScoringConfig(human=HumanConfig(weight=0), judge=judge))
    assert (result.scored, result.missing, result.components) == (6, 0, {"judge": 6})
    with lake.connect() as connection:
        found = dict(connection.execute("SELECT response_id, components['judge'] FROM current_rewards").fetchall())
    assert all(value * 10 in range(11) for value in found.values())
    wrong = judge.model_copy(update={"model": "nobody", "runs": 1})
    values, reasons = Judge(wrong).by_row(rows("a"))
    assert values == [None]
    assert "HTTP 404" in (reasons[0] or "")
