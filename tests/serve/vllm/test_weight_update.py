"""Swaps of one engine: what is exchanged, what is proven, what is put back."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from loadtests.bench_swap import LETTERS, Size, make_model
from serve.config import EngineConfig, SwapConfig
from serve.engine import EngineError
from serve.policies import probe
from serve.policies.store import Policy, PolicyStore
from serve.swap.swapper import Swap, Swapper
from serve.swap.verification import verify
from serve.vllm.engine import Engine, Generated, Sampling
from tests.serve.conftest import reference_logprobs

PROMPT = list(b"the mill turns")
CLOSE = 1e-4
SIZE = Size("tiny", 64, 128, 2, 4, 2, 32, 258, "float32", 0, 0, 0, 20.0)
"""The make of the policies here: their head is not tied, and every token of 1 is a small letter, of 2 a capital one."""


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> list[Policy]:
    root = tmp_path_factory.mktemp("swaps")
    store = PolicyStore(root / "policies")
    return [
        store.publish(
            make_model(SIZE, root / f"model-{seed}", seed=seed, letters=letters),
            parent=None,
            lineage={},
            metrics={},
            probe=probe.measure,
        )
        for seed, letters in LETTERS.items()
    ]


@asynccontextmanager
async def swapper_on(folder: Path, config: EngineConfig) -> AsyncIterator[Swapper]:
    """One with an engine of its own, on policy 1 of the store in a folder. It follows no pointer by itself."""
    store = PolicyStore(folder)
    if store.serving() is None:
        store.promote(1, expected=None, who="test", why="test")
    engine = Engine(config)
    made = Swapper(store, engine, SwapConfig(poll_seconds=3600), store.root.parent / "swaps.jsonl")
    try:
        await made.start()
        yield made
        await made.close()
    finally:
        await engine.close()


@pytest.fixture(scope="module")
async def started(policies: list[Policy]) -> AsyncIterator[Swapper]:
    config = EngineConfig(kv_cache_bytes=64 << 20, threads=1, max_model_len=512)
    async with swapper_on(policies[0].path.parent, config) as made:
        yield made


@pytest.fixture
async def swapper(started: Swapper) -> AsyncIterator[Swapper]:
    """The swapper, with the settings as they come and on policy 1 before and after."""
    started.config = SwapConfig(poll_seconds=3600)
    yield started
    started.config = SwapConfig(poll_seconds=3600)
    await become(started, 1)
    await started.engine.release()
    started._spare = None


async def swap(swapper: Swapper, version: int) -> Swap:
    pointer = swapper.store.serving()
    assert pointer is not None
    return await swapper.swap_to(swapper.store.promote(version, expected=pointer.version, who="test", why="test"))


async def become(swapper: Swapper, version: int) -> None:
    if swapper.engine.version != version:
        done = await swap(swapper, version)
        assert done.ok, done.error


async def require_policy(swapper: Swapper, policy: Policy) -> None:
    """The engine computes what the policy's folder says."""
    answer = await swapper.engine.generate("check", PROMPT, Sampling(max_tokens=24))
    (response,) = answer.responses
    assert response.policy_spans == [(0, policy.version)]
    expected = reference_logprobs(policy.path, PROMPT, response.token_ids)
    assert list(response.logprobs) == pytest.approx(expected, abs=CLOSE)


def publish_edited(policies: list[Policy], folder: Path, **edits: torch.Tensor) -> Policy:
    """Policy 2 with other tensors, and the numbers of policy 2 in its manifest."""
    shutil.copytree(policies[1].path, folder)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | edits, folder / "model.safetensors")
    store = PolicyStore(policies[0].path.parent)
    return store.publish(folder, parent=2, lineage={}, metrics={}, probe=lambda _: policies[1].probe or {})


@pytest.mark.parametrize(
    ("way", "mode", "recompute"),
    [
        ("exchanged", "keep", False),
        ("exchanged", "keep", True),
        ("exchanged", "wait", False),
        ("shadow", "keep", False),
        ("in place", "keep", False),
        ("in place", "keep", True),
    ],
)
async def test_each_token_is_of_the_policy_that_its_label_names(
    swapper: Swapper, policies: list[Policy], way: str, mode: str, recompute: bool
) -> None:
    swapper.config = SwapConfig.model_validate(
        {"mode": mode, "recompute": recompute, "shadow_weights": way == "shadow", "in_place": way == "in place"}
    )
    stop = asyncio.Event()
    answers: list[Generated] = []

    async def ask(name: str) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            prompt = list(f"{name} asks {number}".encode())
            answer = await swapper.engine.generate(f"{name}.{number}", prompt, Sampling(n=2, max_tokens=120))
            answers.extend(answer.responses)

    askers = [asyncio.create_task(ask(f"asker {i}")) for i in range(6)]
    await asyncio.sleep(0.1)
    for version in (2, 1, 2):
        done = await swap(swapper, version)
        assert done.ok, done.error
        assert done.in_place == (way == "in place")
        assert "nats off" in done.probe
    stop.set()
    await asyncio.gather(*askers)
    vocabulary = AutoTokenizer.from_pretrained(policies[0].path).get_vocab()
    letter_of = {token: letter for letter, token in vocabulary.items()}
    for answer in answers:
        letters = [letter_of[token] for token in answer.token_ids]
        ends = [start for start, _ in answer.policy_spans[1:]] + [len(letters)]
        assert len(letters) == 120
        for (start, version), end in zip(answer.policy_spans, ends, strict=True):
            assert set(letters[start:end]) <= LETTERS[version]
    crossed = [answer for answer in answers if len(answer.policy_spans) > 1]
    assert bool(crossed) == (mode == "keep")


async def test_a_request_that_waited_since_before_a_swap_uses_no_prefix_of_the_old_policy(
    swapper: Swapper, policies: list[Policy]
) -> None:
    prompt = list(b"the same beginning of every prompt, long enough to fill a block of the cache, " * 2)
    engine, seats = swapper.engine, swapper.engine.config.max_num_seqs
    await engine.generate("first", prompt, Sampling(max_tokens=1))  # its prefix is cached under policy 1
    prepared = await swapper.prepare(2)
    seated = [
        asyncio.create_task(engine.generate(f"seated {i}", PROMPT, Sampling(max_tokens=60))) for i in range(seats)
    ]
    waiting = [asyncio.create_task(engine.generate(f"waiting {i}", prompt, Sampling(max_tokens=8))) for i in range(4)]
    await asyncio.sleep(0.05)
    done = await swapper.commit(prepared, 0)
    assert done.ok, done.error
    answers = [(await task).responses[0] for task in waiting]
    await asyncio.gather(*seated)
    for answer in answers:
        assert answer.policy_spans == [(0, 2)], "it did not wait"
        expected = reference_logprobs(policies[1].path, prompt, answer.token_ids)
        assert list(answer.logprobs) == pytest.approx(expected, abs=CLOSE)


async def test_weights_are_exchanged_whole_and_back(swapper: Swapper, policies: list[Policy]) -> None:
    for version in (2, 1, 2):
        await become(swapper, version)
        await require_policy(swapper, policies[version - 1])


async def test_a_rollback_to_weights_that_are_still_laid_out_reads_no_file(
    swapper: Swapper, policies: list[Policy]
) -> None:
    swapper.config = SwapConfig(shadow_weights=True)
    await become(swapper, 2)
    path = policies[0].path / "model.safetensors"
    content = path.read_bytes()
    try:
        path.write_bytes(content[:-64] + bytes(64))
        await become(swapper, 1)
    finally:
        path.write_bytes(content)
    await require_policy(swapper, policies[0])


@pytest.mark.parametrize("shadow_weights", [False, True])
@pytest.mark.parametrize(
    "order",
    [(2, 1, 2), (2, "as 1"), (2, "as 2"), (2, "as 1", 1, "as 1"), (2, "as 2", 2, 1), ("as 1", 1, 2, "as 1", 2)],
    ids=lambda order: " ".join(map(str, order)),
)
async def test_a_policy_serves_under_its_own_version_whatever_was_kept_from_another_with_the_same_bytes(
    swapper: Swapper, policies: list[Policy], order: tuple[int | str, ...], shadow_weights: bool
) -> None:
    versions: dict[int | str, int] = {1: 1, 2: 2}
    for number in (1, 2):
        of = policies[number - 1]
        again = swapper.store.publish(of.path, parent=number, lineage={}, metrics={}, probe=lambda _, of=of: of.probe)
        versions[f"as {number}"] = again.version
    swapper.config = SwapConfig(poll_seconds=3600, shadow_weights=shadow_weights)
    for name in order:
        version = versions[name]
        done = await swap(swapper, version)
        assert done.ok, done.error
        assert "nats off" in done.probe
        assert (done.to_version, swapper.engine.version, swapper.policy.version) == (version, version, version)
        assert swapper.status()["version"] == version
        await require_policy(swapper, swapper.store.get(version))


async def test_weights_that_are_kept_do_not_vouch_for_the_files_of_another_version(
    swapper: Swapper, policies: list[Policy]
) -> None:
    swapper.config = SwapConfig(poll_seconds=3600, shadow_weights=True)
    await become(swapper, 2)
    again = swapper.store.publish(policies[0].path, parent=2, lineage={}, metrics={})
    path = again.path / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-64] + bytes(64))
    done = await swap(swapper, again.version)
    assert not done.ok
    assert "model.safetensors has sha256" in (done.error or "")
    await require_policy(swapper, policies[1])
    swapper.store.promote(2, expected=again.version, who="test", why="back")


async def test_a_replica_that_is_to_prepare_a_policy_with_another_end_tells_why_it_can_not_and_serves_on(
    swapper: Swapper, policies: list[Policy], tmp_path: Path
) -> None:
    folder = tmp_path / "other"
    shutil.copytree(policies[1].path, folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')
    other = swapper.store.publish(folder, parent=2, lineage={}, metrics={})
    serving = swapper.store.serving()
    assert serving is not None
    await swapper._prepare_ahead(replace(serving, version=other.version, generation=serving.generation + 1))
    assert swapper.prepared is None
    assert swapper.failed is not None
    assert swapper.failed["version"] == other.version
    assert "generation_config.json has eos_token_id = [1, 7]" in swapper.failed["error"]
    assert "a fleet: all its replicas" in swapper.failed["error"]
    await require_policy(swapper, policies[0])


async def test_without_memory_for_a_second_set_the_old_policy_serves_on(
    swapper: Swapper, policies: list[Policy]
) -> None:
    swapper.config = SwapConfig(spare_bytes=1 << 50)
    done = await swap(swapper, 2)
    assert not done.ok
    assert "NotEnoughMemory" in (done.error or "")
    assert "serve.swap.in_place" in (done.error or "")
    assert done.hold_ms == 0
    await require_policy(swapper, policies[0])
    swapper.store.promote(1, expected=2, who="test", why="back")


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("tensor", ["model.layers.1.mlp.up_proj.weight", "lm_head.weight", "model.norm.weight"])
async def test_a_layer_that_stayed_behind_is_noticed_and_the_old_policy_comes_back(
    swapper: Swapper, policies: list[Policy], tmp_path: Path, tensor: str, in_place: bool
) -> None:
    old = load_file(policies[0].path / "model.safetensors")[tensor] * (0.9 if "norm" in tensor else 1)
    stale = publish_edited(policies, tmp_path / "stale", **{tensor: old})
    swapper.config = SwapConfig(in_place=in_place)
    done = await swap(swapper, stale.version)
    assert not done.ok
    assert "is not what serves" in (done.error or "")
    assert swapper.broken is None
    await require_policy(swapper, policies[0])
    swapper.store.promote(1, expected=stale.version, who="test", why="back")


async def test_a_policy_without_numbers_is_served_and_the_record_says_so(
    swapper: Swapper, policies: list[Policy]
) -> None:
    plain = swapper.store.publish(policies[1].path, parent=1, lineage={}, metrics={})
    done = await swap(swapper, plain.version)
    assert done.ok
    assert done.probe == "the policy's manifest has no numbers"


async def test_a_file_that_changes_after_it_was_verified_is_not_loaded(
    swapper: Swapper, policies: list[Policy]
) -> None:
    from serve.vllm.engine import Weights

    path = policies[1].path / "model.safetensors"
    content = path.read_bytes()
    files = await verify(swapper.store, 2, check_finite=True, timeout_s=30)
    try:
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(EngineError, match=r"model\.safetensors was changed after it was verified"):
            await swapper.engine.prepare_standby(Weights(policies[1], files), spare_bytes=0, timeout_s=30)
    finally:
        path.write_bytes(content)
    await require_policy(swapper, policies[0])


async def test_requests_that_don_t_end_in_time_go_on_under_the_new_policy(swapper: Swapper) -> None:
    swapper.config = SwapConfig(mode="wait", drain_timeout_s=0.01)
    prepared = await swapper.prepare(2)
    work = [
        asyncio.create_task(swapper.engine.generate(f"long {i}", PROMPT, Sampling(max_tokens=480))) for i in range(8)
    ]
    await asyncio.sleep(0.02)
    assert not any(task.done() for task in work)
    done = await swapper.commit(prepared, 0)
    assert done.ok, done.error
    for answer in await asyncio.gather(*work):
        assert len(answer.responses[0].token_ids) == 480


async def test_a_release_that_the_engine_answers_late_undoes_no_swap_and_ends_nothing(
    swapper: Swapper, policies: list[Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    release = swapper.engine.release

    async def late() -> None:
        await release()
        raise TimeoutError

    monkeypatch.setattr(swapper.engine, "release", late)
    done = await swap(swapper, 2)
    assert done.ok, done.error
    await require_policy(swapper, policies[1])
    swapper._ready = None, await swapper.prepare(1)
    await swapper._discard_prepared()
    await require_policy(swapper, policies[1])
    monkeypatch.undo()


def test_an_update_too_small_for_the_tolerance_must_still_bring_the_engine_nearer() -> None:
    numbers = probe.Numbers([[1]], [[1, 2]], [[-1.0, -2.0]])
    before = [[-1.003, -2.003]]
    assert probe.judge(numbers, before, [[-1.0, -2.0001]], "float32").objection is None
    assert "weights stayed behind" in (probe.judge(numbers, before, before, "float32").objection or "")
    assert "nats off" in (probe.judge(numbers, None, [[-1.1, -2.0]], "float32").objection or "")
    assert probe.judge(numbers, None, [[float("nan"), -2.0]], "bfloat16").objection is not None
    same = [[-1.0001, -2.0]]
    assert probe.judge(numbers, same, same, "float32").objection is None


async def test_where_no_second_set_is_wanted_a_candidates_files_are_verified_early_and_no_more(
    swapper: Swapper, policies: list[Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    swapper.config = SwapConfig(in_place=True)
    await swapper._prepare_candidate(2)
    states = await swapper.engine.llm.collective_rpc("millrace_standby_state")
    assert [state["error"] for state in states] == ["no standby weights are prepared"]
    await require_policy(swapper, policies[0])
    monkeypatch.setattr("serve.swap.swapper.verify", None)  # files that nobody has touched are not read again
    done = await swap(swapper, 2)
    assert (done.ok, done.in_place) == (True, True)
    await require_policy(swapper, policies[1])


async def test_weights_that_are_kept_for_a_rollback_are_kept_while_a_candidate_is_judged(
    swapper: Swapper, policies: list[Policy]
) -> None:
    swapper.config = SwapConfig(shadow_weights=True)
    await become(swapper, 2)
    assert swapper._spare is not None
    await swapper._prepare_candidate(1)
    assert (swapper._spare.policy.version, swapper.prepared) == (1, None)
    await become(swapper, 1)
    await require_policy(swapper, policies[0])


async def test_a_candidate_that_is_given_up_while_its_numbers_are_asked_for_leaves_no_weights(swapper: Swapper) -> None:
    await swapper.engine.hold(recompute=False, timeout_s=30)  # it answers nobody, and prepares weights all the same
    preparing = asyncio.create_task(swapper._prepare_candidate(2))
    states = [{"error": "none yet"}]
    while not all(state.get("done") and state["error"] is None for state in states):
        states = await swapper.engine.llm.collective_rpc("millrace_standby_state")
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.3)  # until it has seen that, and asks
    preparing.cancel()
    await asyncio.wait({preparing})
    await swapper.engine.resume(30)
    states = await swapper.engine.llm.collective_rpc("millrace_standby_state")
    assert [state["error"] for state in states] == ["no standby weights are prepared"]


@pytest.mark.parametrize("way", ["in_place", "shadow_weights"])
async def test_a_candidate_whose_files_have_got_links_since_they_were_verified_serves(
    swapper: Swapper, tmp_path: Path, way: str
) -> None:
    """As a backup by hard links makes them."""
    swapper.config = SwapConfig.model_validate({"poll_seconds": 3600, way: True})
    await become(swapper, 2)  # policy 1 is kept, if one is
    made = make_model(SIZE, tmp_path / "made", seed=3, letters=LETTERS[1])
    candidate = swapper.store.publish(made, parent=2, lineage={}, metrics={}, probe=probe.measure)
    await swapper._follow_candidate(candidate.version)
    await swapper._settle_candidate(candidate.version)
    for path in candidate.weight_files:
        os.link(path, tmp_path / path.name)
    done = await swap(swapper, candidate.version)
    assert done.ok, done.error
    assert done.in_place == (way == "in_place")
    await require_policy(swapper, candidate)


async def test_a_candidate_whose_weights_have_changed_since_they_were_verified_is_refused_and_nothing_held(
    swapper: Swapper, policies: list[Policy]
) -> None:
    swapper.config = SwapConfig(poll_seconds=3600, in_place=True)
    candidate = swapper.store.publish(policies[1].path, parent=1, lineage={}, metrics={})
    await swapper._follow_candidate(candidate.version)
    await swapper._settle_candidate(candidate.version)
    (path,) = candidate.weight_files
    path.write_bytes(path.read_bytes()[:-64] + bytes(64))
    done = await swap(swapper, candidate.version)
    assert not done.ok
    assert "model.safetensors has sha256" in (done.error or "")
    assert done.hold_ms == 0
    await require_policy(swapper, policies[0])
    swapper.store.promote(1, expected=candidate.version, who="test", why="back")
