"""Logins to the console with keys that are not good, without an engine."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import httpx

from deploy.console.app import create
from feedback.config import FeedbackConfig, JournalConfig, LakeConfig
from serve.app import create_app
from serve.config import LimitsConfig, ServeConfig
from serve.middleware.api_keys import create_key
from serve.middleware.browser_sessions import COOKIE
from serve.observability.audit import AuditLog


async def test_logins_of_one_address_are_slowed_down_and_counted(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    _, secret = create_key(keys, name="ann", tenant="acme", scopes=["read"])
    config = ServeConfig(
        policies=str(tmp_path / "policies"), replicas=str(tmp_path / "replicas"), keys=str(keys),
        audit=str(tmp_path / "audit.jsonl"), limits=LimitsConfig(refused_per_minute=2),
    )  # fmt: skip
    journal, lake = JournalConfig(folder=str(tmp_path / "journal")), LakeConfig(uri=str(tmp_path / "lake"))
    app = create_app(config, FeedbackConfig(journal=journal, lake=lake), console=partial(create, tmp_path / "unused"))
    server = app.state.server
    server.keyring.load()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:

        async def login(key: str) -> httpx.Response:
            return await http.post("/console/login", data={"key": key}, headers={"Origin": "http://localhost"})

        answers = [await login("mrk_none_" + "x" * 43) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [401, 401, 429]
        assert int(answers[-1].headers["Retry-After"]) >= 1
        stale = {"Cookie": f"{COOKIE}=none.1.x.y"}
        led = await http.get("/console/policies?a=1", headers=stale)
        assert (led.status_code, led.headers["Location"]) == (303, "/console/login?next=%2Fconsole%2Fpolicies%3Fa%3D1")
        part = await http.get("/console/policies", headers=stale | {"HX-Request": "true"})
        assert (part.status_code, part.headers["HX-Redirect"]) == (401, "/console/login?next=%2Fconsole%2Fpolicies")
        assert (await http.get(led.headers["Location"], headers=stale)).status_code == 200
        assert (await http.get("/policy", headers=stale)).status_code == 403  # a script's: no page's token
        assert (await login(secret)).status_code == 303
    server.refusals.write()
    entry = AuditLog(config.audit).entries()[-1]
    assert (entry.action, entry.subject["unknown"]) == ("auth.refused", 5)  # the two that were led elsewhere too
    assert 'millrace_auth_failures_total{reason="unknown"} 5.0' in server.metrics.render().decode()
