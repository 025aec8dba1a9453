"""The console by HTTP: who may see and do what, and that an enemy may not."""

from __future__ import annotations

import asyncio
import html
import io
import itertools
import json
import re
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime, timedelta
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import duckdb
import httpx
import pytest
from feedback_rows import interaction, put, reward, thumb
from markupsafe import escape
from starlette.routing import Mount

from deploy import initialise
from deploy.config import root
from deploy.config.differences import _masked
from deploy.config.root import Settings
from deploy.console.app import _own_path, _Stream, create
from deploy.console.pages import labels
from deploy.console.pages.compare import _PAIR, stored
from deploy.console.pages.visit import Answer
from deploy.console.worker import LINE_BYTES, respond, serve
from deploy.console.worker import PAGES as PAGES_OF_WORKER
from deploy.loop.lineage import current as own_lineage
from evaluation.decisions.ledger import MOVES
from evaluation.results import Sample
from evaluation.suites.held_out import HeldOut, position
from loadtests.event_lines import read_lines
from serve.app import create_app
from serve.middleware.api_keys import create_key, read_keys, revoke_key
from serve.observability.audit import AuditLog
from serve.reading.reader import Reader, ReadFailed
from tests.deploy.console.conftest import HOSTILE, Site, login, token
from tests.evaluation.test_results import evaluation, policy

PAGES = [
    "/console/",
    "/console/policies",
    "/console/policies/1",
    "/console/policies/2",
    "/console/playground",
    "/console/traffic",
    "/console/labels",
    "/console/compare",
    "/console/compare/suites",
    "/console/data",
    "/console/keys",
]
VIEWER = {"tenant": "t", "name": "n", "scopes": ["read"], "token": "x", "keys": True}


class Markup(HTMLParser):
    """What a page would run or fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.inline: list[str] = []
        self.fetched: list[str] = []
        self._script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = dict(attrs)
        self.inline += [f"{tag} {name}" for name in names if name == "style" or name.startswith("on")]
        self.fetched += [value or "" for name, value in attrs if name in ("src", "action")]
        self.fetched += [names["href"] or ""] if tag == "link" else []
        self.inline += ["style"] if tag == "style" else []
        self._script = tag == "script"

    def handle_data(self, data: str) -> None:
        if self._script and data.strip():
            self.inline.append(f"script {data[:50]}")

    def handle_endtag(self, tag: str) -> None:
        self._script = False


# Who gets in


@pytest.mark.parametrize("path", [*PAGES, "/console/live", "/console/traffic/x", "/console/labels/next"])
def test_without_a_session_every_page_leads_to_the_login(site: Site, path: str) -> None:
    with site.client() as stranger:
        for query in ("", f"?key={site.secrets['ops']}", f"?token={site.secrets['ops']}"):
            answer = stranger.get(path + query, headers={"X-API-Key": ""})
            assert answer.status_code in (303, 401), path
            assert answer.headers.get("Location", "/console/login").startswith("/console/login")
        asked = stranger.get(path, headers={"HX-Request": "true"})
        assert asked.status_code == 401  # and a part of a page leads the whole page there


def test_a_key_is_exchanged_for_a_cookie_that_no_script_and_no_other_site_has(site: Site) -> None:
    with site.client() as client:
        answer = login(client, site.secrets["ann"])
        cookie = answer.headers["Set-Cookie"]
        assert (answer.status_code, answer.headers["Location"]) == (303, "/console/")
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert site.secrets["ann"] not in cookie
        assert client.get("/console/playground").status_code == 200
        tls = login(client, site.secrets["ann"], Host="console.example", Origin="https://console.example")
        assert tls.headers["Set-Cookie"].startswith("__Host-millrace_session=")
        assert "Secure" in tls.headers["Set-Cookie"]


@pytest.mark.parametrize(("key", "code"), [("", 401), ("mrk_x_y", 401), ("ä" * 50, 401), ("app", 403)])
def test_no_key_a_wrong_one_and_one_that_may_not_read_get_no_session(site: Site, key: str, code: int) -> None:
    with site.client() as client:
        answer = login(client, site.secrets.get(key, key))
        assert answer.status_code == code
        assert "Set-Cookie" not in answer.headers
        foreign = login(client, site.secrets["ann"], Origin="http://evil.example")
        assert (foreign.status_code, "Set-Cookie" in foreign.headers) == (403, False)


def test_a_revoked_key_ends_the_session_and_the_live_page_at_once(site: Site) -> None:
    key_id = site.make_key("leaver", "read")
    with site.client("leaver") as client, client.stream("GET", "/console/live") as live:
        lines = read_lines(live)
        assert next(lines).startswith("data: {")
        revoke_key(site.keys, key_id)
        assert "event: ended" in list(lines)  # and the stream is over
        answer = client.get("/console/playground")
        assert answer.status_code == 303
        assert answer.headers["Location"].startswith("/console/login")


def test_after_the_login_one_gets_to_a_page_of_the_console_only() -> None:
    assert _own_path("/console/traffic?text=a") == "/console/traffic?text=a"
    for elsewhere in (
        "//evil.example",
        "https://evil.example",
        "/\\evil.example",
        "/console/\\..",
        "/console/\n",
        "",
        None,
    ):
        assert _own_path(elsewhere) == "/console/"


# What one sees


@pytest.mark.parametrize("path", PAGES)
def test_a_page_runs_and_fetches_nothing_that_is_not_a_file_of_this_server(site: Site, path: str) -> None:
    with site.client("ops") as client:
        page = client.get(path)
        assert page.status_code == 200, page.text
        policy = page.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'self';")
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert (page.headers["X-Content-Type-Options"], page.headers["Cache-Control"]) == ("nosniff", "no-store")
        markup = Markup(page.text)
        assert markup.inline == []
        for file in set(markup.fetched):
            assert file.startswith("/console/")
            if "static" in file:
                answer = client.get(file)
                assert (answer.status_code, answer.headers["Cache-Control"]) == (200, "no-cache"), file


def test_hostile_text_is_text_wherever_it_comes_from(site: Site) -> None:
    with site.client("ops") as client:
        response = site.responses[-1]
        for path in (
            "/console/policies",
            "/console/policies/2",
            "/console/traffic",
            f"/console/traffic/{response}",
            f"/console/traffic/{response}?part=tokens",
            "/console/labels",
            "/console/compare",
            f"/console/traffic?text={HOSTILE}&user={HOSTILE}&policy={HOSTILE}",
            f"/console/traffic/{HOSTILE}",
            f"/console/login?next=/console/{HOSTILE}",
        ):
            text = client.get(path).text
            assert "<script>alert" not in text
            assert "<img src=x" not in text
            assert Markup(text).inline == []
        assert "&lt;script&gt;alert(1)" in client.get(f"/console/traffic/{response}").text


def test_a_tenant_sees_its_own_rows_alone(site: Site) -> None:
    with site.client("ann") as ann, site.client("eve") as eve:
        assert "secret of other" in eve.get("/console/traffic").text
        assert "secret of other" in eve.get(f"/console/traffic/{site.others}").text
        for path in (
            "/console/traffic",
            "/console/traffic?text=secret",
            "/console/traffic?user=eve",
            "/console/traffic?user=' OR tenant='other",
            "/console/labels?order=random",
            "/console/compare",
            f"/console/traffic/{site.others}",
            f"/console/traffic/{site.others}?part=tokens",
            f"/console/playground/judged?response_id={site.others}",
            f"/console/traffic/{site.others}'--",
        ):
            page = ann.get(path)
            assert "secret of other" not in page.text, path
        assert ann.get(f"/console/traffic/{site.others}").status_code == 404
        assert ann.get(f"/console/playground/judged?response_id={site.others}").status_code == 404


def test_held_out_prompts_which_may_be_any_tenants_are_shown_to_admins_alone(settings: Settings, model: Path) -> None:
    initialise.initialise(settings, str(model), revision=None, who="tests")
    made = settings.policy_store().publish(model, parent=1, lineage={}, metrics={})
    sample = Sample(
        id="1",
        prompt="secret of other",
        answer=None,
        candidate="x",
        incumbent="y",
        candidate_score=1,
        incumbent_score=0,
    )
    judged = policy(made.version).model_copy(update={"sha256": made.sha256})
    evaluation(candidate=judged, samples=(sample,)).save(settings.resolved().evaluation.folder)
    for scopes, shown in ((["read"], False), (["read", "admin"], True)):
        viewer = VIEWER | {"scopes": scopes}
        request = {"page": "policy", "path": {"version": str(made.version)}, "query": {}, "form": None}
        page = respond(settings, request | {"viewer": viewer})
        assert page.status == 200, page.body[-500:]
        assert ("secret of other" in page.body, "a key with the scope admin sees them" in page.body) == (
            shown,
            not shown,
        )


def test_a_response_names_the_policies_that_learned_from_its_prompt_and_says_if_it_is_held_out(
    settings: Settings, model: Path
) -> None:
    held_out = settings.evaluation.model_copy(update={"holdout": 0.3})
    settings = settings.model_copy(update={"evaluation": held_out})
    initialise.initialise(settings, str(model), revision=None, who="tests")
    kept = next(text for text in map(str, itertools.count()) if position(text) < 0.3)
    asked = next(text for text in map(str, itertools.count()) if position(text) >= 0.3)
    lake = settings.lake()
    lake.create()
    before = lake.versions()
    put(lake, "interactions", [interaction("asked", prompt=asked), interaction("kept", prompt=kept)])
    after = {"lake_versions": lake.versions()}
    keys = HeldOut().keys({"prompt": asked})
    publish = partial(settings.policy_store().publish, model, parent=1, metrics={})
    for lineage, learned in (
        ({"lake_versions": before}, keys),  # the response was not there yet
        (after, keys),
        (after, {"of another prompt"}),
        (after, None),
    ):
        publish(lineage=lineage, learned_prompts=learned)

    def shown(page: str, name: str, who: str = "ann") -> str:
        path, query = ({"response_id": name}, {}) if page == "interaction" else ({}, {"response_id": name})
        viewer = VIEWER | {"tenant": "default", "name": who}
        answer = respond(settings, {"page": page, "path": path, "query": query, "form": None, "viewer": viewer})
        assert answer.status == 200, answer.body[-500:]
        return answer.body

    assert re.findall(r'policies/(\d+)">policy \d+</a>( <small>perhaps)?', shown("interaction", "asked")) == [
        ("3", ""),
        ("5", " <small>perhaps"),
    ]
    assert "held out" not in shown("interaction", "asked")
    assert re.findall(r'policies/(\d+)">policy', shown("interaction", "kept")) == ["5"]
    assert "one of the 30 % of prompts that are held out" in shown("interaction", "kept")
    # A judgement came after all of these; what is trained on it then is named, of each person's own judgement.
    put(lake, "feedback", [thumb("asked", 1.0, source="ann"), thumb("kept", 1.0, source="ann")])
    for name in ("asked", "kept"):
        waits = ("can learn from this" in shown("judged", name), "data-final" in shown("judged", name))
        assert waits == ((True, False) if name == "asked" else (False, True))
        assert "policies/" not in shown("judged", name)
    judged = {"lake_versions": lake.versions()}
    publish(lineage=judged, learned_prompts={"of another prompt"})
    assert "policies/" not in shown("judged", "asked")
    publish(lineage=judged, learned_prompts=None)
    assert re.sub(r"\s+", " ", shown("judged", "asked")).strip() == (
        '<span><a href="/console/policies/7">Policy 7</a> perhaps learned from this.</span>'
    )
    publish(lineage=judged, learned_prompts=keys)
    assert re.findall(r'policies/(\d+)">Policy \d+</a>( perhaps)?', shown("judged", "asked")) == [
        ("7", " perhaps"),
        ("8", ""),
    ]
    assert "<span data-final>" in shown("judged", "asked")
    put(lake, "feedback", [thumb("asked", 0.0, source="bob")])
    assert "policies/" not in shown("judged", "asked", who="bob")
    put(lake, "feedback", [thumb("asked", 0.0, source="ann")])  # she has changed her mind since
    assert "policies/" not in shown("judged", "asked")
    publish(lineage={"lake_versions": lake.versions()}, learned_prompts=keys)
    for who in ("ann", "bob"):
        assert re.findall(r'policies/(\d+)">Policy', shown("judged", "asked", who)) == ["9"]
    assert "one of the 30 % that are held out" in shown("judged", "kept")
    assert "policies/" not in shown("judged", "kept")


def test_a_policy_shows_what_changed_since_its_parent_and_how_much_its_training_read(
    settings: Settings, model: Path
) -> None:
    initialise.initialise(settings, str(model), revision=None, who="tests")
    store, lake = settings.policy_store(), settings.lake()
    secret = "wJalrXUtnFEMI-K7MDENG"

    def trained(parent: int, *options: tuple[str, str]) -> None:
        own = root.load(settings.snapshot(), options, {})
        lineage = own_lineage(own) | {"train": own.train.model_dump(mode="json"), "lake_versions": lake.versions()}
        store.publish(model, parent=parent, lineage=lineage, metrics={}, learned_prompts={str(parent), "more"})

    def shown(page: str, version: int, *scopes: str, tenant: str = "default") -> str:
        viewer = VIEWER | {"tenant": tenant, "scopes": ["read", *scopes]}
        sent = {"page": page, "path": {"version": str(version)}, "query": {}, "form": None, "viewer": viewer}
        answer = respond(settings, sent)
        assert answer.status == 200, answer.body[-500:]
        assert Markup(answer.body).inline == []
        assert secret not in answer.body
        return re.sub(r"\s+", " ", answer.body)

    def changes(version: int, *scopes: str) -> dict[str, tuple[str, str]]:
        row = r'<td class="mono">([^<]+)</td><td class="mono" data-label="before">([^<]*)</td><td [^>]+>([^<]*)</td>'
        return {key: (old, new) for key, old, new in re.findall(row, shown("policy", version, *scopes))}

    now = datetime.now(UTC)
    asked = [interaction(f"r{i}", created_at=now + timedelta(seconds=i)) for i in range(5)]
    put(lake, "interactions", asked)
    put(lake, "rewards", [reward(f"r{i}", i / 4, scored_at=now) for i in range(5)])
    trained(1, ("train.steps", "7"), ("evaluation.holdout", "0.2"), ("serve.engine.log_level", "DEBUG"))
    of_second = [{"start": 0, "policy_version": 2}]
    later = [row | {"response_id": f"s{i}", "policy_spans": of_second} for i, row in enumerate(asked)]
    put(lake, "interactions", later)
    put(lake, "rewards", [reward(f"s{i}", 0.5 + i / 10, scored_at=now) for i in range(5)])
    put(lake, "feedback", [thumb("s0", 1.0)])
    trained(
        2,
        ("train.steps", "9"),
        ("evaluation.holdout", "0.2"),
        ("feedback.scoring.judge.url", "http://127.0.0.1:1/v1"),
        ("feedback.scoring.judge.model", HOSTILE),
        ("feedback.scoring.judge.rubric", "Is {response} good?"),
        ("feedback.scoring.judge.api_key", secret),
        ("schedule.webhooks.team.url", f"https://hooks.example/{secret}"),
    )

    # Policy 1 was imported: there is nothing to compare with but the defaults.
    assert "Settings that differ" not in shown("policy", 1, "admin")
    second = changes(2, "admin")
    assert "Settings that differ from the defaults" in shown("policy", 2)
    assert "Policy 1, which it was trained from, was not trained here" in shown("policy", 2)
    assert (second["train.steps"], second["evaluation.holdout"]) == (("20", "7"), ("0.0", "0.2"))
    assert second["serve.engine.log_level"][1] == "DEBUG"
    assert "home" not in second
    # Policy 3's parent was trained: with it, whatever both have set is no change.
    third = changes(3, "admin")
    assert "Settings that differ from those of policy 2" in shown("policy", 3)
    assert third["train.steps"] == ("7", "9")
    assert "evaluation.holdout" not in third
    assert third["feedback.scoring.judge.model"] == ("–", str(escape(HOSTILE)))
    assert third["feedback.scoring.judge.api_key"] == third["schedule.webhooks.team.url"] == ("–", "**********")
    assert third["serve.engine.log_level"] == ("DEBUG", second["serve.engine.log_level"][0])
    # The server's operation is the admins' business.
    assert not [key for key in changes(3) if key.startswith(("serve.", "schedule."))]
    assert changes(3)["train.steps"] == ("7", "9")
    assert "A key with the scope admin sees" in shown("policy", 3)

    # Lineage, and what was read, then and since the parent.
    assert 'from <a href="/console/policies/1">policy 1</a>' in shown("policy", 2)
    assert 'parent of <a href="/console/policies/3">3</a>' in shown("policy", 2)
    assert "grpo, 9 steps at most" in shown("policy", 3)
    versions = store.get(3).lineage["lake_versions"]
    listed = ", ".join(f"{table} {version}" for table, version in versions.items())
    assert f"<dt>Lake versions</dt><dd>{listed}</dd>" in shown("policy", 3)
    read = shown("policy_traffic", 3)
    for table, rows, more in (("interactions", 10, 5), ("feedback", 1, 1), ("rewards", 10, 5)):
        figure = f"{rows}<small> rows at version {versions[table]}, +{more} since policy 2"
        assert f"<dt>{table.capitalize()}</dt><dd>{figure}" in read
    assert "<dt>Prompts</dt><dd>2<small> that it learned from" in read
    assert "since policy" not in shown("policy_traffic", 2)  # its parent read nothing
    assert "What its training read" not in shown("policy_traffic", 1)

    # Its reward over time, in the tenant's own traffic alone.
    [drawn] = re.findall(r'data-charts="([^"]+)"', shown("policy_traffic", 2))
    rewards, responses = json.loads(html.unescape(drawn))
    assert (rewards["title"], responses["title"]) == ("Mean reward", "Responses")
    assert rewards["y"] == [0.5, 0.6, 0.7, 0.8, 0.9]
    assert responses["y"] == [1] * 5
    assert rewards["x"] == sorted(rewards["x"])
    assert "data-charts" not in shown("policy_traffic", 2, tenant="other")

    # Where a snapshot is gone, what the manifests have is compared.
    for file in settings.path("configs").iterdir():
        file.unlink()
    _masked.cache_clear()
    assert changes(3, "admin")["train.steps"] == ("7", "9")
    assert all(key.startswith("train.") for key in changes(3, "admin"))
    assert "Of training alone; the others can't be compared: configs/" in shown("policy", 3)
    assert changes(2, "admin")["train.steps"] == ("20", "7")


def test_a_manifest_that_names_what_is_not_there_is_shown_all_the_same(settings: Settings, model: Path) -> None:
    initialise.initialise(settings, str(model), revision=None, who="tests")
    lineage = {
        "config": "../../keys",
        "train": {"algorithm": {"name": HOSTILE}, "steps": HOSTILE},
        "lake_versions": {"interactions": HOSTILE, HOSTILE: 3, "rewards": 99},
    }
    settings.policy_store().publish(model, parent=1, lineage=lineage, metrics={})
    viewer = VIEWER | {"scopes": ["read", "admin"]}
    for page in ("policy", "policy_traffic"):
        sent = {"page": page, "path": {"version": "2"}, "query": {}, "form": None, "viewer": viewer}
        answer = respond(settings, sent)
        assert answer.status == 200, answer.body[-500:]
        assert (Markup(answer.body).inline, "<script>alert" in answer.body) == ([], False)
        assert "&lt;script&gt;alert" in answer.body


def test_the_playground_asks_for_no_more_tokens_than_fit_into_the_context(settings: Settings, model: Path) -> None:
    initialise.initialise(settings, str(model), revision=None, who="tests")
    request = {"page": "playground", "path": {}, "query": {}, "form": None, "viewer": VIEWER}
    assert 'name="max_tokens" min="1" max="128" value="128"' in respond(settings, request).body  # the model's context
    engine = settings.serve.engine.model_copy(update={"max_model_len": 32})
    narrow = settings.model_copy(update={"serve": settings.serve.model_copy(update={"engine": engine})})
    assert 'name="max_tokens" min="1" max="32" value="32"' in respond(narrow, request).body


def test_answers_to_a_suite_are_shown_of_any_two_policies_with_the_scores_they_got(settings: Settings) -> None:
    def sample(name: str, candidate: str, score: float | None) -> Sample:
        of = {"candidate": candidate, "incumbent": "three", "candidate_score": score, "incumbent_score": 0.5}
        return Sample(id=name, prompt=HOSTILE, answer="4", **of)

    folder = settings.path(settings.evaluation.folder)
    later = {"created_at": "2026-11-22T00:00:00.000+00:00"}
    evaluation(samples=(sample("1", "five", 1.0), sample("2", HOSTILE, None))).save(folder)
    evaluation(candidate=policy(6), samples=(sample("1", "six", 0.25), sample("3", "x", 0.0)), **later).save(folder)
    request = {"page": "compare_suites", "path": {}, "form": None, "viewer": VIEWER | {"scopes": ["read", "admin"]}}
    newest = respond(settings, request | {"query": {}}).body
    assert "2 items that both answered" in newest
    assert "policy 6 · score 0.25" in newest
    two = respond(settings, request | {"query": {"a": "5", "b": "6"}}).body
    assert "1 item that both answered" in two
    assert re.findall(r"score ([\d.–]+)</small><p class=\"said\">(\w+)", two) == [("1", "five"), ("0.25", "six")]
    for query in ({"a": "5", "b": "3"}, {"a": HOSTILE, "suite": HOSTILE}):
        page = respond(settings, request | {"query": query})
        assert (page.status, Markup(page.body).inline, "<script>alert" in page.body) == (200, [], False)
    other = policy(6).model_copy(update={"sha256": "f" * 64})  # which had that number in a home before
    kept = stored([evaluation(candidate=policy(6), **later), evaluation(candidate=other)])
    assert [list(answers) for answers in kept.values()] == [["6", "3", "6 (ffffffff)"]]


def test_a_damaged_evaluation_is_named_and_the_others_are_shown(settings: Settings, model: Path) -> None:
    initialise.initialise(settings, str(model), revision=None, who="tests")
    folder = settings.path(settings.evaluation.folder)
    sample = Sample(
        id="1", prompt="2+2=", answer="4", candidate="five", incumbent="3", candidate_score=1, incumbent_score=0
    )
    evaluation(samples=(sample,)).save(folder)
    torn = evaluation(candidate=policy(1), samples=(sample,)).save(folder)
    torn.write_bytes(torn.read_bytes()[:-100])
    viewer = VIEWER | {"scopes": ["read", "admin"]}
    for page, path in (("compare_suites", {}), ("policy", {"version": "1"})):
        answer = respond(settings, {"page": page, "path": path, "query": {}, "form": None, "viewer": viewer})
        assert answer.status == 200, answer.body[-500:]
        assert "<code>1-vs-3.json</code>" in answer.body
        assert "5-vs-3.json" not in answer.body
        assert ("five" in answer.body) == (page == "compare_suites")


def test_an_evaluation_that_goes_while_the_folder_is_read_is_left_out(settings: Settings) -> None:
    folder = settings.path(settings.evaluation.folder)
    sample = Sample(
        id="1", prompt="2+2=", answer="4", candidate="five", incumbent="3", candidate_score=1, incumbent_score=0
    )
    evaluation(samples=(sample,)).save(folder)
    (folder / "9-vs-5.json").symlink_to(
        folder / "gone.json"
    )  # listed, and not there: as one that has just been removed
    viewer = VIEWER | {"scopes": ["read", "admin"]}
    answer = respond(settings, {"page": "compare_suites", "path": {}, "query": {}, "form": None, "viewer": viewer})
    assert answer.status == 200, answer.body[-500:]
    assert "five" in answer.body
    assert "9-vs-5.json" not in answer.body


def test_held_out_answers_side_by_side_are_for_admins_alone(site: Site) -> None:
    with site.client("ann") as ann:
        assert ann.get("/console/compare/suites").status_code == 403
        assert "compare/suites" not in ann.get("/console/compare").text


@pytest.mark.parametrize(("scopes", "may"), [(["read"], False), (["read", "feedback"], True)])
def test_the_label_queue_offers_a_judgement_to_whom_may_give_one(site: Site, scopes: list[str], may: bool) -> None:
    site.generate("ann", "5+5=")
    sent = {
        "page": "labels",
        "path": {},
        "query": {},
        "form": None,
        "viewer": VIEWER | {"tenant": "acme", "scopes": scopes},
    }
    shown = respond(site.settings, sent).body
    found = ("back to the one before" in shown, 'data-vote="1"' in shown, "it can look, not judge" in shown)
    assert (*found, 'data-vote="skip"' in shown) == (may, may, not may, True)


def test_no_page_names_a_pairs_policies_before_the_choice(site: Site) -> None:
    site.generate("ann", "6+1=", n=3, temperature=1.5)
    with site.client("ann") as ann:
        page = ann.get("/console/compare").text
        found = re.search(r'id="item" data-first="([^"]+)" data-second="([^"]+)">', page)
        assert found is not None
        pair = page[found.start() :]
        assert "olicy 1" not in pair.replace("message policy", "")
        assert "Both were policy 1" in ann.get(f"/console/compare/next?chosen={found[1]}~{found[2]}").text
        assert "policy 1&#39;s" not in ann.get(f"/console/compare/next?chosen={found[1]}~{site.others}").text


def test_labellers_agreement_counts_the_last_thumb_of_each_person(site: Site) -> None:
    def thumb(response: str, source: str, value: int) -> None:
        body = {"response_id": response, "kind": "thumb", "value": value, "source": source}
        headers = {"X-API-Key": site.secrets["raters"]}
        assert httpx.post(f"{site.url}/feedback", json=body, headers=headers, timeout=60).status_code == 201

    site.make_key("raters", "read", "generate", "feedback", tenant="raters")
    with site.client("raters") as client:
        assert "None has thumbs of two people" in client.get("/console/labels/agreement").text
        responses = [site.generate("raters", f"{number}+0=") for number in range(6)]
        # 0 1 0 0 1 | 1 1 0 0 1, of which the first changes its mind; nobody's name is no second person's.
        first, second = (0, 1, 0, 0, 1), (1, 1, 0, 0, 1)
        thumb(responses[0], "ann", 1)
        for response, one, other in zip(responses, first, second, strict=False):
            thumb(response, "ann", one)
            thumb(response, "bob", other)
        thumb(responses[5], "ann", 1)
        thumb(responses[5], "user", 0)
        labels_of = {"page": "labels_agreement", "path": {}, "query": {}, "form": None}
        page = respond(site.settings, labels_of | {"viewer": VIEWER | {"tenant": "raters"}}).body
    # Ten thumbs, five of each: one response of five differs, of which chance would let 5·5·2/(10·9) = 5/9 differ.
    assert "6 of 6 responses have a judgement" in page
    assert "5 have thumbs of two people" in page
    assert f"+{1 - (1 / 5) / (5 / 9):.3f}" in page
    assert labels._counted


def test_a_judge_is_set_against_people_and_a_viewer_meets_no_response_twice() -> None:
    with duckdb.connect(config={"threads": 1}) as lake:
        lake.execute(
            "CREATE TABLE interactions AS SELECT 'r'||i AS response_id, DATE '2026-01-01' AS date, 'acme' AS tenant, "
            "'complete' AS status FROM range(5) t(i)"
        )
        lake.execute(
            "CREATE TABLE feedback AS SELECT 'r'||i AS response_id, 'bob' AS source, 'thumb' AS kind, 1.0 AS value, "
            "'acme' AS tenant, now() AS created_at, DATE '2026-01-01' AS date FROM range(4) t(i)"
        )
        lake.execute("INSERT INTO feedback VALUES ('r3', 'ann', 'comment', NULL, 'acme', now(), '2026-01-01')")
        lake.execute(
            "CREATE TABLE rewards AS SELECT 'r'||i AS response_id, i / 10 AS reward, "
            "MAP {'judge': i / 4} AS components, now() AS scored_at FROM range(5) t(i)"
        )
        lake.execute("INSERT INTO rewards SELECT 'r0', 9, MAP {'judge': 0.9}, now() + INTERVAL 1 SECOND")
        values = {"tenant": "acme", "passed": ["r9"], "count": 10}
        judge = lake.execute(labels._JUDGE, values | {"who": "ann"}).fetchall()
        assert [name for name, _ in judge] == ["r1", "r2", "r0"]  # of r0 the judge says 0.9 by now
        lake.execute("DELETE FROM feedback WHERE response_id <> 'r2'")
        low = lake.execute(labels._LOW, values | {"most": 100}).fetchall()
        assert [name for name, _ in low] == ["r1", "r3", "r4", "r0"]
        assert len(lake.execute(labels._RANDOM, values | {"passed": ["r1"]}).fetchall()) == 3


def test_what_goes_wrong_is_in_the_log_and_its_number_on_the_page(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(settings: Settings, visit: Any) -> Any:
        raise ValueError("a path, or a prompt of others")

    def large(settings: Settings, visit: Any) -> Any:
        return Answer("x" * (LINE_BYTES + 1))

    monkeypatch.setitem(PAGES_OF_WORKER, "now", fail)
    request = {"page": "now", "path": {}, "query": {}, "form": None, "viewer": VIEWER}
    answer = respond(settings, request)
    number = re.search(r"as error (\w+)\.", answer.body)
    assert (answer.status, "a path" in answer.body) == (500, False)
    assert number is not None
    assert f"error {number[1]}" in caplog.text
    assert "a path, or a prompt of others" in caplog.text
    monkeypatch.setitem(PAGES_OF_WORKER, "now", large)
    answers = io.StringIO()
    serve(settings, 60, io.StringIO(json.dumps(request) + "\n"), answers)
    shown = json.loads(answers.getvalue().splitlines()[1])
    assert (shown["status"], "more than the 32 MiB" in shown["body"]) == (413, True)


def test_the_root_leads_to_the_console(site: Site) -> None:
    with site.client() as client:
        answer = client.get("/")
        assert (answer.status_code, answer.headers["Location"]) == (302, "/console/")


def test_a_search_finds_by_each_field_and_says_what_is_no_number(site: Site) -> None:
    with site.client("ann") as client:
        for query, count in (
            ("text=1%2B1", 1),
            ("user=ann", 3),
            ("user=bob", 0),
            ("user=ann&policy=1&period=1h", 3),
            ("policy=77", 0),
            ("reward_above=0", 0),
            ("feedback=without&text=2%2B2", 1),
        ):
            assert client.get(f"/console/traffic?{query}").text.count("data-href=") == count, query
        wrong = client.get("/console/traffic?policy=two")
        assert "policy: &#39;two&#39; is no number" in wrong.text


def test_a_response_is_shown_with_each_token_coloured_by_policy_and_likelihood(site: Site) -> None:
    with site.client("ann") as client:
        part = client.get(f"/console/traffic/{site.responses[0]}?part=tokens").text
        tokens = re.findall(r'<span class="lp\d p0" title="[\d.e-]+ % · policy 1">', part)
        assert len(tokens) == 6


def test_the_live_page_sends_its_parts_and_charts(site: Site) -> None:
    with site.client("ann") as client, client.stream("GET", "/console/live") as live:
        first = next(read_lines(live))
        assert "Policy 1" in first
        assert '"charts"' in first


# What one does


def test_a_promotion_needs_admin_the_pages_token_a_reason_and_the_gate_or_an_override(site: Site) -> None:
    path, origin = "/console/policies/2/promote", {"Origin": site.url}
    store, audit = site.settings.policy_store(), AuditLog(site.settings.path(site.settings.serve.audit))
    before = len(audit.entries())  # the browser's tests try promotions too

    def serving() -> int:
        pointer = store.serving()
        assert pointer is not None
        return pointer.version

    with site.client("ann") as ann:
        form = {"csrf": token(ann), "why": "because"}
        assert "promote" not in ann.get("/console/policies/2").text
        assert ann.post(path, data=form, headers=origin).status_code == 403
    with site.client("ops") as ops:
        own = token(ops)
        for csrf, headers in (
            ("", origin),
            ("x" * 43, origin),
            (form["csrf"], origin),
            (own, {"Origin": "http://evil.example"}),
            (own, {"Origin": "null"}),
            (own, origin | {"Sec-Fetch-Site": "cross-site"}),
        ):
            answer = ops.post(path, data={"csrf": csrf, "why": "because", "override": "yes"}, headers=headers)
            assert answer.status_code == 403, (csrf, headers)
        for why in ("", "   "):
            answer = ops.post(path, data={"csrf": own, "why": why, "override": "yes"}, headers=origin)
            assert (answer.status_code, "A reason is needed" in answer.text) == (409, True)
        refused = ops.post(path, data={"csrf": own, "why": "it is time"}, headers=origin)
        assert (refused.status_code, "was not evaluated" in refused.text) == (409, True)
        assert ops.get(path).status_code == 405
        assert serving() == 1
        disguised = origin | {"X-Forwarded-For": "203.0.113.9"}
        done = ops.post(path, data={"csrf": own, "why": HOSTILE, "override": "yes"}, headers=disguised)
        assert (done.status_code, serving()) == (200, 2)
        assert "<script>alert" not in done.text
        _until_served(ops, site, 2)
        back = ops.post("/console/policies/1/rollback", data={"csrf": own, "why": "back"}, headers=origin)
        assert (back.status_code, serving()) == (200, 1)
        _until_served(ops, site, 1)
    moves = [entry for entry in site.settings.ledger().entries() if entry.kind in MOVES]
    assert [(one.who, one.body["why"]) for one in moves[-2:]] == [("ops (console)", HOSTILE), ("ops (console)", "back")]
    entries = audit.entries()[before:]
    logins = [one for one in entries if (one.action, one.who) == ("console.login", "ops of acme")]
    assert {one.origin for one in logins} == {"127.0.0.1"}  # whatever headers say
    by_form = [one for one in entries if one.action in ("console.promote", "console.rollback")]
    assert {(one.who, one.origin) for one in by_form} == {("ops of acme", "127.0.0.1")}
    assert [one.outcome.split(" ")[0] for one in by_form if one.outcome] == [*["refused:"] * 3, "done", "done"]
    assert (by_form[-2].subject["why"], by_form[-2].subject["override"]) == (HOSTILE, "yes")
    assert not any("csrf" in one.subject for one in entries)


def test_keys_are_made_and_revoked_by_admins_alone(site: Site) -> None:
    with site.client("ann") as ann:
        assert ann.get("/console/keys").status_code == 403
        assert "/console/keys" not in ann.get("/console/traffic").text
        made = {"csrf": token(ann), "name": "mine", "scope-admin": "yes"}
        assert ann.post("/console/keys", data=made, headers={"Origin": site.url}).status_code == 403
    with site.client("ops") as ops:
        proof = {"csrf": token(ops)}
        origin = {"Origin": site.url}
        assert site.secrets["ann"] not in ops.get("/console/keys").text
        for wrong, reason in (({"name": "x"}, "scopes"), ({"name": "ann", "scope-read": "yes"}, "already")):
            refused = ops.post("/console/keys", data=proof | wrong, headers=origin)
            assert (refused.status_code, reason in refused.text) == (409, True)
        form = proof | {"name": HOSTILE, "scope-read": "yes", "expires": "30"}
        page = ops.post("/console/keys", data=form, headers=origin).text
        assert "<script>alert" not in page
        secret = re.search(r"mrk_([a-z0-9]+)_[\w-]+", page)
        assert secret is not None
        site.secrets["made"] = secret[0]
        assert secret[0] not in ops.get("/console/keys").text
        with site.client("made") as reader:
            assert reader.get("/console/playground").status_code == 200
            assert ops.post(f"/console/keys/{secret[1]}/revoke", data=proof, headers=origin).status_code == 303
            deadline = time.monotonic() + 120
            while reader.get("/console/playground").status_code == 200:
                assert time.monotonic() < deadline


def test_a_key_gets_other_scopes_by_an_admin_alone_and_its_open_session_loses_what_it_lost(site: Site) -> None:
    key_id = site.make_key("narrowed", "read", "feedback")
    path, origin = f"/console/keys/{key_id}/scope", {"Origin": site.url}
    audit = AuditLog(site.settings.path(site.settings.serve.audit))
    vote = {"response_id": site.responses[0], "kind": "thumb", "value": 1, "source": "narrowed"}

    def scopes() -> tuple[str, ...]:
        (key,) = [key for key in read_keys(site.keys) if key.id == key_id]
        return key.scopes

    with site.client("ann") as ann:
        for csrf in (token(ann), ""):
            sent = {"csrf": csrf, "scope-admin": "yes"}
            assert ann.post(path, data=sent, headers=origin).status_code == 403
    with site.client("narrowed") as narrowed, site.client("ops") as ops:
        own, proof = {"X-CSRF-Token": token(narrowed), **origin}, {"csrf": token(ops)}
        assert narrowed.post(path, data={"scope-admin": "yes"}, headers=own).status_code == 403  # not even its own
        assert narrowed.post("/feedback", json=vote, headers=own).status_code == 201
        with narrowed.stream("GET", "/console/live") as live:
            lines = read_lines(live)
            assert next(lines).startswith("data: {")
            assert f'action="{path}"' in ops.get("/console/keys").text
            assert ops.post(path, data=proof | {"scope-read": "yes"}, headers=origin).status_code == 303
            _until(lambda: narrowed.post("/feedback", json=vote, headers=own).status_code == 403)
            assert narrowed.get("/console/playground").status_code == 200
            assert scopes() == ("read",)
            before = len(audit.entries())
            for wrong, reason in (
                ({}, "one scope at least"),
                ({"scope-generate": "yes", "scope-evaluate": "yes"}, "leave generate out"),
                ({"scope-root": "yes"}, "one scope at least"),
                (
                    {"scope-read": "yes", "scope-feedback": "yes", "seen": "read feedback"},
                    "has other scopes by now, read",
                ),
            ):
                refused = ops.post(path, data=proof | wrong, headers=origin)
                assert (refused.status_code, reason in refused.text, scopes()) == (409, True, ("read",))
            unknown = ops.post("/console/keys/nobody/scope", data=proof | {"scope-read": "yes"}, headers=origin)
            assert (unknown.status_code, "there is no key" in unknown.text) == (409, True)
            assert ops.post(path, data=proof | {"scope-generate": "yes"}, headers=origin).status_code == 303
            assert "event: ended" in list(lines)  # it may not even look any more
        _until(lambda: narrowed.get("/console/playground").status_code == 403)
    entries = [entry for entry in audit.entries()[before:] if entry.action == "console.scope_key"]
    assert [str(entry.outcome).split(" ")[0] for entry in entries] == [*["refused:"] * 5, "done"]
    assert (entries[-1].who, entries[-1].origin) == ("ops of acme", "127.0.0.1")
    assert entries[-1].subject == {"scope-generate": "yes", "key_id": key_id}


def test_a_logout_takes_the_cookie_away_and_needs_the_token(site: Site) -> None:
    with site.client("ann") as client:
        assert client.post("/console/logout", headers={"Origin": site.url}).status_code == 403
        answer = client.post("/console/logout", data={"csrf": token(client)}, headers={"Origin": site.url})
        assert (answer.status_code, answer.headers["Location"]) == (303, "/console/login")
        assert client.get("/console/playground").status_code == 303


def test_the_api_takes_a_session_with_the_pages_token_for_what_its_key_may(site: Site) -> None:
    with site.client("ann") as client:
        vote = {"response_id": site.responses[1], "kind": "thumb", "value": 1, "source": "ann"}
        assert client.post("/feedback", json=vote).status_code == 403
        proof = {"X-CSRF-Token": token(client), "Origin": site.url}
        assert client.post("/feedback", json=vote, headers=proof).status_code == 201
        assert client.get("/metrics", headers=proof).status_code == 403
        assert "▲ good" in client.get("/console/traffic?feedback=with").text


# What an enemy sends


@pytest.mark.parametrize(
    "path",
    [
        "/console/static/../app.py",
        "/console/static/..%2fapp.py",
        "/console/static/%2e%2e/%2e%2e/cli.py",
        "/console/static//etc/passwd",
        "/console/static/vendor/../../app.py",
        "/console/policies/../../keys.json",
        "/console/policies/-1",
        "/console/policies/1.5",
        "/console/policies/99999999999999999999",
        "/console/nothing",
    ],
)
def test_no_path_leads_out_of_the_pages(site: Site, path: str) -> None:
    with site.client("ops") as client:
        answer = client.get(httpx.URL(site.url + path))
        assert answer.status_code in (404, 401), answer.text
        assert "import" not in answer.text


def test_forms_that_are_too_large_or_no_forms_are_refused(site: Site) -> None:
    with site.client("ops") as client:
        proof = {"X-CSRF-Token": token(client), "Origin": site.url}
        path = "/console/policies/2/promote"
        assert client.post(path, content=b"why=" + b"a" * (300 << 10), headers=proof).status_code == 413
        assert client.post(path, content=b"a=1&" * 100, headers=proof).status_code == 400
        assert client.post(path, content=b"why=\xff", headers=proof).status_code == 400
        assert client.post("/console/login", content=b"\xff", headers={"Origin": site.url}).status_code == 400


def test_odd_queries_are_answered_in_the_page(site: Site) -> None:
    with site.client("ann") as client:
        for query in (
            "before=x",
            "before=2026-01-01T00:00:00%2B00:00~x",
            "before=0001-01-02T00:00:00%2B00:00~x",
            "policy=99999999999999999999",
            f"policy={'9' * 4000}",
            "policy=-99999999999999999999",
            "reward_above=nan",
            "reward_below=inf",
            "period=never",
            "feedback=maybe",
            "text=%00",
            f"text={'a' * 5000}",
            "order=nothing",
        ):
            for path in ("/console/traffic", "/console/labels"):
                assert client.get(f"{path}?{query}").status_code == 200, query
        assert client.get("/console/traffic").status_code == 200


# Without a server


@asynccontextmanager
async def application(settings: Settings, client: str, **serve: Any) -> AsyncIterator[httpx.AsyncClient]:
    """The application, without its engine, as a client at an address reaches it."""
    changed = settings.model_copy(update={"serve": settings.serve.model_copy(update=serve)})
    resolved = changed.resolved()
    app = create_app(resolved.serve, resolved.feedback, console=partial(create, changed.snapshot()))
    app.state.server.keyring.load()
    (pages,) = (route.app for route in app.routes if isinstance(route, Mount) and route.path == "/console")
    transport = httpx.ASGITransport(app, client=(client, 1))
    async with (
        pages.router.lifespan_context(pages),
        httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=120) as http,
    ):
        yield http


async def test_without_keys_everybody_here_is_let_in_and_other_pages_do_nothing(settings: Settings) -> None:
    async with application(settings, "127.0.0.1") as http:
        page = await http.get("/console/keys")
        assert page.status_code == 200
        found = re.search(r'<meta name="csrf" content="([^"]+)">', page.text)
        assert found is not None
        own, form = {"Origin": "http://localhost"}, {"name": "x", "scope-read": "yes"}
        for headers, csrf in (
            (own, ""),
            ({"Origin": "http://localhost:3000"}, found[1]),  # another program's page on this machine
            ({"Origin": "http://evil.example"}, found[1]),
        ):
            answer = await http.post("/console/keys", data=form | {"csrf": csrf}, headers=headers)
            assert answer.status_code == 403
        assert (await http.get("/console/", headers={"Host": "evil.example"})).status_code == 421
        assert (await http.post("/console/keys", data=form | {"csrf": found[1]}, headers=own)).status_code == 200
    assert [key.name for key in read_keys(settings.path(settings.serve.keys))] == ["x"]


async def test_a_body_is_taken_in_of_whom_has_a_session_alone_and_no_more_than_a_form_has(settings: Settings) -> None:
    _, secret = create_key(settings.path(settings.serve.keys), name="one", tenant="t", scopes=["admin"])
    taken = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal taken
        for _ in range(63):
            taken += 64 << 10
            yield b"a" * (64 << 10)

    async with application(settings, "127.0.0.1") as http:
        for path in ("/console/policies/1/promote", "/console/keys"):
            stranger = await http.post(path, content=body())
            assert (stranger.status_code, taken) == (401, 0)
        for path, status in (("/console/login", 413), ("/console/keys", 413), ("/console/logout", 413)):
            taken = 0
            answer = await http.post(path, content=body(), headers={"Origin": "http://localhost"})
            assert (answer.status_code, taken <= 512 << 10) == (status, True)
            if path == "/console/login":
                answer = await http.post(path, data={"key": secret}, headers={"Origin": "http://localhost"})
                assert answer.status_code == 303


async def test_a_number_that_is_too_long_for_a_policys_is_no_page(settings: Settings) -> None:
    async with application(settings, "127.0.0.1") as http:
        for number in ("1" * 10, "1" * 5000):
            assert (await http.get(f"/console/policies/{number}")).status_code == 404


async def test_live_pages_are_bounded_in_number_and_each_ends_and_makes_room(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.console.app._STREAM_S", -1.0)
    async with application(settings, "127.0.0.1") as http:
        for _ in range(3):  # which are over at once
            live = await http.get("/console/live")
            assert (live.status_code, live.text) == (200, "retry: 1000\n\n")
        for bound in ("_STREAMS", "_STREAMS_EACH"):
            with monkeypatch.context() as patch:
                patch.setattr(f"deploy.console.app.{bound}", 0)
                assert (await http.get("/console/live")).status_code == 503


def test_a_stream_is_counted_while_it_is_sent() -> None:
    streams: Counter[str] = Counter()

    async def events() -> AsyncIterator[bytes]:
        assert streams == {"t/ann": 1}
        yield b"data:\n\n"

    async def send(message: Any) -> None:
        pass

    async def receive() -> Any:
        await asyncio.sleep(60)

    asyncio.run(_Stream(events(), streams, "t/ann")({"type": "http"}, receive, send))
    assert not streams


async def test_a_page_of_another_site_starts_no_work_even_where_no_key_is_needed(settings: Settings) -> None:
    async with application(settings, "127.0.0.1") as http:
        for site, into, status in (
            ("cross-site", "image", 403),
            ("same-site", "iframe", 403),
            ("cross-site", "document", 200),  # by a link
            ("same-origin", "empty", 200),
        ):
            sent = {"Sec-Fetch-Site": site, "Sec-Fetch-Dest": into}
            assert (await http.get("/console/policies", headers=sent)).status_code == status


# The process that reads


def test_what_takes_too_long_is_ended_and_the_next_page_has_a_process_of_its_own(settings: Settings) -> None:
    request = {"page": "policies", "path": {}, "query": {}, "form": None, "viewer": VIEWER}

    async def read() -> None:
        reader = Reader(["deploy.console.worker", str(settings.snapshot()), "1"], 0.0001, waiting=1)
        with pytest.raises(ReadFailed, match=r"longer than 0\.0001 s"):
            await reader.read(request)
        reader._timeout_s = 60
        assert (await reader.read(request))["status"] == 200
        child = reader._child
        assert child is not None
        child.kill()
        await child.wait()
        assert (await reader.read(request))["status"] == 200
        await reader.close()

    asyncio.run(read())


def test_many_answers_to_one_prompt_and_many_choices_leave_a_pair_that_nobody_chose_from() -> None:
    with duckdb.connect(config={"threads": 1, "memory_limit": "1GB"}) as lake:
        lake.execute(
            "CREATE TABLE interactions AS SELECT 'r'||i AS response_id, DATE '2026-01-01' AS date, [i // 4999] AS "
            "prompt_token_ids, 'answer '||i AS response, [{'policy_version': i // 4997}] AS policy_spans, "
            "'acme' AS tenant, 'complete' AS status, TIMESTAMP '2026-01-01' + INTERVAL (i) SECOND AS created_at "
            "FROM range(5000) t(i)"
        )
        lake.execute(
            "CREATE TABLE feedback AS SELECT 'r'||i AS response_id, 'r'||(i+1) AS rejected_response_id, "
            "'acme' AS tenant, 'preference' AS kind, DATE '2026-01-01' AS date FROM range(4999) t(i)"
        )
        values = {"tenant": "acme", "most": 5000, "first": date.min, "since": datetime.min}
        end = threading.Timer(30, lake.interrupt)  # as long as a page may take
        end.start()
        try:
            skipped: list[str] = []
            while found := lake.execute(_PAIR, values | {"skipped": skipped}).fetchone():
                skipped.append(f"{found[0]}~{found[2]}")
        finally:
            end.cancel()
    # Of policy 1 are r4997 and r4998, of policy 0 the newest four of the others; neighbours were chosen from.
    pairs = [{int(one[1:]) for one in pair.split("~")} for pair in skipped]
    ids = range(4993, 4999)
    assert {frozenset(pair) for pair in pairs} == {frozenset((a, b)) for a in ids for b in ids if b - a > 1}
    between = [len({number >= 4997 for number in pair}) == 2 for pair in pairs]
    assert between == sorted(between, reverse=True)


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120  # the server reads keys that changed twice a second
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _until_served(client: httpx.Client, site: Site, version: int) -> None:
    headers = {"X-API-Key": site.secrets["ops"]}
    deadline = time.monotonic() + 120
    while httpx.get(f"{site.url}/policy", headers=headers, timeout=60).json()["version"] != version:
        assert time.monotonic() < deadline
        time.sleep(0.1)
