"""Memory and seconds of resident workers over many cycles, and what new ones take.

Run as ``python -m deploy.examples.bench.training.resident``. A cycle here is one training of one step, and the answers
of its candidate and its parent; the next trains from that candidate. Memory is that of all processes of the workers,
Ray's included, shared pages in parts (PSS), once they are asleep; ``mib_each`` what it grows by per cycle after the
first ten, which fill caches (least squares), and ``growth`` what that comes to from the eleventh cycle to the last,
over what the eleventh has on that line. The bar is a growth of 2 %; it is met or missed if all of the 95 % interval
says so (Student's t on the slope, as if the cycles' deviations from the line were independent), and undecided
otherwise. The last line is JSON; the exit code is 1 unless the bar is met.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
from scipy.special import stdtrit
from transformers import AutoTokenizer

from deploy.config import root
from deploy.config.root import Settings
from deploy.examples.demo.seed import make_untrained
from deploy.examples.demo.task import items
from deploy.supervise import preloaded, resident
from evaluation.config import EngineConfig
from evaluation.engine import OfflineEngines, Work
from serve.policies.store import Policy, PolicyStore
from train.config.training import TrainConfig
from train.context import JobContext
from train.launch import run_job

_CACHE = {"max_model_len": 64, "kv_cache_bytes": 16 * 2**20}
SETTLED: Final = 10
"""Cycles that fill caches, and don't count."""
MOST_GROWTH: Final = 0.02
CONFIDENCE: Final = 0.95


@dataclass(frozen=True)
class Growth:
    """What memory grows by per cycle, with its interval, and over ``cycles`` relative to the first of them."""

    mib_each: float
    low: float
    high: float
    first_mib: float
    cycles: int

    @classmethod
    def of(cls, mib: Sequence[float]) -> Growth:
        """Of at least three cycles, by least squares."""
        number = np.arange(len(mib))
        (each, first), spread = np.polyfit(number, mib, 1), np.sum((number - number.mean()) ** 2)
        rest = np.sum((np.asarray(mib) - (first + each * number)) ** 2) / (len(mib) - 2)
        half = float(stdtrit(len(mib) - 2, (1 + CONFIDENCE) / 2) * np.sqrt(rest / spread))
        return cls(float(each), float(each) - half, float(each) + half, float(first), len(mib))

    def over_all(self, each: float) -> float:
        """What so many MiB per cycle come to, over what the first cycle has."""
        return each * (self.cycles - 1) / self.first_mib

    @property
    def verdict(self) -> str:
        low, high = self.over_all(self.low), self.over_all(self.high)
        return "met" if high <= MOST_GROWTH else "missed" if low > MOST_GROWTH else "undecided"

    def figures(self) -> dict[str, Any]:
        growth = [round(self.over_all(each), 4) for each in (self.mib_each, self.low, self.high)]
        return {
            "mib_each": round(self.mib_each, 3),
            "mib_each_interval": [round(self.low, 3), round(self.high, 3)],
            "growth": growth[0],
            "growth_interval": growth[1:],
            "bar": {"bar": f"growth at most {MOST_GROWTH:g}", "verdict": self.verdict},
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=50)
    parser.add_argument("--anew", type=int, default=2, help="cycles with new workers each, to compare with")
    arguments = parser.parse_args()
    if arguments.cycles < SETTLED + 3:
        parser.error(f"--cycles: at least {SETTLED + 3}, the first {SETTLED} don't count")
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
        home = Path(folder)
        prepare(home)
        settings = root.load(None, [("home", str(home))])
        with preloaded.serving(home / "preloaded.log"):
            anew = [cycle(settings, enabled=False) for _ in range(arguments.anew)]
            with resident.serving(settings):
                kept = [cycle(settings, enabled=True) for _ in range(arguments.cycles)]
    mib = [one["mib"] for one in kept]
    growth = Growth.of(mib[SETTLED:])
    result: dict[str, Any] = {"cycles": len(kept), "mib_first": mib[0], "mib_last": mib[-1], "mib_most": max(mib)}
    result |= growth.figures()
    for name in ("train_s", "evaluate_s"):
        result[name] = {
            "resident": round(float(np.median([one[name] for one in kept[1:]])), 2),
            "new": round(float(np.median([one[name] for one in anew])), 2) if anew else None,
        }
    print(json.dumps(result))
    sys.exit(0 if growth.verdict == "met" else 1)


def prepare(home: Path) -> None:
    """A policy of 0.1 million parameters that serves, and prompts of one's own."""
    make_untrained(home / "seed")
    store = PolicyStore(home / "policies")
    store.publish(home / "seed", parent=None, lineage={}, metrics={})
    rows = (json.dumps({"prompt": item.prompt}) for item in itertools.islice(items(1), 16))
    (home / "prompts.jsonl").write_text("\n".join(rows))
    (home / "bench_reward.py").write_text(
        "def reward(batch):\n    return [-float(sum(ids)) for ids in batch['response_token_ids'].to_pylist()]\n"
    )


def cycle(settings: Settings, *, enabled: bool) -> dict[str, float]:
    """Train and answer once; seconds of each, and MiB of the workers afterwards."""
    home = settings.home
    store = PolicyStore(home / "policies")
    parent = store.latest()
    assert parent is not None
    settings.lake().create()
    config = TrainConfig.model_validate(
        {
            "runs": home / "runs",
            "dtype": "float32",
            "steps": 1,
            "rollout": {"max_tokens": 6, **_CACHE},
            "data": {
                "prompts_per_step": 4,
                "min_prompts": 4,
                "traffic_weight": 0.0,
                "prompts": [{"path": home / "prompts.jsonl"}],
            },
            "resident": {"enabled": enabled},
        }
    )
    context = JobContext(
        run=f"run-{parent.version}-{datetime.now(UTC):%H%M%S}",
        runs=home / "runs",
        policies=store.root,
        reward_models=home / "reward-models",
        lake_uri=str(home / "lake"),
        reward="bench_reward:reward",
        parent=parent.version,
        python_path=[str(home)],
    )
    started = time.perf_counter()
    candidate = run_job(config, context).candidate
    assert candidate is not None
    trained = time.perf_counter()
    answer([store.get(candidate), parent], borrow=enabled)
    answered = time.perf_counter()
    found = resident.residents(settings)
    if enabled and found is None:
        raise RuntimeError(f"no resident workers are there; see {settings.path(settings.up.logs) / 'resident.log'}")
    mib = 0.0 if found is None else round(found["bytes"] / 2**20, 1)
    result = {"train_s": trained - started, "evaluate_s": answered - trained, "mib": mib}
    print(json.dumps(result), flush=True)
    return result


def answer(policies: list[Policy], *, borrow: bool) -> None:
    """Have both policies answer some prompts."""
    tokenizer = AutoTokenizer.from_pretrained(policies[0].path)
    prompts = [tokenizer(item.prompt).input_ids for item in itertools.islice(items(2), 16)]
    with OfflineEngines(EngineConfig(**_CACHE), borrow=borrow) as engines:
        for policy in policies:
            engines.of(policy).run(Work(greedy=prompts, sampled=[(ids, 1) for ids in prompts]), max_tokens=12)


if __name__ == "__main__":
    main()
