"""One run whose responses differ in length.

Run as ``python -m deploy.examples.bench.training.asynchronous --policy FOLDER --way WAY``. ``sync``: generation and
training have pools of their own, and each step samples, then learns (staleness 0). ``async``: responses go on while
training learns (``--staleness``). ``together``: one pool, of as many ranks as the two have, with no staleness. The
first steps are not counted, and the run goes on for a few behind those that are, so that nothing of it stands still
then. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from feedback.datasets import Prompt
from serve.local_ray.cluster import local_ray
from serve.policies.store import PolicyStore
from train.config.training import TrainConfig
from train.context import JobContext
from train.data.prompts import TrainingData
from train.observe.hooks import Hook, RunInfo

SPLIT: Final = {
    "placement": {
        "pools": {"training": {}, "generation": {}},
        "actor": "training",
        "reference": "training",
        "rollout": "generation",
    }
}
WAYS: Final[dict[str, dict[str, Any]]] = {"sync": SPLIT, "async": SPLIT, "together": {"ranks": 2}}
WARM: Final = 2
"""Steps before those that are counted: the first ones make kernels."""
AFTER: Final = 8
"""Steps behind them, for which there is something to sample meanwhile."""
SHOWN: Final = ("staleness_mean", "staleness_max", "partial_fraction", "queued_groups", "kl_behaviour")
LENGTHS: Final = "BENCH_ASYNC_LENGTHS"


class Counted(Hook):
    """Says what the steps were that are counted, and ends the run behind the last of them."""

    def __init__(self, run: RunInfo) -> None:
        super().__init__(run)
        self.made: list[dict[str, float]] = []

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.made.append(dict(metrics))
        if step + 1 + AFTER < self.run.steps:
            return
        counted = self.made[WARM:]
        names = sorted({name for of in counted for name in of if name.startswith("seconds_")} | {*SHOWN} & {*metrics})
        lengths = [int(line) for line in Path(os.environ[LENGTHS]).read_text().split()]
        found = {
            "tokens": round(sum(of["responses"] * of["response_length"] for of in counted)),
            "seconds": round(counted[-1]["time"] - self.made[WARM - 1]["time"], 3),
            "rewards": [round(of["reward"], 4) for of in self.made],
            "response_lengths": [round(of["response_length"], 1) for of in self.made],
            "median_length": statistics.median(lengths),
            "longest": max(lengths),
            **{name: round(statistics.fmean(of.get(name, 0.0) for of in counted), 4) for name in names},
        }
        print(json.dumps(found), flush=True)
        raise SystemExit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", type=Path, required=True, help="a Hugging Face folder, with prompts.json")
    parser.add_argument("--way", choices=list(WAYS), required=True)
    parser.add_argument("--staleness", type=int, default=2, help=f"train.rollout.staleness of async, up to {AFTER}")
    parser.add_argument("--prompts", type=int, default=8, help="prompts of a step")
    parser.add_argument("--group", type=int, default=8, help="responses to each prompt")
    parser.add_argument("--tokens", type=int, default=481, help="longest response")
    parser.add_argument("--steps", type=int, default=32, help="steps that are counted")
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=300.0, help="of the start and of each step, in seconds")
    make_run(parser.parse_args())


def make_run(arguments: argparse.Namespace) -> None:
    """The run, until its hook ends it."""
    from feedback.config import LakeConfig
    from feedback.lake.tables import Lake
    from train.context import RunStart
    from train.data.rewards import Reward
    from train.dataflows.online import Online
    from train.job import train
    from train.run.recovery.erasures import Erasures
    from train.run.recovery.resume import Begun, checkpoints_of
    from train.run.recovery.unfinished import Stores

    with tempfile.TemporaryDirectory() as folder:
        os.environ[LENGTHS] = str(Path(folder) / "lengths")
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
            reward = Reward("deploy.examples.bench.training.asynchronous:reward", config.step_timeout_s)
            data, seed = data_of(arguments), 1 + arguments.seed
            stores = Stores(store, store)
            train(Online, config, context, stores, begun, parent.path, data, seed, [], erasures, reward)


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    staleness = arguments.staleness if arguments.way == "async" else 0
    return {
        "steps": WARM + arguments.steps + AFTER,
        "hooks": ["deploy.examples.bench.training.asynchronous:Counted"],
        "dtype": arguments.dtype,
        "data": {"prompts_per_step": arguments.prompts},
        "algorithm": {"group_size": arguments.group},
        "optimizer": {"learning_rate": arguments.learning_rate},
        "checkpoint": {"every_steps": None},
        "step_timeout_s": arguments.timeout,
        "rollout": {
            "max_tokens": arguments.tokens,
            "max_model_len": arguments.tokens + 32,
            "kv_cache_bytes": 512 * 2**20,
            "staleness": staleness,
        },
        **WAYS[arguments.way],
    }


def data_of(arguments: argparse.Namespace) -> TrainingData:
    from train.data.prompts import Cycled

    asked = json.loads((arguments.policy / "prompts.json").read_text())
    prompts = [Prompt(None, None, token_ids) for token_ids in asked]
    return TrainingData(Cycled(prompts, arguments.prompts, "prompts"), Cycled([], 0, ""), "prompts", 0, "")


def reward(batch: pa.Table) -> list[float]:
    """The share of even tokens; lengths are noted."""
    responses = batch["response_token_ids"].to_pylist()
    with Path(os.environ[LENGTHS]).open("a") as file:
        print(*map(len, responses), sep="\n", file=file)
    return [sum(token % 2 == 0 for token in tokens) / len(tokens) for tokens in responses]


if __name__ == "__main__":
    main()
