"""Feedback that is repeated, contradicted, sent to two replicas, and interrupted: each id is in the lake once."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from feedback_rows import thumb
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from feedback.config import JournalConfig, LakeConfig
from feedback.ingest.idempotency import SeenFeedback
from feedback.ingest.seal import seal
from feedback.journal.writer import Journal
from feedback.lake.tables import Lake

IDS = ("a", "b", "c")
REPLICAS = (0, 1)

replicas = st.sampled_from(REPLICAS)
said = st.tuples(st.sampled_from(IDS), st.sampled_from([0.0, 1.0]))
steps = st.one_of(
    st.tuples(st.just("send"), replicas, st.lists(said, min_size=1, max_size=4)),
    st.tuples(st.just("send"), replicas, st.lists(said, min_size=1, max_size=4)),
    st.tuples(st.sampled_from(["seal", "restart", "kill", "kill while sealing", "lose index"]), replicas, st.none()),
    st.tuples(st.just("kill while sending"), replicas, st.lists(said, min_size=1, max_size=2)),
)


@dataclass
class Replica:
    """A journal, its ledger, and what the replica told its clients."""

    lake: Lake
    home: Path
    name: str
    lives: count[int] = field(default_factory=count)
    acknowledged: dict[str, float] = field(default_factory=dict)  # id -> what was recorded as new
    unsure: dict[str, set[float]] = field(default_factory=lambda: defaultdict(set))  # sent, never answered

    def start(self, folder: Path | None = None) -> None:
        self.folder = folder or self.home / f"{self.name}-{next(self.lives)}"
        # Each commit closes its segment, so that a seal finds all that is acknowledged.
        self.journal = Journal(self.folder, JournalConfig(segment_bytes=1), self.name)
        self.journal.open()
        self.ledger = SeenFeedback(self.lake, self.folder)
        self.ledger.open()

    def stop(self) -> None:
        self.journal.close()
        self.ledger.close()

    def copy(self) -> Path:
        """The folder as a kill of the process leaves it."""
        folder = self.home / f"{self.name}-{next(self.lives)}"
        # The writer thread may rename a segment meanwhile: then it is copied at the next try.
        while True:
            try:
                shutil.copytree(self.folder, folder)
                return folder
            except (shutil.Error, FileNotFoundError):
                shutil.rmtree(folder, ignore_errors=True)

    async def send(self, votes: list[tuple[str, float]]) -> None:
        verdicts = await asyncio.gather(*(self.ledger.record(vote(*said), self.journal) for said in votes))
        for (feedback_id, value), verdict in zip(votes, verdicts, strict=True):
            mine = self.acknowledged.get(feedback_id)
            if verdict == "new":
                assert mine is None, f"{self.name} recorded {feedback_id} twice"
                self.acknowledged[feedback_id] = value
            elif mine is None:
                assert feedback_id in self.unsure or self.others_have(feedback_id)
            elif not self.others_have(feedback_id) and feedback_id not in self.unsure:
                assert (verdict == "same") == (value == mine)

    def others_have(self, feedback_id: str) -> bool:
        return any(feedback_id in other.acknowledged or feedback_id in other.unsure for other in self.others)

    others: tuple[Replica, ...] = ()


def vote(feedback_id: str, value: float):
    return thumb("r1", value, feedback_id=feedback_id)


async def take(step: str, replica: Replica, votes: list[tuple[str, float]] | None) -> None:
    if step == "send":
        await replica.send(votes or [])
    elif step == "seal":
        seal(replica.lake, replica.folder)
    elif step == "restart":
        replica.stop()
        replica.start(replica.folder)
    elif step == "kill":
        left = replica.copy()
        replica.stop()
        replica.start(left)
    elif step == "kill while sealing":  # after the commit, before anything else
        left = replica.copy()
        replica.stop()
        seal(replica.lake, replica.folder)
        replica.start(left)
    elif step == "kill while sending":
        sent = [asyncio.create_task(replica.ledger.record(vote(*said), replica.journal)) for said in votes or []]
        await asyncio.sleep(0)
        left = replica.copy()
        await asyncio.gather(*sent)
        replica.stop()
        for feedback_id, value in votes or []:
            replica.unsure[feedback_id].add(value)
        replica.start(left)
    elif step == "lose index":
        replica.stop()
        shutil.rmtree(replica.folder / "ids", ignore_errors=True)
        replica.start(replica.folder)


async def live(home: Path, taken: list[tuple[str, int, list[tuple[str, float]] | None]]) -> None:
    lake = Lake(str(home / "lake"), LakeConfig())
    lake.create()
    both = [Replica(lake, home, f"replica-{number}") for number in REPLICAS]
    for replica, other in zip(both, reversed(both), strict=True):
        replica.others = (other,)
        replica.start()
    try:
        for step, number, votes in taken:
            await take(step, both[number], votes)
        for replica in (*both, *both):  # the first takes in what the second sealed
            replica.journal.close()
            seal(lake, replica.folder)
        with lake.connect() as connection:
            rows = connection.execute("SELECT feedback_id, value FROM feedback").fetchall()
        there = dict(rows)
        assert len(rows) == len(there), "an id is there twice"
        acknowledged = {feedback_id for replica in both for feedback_id in replica.acknowledged}
        unsure = {feedback_id for replica in both for feedback_id in replica.unsure}
        assert acknowledged <= there.keys() <= acknowledged | unsure
        for feedback_id, value in rows:
            answered = {r.acknowledged[feedback_id] for r in both if feedback_id in r.acknowledged}
            assert value in answered.union(*(r.unsure.get(feedback_id, set()) for r in both))
            for replica in both:
                replica.ledger._sealed.reopen()
                assert await replica.ledger.check(vote(feedback_id, value)) == "same"
                assert await replica.ledger.check(vote(feedback_id, 1 - value)) == "conflict"
    finally:
        for replica in both:
            replica.stop()


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(steps, max_size=12))
def test_each_acknowledged_id_is_in_the_lake_once_with_what_was_acknowledged_first(taken):
    with tempfile.TemporaryDirectory() as home:
        asyncio.run(live(Path(home), taken))
