"""Workers that do little, for tests of what calls them."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from train.controller.dispatch import by_rank, dispatch, per_token, to_all, to_all_gathered
from train.controller.worker import Worker


class Small(Worker):
    """Says where it is, waits, fails."""

    def __init__(self, *, folder: Path, **peers: Any) -> None:
        super().__init__(**peers)
        self.folder, self.noted = folder, list[str]()

    @dispatch(to_all_gathered)
    def where(self, _: None) -> tuple[int, int]:
        return self.rank, os.getpid()

    @dispatch(to_all_gathered)
    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    @dispatch(to_all_gathered)
    def kept(self, numbers: int) -> int:
        """Bytes that stay with the process of 16 tensors of so many numbers, once they are dropped."""
        before = psutil.Process().memory_info().rss
        tensors = [torch.ones(numbers) for _ in range(16)]
        del tensors
        return int(psutil.Process().memory_info().rss - before)

    @dispatch(to_all)
    def who(self, word: str) -> str:
        return f"{word} from {self.rank}"

    @dispatch(by_rank)
    def doubled(self, numbers: list[int]) -> list[tuple[int, int]]:
        return [(2 * n, self.rank) for n in numbers]

    @dispatch(per_token)
    def tokens(self, batch: Any) -> torch.Tensor:
        return batch.tokens.float()

    @dispatch(to_all)
    def note(self, word: str) -> None:
        self.noted.append(word)

    @dispatch(to_all_gathered)
    def all_noted(self, _: None) -> list[str]:
        return self.noted

    @dispatch(to_all)
    def modules(self, name: str) -> bool:
        return name in sys.modules

    @dispatch(to_all)
    def wait_for(self, name: str) -> None:
        """Until the file is there."""
        deadline = time.monotonic() + 300
        while not (self.folder / name).exists():
            assert time.monotonic() < deadline, name
            time.sleep(0.01)

    @dispatch(to_all)
    def write(self, name: str) -> None:
        (self.folder / name).touch()

    @dispatch(to_all)
    def sum_or_fail(self, failing: int) -> float:
        """Rank ``failing`` raises; the others wait for it in a collective."""
        if self.rank == failing:
            raise ArithmeticError("this rank is broken")
        return self.sum_of_ranks()

    @dispatch(to_all)
    def sum_or_hang(self, hanging: int) -> float:
        """Rank ``hanging`` says so and stays away; the others wait for it in a collective."""
        if self.rank == hanging:
            (self.folder / "hanging").write_text(str(os.getpid()))
            time.sleep(60)
        return self.sum_of_ranks()

    def sum_of_ranks(self) -> float:
        total = torch.tensor(float(self.rank))
        torch.distributed.all_reduce(total)
        return float(total)
