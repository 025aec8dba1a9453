"""Whole runs on one device, and what stays between them: resident workers that rest, and lend their engine."""

from __future__ import annotations

import json
import math
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import device_memory
from tests.gpu.gpu_suite import DEVICE, device_type, gpu_test
from tests.gpu.test_gpu_generation import PROMPTS, a_ray

RUN: dict[str, Any] = {
    "dtype": "bfloat16",
    "steps": 3,
    "micro_batch_tokens": 256,
    "algorithm": {"name": "grpo", "group_size": 4},
    "optimizer": {"learning_rate": 3e-3, "warmup_steps": 0},
    "rollout": {"max_tokens": 6, "max_model_len": 64},
    "data": {"prompts_per_step": 4, "min_prompts": 4},
    "start_timeout_s": 300,
    "step_timeout_s": 200,
}
"""All else as a run decides by its device: offload, checkpointing, KV cache, CUDA graphs."""


def changed_weights(home: Path, candidate: int) -> list[str]:
    """Names of the parameters that a run has changed."""
    import torch
    from safetensors.torch import load_file

    folders = (home / "seed", home / "policies" / f"v{candidate:06d}")
    before, after = (load_file(folder / "model.safetensors") for folder in folders)
    assert before.keys() == after.keys()
    return [name for name in before if not torch.equal(before[name], after[name].to(before[name].dtype))]


@gpu_test("part", "nothing sleeps, and the engine is eager", packages=("ray", "vllm"))
@pytest.mark.parametrize("launcher", ["ray", "torchrun"])
def test_a_whole_run_learns_and_publishes_a_policy(tmp_path: Path, launcher: str) -> None:
    from tests.train.job_home import job_context, make_home, metrics_of
    from train.config.training import TrainConfig
    from train.context import JobContext
    from train.launch import run_job

    make_home(tmp_path)
    # On a CPU the cache is what is of use, a share of the machine's memory.
    cache = {"kv_cache_bytes": 16 * 2**20} if device_type() == "cpu" else {}
    settings = RUN | {"launcher": launcher, "rollout": RUN["rollout"] | cache}
    others = {"reward": "users_code:reward", "parent": 1, "python_path": [str(tmp_path)]}
    context = JobContext.model_validate(job_context(tmp_path, "run", **others))
    result = run_job(TrainConfig.model_validate(settings), context)
    assert (result.reason, result.steps, result.stopped) == (None, 3, False)
    assert result.candidate is not None
    assert changed_weights(tmp_path, result.candidate)
    steps = metrics_of(tmp_path, "run")
    assert len(steps) == 3
    for step in steps:
        assert math.isfinite(step["reward"])
        assert step["grad_norm"] > 0
        assert step["logprob_difference_max"] < 0.6, "as of require_turns, in bfloat16"


ENVIRONMENT = """
from train.environments.environment import Environment

class Short(Environment):
    async def reset(self, prompt):
        return prompt.as_messages

    async def step(self, text, tool_calls):
        return [], 1.0 - len(text), True
"""


@gpu_test("part", "nothing sleeps, and the engine is eager", packages=("ray", "vllm"))
@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm": {"name": "ppo", "group_size": 2}},
        {"rollout": {"staleness": 1}},
        {"environment": {"name": "users_games:Short"}},
    ],
    ids=["critic", "responses that go on", "episodes"],
)
def test_a_run_with_a_critic_responses_that_go_on_or_episodes_learns(tmp_path: Path, settings: dict[str, Any]) -> None:
    from tests.train.job_home import job_context, make_home, metrics_of
    from train.config.training import TrainConfig
    from train.context import JobContext
    from train.launch import run_job

    make_home(tmp_path)
    (tmp_path / "users_games.py").write_text(ENVIRONMENT)
    cache = {"kv_cache_bytes": 16 * 2**20} if device_type() == "cpu" else {}
    rollout = RUN["rollout"] | cache | settings.get("rollout", {})
    reward = {} if "environment" in settings else {"reward": "users_code:reward"}
    others = {"parent": 1, "python_path": [str(tmp_path)], **reward}
    context = JobContext.model_validate(job_context(tmp_path, "run", **others))
    config = RUN | settings | {"launcher": "torchrun", "rollout": rollout}
    result = run_job(TrainConfig.model_validate(config), context)
    assert (result.reason, result.steps) == (None, 3)
    assert result.candidate is not None
    assert changed_weights(tmp_path, result.candidate)
    for step in metrics_of(tmp_path, "run"):
        assert math.isfinite(step["reward"])
        assert step["grad_norm"] > 0
        # Responses that go on are older policies' in part, and these learn fast.
        assert step["logprob_difference_max"] < (3 if "rollout" in settings else 0.6)


@gpu_test("all", packages=("ray", "vllm"))
def test_a_model_of_ones_own_is_trained_and_generates_on_its_device(tmp_path: Path) -> None:
    from tests.train.job_home import job_context, make_home, metrics_of
    from tests.train.tiny_own_model import SOURCE, put_tiny_model
    from train.config.training import TrainConfig
    from train.context import JobContext
    from train.launch import run_job

    make_home(tmp_path, put_tiny_model)
    (tmp_path / "users_model.py").write_text(SOURCE)
    own = {"dtype": "float32", "model": {"class": "users_model:TinyLM"}, "launcher": "torchrun"}
    rollout = {"backend": "hf", "max_tokens": 6, "max_model_len": 48}
    others = {"reward": "users_code:reward", "parent": 1, "python_path": [str(tmp_path)]}
    context = JobContext.model_validate(job_context(tmp_path, "own", **others))
    result = run_job(TrainConfig.model_validate(RUN | own | {"rollout": rollout}), context)
    assert result.candidate is not None, result.reason
    assert changed_weights(tmp_path, result.candidate)
    assert all(step["logprob_difference_max"] < 1e-3 for step in metrics_of(tmp_path, "own"))


@gpu_test("part", "nothing sleeps, so that nothing is given back", packages=("ray", "vllm"))
def test_resident_workers_rest_lend_their_engine_and_take_the_next_run(tmp_path: Path) -> None:
    from evaluation.engine import Call, Work
    from loadtests.tiny_model import make_model_folder
    from serve.policies.store import PolicyStore
    from train.config.training import TrainConfig
    from train.workers.resident_pools import ResidentPools
    from train.workers.role_groups import start_groups

    store = PolicyStore(tmp_path / "policies")
    sizes = {"hidden": 256, "layers": 4, "heads": 4, "tied": False}
    one, other = (
        store.publish(make_model_folder(tmp_path / str(seed), seed, **sizes), parent=None, lineage={}, metrics={})
        for seed in (1, 2)
    )
    rollout = {"max_model_len": 128, "max_tokens": 12, "kv_cache_bytes": 2**28 if DEVICE == "cuda" else 2**26}
    settings = RUN | {"ranks": 1, "rollout": rollout | {"enforce_eager": DEVICE == "cpu"}}
    config = TrainConfig.model_validate(settings)
    free: dict[str, int] = {}

    def note(when: str) -> None:
        if DEVICE == "cuda":
            free[when] = device_memory.free_bytes()

    with a_ray(), ResidentPools() as resident:

        def run(policy: Any) -> list[list[int]]:
            pools = resident.of(config, policy, policy.path)
            with start_groups(config, policy.path, seed=1, reward=None, pools=pools) as groups:
                groups.reshard(0)
                assert groups.rollout is not None
                note(f"run {policy.version}")
                return [of[0].token_ids for of in groups.rollout.generate(PROMPTS, n=0, greedy=True)]

        def lent(policy: Any) -> list[list[int]]:
            resident.load(policy)
            done = resident.lend(Call("run", (Work(greedy=PROMPTS),), {"max_tokens": 12}))
            resident.take_back()
            return [answer.token_ids for answer in done.greedy]

        first = run(one)
        note("at rest")
        of_other = lent(other)
        note("lent and at rest again")
        assert run(other) == of_other, "an evaluation is answered with the weights that the next run begins with"
        assert lent(one) == first
        assert run(one) == first
    assert first != of_other
    if DEVICE == "cuda":
        for when in ("at rest", "lent and at rest again"):
            assert free[when] - free["run 1"] > 2**28, "weights and KV cache are given back"


@gpu_test("all", packages=("pyarrow", "pydantic"))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_reward_model_scores_on_the_device_as_on_a_cpu(tmp_path: Path, dtype: str) -> None:
    import pyarrow as pa
    import torch
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    from feedback.config import ModelConfig
    from feedback.scoring.sources.reward_model import RewardModel
    from loadtests.tiny_model import make_model_folder

    folder = make_model_folder(tmp_path, 0)  # for its tokenizer
    torch.manual_seed(3)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}
    config = Qwen3Config(vocab_size=258, num_labels=1, pad_token_id=0, **sizes, **heads)
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    responses = ["four", "five and six", "", "a much longer response than the others are"]
    rows = {"prompt": ["two and two is "] * 4, "messages": pa.nulls(4, pa.string()), "response": responses}

    def scored(device: str, dtype: str) -> list[float | None]:
        model = RewardModel(ModelConfig.model_validate({"name": str(folder), "device": device, "dtype": dtype}))
        values, reasons = model.by_row(pa.table(rows))
        assert reasons == [None] * 4
        return values

    before = torch.cuda.memory_allocated() if DEVICE == "cuda" else 0
    found = scored(device_type(), dtype)
    assert DEVICE == "cpu" or torch.cuda.max_memory_allocated() > before
    assert found == pytest.approx(scored("cpu", "float32"), abs=1e-4 if dtype == "float32" else 0.03)
    assert len(set(found)) == 4


@gpu_test("part", "an engine has one rank, and no device is hidden from a process", devices=2, packages=("ray", "vllm"))
def test_a_server_of_two_devices_and_a_fleet_of_two_answer_as_a_server_of_one(tmp_path: Path) -> None:
    from loadtests.server import MILLRACE, Server, free_port, run
    from loadtests.tiny_model import make_model_folder

    model, home = make_model_folder(tmp_path / "model", 1, hidden=128, heads=4), tmp_path / "home"
    run("init", "--model", str(model), "--home", str(home), "--no-write-config")

    def answers(**settings: int) -> set[tuple[str, ...]]:
        """What greedy responses to three prompts are, whichever replica they come from."""
        port = free_port()
        options: dict[str, Any] = {"serve.port": port, "serve.engine.dtype": "float32"}
        options |= {"serve.engine.kv_cache_bytes": 2**26, "serve.engine.max_model_len": 128}
        options |= {f"serve.{name}": value for name, value in settings.items()}
        command = [MILLRACE, "serve", "--home", str(home)]
        command += [str(word) for name, value in options.items() for word in (f"--{name}", value)]
        with Server(command, port, tmp_path / "serve.log") as server:
            found = set()
            for turn in range(4):
                texts = []
                for prompt in ("one", "two and two", "three"):
                    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "user": f"user-{turn}"}
                    request = urllib.request.Request(
                        f"{server.url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
                    )
                    with urllib.request.urlopen(request, timeout=120) as answer:
                        texts.append(json.loads(answer.read())["responses"][0]["text"])
                found.add(tuple(texts))
            return found

    alone = answers()
    assert len(alone) == 1
    if DEVICE == "cuda":
        assert answers(**{"engine.tensor_parallel_size": 2}) == alone
    assert answers(**{"fleet.replicas": 2}) == alone
