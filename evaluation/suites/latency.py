"""How long a token takes of two policies: measured where it can differ, kept on disk.

How long a response takes is how many tokens it has times how long one takes. The guardrail ``length`` is about the
first. The second is the same for policies of one shape and type: an engine does the same work for a token, whatever
the weights say, and in one engine that exchanges weights there is nothing but noise to measure. So it is measured only
for policies of different ones (a larger model, say), which have engines of their own. LoRA's adapters don't count:
policies are published with them merged.

In a batch responses share the engine's steps, and none has a time of its own. So here an engine answers one prompt
after the other, each with the same number of tokens. The policies take turns (candidate, incumbent, incumbent,
candidate), so that a machine that becomes slower or faster all the while does so for both alike, and the shorter of an
item's two times counts, as what else the machine does only adds to it. Beside other work that leaves noise, for which a
margin needs room.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import numpy as np

from evaluation.config import EvaluationConfig
from evaluation.engine import OfflineEngines
from evaluation.suites.answers import cache_of, settings_hash
from evaluation.suites.suite import Suite
from feedback.files import replace_file
from serve.policies.store import Policy

ITEMS: Final = 50
"""So many are timed: that a token takes as long is shown by ten at a margin of a half, by fifty at one of a tenth."""

TOKENS: Final = 16
"""Of each response."""


def token_seconds(
    candidate: Policy, incumbent: Policy, suite: Suite, config: EvaluationConfig, folder: Path
) -> dict[str, tuple[float, float]]:
    """Seconds that a token takes (of the candidate, of the incumbent), by the id of the item.

    From disk if they were timed on these very items, so that an evaluation which was killed goes on with the same
    figures. ``folder`` is the evaluations'. Raises EngineError, and what vLLM raises on a policy it can't load.
    """
    name = f"timed-{incumbent.sha256}-{settings_hash(incumbent, config)}.json"
    path = cache_of(candidate, suite, config, folder) / name
    if path.exists():
        return {item: (pair[0], pair[1]) for item, pair in json.loads(path.read_bytes()).items()}
    passes: dict[str, list[list[float]]] = {candidate.sha256: [], incumbent.sha256: []}
    with OfflineEngines(config.engine, borrow=False) as engines:  # the same kind of engine for both
        for policy in (candidate, incumbent, incumbent, candidate):
            engine = engines.of(policy)
            prompts = engine.encode([item.text_or_messages for item in suite.items])
            passes[policy.sha256].append(engine.time_token(prompts, tokens=TOKENS))
    shorter = [np.min(passes[policy.sha256], axis=0).tolist() for policy in (candidate, incumbent)]
    found = {item.id: (new, old) for item, new, old in zip(suite.items, *shorter, strict=True)}
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(found).encode())
    return found
