"""One real server with its console and traces, two tenants, two policies and some traffic, for all tests here."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from deploy import initialise
from deploy.config import root
from deploy.config.root import Settings, child_environment
from deploy.supervise.children import millrace
from loadtests.server import free_port
from serve.middleware.api_keys import Scope, create_key
from tests.otlp import Collector, collecting
from tests.paths import ROOT
from tests.processes import start_forked

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"


SSO_HEADER, SSO_PROXY = "X-Forwarded-User", "127.0.0.2"


@dataclass
class Site:
    """A server, its keys by name, and what was answered: responses of tenant acme and one of tenant other."""

    settings: Settings
    url: str
    log: Path
    collector: Collector
    secrets: dict[str, str] = field(default_factory=dict)
    responses: list[str] = field(default_factory=list)
    others: str = ""

    @property
    def keys(self) -> Path:
        return self.settings.path(self.settings.serve.keys)

    def make_key(self, name: str, *scopes: Scope, tenant: str = "acme") -> str:
        key, self.secrets[name] = create_key(self.keys, name=name, tenant=tenant, scopes=scopes)
        return key.id

    @contextmanager
    def client(self, name: str | None = None) -> Iterator[httpx.Client]:
        """A browser without scripts, logged in with a key."""
        with httpx.Client(base_url=self.url, timeout=120) as client:
            if name is not None:
                self.log_in(client, name)
            yield client

    def log_in(self, client: httpx.Client, name: str) -> None:
        deadline = time.monotonic() + 120
        while (answer := login(client, self.secrets[name])).status_code == 401 and time.monotonic() < deadline:
            time.sleep(0.1)  # the server reads new keys twice a second
        assert answer.status_code == 303, answer.text

    def generate(self, name: str, prompt: str, **fields: object) -> str:
        headers = {"X-API-Key": self.secrets[name]}
        body = {"prompt": prompt, "max_tokens": 6, "seed": 1, **fields}
        answer = httpx.post(f"{self.url}/generate", json=body, headers=headers, timeout=120)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["responses"][0]["response_id"])


def login(client: httpx.Client, secret: str, **headers: str) -> httpx.Response:
    own = {"Origin": str(client.base_url).rstrip("/")} | headers
    return client.post("/console/login", data={"key": secret}, headers=own)


def token(client: httpx.Client, path: str = "/console/playground") -> str:
    """What the page proves itself by."""
    page = client.get(path)
    found = re.search(r'<meta name="csrf" content="([^"]+)">', page.text)
    assert found is not None, page.text[:2000]
    return found[1]


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


@pytest.fixture(scope="session")
def site(model: Path, collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("console")
    home, log = folder / "home", folder / "serve.log"
    options = {
        "home": home,
        "serve.port": free_port(),
        "serve.engine.kv_cache_bytes": 16 << 20,
        "serve.engine.threads": 1,
        "serve.engine.dtype": "float32",
        "serve.swap.poll_seconds": 0.1,
        "serve.traces.endpoint": collector.url,
        "serve.sso.header": SSO_HEADER,
        "serve.sso.proxies": f"[{SSO_PROXY}]",
        "serve.limits.refused_per_minute": 1e6,  # tests send many keys that are not good, or not yet
        "feedback.journal.segment_seconds": 0.5,
        "feedback.lake.seal_seconds": 0.5,
    }
    settings = root.load(None, [(name, str(value)) for name, value in options.items()], {})
    initialise.initialise(settings, str(model), revision=None, who="tests")
    settings.policy_store().publish(model, parent=1, lineage={"run": HOSTILE}, metrics={})
    site = Site(settings, settings.server_url, log, collector)
    site.make_key("ann", "read", "generate", "feedback")
    site.make_key("ops", "read", "generate", "feedback", "admin")
    site.make_key("app", "generate", "feedback")
    site.make_key("eve", "read", "generate", "feedback", tenant="other")
    _, *arguments = millrace("--config", settings.snapshot(), "serve")
    process = start_forked(arguments, log, child_environment({"PYTHONPATH": str(ROOT)}))
    try:
        deadline = time.monotonic() + 600
        while not _is_ready(site.url):
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.2)
        site.responses = [site.generate("ann", prompt, user="ann") for prompt in ("1+1=", "2+2=", HOSTILE)]
        site.others = site.generate("eve", "secret of other", user="eve")
        yield site
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(180)
        finally:
            process.kill()


def _is_ready(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"{url}/ready", timeout=2).status_code == 200
    return False
