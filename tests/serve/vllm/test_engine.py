"""The engine by itself: what its logprobs mean, and weights that change under it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from serve.config import EngineConfig, SwapConfig
from serve.engine import EngineRefused
from serve.generation.request import GenerationProgress
from serve.policies.store import Policy, PolicyStore
from serve.swap.swapper import Swapper
from serve.vllm.boot import default_threads
from serve.vllm.engine import Engine, Generated, Sampling
from tests.serve.conftest import reference_logprobs, reference_model

PROMPT = list(b"the mill turns")
CLOSE = 1e-4


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory, model_folders: list[Path]) -> list[Policy]:
    store = PolicyStore(tmp_path_factory.mktemp("engine") / "policies")
    return [store.publish(folder, parent=None, lineage={}, metrics={}) for folder in model_folders]


@pytest.fixture(scope="module")
async def swapper(policies: list[Policy]) -> AsyncIterator[Swapper]:
    """A swapper whose engine runs on policy 1; its poll is slow, the tests call it themselves."""
    root = policies[0].path.parent
    engine = Engine(EngineConfig(kv_cache_bytes=64 << 20, threads=1))
    store = PolicyStore(root)
    store.promote(1, expected=None, who="test", why="test")
    made = Swapper(store, engine, SwapConfig(poll_seconds=3600), root.parent / "swaps.jsonl")
    await made.start()
    yield made
    await made.close()
    processes, sockets = list(engine.processes), engine._sockets
    assert sockets is not None
    assert list(sockets.iterdir())
    await engine.close()
    assert not sockets.exists()
    assert processes
    assert not [process for process in processes if Path(f"/proc/{process}").exists()]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's engine has vLLM's own number of threads")
@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (16, 15)])
def test_a_cpus_engine_leaves_a_core_to_the_api(monkeypatch: pytest.MonkeyPatch, cores: int, threads: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert default_threads() == threads


async def become(swapper: Swapper, version: int) -> None:
    pointer = swapper.store.serving()
    assert pointer is not None
    if swapper.engine.version != version:
        swap = await swapper.swap_to(swapper.store.promote(version, expected=pointer.version, who="test", why="test"))
        assert swap.ok, swap.error


def difference(policy: Policy, prompt: list[int], response: Generated, temperature: float = 1.0) -> float:
    expected = reference_logprobs(policy.path, prompt, response.token_ids, temperature=temperature)
    return max(abs(a - b) for a, b in zip(response.logprobs, expected, strict=True))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
async def test_logprobs_are_those_of_the_tempered_distribution_that_was_sampled(
    swapper: Swapper, policies: list[Policy], temperature: float
) -> None:
    await become(swapper, 1)
    sampling = Sampling(n=3, max_tokens=24, temperature=temperature)
    generation = await swapper.engine.generate(f"t{temperature}", PROMPT, sampling)
    assert len(generation.responses) == 3
    for response in generation.responses:
        assert response.policy_spans == [(0, 1)]
        assert difference(policies[0], PROMPT, response, temperature) < CLOSE


async def test_greedy_logprobs_are_the_policys_own_also_beside_sampled_requests(
    swapper: Swapper, policies: list[Policy]
) -> None:
    await become(swapper, 1)
    greedy = Sampling(max_tokens=24, temperature=0)
    answers = await asyncio.gather(
        *(
            swapper.engine.generate(f"g{i}", PROMPT, greedy if i % 2 else Sampling(max_tokens=24, temperature=0.6))
            for i in range(8)
        )
    )
    for i, answer in enumerate(answers):
        assert difference(policies[0], PROMPT, answer.responses[0], 1.0 if i % 2 else 0.6) < CLOSE
    assert len({tuple(answer.responses[0].token_ids) for answer in answers[1::2]}) == 1


async def test_top_p_and_top_k_logprobs_are_of_the_cut_distribution(swapper: Swapper, policies: list[Policy]) -> None:
    await become(swapper, 1)
    answer = await swapper.engine.generate("k", PROMPT, Sampling(max_tokens=16, temperature=0.8, top_k=5))
    response = answer.responses[0]
    model = reference_model(policies[0].path)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + response.token_ids])).logits[0, len(PROMPT) - 1 : -1] / 0.8
    kept = logits.masked_fill(logits < logits.topk(5).values[:, -1:], float("-inf")).log_softmax(-1)
    for i, token in enumerate(response.token_ids):
        assert response.logprobs[i] == pytest.approx(kept[i, token].item(), abs=CLOSE)


async def test_a_swap_makes_the_engine_the_new_policy_tied_head_and_all(
    swapper: Swapper, policies: list[Policy]
) -> None:
    for version in (2, 3, 1):
        await become(swapper, version)
        answer = await swapper.engine.generate(f"s{version}", PROMPT, Sampling(n=2, max_tokens=24))
        for response in answer.responses:
            assert response.policy_spans == [(0, version)]
            assert difference(policies[version - 1], PROMPT, response) < CLOSE


async def test_a_prefix_cached_under_one_policy_is_not_used_under_another(
    swapper: Swapper, policies: list[Policy]
) -> None:
    prompt = list(b"a prompt of more than one cache block " * 5)[:180]
    for version in (1, 2, 1):
        await become(swapper, version)
        for i in range(2):  # the second one finds the first one's blocks
            answer = await swapper.engine.generate(f"p{version}{i}", prompt, Sampling(max_tokens=8))
            assert difference(policies[version - 1], prompt, answer.responses[0]) < CLOSE


async def test_a_request_that_names_an_older_load_after_a_swap_uses_nothing_that_was_cached_under_it(
    swapper: Swapper, policies: list[Policy]
) -> None:
    """As one does that another API process sent before it had heard of the swap."""
    engine, prompt = swapper.engine, list(b"a prompt of more than one cache block " * 5)[:180]
    await become(swapper, 1)
    await engine.generate("before", prompt, Sampling(max_tokens=8))
    older = engine.answering()
    await become(swapper, 2)
    newer = engine.answering()
    engine.loaded[2] = replace(newer, salt=older.salt)
    try:
        for i in range(2):
            answer = await engine.generate(f"late {i}", prompt, Sampling(max_tokens=8))
            assert answer.responses[0].policy_spans == [(0, 2)]
            assert difference(policies[1], prompt, answer.responses[0]) < CLOSE
    finally:
        engine.loaded[2] = newer


async def test_the_same_seed_samples_the_same_response(swapper: Swapper) -> None:
    one, two, other = [
        (await swapper.engine.generate(f"seed{i}", PROMPT, Sampling(max_tokens=20, seed=seed))).responses[0]
        for i, seed in enumerate((5, 5, 6))
    ]
    assert one.token_ids == two.token_ids != other.token_ids


async def test_seeded_prompts_of_more_tokens_than_a_step_together_are_answered_as_alone(swapper: Swapper) -> None:
    async def ask(name: str, seed: int) -> list[int]:
        prompt = [seed % 90 + 2, *range(2, 92)]
        return (await swapper.engine.generate(name, prompt, Sampling(max_tokens=3, seed=seed))).responses[0].token_ids

    alone = [await ask(f"alone{seed}", seed) for seed in (0, 63)]
    together = await asyncio.gather(*(ask(f"together{seed}", seed) for seed in range(64)))
    assert 64 * 91 > 2048, "vLLM's default"
    assert [together[0], together[63]] == alone


async def test_text_is_the_tokens_without_the_one_that_ended_it(swapper: Swapper) -> None:
    tokenizer = swapper.engine.text.tokenizer
    ended = False
    for i in range(40):
        answer = await swapper.engine.generate(f"e{i}", PROMPT, Sampling(n=4, max_tokens=100, temperature=1.5, seed=i))
        for response in answer.responses:
            assert response.finish_reason == ("stop" if response.token_ids[-1] == 1 else "length")
            assert response.text == tokenizer.decode(response.token_ids, skip_special_tokens=True)
            ended = ended or response.finish_reason == "stop"
        if ended:
            return
    pytest.fail("no response of 160 ended by itself")


async def test_a_stop_text_ends_the_response_before_it(swapper: Swapper) -> None:
    greedy = Sampling(max_tokens=60, temperature=0)
    free = (await swapper.engine.generate("f", PROMPT, greedy)).responses[0]
    decode = swapper.engine.text.tokenizer.decode
    at = next(i for i, token in enumerate(free.token_ids) if i > 2 and decode([token]).isalnum())
    stop = decode([free.token_ids[at]])
    at = next(i for i, token in enumerate(free.token_ids) if decode([token]) == stop)
    cut = (await swapper.engine.generate("st", PROMPT, replace(greedy, stop=(stop,)))).responses[0]
    assert cut.finish_reason == "stop"
    assert cut.token_ids == free.token_ids[: at + 1]
    assert len(cut.logprobs) == len(cut.token_ids)
    assert stop not in cut.text


async def test_an_aborted_request_returns_what_it_has(swapper: Swapper, policies: list[Policy]) -> None:
    await become(swapper, 1)
    work = asyncio.create_task(swapper.engine.generate("a", PROMPT, Sampling(n=2, max_tokens=220, temperature=0.01)))
    await asyncio.sleep(0.05)
    await swapper.engine.abort("a")
    answer = await asyncio.wait_for(work, 120)
    for response in answer.responses:
        assert response.finish_reason in ("abort", "stop")
        assert len(response.logprobs) == len(response.token_ids) < 220
    assert swapper.engine.in_flight == 0


async def test_requests_in_flight_go_on_under_the_new_policy_and_every_token_says_which(
    swapper: Swapper, policies: list[Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    await become(swapper, 1)
    monkeypatch.setattr(swapper, "config", SwapConfig(recompute=True))
    sampling = Sampling(max_tokens=200, temperature=1.0)
    answers = []
    swapped = False

    async def client(name: str) -> None:
        turn = 0
        while not swapped:
            turn += 1
            answers.append(await swapper.engine.generate(f"{name}.{turn}", PROMPT, sampling))

    clients = [asyncio.create_task(client(f"w{i}")) for i in range(24)]
    while len(answers) < 24:  # by then some are at their beginning, some at their end
        await asyncio.sleep(0.005)
    await become(swapper, 2)
    swapped = True
    await asyncio.wait_for(asyncio.gather(*clients), 60)
    crossed = [a.responses[0] for a in answers if len(a.responses[0].policy_spans) == 2]
    assert crossed
    for response in crossed[:8]:
        (first, old), (start, new) = response.policy_spans
        assert (first, old, new) == (0, 1, 2)
        before = reference_logprobs(policies[0].path, PROMPT, response.token_ids)[:start]
        after = reference_logprobs(policies[1].path, PROMPT, response.token_ids)[start:]
        for made, expected in zip(response.logprobs, before + after, strict=True):
            assert made == pytest.approx(expected, abs=CLOSE)


@pytest.mark.parametrize("at", ["before", "within", "behind", "label"])
async def test_a_load_that_fails_in_the_middle_puts_the_old_weights_back(
    swapper: Swapper, policies: list[Policy], monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    await become(swapper, 1)
    monkeypatch.setattr(swapper, "config", SwapConfig(in_place=True))
    llm = swapper.engine._llm
    assert llm is not None
    name = "update_weight_version" if at == "label" else "collective_rpc"
    original = getattr(llm, name)
    failures = [RuntimeError("torn")]

    async def fail_once(call: str, **options: Any) -> object:
        if not failures or (at != "label" and call != "millrace_load"):
            return await original(call, **options)
        error = failures.pop()
        if at == "within":
            folder, files = options["args"]
            await original(call, args=(folder, {name: file | {"fingerprint": []} for name, file in files.items()}))
        if at != "before":
            await original(call, **options)
        raise error

    monkeypatch.setattr(llm, name, fail_once)
    work = asyncio.create_task(swapper.engine.generate("through", PROMPT, Sampling(max_tokens=60)))
    pointer = swapper.store.serving()
    assert pointer is not None
    swap = await swapper.swap_to(swapper.store.promote(2, expected=pointer.version, who="test", why="test"))
    assert not swap.ok
    assert ("was changed after it was verified" if at == "within" else "torn") in (swap.error or "")
    assert swapper.broken is None
    assert swapper.engine.version == 1
    monkeypatch.undo()
    for response in (await work).responses + (
        await swapper.engine.generate("after", PROMPT, Sampling(max_tokens=20))
    ).responses:
        assert {version for _, version in response.policy_spans} == {1}
        assert difference(policies[0], PROMPT, response) < CLOSE
    swapper.store.promote(1, expected=2, who="test", why="back")
    await become(swapper, 3)
    answer = await swapper.engine.generate("later", PROMPT, Sampling(max_tokens=20))
    assert difference(policies[2], PROMPT, answer.responses[0]) < CLOSE


async def test_vllm_s_own_refusal_is_reported(swapper: Swapper) -> None:
    with pytest.raises(EngineRefused):
        await swapper.engine.generate("long", [5] * 300, Sampling(max_tokens=2))
    several_greedy = Sampling(n=2, temperature=0, max_tokens=2)
    with pytest.raises(EngineRefused):
        await swapper.engine.generate("same", PROMPT, several_greedy)
    with pytest.raises(EngineRefused):
        async for _ in swapper.engine.stream("same", PROMPT, several_greedy, GenerationProgress(2)):
            pass


async def test_an_idle_engine_takes_next_to_no_processor_time(swapper: Swapper) -> None:
    await swapper.engine.generate("busy", PROMPT, Sampling(max_tokens=4))
    await asyncio.sleep(0.2)

    def ticks() -> int:
        total = 0
        for process in swapper.engine.processes:
            fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
            total += int(fields[11]) + int(fields[12])
        return total

    before = ticks()
    await asyncio.sleep(2)
    assert (ticks() - before) / os.sysconf("SC_CLK_TCK") < 0.3  # a loop that polls would take 2 s
