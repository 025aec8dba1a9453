"""Resident workers: real runs in processes that stay, beside a run in fresh ones; and an evaluation in their engine."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest

from deploy import status
from deploy.config import root
from deploy.config.root import Settings
from deploy.supervise import resident
from deploy.supervise.children import child_variables
from evaluation.config import EngineConfig, EvaluationConfig, GateConfig, GuardrailsConfig
from evaluation.decisions.judgement import Judgement, judge
from evaluation.decisions.ledger import Ledger
from evaluation.engine import Done, LentEngine, OfflineEngine, OfflineEngines, Work
from evaluation.suites.suite import Suite
from feedback.processes import resident_socket
from serve.policies.store import Policy, PolicyStore
from tests.paths import ROOT
from tests.train.job_home import job_context, make_home, metrics_of
from train.config.training import TrainConfig
from train.context import JobContext, JobResult
from train.controller.imported_files import ImportedFiles
from train.launch import JobError, run_job
from train.workers.resident_pools import ResidentPools, rollout_engine

CACHE = {"max_model_len": 64, "kv_cache_bytes": 16 * 2**20}
CONFIG: dict[str, Any] = {
    "dtype": "float32",
    "steps": 2,
    "micro_batch_tokens": 64,
    "optimizer": {"learning_rate": 3e-3, "warmup_steps": 1},
    "rollout": {"max_tokens": 6, **CACHE},
    "data": {"prompts_per_step": 4, "min_prompts": 4},
    "start_timeout_s": 200,
    "step_timeout_s": 100,
    "restarts": {"attempts": 1},  # what goes wrong is seen before the time limit of a test
}
PPO = {"algorithm": {"name": "ppo", "group_size": 4, "critic": {"learning_rate": 3e-3}}, "epochs": 2}
GRPO = {"algorithm": {"name": "grpo", "group_size": 4}, "measure_kl": True}
ENGINE = EngineConfig(**CACHE)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resident")
    make_home(folder)
    return folder


@pytest.fixture(scope="module")
def settings(home: Path) -> Settings:
    return root.load(None, [("home", str(home))])


@pytest.fixture(scope="module")
def owner(home: Path, settings: Settings) -> Iterator[dict[str, str]]:
    """The environment in which it was started, for what is run by hand beside it."""
    os.chdir(home)
    environment = os.environ | {"PYTHONPATH": child_variables()["PYTHONPATH"]}
    with resident.serving(settings, shared=True):
        yield environment
    assert resident.residents(settings) is None
    assert not settings.path(resident.SHARED).exists()


def test_where_a_training_is_due_in_a_moment_the_workers_process_is_there_before_it_asks(tmp_path: Path) -> None:
    settings = root.load(None, [("home", str(tmp_path))])
    with resident.serving(settings, at_once=True):
        deadline = time.monotonic() + 120
        while (found := resident.residents(settings)) is None:
            assert time.monotonic() < deadline, (tmp_path / "logs" / "resident.log").read_text()
            time.sleep(0.2)
        assert found["state"] == "starts"
    assert resident.residents(settings) is None


def job(home: Path, name: str, **settings: Any) -> tuple[TrainConfig, JobContext]:
    os.chdir(home)  # all stages of a home's cycles have one folder
    context = job_context(home, name, reward="users_code:reward", python_path=[str(home)], parent=1)
    return TrainConfig.model_validate({**CONFIG, "runs": str(home / "runs"), **settings}), JobContext(**context)


def write_old(file: Path, code: str, time_ns: int = 1) -> None:
    """Code that workers don't take for newer than they are."""
    file.write_text(code)
    os.utime(file, ns=(time_ns, time_ns))


@pytest.fixture(scope="module")
def runs(home: Path, owner: None) -> dict[str, JobResult]:
    """Two runs in the same workers, the first with another algorithm and another seed; and the second in new ones."""
    first = run_job(*job(home, "first", **GRPO, seed=5))
    second = run_job(*job(home, "second", **PPO))
    fresh = run_job(*job(home, "fresh", **PPO, resident={"enabled": False}))
    return {"first": first, "second": second, "fresh": fresh}


def policy(home: Path, result: JobResult) -> Policy:
    assert result.candidate is not None
    return PolicyStore(home / "policies").get(result.candidate)


def weights(policy: Policy) -> bytes:
    return b"".join(path.read_bytes() for path in policy.weight_files)


def test_a_run_in_workers_that_stayed_ends_with_the_weights_of_one_in_new_ones(
    home: Path, runs: dict[str, JobResult], settings: Settings
) -> None:
    first, second, fresh = (policy(home, runs[name]) for name in ("first", "second", "fresh"))
    assert weights(second) == weights(fresh)
    assert weights(second) != weights(first)
    log = (home / "logs" / "resident.log").read_text()
    assert "anew" not in log
    found = status.look(settings, data=False)
    assert found.resident is not None
    assert found.resident["state"] == "asleep"
    assert found.resident["bytes"] > 100 * 2**20
    assert any(title == "workers" and text.startswith("resident since 20") for title, text in status.lines(found))


def done(engine: OfflineEngine) -> Done:
    prompts = engine.encode([f"odds {letter}>" for letter in "abcdefgh"])
    requested = [(ids, {"temperature": 0.7, "top_p": 0.9, "seed": i}) for i, ids in enumerate(prompts)]
    scored = [(ids, [5, 6, 7]) for ids in prompts]
    work = Work(greedy=prompts, sampled=[(ids, 3) for ids in prompts], requested=requested, scored=scored)
    return engine.run(work, max_tokens=16)


def same(a: Done, b: Done) -> bool:
    return all(
        (one.text, one.token_ids, one.finish_reason) == (other.text, other.token_ids, other.finish_reason)
        and (name == "requested" or np.array_equal(one.logprobs, other.logprobs))
        for name in ("greedy", "sampled", "requested")
        for one, other in zip(getattr(a, name), getattr(b, name), strict=True)
    ) and all(np.array_equal(one, other) for one, other in zip(a.scored, b.scored, strict=True))


def test_the_engine_that_is_there_answers_for_both_policies_as_engines_of_their_own(
    home: Path, runs: dict[str, JobResult]
) -> None:
    policies = policy(home, runs["second"]), PolicyStore(home / "policies").get(1)
    with OfflineEngines(ENGINE) as engines:
        lent = [done(engines.of(one)) for one in policies]
        assert engines.where == "resident"
    for one, answered in zip(policies, lent, strict=True):
        with OfflineEngine(one.path, ENGINE) as engine:
            assert same(answered, done(engine))
    assert not same(*lent)
    for _ in range(30):  # who goes once it has its answer has not hung up on the workers
        with OfflineEngines(ENGINE) as engines:
            engines.of(policies[0])
            assert engines.where == "resident"


def alike(rows: pa.Table) -> list[float]:
    return [0.5] * len(rows)


def test_of_an_evaluation_that_the_first_looks_decide_the_engine_that_is_there_answers_few_more_items(
    home: Path, runs: dict[str, JobResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine of its own answers all of them, as it would have to be started anew; the verdict is the same."""
    items, path = 400, tmp_path / "suite.jsonl"
    path.write_text("".join(f'{{"id": "{i}", "prompt": "odds {i:03d}>"}}\n' for i in range(items)))
    settings = EvaluationConfig(
        engine=ENGINE,
        scorer=f"{__name__}:alike",
        max_tokens=4,
        gate=GateConfig(worthwhile=0.5, guardrails=GuardrailsConfig(length=None, truncation=None)),
    )
    store = PolicyStore(home / "policies")

    def judged(name: str) -> tuple[Judgement, int]:
        folder = tmp_path / name
        pair = policy(home, runs["second"]), store.get(1)
        found = judge(*pair, Suite.load(path), settings, folder / "evaluations", Ledger(folder / "decisions"), who="me")
        of_candidate = (folder / "evaluations" / "cache").glob(f"{pair[0].sha256}-*/answers.arrow")
        return found, sum(pa.ipc.open_file(pa.OSFile(str(one))).read_all().num_rows for one in of_candidate)

    few, answered = judged("lent")
    assert few.evaluation is not None
    assert few.evaluation.engines == {"incumbent": "resident", "candidate": "resident"}
    assert few.verdict.verdict == "refuse"
    assert few.verdict.items <= answered <= 2 * few.verdict.items < items
    assert few.verdict.fresh == items - few.verdict.items
    monkeypatch.delenv(resident_socket.ADDRESS)
    whole, answered = judged("own")
    assert answered == items
    assert whole.evaluation is not None
    assert whole.evaluation.engines == {"incumbent": "own", "candidate": "own"}
    assert whole.evaluation.kl is not None
    assert few.evaluation.kl is not None
    assert whole.evaluation.kl.samples == few.evaluation.kl.samples == few.verdict.items
    assert whole.evaluation.candidate == few.evaluation.candidate
    assert whole.verdict.model_dump(exclude={"entry_sha256"}) == few.verdict.model_dump(exclude={"entry_sha256"})


def test_an_engine_that_computes_otherwise_is_not_lent(
    home: Path, runs: dict[str, JobResult], caplog: pytest.LogCaptureFixture
) -> None:
    for other in ({"dtype": "bfloat16"}, {"max_model_len": 32}, {"max_num_seqs": 7}, {"tensor_parallel_size": 2}):
        assert LentEngine.borrow(policy(home, runs["second"]), ENGINE.model_copy(update=other)) is None
        assert f"engine has {next(iter(other))}" in caplog.text


def test_a_run_after_an_evaluation_learns_as_in_new_workers(
    home: Path, runs: dict[str, JobResult], settings: Settings
) -> None:
    before = resident.residents(settings)
    again = policy(home, run_job(*job(home, "again", **PPO)))
    after = resident.residents(settings)
    assert before is not None
    assert after is not None
    assert (before["since"], before["state"]) == (after["since"], after["state"])
    assert after["bytes"] < 1.1 * before["bytes"]
    assert weights(again) == weights(policy(home, runs["fresh"]))


CYCLE = """
import gc
from train.observe.hooks import Hook

class Cycle(Hook):
    def on_end(self, result, error):
        self.itself = self
        gc.disable()  # or it would be found by chance

    def __del__(self):
        gc.enable()
        (self.run.folder / "freed").touch()
"""


def test_what_a_run_leaves_in_cycles_in_the_driver_is_freed_as_it_ends(home: Path, runs: dict[str, JobResult]) -> None:
    """As a reward model may, whose device others have meanwhile."""
    write_old(home / "cyclic_hooks.py", CYCLE)
    assert run_job(*job(home, "cyclic", **PPO, hooks=["cyclic_hooks:Cycle"])).candidate is not None
    assert (home / "runs" / "cyclic" / "freed").exists()


def test_a_run_whose_models_wait_while_it_generates_may_come_after_one_that_had_others(
    home: Path, runs: dict[str, JobResult], settings: Settings
) -> None:
    """What rests of the runs before, a critic and a reference, is in its processes, without a model that could wait."""
    before = resident.residents(settings)
    alone = {"algorithm": GRPO["algorithm"], "measure_kl": False, "fsdp": {"offload_while_generating": True}}
    assert run_job(*job(home, "waits", **alone)).candidate is not None
    after = resident.residents(settings)
    assert before is not None
    assert after is not None
    assert before["since"] == after["since"]


LAZY = """
def reward(batch):
    import lazy_helper  # where it is called: in a rank

    return [lazy_helper.OFFSET - len(ids) - 0.01 * sum(ids) for ids in batch["response_token_ids"].to_pylist()]
"""


def test_code_that_a_rank_alone_has_imported_is_seen_to_have_changed(home: Path, runs: dict[str, JobResult]) -> None:
    def mean_reward(name: str) -> float:
        config, context = job(home, name, **GRPO, placement={"reward": "all"})
        assert run_job(config, context.model_copy(update={"reward": "lazy_rewards:reward"})).candidate is not None
        return metrics_of(home, name)[0]["reward"]

    helper = home / "lazy_helper.py"
    write_old(home / "lazy_rewards.py", LAZY)
    write_old(helper, "OFFSET = 0.0\n")
    assert mean_reward("lazy") < 0
    write_old(helper, "OFFSET = 1000.0\n", 2)
    assert mean_reward("lazy-again") > 900
    log = (home / "logs" / "resident.log").read_text()
    assert f"lazy-again: the resident workers are started anew: {helper}" in log


BY_HAND = """
import os
import sys
from pathlib import Path
from deploy.config import root
from deploy.supervise import resident
from evaluation.engine import OfflineEngines
from feedback.processes import resident_socket
from serve.policies.store import PolicyStore
from tests.deploy.supervise.test_resident import ENGINE

home, version, *options = sys.argv[1:]
settings = root.load(None, [("home", home), *(option.split("=") for option in options)])
with resident.joined(settings, "evaluate"):
    if resident_socket.ADDRESS not in os.environ:
        sys.exit(print("nobody"))
    with OfflineEngines(ENGINE) as engines:
        engines.of(PolicyStore(Path(home) / "policies").get(int(version)))
        print(engines.where)
"""


def test_what_is_run_by_hand_beside_a_schedule_asks_its_workers_where_it_would_start_like_ones(
    home: Path, runs: dict[str, JobResult], owner: dict[str, str], settings: Settings, tmp_path: Path
) -> None:
    def answered_by(*options: str, folder: Path = home, **environment: str) -> str:
        command = [sys.executable, "-c", BY_HAND, str(home), "1", *options]
        return subprocess.run(
            command, env=owner | environment, cwd=folder, capture_output=True, text=True, timeout=300, check=True
        ).stdout.strip()

    assert answered_by() == "resident"
    assert settings.path(resident.SHARED).stat().st_mode & 0o777 == 0o600
    with ThreadPoolExecutor(3) as pool:
        others = [
            pool.submit(answered_by, "train.resident.enabled=false"),
            pool.submit(answered_by, VLLM_CPU_OMP_THREADS_BIND="0"),
            pool.submit(answered_by, folder=tmp_path),
        ]
        assert [other.result() for other in others] == ["nobody"] * 3


def rank_of(settings: Settings) -> psutil.Process:
    """The rank of the workers that are there, which have one."""
    process = psutil.Process(json.loads(settings.path(resident.STATE).read_bytes())["process"])
    [rank] = [each for each in process.children(recursive=True) if "Host" in each.name() + " ".join(each.cmdline())]
    return rank


@pytest.mark.long
def test_a_run_gets_new_workers_where_one_was_killed_while_it_slept(
    home: Path, runs: dict[str, JobResult], settings: Settings
) -> None:
    rank_of(settings).kill()
    again = policy(home, run_job(*job(home, "after_kill", **PPO)))
    assert weights(again) == weights(policy(home, runs["fresh"]))
    assert "after_kill: the resident workers are started anew" in (home / "logs" / "resident.log").read_text()
    assert resident.residents(settings) is not None


def test_an_evaluation_goes_on_in_an_engine_of_its_own_where_a_rank_of_the_lent_one_hangs(
    home: Path,
    runs: dict[str, JobResult],
    settings: Settings,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is the workers that find it: meanwhile they say that they are at work, and are waited for."""
    monkeypatch.setattr("evaluation.engine._SILENT_S", 15.0)
    restarts = CONFIG["restarts"] | {"silence_s": 18}
    assert run_job(*job(home, "hangs", **PPO, restarts=restarts)).candidate is not None
    one = policy(home, runs["second"])
    with OfflineEngines(ENGINE) as engines:
        lent = engines.of(one)
        assert engines.where == "resident"
        rank_of(settings).suspend()
        found = done(lent)
        assert engines.where == "own"
    with OfflineEngine(one.path, ENGINE) as own:
        assert same(found, done(own))
    assert "has given no sign of life for 18 s (train.restarts.silence_s)" in caplog.text
    assert gone(lambda: resident.residents(settings) is None)


def test_nothing_of_a_run_that_was_stopped_for_its_health_is_kept(
    home: Path, runs: dict[str, JobResult], settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    stopped = run_job(*job(home, "stopped", **GRPO, max_kl=1e-12))
    assert (stopped.stopped, stopped.candidate) == (True, None)
    assert LentEngine.borrow(policy(home, runs["second"]), ENGINE) is None
    assert "the resident workers have no engine" in caplog.text


def test_workers_end_when_nobody_has_asked_for_a_while_or_memory_runs_short(
    home: Path, runs: dict[str, JobResult], settings: Settings
) -> None:
    log = home / "logs" / "resident.log"
    for name, given, why in (
        ("idle", {"idle_seconds": 2}, "nobody has asked for 2 s"),
        ("short", {"min_free_memory": 0.99}, "less than train.resident.min_free_memory=0.99"),
    ):
        assert run_job(*job(home, name, **PPO, resident=given)).candidate is not None
        assert gone(lambda: resident.residents(settings) is None)
        assert gone(lambda why=why: f"the resident workers end: {why}" in log.read_text()), log.read_text()


@pytest.mark.long
def test_a_run_after_the_users_code_has_changed_gets_new_workers_and_one_that_fails_leaves_none(
    home: Path, runs: dict[str, JobResult], settings: Settings
) -> None:
    (home / "users_code.py").write_text("def reward(batch):\n    raise RuntimeError('the new code is wrong')\n")
    with pytest.raises(JobError, match="the new code is wrong"):
        run_job(*job(home, "broken", **PPO))
    assert "started anew: " + str(home / "users_code.py") in (home / "logs" / "resident.log").read_text()
    assert gone(lambda: resident.residents(settings) is None)


def test_an_engine_whose_context_vllm_finds_by_its_cache_is_lent_for_one_with_as_much_cache(tmp_path: Path) -> None:
    def without_context(seed: Path) -> None:
        config = json.loads((seed / "config.json").read_text())
        del config["max_position_embeddings"]
        (seed / "config.json").write_text(json.dumps(config))

    make_home(tmp_path, without_context)
    found = PolicyStore(tmp_path / "policies").get(1)
    pools = ResidentPools(ImportedFiles())
    config, _ = job(tmp_path, "unknown", rollout={"max_tokens": 6, "kv_cache_bytes": 2**24})
    pools._engine = rollout_engine(config, found, found.path)
    assert pools.refusal(EngineConfig(kv_cache_bytes=2**24), found) is None
    assert "kv_cache_bytes" in str(pools.refusal(EngineConfig(kv_cache_bytes=2**25), found))


def test_a_run_whose_tokens_are_labelled_takes_over_no_engine_that_schedules_ahead(tmp_path: Path) -> None:
    make_home(tmp_path)
    found = PolicyStore(tmp_path / "policies").get(1)
    runs = [
        job(tmp_path, f"of-{steps}", **GRPO, rollout={"max_tokens": 6, "staleness": steps})[0] for steps in (0, 1, 2)
    ]
    schedules_ahead, labels, also_labels = (rollout_engine(config, found, found.path) for config in runs)
    assert schedules_ahead != labels == also_labels


def test_whether_an_engine_has_compiled_counts_only_where_that_is_set(tmp_path: Path) -> None:
    make_home(tmp_path)
    found = PolicyStore(tmp_path / "policies").get(1)
    pools = ResidentPools(ImportedFiles())
    config, _ = job(tmp_path, "graphs", **GRPO, rollout={"enforce_eager": False})
    pools._engine = rollout_engine(config, found, found.path)  # as a run on a GPU settles it
    judging = {"dtype": config.dtype, "max_num_seqs": config.rollout.max_num_seqs}
    assert "enforce_eager" not in str(pools.refusal(EngineConfig(**judging), found))
    refusal = pools.refusal(EngineConfig(**judging, enforce_eager=True), found)
    assert "enforce_eager False, not True" in str(refusal)


def test_an_engine_in_fp8_is_lent_to_an_evaluation_in_fp8_alone(tmp_path: Path) -> None:
    make_home(tmp_path)
    found = PolicyStore(tmp_path / "policies").get(1)
    fp8 = {"dtype": "bfloat16", "fp8": {"rollout": "fp8_per_channel"}}
    pools = ResidentPools(ImportedFiles())
    config, _ = job(tmp_path, "fp8", **GRPO | fp8)
    pools._engine = rollout_engine(config, found, found.path)
    judging = {"dtype": "bfloat16", "max_num_seqs": config.rollout.max_num_seqs}
    assert "extra {'quantization': 'fp8_per_channel'}, not {}" in str(pools.refusal(EngineConfig(**judging), found))
    alike = EngineConfig(**judging, extra={"quantization": "fp8_per_channel"})
    assert "extra" not in str(pools.refusal(alike, found))


OWNER = """
import sys
from pathlib import Path
from deploy.config import root
from deploy.supervise import resident
from tests.deploy.supervise.test_resident import PPO, job
from train.launch import run_job

home = Path(sys.argv[1])
with resident.serving(root.load(None, [("home", str(home))])):
    run_job(*job(home, "long", **PPO, steps=10_000))
"""


SCHEDULE = """
import sys, time
from deploy.config import root
from deploy.supervise import resident
from feedback.processes.signals import Stopped, stop_on_signals

try:
    with stop_on_signals(), resident.serving(root.load(None, [("home", sys.argv[1])]), shared=True):
        time.sleep(1000)
except Stopped:
    pass
"""


RUN_BY_HAND = """
import sys
from pathlib import Path
from deploy.config import root
from deploy.supervise import resident
from tests.deploy.supervise.test_resident import GRPO, job
from train.launch import run_job

home = Path(sys.argv[1])
code = (home / "users_code.py").read_text().replace("def reward(batch):", "def reward(batch):\\n    time.sleep(2)")
(home / "users_code.py").write_text(f"import time\\n{code}")  # so that it is stopped amid a long call of Ray's
config, context = job(home, "by-hand", **GRPO, checkpoint={"every_steps": 1}, restarts={"backoff_s": 0}, steps=12)
with resident.joined(root.load(None, [("home", str(home))]), "train"):
    print(run_job(config, context).steps)
"""


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_by_hand_goes_on_in_its_own_ray_where_the_schedule_whose_workers_it_uses_ends(
    number: signal.Signals, tmp_path: Path, nothing_left: Callable[[], list[str]]
) -> None:
    make_home(tmp_path)
    environment = os.environ | {"PYTHONPATH": child_variables()["PYTHONPATH"]}
    environment.pop(resident_socket.ADDRESS, None)

    def start(code: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, str(tmp_path)]
        return subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True)

    with start(SCHEDULE) as schedule:
        try:
            assert gone((tmp_path / resident.SHARED).exists)
            with start(RUN_BY_HAND) as running:
                assert gone((tmp_path / "runs/by-hand/checkpoints/step-00000001").exists, seconds=200)
                assert (tmp_path / resident.STATE).exists()
                schedule.send_signal(number)
                said, _ = running.communicate(timeout=300)
        finally:
            schedule.kill()
    assert said.splitlines()[-1] == "12"
    assert '"kind":"lost"' in (tmp_path / "runs/by-hand/restarts.json").read_text().replace(" ", "")
    assert gone(lambda: not nothing_left(), seconds=60)


def test_nothing_is_left_when_the_owner_is_killed_in_the_middle_of_a_run(
    tmp_path: Path, nothing_left: Callable[[], list[str]]
) -> None:
    make_home(tmp_path)
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    metrics = tmp_path / "runs" / "long" / "metrics.jsonl"
    assert gone(lambda: metrics.exists() or owner.poll() is not None, seconds=300)
    assert owner.poll() is None
    owner.kill()
    owner.wait(180)
    assert gone(lambda: not nothing_left(), seconds=60)


def gone(happened: Callable[[], bool], seconds: float = 60) -> bool:
    """Wait until it has happened; whether it has in time."""
    deadline = time.monotonic() + seconds
    while not (done := happened()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return done


def test_what_does_not_know_the_secret_is_not_heard_and_who_hangs_up_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listener = resident_socket.listen()
    assert listener is not None
    with listener.owners, ThreadPoolExecutor(1) as pool:
        name, _, secret = listener.address.partition(":")
        monkeypatch.setenv(resident_socket.ADDRESS, f"{name}:{secret[::-1]}")
        accepted = pool.submit(listener.accept, 10.0)
        assert resident_socket.connect(start=True) is None
        assert accepted.result() is None
        monkeypatch.setenv(resident_socket.ADDRESS, listener.address)
        accepted = pool.submit(listener.accept, 10.0)
        assert resident_socket.connect() is None  # no workers are there
        connection = resident_socket.connect(start=True)
        other = accepted.result()
        assert connection is not None
        assert other is not None
        other.send(("value", 1))
        assert resident_socket.ask(connection, "call", None) == ("value", 1)
        assert not resident_socket.hung_up(other)  # a message waits
        other.recv()
        resident_socket.hang_up(connection)
        assert resident_socket.hung_up(other)
        other.close()
        assert resident_socket.wait_until_gone(connection, 5.0)


def test_who_is_told_that_the_workers_are_busy_hears_it_however_late_it_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = resident_socket.listen()
    assert listener is not None
    monkeypatch.setenv(resident_socket.ADDRESS, listener.address)

    def turn_away() -> None:
        other = listener.accept(10.0)
        assert other is not None
        other.send(("busy",))
        other.close()

    with listener.owners, ThreadPoolExecutor(1) as pool:
        turned_away = pool.submit(turn_away)
        connection = resident_socket.connect(start=True)
        assert connection is not None
        turned_away.result()
        assert resident_socket.ask(connection, "train", b"settings" * 2**16) == ("busy",)
        with pytest.raises(EOFError):
            resident_socket.ask(connection, "train")


STOPPED = """
import os, signal, sys
from feedback.processes.resident_socket import Listener
listener = Listener.inherited(os.dup(0))
if sys.argv[1] == "stopped":
    os.kill(os.getpid(), signal.SIGSTOP)
print("here", flush=True)
signal.pause()
"""


@pytest.mark.parametrize(("how", "code"), [("stopped", -signal.SIGKILL), ("busy", None)])
def test_workers_that_are_stopped_while_they_rest_are_waited_for_once(
    how: str, code: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = resident_socket.listen()
    assert listener is not None
    monkeypatch.setenv(resident_socket.ADDRESS, listener.address)
    monkeypatch.setattr(resident_socket, "PATIENCE_S", 0.5)
    command = [sys.executable, "-P", "-c", STOPPED, how]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with (
        listener.owners as owners,
        subprocess.Popen(command, stdin=owners, stdout=subprocess.PIPE, env=environment) as workers,
    ):
        if how == "stopped":
            assert gone(lambda: psutil.Process(workers.pid).status() == psutil.STATUS_STOPPED)
        else:
            assert workers.stdout is not None
            workers.stdout.readline()
        try:
            assert resident_socket.connect(start=True) is None
            if code is not None:
                workers.wait(20)
            assert workers.poll() == code
        finally:
            workers.kill()


SILENT = """
import os, signal
from feedback.processes.resident_socket import Listener
listener = Listener.inherited(os.dup(0))
print("here", flush=True)
with listener.accept(60) as connection:
    connection.recv()
    os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_workers_that_stop_before_they_answer_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = resident_socket.listen()
    assert listener is not None
    monkeypatch.setenv(resident_socket.ADDRESS, listener.address)
    command = [sys.executable, "-P", "-c", SILENT]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with (
        listener.owners as owners,
        subprocess.Popen(command, stdin=owners, stdout=subprocess.PIPE, env=environment) as workers,
    ):
        try:
            assert workers.stdout is not None
            assert workers.stdout.readline() == b"here\n"
            connection = resident_socket.connect()
            assert connection is not None
            with connection:
                with pytest.raises(TimeoutError):
                    resident_socket.ask(connection, "lend", timeout_s=0.1)
                assert gone(lambda: psutil.Process(workers.pid).status() == psutil.STATUS_STOPPED)
                resident_socket.end_silent(connection)
            assert workers.wait(20) == -signal.SIGKILL
        finally:
            workers.kill()


def test_workers_are_waited_for_as_long_as_they_say_that_they_are_at_work() -> None:
    ours, theirs = Pipe()
    with ours, theirs:
        for word in (resident_socket.WORKING, resident_socket.WORKING):
            theirs.send((word,))
        theirs.send(("value", 1))
        assert resident_socket.ask(ours, "call", timeout_s=60) == ("value", 1)
        theirs.send((resident_socket.WORKING,))
        with pytest.raises(TimeoutError, match=r"did not answer 'call' within 0\.1 s"):
            resident_socket.ask(ours, "call", timeout_s=0.1)
        with pytest.raises(TimeoutError, match=r"did not read 'call' within 0\.1 s"):
            resident_socket.ask(ours, "call", b"prompts" * 2**20, timeout_s=0.1)


def test_who_connects_and_says_nothing_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident_socket, "_GREETING_S", 0.1)
    listener = resident_socket.listen()
    assert listener is not None
    monkeypatch.setenv(resident_socket.ADDRESS, listener.address)
    with listener.owners, socket.socket(socket.AF_UNIX) as silent, ThreadPoolExecutor(1) as pool:
        silent.connect("\0" + listener.address.partition(":")[0])
        assert listener.accept(10.0) is None
        accepted = pool.submit(listener.accept, 10.0)
        connection = resident_socket.connect(start=True)
        other = accepted.result()
        assert connection is not None
        assert other is not None
        answer = pool.submit(resident_socket.ask, connection, "lend", timeout_s=10.0)
        assert other.recv() == ("lend",)
        time.sleep(0.3)  # longer than a greeting, after which there is no limit any more
        other.send(("refused", "why"))
        assert answer.result() == ("refused", "why")
        for each in (connection, other):
            each.close()
