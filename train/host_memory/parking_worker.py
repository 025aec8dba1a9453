"""A worker whose model waits in the host's memory while its device generates, until its next call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor, nn

from train.controller.worker import Worker
from train.host_memory.parked import Parked

_READS_NO_MODEL: Final = frozenset({"device", "usage", "saved"})


class ParkingWorker(Worker):
    """Its model, and an optimizer's state, can be sent away; whatever is called of it has them back first.

    ``model`` may be another worker's, which then parks it.
    """

    model: nn.Module
    rests = False
    """Whether its run has ended: it is there for what a later run takes over from it, and has no model."""

    def __init__(self, **peers: Any) -> None:
        super().__init__(**peers)
        self.weights, self.state = Parked(), Parked()
        self.compute_device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def weight_tensors(self) -> Iterable[Tensor]:
        """What of the model can be away: its parameters. Of another worker's model none."""
        return self.model.parameters()

    def state_tensors(self) -> Iterable[Tensor]:
        """What beside it: an optimizer's state, if there is one."""
        return ()

    def park(self, *, weights: bool = True) -> None:
        """Send them away; without ``weights``, what is beside the weights alone. Nothing is there of one that rests."""
        if self.rests:
            return
        self.state.park(self.state_tensors(), self.compute_device)
        if weights:
            self.weights.park(self.weight_tensors(), self.compute_device)

    def before_call(self, method: str) -> None:
        if method in _READS_NO_MODEL or not (self.weights.away or self.state.away):
            return
        for peer in self.peers.values():
            peer.make_room()
        self.restore()

    def restore(self, *, state: bool = True) -> None:
        """Have the weights back, and what is beside them."""
        self.weights.restore()
        if state:
            self.state.restore()

    def rest(self) -> None:
        self.rests = True
        self.weights.forget()
        self.state.forget()
