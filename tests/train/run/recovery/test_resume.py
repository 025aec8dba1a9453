"""A run that is killed goes on from its last whole checkpoint, to the weights of a run that nobody killed.

The real job: Ray, FSDP2, vLLM, a policy store and a lake; PPO, which has two models in training. One run is left alone;
another is killed with all its processes at a random moment after its first checkpoint, and started again under its
name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from job_home import make_home, metrics_of, row, table

from feedback.config import LakeConfig
from feedback.lake.tables import Lake
from serve.policies.store import PolicyStore
from tests.paths import ROOT
from train.checkpoint.folders import CheckpointError, checkpoints, torn
from train.config.training import TrainConfig
from train.context import JobContext
from train.planner.defaults import as_begun
from train.run.recovery.resume import begin, checkpoints_of, last_whole, only_run
from train.run.recovery.resume_settings import hindrances
from train.run.recovery.unfinished import Stores

HERE = ROOT / "tests" / "train"
STEPS, EVERY = 6, 2
CONFIG: dict[str, Any] = {
    "ranks": 1,
    "dtype": "float32",
    "steps": STEPS,
    "epochs": 2,
    "micro_batch_tokens": 64,
    "optimizer": {"learning_rate": 3e-3, "warmup_steps": 3},
    "rollout": {"max_tokens": 6, "max_model_len": 64, "kv_cache_bytes": 16 * 2**20},
    "data": {"prompts_per_step": 4, "min_prompts": 4},
    "algorithm": {"name": "ppo", "group_size": 4, "critic": {"learning_rate": 3e-3}},
    "checkpoint": {"every_steps": EVERY},
    "hooks": ["users_code:Diary"],
    "start_timeout_s": 200,
    "step_timeout_s": 100,
}


@dataclass(frozen=True)
class Runs:
    """What the runs left; ``killed`` is a copy of the broken run's folder as the kill left it, with more debris."""

    root: Path
    killed: Path
    whole: dict[str, Any]
    broken: dict[str, Any]
    again: dict[str, Any]
    output: str


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("home")
    make_home(root)
    held_out = [{"id": c, "prompt": f"odds {c}z>"} for c in "abc"]
    (root / "held_out.jsonl").write_text("".join(json.dumps(item) + "\n" for item in held_out))
    (root / "own.jsonl").write_text("".join(json.dumps({"question": f"odds {c}y>"}) + "\n" for c in "abcdefgh"))
    return root


@pytest.fixture(scope="module")
def runs(home: Path) -> Runs:
    with Driver(home, "whole", "broken") as first:
        whole = first.result()
        folder = checkpoints_of(context(home, "broken"))
        deadline = time.monotonic() + 800
        while not (folder.exists() and checkpoints(folder)):
            assert first.process.poll() is None, "the run ended before its first checkpoint"
            assert time.monotonic() < deadline, "no checkpoint"
            time.sleep(0.01)
        delay = random.uniform(0, 0.4)  # some steps are left on any machine
        print(f"killed {delay:.3f} s after the first checkpoint")
        time.sleep(delay)
        first.kill()
    debris = folder / ".step-00000098.new"
    debris.mkdir()
    (debris / "__0_0.distcp").write_bytes(b"half")
    killed = home / "killed"
    shutil.copytree(home / "runs" / "broken", killed)
    lake = Lake(str(home / "lake"), LakeConfig())  # traffic goes on meanwhile; the run does not see it
    lake.append("interactions", table([row("late", "odds zzz>", [5, 6])]))
    with Driver(home, "broken", "broken") as second:
        broken, again = second.result(), second.result()
    return Runs(home, killed, whole, broken, again, second.output)


def test_the_weights_are_bit_for_bit_those_of_a_run_that_nobody_killed(runs: Runs) -> None:
    files = [runs.root / "policies" / f"v{run['candidate']:06d}" for run in (runs.whole, runs.broken)]
    whole, broken = ((folder / "model.safetensors").read_bytes() for folder in files)
    assert whole == broken
    assert whole != (runs.root / "seed" / "model.safetensors").read_bytes()


def test_what_its_settings_left_open_was_decided_when_it_began(runs: Runs) -> None:
    start = json.loads((runs.killed / "start.json").read_text())["config"]
    assert start["activation_checkpointing"] is start["fsdp"]["reduce_every_micro_batch"] is False
    assert (start["fsdp"]["offload_while_generating"], start["rollout"]["enforce_eager"]) == (False, True)
    goes_on = as_begun(TrainConfig.model_validate(settings(runs.root)), start | {"activation_checkpointing": True})
    assert goes_on.activation_checkpointing is True, "whatever this machine would choose"


def test_it_went_on_and_did_not_begin_again(runs: Runs) -> None:
    first = last_whole_step(runs.killed)
    whole = runs.killed / "checkpoints" / f"step-{first:08d}"
    assert {path.name for path in whole.iterdir()} == {"actor", "critic", "driver.json", "whole.json"}
    diary = (runs.root / "runs" / "broken" / "diary").read_text().split("end")[0].split("start ")[2].splitlines()
    assert diary[0] == str(first) != "0"
    assert [line for line in diary if line.startswith("step")] == [f"step {step}" for step in range(first, STEPS)]


def test_metrics_hold_every_step_once_and_the_numbers_of_an_unbroken_run(runs: Runs) -> None:
    whole, broken = (
        [json.loads(line) for line in (runs.root / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "broken")
    )
    assert [line["step"] for line in broken] == list(range(STEPS))
    assert {line["updates"] for line in whole} == {2.0}
    for name in ("reward", "loss", "grad_norm", "kl_ref", "learning_rate", "logprob_difference_max", "value_loss"):
        assert [line[name] for line in whole] == [line[name] for line in broken], name


def test_held_out_prompts_are_answered_at_the_start_and_every_so_many_steps_whoever_is_killed(runs: Runs) -> None:
    whole, broken = (metrics_of(runs.root, name) for name in ("whole", "broken"))
    measured = {line["step"]: line["held_out/reward"] for line in whole if "held_out/reward" in line}
    assert list(measured) == [1, 3, 5]
    assert measured == {line["step"]: line["held_out/reward"] for line in broken if "held_out/reward" in line}
    assert [line["step"] for line in whole if "held_out_at_start/reward" in line] == [0]
    assert {line["held_out/unrewarded"] for line in whole if line["step"] in measured} == {0.0}


def test_the_policy_has_the_weights_of_the_step_that_was_the_best_on_held_out_prompts(runs: Runs) -> None:
    measured = {
        m["held_out/reward"]: m["step"] + 1 for m in reversed(metrics_of(runs.root, "whole")) if "held_out/reward" in m
    }
    highest = max(measured)
    for name, run in (("whole", runs.whole), ("broken", runs.broken)):
        policy = PolicyStore(runs.root / "policies").get(run["candidate"])
        assert policy.metrics["best"] == {"step": measured[highest], "reward": highest}
        assert policy.metrics["last"]["held_out/reward"] in measured
        published = hashlib.sha256((policy.path / "model.safetensors").read_bytes()).hexdigest()
        noted = (runs.root / "runs" / name / "diary").read_text().splitlines()
        assert f"best {measured[highest]} {published}" in noted
        assert not (runs.root / "runs" / name / "best").exists()


def test_hooks_hear_of_start_steps_checkpoints_and_end(runs: Runs) -> None:
    diary = (runs.root / "runs" / "whole" / "diary").read_text().splitlines()
    assert diary[0] == "start 0"
    assert [line for line in diary if line.startswith("step")] == [f"step {step}" for step in range(STEPS)]
    assert [line for line in diary if line.startswith("check")] == [f"checkpoint {n}" for n in range(EVERY, 7, EVERY)]
    assert diary[-1] == f"end {runs.whole['candidate']} None"


def test_a_finished_run_gives_its_policy_again_and_keeps_no_checkpoint(runs: Runs) -> None:
    assert runs.again["candidate"] == runs.broken["candidate"]
    assert runs.again["metrics"] == runs.broken["metrics"]
    assert PolicyStore(runs.root / "policies").versions() == [1, runs.whole["candidate"], runs.broken["candidate"]]
    assert list((runs.root / "runs" / "broken").glob("checkpoints/*")) == []


def test_half_written_folders_are_removed_and_said(runs: Runs) -> None:
    assert "removed what was half-written: " in runs.output
    assert ".step-00000098.new" in runs.output


def test_the_lake_is_read_as_it_was_when_the_run_began(runs: Runs) -> None:
    lineages = [PolicyStore(runs.root / "policies").get(run["candidate"]).lineage for run in (runs.whole, runs.broken)]
    assert lineages[0]["lake_versions"] == lineages[1]["lake_versions"]
    assert [lineage["prompts"] for lineage in lineages] == [20, 20]


def test_the_lineage_names_the_files_of_prompts_by_their_hash(runs: Runs) -> None:
    content = (runs.root / "own.jsonl").read_bytes()
    [of] = PolicyStore(runs.root / "policies").get(runs.broken["candidate"]).lineage["prompt_files"]
    assert of == {
        "path": str(runs.root / "own.jsonl"),
        "sha256": hashlib.sha256(content).hexdigest(),
        "rows": 8,
        "weight": 1.0,
        "prompts": 8,
        "left_out": {},
    }


def test_how_often_prompts_were_solved_is_counted_as_if_nobody_had_killed_the_run(runs: Runs) -> None:
    whole, broken = (
        json.loads((runs.root / "runs" / name / "pass_rates.json").read_text()) for name in ("whole", "broken")
    )
    assert whole == broken
    asked = [responses for responses, _ in whole["prompts"].values()]
    assert sum(asked) == STEPS * 2 * 4, "half of four prompts a step are of the file, with four responses each"
    assert 0 < sum(solved for _, solved in whole["prompts"].values()) < sum(asked)


def test_a_file_of_prompts_that_has_changed_is_refused_by_name(runs: Runs, tmp_path: Path) -> None:
    file = runs.root / "own.jsonl"
    content = file.read_bytes()
    try:
        file.write_bytes(content + content)
        with pytest.raises(CheckpointError, match=r"own\.jsonl of train\.data\.prompts has changed"):
            begin_from_killed(runs, tmp_path, {})
        config = TrainConfig.model_validate(settings(runs.root))
        (changed,) = hindrances(runs.killed, config, lambda: None)
        assert changed.endswith("own.jsonl of train.data.prompts has changed")
    finally:
        file.write_bytes(content)
    assert hindrances(runs.killed, config, lambda: None) == []
    assert hindrances(runs.killed, config, lambda: "other@0")[0].startswith("the reward is other@0, it was users_code:")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"optimizer": {"learning_rate": 1e-3, "warmup_steps": 3}},
            r"train\.optimizer\.learning_rate is 0\.001, it was",
        ),
        (
            {"algorithm": {**CONFIG["algorithm"], "group_size": 8}},
            r"train\.algorithm\.group_size is 8, it was 4",
        ),
        (
            {"algorithm": {**CONFIG["algorithm"], "critic": {"learning_rate": 1e-3}}},
            r"train\.algorithm\.critic\.learning_rate is 0\.001, it was 0\.003",
        ),
        ({"dtype": "bfloat16", "seed": 4}, r"train\.dtype is 'bfloat16', it was 'float32'; train\.seed is 4, it was 0"),
        ({"steps": 1}, r"train\.steps is 1, and \d are done"),
    ],
)
def test_settings_that_would_learn_something_else_are_refused_by_name(
    runs: Runs, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        begin_from_killed(runs, tmp_path, changes)


def test_settings_that_change_nothing_learned_may_differ(runs: Runs, tmp_path: Path) -> None:
    begun = begin_from_killed(runs, tmp_path, {"ranks": 2, "steps": 50, "max_kl": 3.0, "checkpoint": {"keep": 5}})
    assert begun.progress is not None
    assert begun.progress.step == last_whole_step(runs.killed)


def test_a_reward_whose_code_has_changed_is_refused(runs: Runs, tmp_path: Path) -> None:
    message = r"the reward .* is users_code:reward@other, it was users_code:reward@[0-9a-f]{16}"
    with pytest.raises(CheckpointError, match=message):
        begin_from_killed(runs, tmp_path, {}, scorer="users_code:reward@other")


def test_a_class_whose_file_has_changed_is_refused(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "changing.py").write_text("import transformers\n\nclass LM(transformers.Qwen3ForCausalLM):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    killed = shutil.copytree(runs.killed, tmp_path / "with a class")
    for file in killed.glob("checkpoints/*/driver.json"):
        before, after = '"class_sha256":null', '"class_sha256":"0" '  # a checkpoint knows the sizes of its files
        text = file.read_text()
        assert before in text
        file.write_text(text.replace(before, after))
    with pytest.raises(CheckpointError, match=r"the file of train\.model\.class=changing:LM has changed"):
        begin_from_killed(
            replace(runs, killed=killed), tmp_path, {"model": {"class": "changing:LM"}, "algorithm": {"name": "grpo"}}
        )


def test_another_parent_policy_is_refused(runs: Runs, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the parent policy is 2, it was 1"):
        begin_from_killed(runs, tmp_path, {}, parent=2)


def test_a_run_without_a_parent_in_its_context_goes_on_from_its_own_when_another_serves(
    runs: Runs, tmp_path: Path
) -> None:
    store = PolicyStore(runs.root / "policies")
    store.promote(runs.whole["candidate"], who="test", why="test", expected=1)
    assert begin_from_killed(runs, tmp_path, {}, parent=None).parent.version == 1


def test_a_finished_run_is_not_gone_on_with_under_other_settings(runs: Runs) -> None:
    config, there = TrainConfig.model_validate(settings(runs.root, steps=50)), context(runs.root, "broken")
    with (
        only_run(there),
        pytest.raises(CheckpointError, match=r"broken published policy \d .* train\.steps is 50, it was 6"),
    ):
        begin(config, there, stores_of(there), Lake(there.lake_uri, LakeConfig()))


def test_a_torn_checkpoint_is_passed_over_for_an_older_one_and_refused_if_there_is_none(
    runs: Runs, tmp_path: Path
) -> None:
    there = context(runs.root, "torn", runs=tmp_path)
    shutil.copytree(runs.killed, there.folder)
    newest = checkpoints(checkpoints_of(there))[0]
    shutil.copytree(newest, newest.with_name("step-00000097"))
    shard = next(newest.with_name("step-00000097").glob("actor/*.distcp"))
    os.truncate(shard, shard.stat().st_size // 2)
    assert f"actor/{shard.name} has" in str(torn(newest.with_name("step-00000097")))
    assert last_whole(there) == newest
    for checkpoint in checkpoints(checkpoints_of(there)):
        (checkpoint / "actor" / ".metadata").unlink(missing_ok=True)
    with pytest.raises(CheckpointError, match=r"every checkpoint in .* is torn .*actor/\.metadata is missing"):
        last_whole(there)


def test_two_processes_never_work_on_one_run(home: Path, tmp_path: Path) -> None:
    there = context(home, "twice", runs=tmp_path)
    refused = pytest.raises(CheckpointError, match=r"another process \(pid \d+ on .+\) is in the middle of run twice")
    with only_run(there), refused, only_run(there, wait_s=0.1):
        pass


# ------------------------------------------------------------------------------------------------------ the parts


def stores_of(there: JobContext) -> Stores:
    return Stores(PolicyStore(there.policies), PolicyStore(there.reward_models))


def settings(home: Path, **changes: Any) -> dict[str, Any]:
    """With prompts of one's own beside those of the lake, and counts of how often they are solved."""
    own = {"prompts": [{"path": str(home / "own.jsonl"), "prompt": "question"}], "pass_rate": {"solved_reward": -6.5}}
    own["curriculum"] = {"solved_reward": -6.5, "min_responses": 4, "rest_steps": 1}
    evaluated = {"evaluate_suite": str(home / "held_out.jsonl"), "evaluate_every": EVERY, "keep": "best"}
    return {**CONFIG, "data": {**CONFIG["data"], **own}, **evaluated, **changes}


def context(home: Path, run: str, **changes: Any) -> JobContext:
    places = {name: home / name for name in ("runs", "policies", "reward_models")} | {"lake_uri": str(home / "lake")}
    return JobContext.model_validate({"run": run, **places, "reward": "users_code:reward", "parent": 1, **changes})


class Driver:
    """A process that runs jobs of these names; it and all that it started are killed at the end."""

    def __init__(self, home: Path, *names: str) -> None:
        jobs = [{"config": settings(home), "context": context(home, name).model_dump(mode="json")} for name in names]
        (home / "jobs.json").write_text(json.dumps(jobs))
        path = ":".join([str(ROOT), str(home)])
        self.output = ""
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "job_driver.py"), str(home / "jobs.json")],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
        )

    def result(self) -> dict[str, Any]:
        """The next result that it prints."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if line.startswith("RESULT "):
                return dict(json.loads(line.removeprefix("RESULT ")))
        raise AssertionError(f"the driver ended with code {self.process.wait(120)} and no result:\n{self.output}")

    def kill(self) -> None:
        tree = []
        if self.process.poll() is None:
            tree = psutil.Process(self.process.pid).children(recursive=True)
        for one in [*tree, self.process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        self.process.wait(120)

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def begin_from_killed(
    runs: Runs, folder: Path, changes: dict[str, Any], scorer: str | None = None, **of_context: Any
) -> Any:
    """Begin the broken run as it was before it was started again, with other settings."""
    policies = folder / "policies"
    shutil.copytree(runs.root / "policies", policies, ignore=shutil.ignore_patterns(f"v*{runs.broken['candidate']}"))
    there = context(runs.root, "copy", runs=folder, policies=policies, **of_context)
    shutil.copytree(runs.killed, there.folder)
    config = TrainConfig.model_validate(settings(runs.root, **changes))
    lake = Lake(there.lake_uri, LakeConfig())
    with only_run(there):
        return begin(config, there, stores_of(there), lake, scorer)


def last_whole_step(run: Path) -> int:
    return int(next(c for c in checkpoints(run / "checkpoints") if torn(c) is None).name.removeprefix("step-"))
