"""How often the runs of a lineage have solved prompts of one's own: each run leaves its counts in its folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from feedback.files import replace_file
from serve.policies.store import MANIFEST, PolicyNotFound, PolicyStore
from train.config.sections import PassRateConfig

FILE: Final = "pass_rates.json"

Counts = dict[str, list[int]]
"""By a prompt's key, how many responses to it there were, and how many solved it."""


def key(prompt_token_ids: Sequence[int]) -> str:
    """What a prompt is counted by."""
    return hashlib.sha256(repr(list(prompt_token_ids)).encode()).hexdigest()[:32]


def keep(run: Path, config: PassRateConfig, counts: Counts) -> None:
    """Leave a run's counts in its folder."""
    content = {"solved_reward": config.solved_reward, "prompts": counts}
    replace_file(run / FILE, json.dumps(content, sort_keys=True).encode())


def of_lineage(config: PassRateConfig, policy: Path, runs: Path) -> Counts:
    """What the runs that made a policy, its parent and so on have counted, as far as they meant the same by solved."""
    store, total = PolicyStore(policy.parent), Counts()
    version = json.loads((policy / MANIFEST).read_bytes())["version"]
    for _ in range(config.runs):
        try:
            made = store.get(version)
        except PolicyNotFound:  # removed by hand
            break
        path = runs / str(made.lineage.get("run")) / FILE
        if path.is_file():
            found = json.loads(path.read_bytes())
            if found["solved_reward"] == config.solved_reward:
                for name, (responses, solved) in found["prompts"].items():
                    of = total.setdefault(name, [0, 0])
                    of[0] += responses
                    of[1] += solved
        if made.parent is None:
            break
        version = made.parent
    return total


def left_out(config: PassRateConfig, counts: Counts, prompt_token_ids: Sequence[int]) -> str | None:
    """Why a prompt is left out; None if it stays."""
    responses, solved = counts.get(key(prompt_token_ids), (0, 0))
    if responses < config.min_responses:
        return None
    if solved <= config.low * responses:
        return "solved too seldom"
    return "solved too often" if solved >= config.high * responses else None
