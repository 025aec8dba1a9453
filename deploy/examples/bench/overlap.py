"""What sampling ahead saves: ``python -m deploy.examples.bench.overlap --policy FOLDER``.

The same run, with generation and training in pools of their own, waits for its samples (staleness 0) and samples ahead
(staleness 1); and colocated, on as many ranks as both pools have, which is what those devices would do otherwise. Each
is a process of its own that stays, and they take turns, a step each, so that a machine whose speed drifts treats them
alike. A figure is the median time of a step; each run's first step is not counted. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from feedback.datasets import Prompt
from serve.local_ray.cluster import local_ray
from serve.policies.store import PolicyStore
from train.config.training import TrainConfig
from train.context import JobContext
from train.data.prompts import TrainingData
from train.observe.hooks import Hook

SPLIT: Final = {"pools": {"training": {}, "generation": {}}, "actor": "training", "reference": "training"}
WAYS: Final[dict[str, dict[str, Any]]] = {
    "waiting": {"placement": {**SPLIT, "rollout": "generation"}, "rollout": {"staleness": 0}},
    "ahead": {"placement": {**SPLIT, "rollout": "generation"}, "rollout": {"staleness": 1}},
    "colocated": {"ranks": 2, "rollout": {"staleness": 0}},
}
BUSY: Final = 0.15
STEP: Final = "STEP "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--prompts", type=int, default=8, help="prompts of a step, of 16 tokens each")
    parser.add_argument("--group", type=int, default=8, help="responses to each prompt")
    parser.add_argument("--tokens", type=int, default=64, help="longest response")
    parser.add_argument("--turns", type=int, default=8, help="steps of each way that are counted")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument(
        "--timeout", type=float, default=300.0, help="of the start and of each step of a run, in seconds"
    )
    parser.add_argument("--way", choices=list(WAYS), help="make one run in this process")
    arguments = parser.parse_args()
    if arguments.way is not None:
        make_run(arguments)
        return
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    busy = [busy_share()]
    with ExitStack() as stack:
        runs = {way: stack.enter_context(Run(way, arguments.timeout)) for way in WAYS}
        busy.append(busy_share())
        for _ in range(arguments.turns):
            for way, run in runs.items():
                seconds[way].append(run.step())
        busy.append(busy_share())
    medians = {way: statistics.median(seen) for way, seen in seconds.items()}
    trusted = max(busy) < BUSY
    if not trusted:
        print(f"others used {max(busy):.0%} of the processors while the runs waited: don't trust these figures")
    print(
        json.dumps(
            {
                **{name: getattr(arguments, name) for name in ("prompts", "group", "tokens", "dtype")},
                **{f"{way}_seconds": round(median, 4) for way, median in medians.items()},
                "speed_over_waiting": round(medians["waiting"] / medians["ahead"], 3),
                "speed_over_colocated": round(medians["colocated"] / medians["ahead"], 3),
                "busy": round(max(busy), 3),
                "trusted": trusted,
            }
        )
    )


class Run:
    """A run in a process of its own, which makes a step on request."""

    def __init__(self, way: str, timeout_s: float) -> None:
        self.way, self.timeout_s = way, timeout_s
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "deploy.examples.bench.overlap", *sys.argv[1:], "--way", way],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def step(self) -> float:
        """Seconds of its next step."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.reported()

    def reported(self) -> float:
        """The seconds of its step. Raises RuntimeError if it ended, or was killed because it does not report."""
        assert self.process.stdout is not None
        late = threading.Timer(self.timeout_s, self.process.kill)
        late.start()
        try:
            line = next((line for line in self.process.stdout if line.startswith(STEP)), None)
        finally:
            late.cancel()
        if line is None:
            code = self.process.wait(20)
            raise RuntimeError(f"the {self.way} run ended with code {code}, or made no step in {self.timeout_s:g} s")
        return float(line.removeprefix(STEP))

    def __enter__(self) -> Run:
        self.reported()
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()  # it ends itself
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(20)


class Turns(Hook):
    """After each step, says how long it took and waits for its turn; ends the run when there is none."""

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        print(f"{STEP}{metrics['seconds']}", flush=True)
        if not sys.stdin.readline():
            raise SystemExit(0)


def make_run(arguments: argparse.Namespace) -> None:
    """The run of one way."""
    from feedback.config import LakeConfig
    from feedback.lake.tables import Lake
    from train.context import RunStart
    from train.data.rewards import Reward
    from train.dataflows.online import Online
    from train.job import train
    from train.run.erasures import Erasures
    from train.run.resume import Begun, checkpoints_of
    from train.run.unfinished import Stores

    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig.model_validate(settings(arguments))
        context = JobContext(
            run="run",
            runs=Path(folder),
            policies=Path(folder) / "policies",
            reward_models=Path(folder) / "reward_models",
            lake_uri=folder,
        )
        checkpoints_of(context).mkdir(parents=True)
        store = PolicyStore(context.policies)
        parent = store.publish(arguments.policy, parent=None, lineage={}, metrics={})
        start = RunStart(
            id="", parent=parent.version, parent_sha256=parent.sha256, lake_versions={}, reward="", config={}
        )
        with local_ray(
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=256 * 2**20,
            log_to_driver=False,
            logging_level="ERROR",
        ):
            begun, erasures = Begun(start, parent), Erasures(Lake(folder, LakeConfig()), start.lake_versions, config)
            reward = Reward("deploy.examples.bench.overlap:reward", config.step_timeout_s)
            data = data_of(arguments)
            train(Online, config, context, Stores(store, store), begun, data, 1, [], erasures, reward)


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    way = WAYS[arguments.way]
    rollout = {"max_tokens": arguments.tokens, "max_model_len": arguments.tokens + 32, "kv_cache_bytes": 64 * 2**20}
    return {
        "steps": arguments.turns + 3,
        "hooks": ["deploy.examples.bench.overlap:Turns"],
        "dtype": arguments.dtype,
        "data": {"prompts_per_step": arguments.prompts},
        "algorithm": {"group_size": arguments.group},
        "checkpoint": {"every_steps": None},
        "step_timeout_s": arguments.timeout,
        **way,
        "rollout": {**rollout, **way["rollout"]},
    }


def data_of(arguments: argparse.Namespace) -> TrainingData:
    from train.data.prompts import Cycled

    rng = random.Random(0)
    vocabulary = json.loads((arguments.policy / "config.json").read_text())["vocab_size"]
    prompts = [Prompt(None, None, [rng.randrange(4, vocabulary) for _ in range(16)]) for _ in range(64)]
    return TrainingData(Cycled(prompts, arguments.prompts, "prompts"), Cycled([], 0, ""), "64 prompts", 0, "")


def reward(batch: pa.Table) -> list[float]:
    """Something that differs between samples: the share of even tokens."""
    return [sum(t % 2 == 0 for t in tokens) / len(tokens) for tokens in batch["response_token_ids"].to_pylist()]


def busy_share(seconds: float = 1.0) -> float:
    """How much of the machine's processors others use, 0 to 1, while this process sleeps."""
    import psutil

    time.sleep(0.5)
    return psutil.cpu_percent(seconds) / 100


if __name__ == "__main__":
    main()
