"""/docs is a page of this server alone."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

import serve.api.documentation
from feedback.config import FeedbackConfig, JournalConfig, LakeConfig
from serve.app import create_app
from serve.config import ServeConfig


def client(home: Path) -> httpx.AsyncClient:
    config = ServeConfig(policies=str(home / "policies"), replicas=str(home / "replicas"), keys=str(home / "keys.json"))
    journal, lake = JournalConfig(folder=str(home / "journal")), LakeConfig(uri=str(home / "lake"))
    app = create_app(config, FeedbackConfig(journal=journal, lake=lake))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


async def test_the_page_names_files_of_this_server_alone_and_all_are_there(tmp_path: Path) -> None:
    async with client(tmp_path) as http:
        page = await http.get("/docs")
        assert page.headers["Content-Security-Policy"].startswith("default-src 'self'; img-src 'self' data:;")
        assert not re.search(r"https?:|<script>|<style|style=| on\w+=", page.text)
        files = re.findall(r'(?:src|href)="(/[^"]*)"', page.text)
        assert len(files) == 3
        for file in files:
            assert (await http.get(file)).status_code == 200
        assert (await http.get("/redoc")).status_code == 404


async def test_a_file_is_whole_and_a_client_that_has_it_is_told_so(tmp_path: Path) -> None:
    name = "swagger-ui/swagger-ui-bundle.js"
    on_disk = Path(serve.api.documentation.__file__).with_name("static") / name
    async with client(tmp_path) as http:
        answer = await http.get(f"/docs/static/{name}")
        assert answer.content == on_disk.read_bytes()
        assert answer.headers["Content-Length"] == str(len(answer.content))
        assert "javascript" in answer.headers["Content-Type"]
        again = await http.get(f"/docs/static/{name}", headers={"If-None-Match": answer.headers["ETag"]})
        assert (again.status_code, again.content) == (304, b"")
        part = await http.get(f"/docs/static/{name}", headers={"Range": "bytes=0-9"})
        assert (part.status_code, len(part.content)) == (200, len(answer.content))
        head = await http.head(f"/docs/static/{name}")
        assert (head.status_code, head.headers["ETag"]) == (200, answer.headers["ETag"])


async def test_the_root_says_where_things_are_and_they_are_there(tmp_path: Path) -> None:
    async with client(tmp_path) as http:
        found = (await http.get("/")).json()
        assert set(found) == {"documentation", "openapi", "health", "ready"}
        for path in found.values():
            assert (await http.get(path)).status_code in (200, 503)


@pytest.mark.parametrize(
    "path", ["../documentation.py", "..%2fdocumentation.py", "%2e%2e/%2e%2e/app.py", "/etc/passwd"]
)
async def test_no_path_leaves_the_folder_of_the_pages_files(tmp_path: Path, path: str) -> None:
    async with client(tmp_path) as http:
        assert (await http.get(httpx.URL(f"http://localhost/docs/static/{path}"))).status_code == 404
