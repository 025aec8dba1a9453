"""Looks at an experiment that are cut short, or that meet what is damaged: servers are left on what was decided."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from deploy.config import root
from deploy.config.root import Settings, child_environment
from deploy.loop import experiments as loop
from deploy.loop import promotion
from deploy.loop.experiments import Controller
from deploy.loop.promotion import ExperimentRefused, PromotionRefused
from deploy.loop.schedule import Scheduler
from deploy.supervise.children import millrace
from evaluation.decisions.ledger import LedgerDamaged
from evaluation.experiments.plan import ExperimentPlan
from evaluation.experiments.verification import verify
from serve.generation.interaction_rows import BLOCK
from serve.policies.experiments import Experiment, Experiments
from serve.policies.store import PolicyError
from tests.deploy.commands.test_shadow_command import put_on_record
from tests.evaluation.decisions.worlds import items, judged
from tests.feedback.feedback_rows import interaction, put, said
from tests.paths import ROOT

BLOCKS = 200


@pytest.fixture
def home(home_with_policy: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """A home with two policies; experiments in it began some minutes ago, in blocks of a second."""
    settings = root.load(
        home_with_policy.snapshot(),
        [
            ("evaluation.experiment.block_seconds", "1"),
            ("evaluation.experiment.feedback_window_seconds", "0"),
            ("evaluation.experiment.phases", '[{"share": 0.5}]'),
            ("evaluation.experiment.outcomes.errors", "null"),
            ("evaluation.experiment.min_voices", "1"),
        ],
        {},
    )
    store = settings.policy_store()
    store.publish(store.get(1).path, parent=1, lineage={"test": True}, metrics={"other": 1})
    monkeypatch.setattr(loop, "_START_IN_S", -(BLOCKS + 60.0))
    return settings


def started(home: Settings, likes: dict[str, float]) -> Experiment:
    """An experiment with a response and a thumb in each of its blocks; ``likes``: the thumb of each variant."""
    experiment = Controller(home).start(2, who="tests", why="no gate in this test", override=True)
    rows, thumbs = [], []
    for block in range(BLOCKS):
        turn, name = experiment.turn(block), f"r{experiment.number}-{block}"
        at = datetime.fromtimestamp(experiment.begins(block), UTC) + timedelta(milliseconds=100)
        labels: dict[str, Any] = {"experiment": experiment.number, "variant": turn.variant}
        labels |= {"propensity": turn.propensity, "created_at": at, "completed_at": at, "metadata": {BLOCK: str(block)}}
        rows.append(interaction(name, **labels))
        thumbs.append(said(f"f-{name}", name, "thumb", value=likes[turn.variant], created_at=at))
    put(home.lake(), "interactions", rows)
    put(home.lake(), "feedback", thumbs)
    return experiment


HARM = {"candidate": 0.0, "control": 1.0}
GAIN = {"candidate": 1.0, "control": 0.0}


def pointer_of(home: Settings) -> int:
    pointer = home.policy_store().serving()
    assert pointer is not None
    return pointer.version


def events(home: Settings) -> list[tuple[str, str | None]]:
    entries = [entry.body for entry in home.ledger().entries() if entry.kind == "experiment"]
    return [(body["event"], body.get("decision")) for body in entries]


def test_harm_ends_at_once_and_the_ledger_verifies(home: Settings) -> None:
    started(home, HARM)
    ended = Controller(home).look()
    assert ended is not None
    assert (ended.state, pointer_of(home)) == ("ended", 1)
    assert events(home) == [("start", None), ("end", "roll back")]
    assert verify(home.ledger()) == []
    assert Controller(home).look() is None


def test_a_gain_is_committed_and_harm_since_moves_the_pointer_back(
    home: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(home, GAIN)
    committed = Controller(home).look()
    assert committed is not None
    assert (committed.state, pointer_of(home), committed.watched_from) == ("committed", 2, BLOCKS)
    assert verify(home.ledger()) == []

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(loop.looks, "look", harmful)
        patched.setattr(Controller, "_over", killed)
        with pytest.raises(KeyboardInterrupt):
            Controller(home).look()
    assert pointer_of(home) == 1  # killed between the pointer and the record
    ended = Controller(home).look()
    assert ended is not None
    assert (ended.state, ended.end is not None and ended.end["decision"]) == ("ended", "roll back")
    assert pointer_of(home) == 1
    with pytest.raises(PromotionRefused):
        promotion.promote(home.policy_store(), home.ledger(), 2, who="tests", why="again")


def harmful(plan: Any, observed: Any, *, watched_from: int | None = None) -> Any:
    """The decision on an experiment that shows harm."""
    from evaluation.statistics.experiment import Decision

    return Decision("roll back", ("feedback is shown to be worse",), (), (), 1.0, 1.0)


def test_a_stop_beside_a_commit_leaves_the_candidate_unpromoted(
    home: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = started(home, GAIN)
    keep = Controller._keep

    def stopped_meanwhile(self: Controller, *arguments: Any) -> str:
        self.experiments.stop(experiment.number, who="ann", why="wrong template")
        return keep(self, *arguments)

    monkeypatch.setattr(Controller, "_keep", stopped_meanwhile)
    ended = Controller(home).look()
    assert ended is not None
    assert (ended.state, pointer_of(home)) == ("ended", 1)
    assert events(home) == [("start", None), ("end", "stopped")]


def test_a_stop_behind_a_commit_that_was_cut_short_takes_it_back(
    home: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = started(home, GAIN)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Controller, "_watch", killed)
        with pytest.raises(KeyboardInterrupt):
            Controller(home).look()
    assert pointer_of(home) == 2
    Experiments(home.policy_store().root).stop(experiment.number, who="ann", why="wrong template")
    Controller(home).look()
    assert pointer_of(home) == 1


def test_a_commit_that_was_cut_short_is_gone_on_with(home: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    started(home, GAIN)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Controller, "_record", killed)
        with pytest.raises(KeyboardInterrupt):
            Controller(home).look()
    found = Controller(home).look()
    assert found is not None
    assert (found.state, pointer_of(home)) == ("committed", 2)
    assert events(home) == [("start", None), ("commit", "commit")]
    assert verify(home.ledger()) == []


def test_harm_ends_for_servers_also_where_the_ledger_is_damaged(home: Settings) -> None:
    experiment = started(home, HARM)
    file = home.ledger().file
    file.write_text(file.read_text().replace('"share":0.5', '"share":0.6'))
    with pytest.raises(LedgerDamaged):
        Controller(home).look()
    stopped = Experiments(home.policy_store().root).get(experiment.number)
    assert (stopped.state, stopped.end is not None and stopped.end["decision"]) == ("stopping", "roll back")


def test_an_experiment_whose_rows_can_not_be_read_ends_when_its_time_is_over(home: Settings) -> None:
    experiment = started(home, GAIN)
    experiments = Experiments(home.policy_store().root)
    shutil.rmtree(Path(home.lake().uri) / "interactions")
    with pytest.raises(Exception, match="interactions"):
        Controller(home).look()
    assert experiments.get(experiment.number).state == "running"
    experiments.change(experiment.number, lambda one: changed(one, plan=one.plan | {"max_s": 1.0}))
    ended = Controller(home).look()
    assert ended is not None
    assert ended.end is not None
    assert (ended.state, ended.end["decision"], pointer_of(home)) == ("ended", "expired", 1)


def changed(experiment: Experiment, **values: Any) -> Experiment:
    return Experiment(**{**vars(experiment), **values})


def test_a_policy_that_an_erasure_has_marked_is_not_committed(home: Settings) -> None:
    started(home, GAIN)
    home.policy_store().record_erasure(2, certainty="yes", why="a user asked", erasure="e1", retrain=True)
    ended = Controller(home).look()
    assert ended is not None
    assert ended.end is not None
    assert (ended.state, ended.end["decision"], pointer_of(home)) == ("ended", "failed", 1)
    assert "marked for retraining" in ended.end["why"]


def test_a_policy_whose_shadow_showed_harm_meanwhile_is_not_committed(home: Settings) -> None:
    candidate, control = map(home.policy_store().get, (2, 1))
    judged(home.ledger(), 2, items(500, gain=0.3, differing=0.4), shas=(candidate.sha256, control.sha256))
    started(home, GAIN)
    put_on_record(home, candidate, 0.1)
    ended = Controller(home).look()
    assert ended is not None
    assert ended.end is not None
    assert (ended.state, ended.end["decision"], pointer_of(home)) == ("ended", "failed", 1)
    assert "did harm: reward is shown to be worse: -0.4000" in ended.end["why"]


def test_a_candidate_that_is_gone_ends_it(home: Settings) -> None:
    started(home, HARM)
    with pytest.raises(Exception, match="is in experiment 1: stop that first"):
        home.policy_store().withdraw(2)
    shutil.rmtree(home.policy_store().get(2).path)
    ended = Controller(home).look()
    assert ended is not None
    assert ended.state == "ended"


@pytest.mark.parametrize("refused", ["candidate", "control"])
def test_only_what_is_wrong_with_the_candidate_speaks_against_it(home: Settings, refused: str) -> None:
    experiment = started(home, GAIN)
    Controller(home).look()
    assert pointer_of(home) == 2
    decision = "failed" if refused == "candidate" else "void"
    Experiments(home.policy_store().root).stop(experiment.number, who="server", why="sha256", decision=decision)
    Controller(home).look()
    assert pointer_of(home) == (1 if refused == "candidate" else 2)


def test_nobody_is_moved_back_to_a_policy_that_can_not_serve(home: Settings) -> None:
    experiment = started(home, GAIN)
    Controller(home).look()
    weights = home.policy_store().get(1).weight_files[0]
    weights.write_bytes(weights.read_bytes()[:-1])
    stop: Callable[..., object] = Experiments(home.policy_store().root).stop
    stop(experiment.number, who="server", why="NaN", decision="failed")
    ended = Controller(home).look()
    assert ended is not None
    assert (ended.state, pointer_of(home)) == ("ended", 2)
    [*_, last] = [entry.body for entry in home.ledger().entries() if entry.kind == "experiment"]
    assert "policy 2 stays, as policy 1 can't serve" in last["why"]


def test_a_start_that_was_cut_short_speaks_against_nobody(home: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Experiments, "begin", killed)
        with pytest.raises(KeyboardInterrupt):
            Controller(home).start(2, who="tests", why="no gate", override=True)
    assert Controller(home).look() is None
    assert events(home) == [("start", None), ("end", "not begun")]
    with pytest.raises(ExperimentRefused) as refused:
        Controller(home).start(2, who="tests", why="no gate")
    assert "was tried" not in str(refused.value)
    assert started(home, HARM).number == 2
    Controller(home).look()
    assert verify(home.ledger()) == []


def move_away(home: Settings, experiment: Experiment) -> None:
    """Do what the error about a damaged record says, and look."""
    file = home.policy_store().root / "experiments" / f"{experiment.number:06d}.json"
    file.write_text("{")
    with pytest.raises(PolicyError, match="Move the file away; the ledger says what it was"):
        Controller(home).look()
    file.rename(file.with_suffix(".damaged"))
    assert Controller(home).look() is None


@pytest.mark.parametrize("looked_at", [False, True])
def test_an_experiment_whose_record_is_lost_is_void_and_counts_as_tried(home: Settings, looked_at: bool) -> None:
    experiment = started(home, HARM)
    if looked_at:  # then the rows may be gone
        plan = ExperimentPlan.model_validate(experiment.plan)
        Controller(home)._observe(experiment, plan, experiment.begins(BLOCKS + 60))
        shutil.rmtree(Path(home.lake().uri) / "interactions")
    move_away(home, experiment)
    assert events(home) == [("start", None), ("end", "void")]
    assert Experiments(home.policy_store().root).get(experiment.number).state == "ended"
    assert pointer_of(home) == 1
    with pytest.raises(ExperimentRefused, match="was tried against policy 1"):
        Controller(home).start(2, who="tests", why="")
    assert verify(home.ledger()) == []


@pytest.mark.parametrize("on_record", [False, True])
def test_a_commit_whose_record_is_lost_is_taken_back(
    home: Settings, monkeypatch: pytest.MonkeyPatch, on_record: bool
) -> None:
    experiment = started(home, GAIN)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        if on_record:
            Controller(home).look()
        else:
            patched.setattr(Controller, "_watch", killed)
            with pytest.raises(KeyboardInterrupt):
                Controller(home).look()
    assert pointer_of(home) == 2
    move_away(home, experiment)
    commit = [("commit", "commit")] if on_record else []
    assert events(home) == [("start", None), *commit, ("end", "void")]
    assert pointer_of(home) == 1
    assert verify(home.ledger()) == []


@pytest.mark.parametrize(("patience", "cycles"), [("600", "--no-cycles"), ("0.01", "--cycles")])
def test_a_scheduler_looks_in_a_process_that_is_stopped_when_it_takes_too_long(
    home: Settings, tmp_path: Path, nothing_left: Callable[[], list[str]], patience: str, cycles: str
) -> None:
    started(home, HARM)
    if cycles == "--no-cycles":
        home.path(home.evaluation.suite).unlink()  # so that none could work
    options = [
        ("evaluation.experiment.look_seconds", "0.5"),
        ("evaluation.experiment.look_timeout_seconds", patience),
        ("schedule.first_after_seconds", "6000"),
    ]
    log = tmp_path / "schedule.log"
    command = millrace("--config", root.load(home.snapshot(), options, {}).snapshot(), "schedule", cycles)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=child_environment({"PYTHONPATH": str(ROOT)})
        )
    expected = "has ended: roll back" if patience == "600" else "could not be looked at"
    deadline = time.monotonic() + 120
    while expected not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(180) == 0, log.read_text()
    assert nothing_left() == []
    if patience == "600":
        assert Experiments(home.policy_store().root).current() is None
    else:
        assert "still runs after 0 s, stopping it" in log.read_text()
        assert Controller(home).look() is not None
        assert events(home)[-1] == ("end", "roll back")


def test_a_damaged_record_is_reported_once(home: Settings) -> None:
    experiment = started(home, HARM)
    file = home.policy_store().root / "experiments" / f"{experiment.number:06d}.json"
    file.write_text("{")
    said: list[str] = []
    scheduler = Scheduler(home, say=said.append)
    for _ in range(2):
        scheduler._experiment()
    [line] = said
    assert "could not be looked at" in line
    assert "is no experiment" in line
    file.unlink()
    scheduler._experiment()  # a look, as there was trouble
    assert events(home)[-1] == ("end", "void")


@pytest.mark.parametrize(("replicas", "unit", "min_voices"), [("1", "block", 3), ("2", "user", 1)])
def test_where_nothing_serves_the_settings_say_what_is_drawn_for(
    home: Settings, replicas: str, unit: str, min_voices: int
) -> None:
    changed = [("serve.fleet.replicas", replicas), ("evaluation.experiment.min_voices", "3")]
    settings = root.load(home.snapshot(), changed, {})
    experiment = Controller(settings).start(2, who="tests", why="no gate in this test", override=True)
    assert (experiment.unit, experiment.plan["min_voices"]) == (unit, min_voices)
    [start] = [entry.body for entry in home.ledger().entries() if entry.kind == "experiment"]
    assert start["unit"] == unit


def test_an_override_does_not_cover_harm_that_nobody_knew_of_then(home: Settings) -> None:
    started(home, GAIN)  # by an override, as it was not evaluated
    put_on_record(home, home.policy_store().get(2), 0.1)  # meanwhile
    Controller(home).look()
    assert pointer_of(home) == 1


def test_the_scheduler_takes_back_a_commit_whose_record_was_moved_away(home: Settings) -> None:
    experiment = started(home, GAIN)
    Controller(home).look()
    assert pointer_of(home) == 2
    folder = Experiments(home.policy_store().root).folder
    (folder / f"{experiment.number:06d}.json").rename(home.home / "away")  # between two looks: nothing is damaged
    said: list[str] = []
    for _ in range(2):
        Scheduler(home, cycles=False, say=said.append)._experiment()
    assert pointer_of(home) == 1, said
