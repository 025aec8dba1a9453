"""Memory and seconds of resident workers over many cycles, and what new ones take.

Run as ``python -m deploy.examples.bench.training.resident``. A cycle here is one training of one step, and the answers
of its candidate and its parent; the next trains from that candidate. Memory is that of all processes of the workers,
Ray's included, shared pages in parts (PSS), once they are asleep; ``mib_each`` what it grows by per cycle after the
first five (least squares). The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
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
_SETTLED = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=50)
    parser.add_argument("--anew", type=int, default=2, help="cycles with new workers each, to compare with")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
        home = Path(folder)
        prepare(home)
        settings = root.load(None, [("home", str(home))])
        with preloaded.serving(home / "preloaded.log"):
            anew = [cycle(settings, enabled=False) for _ in range(arguments.anew)]
            with resident.serving(settings):
                kept = [cycle(settings, enabled=True) for _ in range(arguments.cycles)]
    mib = [one["mib"] for one in kept]
    settled = mib[_SETTLED:] if len(mib) > _SETTLED + 1 else mib
    result: dict[str, Any] = {"cycles": len(kept), "mib_first": mib[0], "mib_last": mib[-1], "mib_most": max(mib)}
    result["mib_each"] = round(float(np.polyfit(range(len(settled)), settled, 1)[0]), 3) if len(settled) > 1 else 0.0
    for name in ("train_s", "evaluate_s"):
        result[name] = {
            "resident": round(float(np.median([one[name] for one in kept[1:] or kept])), 2),
            "new": round(float(np.median([one[name] for one in anew])), 2) if anew else None,
        }
    print(json.dumps(result))


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
            engines.of(policy).run(Work(greedy=prompts, sampled=prompts), max_tokens=12, seed=1)


if __name__ == "__main__":
    main()
