"""The actor and the rollout workers where generation is on a pool of its own: weights go over the wire between them."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch.distributed import TCPStore

from train.controller.dispatch import dispatch, to_all
from train.controller.rendezvous import find_store, open_store
from train.weight_sync.adapters import load_adapters, whole_adapters
from train.weight_sync.gather import load_whole, whole_tensors
from train.weight_sync.transfer import WeightStream
from train.workers.actor import ActorWorker
from train.workers.rollout import RolloutWorker


@dataclass(frozen=True)
class Rendezvous:
    """The store through which the actor's rank 0 and all ``receivers`` find each other."""

    address: str
    port: int
    receivers: int


class SendingActor(ActorWorker):
    """An actor whose weights are generated with elsewhere. Rank 0 sends; the others have their shards gathered."""

    store: TCPStore | None = None
    stream: WeightStream | None = None

    @dispatch(to_all)
    def open_rendezvous(self, receivers: int) -> Rendezvous | None:
        """Open the store on rank 0."""
        if self.rank > 0:
            return None
        address = os.environ["MASTER_ADDR"]
        self.store = open_store(address, self.config.step_timeout_s)
        return Rendezvous(address, self.store.port, receivers)

    @dispatch(to_all)
    def send_weights(self, rendezvous: Rendezvous) -> None:
        """Send the weights as they are; the receivers must call ``receive_weights`` meanwhile."""
        dtype = getattr(torch, self.config.dtype)
        whole = whole_adapters if self.config.generates_beside_adapters else whole_tensors
        weights = whole(self.model, dtype)
        with torch.no_grad():
            if self.rank == 0:
                if self.stream is None:
                    assert self.store is not None
                    self.stream = WeightStream(self.store, 0, rendezvous.receivers + 1, self.config.step_timeout_s)
                bucket = self.config.rollout.reshard_bucket_bytes // 2
                self.stream.send(weights, dtype, bucket)
            else:
                for _ in weights:  # takes part in the collectives that gather each tensor
                    pass


class ReceivingRollout(RolloutWorker):
    """A generation engine whose weights come from an actor elsewhere."""

    stream: WeightStream | None = None

    @dispatch(to_all)
    def receive_weights(self, rendezvous: Rendezvous, *, version: int) -> None:
        """Take over the weights that the actor sends; ``version`` as of ``load_actor_weights``."""
        if self.stream is None:
            timeout_s = self.config.step_timeout_s
            store = find_store(rendezvous.address, rendezvous.port, timeout_s)
            self.stream = WeightStream(store, self.rank + 1, rendezvous.receivers + 1, timeout_s)
        if self.adapter is None:
            load_whole(self.llm, self.stream.receive())
        else:
            load_adapters(self.llm, self.stream.receive())
        self._label(version)
