"""Traffic that a real server's engine has answered, in a lake, and candidates whose truth sampling tells."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from feedback.lake.tables import Lake
from serve.config import EngineConfig as ServingConfig
from serve.policies.store import Policy, PolicyStore
from serve.vllm.engine import Engine, Sampling
from tests.feedback.feedback_rows import NOON, interaction, put, reward

MIB = 1024 * 1024
MAX_TOKENS = 6
TEMPERATURES = (1.0, 0.7)


def value(text: str) -> float:
    """The reward of a response: the share of its characters that are digits."""
    return sum(character.isdigit() for character in text) / max(len(text), 1)


def requests(n: int) -> list[tuple[str, Sampling]]:
    """Sums, by turns at either temperature."""
    return [
        (f"{i % 10}+{i % 7}=", Sampling(max_tokens=MAX_TOKENS, temperature=TEMPERATURES[i % 2], seed=i))
        for i in range(n)
    ]


def serve(policy: Policy, n: int) -> list[dict[str, Any]]:
    """Rows of interactions, as the server's engine answers; two of each user."""

    async def answer() -> list[dict[str, Any]]:
        engine = Engine(ServingConfig(kv_cache_bytes=8 * MIB, threads=1))
        try:
            await engine.start(policy)
            asked = requests(n)
            prompts = [await engine.text.encode(prompt, special_tokens=True) for prompt, _ in asked]
            found = await asyncio.gather(*(engine.generate(str(i), ids, asked[i][1]) for i, ids in enumerate(prompts)))
        finally:
            await engine.close()
        return [
            interaction(
                f"r{i:04}",
                user=f"user {i // 2}",
                created_at=NOON + timedelta(seconds=i),
                prompt=asked[i][0],
                prompt_token_ids=prompts[i],
                response=one.text,
                response_token_ids=one.token_ids,
                logprobs=[float(logprob) for logprob in one.logprobs],
                policy_spans=[{"start": 0, "policy_version": policy.version}],
                sampling={"temperature": asked[i][1].temperature, "max_tokens": MAX_TOKENS, "n": 1, "stop": []},
                finish_reason=one.finish_reason,
                metadata={},
            )
            for i, generation in enumerate(found)
            for one in generation.responses
        ]

    return asyncio.run(answer())


def record(lake: Lake, rows: Sequence[dict[str, Any]]) -> None:
    """Put interactions into the lake, with their rewards."""
    put(lake, "interactions", list(rows))
    put(lake, "rewards", [reward(row["response_id"], value(row["response"])) for row in rows])


def publish_blend(store: PolicyStore, one: Policy, other: Policy, share: float) -> Policy:
    """Policy ``one`` with its weights moved by a share of the way to those of ``other``."""

    def write(folder: Path) -> None:
        for file in one.files:
            shutil.copy2(one.path / file, folder / file)
        first, second = (load_file(policy.path / "model.safetensors") for policy in (one, other))
        blended = {name: weights.lerp(second[name], share) for name, weights in first.items()}
        save_file(blended, folder / "model.safetensors", metadata={"format": "pt"})

    return store.publish(write, parent=one.version, lineage={}, metrics={})
