from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from feedback_rows import append

from deploy import cli
from feedback.config import JournalConfig, LakeConfig
from feedback.journal.writer import Journal
from feedback.lake.tables import Lake
from feedback.schema import TABLES
from tests.object_store import serving
from tests.paths import ROOT

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


def interaction(name: str, **columns: Any) -> dict[str, Any]:
    return {
        "response_id": name,
        "request_id": f"of-{name}",
        "tenant": "default",
        "endpoint": "generate",
        "replica": "replica-0",
        "created_at": NOON,
        "completed_at": NOON + timedelta(seconds=1),
        "prompt": "two and two",
        "prompt_token_ids": [2, 4],
        "response": 'four,\n\x1b[31m"quoted"',
        "response_token_ids": [4],
        "logprobs": [-0.5],
        "policy_spans": [{"start": 0, "policy_version": 1}],
        "sampling": {"temperature": 1.0, "stop": []},
        "finish_reason": "stop",
        "status": "complete",
        "timings": {"total_ms": 9.0},
        "metadata": {"answer": "four"},
    } | columns


def put(lake: Lake, table: str, *rows: dict[str, Any]) -> None:
    lake.append(table, pa.Table.from_pylist(list(rows), schema=TABLES[table]))


@pytest.fixture
def used(tmp_path: Path) -> Iterator[Lake]:
    """A home with two responses, one of them in the journal still, whose server runs."""
    lake = Lake(str(tmp_path / "home" / "lake"), LakeConfig())
    lake.create()
    put(lake, "interactions", interaction("a"))
    thumb = {"kind": "thumb", "value": 1.0, "source": "ann", "tenant": "default", "created_at": NOON}
    put(lake, "feedback", {"feedback_id": "1", "response_id": "a"} | thumb)
    put(lake, "feedback", {"feedback_id": "2", "response_id": "nowhere"} | thumb)
    journal = Journal(tmp_path / "home" / "journal", JournalConfig(segment_seconds=60), "replica-0")
    journal.open()
    append(journal, "interactions", interaction("b"))
    yield lake
    journal.close()


def run(*arguments: str, capfdbinary: pytest.CaptureFixture[bytes]) -> tuple[int, str, str]:
    code = cli.run(["lake", *arguments])
    sys.stdout.flush()
    out, err = capfdbinary.readouterr()
    return code, out.decode(), err.decode()


def query(sql: str, *options: str, capfdbinary: pytest.CaptureFixture[bytes]) -> str:
    code, out, err = run("sql", sql, *options, capfdbinary=capfdbinary)
    assert code == 0, err
    return out


def test_a_query_sees_unsealed_rows_unless_they_are_left_out(used, capfdbinary):
    sql = "SELECT response_id FROM interactions ORDER BY ALL"
    assert query(sql, "--format", "csv", capfdbinary=capfdbinary).split() == ["response_id", "a", "b"]
    assert query(sql, "--format", "csv", "--sealed-only", capfdbinary=capfdbinary).split() == ["response_id", "a"]


def test_a_version_pins_a_table(used, capfdbinary):
    sql = "SELECT count(*) AS n FROM feedback"
    assert json.loads(query(sql, "--format", "json", capfdbinary=capfdbinary)) == [{"n": 2}]
    pinned = query(sql, "--format", "json", "--version", "feedback=1", capfdbinary=capfdbinary)
    assert json.loads(pinned) == [{"n": 1}]


def test_every_format_has_every_value(used, capfdbinary, tmp_path):
    sql = (
        "SELECT response_id, response, created_at, policy_spans, metadata, NULL AS nothing, 'nan'::DOUBLE AS nan, "
        "170141183460469231731687303715884105727::HUGEINT AS huge FROM interactions ORDER BY 1"
    )
    expected = {
        "response_id": "a",
        "response": 'four,\n\x1b[31m"quoted"',
        "created_at": "2026-03-01T12:00:00+00:00",
        "policy_spans": [{"start": 0, "policy_version": 1}],
        "metadata": {"answer": "four"},
        "nothing": None,
        "nan": None,
        "huge": 2**127 - 1,
    }
    assert json.loads(query(sql, "--format", "json", capfdbinary=capfdbinary))[0] == expected
    lines = query(sql, "--format", "jsonl", capfdbinary=capfdbinary).splitlines()
    assert [json.loads(line)["response_id"] for line in lines] == ["a", "b"]
    [first, _] = csv.DictReader(io.StringIO(query(sql, "--format", "csv", capfdbinary=capfdbinary), newline=""))
    assert first["response"] == expected["response"]
    assert first["nothing"] == ""
    assert json.loads(first["metadata"]) == expected["metadata"]
    query(sql, "--format", "parquet", "--out", str(tmp_path / "x.parquet"), capfdbinary=capfdbinary)
    table = pq.read_table(tmp_path / "x.parquet")
    assert table.schema.field("created_at").type == pa.timestamp("us", tz="UTC")
    assert table.column("policy_spans").to_pylist() == [expected["policy_spans"]] * 2
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["x.parquet"]


def test_a_table_is_for_eyes_nested_values_readable_and_no_control_character_gets_through(used, capfdbinary):
    out = query("SELECT response_id, response, metadata FROM interactions ORDER BY 1", capfdbinary=capfdbinary)
    assert '{"answer": "four"}' in out
    assert "four,\\n\\x1b[31m" in out
    assert "\x1b" not in out
    assert out.endswith("(2 rows)\n")
    limited = query("SELECT response_id FROM interactions", "--limit", "1", capfdbinary=capfdbinary)
    assert "(1 row; there are more" in limited
    assert query("SELECT 1 WHERE false", capfdbinary=capfdbinary).endswith("(0 rows)\n")


def test_a_row_too_wide_for_the_terminal_is_one_value_a_line(used, capfdbinary, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = query("SELECT * FROM interactions WHERE response_id = 'a'", capfdbinary=capfdbinary)
    assert len(out.splitlines()) > 20
    assert max(map(len, out.splitlines())) <= 80


def test_a_plan_is_shown_as_it_is(used, capfdbinary):
    out = query("EXPLAIN SELECT response_id FROM interactions", capfdbinary=capfdbinary)
    assert "Read Parquet" in out
    assert "explain_key" not in out


@pytest.mark.parametrize(
    ("format", "shown"), [("csv", "a,a_1,a_2\n1,2,3\n"), ("jsonl", '{"a": 1, "a_1": 2, "a_2": 3}\n')]
)
def test_columns_of_one_name_are_distinguished(used, capfdbinary, format, shown):
    assert (
        query("SELECT 1 AS a, 2 AS a, 3 AS a", "--format", format, capfdbinary=capfdbinary).replace("\r", "") == shown
    )
    assert "a_2" in query("SELECT 1 AS a, 2 AS a, 3 AS a", capfdbinary=capfdbinary)


def test_sql_may_come_from_standard_input(used, capfdbinary, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("-- a comment\nSELECT 40 + 2 AS n;\n"))
    assert json.loads(query("-", "--format", "json", capfdbinary=capfdbinary)) == [{"n": 42}]


@pytest.mark.parametrize(
    ("sql", "says"),
    [
        (
            "SELECT\n  x FROM interactions",
            '"x" not found in FROM clause! Candidate bindings: "date" (line 2, at: x FROM',
        ),
        ("SELEC 1", 'syntax error at or near "SELEC" (line 1, at: SELEC 1)'),
        ("SELECT * FROM interaction", 'Did you mean "interactions"? (line 1, at: interaction)'),
        ("SELECT 1; SELECT 2", "give one query, not 2"),
        ("", "give one query, not none"),
        ("SELECT error('boo')", "boo"),
        ("SELECT CAST(response AS INT) FROM interactions", "Could not convert"),
    ],
)
def test_a_wrong_query_is_one_line_with_its_place(used, capfdbinary, sql, says):
    code, out, err = run("sql", sql, capfdbinary=capfdbinary)
    assert (code, out) == (1, "")
    assert says in err or says.split(" Candidate")[0] in err
    assert len(err.splitlines()) == 1


WRITES = [
    "INSERT INTO feedback SELECT * FROM feedback",
    "COPY interactions TO 'copied.csv'",
    "COPY (SELECT 1) TO 'home/lake/interactions/copied.csv'",
    "WITH x AS (COPY (SELECT 1) TO 'home/lake/interactions/copied.csv') SELECT * FROM x",
    "SELECT (WITH x AS (COPY (SELECT 1) TO 'home/lake/interactions/copied.csv') SELECT 1)",
    "EXPLAIN ANALYZE COPY (SELECT 1) TO 'home/lake/interactions/copied.csv'",
    "EXPLAIN ANALYZE WITH x AS (COPY (SELECT 1) TO 'home/lake/interactions/copied.csv') SELECT * FROM x",
    "EXPLAIN /* */ ANALYZE COPY (SELECT 1) TO 'home/lake/interactions/copied.csv'",
    "DESCRIBE WITH x AS (COPY (SELECT 1) TO 'home/lake/interactions/copied.csv') SELECT * FROM x",
    "EXPORT DATABASE 'copied.csv'",
    "ATTACH 'copied.csv'",
    "SET threads = 1",
    "RESET enable_external_access",
    "CREATE TABLE copied AS SELECT 1",
    "DROP VIEW interactions",
    "PRAGMA enable_profiling",
    "INSTALL httpfs",
    "LOAD httpfs",
    "CALL checkpoint()",
    "SELECT 1; DROP VIEW interactions",
    "PREPARE x AS SELECT 1",
]


@pytest.mark.parametrize("sql", WRITES)
def test_a_statement_that_does_more_than_read_is_refused(used, capfdbinary, sql):
    code, _, err = run("sql", sql, capfdbinary=capfdbinary)
    assert code == 1
    assert "only queries" in err or "give one query" in err or "syntax error" in err
    assert list(Path().rglob("*copied*")) == []


@pytest.mark.parametrize("function", ["read_csv", "read_text", "read_parquet", "glob"])
def test_a_query_reaches_no_file_but_the_lakes(used, capfdbinary, tmp_path, function):
    (tmp_path / "secret.csv").write_text("a\n1\n")
    code, out, err = run("sql", f"FROM {function}('{tmp_path}/secret.csv')", capfdbinary=capfdbinary)
    assert (code, out) == (1, "")
    assert "Permission Error" in err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--version", "salads=1"], "'salads=1' is no TABLE=N"),
        (["--version", "feedback=x"], "'feedback=x' is no TABLE=N"),
        (["--out", "nowhere/x.csv"], "there is no folder nowhere"),
        (["--format", "xml"], "'xml'"),
        (["--limit", "0"], "0"),
    ],
)
def test_a_wrong_option_is_named(used, capfdbinary, options, says):
    code, _, err = run("sql", "SELECT 1", *options, capfdbinary=capfdbinary)
    assert code == 2
    assert says in err


def test_a_version_that_is_not_there_is_named(used, capfdbinary):
    code, _, err = run("sql", "SELECT 1", "--version", "feedback=99", capfdbinary=capfdbinary)
    assert code == 1
    assert "version 99" in err


@pytest.mark.parametrize("arguments", [("sql", "SELECT 1"), ("stats",), ("stats", "--orphans")])
def test_without_a_lake_a_command_says_so_and_makes_nothing(arguments, capfdbinary, tmp_path):
    code, out, err = run(*arguments, capfdbinary=capfdbinary)
    assert (code, out) == (1, "")
    assert "there is no lake at" in err
    assert list(tmp_path.iterdir()) == []


def test_an_empty_lake_says_so(capfdbinary, tmp_path):
    Lake(str(tmp_path / "home" / "lake"), LakeConfig()).create()
    code, out, err = run("stats", capfdbinary=capfdbinary)
    assert code == 0, err
    assert "the lake is empty" in out
    assert not (tmp_path / "home" / "journal").exists()


def test_a_file_that_was_there_stays_when_the_query_fails(used, capfdbinary, tmp_path):
    (tmp_path / "x.csv").write_text("old")
    sql = "SELECT CASE WHEN range = 60000 THEN error('boo') ELSE range::VARCHAR END FROM range(100000)"
    code, _, err = run("sql", sql, "--format", "csv", "--out", "x.csv", capfdbinary=capfdbinary)
    assert code == 1
    assert "boo" in err
    assert (tmp_path / "x.csv").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["x.csv"]


ENDLESS = "SELECT sum(a.range * b.range % 7) FROM range(10000000) a, range(10000000) b"


def test_a_query_that_runs_too_long_is_stopped(used, capfdbinary):
    started = time.monotonic()
    code, _, err = run("sql", ENDLESS, "--timeout", "0.3", capfdbinary=capfdbinary)
    assert code == 1
    assert "it ran for 0.3 s (--timeout)" in err
    assert time.monotonic() - started < 20


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "deploy.cli", "lake", *arguments]


ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_query_at_once(used, number, tmp_path):
    sql = "SELECT range FROM range(1000000000000) WHERE range < 5000 OR range % 1000000000007 = 5"
    with subprocess.Popen(
        command("sql", sql, "--format", "csv"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT | {"TMPDIR": str(tmp_path)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "range\n"
        process.send_signal(number)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 128 + number
    assert "stopped by" in err
    assert list(tmp_path.glob("millrace-*")) == [], "what it spilled is gone"


def test_on_an_object_store_the_commands_read_and_end_well(tmp_path):
    with serving() as options:
        lake = Lake("s3://bucket/lake", LakeConfig(storage_options=options))
        lake.create()
        for day in range(8):
            put(lake, "interactions", interaction(f"r{day}", created_at=NOON + timedelta(days=day)))
        where = ["--feedback.lake.uri", lake.uri, "--feedback.lake.storage_options", json.dumps(options)]
        for _ in range(2):
            line = command("sql", "SELECT response_id FROM interactions LIMIT 1", "--format", "csv", *where)
            done = subprocess.run(line, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
            assert (done.returncode, done.stderr) == (0, "")
            assert done.stdout.startswith("response_id\nr")
        line = command("sql", "FROM read_text('/etc/hostname')", *where)
        done = subprocess.run(line, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1
        assert "Permission Error" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_statistics_are_shown_as_text_and_as_json(used, capfdbinary):
    code, out, err = run("stats", capfdbinary=capfdbinary)
    assert code == 0, err
    assert "interactions  1     1" in out
    assert "feedback: 1 of 2 complete responses have any (50.0%)" in out
    assert "rewards: none" in out
    assert "orphans: 1 feedback rows wait" in out
    assert "duplicate ids: none" in out
    code, out, _ = run("stats", "--json", "--sealed-only", capfdbinary=capfdbinary)
    found = json.loads(out)
    assert found["tables"]["interactions"]["rows"] == 1
    assert found["tables"]["interactions"]["unsealed_rows"] == 0
    assert found["feedback"]["rate"] == 1.0
    assert found["orphans"] == {"count": 1, "oldest": "2026-03-01T12:00:00+00:00"}


def test_rewards_are_shown_by_policy(used, capfdbinary):
    row = {"missing": {}, "scorer": "human@0", "scored_at": NOON + timedelta(minutes=2), "response_id": "a"}
    put(used, "rewards", row | {"reward": 0.25, "components": {"human": 0.25}})
    code, out, err = run("stats", capfdbinary=capfdbinary)
    assert code == 0, err
    header, first = out[out.index("rewards by policy") :].splitlines()[1:3]
    shown = dict(zip(header.split(), first.split(), strict=True))
    assert (shown["policy"], shown["scored"], shown["mean"], shown["sd"], shown["median"]) == (
        "1",
        "1",
        "0.250",
        "-",
        "0.250",
    )
    assert shown["human"] == "0.250"
    assert "from response to reward: p50 119.0 s" in out
    assert "1 complete responses have no reward by human@0" in out
    _, out, _ = run("stats", "--json", capfdbinary=capfdbinary)
    [rewards] = json.loads(out)["rewards"]
    assert rewards["components"] == {"human": {"responses": 1, "mean": 0.25}}
    assert rewards["quantiles"]["0.5"] == 0.25


def test_orphans_are_listed(used, capfdbinary):
    code, out, err = run("stats", "--orphans", capfdbinary=capfdbinary)
    assert code == 0, err
    _, orphan = out.splitlines()
    assert orphan.split()[:4] == ["2", "nowhere", "default", "thumb"]
    _, out, _ = run("stats", "--orphans", "--json", capfdbinary=capfdbinary)
    [listed] = json.loads(out)
    assert listed["feedback_id"] == "2"
    put(used, "interactions", interaction("nowhere"))
    _, out, _ = run("stats", "--orphans", capfdbinary=capfdbinary)
    assert "no orphans" in out
