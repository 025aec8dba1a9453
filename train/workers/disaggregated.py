"""The actor and the rollout workers where generation is on a pool of its own: weights go over the wire between them."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch.distributed import TCPStore

from train.config.training import TrainConfig
from train.controller.dispatch import dispatch, to_all
from train.controller.rendezvous import find_store, open_store
from train.weight_sync.adapters import load_adapters, whole_adapters
from train.weight_sync.gather import load_whole, whole_tensors
from train.weight_sync.sync import WeightSync
from train.weight_sync.transfer import JoinedPools, WeightStream
from train.workers.actor import ActorWorker
from train.workers.rollout import RolloutWorker


@dataclass(frozen=True)
class Rendezvous:
    """The store through which the ``senders``, all ranks of the actor, and all ``receivers`` find each other."""

    address: str
    port: int
    senders: int
    receivers: int


class SendingActor(ActorWorker):
    """An actor whose weights are generated with elsewhere: each rank sends of its shards what engines need of them.

    With ``train.rollout.reshard: gather``, and where adapters alone go, rank 0 sends whole tensors, and the others have
    their shards gathered.
    """

    store: TCPStore | None = None
    weight_sync: WeightSync | None = None
    stream: WeightStream | None = None

    @dispatch(to_all)
    def open_rendezvous(self, receivers: int) -> Rendezvous | None:
        """Open the store on rank 0."""
        if self.rank > 0:
            return None
        address = os.environ["MASTER_ADDR"]
        self.store = open_store(address, self.config.step_timeout_s)
        return Rendezvous(address, self.store.port, self.world_size, receivers)

    def rest(self) -> None:
        super().rest()
        self.weight_sync = self.stream = self.store = None

    @dispatch(to_all)
    def send_weights(self, rendezvous: Rendezvous) -> None:
        """Send the weights as they are; the receivers must call ``receive_weights`` meanwhile."""
        if _sends_whole(self.config):
            self._send_whole(rendezvous)
            return
        if self.weight_sync is None:
            ranks, timeout_s = rendezvous.senders + rendezvous.receivers, self.config.step_timeout_s
            group = JoinedPools(self._store(rendezvous), self.rank, ranks, timeout_s, "slices")
            bucket = self.config.rollout.reshard_bucket_bytes
            self.weight_sync = WeightSync(self.model, None, group, bucket_bytes=bucket)
        self.weight_sync.run()

    @torch.no_grad()
    def _send_whole(self, rendezvous: Rendezvous) -> None:
        dtype = getattr(torch, self.config.dtype)
        adapters = self.config.generates_beside_adapters
        weights = whole_adapters(self.model, dtype) if adapters else whole_tensors(self.model, dtype)
        if self.rank > 0:
            for _ in weights:  # takes part in the collectives that gather each tensor
                pass
            return
        if self.stream is None:
            ranks, timeout_s = 1 + rendezvous.receivers, self.config.step_timeout_s
            self.stream = WeightStream(JoinedPools(self._store(rendezvous), 0, ranks, timeout_s, "tensors"))
        self.stream.send(weights, dtype, self.config.rollout.reshard_bucket_bytes // 2)

    def _store(self, rendezvous: Rendezvous) -> TCPStore:
        if self.store is None:
            self.store = find_store(rendezvous.address, rendezvous.port, self.config.step_timeout_s)
        return self.store


class ReceivingRollout(RolloutWorker):
    """A generation engine whose weights come from an actor elsewhere."""

    stream: WeightStream | None = None

    @dispatch(to_all)
    def receive_weights(self, rendezvous: Rendezvous, *, version: int) -> None:
        """Take over the weights that the actor sends; ``version`` as of ``load_actor_weights``."""
        if _sends_whole(self.config):
            if self.stream is None:
                self.stream = WeightStream(self._join(rendezvous, 1, "tensors"))
            (load_whole if self.adapter is None else load_adapters)(self.llm, self.stream.receive())
        else:
            if self.weight_sync is None:
                group = self._join(rendezvous, rendezvous.senders, "slices")
                bucket = self.config.rollout.reshard_bucket_bytes
                self.weight_sync = WeightSync(None, self.llm, group, bucket_bytes=bucket)
            self.weight_sync.run()
        self._begin(version)

    def rest(self) -> None:
        super().rest()
        self.stream = None

    def _join(self, rendezvous: Rendezvous, senders: int, name: str) -> JoinedPools:
        timeout_s = self.config.step_timeout_s
        store = find_store(rendezvous.address, rendezvous.port, timeout_s)
        return JoinedPools(store, senders + self.rank, senders + rendezvous.receivers, timeout_s, name)


def _sends_whole(config: TrainConfig) -> bool:
    """Whether whole tensors go from rank 0, not slices: every rank of an engine takes its part of whole adapters."""
    return config.generates_beside_adapters or config.rollout.reshard == "gather"
