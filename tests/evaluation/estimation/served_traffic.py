"""Traffic that a real server's engine has answered, in a lake, and a candidate that prefers what is rewarded."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from feedback.lake.tables import Lake
from serve.config import EngineConfig as ServingConfig
from serve.policies.store import Policy, PolicyStore
from serve.vllm.engine import Engine, Sampling
from tests.feedback.feedback_rows import NOON, interaction, put, reward

MIB = 1024 * 1024
MAX_TOKENS = 6
TEMPERATURES = (1.0, 0.7)
BY_USER = 2


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
    """Rows of interactions, as the server's engine answers; BY_USER of each user, one at either temperature."""

    async def answer() -> list[dict[str, Any]]:
        engine = Engine(ServingConfig(kv_cache_bytes=8 * MIB, threads=1))
        asked = requests(n)
        try:
            await engine.start(policy)
            prompts = [await engine.text.encode(prompt, special_tokens=True) for prompt, _ in asked]
            found = await asyncio.gather(*(engine.generate(str(i), ids, asked[i][1]) for i, ids in enumerate(prompts)))
        finally:
            await engine.close()
        return [
            interaction(
                f"r{i:04}",
                user=f"user {i // BY_USER}",
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


def publish_fond_of_digits(store: PolicyStore, policy: Policy, steps: int) -> Policy:
    """The policy after some steps that make digits likelier, whatever stands before them."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy.path, dtype=torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        ids = torch.randint(2, 40, (64, 8), generator=generator)
        loss = -model(ids).logits.log_softmax(-1)[..., 2:12].logsumexp(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def write(folder: Path) -> None:
        for file in policy.files:
            shutil.copy2(policy.path / file, folder / file)
        model.save_pretrained(folder)

    return store.publish(write, parent=policy.version, lineage={}, metrics={})
