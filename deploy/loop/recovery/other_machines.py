"""What the cycles of other machines have left in the object store of runs, so that this machine's go on with it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from deploy.config.root import Settings
from deploy.loop.records import CycleRecord, Stage, next_number, now, write
from feedback.datasets import count_given
from feedback.lake.tables import LakeError
from serve.policies.folder import PolicyError, StoreUnreachable
from train.checkpoint.folders import CheckpointError, checkpoints, step_of
from train.run.recovery.resume_settings import started
from train.run.recovery.run_store import Manifest, RunStore, taken
from train.run.shared_run import copy_id

_CYCLES_RUN: Final = re.compile(r"cycle-(\d{6,})(?:-(.+))?")


def take_over(settings: Settings, say: Callable[[str], None]) -> str | None:
    """Have a record of the last cycle that trained elsewhere, if it is later than all here: cycles share their numbers.

    Why no cycle can begin here now, if another machine is at work on that one, or on the last one of here: as this one
    is after a restart under another name of its host, until its claim has run out.

    It was killed, by that, if its run has a checkpoint and no machine is at work on it: then the next cycle goes on
    with it, where it would with one of this machine. What has no checkpoint is not taken up: whether it was judged is
    in that machine's ledger.

    Raises serve.policies.folder.PolicyError: the store can't be reached.
    """
    store = settings.run_store()
    if store is None:
        return None
    known, found = next_number(settings) - 1, dict[int, list[tuple[str, Manifest]]]()
    here = copy_id(settings.path(settings.train.runs))
    for one in store.all(say):
        if (match := _CYCLES_RUN.fullmatch(one.manifest.run)) is None or int(match[1]) < known:
            continue
        if int(match[1]) == known:
            claim = one.manifest.claim
            if claim is not None and claim.live and claim.copy_id != here:
                return str(taken(one.manifest.run, claim))
        else:
            found.setdefault(int(match[1]), []).append((match[2] or "train", one.manifest))
    if not found:
        return None
    last = max(found)
    for _, manifest in found[last]:
        if manifest.claim is not None and manifest.claim.live:
            return str(taken(manifest.run, manifest.claim))
    record = CycleRecord(number=last, started_at=now(), finished_at=now(), status="skipped")
    record.reason = "it trained on another machine"
    if len(found[last]) == 1 and (start := _fetch(settings, store, found[last][0][1], say)) is not None:
        [(label, manifest)] = found[last]
        killed = Stage(name=label, started_at=manifest.at, ok=False, killed=True, run=manifest.run)
        killed.error = "its machine is gone"
        record.status, record.run, record.incumbent, record.stages = "failed", manifest.run, start["parent"], [killed]
        record.reason += ", which is at work on it no more"
        record.rewards, record.feedback = _counts(settings, start["lake_versions"], say)
    write(settings, record)
    say(f"cycle {last}: {record.reason}")
    return None


def _fetch(
    settings: Settings, store: RunStore, manifest: Manifest, say: Callable[[str], None]
) -> dict[str, Any] | None:
    """Download a run, if it has a checkpoint that is not here; what it was started with."""
    if not manifest.checkpoints:
        return None
    folder = settings.path(settings.train.runs) / manifest.run
    if started(folder).get("id", manifest.id) != manifest.id:
        say(f"run {manifest.run} can't be taken over: {folder} has another run of this name")
        return None
    here = checkpoints(folder / "checkpoints")  # by a call that was killed before the record was written
    try:
        step = store.fetch_checkpoint(manifest, folder / "checkpoints", step_of(here[0]) if here else 0)
        if step is None and not here:
            return None
        store.fetch_records(manifest, folder)
        return store.start_of(manifest)
    except StoreUnreachable:
        raise
    except (PolicyError, CheckpointError) as error:
        say(f"run {manifest.run} can't be taken over: {error}")
        return None


def _counts(
    settings: Settings, versions: Mapping[str, int], say: Callable[[str], None]
) -> tuple[int | None, int | None]:
    """How many rewards and feedbacks the run had, so that the cycle after it doesn't take them for new ones."""
    lake = settings.lake()
    try:
        return lake.table("rewards", versions["rewards"]).count(), count_given(lake, versions=versions)
    except LakeError as error:
        say(f"how much it has learned from is not known: {error}")
        return None, None
