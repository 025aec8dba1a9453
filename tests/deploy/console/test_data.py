"""The page Data: who may ask, what a query reaches and what not, results, exports and what is kept."""

from __future__ import annotations

import csv
import io
import json
import re
from html import unescape
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deploy.console.pages import data
from deploy.console.pages.data import charts
from serve.observability.audit import AuditLog
from tests.deploy.console.conftest import HOSTILE, Site, token

ENDLESS = "SELECT count(*) FROM range(1000000000000) t(i) WHERE hash(i) = 1"


class Analyst:
    """An admin's browser without scripts, at the page Data."""

    def __init__(self, client: httpx.Client, site: Site) -> None:
        self.client = client
        self.origin = {"Origin": site.url}
        self.csrf = token(client, "/console/data")

    def post(self, sql: str, path: str = "", **fields: str) -> httpx.Response:
        form = {"csrf": self.csrf, "sql": sql, **fields}
        return self.client.post(f"/console/data{path}", data=form, headers=self.origin)

    def cells(self, sql: str) -> list[str]:
        page = self.post(sql)
        assert page.status_code == 200, wrong(page)
        table = page.text.partition('<table class="result">')[2].partition("</table>")[0]
        return [unescape(cell) for cell in re.findall(r"<td[^>]*>([^<]*)</td>", table)]


def wrong(page: httpx.Response) -> str:
    found = re.search(r'<p class="wrong"[^>]*>([^<]*)</p>', page.text)
    return unescape(found[1]) if found else page.text[-500:]


def saved(page: httpx.Response) -> list[str]:
    return [unescape(link) for link in re.findall(r'<a href="(/console/data\?name=[^"]+)"', page.text)]


@pytest.fixture
def analyst(site: Site) -> Any:
    with site.client("ops") as client:
        yield Analyst(client, site)


def test_who_may_not_see_all_tenants_runs_and_keeps_no_query(site: Site) -> None:
    with site.client("ann") as ann:
        refused = ann.get("/console/data")
        assert refused.status_code == 403
        assert "Data needs a key with the scope admin; yours (ann) has feedback, generate, read" in refused.text
        assert 'href="/console/traffic"' in refused.text, "the menu is there"
        assert "/console/data" not in ann.get("/console/traffic").text
        form = {"csrf": token(ann), "sql": "SELECT 1", "name": "mine", "as": "csv"}
        for path in ("", "/export", "/save", "/delete"):
            assert ann.post(f"/console/data{path}", data=form, headers={"Origin": site.url}).status_code == 403, path
    with site.client("ops") as ops:  # a query needs the page's token, from this page
        for form, headers in (({}, {"Origin": site.url}), ({"csrf": token(ops)}, {"Origin": "http://evil.example"})):
            for path in ("", "/export"):
                sent = form | {"sql": "SELECT 1", "as": "csv"}
                assert ops.post(f"/console/data{path}", data=sent, headers=headers).status_code == 403
        assert "987654321" not in ops.get("/console/data?sql=SELECT+987654321&name=").text  # no link runs one


def test_a_query_reads_all_tenants_and_hostile_text_in_it_and_of_it_stays_text(analyst: Analyst, site: Site) -> None:
    found = analyst.cells("SELECT DISTINCT tenant FROM interactions WHERE \"user\" IN ('ann', 'eve') ORDER BY 1")
    assert found == ["acme", "other"]
    name, value = HOSTILE.replace('"', ""), HOSTILE.replace("'", "''")
    page = analyst.post(f"SELECT prompt, '{value}' AS \"{name}\" FROM interactions", name=HOSTILE)
    assert page.status_code == 200
    assert "<script>alert" not in page.text
    assert "<img src=x" not in page.text
    assert "&lt;script&gt;alert" in page.text


@pytest.mark.parametrize(
    "sql",
    [
        "FROM read_text('/etc/passwd')",
        "FROM '/etc/passwd'",
        "FROM glob('/etc/*')",
        "FROM glob('{home}/*')",
        "FROM read_text('{home}/keys.json')",
        "FROM read_text('{lake}/interactions/../../keys.json')",
        "FROM read_csv('/proc/self/environ')",
        "FROM read_json(['/dev/stdin'])",
        "FROM read_parquet('http://127.0.0.1:1/x.parquet')",
        "FROM read_duckdb('{home}/x.db')",
        "FROM sniff_csv('/etc/passwd')",
        "FROM enable_logging(storage='file', storage_path='{lake}/interactions')",
        "FROM postgres_query('x', 'y')",
        "COPY (SELECT 1) TO '{lake}/interactions/x.parquet'",
        "WITH x AS (COPY (SELECT 1) TO '{lake}/interactions/x.parquet') FROM x",
        "FROM query('COPY (SELECT 1) TO ''{lake}/interactions/x.parquet''')",
        "FROM query('WITH x AS (COPY (SELECT 1) TO ''{lake}/interactions/x.parquet'') FROM x')",
        "FROM query('SET lock_configuration = false')",
        "EXPLAIN ANALYZE COPY (SELECT 1) TO '{lake}/interactions/x.parquet'",
        "SELECT 1; SET lock_configuration = false; SELECT 1",
        "SET enable_external_access = true",
        "PRAGMA enable_profiling",
        "ATTACH '{home}/x.db'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "CREATE TABLE x AS SELECT 1",
        "CREATE SECRET (TYPE s3)",
        "EXPORT DATABASE '{home}/x'",
        "CALL pragma_version()",
        "DROP VIEW interactions",
        "FROM arrow_scan(1, 2, 3)",
        "FROM pandas_scan(1)",
        "SELECT getenv('HOME')",
    ],
)
def test_a_query_reaches_no_file_and_changes_nothing(analyst: Analyst, site: Site, sql: str) -> None:
    lake = site.settings.resolved().feedback.lake.uri
    page = analyst.post(sql.format(home=site.settings.home.resolve(), lake=lake))
    assert page.status_code == 422, page.text[-1000:]
    for secret in ("root:", "sha256", "PATH="):
        assert secret not in wrong(page)
    assert not list(site.settings.home.glob("**/x.*"))


@pytest.mark.parametrize(
    ("sql", "reason"),
    [
        ("", "give one query"),
        ("SELECT 1; SELECT 2", "give one query"),
        ("SELECT wrong FRM x", "syntax error"),
        ("SELECT " + ", ".join(f"1 AS c{i}" for i in range(201)), "201 columns"),
        ("SELECT 'infinity'::DATE", "cast its column to VARCHAR"),
        ("SELECT MAP {[1]: 2}", "cast its column to VARCHAR"),
    ],
)
def test_what_cannot_be_run_or_shown_says_why_beside_the_query(analyst: Analyst, sql: str, reason: str) -> None:
    page = analyst.post(sql)
    assert (page.status_code, reason in wrong(page)) == (422, True), wrong(page)


def test_time_memory_rows_and_cells_have_bounds(analyst: Analyst, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    page = analyst.post("SELECT i, repeat('é', 100000) AS long FROM range(100000) t(i)")
    table = page.text.partition('<table class="result">')[2].partition("</table>")[0]
    assert (page.status_code, table.count("<tr>") - 1, "there are more" in page.text) == (200, data.ROWS, True)
    assert len(page.text) < 1 << 20
    greedy = analyst.post("SELECT list(i) FROM range(300000000) t(i)")
    assert greedy.status_code == 422, greedy.text[-500:]
    with monkeypatch.context() as patch:
        patch.setattr(data, "SECONDS", 0.2)
        with pytest.raises(data.QueryError, match=r"stopped: it ran for 0\.2 s"):
            data._query(site.settings, ENDLESS, lambda rows: list(rows.batches))
    monkeypatch.setattr(data, "EXPORT_BYTES", 1 << 20)
    wide = "SELECT i, hash(i) FROM range(10000000) t(i)"
    with pytest.raises(data.QueryError, match="larger than 1 MiB"):
        data._query(site.settings, wide, lambda rows: data._write("csv", rows, io.BytesIO()))


def test_a_result_is_exported_whole_as_csv_and_parquet(analyst: Analyst) -> None:
    sql = "SELECT i AS a, '=1+1,\"' || i AS b FROM range(1000) t(i)"
    answer = analyst.post(sql, "/export", **{"as": "csv"})
    assert answer.headers["Content-Type"] == "text/csv; charset=utf-8"
    assert answer.headers["Content-Disposition"] == 'attachment; filename="query.csv"'
    assert "default-src 'self'" in answer.headers["Content-Security-Policy"]
    rows = list(csv.reader(io.StringIO(answer.text, newline="")))
    assert (rows[0], rows[1000], len(rows)) == (["a", "b"], ["999", '=1+1,"999'], 1001)
    answer = analyst.post(sql, "/export", **{"as": "parquet"})
    assert answer.headers["Content-Disposition"] == 'attachment; filename="query.parquet"'
    table = pq.read_table(io.BytesIO(answer.content))
    assert (table.num_rows, table.column_names) == (1000, ["a", "b"])
    for fields, reason in (({"as": "exe\r\nx: y"}, "csv or parquet"), ({}, "csv or parquet")):
        refused = analyst.post(sql, "/export", **fields)
        assert (refused.status_code, reason in wrong(refused)) == (422, True)
    assert analyst.post("FROM '/etc/passwd'", "/export", **{"as": "csv"}).status_code == 422


def test_queries_are_kept_by_name_replaced_and_deleted_on_record(analyst: Analyst, site: Site) -> None:
    for name, sql in (("", "SELECT 1"), ("a" * 101, "SELECT 1"), ("a\nb", "SELECT 1"), ("x", " "), ("x", "a" * 20001)):
        assert analyst.post(sql, "/save", name=name).status_code == 409
    name = f"best & {HOSTILE}"
    assert analyst.post("SELECT 1", "/save", name=name).status_code == 200
    assert analyst.post("SELECT 'kept' AS it", "/save", name=name).status_code == 200
    page = analyst.client.get("/console/data")
    [link] = [one for one in saved(page) if "best" in one]  # other tests keep queries of their own on this server
    assert "<script>alert" not in page.text
    opened = analyst.client.get(link)
    assert "SELECT &#39;kept&#39; AS it</textarea>" in opened.text
    assert wrong(analyst.client.get("/console/data?name=none")) == "There is no saved query 'none'."
    assert analyst.post("", "/delete", name=name).status_code == 303
    assert link not in saved(analyst.client.get("/console/data"))
    analyst.post("SELECT 1 AS secret_of_ann")
    entries = AuditLog(site.settings.path(site.settings.serve.audit)).entries()
    kept = [one for one in entries if one.action in ("console.save_query", "console.delete_query")]
    assert {one.who for one in kept} == {"ops of acme"}
    assert [(one.action, one.outcome) for one in kept[-3:]] == [
        ("console.save_query", "done"),
        ("console.save_query", "done"),
        ("console.delete_query", "done"),
    ]
    assert kept[-1].subject["name"] == name
    last = [one for one in entries if one.action == "console.query"][-1]
    assert last.subject["sql"].startswith("sha256 ")
    assert "secret_of_ann" not in json.dumps([one.subject for one in entries])


def test_a_result_is_drawn_over_its_first_column() -> None:
    table = pa.table({"day": pa.array([2, 1, None], pa.date32()), "n": [5, 4, 9], "name": ["a", "b", "c"]})
    rows = list(zip(*table.to_pydict().values(), strict=True))
    day = 86400.0
    [drawn] = charts(table.schema, rows)
    assert (drawn["title"], drawn["x"], drawn["y"], drawn["time"]) == ("n", [day, 2 * day], [4.0, 5.0], True)
    table = pa.table({"kind": ["thumb", "rating"], "n": [1.0, float("nan")], "none": pa.nulls(2, pa.int64())})
    [drawn] = charts(table.schema, list(zip(*table.to_pydict().values(), strict=True)))
    assert (drawn["labels"], drawn["x"], drawn["y"]) == (["thumb", "rating"], [0, 1], [1.0, None])
    for nothing in ({"n": [1, 2]}, {"n": [1], "m": [2]}, {"name": ["a", "b"], "other": ["a", "b"]}):
        table = pa.table(nothing)
        assert charts(table.schema, list(zip(*table.to_pydict().values(), strict=True))) == []
