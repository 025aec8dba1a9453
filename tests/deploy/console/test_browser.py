"""The console in a real browser, Debian's Chromium: what scripts do, and what a browser complains of."""

from __future__ import annotations

import http.server
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from evaluation.suites.held_out import HeldOut
from feedback.lake.tables import Lake
from serve.middleware.api_keys import read_keys, revoke_key
from tests.deploy.console.conftest import Site

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")
WAIT_MS = 60_000
ENEMY = Path(__file__).with_name("enemy.html").read_text()
_JUDGED = "SELECT 1 FROM feedback WHERE response_id = ?"
CONTRAST = Path(__file__).with_name("contrast.js").read_text()
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no chromium on PATH (Debian: apt-get install chromium; else set CHROMIUM)"
)


@dataclass
class Visitor:
    """A page of a browser of its own, and what it complained of."""

    page: Page
    site: Site
    wrong: list[str] = field(default_factory=list)

    def log_in(self, name: str) -> None:
        with self.site.client(name):  # once the server knows the key
            pass
        self.page.goto(f"{self.site.url}/console/")
        self.page.get_by_label("Key").fill(self.site.secrets[name])
        self.page.get_by_role("button", name="Log in").click()
        expect(self.page.locator("h1 + .sub time[title]")).to_be_attached()  # its script has run


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)


@pytest.fixture
def visitor(browser: Browser, site: Site) -> Iterator[Visitor]:
    """At the end: no script failed, nothing was refused, no request left the host."""
    context = browser.new_context(viewport={"width": 1300, "height": 850})
    context.set_default_timeout(WAIT_MS)
    expect.set_options(timeout=WAIT_MS)
    visitor = Visitor(context.new_page(), site)

    def elsewhere(request: Any) -> None:
        if not request.url.startswith((site.url, "data:", "blob:")):
            visitor.wrong.append(f"asked {request.url}")

    visitor.page.on("request", elsewhere)
    visitor.page.on("pageerror", lambda error: visitor.wrong.append(f"error {error}"))
    visitor.page.on("console", lambda line: visitor.wrong.append(line.text) if line.type == "error" else None)
    yield visitor
    context.close()
    assert visitor.wrong == []


def feedback_on(site: Site, response: str) -> list[dict[str, Any]]:
    config = site.settings.resolved().feedback
    with Lake(config.lake.uri, config.lake).connect(Path(config.journal.folder)) as connection:
        query = "SELECT kind, value, text, source, tenant FROM feedback WHERE response_id = $id ORDER BY created_at"
        return connection.sql(query, params={"id": response}).to_arrow_table().to_pylist()


def test_a_chat_streams_its_votes_reach_the_lake_and_hostile_text_stays_text(visitor: Visitor, site: Site) -> None:
    page = visitor.page
    visitor.log_in("ann")
    page.get_by_role("link", name="Playground", exact=True).click()
    page.get_by_label("Most tokens").fill("8")
    hostile = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
    page.locator("#ask textarea").fill(hostile)
    page.keyboard.press("Enter")
    expect(page.locator("#log .message .said").first).to_have_text(hostile)
    expect(page.locator(".answer .tokens span")).not_to_have_count(0)
    page.locator(".answer .up").click()
    expect(page.locator(".answer .outcome")).to_contain_text("Recorded.")
    expect(page.locator(".answer .up")).to_have_attribute("aria-pressed", "true")
    page.get_by_role("button", name="Correct it").click()
    page.locator(".correction textarea").fill("4")
    page.get_by_role("button", name="Record the correction").click()
    expect(page.locator(".correction")).to_be_hidden()
    page.locator(".answer a").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Response")
    expect(page.locator(".message .said").first).to_have_text(hostile)
    assert page.title() == "Response · Millrace"
    response = page.url.rpartition("/")[2]
    votes = feedback_on(site, response)
    assert [(vote["kind"], vote["value"], vote["text"]) for vote in votes] == [
        ("thumb", 1.0, None),
        ("correction", None, "4"),
    ]
    assert {(vote["source"], vote["tenant"]) for vote in votes} == {("ann", "acme")}


def test_an_answer_that_was_judged_says_later_which_policy_learned_from_it(
    visitor: Visitor, site: Site, model: Path
) -> None:
    page = visitor.page
    page.clock.install()
    visitor.log_in("ann")
    page.goto(f"{site.url}/console/playground")
    page.get_by_label("Most tokens").fill("4")
    page.locator("#ask textarea").fill("7+7=")
    page.keyboard.press("Enter")
    page.locator(".answer .up").click()
    outcome = page.locator(".answer .outcome")
    expect(outcome).to_contain_text("can learn from this")
    response, lake = str(page.locator(".answer").get_attribute("data-id")), site.settings.lake()
    deadline = time.monotonic() + 120
    while not lake.read(lambda rows: rows.execute(_JUDGED, [response]).fetchall()):  # until it is sealed
        assert time.monotonic() < deadline
        time.sleep(0.2)
    lineage, keys = {"lake_versions": lake.versions()}, HeldOut().keys({"prompt": "7+7="})
    made = site.settings.policy_store().publish(model, parent=1, lineage=lineage, metrics={}, learned_prompts=keys)
    expect(outcome).to_contain_text("can learn from this")
    page.clock.fast_forward(61_000)
    expect(outcome).to_have_text(f"Policy {made.version} learned from this.")
    outcome.get_by_role("link").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text(f"Policy {made.version}")


def test_hostile_text_of_every_input_runs_on_no_page(visitor: Visitor, site: Site) -> None:
    page = visitor.page
    hostile = "<img/src=x/onerror=\"document.title='taken'\"><svg/onload=\"document.title='taken'\">'\"{{7*7}}"
    response = site.generate("ann", hostile, user=hostile, session_id=hostile, metadata={"note": hostile})
    said = {"response_id": response, "kind": "comment", "text": hostile, "source": hostile}
    headers = {"X-API-Key": site.secrets["ann"]}
    assert httpx.post(f"{site.url}/feedback", json=said, headers=headers, timeout=60).status_code == 201
    site.make_key(hostile, "read")
    visitor.log_in("ops")
    page.goto(f"{site.url}/console/data")
    quoted = hostile.replace("'", "''").replace('"', '""')
    page.locator("textarea").fill(f'SELECT i AS "{quoted}", i AS "{quoted}2", \'<b>\' FROM range(3) t(i)')
    page.get_by_label("Name").fill(hostile)
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("status")).to_have_text(f"Saved as {hostile}.")
    page.get_by_role("button", name="Run").click()
    expect(page.locator(".charts.results figure")).to_have_count(1)
    address = quote(hostile, safe="")
    for path in (
        "",
        "policies",
        "policies/2",
        "traffic",
        f"traffic?user={address}",
        f"traffic?text={address}",
        f"traffic/{response}",
        "labels",
        "compare",
        f"data?name={address}",
        "data?name=%3Cimg%20src=x%3E",
        "keys",
        f"login?next=/console/{address}",
    ):
        page.goto(f"{site.url}/console/{path}")
        page.wait_for_load_state("networkidle") if path else expect(page.locator("h1")).to_be_visible()
        assert page.locator("img[src=x], svg[onload], [onerror]").count() == 0, path
        assert page.title().endswith("Millrace"), path
        assert "49" not in page.title()
    visitor.wrong = [line for line in visitor.wrong if "404" not in line]


def test_a_page_of_another_program_on_this_machine_does_and_reads_nothing(visitor: Visitor, site: Site) -> None:
    """Another port is the same site, so that the browser sends the session's cookie along."""
    page, before, answers = visitor.page, read_keys(site.keys), list[tuple[str, int]]()
    visitor.log_in("ops")

    class Evil(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(ENEMY.replace("SITE", site.url).encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Evil) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page.on("response", lambda answer: answers.append((answer.request.method, answer.status)))
        page.goto(f"http://127.0.0.1:{server.server_port}/")
        page.wait_for_function("window.read !== undefined")
        assert page.evaluate("window.read") == []
        expect(page.locator("iframe")).to_have_count(2)
        page.wait_for_timeout(500)
        server.shutdown()
    posted = [status for method, status in answers if method == "POST"]
    assert (set(posted), len(posted) >= 2) == ({403}, True)
    assert read_keys(site.keys) == before
    visitor.wrong = []  # a browser complains of what is refused here


def test_of_two_answers_the_better_one_is_chosen(visitor: Visitor, site: Site) -> None:
    page = visitor.page
    visitor.log_in("ann")
    page.goto(f"{site.url}/console/playground")
    page.get_by_label("Most tokens").fill("8")
    page.locator("#ask textarea").fill("3+3=")
    page.get_by_role("button", name="Two answers").click()
    better = page.locator(".pair .answer").nth(1)
    better.get_by_role("button", name="This one is better").click()
    expect(better.locator(".outcome")).to_contain_text("Recorded.")
    response = str(better.get_attribute("data-id"))
    assert [vote["kind"] for vote in feedback_on(site, response)] == ["preference"]


def test_a_promotion_needs_a_reason_and_says_why_the_gate_objects(visitor: Visitor, site: Site) -> None:
    page = visitor.page
    visitor.log_in("ops")
    page.goto(f"{site.url}/console/policies/2")
    button = page.locator("section form button.primary")
    button.click()  # the browser itself asks for the reason
    assert page.locator("textarea[name=why]:invalid").count() == 1
    page.locator("textarea[name=why]").fill(" ")
    with page.expect_response(lambda response: response.request.method == "POST") as answer:
        button.click()
    assert answer.value.status == 409
    expect(page.get_by_role("alert")).to_contain_text("A reason is needed")
    visitor.wrong = [line for line in visitor.wrong if "409" not in line]  # which a browser calls an error


def test_keys_judge_in_the_label_queue_and_lead_to_pages(visitor: Visitor, site: Site) -> None:
    page = visitor.page
    response = site.generate("ann", "9+9=")
    visitor.log_in("ann")
    page.keyboard.press("g")
    page.keyboard.press("l")
    expect(page.get_by_role("heading", level=1)).to_have_text("Label queue")
    expect(page.locator("#queue:enabled")).to_be_attached()
    item = page.locator("#item")
    expect(item).to_have_attribute("data-id", response)
    page.keyboard.press("ArrowDown")
    expect(page.locator("#outcome")).to_have_text("Recorded: bad.")
    expect(item).not_to_have_attribute("data-id", response)
    page.keyboard.press("ArrowLeft")
    expect(item).to_have_attribute("data-id", response)
    assert [(vote["kind"], vote["value"]) for vote in feedback_on(site, response)] == [("thumb", 0.0)]


def test_digits_rate_in_the_label_queue(visitor: Visitor, site: Site) -> None:
    page = visitor.page
    response = site.generate("ann", "9+8=")
    visitor.log_in("ann")
    page.goto(f"{site.url}/console/labels?scale=stars")
    expect(page.locator("#queue:enabled")).to_be_attached()
    expect(page.locator("#item")).to_have_attribute("data-id", response)
    page.keyboard.press("9")  # is no star
    page.keyboard.press("4")
    expect(page.locator("#outcome")).to_have_text("Recorded: 4.")
    expect(page.locator("#item")).not_to_have_attribute("data-id", response)
    assert [(vote["kind"], vote["value"]) for vote in feedback_on(site, response)] == [("rating", 4.0)]


def test_a_query_is_written_run_plotted_saved_and_exported(visitor: Visitor, site: Site) -> None:
    page = visitor.page
    visitor.log_in("ops")
    page.keyboard.press("g")
    page.keyboard.press("d")
    expect(page.get_by_role("heading", level=1)).to_have_text("Data")
    hostile = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
    quoted = hostile.replace("'", "''")
    page.locator("textarea").fill(f"SELECT i AS n, i * i AS square, '{quoted}' AS said FROM range(5) t(i)")
    expect(page.locator("#run[aria-keyshortcuts]")).to_be_attached()
    page.keyboard.press("Control+Enter")
    rows = page.locator("table.result tbody tr")
    expect(rows).to_have_count(5)
    expect(rows.last.locator("td")).to_have_text(["4", "16", hostile])
    expect(page.locator(".charts.results .u-over")).to_have_count(1)
    assert page.title() == "Data · Millrace"
    page.get_by_label("Name").fill("Squares")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("status")).to_have_text("Saved as Squares.")
    page.goto(f"{site.url}/console/data")
    page.get_by_role("link", name="Squares").click()
    expect(page.locator("textarea")).to_have_value(re.compile("AS square"))
    with page.expect_download() as download:
        page.get_by_role("button", name="Export CSV").click()
    assert download.value.suggested_filename == "query.csv"
    assert Path(download.value.path()).read_text().splitlines()[2].startswith("1,1,")
    page.get_by_role("button", name="Delete Squares").click()
    expect(page.get_by_role("link", name="Squares")).to_have_count(0)


def test_of_two_unnamed_answers_the_choice_is_a_preference(visitor: Visitor, site: Site) -> None:
    page = visitor.page
    site.generate("ann", "8+1=", n=3, temperature=1.5)
    visitor.log_in("ann")
    page.goto(f"{site.url}/console/compare")
    item = page.locator("#item")
    first, second = (str(item.get_attribute(f"data-{name}")) for name in ("first", "second"))
    page.get_by_role("button", name="This one is better").nth(1).click()
    expect(page.locator("#outcome")).to_contain_text("Recorded: the second is better.")
    config = site.settings.resolved().feedback
    with Lake(config.lake.uri, config.lake).connect(Path(config.journal.folder)) as connection:
        query = "SELECT source, rejected_response_id FROM feedback WHERE response_id = $id AND kind = 'preference'"
        found = connection.execute(query, {"id": second}).fetchall()
    assert ("ann", first) in found


def test_a_search_goes_on_where_it_ended_and_a_row_leads_to_its_response(visitor: Visitor, site: Site) -> None:
    page = visitor.page
    for number in range(8):
        site.generate("ann", f"{number}+7=", n=6, max_tokens=1)
    visitor.log_in("ann")
    page.goto(f"{site.url}/console/traffic")
    rows = page.locator("tr[data-href]")
    expect(rows).to_have_count(40)
    expect(page.locator("tr[data-href] time[title]").first).to_be_attached()
    page.get_by_role("button", name="Older").click()
    expect(rows).not_to_have_count(40)
    page.keyboard.press("/")
    page.keyboard.type("1+1=")
    page.keyboard.press("Enter")
    expect(rows).to_have_count(1)
    rows.first.locator("td").nth(1).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Response")


def test_a_revoked_key_leads_an_open_page_to_the_login(visitor: Visitor, site: Site) -> None:
    key_id = site.make_key("short", "read")
    visitor.log_in("short")
    revoke_key(site.keys, key_id)
    expect(visitor.page.get_by_role("heading", level=1)).to_have_text("Log in")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1300, 390])
def test_no_page_is_wider_than_its_window_and_its_text_can_be_read(
    browser: Browser, site: Site, tmp_path: Path, width: int, scheme: Any
) -> None:
    context = browser.new_context(viewport={"width": width, "height": 850}, color_scheme=scheme)
    with site.client("ops") as client:
        cookies = [{"name": name, "value": value, "url": site.url} for name, value in client.cookies.items()]
    page = context.new_page()
    for name in (
        "login",
        "",
        "policies",
        "policies/2",
        "playground",
        "traffic",
        f"traffic/{site.responses[0]}",
        "labels",
        "labels?scale=stars",
        "compare",
        "compare/suites",
        "data",
        "keys",
    ):
        page.goto(f"{site.url}/console/{name}")
        assert page.url == f"{site.url}/console/{name}"  # and not the login that it leads to
        if name == "login":
            context.add_cookies(cookies)  # type: ignore[arg-type]
        if name == "data":  # with a table, a plot and a saved query
            page.locator("textarea").fill(
                "SELECT created_at, len(response_token_ids) AS tokens, len(prompt) AS characters, prompt, response "
                "FROM interactions ORDER BY 1"
            )
            page.get_by_label("Name").fill("Lengths")
            page.get_by_role("button", name="Save").click()
            page.get_by_role("button", name="Run").click()
            expect(page.locator(".u-over").first).to_be_attached()
        page.screenshot(path=tmp_path / f"{re.sub('[^a-z0-9]', '-', name) or 'now'}.png", full_page=True)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        assert page.evaluate(CONTRAST) == [], name
    context.close()


def test_the_page_of_the_api_runs_from_files_of_this_server(visitor: Visitor, site: Site) -> None:
    visitor.page.goto(f"{site.url}/docs")
    expect(visitor.page.locator("#swagger-ui .opblock").first).to_be_visible()
