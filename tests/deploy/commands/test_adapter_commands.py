"""Policies that are adapters, from the command line: how they are listed and written as one model, and experiments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from deploy.cli import run
from deploy.config.root import load
from deploy.loop.experiments import Controller
from loadtests.tiny_model import make_model_folder
from serve.policies.folder import sha256_file
from serve.policies.store import PolicyStore
from serve.policies.whole_policies import whole
from tests.serve.adapter_policies import make_adapter


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PolicyStore:
    """1: whole; 2 and 3: adapters of it; 4: whole; 5: an adapter of 4."""
    monkeypatch.chdir(tmp_path)
    made = PolicyStore(tmp_path / "home" / "policies")
    for seed in (1, 4):
        base = made.publish(make_model_folder(tmp_path / f"base-{seed}", seed), parent=None, lineage={}, metrics={})
        for rank in (2, 4) if seed == 1 else (2,):
            folder = make_adapter(base, tmp_path / f"adapter-{seed}-{rank}", seed=rank, rank=rank)
            made.publish(folder, parent=base.version, lineage={}, metrics={}, base=base)
    made.promote(2, expected=None, who="t", why="t")
    return made


def test_an_adapter_is_listed_with_its_base_and_exported_merged(
    store: PolicyStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["policies"]) == 0
    assert "adapter of 4" in capsys.readouterr().out
    assert run(["policies", "--json"]) == 0
    bases = [policy["base"] and policy["base"]["version"] for policy in json.loads(capsys.readouterr().out)]
    assert sorted(bases, key=str) == [1, 1, 4, None, None]
    assert run(["policies", "export", "2", "out"]) == 0
    assert "policy 2 is in out" in capsys.readouterr().out
    made = whole(store.get(2))
    assert {path.name: sha256_file(path) for path in (tmp_path / "out").iterdir()} == {
        name: file["sha256"] for name, file in made.files.items()
    }
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert run(["policies", "export", "1", "out"]) == 2
    assert "out is not empty" in capsys.readouterr().err


def test_an_experiment_draws_for_users_where_one_engine_has_both_policies(store: PolicyStore) -> None:
    def unit(candidate: int, control: int, **room: int) -> str:
        pairs = [(f"serve.engine.adapters.{name}", str(value)) for name, value in room.items()]
        return Controller(load(None, pairs, environment={}))._unit(candidate, control)

    assert unit(3, 2) == "block", "there is no room for adapters"
    assert unit(3, 2, count=2, rank=4) == "user"
    assert unit(3, 1, count=1, rank=4) == "user"
    assert unit(3, 2, count=1, rank=4) == "block"
    assert unit(3, 2, count=2, rank=3) == "block"
    assert unit(5, 2, count=2, rank=4) == "block"
    assert unit(4, 2, count=2, rank=4) == "block"
