"""The random number generators of a process (python, numpy, torch, GPU), as JSON and back."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def random_state() -> dict[str, Any]:
    """The states of this process's random number generators (python, numpy, torch, GPU), as JSON."""
    version, python, gauss = random.getstate()
    name, keys, at, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(python), gauss],
        "numpy": [name, np.asarray(keys).tolist(), at, has_gauss, cached],
        "torch": _hex(torch.get_rng_state()),
        "cuda": _hex(torch.cuda.get_rng_state()) if torch.cuda.is_available() else None,
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restore what ``random_state`` returned."""
    version, python, gauss = state["python"]
    random.setstate((version, tuple(python), gauss))
    name, keys, at, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), at, has_gauss, cached))
    torch.set_rng_state(_unhex(state["torch"]))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_unhex(state["cuda"]))


def _hex(state: Tensor) -> str:
    return bytes(state.tolist()).hex()


def _unhex(text: str) -> Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)


def seed_all(seed: int) -> None:
    """Seed all of them."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def numbered_seed(seed: int, number: int) -> int:
    """A seed for each number of a policy, a step or a rank."""
    return seed * 1_000_003 + number


def seed_of(*numbers: int) -> int:
    """A seed of 62 bits for what these numbers name, so that there is room to add to it."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()) >> 2
