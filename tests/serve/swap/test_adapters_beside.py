"""One server whose engine answers with several policies at once: an experiment's two, and tenants' own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtests.tiny_model import make_model_folder
from serve.config import ServeConfig
from serve.middleware.api_keys import create_key
from serve.policies import probe
from serve.policies.experiments import FALLBACK, Experiment, Phase, unit_of
from serve.policies.store import PolicyStore
from serve.policies.whole_policies import whole
from tests.serve.adapter_policies import publish_adapter
from tests.serve.conftest import LiveServer, reference_logprobs, start_server, stop_server

PROMPT = [5, 9, 3, 7]
KEYS: dict[str, str] = {}
"""Of tenants."""


@pytest.fixture(scope="module", params=[1, 2], ids=["one API process", "two"])
def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """1: the base, which serves; 2, 3: adapters of it; 4: that of a tenant."""
    home = tmp_path_factory.mktemp("beside")
    store = PolicyStore(home / "policies")
    made = make_model_folder(home / "base", 1)
    base = store.publish(made, parent=None, lineage={}, metrics={}, probe=probe.measure)
    for seed in (2, 3, 4):
        publish_adapter(store, base, home / f"adapter-{seed}", seed=seed)
    store.promote(1, expected=None, who="test", why="first")
    for tenant in ("many", "mill"):
        _, KEYS[tenant] = create_key(home / "keys.json", name=tenant, tenant=tenant, scopes=["generate", "admin"])
    room = {"count": 3, "rank": 4, "tenants": {"mill": 4}}
    engine = {"kv_cache_bytes": 64 << 20, "threads": 1, "adapters": room}
    server = start_server(home, store, engine=engine, api_processes=request.param)
    yield server
    stop_server(server)


def get(server: LiveServer, path: str) -> Any:
    answer = httpx.get(f"{server.url}{path}", headers={"Authorization": f"Bearer {KEYS['many']}"}, timeout=60)
    return answer.json()


def ask(server: LiveServer, path: str = "/generate", tenant: str = "many", **body: Any) -> dict[str, Any]:
    if path != "/generate":
        body |= {"model": "millrace", "prompt": PROMPT}
    else:
        body |= {"prompt_token_ids": PROMPT}
    headers = {"Authorization": f"Bearer {KEYS[tenant]}"}
    answer = httpx.post(f"{server.url}{path}", json={"max_tokens": 8, **body}, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def experiment(number: int, store: PolicyStore, candidate: int, control: int) -> Experiment:
    pointer = store.serving()
    assert pointer is not None
    return Experiment(
        number=number,
        candidate=candidate,
        control=control,
        seed=f"seed {number}",
        started_at=time.time(),
        block_s=3600.0,
        phases=(Phase(0, 0.5),),
        generation=pointer.generation,
        state="running",
        who="test",
        why="test",
        plan={},
        unit="user",
    )


def wait_for(server: LiveServer, version: int, loaded: set[int]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        policy = get(server, "/policy")
        if set(policy["loaded"]) >= loaded and policy["version"] == version:
            return
        time.sleep(0.05)
    raise TimeoutError(server.log.read_text()[-3000:])


def test_users_of_an_experiment_are_answered_by_the_policy_that_is_drawn_for_them(live: LiveServer) -> None:
    live.promote(2)
    wait_for(live, 2, {1, 2, 4})
    declared = experiment(1, live.store, candidate=3, control=2)
    live.store.experiments.begin(declared)
    wait_for(live, 2, {1, 2, 3, 4})
    time.sleep(0.5)  # all API processes have heard of it
    for i in range(12):
        for path in ("/generate", "/v1/completions"):
            ask(live, path, user=f"user {i}")
            ask(live, path, user=f"user {i}", tenant="mill")
    deadline = time.monotonic() + 60
    while len(rows := live.rows("interactions", "user LIKE 'user %'")) < 48 and time.monotonic() < deadline:
        time.sleep(0.2)
    seen = set()
    assert len(rows) == 48
    for row in rows:
        if row["tenant"] == "mill":
            assert [span["policy_version"] for span in row["policy_spans"]] == [4]
            assert row["variant"] == FALLBACK
            continue
        unit = unit_of(row["tenant"], user=row["user"], session=None, request=row["request_id"])
        drawn = declared.assign(unit, row["created_at"].timestamp())
        seen.add(drawn.variant)
        assert [span["policy_version"] for span in row["policy_spans"]] == [drawn.version]
        assert (row["experiment"], row["variant"], row["propensity"]) == (1, drawn.variant, 0.5)
        folder = whole(live.store.get(drawn.version)).path
        expected = reference_logprobs(folder, PROMPT, row["response_token_ids"])
        assert list(row["logprobs"]) == pytest.approx(expected, abs=5e-4)
    assert seen == {"candidate", "control"}
    live.store.experiments.stop(1, who="test", why="enough")
    live.store.experiments.change(1, lambda one: one.__class__(**{**vars(one), "state": "ended"}))
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        answers = [ask(live, user=f"user {i}") for i in range(12)]
        if {answer["policy_version"] for answer in answers} == {2}:
            return
    raise AssertionError("the experiment has ended, and the other policy still answers")


def test_a_tenant_is_answered_by_its_own_policy_whatever_serves(live: LiveServer) -> None:
    expected = whole(live.store.get(4)).path
    for path in ("/generate", "/v1/completions"):
        for body in ({}, {"n": 2}, {"stop": ["nothing like it"]}):
            ask(live, path, tenant="mill", metadata={"of": "mill"}, **body)
    deadline = time.monotonic() + 60
    while len(rows := live.rows("interactions", "metadata['of'] = 'mill'")) < 8 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert len(rows) == 8
    for row in rows:
        assert [span["policy_version"] for span in row["policy_spans"]] == [4]
        logprobs = reference_logprobs(expected, PROMPT, row["response_token_ids"])
        assert list(row["logprobs"]) == pytest.approx(logprobs, abs=5e-4)


def test_the_policies_of_an_experiment_need_one_base(tmp_path: Path, live: LiveServer) -> None:
    other = live.store.publish(make_model_folder(tmp_path / "other", 7), parent=None, lineage={}, metrics={})
    pointer = live.store.serving()
    assert pointer is not None
    live.store.experiments.begin(experiment(2, live.store, candidate=other.version, control=pointer.version))
    deadline = time.monotonic() + 30
    while "experiment 2 shares traffic between the replicas of a fleet" not in live.log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert {ask(live, user=f"user {i}")["policy_version"] for i in range(12)} == {pointer.version}
    live.store.experiments.change(2, lambda one: one.__class__(**{**vars(one), "state": "ended"}))


@pytest.mark.parametrize(
    ("adapters", "message"),
    [
        ({"count": 0}, "count"),
        ({"rank": 513}, "rank"),
        ({"count": 1, "tenants": {"a": 2}}, r"count=1 has no place for the policy that serves beside the 1 of"),
        ({"tenants": {"a": 0}}, "tenants"),
    ],
)
def test_bad_room_for_adapters_is_refused(adapters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServeConfig.model_validate({"engine": {"adapters": adapters}})


def test_room_for_adapters_has_one_place() -> None:
    with pytest.raises(ValueError, match=r"max_loras is set by serve\.engine\.adapters: take it out of"):
        ServeConfig.model_validate({"engine": {"adapters": {}, "extra": {"max_loras": 3}}})
