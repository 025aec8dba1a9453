"""Policies that are adapters of one base, in one engine: swaps between them, and several that answer at once."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

import serve.vllm.engine as engine_module
from loadtests.bench_swap import LETTERS, make_model
from serve.config import EngineConfig, SwapConfig
from serve.engine import EngineError
from serve.generation.request import GenerationProgress
from serve.policies import probe
from serve.policies.store import Policy, PolicyStore
from serve.policies.whole_policies import whole
from serve.swap.swapper import StaleWeights, Swapper
from serve.vllm.engine import Engine, Generated, Generation, Sampling
from tests.serve.adapter_policies import make_adapter, publish_adapter
from tests.serve.conftest import reference_logprobs
from tests.serve.experiment_records import experiment_record
from tests.serve.vllm.test_weight_update import PROMPT, SIZE, become, swap, swapper_on

CLOSE = 5e-4
ROOM = EngineConfig.model_validate(
    {"kv_cache_bytes": 64 << 20, "threads": 1, "max_model_len": 512, "adapters": {"count": 2, "rank": 8}}
)


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Policy]:
    """1: whole; 2, 3, 4: adapters of it; 5: whole, of other letters; 6: an adapter of 1 of a larger rank."""
    root = tmp_path_factory.mktemp("swaps")
    store = PolicyStore(root / "policies")

    def publish_whole(seed: int) -> Policy:
        made = make_model(SIZE, root / f"model-{seed}", seed=seed, letters=LETTERS[seed])
        return store.publish(made, parent=None, lineage={}, metrics={}, probe=probe.measure)

    one = publish_whole(1)
    found = [one, *(publish_adapter(store, one, root / f"adapter-{seed}", seed=seed) for seed in (2, 3, 4))]
    found += [publish_whole(2), publish_adapter(store, one, root / "adapter-6", seed=6, rank=9)]
    return {policy.version: policy for policy in found}


@pytest.fixture(scope="module")
async def started(policies: dict[int, Policy]) -> AsyncIterator[Swapper]:
    async with swapper_on(policies[1].path.parent, ROOM) as made:
        yield made


@pytest.fixture
async def swapper(started: Swapper) -> AsyncIterator[Swapper]:
    """The swapper, on policy 1 before and after."""
    yield started
    started.config = SwapConfig(poll_seconds=3600)
    started.engine.kept = frozenset()
    await started._follow_candidate(None)
    await become(started, 1)


@pytest.fixture
def tenant(swapper: Swapper, monkeypatch: pytest.MonkeyPatch) -> Swapper:
    """The swapper, with policy 4 as a tenant's own, which is not loaded yet."""
    monkeypatch.setattr(swapper, "_of_tenants", frozenset({4}))
    monkeypatch.setattr(swapper, "_loaded_for", "")
    monkeypatch.setattr(swapper.engine, "_own", frozenset({4}))
    return swapper


async def announced(swapper: Swapper, version: int) -> None:
    """A cycle has named its candidate, and what can be done of it early is done."""
    await swapper._follow_candidate(version)
    await swapper._settle_candidate(version)
    assert swapper.status()["prepared"] == version


async def without_adapters(swapper: Swapper) -> None:
    """Whatever was loaded before: other weights end all adapters."""
    for version in (5, 1):
        await become(swapper, version)
    assert swapper.engine.loaded.keys() == {1}


async def ask(swapper: Swapper, name: str, version: int | None = None, tokens: int = 24) -> Generated:
    generation = await swapper.engine.generate(name, PROMPT, Sampling(max_tokens=tokens, seed=3), version)
    return generation.responses[0]


def require_of(response: Generated, policy: Policy) -> None:
    assert response.policy_spans == [(0, policy.version)]
    expected = reference_logprobs(whole(policy).path, PROMPT, response.token_ids)
    assert list(response.logprobs) == pytest.approx(expected, abs=CLOSE)


async def test_an_adapter_serves_beside_the_weights_that_it_is_of_and_nothing_stands_still(
    swapper: Swapper, policies: dict[int, Policy]
) -> None:
    require_of(await ask(swapper, "one"), policies[1])
    for version in (2, 3, 2, 1):
        done = await swap(swapper, version)
        assert (done.ok, done.error, done.hold_ms, done.in_place) == (True, None, 0.0, False)
        assert done.probe.endswith("nats off"), "it must prove itself by the numbers in its manifest"
        assert (swapper.engine.version, swapper.engine.base, swapper.policy.version) == (version, 1, version)
        require_of(await ask(swapper, f"then {version}"), policies[version])


async def test_what_is_at_work_ends_with_the_policy_that_it_began_with(
    swapper: Swapper, policies: dict[int, Policy]
) -> None:
    ready = [await swapper.prepare(version) for version in (2, 3, 1)]
    running = [(1, asyncio.create_task(ask(swapper, "long 1", tokens=400)))]
    for prepared in ready:
        await asyncio.sleep(0.02)
        assert (await swapper.commit(prepared, 0)).ok
        version = swapper.engine.version
        running.append((version, asyncio.create_task(ask(swapper, f"long {len(running)} {version}", tokens=400))))
    await asyncio.sleep(0.02)
    assert not any(task.done() for _, task in running)
    for version, task in running:
        require_of(await task, policies[version])


async def test_several_policies_answer_at_once_in_every_form(swapper: Swapper, policies: dict[int, Policy]) -> None:
    await become(swapper, 3)
    await become(swapper, 2)
    assert swapper.engine.loaded.keys() == {1, 2, 3}
    engine, several = swapper.engine, Sampling(n=2, max_tokens=24, seed=5)

    async def streamed(version: int) -> Generation:
        underway = GenerationProgress(1)
        async for _ in engine.stream(f"stream {version}", PROMPT, Sampling(max_tokens=24, seed=4), underway, version):
            pass
        return underway.generation()

    asked = [
        (v, of(v)) for v in (1, 2, 3) for of in (streamed, lambda v: engine.generate(f"n {v}", PROMPT, several, v))
    ]
    asked += [
        (v, engine.generate(f"one {v} {i}", PROMPT, Sampling(max_tokens=24), v)) for v in (1, 2, 3) for i in (1, 2)
    ]
    found = await asyncio.gather(*(answer for _, answer in asked))
    for (version, _), generation in zip(asked, found, strict=True):
        for response in generation.responses:
            require_of(response, policies[version])
    require_of(await ask(swapper, "of none that is loaded", version=4), policies[2])


async def test_an_idle_adapter_makes_room_and_one_at_work_or_kept_does_not(
    swapper: Swapper, policies: dict[int, Policy]
) -> None:
    await become(swapper, 2)
    await become(swapper, 3)
    await become(swapper, 4)
    assert swapper.engine.loaded.keys() == {1, 3, 4}
    require_of(await ask(swapper, "four"), policies[4])
    swapper.engine.kept = frozenset({3})
    refused = await swap(swapper, 2)
    assert not refused.ok
    assert refused.error is not None
    assert "all 2 adapters of the engine are in use" in refused.error
    assert "serve.engine.adapters.count" in refused.error
    require_of(await ask(swapper, "still four"), policies[4])
    swapper.engine.kept = frozenset()
    weights = await swapper._verify(policies[2])
    running = asyncio.create_task(ask(swapper, "at work", version=3, tokens=400))
    await asyncio.sleep(0.02)
    with pytest.raises(EngineError, match="are in use"):
        await swapper.engine.put_adapter(weights, 30)
    assert not running.done()
    require_of(await running, policies[3])
    await become(swapper, 2)
    require_of(await ask(swapper, "two"), policies[2])


@pytest.mark.parametrize("way", [{}, {"in_place": True}, {"shadow_weights": True}], ids=str)
async def test_other_weights_come_when_requests_with_adapters_have_ended(
    swapper: Swapper, policies: dict[int, Policy], way: dict[str, bool]
) -> None:
    swapper.config = SwapConfig.model_validate({"poll_seconds": 3600, **way})
    await become(swapper, 2)
    prepared = await swapper.prepare(5)
    running = asyncio.create_task(ask(swapper, "at work", tokens=100))
    await asyncio.sleep(0.02)
    swapping = asyncio.create_task(swapper.commit(prepared, 0))
    await asyncio.sleep(0.02)
    late = [asyncio.create_task(ask(swapper, f"late {i}", version=2)) for i in range(3)]
    assert (await swapping).ok
    require_of(await running, policies[2])
    for task in late:
        response = await task
        require_of(response, policies[response.policy_spans[0][1]])
    assert swapper.engine.loaded.keys() == {5}
    require_of(await ask(swapper, "five"), policies[5])
    await become(swapper, 3)  # its base is not there: it comes whole
    assert (swapper.engine.base, swapper.engine.loaded.keys()) == (3, {3})
    require_of(await ask(swapper, "three"), policies[3])
    await become(swapper, 1)
    await become(swapper, 3)
    assert swapper.engine.base == 1
    require_of(await ask(swapper, "three beside one"), policies[3])


async def test_requests_with_adapters_that_do_not_end_in_time_keep_other_weights_out(
    swapper: Swapper, policies: dict[int, Policy]
) -> None:
    swapper.config = SwapConfig(poll_seconds=3600, drain_timeout_s=0.01)
    await become(swapper, 2)
    prepared = await swapper.prepare(5)
    running = asyncio.create_task(ask(swapper, "long", tokens=400))
    await asyncio.sleep(0.02)
    refused = await swapper.commit(prepared, 0)
    assert not refused.ok
    assert refused.error is not None
    assert "requests with an adapter did not end within serve.swap.drain_timeout_s" in refused.error
    require_of(await ask(swapper, "goes on"), policies[2])
    require_of(await running, policies[2])


@pytest.mark.parametrize("way", [{}, {"in_place": True}, {"shadow_weights": True}], ids=str)
async def test_what_waits_while_other_weights_are_tried_in_vain_goes_on_without_its_adapter_and_says_so(
    swapper: Swapper, policies: dict[int, Policy], monkeypatch: pytest.MonkeyPatch, way: dict[str, bool]
) -> None:
    swapper.config = SwapConfig.model_validate({"poll_seconds": 3600, **way})
    await become(swapper, 2)
    prepared = await swapper.prepare(5)
    drain, waiting = swapper.engine.drain, []

    async def drain_while_more_come(timeout_s: float) -> bool:
        drained = await drain(timeout_s)
        waiting.extend(asyncio.create_task(ask(swapper, f"waits {i}", tokens=100)) for i in range(3))
        await asyncio.sleep(0.1)
        return drained

    async def refuse(*_: object) -> str:
        raise EngineError("refused by the test")

    monkeypatch.setattr(swapper.engine, "drain", drain_while_more_come)
    monkeypatch.setattr(swapper, "_prove", refuse)
    refused = await swapper.commit(prepared, 0)
    monkeypatch.undo()
    assert refused.error is not None
    assert "refused by the test" in refused.error
    assert (swapper.engine.version, swapper.engine.base) == (2, 1)
    for task in waiting:
        response = await task
        starts, versions = zip(*response.policy_spans, strict=True)
        for start, end, version in zip(starts, (*starts[1:], None), versions, strict=True):
            expected = reference_logprobs(whole(policies[version]).path, PROMPT, response.token_ids)[start:end]
            if start == 0:  # later ones read what other weights have computed
                assert list(response.logprobs[start:end]) == pytest.approx(expected, abs=CLOSE)
        assert 2 not in versions
    require_of(await ask(swapper, "with its adapter"), policies[2])


async def test_a_candidate_that_was_prepared_early_proves_itself_before_it_answers_users_of_an_experiment(
    swapper: Swapper, policies: dict[int, Policy], tmp_path: Path
) -> None:
    store = swapper.store
    made = make_adapter(policies[1], tmp_path / "made", seed=9)
    of_another = policies[2].probe or {}
    lying = store.publish(made, parent=1, lineage={}, metrics={}, probe=lambda _: of_another, base=policies[1])
    refused = experiment_record(candidate=lying.version, unit="user")
    await without_adapters(swapper)
    await announced(swapper, lying.version)
    require_of(await ask(swapper, "early", version=lying.version), policies[1])
    store.experiments.begin(refused)
    await swapper._answer_beside(refused)
    ended = store.experiments.change(refused.number, lambda one: replace(one, state="ended"))
    assert ended.end is not None
    assert (ended.end["decision"], "nats off the manifest's numbers" in ended.end["why"]) == ("failed", True)
    assert swapper.beside is None
    require_of(await ask(swapper, "refused", version=lying.version), policies[1])

    honest = experiment_record(number=refused.number + 1, candidate=3, unit="user")
    await announced(swapper, 3)
    await swapper._answer_beside(honest)
    assert swapper.beside == honest
    await swapper._follow_candidate(None)
    require_of(await ask(swapper, "drawn", version=3), policies[3])
    await swapper._answer_beside(None)


async def test_the_adapter_of_a_candidate_that_is_announced_no_more_gives_its_place_back(
    swapper: Swapper, policies: dict[int, Policy]
) -> None:
    await without_adapters(swapper)
    await become(swapper, 2)
    await announced(swapper, 3)
    await swapper._follow_candidate(None)
    assert (swapper.engine.loaded.keys(), swapper.engine.trial) == ({1, 2}, {})
    swapper.engine.kept = frozenset({2})
    await become(swapper, 4)  # in the second of two places
    require_of(await ask(swapper, "four"), policies[4])


async def test_a_candidate_that_had_to_make_room_serves_though_its_files_have_got_links_meanwhile(
    swapper: Swapper, policies: dict[int, Policy], tmp_path: Path
) -> None:
    await without_adapters(swapper)
    await announced(swapper, 2)
    for version in (3, 4):
        assert await swapper._load_beside(version) is None
    assert not swapper.engine.holds(2)
    (path,) = policies[2].weight_files
    os.link(path, tmp_path / path.name)
    done = await swap(swapper, 2)
    assert done.ok, done.error
    require_of(await ask(swapper, "two"), policies[2])


@pytest.mark.parametrize("step", ["prepare", "prove"])
async def test_an_adapter_of_which_the_engine_says_nothing_in_time_answers_nobody_and_holds_no_place(
    swapper: Swapper, policies: dict[int, Policy], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    await without_adapters(swapper)
    prepared = await swapper.prepare(2) if step == "prove" else None
    (engine,) = map(psutil.Process, swapper.engine.processes)
    next_logprobs = swapper.engine.next_logprobs

    async def stand_still(*arguments: Any) -> list[float]:
        engine.suspend()
        try:
            return await next_logprobs(*arguments)
        finally:
            engine.resume()

    swapper.config = SwapConfig(poll_seconds=3600, hold_timeout_s=0.5)
    with monkeypatch.context() as late:
        late.setattr(swapper.engine, "next_logprobs", stand_still)
        if prepared is None:
            with pytest.raises(TimeoutError):
                await swapper.prepare(2)
        else:
            refused = await swapper.commit(prepared, 0)
            assert not refused.ok
            assert "the engine did not answer in time" in (refused.error or "")
    assert (swapper.engine.loaded.keys(), swapper.engine.trial) == ({1}, {})
    require_of(await ask(swapper, "refused", version=2), policies[1])
    swapper.config = SwapConfig(poll_seconds=3600)
    for version in (3, 4, 2):
        await become(swapper, version)
        require_of(await ask(swapper, f"serves {version}"), policies[version])


async def test_the_adapter_that_served_comes_back_though_its_file_has_got_links_since(
    swapper: Swapper, policies: dict[int, Policy], tmp_path: Path
) -> None:
    store, of_another = swapper.store, policies[1].probe or {}
    lying = store.publish(policies[5].path, parent=1, lineage={}, metrics={}, probe=lambda _: of_another)
    await become(swapper, 2)
    (path,) = policies[2].weight_files
    os.link(path, tmp_path / path.name)
    refused = await swap(swapper, lying.version)
    assert "is not what serves" in (refused.error or "")
    assert swapper.broken is None
    require_of(await ask(swapper, "two again"), policies[2])


async def test_tenants_get_their_policies_back_with_the_weights_that_these_are_of(
    tenant: Swapper, policies: dict[int, Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    swapper, engine = tenant, tenant.engine
    monkeypatch.setattr(swapper, "config", SwapConfig(poll_seconds=0.05))
    following = asyncio.create_task(swapper._follow())
    store = swapper.store

    async def loaded(serving: int, own: bool) -> None:
        async with asyncio.timeout(60):
            while engine.version != serving or (4 in engine.loaded) != own:
                await asyncio.sleep(0.05)

    try:
        await loaded(1, own=True)
        require_of(await ask(swapper, "tenant", version=4), policies[4])
        store.promote(5, expected=1, who="test", why="other weights")
        await loaded(5, own=False)
        with pytest.raises(EngineError, match="policy 4 is not loaded"):
            await ask(swapper, "not by another", version=4)
        store.promote(1, expected=5, who="test", why="back")
        await loaded(1, own=True)
        prove = swapper._prove

        async def refuse(prepared: object, version: int | None = None) -> str:
            if engine.base == 5:
                raise EngineError("refused by the test")
            return await prove(prepared, version)  # type: ignore[arg-type]

        monkeypatch.setattr(swapper, "_prove", refuse)
        store.promote(5, expected=1, who="test", why="again")
        async with asyncio.timeout(60):
            while swapper.failed is None:
                await asyncio.sleep(0.05)
        await loaded(1, own=True)
        require_of(await ask(swapper, "tenant again", version=4), policies[4])
    finally:
        following.cancel()
        await asyncio.wait({following})


async def test_a_tenants_policy_answers_nothing_before_it_has_proved_itself(
    tenant: Swapper, policies: dict[int, Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    swapper, engine = tenant, tenant.engine

    for version in (5, 1):  # whatever was loaded before
        await become(swapper, version)

    async def refuse(*_: object) -> str:
        assert 4 not in engine.loaded
        raise EngineError("refused by the test")

    with monkeypatch.context() as refusing:
        refusing.setattr(swapper, "_prove", refuse)
        await swapper._load_for_tenants()
    assert not swapper._tenants_due(), "it is not tried at every turn"
    with pytest.raises(EngineError, match="policy 4 is not loaded"):
        await ask(swapper, "refused", version=4)
    for version in (2, 3, 2):  # it holds no place
        await become(swapper, version)
    await swapper._load_for_tenants()
    require_of(await ask(swapper, "proved", version=4), policies[4])


async def test_an_adapter_that_fails_its_proof_answers_nobody_nor_does_it_answer_its_tenants_any_more(
    tenant: Swapper, policies: dict[int, Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    swapper, engine = tenant, tenant.engine

    async def refuse(*_: object) -> str:
        assert engine.version == 1, "it serves before it has proved itself"
        raise StaleWeights("refused by the test")

    for loaded in (False, True):
        if loaded:
            await swapper._load_for_tenants()
        running = [asyncio.create_task(ask(swapper, f"long {i}", version=4, tokens=400)) for i in range(loaded)]
        await asyncio.sleep(0.02)
        with monkeypatch.context() as refusing:
            refusing.setattr(swapper, "_prove", refuse)
            for version in (4, 2):
                done = await swap(swapper, version)
                assert done.error is not None
                assert "refused by the test" in done.error
        assert engine.loaded.keys() == {1}
        assert swapper._tenants_due()
        with pytest.raises(EngineError, match="policy 4 is not loaded"):
            await ask(swapper, "of a tenant", version=4)
        for task in running:
            require_of(await task, policies[4])
    await asyncio.sleep(0.2)
    for version in (2, 3, 2):  # it holds no place
        await become(swapper, version)
    await swapper._load_for_tenants()
    require_of(await ask(swapper, "proved anew", version=4), policies[4])


@pytest.mark.parametrize(("own", "serves"), [(4, 1), (4, 4), (1, 1), (1, 2)])
async def test_requests_of_tenants_end_before_other_weights_come(
    tenant: Swapper, policies: dict[int, Policy], monkeypatch: pytest.MonkeyPatch, own: int, serves: int
) -> None:
    """Also where the policy that is a tenant's serves others too, or is the base."""
    swapper = tenant
    monkeypatch.setattr(swapper, "_of_tenants", frozenset({own}))
    monkeypatch.setattr(swapper.engine, "_own", frozenset({own}))
    await swapper._load_for_tenants()
    await become(swapper, serves)
    prepared = await swapper.prepare(5)
    waiting = [asyncio.create_task(ask(swapper, f"of a tenant {i}", version=own)) for i in range(300)]
    others = [asyncio.create_task(ask(swapper, f"of another {i}")) for i in range(10)]
    await asyncio.sleep(0)  # more than the engine takes at once
    done = await swapper.commit(prepared, 0)
    assert done.ok, done.error
    for task in waiting:
        assert (await task).policy_spans == [(0, own)]
    for task in others:
        assert {version for _, version in (await task).policy_spans} <= {serves, 5}
    with pytest.raises(EngineError, match=f"policy {own} is not loaded"):
        await ask(swapper, "late", version=own)


async def test_a_request_of_a_tenant_that_is_sent_too_late_for_its_policy_is_refused(
    tenant: Swapper, policies: dict[int, Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    swapper, engine = tenant, tenant.engine
    for way in (1, 4):  # beside the base, and as what serves
        await swapper._load_for_tenants()
        await become(swapper, way)
        late = engine.answering(4)
        await become(swapper, 5)
        with monkeypatch.context() as captured:
            captured.setattr(engine, "answering", lambda version=None, late=late: late)
            for form in (Sampling(max_tokens=8), Sampling(n=2, max_tokens=8), Sampling(max_tokens=8, stop=("none",))):
                with pytest.raises(EngineError, match="policy 4 is not loaded any more"):
                    await asyncio.wait_for(engine.generate(f"late {way} {form}", PROMPT, form, 4), 60)
                pieces = engine.stream(f"streams {way} {form}", PROMPT, form, GenerationProgress(form.n), 4)
                with pytest.raises(EngineError, match="policy 4 is not loaded any more"):
                    await asyncio.wait_for(anext(pieces), 60)  # type: ignore[arg-type]
        require_of(await ask(swapper, f"five {way}"), policies[5])
        await become(swapper, 1)


async def test_an_adapter_that_nobody_waits_for_any_more_takes_no_place(
    swapper: Swapper, policies: dict[int, Policy]
) -> None:
    (engine,) = map(psutil.Process, swapper.engine.processes)
    weights = (await swapper.prepare(2)).weights
    await become(swapper, 5)
    await become(swapper, 1)
    engine.suspend()
    try:
        putting = asyncio.create_task(swapper.engine.put_adapter(weights, 60))
        await asyncio.sleep(0.2)
        putting.cancel()
        await asyncio.wait({putting})
    finally:
        engine.resume()
    assert putting.cancelled()
    for version in (3, 4, 2):
        await become(swapper, version)
        require_of(await ask(swapper, f"serves {version}"), policies[version])


async def test_an_engine_that_is_late_to_end_adapters_goes_on_with_them(
    swapper: Swapper, policies: dict[int, Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    swapper.config = SwapConfig(poll_seconds=3600)
    await become(swapper, 2)
    prepared = await swapper.prepare(5)
    monkeypatch.setattr(engine_module, "_CALL_TIMEOUT_S", 0.5)
    (engine,) = map(psutil.Process, swapper.engine.processes)
    drain = swapper.engine.drain

    async def drain_and_stand_still(timeout_s: float) -> bool:
        drained = await drain(timeout_s)
        engine.suspend()
        return drained

    monkeypatch.setattr(swapper.engine, "drain", drain_and_stand_still)
    swapper.config = SwapConfig(poll_seconds=3600, drain_timeout_s=0.5)
    try:
        swapping = asyncio.create_task(swapper.commit(prepared, 0))
        await asyncio.sleep(0.2)
        waiting = asyncio.create_task(ask(swapper, "sent while it stood still"))
        refused = await swapping
    finally:
        engine.resume()
    assert not refused.ok
    require_of(await asyncio.wait_for(waiting, 60), policies[2])
    require_of(await asyncio.wait_for(ask(swapper, "goes on"), 60), policies[2])
    monkeypatch.undo()
    await become(swapper, 5)
    require_of(await ask(swapper, "five"), policies[5])


async def test_an_adapter_of_a_larger_rank_than_there_is_room_for_is_served_merged(
    swapper: Swapper, policies: dict[int, Policy]
) -> None:
    await become(swapper, 6)
    assert swapper.engine.base == 6
    require_of(await ask(swapper, "six"), policies[6])


async def test_a_damaged_adapter_is_refused_by_its_file(
    swapper: Swapper, policies: dict[int, Policy], tmp_path: Path
) -> None:
    damaged = publish_adapter(swapper.store, policies[1], tmp_path / "damaged", seed=9)
    with damaged.weight_files[0].open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"\0\0\0\1")
    refused = await swap(swapper, damaged.version)
    assert not refused.ok
    assert f"policy {damaged.version}: adapter_model.safetensors has sha256" in (refused.error or "")
    require_of(await ask(swapper, "one"), policies[1])


@pytest.mark.parametrize("room", [True, False], ids=["with room", "without"])
async def test_a_server_starts_on_an_adapter(policies: dict[int, Policy], room: bool, tmp_path: Path) -> None:
    store = PolicyStore(policies[1].path.parent)
    pointer = store.serving()
    store.promote(3, expected=pointer.version if pointer else None, who="test", why="test")
    engine = Engine(ROOM if room else ROOM.model_copy(update={"adapters": None}))
    swapper = Swapper(store, engine, SwapConfig(poll_seconds=3600), tmp_path / "swaps.jsonl")
    try:
        await swapper.start()
        assert (engine.version, engine.base) == ((3, 1) if room else (3, 3))
        require_of(await ask(swapper, "three"), policies[3])
        await become(swapper, 2)
        assert engine.base == (1 if room else 2)
        require_of(await ask(swapper, "two"), policies[2])
    finally:
        await swapper.close()
        await engine.close()


async def test_what_gave_way_to_others_goes_on_without_its_adapter_under_other_weights(
    policies: dict[int, Policy],
) -> None:
    config = json.loads((policies[1].path / "config.json").read_text())
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    token = 2 * 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * head  # float32
    # Five blocks of 128 tokens, one of which vLLM keeps for itself: two responses can't end beside each other.
    room = ROOM.model_copy(update={"kv_cache_bytes": 640 * token, "max_model_len": 416})
    async with swapper_on(policies[1].path.parent, room) as swapper:
        await become(swapper, 2)
        prepared = await swapper.prepare(5)
        running = [asyncio.create_task(ask(swapper, f"long {i}", tokens=400)) for i in range(3)]
        await ask(swapper, "behind them", tokens=2)
        done = await swapper.commit(prepared, 0)
        assert done.ok, done.error
        went_on = 0
        for task in running:
            response = await task
            expected = {v: reference_logprobs(whole(policies[v]).path, PROMPT, response.token_ids) for v in (2, 5)}
            starts, versions = zip(*response.policy_spans, strict=True)
            assert set(versions) <= {2, 5}, versions
            went_on += versions == (2, 5)
            for start, end, version in zip(starts, (*starts[1:], None), versions, strict=True):
                # What gave way computes all that it has anew, by the weights that are there when it goes on.
                assert list(response.logprobs[start:end]) == pytest.approx(expected[version][start:end], abs=CLOSE)
        assert went_on
        for version in (1, 2, 3, 4):
            await become(swapper, version)
            require_of(await ask(swapper, f"then {version}"), policies[version])
