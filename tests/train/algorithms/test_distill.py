"""Distillation: what vLLM's server says of tokens, what an advantage is, and a run that comes nearer to its teacher."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from job_home import job_context, make_home, metrics_of, results_of, run_jobs
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, AutoTokenizer

from deploy.config import root
from deploy.examples.demo.task import items
from deploy.loop.preflight import no_reward
from feedback.config import ApiConfig
from feedback.datasets import Prompt
from serve.policies.store import PolicyStore
from tests.vllm_server import serving
from train.algorithms import load
from train.batch.packed import PackedBatch, Rollout, Sample
from train.config.algorithms import AlgorithmConfig
from train.config.training import TrainConfig
from train.data.samples import table_of
from train.data.teacher import Teacher

CONFIG: dict[str, Any] = {
    "dtype": "float32",
    "launcher": "torchrun",
    "steps": 14,
    "micro_batch_tokens": 1024,
    "optimizer": {"learning_rate": 1e-2, "warmup_steps": 1},
    "rollout": {"max_tokens": 12, "max_model_len": 64, "kv_cache_bytes": 16 * 2**20},
    "data": {"prompts_per_step": 12, "min_prompts": 4},
    "start_timeout_s": 300,
    "step_timeout_s": 300,
}

TEACHER = {"url": "http://teacher/v1", "model": "large"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distill")
    make_home(folder)
    return folder


@pytest.fixture(scope="module")
def teacher(home: Path) -> Path:
    """A policy that is surer than the parent of what that one would rather say, with the same tokenizer."""
    folder = home / "teacher"
    shutil.copytree(PolicyStore(home / "policies").get(1).path, folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        model.model.norm.weight.mul_(6)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def api(teacher: Path) -> Iterator[ApiConfig]:
    with serving(teacher) as url:
        yield ApiConfig(url=url, model="tiny", attempts=2)


def rows(*responses: tuple[list[int], list[int], str]) -> pa.Table:
    return table_of([(Prompt(None, None, prompt), Sample(own, text, [], "stop")) for prompt, own, text in responses])


def test_the_teacher_gives_each_token_the_logprob_that_its_model_does(api: ApiConfig, teacher: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    given = [([2, 3, 4], [5, 6, 7, 8]), ([9], [10, tokenizer.pad_token_id, 2, tokenizer.eos_token_id])]
    values, reasons = Teacher(api, 60).by_row(
        rows(*((prompt, own, tokenizer.decode(own, skip_special_tokens=True)) for prompt, own in given))
    )
    assert reasons == [None, None]
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    for (prompt, own), value in zip(given, values, strict=True):
        with torch.no_grad():
            log_probs = model(torch.tensor([prompt + own])).logits[0].log_softmax(-1)
        expected = [log_probs[len(prompt) + i - 1, token].item() for i, token in enumerate(own)]
        assert value.tokens == pytest.approx(expected, abs=1e-4)  # type: ignore[union-attr]
        assert value == pytest.approx(sum(expected), abs=1e-3)


def test_what_a_teacher_can_not_say_is_missing_with_the_reason(api: ApiConfig, teacher: Path) -> None:
    text = AutoTokenizer.from_pretrained(teacher).decode([5, 6])
    values, reasons = Teacher(api, 60).by_row(
        rows(([2], [5, 6], text), ([2], [5, 6], "something else"), ([2], [], ""), ([2], [100_000], "x"))
    )
    assert [value is None for value in values] == [False, True, True, True]
    assert "they have different tokenizers" in str(reasons[1])
    assert reasons[2] == "the response has no tokens"
    assert "HTTP 400" in str(reasons[3])
    unknown = api.model_copy(update={"model": "nobody"})
    assert "HTTP 404" in str(Teacher(unknown, 60).by_row(rows(([2], [5, 6], text)))[1][0])
    nobody = api.model_copy(update={"url": "http://127.0.0.1:1/v1", "backoff_s": 0.01})
    assert "2 attempts" in str(Teacher(nobody, 60).by_row(rows(([2], [5, 6], text)))[1][0])


def test_a_token_that_is_impossible_to_the_teacher_leaves_its_response_without_a_reward() -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            told = {"token_logprobs": [None, -0.5, -9999.0], "tokens": ["x", "a", "b"]}
            body = json.dumps({"choices": [{"logprobs": told}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server, ThreadPoolExecutor(1) as pool:
        pool.submit(server.serve_forever)
        config = ApiConfig(url=f"http://127.0.0.1:{server.server_port}/v1", model="t", attempts=1)
        try:
            values, reasons = Teacher(config, 60).by_row(rows(([2], [5, 6], "ab")))
        finally:
            server.shutdown()
    assert (values, reasons) == ([None], ["logprobs that are none"])


def test_a_tokens_advantage_is_what_the_teacher_gives_it_more_than_the_policy_did() -> None:
    algorithm = load(
        AlgorithmConfig.model_validate({"name": "distill", "teacher": {"url": "http://t/v1", "model": "t"}})
    )
    rollouts = [
        Rollout([3, 4], [5, 6], [-1.0, -2.0], -1.5, 0, token_rewards=[-0.5, -1.0]),
        Rollout([3], [7], [-0.25], -3.0, 1, token_rewards=[-3.0]),
    ]
    batch = PackedBatch.pack(rollouts)
    advantages = algorithm.checked_advantages(batch)
    assert advantages[batch.response_mask].tolist() == [0.5, 1.0, -2.75]
    assert advantages[~batch.response_mask].tolist() == [0.0] * 3
    loss, logged = algorithm.loss(
        batch.behaviour_log_probs.clone().requires_grad_(), batch.with_(advantages=advantages)
    )
    assert logged["reverse_kl"][batch.response_mask].tolist() == [-0.5, -1.0, 2.75]
    assert loss.item() == pytest.approx(1.25)


@pytest.mark.long
def test_a_run_comes_nearer_to_its_teacher(home: Path, api: ApiConfig) -> None:
    (home / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": item.prompt}) + "\n" for item in islice(items(1), 12))
    )
    prompts = {"prompts": [{"path": str(home / "prompts.jsonl")}], "traffic_weight": 0}
    teacher = {"name": "distill", "teacher": api.model_dump(), "group_size": 4}
    config = {**CONFIG, "algorithm": teacher, "data": {**CONFIG["data"], **prompts}}
    [result] = results_of(run_jobs(home, [{"config": config, "context": job_context(home, "distilled", reward=None)}]))
    assert result["candidate"] == 2
    found = [metrics["reverse_kl"] for metrics in metrics_of(home, "distilled")]
    assert len(found) == CONFIG["steps"]
    assert sum(found[-3:]) / 3 < 0.6 * found[0], found


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"teacher": None}, "needs a policy to learn from"),
        ({"name": "grpo"}, r"train\.algorithm\.teacher.*: grpo does not read it"),
        ({"rollout": {"temperature": 0.5}}, r"logprobs are those at 1; take out train\.rollout\.temperature"),
        ({"data": {"traffic_share": 0.5}}, r"take out train\.data\.traffic_share"),
        ({"reward": "mine:reward"}, r"take out train\.reward"),
    ],
)
def test_what_does_not_go_with_a_teacher_is_refused(settings: dict[str, Any], message: str) -> None:
    algorithm: dict[str, Any] = {"name": "distill", "teacher": TEACHER}
    algorithm |= {key: settings.pop(key) for key in ("teacher", "name") if key in settings}
    with pytest.raises(ValidationError, match=message):
        TrainConfig.model_validate({"algorithm": algorithm, **settings})


def test_a_cycle_needs_no_other_reward_and_takes_no_other_recipe(tmp_path: Path) -> None:
    given = [
        ("home", str(tmp_path)),
        ("train.algorithm.name", "distill"),
        ("train.algorithm.teacher", json.dumps(TEACHER)),
    ]
    assert no_reward(root.load(None, given)) is None
    with pytest.raises(Exception, match="both say what is learned from"):
        root.load(None, [*given, ("cycle.recipe", "rlaif")])
