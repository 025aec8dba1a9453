"""Experiments on the traffic of a real server: rolled back, committed, watched, stopped, and killed in between."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.config import root
from deploy.config.root import Settings
from deploy.loop import promotion
from deploy.loop.experiments import Controller
from deploy.loop.promotion import ExperimentRefused
from evaluation.decisions import verification as verdicts
from evaluation.experiments import verification as experiments
from evaluation.shadow import verification as shadows
from loadtests.server import free_port
from serve.policies.experiments import Experiment, ExperimentRunning, Experiments
from tests.processes import start_forked

USERS, PAUSE_S = 6, 0.05


@dataclass
class Traffic:
    """Users who ask, and give thumbs by the policy that answered; ``likes``: the chance of a thumb up, by policy."""

    url: str
    likes: dict[int, float]
    answered: list[str] = field(default_factory=list)
    thumbs: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def __enter__(self) -> Traffic:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._users()))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)
        assert self.failed[:1] == []

    async def _users(self) -> None:
        async with httpx.AsyncClient(base_url=self.url, timeout=60) as client:
            await asyncio.gather(*(self._user(client, f"user-{i}") for i in range(USERS)))

    async def _user(self, client: httpx.AsyncClient, name: str) -> None:
        taste = random.Random(name)
        while not self._stop.is_set():
            answer = await client.post("/generate", json={"prompt": "1+1=", "max_tokens": 4, "user": name})
            if answer.status_code != 200:
                self.failed.append(answer.text)
                continue
            [response] = answer.json()["responses"]
            self.answered.append(response["response_id"])
            up = taste.random() < self.likes[response["policy_spans"][0]["policy_version"]]
            thumb = {"response_id": response["response_id"], "kind": "thumb", "value": int(up), "source": name}
            said = await client.post("/feedback", json=thumb)
            if said.status_code == 201:
                self.thumbs.append(response["response_id"])
            else:
                self.failed.append(said.text)
            await asyncio.sleep(PAUSE_S)


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """A home with five policies of which 1 serves, and its server, which runs."""
    from deploy import initialise

    home = tmp_path_factory.mktemp("experiments") / "home"
    home.mkdir()
    settings = root.load(
        None,
        [
            ("home", str(home)),
            ("serve.port", str(free_port())),
            ("serve.swap.poll_seconds", "0.05"),
            ("serve.engine.kv_cache_bytes", str(64 << 20)),
            ("evaluation.experiment.block_seconds", "0.25"),
            ("evaluation.experiment.feedback_window_seconds", "0.5"),
            ("evaluation.experiment.phases", '[{"share": 0.5}]'),
            ("evaluation.experiment.watch_seconds", "4"),
            ("evaluation.experiment.watch_share", "0.5"),
            ("evaluation.experiment.outcomes.errors.margin", "0.3"),
            ("evaluation.experiment.outcomes.errors.role", "guardrail"),
            ("evaluation.experiment.outcomes.feedback.role", "success"),
        ],
        environment={},
    )
    initialise.initialise(settings, str(model), revision=None, who="tests")
    store = settings.policy_store()
    for _ in range(5):
        store.publish(perturbed(store.get(1).path), parent=1, lineage={}, metrics={})
    process = start_forked(["-m", "deploy.cli", "--config", str(settings.snapshot()), "serve"], home / "serve.log")
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(httpx.HTTPError):
            if httpx.get(f"{settings.server_url}/ready", timeout=2).status_code == 200:
                break
        time.sleep(0.1)
    else:
        process.kill()
        pytest.fail((home / "serve.log").read_text()[-3000:])
    yield settings
    process.terminate()
    assert process.wait(180) == 0, (home / "serve.log").read_text()[-3000:]


def perturbed(folder: Path) -> Callable[[Path], None]:
    """The same model with other weights."""

    def write(into: Path) -> None:
        import shutil

        import torch
        from transformers import AutoModelForCausalLM

        for file in folder.iterdir():
            if file.suffix in (".json", ".jinja") and not file.name.startswith(("policy", "gate")):
                shutil.copy(file, into)
        network = AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            for weights in network.parameters():
                weights.add_(0.02 * torch.randn_like(weights))
        network.save_pretrained(into)

    return write


def start(settings: Settings, version: int, say: Callable[[str], None] = print) -> Experiment:
    return Controller(settings, say=say).start(version, who="tests", why="no gate in this test", override=True)


def look_until(settings: Settings, done: Callable[[Experiment], bool], within_s: float = 240) -> Experiment:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        found = Controller(settings).look()
        assert found is not None
        if done(found):
            return found
        time.sleep(1.0)
    raise TimeoutError(json.dumps(found.latest, indent=2))  # what it has shown until then


def ledger_of(settings: Settings, number: int) -> list[dict[str, Any]]:
    entries = settings.ledger().entries()
    return [entry.body for entry in entries if entry.kind == "experiment" and entry.body["number"] == number]


def wrong_with(settings: Settings) -> list[str]:
    return [*verdicts.verify(settings.ledger()).problems, *experiments.verify(settings.ledger())]


def back_at(settings: Settings, version: int) -> None:
    """Have a policy serve again, by the pointer alone."""
    store = settings.policy_store()
    pointer = store.serving()
    assert pointer is not None
    if pointer.version != version:
        store.promote(version, expected=pointer, who="tests", why="for the next test", verdict={"override": True})
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        policy = httpx.get(f"{settings.server_url}/policy", timeout=60).json()
        if policy["version"] == version and policy["experiment"] is None:
            return
        time.sleep(0.05)
    raise TimeoutError(policy)


def rows_of(settings: Settings, responses: list[str]) -> int:
    with settings.lake().connect(settings.path(settings.feedback.journal.folder)) as connection:
        connection.execute("CREATE TEMP TABLE asked AS SELECT unnest(?::VARCHAR[]) AS response_id", [responses])
        found = connection.sql(
            "SELECT count(*), count(DISTINCT response_id) FROM interactions JOIN asked USING (response_id)"
        )
        rows, distinct = found.fetchall()[0]
    assert rows == distinct
    return int(distinct)


@pytest.mark.timeout(600)
def test_what_harms_people_goes_back_by_itself_and_nobody_loses_a_request(served: Settings) -> None:
    with Traffic(served.server_url, {1: 0.9, 2: 0.3}) as traffic:
        experiment = start(served, 2)
        ended = look_until(served, lambda one: one.state == "ended")
        back_at(served, 1)
    assert ended.end is not None
    assert ended.end["decision"] == "roll back"
    assert "feedback is shown to be worse" in ended.end["why"]
    assert len(traffic.thumbs) == len(traffic.answered)
    assert len(traffic.answered) > 100
    assert rows_of(served, traffic.answered) == len(traffic.answered)
    pointer = served.policy_store().serving()
    assert pointer is not None
    assert pointer.version == 1
    assert [body["event"] for body in ledger_of(served, experiment.number)] == ["start", "end"]
    assert wrong_with(served) == []
    with pytest.raises(promotion.PromotionRefused):
        promotion.promote(served.policy_store(), served.ledger(), 2, who="tests", why="it passed")
    with pytest.raises(ExperimentRefused, match="policy 2 was tried against policy 1 in experiment 1"):
        Controller(served).start(2, who="tests", why="again")


@pytest.mark.timeout(600)
@pytest.mark.long
def test_what_people_like_better_is_committed_watched_and_kept(served: Settings) -> None:
    with Traffic(served.server_url, {1: 0.3, 3: 0.9}) as traffic:
        experiment = start(served, 3)
        with pytest.raises(ExperimentRunning, match="has not ended"):
            start(served, 4)
        committed = look_until(served, lambda one: one.state != "running")
        assert committed.state == "committed"
        pointer = served.policy_store().serving()
        assert pointer is not None
        assert (pointer.version, pointer.who) == (3, "experiment")
        ended = look_until(served, lambda one: one.state == "ended")
        back_at(served, 3)
    assert ended.end is not None
    assert ended.end["decision"] == "kept"
    assert [body["event"] for body in ledger_of(served, experiment.number)] == ["start", "commit", "end"]
    assert len(traffic.thumbs) == len(traffic.answered)
    assert wrong_with(served) == []
    assert served.policy_store().serving() == pointer
    back_at(served, 1)


@pytest.mark.timeout(600)
@pytest.mark.long
def test_harm_after_the_commit_moves_the_pointer_back(served: Settings) -> None:
    likes = {1: 0.3, 4: 0.95}
    longer = served.evaluation.experiment.model_copy(update={"watch_seconds": 600.0})
    settings = served.model_copy(update={"evaluation": served.evaluation.model_copy(update={"experiment": longer})})
    with Traffic(settings.server_url, likes) as traffic:
        start(settings, 4)
        look_until(settings, lambda one: one.state == "committed")
        likes[1], likes[4] = 1.0, 0.0
        ended = look_until(settings, lambda one: one.state == "ended", within_s=400)
        back_at(settings, 1)
    assert ended.end is not None
    assert ended.end["decision"] == "roll back"
    pointer = settings.policy_store().serving()
    assert pointer is not None
    assert (pointer.version, (pointer.verdict or {})["rollback_from"]) == (1, 4)
    assert len(traffic.thumbs) == len(traffic.answered)
    assert wrong_with(settings) == []


@pytest.mark.timeout(900)
@pytest.mark.long
def test_looks_that_are_killed_at_any_moment_come_to_one_end(served: Settings) -> None:
    command = [sys.executable, "-m", "deploy.cli", "--config", str(served.snapshot()), "experiment", "look"]
    when, kills = random.Random(7), 0
    with Traffic(served.server_url, {1: 0.9, 5: 0.2}) as traffic:
        experiment = start(served, 5)
        deadline = time.monotonic() + 400
        while Experiments(served.policy_store().root).current() is not None and time.monotonic() < deadline:
            looking = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            with suppress(subprocess.TimeoutExpired):
                looking.wait(when.uniform(0.8, 4.0))
            kills += looking.poll() is None
            looking.kill()
            looking.wait(120)
        Controller(served).look()
        back_at(served, 1)
    assert kills > 0
    assert [body["event"] for body in ledger_of(served, experiment.number)] == ["start", "end"]
    [_, end] = ledger_of(served, experiment.number)
    assert end["decision"] == "roll back"
    assert wrong_with(served) == []
    assert len(traffic.thumbs) == len(traffic.answered)


@pytest.mark.timeout(600)
def test_two_equal_policies_are_held_and_a_person_stops_it_over_http(served: Settings) -> None:
    with Traffic(served.server_url, {1: 1.0, 6: 1.0}):
        experiment = start(served, 6)
        found = look_until(served, lambda one: one.latest is not None and one.latest["blocks"]["candidate"] >= 15)
        assert (found.state, found.latest is not None and found.latest["decision"]) == ("running", "hold")
        with httpx.Client(base_url=served.server_url, timeout=60) as client:
            assert client.get("/experiments/77").status_code == 404
            assert client.post(f"/experiments/{experiment.number}/stop", json={}).status_code == 422
            listed = client.get("/experiments").json()["experiments"]
            assert listed[-1]["number"] == experiment.number
            stopped = client.post(f"/experiments/{experiment.number}/stop", json={"why": "lunch"})
            assert (stopped.status_code, stopped.json()["state"]) == (200, "stopping")
            again = client.post(f"/experiments/{experiment.number}/stop", json={"why": "lunch"})
            assert again.status_code == 409
        ended = look_until(served, lambda one: one.state == "ended")
    assert ended.end is not None
    assert (ended.end["decision"], ended.end["why"]) == ("stopped", "lunch")
    back_at(served, 1)
    assert Controller(served).look() is None
    assert wrong_with(served) == []


@pytest.mark.timeout(600)
@pytest.mark.long
def test_a_shadow_of_the_same_weights_answers_what_people_got_once_and_never_what_was_not_to_be_stored(
    served: Settings,
) -> None:
    """It waits for the traffic to be sealed, is killed when it has kept its first answers, and goes on."""
    store = served.policy_store()
    back_at(served, 1)
    twin = store.publish(store.get(1).path, parent=1, lineage={}, metrics={"twin": 1}).version
    body = {"prompt": "1+1=", "max_tokens": 6, "temperature": 0, "stop": ["7"]}
    users = [f"shadowed-{i}" for i in range(30)]
    options = {"share": "1.0", "min_requests": "10", "max_requests": "20", "seconds": "60", "before_seconds": "0"}
    named = [part for name, value in options.items() for part in (f"--evaluation.experiment.shadow.{name}", value)]
    engine = ["--evaluation.engine.kv_cache_bytes", str(64 << 20)]
    rule = ["--feedback.scoring.rules", '{"short": {"sql": "1 / (1 + length(response))"}}']
    arguments = ["-m", "deploy.cli", "--config", str(served.snapshot()), "experiment", "shadow"]
    arguments += [str(twin), *named, *engine, *rule]
    kept = served.path(served.evaluation.folder) / "shadows"
    log = served.home / "shadow.log"
    process = start_forked(arguments, log)
    deadline = time.monotonic() + 300
    asked, unstored = dict[str, str](), list[str]()
    while not list(kept.glob("*/began.json")) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    with httpx.Client(base_url=served.server_url, timeout=60) as client:
        for user in users:
            for store_it in (True, False):
                answer = client.post("/generate", json=body | {"user": user, "store": store_it}).json()
                [response] = answer["responses"]
                if store_it:
                    asked[response["response_id"]] = user
                else:
                    unstored.append(response["response_id"])
    while not list(kept.glob("*/responses.jsonl")) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
    process.kill()
    process.wait(120)
    first = [json.loads(line) for line in next(kept.glob("*/responses.jsonl")).read_text().splitlines()]
    file = served.home / "shadow.json"
    again = start_forked([*arguments, "--json-out", str(file)], log)
    assert again.wait(400) == 0, log.read_text()
    found = json.loads(file.read_text())
    after = [json.loads(line) for line in next(kept.glob("*/responses.jsonl")).read_text().splitlines()]
    assert after[: len(first)] == first
    assert len(after) == len({asked[one["response_id"]] for one in after}) == 20
    assert not {one["response_id"] for one in after} & set(unstored)
    assert (found["comparison"]["requests"], found["comparison"]["decision"]) == (20, "no harm shown")
    assert [one["value"] for one in found["comparison"]["compared"]] == [0.0] * 4
    assert rows_of(served, list(asked)) == len(users)  # and the lake has what people got, once
    on_record = [entry.body["comparison"] for entry in served.ledger().entries() if entry.kind == "shadow"]
    assert [one["requests"] for one in on_record] == [20]
    assert shadows.verify(served.ledger()) == []
    assert wrong_with(served) == []
