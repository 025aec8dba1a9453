"""Models and moments that wait in the host's memory between calls, in two ranks over gloo: nothing else differs.

A CPU has one memory; what is emptied and filled again are real storages of FSDP2's shards all the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.train.ranks import run_ranks
from tests.train.tiny_models import own_part, qwen3, some_batch, whole
from train.checkpoint.folders import aside_of, begin_aside, make_whole, name_of
from train.config.training import TrainConfig
from train.controller.worker import Workers
from train.host_memory.parked import Parked
from train.model.hf_io import held
from train.model.mesh import mesh_sizes

CPU = torch.device("cpu")
STEPS = 3


def test_what_comes_back_is_what_went_away_in_the_same_tensors() -> None:
    whole_one = torch.arange(12.0)
    view, other = whole_one[3:6], torch.ones(4, dtype=torch.bfloat16)
    kept = {"whole": whole_one.clone(), "view": view.clone(), "other": other.clone()}
    parked = Parked()
    for _ in range(2):
        parked.park([whole_one, view, other], CPU)
        assert (parked.away, parked.bytes) == (True, 12 * 4 + 4 * 2)
        assert whole_one.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
        parked.park([whole_one], CPU)  # it is away
        assert parked.bytes == 56
        parked.restore()
        assert not parked.away
        for name, tensor in {"whole": whole_one, "view": view, "other": other}.items():
            assert torch.equal(tensor, kept[name]), name
    view += 1
    assert whole_one[3] == 4, "a view of the same memory, as before"


def test_the_hosts_memory_is_kept_for_the_next_time_and_forgotten_on_demand() -> None:
    tensor, parked = torch.ones(1000), Parked()
    parked.park([tensor], CPU)
    (_, first), *_ = parked._away
    parked.restore()
    parked.park([tensor], CPU)
    assert parked._away[0][1] is first
    parked.forget()
    assert (parked.away, parked._spare) == (False, {})


def test_what_is_on_another_device_and_what_is_empty_stays_where_it_is() -> None:
    parked = Parked()
    parked.park([torch.ones(3, device="meta"), torch.empty(0)], CPU)
    assert not parked.away


def test_memory_that_is_not_torchs_own_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "numbers"
    file.write_bytes(bytes(64))
    mapped = torch.from_file(str(file), size=16)
    with pytest.raises(RuntimeError, match="a tensor of 64 bytes has memory that is not torch's own to free"):
        Parked().park([mapped], CPU)


# ----------------------------------------------------------------------------------------------- in the ranks

RUNS: dict[str, dict[str, Any]] = {
    "full": {},
    "tensor-parallel": {"fsdp": {"tensor_parallel": 2}},
    "adapters": {"lora": {"rank": 4}},
    "muon": {"optimizer": {"name": "muon"}},
    "kept after forward": {"fsdp": {"reshard_after_forward": False}},
}


def in_two_ranks(rank: int, folder: Path, policy: Path) -> dict[str, Any]:
    return {
        name: {away: a_run(policy, folder / name / str(away), away, settings) for away in (False, True)}
        for name, settings in RUNS.items()
    }


def a_run(policy: Path, folder: Path, away: bool, settings: dict[str, Any]) -> dict[str, Any]:
    """Some steps with a critic and a reference beside the actor; ``away``: all of it is parked before each call."""
    known = {"ranks": 2, "dtype": "float32", "micro_batch_tokens": 64, "algorithm": {"name": "ppo"}}
    optimizer = {"learning_rate": 1e-2, "warmup_steps": 0, **settings.get("optimizer", {})}
    config = TrainConfig.model_validate({**known, **settings, "optimizer": optimizer})
    workers = Workers()
    for role, target in (
        ("actor", "train.workers.actor:ActorWorker"),
        ("reference", "train.workers.reference:ReferenceWorker"),
        ("critic", "train.workers.critic:CriticWorker"),
    ):
        workers.create(role, target, {"policy": policy, "config": config})
    batch = some_batch()
    batch = batch.select(own_part(batch, **mesh_sizes(config, 2)))
    found: dict[str, Any] = {"metrics": [], "away": []}

    def call(role: str, method: str, argument: Any = None, **options: Any) -> Any:
        if away:
            for worker in workers.by_role.values():
                worker.park()  # type: ignore[attr-defined]
            workers.call(role, "usage", None, {})  # of what reads no model it is left away
            found["away"].append([nbytes(worker) for worker in workers.by_role.values()])
        answer = workers.call(role, method, argument, options)
        assert nbytes(workers.by_role[role]) > 0 or config.lora is not None
        return answer

    for _ in range(STEPS):
        found["reference"] = call("reference", "log_probs", batch)
        values = call("critic", "values", batch)
        returns = batch.with_(values=values, returns=batch.rewards[:1].repeat(len(batch.tokens)))
        found["metrics"].append([call("critic", "update", returns), call("actor", "update", returns)])
    if torch.distributed.get_rank() == 0:
        begin_aside(folder, 1, "{}")
    torch.distributed.barrier()
    call("actor", "save_checkpoint", aside_of(folder, 1) / "actor", step=1)
    assert [saved.error for saved in workers.call("actor", "saved", True, {})] == [None]
    if torch.distributed.get_rank() == 0:
        make_whole(folder, 1)
    torch.distributed.barrier()
    actor: Any = workers.by_role["actor"]
    actor.restore()
    found["weights"] = {name: whole(tensor).clone() for name, tensor in held(actor.model)}
    call("actor", "update", returns)
    call("actor", "load_checkpoint", folder / name_of(1), part="actor")
    actor.restore()
    found["loaded"] = {name: whole(tensor).clone() for name, tensor in held(actor.model)}
    for worker in workers.by_role.values():
        worker.park()  # type: ignore[attr-defined]
    workers.rest()
    for worker in workers.by_role.values():
        worker.park()  # type: ignore[attr-defined]  # as a later run does that has no worker of its role
    found["at rest"] = [worker.weights.bytes + worker.state.bytes for worker in workers.by_role.values()]  # type: ignore[attr-defined]
    return found


def nbytes(worker: Any) -> int:
    """Of a worker's parameters and its optimizer's state, that are here."""
    tensors = [*worker.weight_tensors(), *worker.state_tensors()]
    return sum(local(tensor).untyped_storage().nbytes() for tensor in tensors)


def local(tensor: Any) -> Tensor:
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("parked")
    torch.manual_seed(3)
    qwen3().save_pretrained(folder / "policy")
    return run_ranks(2, in_two_ranks, folder, folder / "policy")


@pytest.mark.parametrize("name", RUNS)
def test_steps_with_all_of_it_away_between_calls_end_in_the_same_bits(found: list[dict[str, Any]], name: str) -> None:
    for rank in found:
        plain, away = rank[name][False], rank[name][True]
        assert plain["metrics"] == away["metrics"]
        assert torch.equal(plain["reference"], away["reference"])
        assert plain["weights"].keys() == away["weights"].keys()
        for part in ("weights", "loaded"):
            assert all(torch.equal(plain[part][key], away[part][key]) for key in plain[part]), part
            assert all(torch.equal(away["weights"][key], away[part][key]) for key in away[part]), part
        assert away["away"]
        assert not any(map(sum, away["away"])), "nothing of any of them is here between calls"
        assert away["at rest"] == [0, 0, 0]
