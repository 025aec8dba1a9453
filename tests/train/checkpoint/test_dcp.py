"""The parts of checkpoints: written in the background by the ranks, made whole, loaded on any number of ranks."""

from __future__ import annotations

import resource
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from loadtests.server import free_port
from tests.train.ranks import start_ranks
from train.checkpoint.dcp import Saved, Saver, load
from train.checkpoint.folders import CheckpointError, aside_of, begin_aside, checkpoints, make_whole, name_of, torn
from train.checkpoint.random_state import seed_all

WHOLE = StateDictOptions(full_state_dict=True)
PART = "actor"
TIMEOUT_S = 200  # a loaded machine is slow to start the other rank


class Small(nn.Module):
    """Rows that two ranks can't share evenly, a tied weight, and a frozen one."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, width)
        self.inner = nn.Linear(width, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = nn.functional.dropout(self.embedding(tokens), 0.5)
        logits: Tensor = self.head(self.frozen(self.inner(hidden)))
        return logits


class Training:
    """A model in training on the ranks of the current group."""

    def __init__(self, width: int = 8, seed: int = 0) -> None:
        torch.manual_seed(seed)
        model = Small(width)
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        fully_shard(model.inner, mesh=mesh)
        fully_shard(model, mesh=mesh)
        self.model: nn.Module = model
        self.optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (step + 1))

    def step(self) -> None:
        self.model(torch.arange(7)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()

    def state(self) -> dict[str, Tensor]:
        """Everything that a checkpoint must bring back, whole, by name; every rank must call it."""
        weights, optimizer = get_state_dict(self.model, self.optimizer, options=WHOLE)
        moments = {f"{name}.{key}": value for name, state in optimizer["state"].items() for key, value in state.items()}
        return {
            **{name: value.clone() for name, value in weights.items() if not name.startswith("frozen")},
            **{name: value.clone() for name, value in moments.items()},
            "rate": torch.tensor(self.schedule.get_last_lr()),
            "steps": torch.tensor(self.schedule.last_epoch),
        }

    def save(self, saver: Saver, folder: Path, step: int) -> None:
        """Start a save of one part, as rank 0, being the driver too, would."""
        if torch.distributed.get_rank() == 0:
            begin_aside(folder, step, f'{{"of": {step}}}')
        torch.distributed.barrier()
        saver.start(aside_of(folder, step) / PART, step, self.model, self.optimizer, self.schedule)

    def saved(self, saver: Saver, folder: Path) -> Saved:
        """How the save ended; it is made whole if it ended well."""
        [ended] = saver.ended(wait=True)
        if torch.distributed.get_rank() == 0 and ended.error is None:
            make_whole(folder, ended.step)
        torch.distributed.barrier()
        return ended


def in_rank(rank: int, folder: Path, ports: list[int], results: Any) -> None:
    """One of two processes: as two ranks, then the first alone, then as two again."""
    torch.set_num_threads(1)
    seen: dict[str, Any] = {}

    def join(ranks: int) -> None:
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{ports.pop(0)}",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=TIMEOUT_S),
        )

    join(2)
    training, saver = Training(), Saver(TIMEOUT_S)
    training.step()
    training.step()
    seen["saved on 2"] = training.state()
    seed_all(100 + rank)
    training.save(saver, folder / "a", 2)
    seen["under way"] = [path.name for path in checkpoints(folder / "a")]
    drawn = torch.rand(3)
    training.step()  # goes on while it is written
    seen["went on"] = training.state()
    ended = training.saved(saver, folder / "a")
    seen["ended"] = (ended.step, ended.error)
    checkpoint = folder / "a" / name_of(2)
    load(checkpoint, PART, training.model, training.optimizer, training.schedule)
    seen["random"] = torch.equal(torch.rand(3), drawn)
    seen["loaded on 2"] = training.state()
    training.step()
    seen["continued on 2"] = training.state()

    (folder / "file").touch()
    saver.start(folder / "file" / PART, 1, training.model, training.optimizer, training.schedule)  # no folder
    seen["failed"] = saver.ended(wait=True)[0].error
    wide = Training(width=128)
    wide.step()
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))  # its shard is larger
    wide.save(saver, folder / "half", 1)
    seen["failed half-way"] = wide.saved(saver, folder / "half").error
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    for step in (3, 4, 5):
        training.save(saver, folder / "many", step)
    seen["many"] = [(saved.step, saved.error) for saved in saver.ended(wait=True)]
    wrong = Training(width=16)
    seen["wrong shapes"] = refusal(checkpoint, wrong)
    torch.distributed.barrier()
    if rank == 0:
        shutil.copytree(checkpoint, folder / "torn" / checkpoint.name)
        (folder / "torn" / checkpoint.name / PART / "__1_0.distcp").unlink()
    torch.distributed.barrier()
    seen["torn"] = refusal(folder / "torn" / checkpoint.name, training)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()

    port_of_two = ports.pop()
    if rank == 0:
        join(1)
        alone, saver = Training(seed=1), Saver(TIMEOUT_S)
        load(checkpoint, PART, alone.model, alone.optimizer, alone.schedule)
        seen["loaded on 1"] = alone.state()
        alone.save(saver, folder / "b", 2)
        seen["ended on 1"] = alone.saved(saver, folder / "b").error
        torch.distributed.destroy_process_group()
    ports[:] = [port_of_two]
    join(2)
    again = Training(seed=2)
    load(folder / "b" / name_of(2), PART, again.model, again.optimizer, again.schedule)
    seen["loaded on 2 from 1"] = again.state()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    if rank == 0:
        torch.save(seen, results)


def refusal(folder: Path, training: Training) -> str:
    try:
        load(folder, PART, training.model, training.optimizer, training.schedule)
    except CheckpointError as error:
        return str(error)
    return "it was not refused"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def seen(folder: Path) -> dict[str, Any]:
    """What rank 0 saw."""
    file = folder / "seen.pt"
    start_ranks(in_rank, (folder, [free_port() for _ in range(3)], file), 2)
    return dict(torch.load(file, weights_only=False))


def test_what_is_saved_is_the_state_when_it_was_asked_for_and_not_what_came_after(seen: dict[str, Any]) -> None:
    same(seen["loaded on 2"], seen["saved on 2"])
    assert not torch.equal(seen["went on"]["inner.weight"], seen["saved on 2"]["inner.weight"])
    assert seen["random"], "the random state of the rank must come back"


def test_going_on_from_a_checkpoint_is_going_on_bit_for_bit(seen: dict[str, Any]) -> None:
    assert seen["random"]
    assert seen["continued on 2"]["steps"] == 3
    same(seen["continued on 2"], seen["went on"])


def test_it_loads_on_one_rank_and_on_two_again(seen: dict[str, Any]) -> None:
    same(seen["loaded on 1"], seen["saved on 2"])
    assert seen["ended on 1"] is None
    same(seen["loaded on 2 from 1"], seen["saved on 2"])


def test_a_finished_checkpoint_is_whole_and_names_what_is_in_it(seen: dict[str, Any], folder: Path) -> None:
    assert seen["ended"] == (2, None)
    assert torn(folder / "a" / name_of(2)) is None
    assert sorted(path.name for path in (folder / "a" / name_of(2)).iterdir()) == [PART, "driver.json", "whole.json"]
    names = sorted(path.name for path in (folder / "a" / name_of(2) / PART).iterdir())
    assert names == [".metadata", "__0_0.distcp", "__1_0.distcp", "rank-0000.json", "rank-0001.json"]
    assert (folder / "a" / name_of(2) / "driver.json").read_text() == '{"of": 2}'


def test_a_save_that_fails_says_why_on_every_rank(seen: dict[str, Any]) -> None:
    assert "rank 0: NotADirectoryError" in seen["failed"]


def test_a_save_that_fails_half_way_on_one_rank_is_never_whole_and_the_next_one_works(
    seen: dict[str, Any], folder: Path
) -> None:
    assert "rank 1: " in seen["failed half-way"]
    assert "rank 0" not in seen["failed half-way"]
    assert checkpoints(folder / "half") == []
    assert seen["many"] == [(3, None), (4, None), (5, None)]


def test_a_checkpoint_of_other_shapes_is_refused(seen: dict[str, Any]) -> None:
    assert "does not fit the model in training" in seen["wrong shapes"]
    assert "train.optimizer" in seen["wrong shapes"]


def test_a_torn_checkpoint_is_refused_with_the_file_that_is_missing(seen: dict[str, Any]) -> None:
    assert "is torn: actor/__1_0.distcp is missing" in seen["torn"]


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name
