"""From chats with tool calls over /v1, and feedback on them, to the batch that training learns from."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from deploy.examples.agent.seed import make_seed
from deploy.examples.agent.task import keys, look
from feedback.config import LakeConfig, ScoringConfig
from feedback.ingest.seal import seal
from feedback.lake.tables import Lake
from feedback.scoring.run import score
from serve.policies.store import PolicyStore
from tests.serve.conftest import reference_logprobs, start_server, stop_server
from train.batch.packed import PackedBatch
from train.config.training import TrainConfig
from train.data.prompts import TrainingData
from train.environments.ready.tools import Function


def test_sessions_with_tool_calls_are_learned_from_as_they_were_sampled(tmp_path: Path) -> None:
    make_seed(tmp_path / "seed", steps=120, batch=32)
    store = PolicyStore(tmp_path / "policies")
    policy = store.publish(tmp_path / "seed", parent=None, lineage={}, metrics={})
    store.promote(policy.version, expected=None, who="test", why="first")
    live = start_server(tmp_path, store, openai={"tool_parser": "pythonic"})
    try:
        with httpx.Client(base_url=live.url, timeout=60) as client:
            talked = {f"session-{key}": _talk(client, key, f"session-{key}") for key in keys()[:24]}
            for session in talked:
                thumb = {"session_id": session, "kind": "thumb", "value": int(session < "session-d")}
                assert client.post("/feedback", json=thumb).status_code == 201
        rows = {row["response_id"]: row for row in live.rows("interactions")}
    finally:
        stop_server(live)
    lake = Lake(str(tmp_path / "lake"), LakeConfig())
    seal(lake, tmp_path / "journal")
    score(lake, ScoringConfig())
    config = TrainConfig.model_validate(
        {"algorithm": {"name": "ppo", "credit": "turn"}, "data": {"traffic_share": 1.0, "prompts_per_step": 24}}
    )
    data = TrainingData.of(lake, lake.versions(), config, policy.path, 0)
    assert data.left_out == 0, str(data)
    learned = [rollout for group in data.traffic.items for rollout in group]
    assert Counter(r.turns for r in learned) == Counter(talked.values())
    assert max(talked.values()) > 1, "no turn called the tool"
    joined = [r for r in learned if r.turns > 1 and not r.earlier]
    assert joined, f"no second turn went on behind the first one: {data}"
    assert {rollout.reward for rollout in learned} == {0.0, 1.0}
    for rollout in joined:
        assert rollout.sampled is not None
        ids = rollout.prompt + rollout.response
        first, second = sorted(
            (row for row in rows.values() if row["prompt_token_ids"][: len(rollout.prompt)] == rollout.prompt),
            key=lambda row: row["created_at"],
        )
        assert ids == second["prompt_token_ids"] + second["response_token_ids"]
        assert [t for t, own in zip(rollout.response, rollout.sampled, strict=True) if own] == (
            first["response_token_ids"] + second["response_token_ids"]
        )
        assert rollout.token_rewards == [0.0] * (len(rollout.response) - 1) + [rollout.reward]
        # The logprobs that were captured are the policy's, of the joined sequence too.
        expected = reference_logprobs(policy.path, rollout.prompt, rollout.response)
        for own, log_prob, reference in zip(rollout.sampled, rollout.log_probs, expected, strict=True):
            assert abs(log_prob - reference) < 1e-3 if own else log_prob == 0
    batch = PackedBatch.pack(learned)
    assert int(batch.response_mask.sum()) == sum(len(row["response_token_ids"]) for row in rows.values())


def _talk(client: httpx.Client, key: str, session: str) -> int:
    """Ask for a key, and look up what the policy asks the tool for; how many turns it took."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"{key}?"}]
    body = {"model": "millrace", "temperature": 1.0, "seed": 7, "max_tokens": 18, "session_id": session}
    for turn in (1, 2):
        answer = client.post(
            "/v1/chat/completions", json={**body, "messages": messages, "tools": [Function.of(look).schema]}
        )
        assert answer.status_code == 200, answer.text
        message = answer.json()["choices"][0]["message"]
        if turn == 2 or not message.get("tool_calls"):
            return turn
        [call, *_] = message["tool_calls"]
        found = look(json.loads(call["function"]["arguments"]).get("key", ""))
        messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": found}]
    raise AssertionError
