"""Actor, reference and rollout workers in two processes that train and generate: Ray, FSDP2 over gloo, vLLM.

Beside vLLM, in the same processes, transformers generates on the actor's shards.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from deploy.examples.demo.seed import make_model, make_tokenizer
from deploy.examples.demo.task import items
from evaluation.engine import Call, Work
from serve.policies.folder import safetensors_header
from tests.paths import ROOT
from tests.train.tiny_models import plain_log_probs
from train.algorithms import load
from train.batch.packed import PackedBatch, Rollout, Sample
from train.config.training import TrainConfig
from train.controller.worker_group import WorkerError, WorkerGroup
from train.workers.role_groups import start_groups, start_pools


class Engine(NamedTuple):
    config: TrainConfig
    policy: Path
    actor: WorkerGroup
    reference: WorkerGroup
    rollouts: dict[str, WorkerGroup]
    """By backend: vllm, and where it can, hf."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained policy of the demo's kind: tied embeddings, grouped-query attention."""
    folder = tmp_path_factory.mktemp("policy")
    tokenizer = make_tokenizer()
    torch.manual_seed(3)
    make_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=[(1, 1), (2, 1), (2, 2)], ids=["tp1", "tp2", "tp2 in training too"])
def engine(request: pytest.FixtureRequest, policy: Path) -> Iterator[Engine]:
    generation, training = request.param
    config = TrainConfig.model_validate(
        {
            "ranks": 2,
            "fsdp": {"tensor_parallel": training},
            "dtype": "float32",
            "micro_batch_tokens": 64,
            "optimizer": {"learning_rate": 3e-3, "warmup_steps": 0},
            "rollout": {
                "max_tokens": 6,
                "max_model_len": 64,
                "kv_cache_bytes": 16 * 2**20,
                "tensor_parallel_size": generation,
            },
            "start_timeout_s": 200,
            "step_timeout_s": 100,
        }
    )
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
    )
    try:
        with (
            start_pools(config) as pools,
            start_groups(config, policy, seed=5, reward=None, pools=nullcontext(pools)) as groups,
        ):
            rollouts = {"vllm": groups.rollout}
            if generation == training == 1:
                hf = "train.workers.hf_rollout:HfRolloutWorker"
                rollouts["hf"] = pools["all"].group("hf", hf, policy=policy, config=config, seed=5)
            yield Engine(config, policy, groups.actor, groups.reference, rollouts)
    finally:
        ray.shutdown()


def sample(
    engine: Engine, backend: str = "vllm", prompts: int = 6, n: int = 4
) -> tuple[list[list[int]], list[list[Sample]]]:
    asked = some_prompts(engine, prompts)
    return asked, engine.rollouts[backend].generate(asked, n=n)


def some_prompts(engine: Engine, count: int) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(engine.policy)
    return [tokenizer(item.prompt).input_ids for item in itertools.islice(items(1), count)]


def pack(asked: list[list[int]], sampled: list[list[Sample]]) -> PackedBatch:
    """Rewards that make the policy end its answers early."""
    return PackedBatch.pack(
        [
            Rollout(prompt, s.token_ids, s.log_probs, float(-len(s.token_ids)), group)
            for group, (prompt, samples) in enumerate(zip(asked, sampled, strict=True))
            for s in samples
        ]
    )


def by_transformers(folder: Path, batch: PackedBatch) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return plain_log_probs(model, batch)


def test_sharded_packed_logprobs_are_those_of_the_whole_model(engine: Engine) -> None:
    for backend in engine.rollouts:
        batch = pack(*sample(engine, backend))
        expected = by_transformers(engine.policy, batch)
        torch.testing.assert_close(engine.reference.log_probs(batch), expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(batch.behaviour_log_probs, expected, atol=1e-4, rtol=0)


def test_both_backends_give_the_same_tokens_the_same_logprobs(engine: Engine) -> None:
    if "hf" not in engine.rollouts:
        return
    asked, sampled = sample(engine, "hf")
    pairs = [(prompt, s.token_ids) for prompt, of in zip(asked, sampled, strict=True) for s in of]
    by_vllm = engine.rollouts["vllm"].lend(Call("score", (pairs,), {"temperature": 1.0}))
    by_hf = [s.log_probs for of in sampled for s in of]
    for expected, found in zip(by_vllm, by_hf, strict=True):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=2e-5, rtol=0)
    greedy = [rollout.generate(asked, n=0, greedy=True) for rollout in engine.rollouts.values()]
    assert [[(s.token_ids, s.text, s.finish_reason) for s in of] for of in greedy[0]] == [
        [(s.token_ids, s.text, s.finish_reason) for s in of] for of in greedy[1]
    ]


def test_what_is_asked_of_all_engines_is_answered_in_order_and_as_by_one(engine: Engine) -> None:
    rollout, asked = engine.rollouts["vllm"], some_prompts(engine, 5)
    warm, short = [{"temperature": 1.3, "max_tokens": 5}] * len(asked), {"max_tokens": 6}
    work = Work(asked, [(p, i) for i, p in enumerate(asked)], [(p, {"seed": 9}) for p in asked[:3]], [(asked[0], [4])])
    done = rollout.lend(Call("run", (work,), short))
    texts = rollout.lend(Call("sample", (asked, warm), {"seed": 7}))
    answers = rollout.lend(Call("answer", (asked, [of | {"seed": i} for i, of in enumerate(warm)])))
    assert len(set(texts)) > 1
    # One request is always the first engine's.
    for i, prompt in enumerate(asked):
        one = [prompt]
        (alone,) = rollout.lend(Call("run", (Work(one),), short)).greedy
        assert (done.greedy[i].token_ids, done.greedy[i].text) == (alone.token_ids, alone.text)
        (alone,) = rollout.lend(Call("run", (Work(sampled=[(prompt, i)]),), short)).sampled
        assert done.sampled[i].token_ids == alone.token_ids
        assert done.sampled[i].logprobs == pytest.approx(alone.logprobs, abs=1e-4)
        assert rollout.lend(Call("sample", (one, warm[:1]), {"seed": 7 + i})) == [texts[i]]
        assert rollout.lend(Call("answer", (one, [warm[i] | {"seed": i}]))) == [answers[i]]
    for i, prompt in enumerate(asked[:3]):
        (alone,) = rollout.lend(Call("run", (Work(requested=[(prompt, {"seed": 9})]),), short)).requested
        assert done.requested[i].token_ids == alone.token_ids
    assert [len(of) for of in done.scored] == [1]
    assert rollout.lend(Call("max_model_len")) == 64
    assert rollout.lend(Call("encode", (["a>"],))) == [AutoTokenizer.from_pretrained(engine.policy)("a>").input_ids]


def test_attention_does_not_cross_sequences(engine: Engine) -> None:
    batch = pack(*sample(engine))
    before = engine.reference.log_probs(batch)
    changed = batch.with_(tokens=batch.tokens.clone())
    changed.tokens[: int(batch.cu_seqlens[1])] = 5
    after = engine.reference.log_probs(changed)
    rest = slice(int(batch.cu_seqlens[1]), None)
    torch.testing.assert_close(after[rest], before[rest], atol=1e-5, rtol=0)
    assert not torch.allclose(after[: int(batch.cu_seqlens[1])], before[: int(batch.cu_seqlens[1])])


def test_the_greedy_response_comes_last_and_each_of_its_tokens_is_the_likeliest(engine: Engine) -> None:
    asked = some_prompts(engine, 3)
    model = AutoModelForCausalLM.from_pretrained(engine.policy, dtype=torch.float32)
    by_backend = [rollout.generate(asked, n=2, seed=1, greedy=True) for rollout in engine.rollouts.values()]
    for prompt, samples in zip(asked * len(by_backend), itertools.chain(*by_backend), strict=True):
        assert len(samples) == 3
        greedy = samples[-1].token_ids
        with torch.no_grad():
            likeliest = model(torch.tensor([prompt + greedy])).logits[0].argmax(-1)
        assert likeliest[len(prompt) - 1 : -1].tolist() == greedy


def test_prompts_of_more_tokens_than_a_step_together_are_answered_as_alone(engine: Engine) -> None:
    asked = [[3 + i % 9, 3 + i // 9, *[4, 5] * 24] for i in range(90)]
    assert sum(map(len, asked)) > 4096, "vLLM's default"
    for backend, rollout in engine.rollouts.items():
        together = rollout.generate(asked, n=1, seed=1)
        alone = rollout.generate(asked[:2], n=1, seed=1)
        assert [s[0].token_ids for s in together[:2]] == [s[0].token_ids for s in alone], backend


def test_of_the_ranks_of_an_engine_one_answers(engine: Engine) -> None:
    ranks, t = range(engine.config.ranks), engine.config.rollout.tensor_parallel_size
    call = engine.rollouts["vllm"].generate
    asked = some_prompts(engine, 2)
    parts, _ = call._rule(call._pool.layout, asked)
    arguments = [("rollout", "generate", part, {"n": 3, "seed": 1}) for part in parts]
    by_rank = call._pool.call("rollout.generate", "call", arguments).result()
    assert [len(by_rank[rank]) for rank in ranks] == [0 if rank % t else len(parts[rank]) for rank in ranks]
    assert len(call(asked, n=3, seed=1)) == 2


def test_what_generates_after_an_update_is_what_was_trained_and_what_is_published(
    engine: Engine, tmp_path: Path
) -> None:
    batch = pack(*sample(engine, n=8))
    algorithm = load(engine.config.algorithm)
    before = engine.actor.log_probs(batch)
    ready = batch.with_(old_log_probs=before, ref_log_probs=before, advantages=algorithm.advantages(batch))
    metrics = engine.actor.update(ready)
    assert metrics["grad_norm"] > 0
    updated = engine.actor.log_probs(batch)
    assert float((updated - before).abs().max()) > 1e-2, "the update must have changed the policy"

    for backend, rollout in engine.rollouts.items():
        rollout.load_actor_weights(0)
        fresh = pack(*sample(engine, backend))
        trained = engine.actor.log_probs(fresh)
        torch.testing.assert_close(fresh.behaviour_log_probs, trained, atol=1e-4, rtol=0)

    engine.actor.export(tmp_path)
    names = [set(safetensors_header(folder / "model.safetensors")) for folder in (tmp_path, engine.policy)]
    assert names[0] == names[1], "a published policy must name the tensors that its parent names"
    torch.testing.assert_close(by_transformers(tmp_path, fresh), trained, atol=1e-4, rtol=0)
    torch.testing.assert_close(
        engine.reference.log_probs(batch), by_transformers(engine.policy, batch), atol=1e-4, rtol=0
    )


def test_a_failing_worker_is_named_with_its_rank_and_its_error(engine: Engine) -> None:
    for rollout in reversed(engine.rollouts.values()):
        with pytest.raises(WorkerError, match=r"(rollout|hf)\.generate failed on rank \d[\s\S]*(ValueError|Error)"):
            rollout.generate([[1] * 500, [1] * 500], n=1)
