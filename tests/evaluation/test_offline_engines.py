"""One engine for all policies of an evaluation: what each answers is what it answers in an engine of its own."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from evaluation.config import EngineConfig
from evaluation.engine import Done, EngineError, LentEngine, OfflineEngine, OfflineEngines, Work
from evaluation.suites.suite import Suite
from serve.policies.store import Policy, PolicyStore
from serve.vllm.boot import sampling_params
from tests.evaluation.conftest import MIB, write_policy

CONFIG = EngineConfig(max_num_seqs=64, kv_cache_bytes=8 * MIB)
TOKENS = 24


def publish(root: Path, seed: int, stored: torch.dtype = torch.float32, **config: object) -> Policy:
    def write(folder: Path) -> None:
        write_policy(folder, seed)
        weights = {name: tensor.to(stored) for name, tensor in load_file(folder / "model.safetensors").items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        settings = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(
            json.dumps(settings | {"dtype": str(stored).removeprefix("torch.")} | config)
        )

    return PolicyStore(root).publish(write, parent=None, lineage={}, metrics={})


def do_all(engine: OfflineEngine, suite: Suite) -> Done:
    prompts = engine.encode([item.text_or_messages for item in suite.items[:16]])
    scored = [(ids, [5, 6, 7]) for ids in prompts]
    return engine.run(
        Work(greedy=prompts, sampled=[(ids, 3 + i) for i, ids in enumerate(prompts)], scored=scored), max_tokens=TOKENS
    )


def same(a: Done, b: Done) -> bool:
    texts = all(
        (one.text, one.token_ids, one.finish_reason) == (other.text, other.token_ids, other.finish_reason)
        and np.array_equal(one.logprobs, other.logprobs)
        for one, other in zip([*a.greedy, *a.sampled], [*b.greedy, *b.sampled], strict=True)
    )
    return texts and all(np.array_equal(one, other) for one, other in zip(a.scored, b.scored, strict=True))


@pytest.mark.parametrize("stored", [pytest.param(torch.float32, marks=pytest.mark.long), torch.bfloat16], ids=str)
def test_other_weights_in_the_same_engine_answer_bit_for_bit_as_in_one_of_their_own(
    tmp_path: Path, suite: Suite, stored: torch.dtype
) -> None:
    policies = [publish(tmp_path, seed, stored) for seed in (7, 8)]
    with OfflineEngines(CONFIG) as engines:
        first = engines.of(policies[0])
        found = [do_all(engines.of(policy), suite) for policy in (*policies, policies[0])]
        assert engines.of(policies[0]) is first
        core = first._llm.llm_engine
        core.add_request("unfinished", {"prompt_token_ids": [5, 6, 7]}, sampling_params(max_tokens=8))
        core.step()  # its blocks are in use, so the cache can't be emptied
        with pytest.raises(EngineError, match="kept its cache of prefixes"):
            first.load(policies[1])
    for policy, one in zip(policies, found, strict=False):
        with OfflineEngine(policy.path, CONFIG) as engine:
            assert same(one, do_all(engine, suite))
    assert same(found[0], found[2])
    assert not same(found[0], found[1])


def test_a_policy_that_differs_in_more_than_weights_or_can_t_be_loaded_gets_an_engine_of_its_own(
    tmp_path: Path, suite: Suite, caplog: pytest.LogCaptureFixture
) -> None:
    plain, other, damaged = publish(tmp_path, 7), publish(tmp_path, 7, rms_norm_eps=0.5), publish(tmp_path, 8)
    path = damaged.weight_files[0]
    weights = load_file(path)
    with OfflineEngines(CONFIG) as engines:
        first = engines.of(plain)
        answers = do_all(first, suite)
        second = engines.of(other)
        assert second is not first
        assert not same(do_all(second, suite), answers)
        third = engines.of(plain)
        del weights["model.norm.weight"]
        save_file(weights, path, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=r"model\.norm\.weight"):
            engines.of(damaged)
        assert same(do_all(engines.of(plain), suite), answers)
        assert engines.of(plain) is not third


@pytest.mark.parametrize(
    ("answer", "waits"),
    [(None, False), (("error", "WorkerError: the rollout worker was killed"), False), (None, True)],
    ids=["ends", "fails", "hangs"],
)
def test_an_evaluation_goes_on_in_an_engine_of_its_own_where_the_resident_workers_die(
    tmp_path: Path,
    suite: Suite,
    answer: tuple[str, str] | None,
    waits: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = publish(tmp_path, 7)
    ours, theirs = Pipe()
    if waits:
        monkeypatch.setattr("evaluation.engine._SILENT_S", 0.1)

    def lend_and_die() -> None:
        with theirs:
            theirs.recv()
            if waits:
                with suppress(EOFError):  # raised when who asked has hung up
                    theirs.recv()
            if answer is not None:
                theirs.send(answer)

    lender = threading.Thread(target=lend_and_die)
    lender.start()
    with LentEngine._of(ours, policy, CONFIG) as lent, OfflineEngine(policy.path, CONFIG) as own:
        assert same(do_all(lent, suite), do_all(own, suite))
        assert lent.where == "own"
    lender.join(120)
    assert "goes on in an engine of its own" in caplog.text
