"""Whole runs on one device, and what stays between them: resident workers that rest, and lend their engine."""

from __future__ import annotations

import json
import math
import os
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import device_memory
from tests.gpu.gpu_suite import DEVICE, device_type, gpu_test, ranks_here
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


def changed_weights(home: Path, candidate: int, seed: Path | None = None) -> list[str]:
    """Names of the parameters that a run has changed of the model in ``seed``, by default the home's own."""
    import torch
    from safetensors.torch import load_file

    folders = (seed or home / "seed", home / "policies" / f"v{candidate:06d}")
    before, after = (load_file(folder / "model.safetensors") for folder in folders)
    assert before.keys() == after.keys()
    return [name for name in before if not torch.equal(before[name], after[name].to(before[name].dtype))]


def learned(
    home: Path, settings: dict[str, Any], *, reward: Any = "users_code:reward", run: str = "run"
) -> list[dict[str, Any]]:
    """The metrics of each step of a run in a home, which has changed the policy's weights and published it."""
    from tests.train.job_home import job_context, metrics_of
    from train.config.training import TrainConfig
    from train.context import JobContext
    from train.launch import run_job

    # On a CPU the cache is what is of use, a share of the machine's memory.
    cache = {"kv_cache_bytes": 16 * 2**20} if device_type() == "cpu" else {}
    config = RUN | settings | {"rollout": RUN["rollout"] | cache | settings.get("rollout", {})}
    context = job_context(home, run, reward=reward, parent=1, python_path=[str(home)])
    result = run_job(TrainConfig.model_validate(config), JobContext.model_validate(context))
    assert (result.reason, result.steps, result.stopped) == (None, 3, False)
    assert result.candidate is not None
    assert changed_weights(home, result.candidate)
    steps: list[dict[str, Any]] = metrics_of(home, run)
    assert len(steps) == 3
    for step in steps:
        assert math.isfinite(step["reward"])
        assert step["grad_norm"] > 0
    return steps


def reward_model(folder: Path, policy: Path) -> Path:
    """A random one that reads what the policy writes."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification

    tokenizer = AutoTokenizer.from_pretrained(policy)
    torch.manual_seed(3)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}
    config = Qwen3Config(vocab_size=len(tokenizer), num_labels=1, pad_token_id=tokenizer.pad_token_id, **sizes, **heads)
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@gpu_test("part", "nothing sleeps, and the engine is eager", packages=("ray", "vllm"))
@pytest.mark.parametrize("launcher", ["ray", "torchrun"])
def test_a_whole_run_learns_and_publishes_a_policy(tmp_path: Path, launcher: str) -> None:
    from tests.train.job_home import make_home

    make_home(tmp_path)
    for step in learned(tmp_path, {"launcher": launcher}):
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
    from tests.train.job_home import make_home

    make_home(tmp_path)
    (tmp_path / "users_games.py").write_text(ENVIRONMENT)
    reward = None if "environment" in settings else "users_code:reward"
    for step in learned(tmp_path, settings | {"launcher": "torchrun"}, reward=reward):
        # Responses that go on are older policies' in part, and these learn fast.
        assert step["logprob_difference_max"] < (3 if "rollout" in settings else 0.6)


@gpu_test("part", "weights go over gloo", devices=2, packages=("ray", "vllm"))
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_that_generates_on_a_device_of_its_own_learns(tmp_path: Path, staleness: int) -> None:
    from tests.train.job_home import make_home

    make_home(tmp_path)
    pools = {"training": {"ranks": 1}, "generation": {"ranks": 1}}
    placement = {"pools": pools, "actor": "training", "reference": "training", "rollout": "generation"}
    for step in learned(tmp_path, {"placement": placement, "rollout": {"staleness": staleness}}):
        assert step["logprob_difference_max"] < (3 if staleness else 0.6)  # as above


@gpu_test("part", "a pool of its own shares the processor", packages=("ray", "vllm"))
@pytest.mark.parametrize("pool", [None, "all", "rewards"], ids=["driver", "actors pool", "own pool"])
def test_a_reward_model_rewards_a_run_wherever_it_is(tmp_path: Path, pool: str | None) -> None:
    from tests.train.job_home import make_home

    make_home(tmp_path)
    model = reward_model(tmp_path / "reward_model", tmp_path / "seed")
    pools = {"all": {"ranks": 1}} | ({"rewards": {"ranks": 1}} if pool == "rewards" else {})
    # Where there is no device it says so.
    devices = ranks_here(3) if DEVICE == "cuda" else 0
    device = "cuda" if devices > (pool == "rewards") else "cpu"
    reward = {"human": {"model": {"name": str(model), "device": device}}}
    for step in learned(tmp_path, {"placement": {"pools": pools, "reward": pool}}, reward=reward):
        assert 0 < step["reward"] < 1
        assert step["unrewarded_responses"] == 0


CLUSTER, SHARED = "MILLRACE_GPU_SUITE_CLUSTER", "MILLRACE_GPU_SUITE_SHARED"
NODES = """
import json
from ray.util import placement_group_table
from train.observe.hooks import Hook

class Nodes(Hook):
    def on_step(self, step, metrics):
        placed = [group for group in placement_group_table().values() if group["state"] == "CREATED"]
        nodes = [len(set(group["bundles_to_node_id"].values())) for group in placed]
        gpus = [sum(bundle.get("GPU", 0) for bundle in group["bundles"].values()) for group in placed]
        (self.run.folder / "nodes").write_text(json.dumps(list(zip(nodes, gpus))))
"""


@gpu_test("part", "gradients go over gloo", packages=("ray", "vllm"))
def test_a_run_over_two_machines_learns() -> None:
    """On a cluster of Ray's that is there: the address of its jobs, and a folder that all its machines see."""
    address, shared = os.environ.get(CLUSTER), os.environ.get(SHARED)
    if not (address and shared):
        pytest.skip(f"needs a cluster: {CLUSTER}=http://head:8265, and {SHARED}, a folder that its machines share")
    from tests.train.job_home import make_home

    spread = {"pools": {"all": {"ranks": 2, "strategy": "STRICT_SPREAD"}}}
    settings = {"ray_address": address, "placement": spread, "hooks": ["nodes_hook:Nodes"]}
    with tempfile.TemporaryDirectory(prefix="suite-", dir=shared) as folder:
        home = Path(folder)
        make_home(home)
        (home / "nodes_hook.py").write_text(NODES)
        for step in learned(home, settings):
            assert step["logprob_difference_max"] < 0.6  # as above
        groups = json.loads((home / "runs" / "run" / "nodes").read_text())
        assert [2, 2 if DEVICE == "cuda" else 0] in groups, "a rank on each machine, with a GPU each"


@gpu_test("all", packages=("ray", "vllm"))
def test_a_model_of_ones_own_is_trained_and_generates_on_its_device(tmp_path: Path) -> None:
    from tests.train.job_home import make_home
    from tests.train.tiny_own_model import SOURCE, put_tiny_model

    make_home(tmp_path, put_tiny_model)
    (tmp_path / "users_model.py").write_text(SOURCE)
    own = {"dtype": "float32", "model": {"class": "users_model:TinyLM"}, "launcher": "torchrun"}
    rollout = {"backend": "hf", "max_tokens": 6, "max_model_len": 48}
    assert all(step["logprob_difference_max"] < 1e-3 for step in learned(tmp_path, own | {"rollout": rollout}))


@gpu_test("part", "nothing sleeps, so that nothing is given back", packages=("ray", "vllm"))
def test_resident_workers_rest_lend_their_engine_and_take_the_next_run(tmp_path: Path) -> None:
    from evaluation.engine import Call, Work
    from loadtests.tiny_model import make_model_folder
    from serve.policies.store import PolicyStore
    from train.config.training import TrainConfig
    from train.controller.imported_files import ImportedFiles
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

    with a_ray(), ResidentPools(ImportedFiles()) as resident:

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

    from feedback.config import ModelConfig
    from feedback.scoring.sources.reward_model import RewardModel
    from loadtests.tiny_model import make_model_folder

    folder = reward_model(tmp_path / "reward_model", make_model_folder(tmp_path / "model", 0))
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


SCORER = """
def score(batch):
    # The part of a response that is "a"; None where there is none.
    return [text.count("a") / len(text) if text else None for text in batch["response"].to_pylist()]
"""


@gpu_test("part", "nothing sleeps or waits for its turn", packages=("ray", "vllm"))
def test_a_whole_cycle_scores_trains_judges_and_swaps_beside_the_server(tmp_path: Path) -> None:
    """With one device all have it in turns, with more the server, training and evaluation have their own."""
    import yaml

    from loadtests.server import MILLRACE, Server, free_port, run
    from loadtests.tiny_model import make_model_folder

    model, home, port = make_model_folder(tmp_path / "model", 1, letters="abcdefgh"), tmp_path / "home", free_port()
    home.mkdir()
    (home / "users_scorer.py").write_text(SCORER)
    items = [{"id": str(i), "prompt": f"{'abcdefgh'[i % 8]}{'abcdefgh'[i // 8 % 8]}{'hg'[i // 64]}"} for i in range(96)]
    (home / "suite.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    context: dict[str, Any] = {"max_model_len": 64}
    if DEVICE == "cpu":
        context["kv_cache_bytes"] = 16 * 2**20
    config = {
        "home": str(home),
        "serve": {"port": port, "engine": {**context, "dtype": "float32"}},
        "feedback": {
            "journal": {"segment_seconds": 1.0},
            "lake": {"seal_seconds": 1.0},
            "scoring": {"rules": {"letters": {"function": "users_scorer:score"}}},
        },
        "evaluation": {"scorer": "users_scorer:score", "max_tokens": 12, "gate": {"guardrails": {"length": None}}},
        "train": RUN
        | {"dtype": "float32", "steps": 12, "optimizer": {"learning_rate": 1e-2}}
        | {"rollout": {**context, "max_tokens": 12}, "data": {"prompts_per_step": 8, "min_prompts": 8}},
        "cycle": {"recipe": "rlvr"},
    }
    file = tmp_path / "millrace.yaml"
    file.write_text(yaml.safe_dump(config))
    run("init", "--model", str(model), "--config", str(file), "--no-write-config")

    def answer(url: str, prompt: str) -> dict[str, Any]:
        body = json.dumps({"prompt": prompt, "max_tokens": 12}).encode()
        request = urllib.request.Request(f"{url}/generate", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as found:
            answered: dict[str, Any] = json.loads(found.read())
        return answered

    with Server([MILLRACE, "serve", "--config", str(file)], port, tmp_path / "serve.log") as server:
        for first in "abcdefgh":
            for second in "abcdefgh":
                answer(server.url, f"{first}{second}")
        said = run("cycle", "--config", str(file), "--json-out", str(tmp_path / "cycle.json"), folder=home)
        cycle = json.loads((tmp_path / "cycle.json").read_text())
        assert cycle["status"] in ("promoted", "refused", "undecided"), said
        assert [stage["name"] for stage in cycle["stages"]][:3] == ["score", "train", "evaluate"]
        assert cycle["rewards"] == 64
        served = answer(server.url, "ab")["responses"][0]["policy_spans"][-1]["policy_version"]
    assert served == (2 if cycle["status"] == "promoted" else 1)
    assert changed_weights(home, 2, tmp_path / "model")
    judged = json.loads((home / "evaluations" / "2-vs-1.json").read_text())
    assert judged["engines"]["candidate"] in ("own", "resident")
    assert judged["candidate"]["reward"]["value"] > judged["incumbent"]["reward"]["value"]
